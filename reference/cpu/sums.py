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


def summed_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Sum an array over the axes along which `shape` was broadcast to it."""
    if array.shape == shape:
        return array
    extra = array.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        axis + extra
        for axis, (own, want) in enumerate(zip(array.shape[extra:], shape, strict=True))
        if own != want
    )
    total: Array = array.sum(axis=axes, dtype=array.dtype, keepdims=True).reshape(shape)
    return total
