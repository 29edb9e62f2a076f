"""Keys and values, or their gradients, as messages of bytes, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import device_arrays
from ..arrays.device_arrays import is_device_array
from ..pieces.parts import part
from ..pieces.place import Place
from ..problem.call import Array
from .partition.intervals import Intervals
from .transport.peers import in_blocks

# k and v, and what look-ups read at their positions; or dk and dv.
Several = tuple[Array, ...]


class Memory:
    """Memory for several messages, in the dtypes of the arrays that they are like, or in another.

    Attributes
    ----------
    arrays : tuple of array
        Arrays in C order.
    """

    def __init__(
        self, place: Place, like: Several, rows: int, dtype: np.dtype[Any] | None = None
    ) -> None:
        self.arrays: Several = tuple(
            place.empty((*x.shape[:-2], rows, x.shape[-1]), dtype or x.dtype) for x in like
        )

    @property
    def contents(self) -> Several:
        """The messages: the same bytes."""
        return tuple(map(bytes_of, self.arrays))


class Packed:
    """Messages with the rows of some positions, of arrays that hold others, too.

    `copies` says that they are copied, so that they may be rows of the arrays themselves.

    Attributes
    ----------
    contents : tuple of array
        The messages, after `pack`.
    """

    def __init__(
        self,
        place: Place,
        arrays: Several,
        held: Intervals,
        wanted: Intervals,
        copies: bool = False,
    ) -> None:
        self._place, self._arrays, self._held, self._wanted = place, arrays, held, wanted
        self._memory: Memory | None = None
        if wanted == held and all(x.flags.c_contiguous for x in arrays):
            self.contents = tuple(map(bytes_of, arrays))
            return
        runs = list(wanted)
        if copies and len(runs) == 1:
            rows = tuple(part(x, held.rows(runs[0])) for x in arrays)
            if all(map(in_blocks, rows)):
                self.contents = rows
                return
        self._memory = Memory(place, arrays, wanted.count)
        self.contents = self._memory.contents

    def pack(self) -> None:
        """Copy the rows to the messages, if these are not the arrays themselves."""
        if self._memory is None:
            return
        for run in self._wanted:
            for source, target in zip(self._arrays, self._memory.arrays, strict=True):
                rows, to = self._held.rows(run), self._wanted.rows(run)
                self._place.store(part(source, rows), part(target, to))


def bytes_of(array: Array) -> Array:
    """Return the bytes of an array in C order."""
    if is_device_array(array):
        memory = device_arrays.memory_of(array, 0)
        made: Array = device_arrays.view((array.nbytes,), np.dtype(np.uint8), memory)
        return made
    own: Array = array.reshape(-1).view(np.uint8)
    return own


def viewed(content: Array, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in the bytes of a message."""
    if is_device_array(content):
        made: Array = device_arrays.view(shape, dtype, device_arrays.memory_of(content, begin))
        return made
    size = math.prod(shape) * dtype.itemsize
    own: Array = content[begin : begin + size].view(dtype).reshape(shape)
    return own


_ALIGNED = 256  # bytes at whose multiples arrays begin


def together(place: Place, specs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array]:
    """Return uninitialised arrays of some shapes and dtypes, whose memory is asked for once."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
    steps = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    content = place.empty((sum(steps),), np.dtype(np.uint8))
    begins = itertools.accumulate(steps, initial=0)
    return [viewed(content, begin, *spec) for begin, spec in zip(begins, specs, strict=False)]


def joined(
    place: Place,
    like: Several,
    parts: Sequence[tuple[Intervals, Intervals, Memory]],
    keys: Intervals,
) -> Several:
    """Return the arrays of several messages in the order of positions.

    Of each, the positions that are wanted and those that it has are given.
    """
    if len(parts) == 1 and parts[0][0] == parts[0][1]:
        return parts[0][2].arrays
    whole = Memory(place, like, keys.count).arrays
    for wanted, held, memory in parts:
        for run in wanted:
            for source, target in zip(memory.arrays, whole, strict=True):
                place.store(part(source, held.rows(run)), part(target, keys.rows(run)))
    return whole
