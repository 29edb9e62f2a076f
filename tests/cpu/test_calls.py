"""Calls of kernels by their addresses: structures in memory, words for arguments, what is held."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import types

from cupyflash.reference.cpu.calls import Bound
from cupyflash.reference.cpu.jit import INT, INTS, TABLE, kernel, prepare, takes, vector
from cupyflash.reference.cpu.structs import Struct

FLOAT64 = np.dtype(np.float64)


class Inner(NamedTuple):
    table: Any
    small: float


class Outer(NamedTuple):
    count: int
    inner: Inner
    scale: float
    numbers: Any


INNER = Struct(Inner, (TABLE, types.float32))


def outer_of(number):
    return Struct(Outer, (INT, INNER, number, INTS))


@takes(lambda number: (INT, INT, outer_of(number), TABLE, vector(number), vector(number)))
@kernel
def write_fields(first, last, outer, table, found, own):
    inner = outer.inner
    own[0] += 1
    found[0] = outer.count
    found[1] = inner.table[1, 2]
    found[2] = inner.table.shape[0] * 10 + inner.table.shape[1]
    found[3] = inner.small
    found[4] = outer.scale
    found[5] = outer.numbers[last]
    found[6] = outer.numbers.size
    found[7] = table[first, 1]
    found[8] = own[0]


def bound(found, own=None, **changes):
    table = np.arange(6).reshape(2, 3)
    outer = Outer(-7, Inner(changes.get("table", table), 0.1), 0.1, np.array([3, 4, 2**40]))
    prepare([(write_fields, FLOAT64)], report=lambda *_: None)
    own = (lambda: (np.zeros(1),)) if own is None else own
    return Bound(write_fields, FLOAT64, outer, 2 * table, found, scratch=own)


def test_a_kernel_reads_the_fields_of_structures():
    found = np.zeros(9)
    bound(found)(1, 2)
    assert found.tolist() == [-7, 5, 23, float(np.float32(0.1)), 0.1, 2**40, 3, 8, 1]


@pytest.mark.parametrize(
    "table",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(6),
        np.arange(12).reshape(2, 6)[:, ::2],
    ],
    ids=["dtype", "axes", "strides"],
)
def test_an_array_that_the_kernel_would_misread_is_refused(table):
    with pytest.raises(TypeError, match="expected array"):
        bound(np.zeros(9), table=table)


def test_the_arrays_live_as_long_as_the_bound_kernel():
    table = np.arange(6).reshape(2, 3)
    seen = weakref.ref(table)
    run = bound(np.zeros(9), table=table)
    del table
    gc.collect()
    assert seen() is not None
    del run
    gc.collect()
    assert seen() is None


def test_chunks_share_scratch_one_after_the_other():
    found, made = np.zeros(9), []

    def own():
        made.append(np.zeros(1))
        return (made[-1],)

    run = bound(found, own)
    run(0, 1)
    run(1, 2)
    assert len(made) == 1
    assert found[8] == 2


def test_python_cannot_call_a_kernel_with_its_own_objects():
    with pytest.raises(TypeError, match="not callable"):
        write_fields(0, 1)
