"""Families of arrays: elements drawn from a seed. Each family is for one kind of fault.

====================  =============================================================================
normal                standard normal elements
eighths               whole multiples of 1/8 up to 1.5: sums and shifts of them are exact
tiny                  normal * 1e-5, so that weights are equal and gradients nearly vanish
constant rows         every row of an array is one number
one-hot keys          keys are 4 times a unit vector
offset                values near 10 and keys near 1, so that small relative errors are large ones
negative scores       every logit far below 0: a maximum that starts at 0 underflows
near overflow         values of up to 65504, float16's largest number
huge logits           q and k * 1000: softmax is a choice, and rows may be ill-conditioned
====================  =============================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, Array]
Generator = np.random.Generator


def _normal(rng: Generator, shapes: Shapes) -> Arrays:
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def _eighths(rng: Generator, shapes: Shapes) -> Arrays:
    return {name: rng.integers(-12, 13, shape) / 8 for name, shape in shapes.items()}


def _tiny(rng: Generator, shapes: Shapes) -> Arrays:
    return {name: x * 1e-5 for name, x in _normal(rng, shapes).items()}


def _constant_rows(rng: Generator, shapes: Shapes) -> Arrays:
    drawn = {name: rng.standard_normal((*shape[:-1], 1)) for name, shape in shapes.items()}
    return {name: np.broadcast_to(x, shapes[name]) for name, x in drawn.items()}


def _one_hot(rng: Generator, shapes: Shapes) -> Arrays:
    arrays = _normal(rng, shapes)
    hot = rng.integers(0, shapes["k"][-1], shapes["k"][:-1])
    return arrays | {"k": 4.0 * np.eye(shapes["k"][-1])[hot]}


def _offset(rng: Generator, shapes: Shapes) -> Arrays:
    arrays = _normal(rng, shapes)
    return arrays | {"v": arrays["v"] + 10, "k": arrays["k"] + 1}


def _negative(rng: Generator, shapes: Shapes) -> Arrays:
    arrays = _normal(rng, shapes)
    return arrays | {"q": np.abs(arrays["q"]) + 0.5, "k": -50 * np.abs(arrays["k"]) - 50}


def _near_overflow(rng: Generator, shapes: Shapes) -> Arrays:
    arrays = _normal(rng, shapes)
    large = 65504.0 * np.sign(arrays["v"]) * rng.uniform(0.9, 1, shapes["v"])
    return arrays | {"v": large, "do": arrays["do"] * 1e-3}


def _huge(rng: Generator, shapes: Shapes) -> Arrays:
    arrays = _normal(rng, shapes)
    return arrays | {"q": arrays["q"] * 1e3, "k": arrays["k"] * 1e3}


FAMILIES = {
    "normal": _normal,
    "tiny": _tiny,
    "constant rows": _constant_rows,
    "one-hot keys": _one_hot,
    "offset": _offset,
    "negative scores": _negative,
    "near overflow": _near_overflow,
    "huge logits": _huge,
    "eighths": _eighths,
}
