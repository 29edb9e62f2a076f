"""Arrays of the tests, copied to a GPU with their strides, between guards that must not change."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from cupyflash.expr.nodes import Expr, lookup_node, walk
from cupyflash.masks import Mask
from cupyflash.scores import Score

Array = np.ndarray[Any, Any]

GUARD = 160  # bytes on either side
POISON = 0xFF  # as bytes of any of the four float types a NaN


class CuPyMemory:
    """How bytes get to a GPU and back."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def upload(self, data: Array) -> Any:
        return self._cupy.asarray(data)

    def view(self, data: Any, first: int, like: Array) -> Any:
        pointer = data.data + first
        return self._cupy.ndarray(like.shape, like.dtype, pointer, like.strides)

    def download(self, data: Any) -> Array:
        return np.asarray(data.get())


def memory() -> Any:
    """Return the memory of a GPU, or skip the test that asks for it."""
    try:
        import cupy
    except ImportError:
        pytest.skip("CuPy is not installed")
    if not cupy.is_available():
        pytest.skip("CuPy finds no usable NVIDIA GPU")
    if os.environ.get("CUPYFLASH_TEST_NO_POOL"):
        # Every array is an allocation of its own, so that a sanitizer sees where it ends.
        cupy.cuda.set_allocator(None)
    return CuPyMemory()


class OnGpu:
    """A copy of an array on a GPU, with the same strides and alignment, in poisoned memory.

    Attributes
    ----------
    view : cupy.ndarray
        The array; an output's elements start as NaN.
    """

    def __init__(self, memory: Any, like: Array, output: bool = False) -> None:
        self._memory, self._like, self._output = memory, like, output
        low, high = np.lib.array_utils.byte_bounds(like)
        span = high - low if like.size else 0
        place = like.__array_interface__["data"][0]
        # As far from a 64-byte boundary as in host memory, but a whole number of elements.
        off = place % 64 // like.itemsize * like.itemsize
        self._first = GUARD + (off - GUARD - (place - low)) % 64 + (place - low)
        start = self._first - (place - low)
        self._before = np.full(start + span + GUARD, POISON, np.uint8)
        if span and not output:
            self._before[start : start + span] = np.frombuffer(
                ctypes.string_at(low, span), np.uint8
            )
        self._data = memory.upload(self._before)
        self.view = memory.view(self._data, self._first, like)

    def value(self) -> Array:
        """Return the elements, and assert that nothing else has changed."""
        after = self._memory.download(self._data)
        value = _view(after, self._first, self._like, self._like.dtype)
        if not self._output:
            assert np.array_equal(after, self._before), "changed an input"
            return value
        mine = np.zeros(after.shape, bool)
        for n in range(self._like.itemsize if self._like.size else 0):
            _view(mine, self._first + n, self._like, np.dtype(bool))[...] = True
        assert np.array_equal(after[~mine], self._before[~mine]), "wrote outside"
        return value


def _view(data: Array, first: int, like: Array, dtype: Any) -> Array:
    return np.ndarray(like.shape, dtype, buffer=data, offset=first, strides=like.strides)


class Copies:
    """Everything that one call reads and writes on the GPU."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._all: dict[int, OnGpu] = {}
        self._kept: list[Any] = []  # so that no address is used twice

    def array(self, array: Array | None, output: bool = False) -> Any:
        """Copy an array; the same one comes back for the same array."""
        if array is None:
            return None
        if id(array) not in self._all:
            self._all[id(array)] = OnGpu(self._memory, array, output)
            self._kept.append(array)
        return self._all[id(array)].view

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Copy the arrays among a call's options, also those inside masks and scores."""
        copied = {}
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
            if node.op == "lookup":
                array, proven = node.value
                done[node] = lookup_node(self.array(array), args, proven)
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
        """Assert that no input has changed, and nothing beside an output."""
        for each in self._all.values():
            each.value()
