"""The random orthogonal transform of rows on NumPy arrays: its matrix, its bound, its use."""

from __future__ import annotations

import re

import numpy as np
import pytest
from codes import meaning
from hadamards import DTYPES, SIZES, matrix, transformed
from halves import mostly_thorough
from hypothesis import given
from hypothesis import strategies as st
from placement import Placed, random_layout, same_bits

from cupyflash import ArgumentError, ArgumentTypeError, attention, hadamard, quantize
from cupyflash.problem.hadamard import FACTORS, LARGEST, factor_of, matrix_of

F32 = np.float32
LARGE = [n for n in range(641, LARGEST + 1) if factor_of(n)]


@pytest.mark.parametrize("order", FACTORS)
def test_small_matrices_are_orthogonal(order):
    found = matrix_of(order)
    assert found.shape == (order, order)
    assert (np.abs(found) == 1).all()
    assert (found @ found.T == order * np.eye(order)).all()


@mostly_thorough(
    "columns", SIZES + LARGE, quick=[*SIZES, 1152, 4096], why="large matrices; small ones are quick"
)
def test_rows_are_multiplied_by_an_orthogonal_matrix(columns):
    held = matrix(columns, 2**40 + 3)
    assert (np.abs(held) == 1).all()
    if columns <= 640:
        assert (held @ held.T == columns * np.eye(columns, dtype=int)).all()
    rows = slice(0, None, max(1, columns // 64))
    unit = np.eye(columns)[rows]
    root = np.sqrt(columns)
    found, back = (hadamard(unit, 2**40 + 3, inverse=x) * root for x in (False, True))
    np.testing.assert_allclose(found, held.T[rows], rtol=1e-14)
    np.testing.assert_allclose(back, held[rows], rtol=1e-14)


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.sampled_from(SIZES), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_rows_are_within_the_bound(seed, dtype, columns, inverse, given_out):
    rng = np.random.default_rng(seed)
    shape = (*rng.integers(1, 4, int(rng.integers(0, 4))), columns)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6)).astype(dtype)
    placed = Placed(shape, dtype, random_layout(rng, len(shape), dtype.itemsize, True), x)
    out = Placed(shape, dtype, random_layout(rng, len(shape), dtype.itemsize))
    number = int(rng.integers(0, 2**64, dtype=np.uint64))
    made = hadamard(placed.view, number, inverse=inverse, out=out.view if given_out else None)
    assert (made is out.view) == given_out
    transformed(placed.view, number, inverse).check(made)
    for each in (placed, out):
        each.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 96, 576])
def test_the_inverse_undoes_it_and_norms_stay(dtype, columns):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, columns)).astype(dtype)
    there = hadamard(x, 9)
    back = hadamard(there, 9, inverse=True)
    assert there.dtype == back.dtype == dtype
    unit = {2: 2.0**-7, 4: 2.0**-20, 8: 2.0**-48}[dtype.itemsize]
    wide = x.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1)
    assert (np.linalg.norm(back.astype(np.float64) - wide, axis=1) <= unit * norms).all()
    assert (np.abs(np.linalg.norm(there.astype(np.float64), axis=1) - norms) <= unit * norms).all()


def test_attention_has_the_same_scores():
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 2, 4, 9, 64))
    turned = attention(hadamard(q, 5), hadamard(k, 5), v)
    np.testing.assert_allclose(turned, attention(q, k, v), rtol=1e-12, atol=1e-12)
    # A value is turned back behind attention.
    turned = hadamard(attention(q, k, hadamard(v, 7)), 7, inverse=True)
    np.testing.assert_allclose(turned, attention(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_outliers_are_spread_so_that_codes_lose_less(form):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((200, 128)).astype(F32)
    x[:, [3, 70]] *= 40

    def lost(rows):
        codes, scale = quantize(rows, form, group=128)
        return np.linalg.norm(rows - scale * meaning(codes, form)) / np.linalg.norm(rows)

    spread = hadamard(x, 11)
    assert np.abs(spread).max() < np.abs(x).max() / 4
    assert lost(spread) < 0.6 * lost(x)


def test_signs_are_those_of_the_seed():
    unit = np.eye(4096)[::512]
    first = [hadamard(unit, seed) for seed in (0, 0, 1, 2**32, 2**64 - 1)]
    assert same_bits(first[0], first[1])
    for n, other in enumerate(first[2:]):
        assert not np.array_equal(first[0], other), n
    signs = hadamard(np.eye(512), 3)[:, 0] > 0  # the first column has no sign but these
    assert 200 < signs.sum() < 312


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 12)])
def test_empty_axes(shape):
    assert hadamard(np.ones(shape, np.float16), 1).shape == shape


def test_the_settings_of_numpy_stay_out():
    with np.errstate(all="raise"):
        found = hadamard(np.full((2, 4), [[6e4], [np.inf]], np.float16), 1)
    assert not np.isfinite(found).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((), "x: got shape ()"),
        ((2, 0), "1 is nearest"),
        ((2, 3), "expected a power of two, or 12, 20, 28 or 36 times one, up to 4096: 2 and 4 are"),
        ((2, 100), "96 and 112 are nearest. Pad rows with zeros"),
        ((2, 5000), "4096 is nearest"),
    ],
)
def test_sizes_that_there_are_not(shape, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        hadamard(np.ones(shape, F32), 0)


def test_other_arguments_that_are_wrong():
    x = np.ones((2, 4), F32)
    for seed in (None, 1.0, True, "a"):
        with pytest.raises(ArgumentTypeError, match="seed: got"):
            hadamard(x, seed)
    for seed in (-1, 2**64):
        with pytest.raises(ArgumentError, match=r"seed: got .*; expected 0 to 2\*\*64 - 1"):
            hadamard(x, seed)
    with pytest.raises(ArgumentTypeError, match="inverse: got 1; expected True or False"):
        hadamard(x, 0, inverse=1)
    with pytest.raises(ArgumentTypeError, match="x: got dtype int64"):
        hadamard(np.ones((2, 4), int), 0)
    with pytest.raises(ArgumentError, match="out and x share memory"):
        hadamard(x, 0, out=x)
    with pytest.raises(ArgumentError, match=r"out: got shape \(2, 8\)"):
        hadamard(x, 0, out=np.ones((2, 8), F32))
