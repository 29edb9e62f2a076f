"""Arrays copied for one call, with their strides, between guards that must not change.

It works the same way in host memory and on a GPU. Each array gets its own memory, full of poison
(bytes that are NaN in any floating type), and keeps its strides and alignment.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Protocol

import numpy as np

from cupyflash.expr.nodes import LOOKUPS, Expr, walk
from cupyflash.masks import Mask
from cupyflash.scores import Score

from .placement import GUARD, POISON

Array = np.ndarray[Any, Any]


class Memory(Protocol):
    """How bytes get to where a kernel reads them, and back."""

    any_address: bool  # whether an element may be off a multiple of its size

    def upload(self, data: Array) -> Any:
        """Copy bytes to a 64-byte boundary."""

    def view(self, data: Any, first: int, like: Array) -> Any:
        """Return an array of `like`'s shape, type and strides whose first element is there."""

    def download(self, data: Any) -> Array:
        """Copy bytes back."""

    def result(self, array: Any) -> Array:
        """Return what a kernel returned as a NumPy array."""


class HostMemory:
    """NumPy arrays."""

    any_address = True

    def upload(self, data: Array) -> Array:
        """Copy bytes to a 64-byte boundary."""
        whole = np.empty(data.size + 64, np.uint8)
        start = -whole.ctypes.data % 64
        whole[start : start + data.size] = data
        return whole[start : start + data.size]

    def view(self, data: Array, first: int, like: Array) -> Array:
        """Return an array of `like`'s shape, type and strides whose first element is there."""
        return np.ndarray(like.shape, like.dtype, buffer=data, offset=first, strides=like.strides)

    def download(self, data: Array) -> Array:
        """Return the bytes."""
        return data

    def result(self, array: Any) -> Array:
        """Return what a kernel returned."""
        return np.asarray(array)


class CuPyMemory:
    """CuPy arrays."""

    any_address = False

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def available(self) -> bool:
        """Whether there is a GPU."""
        return bool(self._cupy.is_available())

    def upload(self, data: Array) -> Any:
        """Copy bytes to the current GPU."""
        return self._cupy.asarray(data)

    def view(self, data: Any, first: int, like: Array) -> Any:
        """Return an array of `like`'s shape, type and strides whose first element is there."""
        pointer = data.data + first
        return self._cupy.ndarray(like.shape, like.dtype, pointer, like.strides)

    def download(self, data: Any) -> Array:
        """Copy bytes back."""
        return np.asarray(data.get())

    def result(self, array: Any) -> Array:
        """Copy what a kernel returned."""
        raw = np.asarray(array.view(f"u{array.dtype.itemsize}").get())  # CuPy has no bfloat16
        return raw.view(array.dtype)


class Copy:
    """A copy of an array with the same strides and alignment, in poisoned memory.

    Parameters
    ----------
    memory : Memory
        Where.
    like : ndarray
        What is copied.
    output : bool
        Whether the call writes it.
    filled : bool, optional
        Whether it starts with the elements of `like`; by default, an output starts as NaN.

    Attributes
    ----------
    view : array
        The copy.
    """

    def __init__(
        self, memory: Memory, like: Array, output: bool = False, filled: bool | None = None
    ) -> None:
        self._memory, self._like, self._output = memory, like, output
        low, high = np.lib.array_utils.byte_bounds(like)
        span = high - low if like.size else 0
        place = int(like.__array_interface__["data"][0])
        off = place % 64  # as far from a 64-byte boundary as it was
        if not memory.any_address:
            off = off // like.itemsize * like.itemsize
        self._first = GUARD + (off - GUARD - (place - low)) % 64 + (place - low)
        start = self._first - (place - low)
        self._before = np.full(start + span + GUARD, POISON, np.uint8)
        if span and (not output if filled is None else filled):
            self._before[start : start + span] = np.frombuffer(
                ctypes.string_at(low, span), np.uint8
            )
        self._data = memory.upload(self._before)
        self.view = memory.view(self._data, self._first, like)

    def value(self) -> Array:
        """Return the elements; AssertionError if anything else has changed."""
        after = self._memory.download(self._data)
        value = _view(after, self._first, self._like, self._like.dtype)
        if not self._output:
            if not np.array_equal(after, self._before):
                raise AssertionError("changed an input, or wrote outside it")
            return value
        mine = np.zeros(after.shape, bool)
        for n in range(self._like.itemsize if self._like.size else 0):
            _view(mine, self._first + n, self._like, np.dtype(bool))[...] = True
        if not np.array_equal(after[~mine], self._before[~mine]):
            raise AssertionError("wrote outside an output")
        return value


def _view(data: Array, first: int, like: Array, dtype: Any) -> Array:
    return np.ndarray(like.shape, dtype, buffer=data, offset=first, strides=like.strides)


class Copies:
    """Everything that one call reads and writes.

    Parameters
    ----------
    memory : Memory
        Where the copies are.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._all: dict[int, Copy] = {}
        self._kept: list[Any] = []  # so that no address is used twice

    def array(self, array: Array | None, output: bool = False, filled: bool | None = None) -> Any:
        """Copy an array; the same one comes back for the same array."""
        if array is None:
            return None
        if id(array) not in self._all:
            self._all[id(array)] = Copy(self._memory, array, output, filled)
            self._kept.append(array)
        return self._all[id(array)].view

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Copy the arrays among a call's options, also those inside masks and scores."""
        copied: dict[str, Any] = {}
        for name, value in options.items():
            if isinstance(value, np.ndarray):
                copied[name] = self.array(value)
            elif isinstance(value, Mask):
                copied[name] = Mask(self.expr(value.expr))
            elif isinstance(value, Score):
                copied[name] = Score(self.expr(value.expr))
            elif isinstance(value, (list, tuple)) and name == "score_mod":
                copied[name] = [Score(self.expr(each.expr)) for each in value]
            else:
                copied[name] = value
        return copied

    def expr(self, root: Expr) -> Expr:
        """Return an expression that looks up copies."""
        done: dict[Expr, Expr] = {}
        for node in walk(root):
            args = tuple(done[arg] for arg in node.args)
            if node.op in LOOKUPS:
                held = self.array(node.value[0]), *node.value[1:]
                done[node] = Expr(node.op, args, node.type, held)
            elif node.op == "aligned":
                moved = dataclasses.replace(node.value, array=self.array(node.value.array))
                done[node] = Expr("aligned", args, node.type, moved)
            else:
                done[node] = Expr(node.op, args, node.type, node.value)
        return done[root]

    def value(self, array: Array) -> Array:
        """Return what a copy holds now."""
        return self._all[id(array)].value()

    def check(self) -> None:
        """Raise AssertionError if an input has changed, or anything beside an output."""
        for each in self._all.values():
            each.value()
