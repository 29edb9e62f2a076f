"""Sums and roundings of whole arrays, by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from .float_modes import own_arithmetic

Array = np.ndarray[Any, Any]


@own_arithmetic
def add(computed: Array, to: Array) -> None:
    """Add an array to another one."""
    to += computed


@own_arithmetic
def store(computed: Array, to: Array) -> None:
    """Write an array to another one, rounded to its type."""
    np.copyto(to, computed, casting="unsafe")  # without an array in between


@own_arithmetic
def looked_up(table: Array, codes: Array, scale: Array) -> Array:
    """Return what codes stand for in a table, times their scales."""
    numbers: Array = table[codes]
    numbers *= scale
    return numbers
