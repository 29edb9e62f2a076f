"""Whole programs in NumPy, with attention by NumPy's lines or by this package: suite `programs`.

The programs are ``numpy_generation.py`` and ``numpy_training.py`` of the folder ``examples`` of a
clone.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .contenders import RefusalError
from .measure import Meter, Work
from .tasks import OURS, STANDARD, TaskSuite, Works

FOLDER = Path(__file__).parents[2] / "examples"
ATTENTION = {OURS: "cupyflash", STANDARD: "numpy"}  # as the programs call it
COMPARED = 32  # tokens or steps at most; later ones may follow another rounding
TOKENS, STEPS = (50, 250, 2000), 20


@functools.cache
def program(name: str) -> Any:
    """Return a program of the folder as a module."""
    if not (FOLDER / f"{name}.py").is_file():
        raise RefusalError(
            f"the program {name}.py is not in {FOLDER}: clone the repository, install it by "
            "`pip install -e .` and run this again"
        )
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def generation(meter: Meter, dtype: str, tokens: int) -> Works:  # noqa: ARG001, of every program
    """Generate tokens with a small language model and its cache."""
    module = program("numpy_generation")
    setting = module.Setting()
    weights = _weights(setting)

    def work(attention: str) -> Work:
        def run() -> Any:
            steps = module.generate(weights, setting, tokens, module.ATTENTION[attention])
            logits = [x for n, (_, x) in enumerate(steps) if n < COMPARED]
            return np.array(logits)

        return run

    works = {name: functools.partial(work, word) for name, word in ATTENTION.items()}
    return Works(works, lambda found: [found], tokens)


@functools.lru_cache(maxsize=1)
def _weights(setting: Any) -> Any:
    return program("numpy_generation").random_weights(setting, seed=0)


@functools.cache
def _text() -> Any:
    module = program("numpy_training")
    return module.numbered(module.standard_text())


def training(meter: Meter, dtype: str, steps: int) -> Works:  # noqa: ARG001, of every program
    """Train a character model, whose weights begin anew at each run."""
    module = program("numpy_training")
    setting, (text, characters) = module.Setting(), _text()
    before = module.random_weights(setting, characters, 0, dtype)

    def work(attention: str) -> Work:
        def run() -> Any:
            weights = {name: w.copy() for name, w in before.items()}
            losses = module.train(text, weights, setting, steps, module.ATTENTION[attention])
            return np.array(list(losses))

        return run

    works = {name: functools.partial(work, word) for name, word in ATTENTION.items()}
    return Works(works, lambda found: [found[:COMPARED]], steps)


_MAKERS = {
    **{f"generation, {n} tokens": functools.partial(generation, tokens=n) for n in TOKENS},
    "training, rows of 64": functools.partial(training, steps=STEPS),
}
SUITE = TaskSuite(
    "whole NumPy programs: a generation of 50, 250 and 2000 tokens, and a training",
    "programs",
    _MAKERS,
    "float32",
    {name: "step" if name.startswith("training") else "token" for name in _MAKERS},
    (OURS, STANDARD),
)
