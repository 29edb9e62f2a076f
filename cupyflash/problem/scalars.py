"""Checks of the numbers and words among a call's options."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays.device_arrays import is_device_array
from ..arrays.integers import integer
from ..errors import ArgumentError, ArgumentTypeError
from . import device_args

DRAWS = 2**15  # equally likely numbers of a pair, by which dropout decides: as the generator's


def _number(value: Any, name: str) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise ArgumentTypeError(
            f"{name}: got {type(value).__name__}; expected a number, an int or a float."
        )
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(
            f"{name}: got an integer larger than every float; expected a smaller one."
        ) from None


def scale(value: Any, d: int, accumulator: np.dtype[Any]) -> float:
    """Return the factor of q k."""
    if value is None:
        return 1.0 / math.sqrt(d)
    factor = _number(value, "scale")
    if not abs(factor) <= float(np.finfo(accumulator).max):
        raise ArgumentError(
            f"scale: got {factor}; expected a finite number within the range of {accumulator}, or "
            "None for 1 / sqrt(D)."
        )
    return factor


def dropout(value: Any, its_seed: Any) -> float:
    """Return the probability of dropping a pair."""
    p = _number(value, "dropout")
    if not 0 <= p < 1:
        raise ArgumentError(f"dropout: got {p}; expected a probability, 0 or more and less than 1.")
    if drop_below(p) == DRAWS:
        raise ArgumentError(
            f"dropout: got {p!r}, which rounds to 1 in 15 bits; expected less than 1 - 2**-16."
        )
    if p and its_seed is None:
        raise ArgumentError(
            f"dropout: got {p} without a seed; expected seed=number as well. The same seed "
            "drops the same pairs, in the backward, too."
        )
    return p


def drop_below(p: float) -> int:
    """Return the number, of `DRAWS` equally likely ones, below which a pair is dropped."""
    return round(p * DRAWS)


def seed(value: Any) -> Any:
    """Return the key of the generator, a number or an array in device memory."""
    if value is None:
        return 0
    if is_device_array(value):
        return device_args.seed(value)
    number = integer(value)
    if number is None:
        came = type(value[()] if isinstance(value, np.ndarray) else value).__name__
        raise ArgumentTypeError(f"seed: got {came}; expected an integer, or a 0-d uint64 array.")
    if not 0 <= number < 2**64:
        raise ArgumentError(
            f"seed: got {value}; expected 0 to 2**64 - 1, for instance seed % 2**64."
        )
    return number


def precision(value: Any, dtype: np.dtype[Any]) -> str | None:
    """Return how float32 may be multiplied, or None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ArgumentTypeError(
            f'precision: got {type(value).__name__}; expected "tf32x3", or None for full {dtype}.'
        )
    if value != "tf32x3":
        raise ArgumentError(
            f'precision: got {value!r}; expected "tf32x3", or None for full {dtype}.'
        )
    if dtype != np.float32:
        raise ArgumentError(
            f'precision: got "tf32x3" with arrays of {dtype}; expected float32 arrays, or None.'
        )
    return value
