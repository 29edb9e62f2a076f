"""What is loaded ahead: which rows, in which order, and what has no room."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import call

from cupyflash.reference.cpu import ahead
from cupyflash.reference.cpu.addresses import address
from cupyflash.reference.cpu.jit import INT, INTS, kernel, takes
from cupyflash.reference.cpu.memory import ROWS, Rows, first_address
from cupyflash.reference.cpu.structs import Packed

FLOAT = np.dtype(np.float32)


@takes(lambda number: (INT, INT, INTS, ROWS, INT, INT, INT, INT, INT))
@kernel
def run_load_later(first, last, later, rows, b, h, i, count, columns):
    ahead.load_later(later, rows, b, h, i, count, columns)


@takes(lambda number: (INT, INT, INTS))
@kernel
def run_load_some(first, last, later):
    ahead.load_some(first_address(later))


@takes(lambda number: (INT, INT, INTS))
@kernel
def run_forget(first, last, later):
    ahead.forget(later)


def rows_of(x):
    """Rows of an array (B, H, L, D) as kernels know them."""
    strides = [step // x.itemsize for step in x.strides]
    offsets = np.arange(len(x)) * strides[0]
    return Packed(ROWS, Rows(address(x), offsets, strides[1], strides[2], x.itemsize, 0))


def pieces(later):
    """What is left of a list: addresses, bytes from row to row, rows, bytes of a row."""
    done, count = later[:2]
    return later[2 : 2 + 4 * count].reshape(-1, 4)[done:].tolist()


@pytest.mark.parametrize("columns", [4, 64, 2000])
def test_rows_are_loaded_in_their_order(columns):
    x = np.zeros((2, 3, 50, columns + 5), np.float32)
    later, rows = ahead.nothing(), rows_of(x)
    for b, h, i, count in ((1, 2, 7, 40), (0, 1, 0, 3), (0, 0, 0, 0), (1, 1, 4, 50 - 4)):
        call(run_load_later, FLOAT, later, rows, b, h, i, count, columns)
    step, size = x.strides[2], 4 * columns
    wanted = [
        [address(x[b, h, i:]), step, count, size]
        for b, h, i, count in ((1, 2, 7, 40), (0, 1, 0, 3), (1, 1, 4, 46))
    ]
    assert pieces(later) == wanted
    together = max(1, ahead.BYTES // size)
    while wanted:
        call(run_load_some, FLOAT, later)
        place, step, left, size = wanted[0]
        now = min(together, left)
        wanted[0] = [place + now * step, step, left - now, size]
        if left == now:
            del wanted[0]
        assert pieces(later) == wanted
    call(run_load_some, FLOAT, later)
    assert pieces(later) == []


def test_a_full_list_takes_no_more():
    x = np.zeros((1, 1, 4, 8), np.float32)
    later, rows = ahead.nothing(), rows_of(x)
    for _ in range(100):
        call(run_load_later, FLOAT, later, rows, 0, 0, 0, 4, 8)
    most = (len(later) - 2) // 4
    assert len(pieces(later)) == most
    call(run_load_some, FLOAT, later)
    assert len(pieces(later)) == most - 1
    call(run_forget, FLOAT, later)
    assert pieces(later) == []
    call(run_load_later, FLOAT, later, rows, 0, 0, 1, 3, 8)
    assert pieces(later) == [[address(x[0, 0, 1:]), 32, 3, 32]]
