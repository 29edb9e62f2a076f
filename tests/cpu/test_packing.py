"""Rows become pairs of vectors, and numbers that are not finite are found on the way."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import call
from placement import same_bits

from cupyflash.reference.cpu.addresses import address
from cupyflash.reference.cpu.jit import INT, INTS, kernel, takes, vector
from cupyflash.reference.cpu.microkernel import vector_lanes
from cupyflash.reference.cpu.packing import lanes_of_pair, load_pairs, size_of_pairs


@takes(lambda number: (INT, INT, INT, INT, INT, INT, INT, vector(number), INTS))
@kernel
def run_load_pairs(first, last, source, row_size, rows, columns, itemsize, target, found):
    found[0] = load_pairs(source, row_size, rows, columns, itemsize, target)


def packed(x):
    """The pairs of x, and whether a number is not finite."""
    rows, columns = x.shape
    target, found = np.zeros(size_of_pairs(rows, columns, x.itemsize), x.dtype), np.zeros(1, int)
    arguments = address(x), x.strides[0], rows, columns, x.itemsize, target, found
    call(run_load_pairs, x.dtype, *arguments)
    return target, found[0]


@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pairs(dtype, vectors):
    rows, pair = 5, lanes_of_pair(np.dtype(dtype).itemsize)
    columns = vectors * vector_lanes(np.dtype(dtype).itemsize)
    x = np.random.default_rng(0).standard_normal((rows, columns + 7)).astype(dtype)[:, :columns]
    info = np.finfo(dtype)
    x[0, :4] = info.max, -info.max, info.smallest_subnormal, -0.0
    target, found = packed(x)
    assert not found
    for d in range(0, columns, pair):
        part = target[d * rows : (d + pair) * rows].reshape(rows, pair)
        size = min(pair, columns - d)
        assert same_bits(part[:, :size], x[:, d : d + size])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_number_that_is_not_finite_is_missed(dtype, value):
    columns = 3 * vector_lanes(np.dtype(dtype).itemsize)
    x = np.zeros((4, columns), dtype)
    for place in np.ndindex(x.shape):
        x[place] = value
        assert packed(x)[1] == 1, place
        x[place] = 0
    assert not packed(x)[1]
    assert not packed(x[:0])[1]
    x[0], x[1] = np.inf, -np.inf  # whose sum is no number either
    assert packed(x)[1] == 1
