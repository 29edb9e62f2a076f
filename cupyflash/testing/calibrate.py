"""Calibrate the bound: find the CPU kernels' worst ratios and false alarms on random problems.

``python -m cupyflash.testing.calibrate`` prints, for each output and type, the largest ratio of
error to bound that a search found. A ratio above 1 is a false alarm (or a fault of a kernel); far
below 1, the bound would be too slack to be useful.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash import api

from ..arrays.dtypes import FLOATS
from ..files import write_text
from .cases import Problem
from .options import float_type
from .properties import Property
from .subject import Subject
from .verification import run

CHUNK = 500
CLIMBS = 10  # one search in this many climbs, which takes hypothesis longer than the problems
OUTPUTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")


def _both(s: Subject, p: Problem) -> None:
    """All outputs are within their bounds."""
    rows = s.attend_problem(p)
    bound = s.bound(p.q, p.k, p.v, **p.options)
    s.judge("out", rows.out, *bound.out)
    s.judge("lse", rows.lse, *bound.lse)
    if not np.isfinite(rows.out.astype(np.float32)).all():
        return  # the backward reads what float16 made of O
    ours = s.gradients_problem(p, rows)
    limits = s.backward_bound(p.do, p.q, p.k, p.v, dlse=p.dlse, **p.options)
    for name, made in ours._asdict().items():
        if made is not None:
            s.judge(name, made, *getattr(limits, name))


def calibrate(
    dtypes: Sequence[str], examples: int, seed: int = 0, seconds: float = float("inf")
) -> dict[str, Any]:
    """Search for the largest ratios of error to bound.

    Parameters
    ----------
    dtypes : sequence of str
        Types of q, k and v.
    examples : int
        Problems for each type, in searches of 500 with seeds of their own.
    seed : int
        The first seed.
    seconds : float
        Time for each type; no search begins later.

    Returns
    -------
    dict
        For each dtype: problems, seconds, alarms (lines that make the problems) and worst, by
        output.
    """
    prop = Property("calibration", "", _both, frozenset({"backward"}), draws="any")
    subject = Subject(api.attention, api.attention_backward, tiles=(128, 64))
    found: dict[str, Any] = {
        name: {"problems": 0, "seconds": 0.0, "alarms": [], "worst": dict.fromkeys(OUTPUTS, 0.0)}
        for name in dtypes
    }
    for round_ in range(-(-examples // CHUNK)):
        for name, row in found.items():
            if row["seconds"] > seconds:
                continue
            dtype: np.dtype[Any] = float_type(name)
            number = min(CHUNK, examples - round_ * CHUNK)
            climb = round_ % CLIMBS == CLIMBS - 1
            result = run(prop, subject, [dtype], number, seed + round_, shrink=False, climb=climb)
            row["problems"] += result.examples
            row["seconds"] += result.seconds
            for each in result.worst:
                row["worst"][each.output] = max(row["worst"][each.output], each.ratio)
            row["alarms"] += [f"{x.message}: {x.problem}" for x in result.failures]
            line = f"{name}: {row['problems']} problems, {len(row['alarms'])} alarms"
            print(line, file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Print the table; exit status 1 if there was a false alarm."""
    parser = argparse.ArgumentParser(description="Calibrate the rounding-error bound.")
    parser.add_argument("--examples", type=int, default=10_000, help="problems for each type")
    parser.add_argument("--dtypes", nargs="+", choices=FLOATS, default=FLOATS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each type")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args()
    found = calibrate(options.dtypes, options.examples, options.seed, options.seconds)
    print(f"{'dtype':<9}  problems  alarms  " + "  ".join(f"{x:>6}" for x in OUTPUTS))
    for name, row in found.items():
        numbers = "  ".join(f"{row['worst'][x]:>6.3f}" for x in OUTPUTS)
        print(f"{name:<9}  {row['problems']:>8}  {len(row['alarms']):>6}  {numbers}")
        for alarm in row["alarms"]:
            print(f"  {alarm}")
    if options.json:
        write_text(options.json, json.dumps(found, indent=1) + "\n")
    return int(any(row["alarms"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
