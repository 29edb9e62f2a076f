"""What attention does in every type of models of transformers: tests/data/model_outcomes.csv.

tests/frontend/test_torch_models.py holds the table true. Write it again after a new release of
transformers: what is wrong is printed, and must be mended or refused.

    python tests/tools/model_table.py               write it anew: look at what git shows of it
    python tests/tools/model_table.py bloom llama   print it for some types, and write nothing
"""

from __future__ import annotations

import csv
import logging
import sys
import warnings
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "helpers"))

import model_outcomes
import tiny_models
import transformers


def main(chosen: list[str]) -> None:
    """Write the table, or print a part of it."""
    warnings.simplefilter("ignore")
    logging.disable()
    found = {}
    for model_type, choice in tiny_models.choices().items():
        if chosen and model_type not in chosen:
            continue
        found[model_type] = made = model_outcomes.outcome(model_type, choice)
        if chosen or made.word == "wrong":
            print(model_type, *made, flush=True)
    if chosen:
        return
    with model_outcomes.TABLE.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("transformers", "", transformers.__version__, ""))
        rows.writerows((model_type, *made) for model_type, made in sorted(found.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
