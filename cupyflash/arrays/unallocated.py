"""Arrays that only look as if they had elements, for what depends on shapes and strides alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .device_arrays import memory_order

ALIGNMENT = 256  # bytes, of memory that CuPy allocates


def unallocated(
    shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None = None
) -> Any:
    """Return an array that begins where memory begins, in C order unless it is given strides.

    Nothing may read its elements.
    """
    memory = np.zeros(2 * ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    one = memory[first : first + dtype.itemsize].view(dtype)
    in_order = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    steps = in_order if strides is None else strides
    return np.lib.stride_tricks.as_strided(one, shape, steps, writeable=False)


def unallocated_like(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> Any:
    """Return such an array, as `device_arrays.empty_like` lays it out."""
    order = memory_order(array, shape)
    made = unallocated(tuple(shape[axis] for axis in order), dtype or array.dtype)
    return made.transpose([order.index(axis) for axis in range(len(shape))])
