"""Panels of rows become columns, and columns rows; the last ones fill no vector."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import call
from placement import same_bits

from cupyflash.reference.cpu.addresses import address
from cupyflash.reference.cpu.jit import INT, INTS, kernel, pointer_of, prepare, takes, vector
from cupyflash.reference.cpu.microkernel import round_up, vector_lanes
from cupyflash.reference.cpu.packing import (
    has_nonfinite,
    lanes_of_pair,
    load_columns,
    load_panel,
    size_of_pairs,
    store_columns,
    store_panel,
)
from cupyflash.reference.cpu.softmax import finish_state

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
SIZES = [(count, depth) for count in (1, 8, 17, 32, 49) for depth in (1, 16, 33, 40)]
HIDDEN = 7.0  # what nobody may read or write


def drawn(dtype, *shape):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@takes(lambda number: (INT, INT, INT, INT, INT, INT, INT, INT, INT, INT, INT, INTS, vector(number)))
@kernel
def run_load(
    first, last, pointer, source, size, count, lanes, depth, itemsize, target, pairs, found, like
):
    rows = (source, size, count, lanes, depth, itemsize, target, pairs, like[0])
    found[0] = load_panel(pointer, rows)
    found[1] = has_nonfinite(source, size, count, depth, itemsize, like[0])


def loaded(x, copies):
    """Rows as columns, the same as pairs, and what was found, by `load_columns` and the search."""
    (count, depth), dtype = x.shape, x.dtype
    pair, lanes = lanes_of_pair(dtype.itemsize), round_up(count, vector_lanes(dtype.itemsize))
    columns = np.full(size_of_pairs(depth, lanes, dtype.itemsize) + pair, HIDDEN, dtype)
    rows = np.full(size_of_pairs(count, depth, dtype.itemsize) + pair, HIDDEN, dtype)
    found = np.zeros(2, np.int64)
    prepare([(load_columns, dtype)])
    call(
        run_load, dtype, pointer_of(load_columns, dtype), address(x), x.strides[0], count, lanes,
        depth, dtype.itemsize, address(columns), address(rows) if copies else 0, found,
        np.zeros(1, dtype),
    )  # fmt: skip
    return columns, rows, found


@pytest.mark.parametrize(("count", "depth"), SIZES)
@DTYPES
def test_rows_become_columns_and_pairs(dtype, count, depth):
    memory = np.full((count, depth + 5), np.nan, dtype)
    x = memory[:, :depth]
    x[...] = drawn(dtype, count, depth)
    pair, lanes = lanes_of_pair(x.itemsize), round_up(count, vector_lanes(x.itemsize))
    columns, rows, found = loaded(x, copies=True)
    assert not found.any()
    wanted = np.zeros((lanes, depth), dtype)
    wanted[:count] = x
    for i in range(0, lanes, pair):
        size = min(pair, lanes - i)
        part = columns[i * depth : (i + pair) * depth].reshape(depth, pair)
        assert same_bits(part[:, :size], wanted[i : i + size].T)
    assert (columns[round_up(lanes, pair) * depth :] == HIDDEN).all()
    vector_of = pair // 2
    for d in range(0, depth, pair):
        part = rows[d * count : (d + pair) * count].reshape(count, pair)
        size, whole = min(pair, depth - d), min(pair, round_up(depth - d, vector_of))
        assert same_bits(part[:, :size], x[:, d : d + size])
        assert (part[:, size:whole] == 0).all()
    assert (rows[size_of_pairs(count, depth, x.itemsize) :] == HIDDEN).all()
    again, untouched, _ = loaded(x, copies=False)
    assert same_bits(again, columns)
    assert (untouched == HIDDEN).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf], ids=str)
@DTYPES
def test_no_number_that_is_not_finite_is_missed(dtype, value):
    x = drawn(dtype, 18, 35)
    info = np.finfo(dtype)
    x[0, :4] = info.max, -info.max, info.smallest_subnormal, -0.0
    for place in [(0, 0), (0, 34), (17, 0), (17, 34), (16, 15), (3, 16)]:
        before, x[place] = x[place], value
        assert loaded(x, copies=False)[2].tolist() == [1, 1], place
        x[place] = before
    assert loaded(x, copies=False)[2].tolist() == [0, 0]


@takes(lambda number: (INT, INT, INT, INT, INT, INT, INT, INT, INT, INT, INT, vector(number)))
@kernel
def run_store(
    first, last, pointer, source, count, lanes, depth, itemsize, factors, target, size, like
):
    columns = (source, count, lanes, depth, itemsize, factors, target, size, like[0])
    store_panel(pointer, columns)


@pytest.mark.parametrize(("count", "depth"), SIZES)
@DTYPES
def test_columns_become_rows_times_factors(dtype, count, depth):
    lanes = round_up(count, vector_lanes(np.dtype(dtype).itemsize))
    x, factors = drawn(dtype, depth, lanes), drawn(dtype, lanes)
    out = np.full((count + 1, depth + 3), HIDDEN, dtype)
    prepare([(store_columns, x.dtype)])
    call(
        run_store, x.dtype, pointer_of(store_columns, x.dtype), address(x), count, lanes, depth,
        x.itemsize, address(factors), address(out), out.strides[0], np.zeros(1, dtype),
    )  # fmt: skip
    assert same_bits(out[:count, :depth], (x * factors).T[:count])
    assert (out[count] == HIDDEN).all()
    assert (out[:, depth:] == HIDDEN).all()


@takes(lambda number: (INT, INT, *(vector(number),) * 4))
@kernel
def run_finish(first, last, m, l, inverse, lse):
    finish_state(m, l, m.shape[0], inverse, lse)


@DTYPES
def test_the_logarithm_of_sums(dtype):
    """m + log l, to two units in the last place of the largest of them."""
    rng, info = np.random.default_rng(0), np.finfo(dtype)
    l = np.exp(rng.uniform(-60, 60, 4096)).astype(dtype)
    l[:1024] = rng.uniform(0.5, 2, 1024)
    l[1024:1032] = 1, 2, 0.5, np.sqrt(0.5), np.sqrt(2), 1 + info.eps, info.tiny, info.max
    m = rng.uniform(-9, 9, l.size).astype(dtype)
    m[:512] = 0
    l[-2:], m[-3:] = (np.nan, 0), (np.nan, 0, -np.inf)  # not numbers, and an empty row
    inverse, lse = np.empty_like(l), np.empty_like(l)
    call(run_finish, l.dtype, m, l, inverse, lse)
    logs = np.log(l[:-3].astype(np.longdouble))
    error = np.abs(lse[:-3] - (m[:-3] + logs))
    assert (error <= 2 * info.eps * (np.abs(m[:-3]) + np.abs(logs))).all()
    assert same_bits(inverse[:-3], 1 / l[:-3])
    assert np.isnan(lse[-3:-1]).all()
    assert (inverse[-1], lse[-1]) == (0, -np.inf)
