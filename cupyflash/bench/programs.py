"""Whole programs, with attention by their own lines or by this package: suite `programs`.

The programs are in the folder ``examples`` of a clone: those in NumPy, and one in PyTorch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .contenders import RefusalError
from .measure import Meter, Work
from .tasks import OURS, SDPA, STANDARD, Maker, TaskSuite, Works, torch_of

FOLDER = Path(__file__).parents[2] / "examples"
ATTENTION = {OURS: "cupyflash", STANDARD: "numpy"}  # as the programs call it
IN_TORCH = {OURS: "cupyflash", STANDARD: "lines", SDPA: "sdpa"}
COMPARED = 32  # tokens or steps at most; later ones may follow another rounding
TOKENS, STEPS = (50, 250, 2000), 20
PROMPTS, POSITIONS = (10, 50), (32, 64, 128)
WRITTEN, IMAGES = 50, 2


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


def by_names(names: dict[str, str], work: Callable[[str], Work]) -> dict[str, Callable[[], Work]]:
    """Return what makes the work of each contender, given what a program calls its attention."""
    return {name: functools.partial(work, word) for name, word in names.items()}


def generation(meter: Meter, dtype: str, tokens: int) -> Works:  # noqa: ARG001, of every program
    """Generate tokens with a small language model and its cache."""
    module = program("numpy_generation")
    setting = module.Setting()
    weights = _weights("numpy_generation", setting)

    def work(attention: str) -> Work:
        def run() -> Any:
            steps = module.generate(weights, setting, tokens, module.ATTENTION[attention])
            logits = [x for n, (_, x) in enumerate(steps) if n < COMPARED]
            return np.array(logits)

        return run

    return Works(by_names(ATTENTION, work), lambda found: [found], tokens)


@functools.lru_cache(maxsize=1)
def _weights(name: str, setting: Any) -> Any:
    return program(name).random_weights(setting, seed=0)


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

    return Works(by_names(ATTENTION, work), lambda found: [found[:COMPARED]], steps)


def transcription(meter: Meter, dtype: str, tokens: int) -> Works:  # noqa: ARG001, of every program
    """Write a recording down with Whisper's decoder, token by token."""
    module = program("numpy_whisper")
    setting = module.Setting()
    weights = _weights("numpy_whisper", setting)
    recorded = module.keys_of(module.random_recording(setting, seed=0), weights, setting)

    def work(attention: str) -> Work:
        attend = module.ATTENTION[attention]

        def run() -> Any:
            steps = module.transcribe(recorded, weights, setting, tokens, attend)
            return np.array([x for n, (_, x) in enumerate(steps) if n < COMPARED])

        return run

    return Works(by_names(ATTENTION, work), lambda found: [found], tokens)


def prompt(meter: Meter, dtype: str, tokens: int) -> Works:  # noqa: ARG001, of every program
    """Read a prompt with GPT-2."""
    module = program("numpy_gpt2")
    setting = module.Setting()
    weights = _weights("numpy_gpt2", setting)
    numbers = module.random_prompt(tokens, setting, seed=0)

    def work(attention: str) -> Work:
        return lambda: module.next_logits(numbers, weights, setting, module.ATTENTION[attention])

    return Works(by_names(ATTENTION, work), lambda found: [found])


def triangle(meter: Meter, dtype: str, positions: int) -> Works:  # noqa: ARG001, of every program
    """Change the pairs of so many positions by layers of triangle attention."""
    module = program("numpy_triangle")
    setting = module.Setting()
    weights = _weights("numpy_triangle", setting)
    pairs = module.random_pairs(positions, setting, seed=0)

    def work(attention: str) -> Work:
        return lambda: module.changed_pairs(pairs, weights, setting, module.ATTENTION[attention])

    return Works(by_names(ATTENTION, work), lambda found: [found], setting.layers)


def images(meter: Meter, dtype: str, train: bool) -> Works:  # noqa: ARG001, of every program
    """Classify a batch of images with a Swin transformer in PyTorch, or train it on them."""
    torch = torch_of()
    module = program("torch_swin")
    setting = module.Setting()
    batch, classes = module.random_images(setting, IMAGES)

    def work(attention: str) -> Work:
        model = module.model_of(setting, attention)
        if not train:

            def run() -> Any:
                with torch.inference_mode():
                    return (model(batch),)

            return run
        optimizer = module.optimizer_of(model)

        def step() -> Any:
            """The first one is compared: later ones go on from the weights before."""
            module.train(model, optimizer, batch, classes, 1)
            return module.some_gradients(model)

        return step

    return Works(by_names(IN_TORCH, work), lambda found: [x.detach().numpy() for x in found])


def _makers() -> dict[str, tuple[Maker, str]]:
    """Return what makes each task, and what its time is of."""
    part = functools.partial
    return {
        **{f"generation, {n} tokens": (part(generation, tokens=n), "token") for n in TOKENS},
        "training, rows of 64": (part(training, steps=STEPS), "step"),
        f"Whisper's decoder, {WRITTEN} tokens": (part(transcription, tokens=WRITTEN), "token"),
        **{f"GPT-2, a prompt of {n} tokens": (part(prompt, tokens=n), "prompt") for n in PROMPTS},
        **{
            f"triangle attention, {n} positions": (part(triangle, positions=n), "layer")
            for n in POSITIONS
        },
        f"Swin-T, {IMAGES} images": (part(images, train=False), "batch"),
        f"Swin-T, {IMAGES} images, training": (part(images, train=True), "step"),
    }


SUITE = TaskSuite(
    "whole programs in NumPy and PyTorch, with attention by their own lines and by cupyflash",
    "programs",
    {name: maker for name, (maker, _) in _makers().items()},
    "float32",
    {name: each for name, (_, each) in _makers().items()},
    (OURS, STANDARD, SDPA),
)
