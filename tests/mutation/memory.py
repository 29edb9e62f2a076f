"""Arrays between pages that nobody may touch: a stray access ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from gpu_arrays import Copies

Array = np.ndarray[Any, Any]

PAGE = mmap.PAGESIZE
# NaN, which lies beside elements that may be added to: it becomes another one where 0 is added.
SIGNALLING = {"float32": 0x7FA5A5A5, "float64": 0x7FF5A5A5A5A5A5A5}
_LIBC = ctypes.CDLL(None, use_errno=True)


def _protect(address: int, size: int, how: int) -> None:
    if _LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), how):
        raise OSError(ctypes.get_errno(), "mprotect")


class Guarded:
    """A copy of an array, with its strides and alignment, at an end of its pages.

    Attributes
    ----------
    view : ndarray
        The array; an output's elements start as NaN, and an input cannot be written.
    """

    def __init__(self, like: Array, output: bool, at_end: bool) -> None:
        low, high = np.lib.array_utils.byte_bounds(like)
        span = high - low if like.size else 0
        place = like.__array_interface__["data"][0] if like.size else low
        size = -(-(span + 16) // PAGE) * PAGE
        # Every mutant is tried in a fork of its own, and what it writes is not another one's.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, size + 2 * PAGE, private)
        whole = np.frombuffer(self._map, np.uint8)
        base = whole.ctypes.data
        self._inside = whole[PAGE : PAGE + size]
        self._inside.fill(0xFF)
        if like.dtype.name in SIGNALLING:
            self._inside.view(f"u{like.dtype.itemsize}").fill(SIGNALLING[like.dtype.name])
        # As far from a boundary of 16 bytes as it was, but a whole number of elements.
        off = (low - low % like.itemsize) % 16
        start = size - span if at_end else off
        start -= (start - off) % 16
        first = start + place - low
        raw = like.view(f"u{like.dtype.itemsize}") if like.dtype.kind != "b" else like
        self.view = np.ndarray(like.shape, like.dtype, self._inside, first, like.strides)
        if output:
            mine = np.zeros(size, bool)
            for n in range(like.dtype.itemsize if like.size else 0):
                np.ndarray(like.shape, bool, mine, first + n, like.strides)[...] = True
            self._beside = ~mine
        else:
            np.ndarray(like.shape, raw.dtype, self._inside, first, like.strides)[...] = raw
            self.view.flags.writeable = False
            _protect(base + PAGE, size, mmap.PROT_READ)
        _protect(base, PAGE, 0)
        _protect(base + PAGE + size, PAGE, 0)

    def untouched(self) -> Array:
        """Return which of an output's elements hold what they began with."""
        size = self.view.dtype.itemsize
        first = SIGNALLING.get(self.view.dtype.name, 2 ** (8 * size) - 1)
        held: Array = self.view.view(f"u{size}") == first
        return held

    def bytes(self) -> bytes:
        """Return all that lies in the pages."""
        return self._inside.tobytes()

    def restore(self, before: bytes) -> None:
        """Set all that lies in the pages."""
        self._inside[...] = np.frombuffer(before, np.uint8)

    def same_beside(self, before: bytes) -> bool:
        """Whether what is beside an output's elements is as it was."""
        was = np.frombuffer(before, np.uint8)
        return bool((self._inside == was)[self._beside].all())


class GuardedCopies(Copies):
    """Everything that one call reads and writes, between such pages.

    Every other array lies at their end, from number `first` on.
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__(None)
        self._first = first

    def array(self, array: Array | None, output: bool = False) -> Any:
        """Copy an array; the same one comes back for the same array."""
        if array is None:
            return None
        if id(array) not in self._all:
            at_end = (len(self._all) - self._first) % 2 == 0
            self._all[id(array)] = Guarded(array, output, at_end)  # type: ignore[assignment]
            self._kept.append(array)
        return self._all[id(array)].view

    def guarded(self, array: Array) -> Guarded:
        """Return the pages of an array's copy."""
        found: Any = self._all[id(array)]
        return found
