"""Keys and values, or their gradients, as one message of bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import device_arrays
from ..arrays.device_arrays import is_device_array
from ..pieces.parts import part
from ..pieces.place import Place
from ..problem.call import Array
from .runs import Runs

Two = tuple[Array, Array]  # k and v, or dk and dv


class Memory:
    """Memory for a message.

    Attributes
    ----------
    content : array of uint8
        The message.
    arrays : tuple of 2 array
        The same bytes as two arrays.
    """

    def __init__(self, place: Place, like: Two, rows: int, dtype: np.dtype[Any]) -> None:
        shapes = [(*x.shape[:-2], rows, x.shape[-1]) for x in like]
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        self.content = place.empty((sum(sizes),), np.dtype(np.uint8))
        first, second = (
            viewed(self.content, begin, shape, dtype)
            for begin, shape in zip((0, sizes[0]), shapes, strict=True)
        )
        self.arrays: Two = first, second


def packed(place: Place, arrays: Two, held: Runs, wanted: Runs, dtype: np.dtype[Any]) -> Memory:
    """Return a message with the rows of some positions, of arrays that hold others, too."""
    memory = Memory(place, arrays, wanted.count, dtype)
    for run in wanted:
        for source, target in zip(arrays, memory.arrays, strict=True):
            place.store(part(source, held.rows(run)), part(target, wanted.rows(run)))
    return memory


def viewed(content: Array, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in the bytes of a message."""
    if is_device_array(content):
        made: Array = device_arrays.view(shape, dtype, device_arrays.memory_of(content, begin))
        return made
    size = math.prod(shape) * dtype.itemsize
    own: Array = content[begin : begin + size].view(dtype).reshape(shape)
    return own


def joined(place: Place, like: Two, parts: Sequence[tuple[Runs, Memory]], keys: Runs) -> Two:
    """Return the arrays of several messages in the order of positions."""
    if len(parts) == 1:
        return parts[0][1].arrays
    whole = Memory(place, like, keys.count, like[0].dtype).arrays
    for held, memory in parts:
        for run in held:
            for source, target in zip(memory.arrays, whole, strict=True):
                place.store(part(source, held.rows(run)), part(target, keys.rows(run)))
    return whole
