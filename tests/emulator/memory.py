"""Memory of a device that is memory of the host, as CuPy gives it to launches, and maps of it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from cupyflash.gpu.tma import TensorMap
from cupyflash.problem.call import Array


def encode(made: TensorMap, address: int) -> bytes:
    """Return a map as warpgroups.cpp and the twin of ptx/tma.cuh read it."""
    words = (address, *made.shape, *made.strides, made.rows)
    return struct.pack("=16Q", *words, *(0,) * (16 - len(words)))


class Memory:
    """Bytes of host memory, as CuPy's MemoryPointer points to them."""

    def __init__(self, held: Array) -> None:
        self._held, self.ptr = held, held.ctypes.data

    def view(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array in C order that begins here."""
        return np.ndarray(shape, dtype, self._held.data)


def poisoned_like(array: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
    """Memory of a pool, in C order."""
    return poisoned(shape, array.dtype if dtype is None else dtype)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory of a pool holds anything: here NaN."""
    made = np.empty(shape, dtype)
    made.reshape(-1).view(np.uint8).fill(0xFF)
    return made
