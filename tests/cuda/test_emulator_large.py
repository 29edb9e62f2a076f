"""Arrays that reach beyond 2^31 elements: memory of which only the pages in use exist."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest
from emulator import build
from emulator.calls import Emulator
from halves import mostly_thorough
from placement import same_bits
from strategies import DTYPES

from cupyflash import masks
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

FAR = 2**32 + 2**24  # elements from the first to the last along an axis
HEADS, ROWS, COLUMNS = 2, 20, 8  # rows of two tiles
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13


class Sparse:
    """An array (..., HEADS, ROWS, COLUMNS) with this axis stretched over `FAR` elements.

    Memory lies on both sides, as far as an offset of 32 bits could lead astray: it reads zeros, and
    what is written there is seen.
    """

    def __init__(self, values: Any, axis: int) -> None:
        strides = [math.prod(values.shape[n + 1 :]) for n in range(values.ndim)]
        strides[axis] = FAR // (values.shape[axis] - 1)
        reach = (FAR + 2**20) * values.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._memory = mmap.mmap(-1, 3 * reach, flags=flags)
        place = np.frombuffer(self._memory, np.uint8)
        self.view = np.ndarray(
            values.shape, values.dtype, place, reach,
            tuple(stride * values.itemsize for stride in strides),
        )  # fmt: skip
        self.view[...] = values


def run(q, k, v, do, make, emulator):
    """Return out, lse and the gradients of arrays that `make` lays out."""
    q, k, v, do = (make(x) for x in (q, k, v, do))
    call = validate.call(q, k, v, Options(mask=masks.causal()))
    out = make(np.full(do.shape, np.nan, do.dtype))
    lse = make(np.full(do.shape[:-1], np.nan, call.problem.accumulator))
    emulator.forward(call, out, lse)
    gradients = [make(np.full(x.shape, np.nan, x.dtype)) for x in (q, k, v)]
    emulator.backward(call, do, out, lse, None, Gradients(*gradients))
    return [np.array(x) for x in (out, lse, *gradients)]


def stretched(axis, kept):
    """Return a function that stretches this axis (counted from the last) of whatever has it."""

    def make(values):
        own = values.ndim - (3 if values.shape[-1] == COLUMNS else 2) + axis
        if own >= values.ndim:
            return values
        kept.append(Sparse(values, own))
        return kept[-1].view

    return make


def arrays(dtype, lead=2):
    rng = np.random.default_rng(0)
    shape = (lead, HEADS, ROWS, COLUMNS)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(4)]


@mostly_thorough(
    ("axis", "dtype"),
    list(zip((-1, 0, 1, 2), DTYPES, strict=True)),
    quick=lambda case: case[0] == 0,
    why="columns, rows and batches are reached as heads are",
    ids=str,
)
def test_far_rows_heads_columns_and_batches_change_no_bit(axis, dtype):
    kept: list[Sparse] = []
    near = run(*arrays(dtype), lambda x: x, Emulator())
    far = run(*arrays(dtype), stretched(axis, kept), Emulator())
    assert len(kept) >= 7
    for a, b in zip(near, far, strict=True):
        assert same_bits(a, b)


@pytest.mark.thorough("a fault in the kernel; the right one is quick")
def test_an_offset_of_32_bits_would_be_seen():
    kept: list[Sparse] = []

    def read(path):
        text = build.read(path)
        if path == "common/memory.cuh":
            for offset in ("(first + share.row) * from.row", "first * from.row"):
                assert offset in text
                text = text.replace(offset, f"static_cast<int>({offset})")
        return text

    dtype = np.dtype(np.float32)
    near = run(*arrays(dtype), lambda x: x, Emulator())
    far = run(*arrays(dtype), stretched(1, kept), Emulator(read=read))
    assert not same_bits(near[0], far[0])
