"""Attention over parts of the keys, joined, is attention over all of them."""

import itertools
import math

import numpy as np
import pytest
from harness import assert_near, attend, attend_backward, bound_of
from hypothesis import given
from hypothesis import strategies as st
from placement import Placed, random_layout, same_bits
from strategies import DTYPES, plain

from cupyflash import attention, combine, masks, scores
from cupyflash.testing import Precision


def split(p, number):
    """Split the keys of a problem at random places, empty parts included."""
    keys = p.k.shape[2]
    cuts = [0, *np.sort(p.rng.integers(0, keys + 1, number - 1)).tolist(), keys]
    return list(itertools.pairwise(cuts))


def bound_of_parts(p, parts, **options):
    """The bound of a combination; 16-bit parts were rounded when they were stored."""
    bound = bound_of(p.q, p.k, p.v, (p.tiles[0], 5), splits=len(parts), **options)
    rounding = Precision.of(p.dtype).output
    stored = 0.0
    if p.dtype.itemsize == 2:
        for first, last in parts:
            part = [x[:, :, first:last] for x in (p.k, p.v)]
            out, lse, _ = attend(p.q, *part, p.tiles, **options)
            weight = np.exp(lse.astype(np.float64) - bound.lse.exact)[..., None] * 1.001
            stored += weight * (rounding.unit * np.abs(out.astype(np.float64)) + rounding.underflow)
    return bound.out.bound + stored * (1 + rounding.unit), bound.lse.bound, bound


@given(plain(), st.integers(1, 5), st.booleans())
def test_parts_combine_to_the_whole(p, number, with_sink):
    parts = split(p, number)
    sink = p.rng.standard_normal(p.q.shape[1]).astype(np.float32) if with_sink else None
    chosen = int(p.rng.integers(number))  # one of the calls gets the sink
    results = [
        attend(p.q, p.k[:, :, a:b], p.v[:, :, a:b], p.tiles, sink=sink if n == chosen else None)[:2]
        for n, (a, b) in enumerate(parts)
    ]
    out, lse = combine(results)
    assert out.dtype == p.dtype
    assert lse.dtype == p.accumulator
    out_bound, lse_bound, whole = bound_of_parts(p, parts, **({"sink": sink} if with_sink else {}))
    assert_near(out, whole.out.exact, out_bound)
    assert_near(lse, whole.lse.exact, lse_bound)
    one = attend(p.q, p.k, p.v, p.tiles, sink=sink)
    assert_near(out, one.out, out_bound, whole.out.bound)
    assert_near(lse, one.lse, lse_bound, whole.lse.bound)
    assert_near(lse, np.logaddexp.reduce([x[1].astype(np.longdouble) for x in results]), lse_bound)


@given(plain(), st.permutations(range(4)))
def test_order_and_grouping_do_not_matter(p, order):
    parts = split(p, 4)
    results = [attend(p.q, p.k[:, :, a:b], p.v[:, :, a:b], p.tiles)[:2] for a, b in parts]
    out_bound, lse_bound, _ = bound_of_parts(p, parts)
    # Grouping rounds once more to the parts' type.
    again = out_bound + Precision.of(p.dtype).output.unit * np.abs(p.v.astype(float)).max()
    out, lse = combine(results)
    for others in (
        combine([results[n] for n in order]),
        combine([combine(results[:2]), combine(results[2:])]),
        combine([results[0], combine([results[1], combine(results[2:])])]),
    ):
        assert_near(others[0], out, 2 * again)
        assert_near(others[1], lse, 2 * lse_bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_unit_changes_no_bit(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, 11, 8)).astype(dtype) for _ in "qkv")
    out, lse, _ = attend(q, k, v, mask=masks.causal(offset=-3))  # the first rows see nothing
    assert np.isneginf(lse[..., :3]).all()
    unit = np.zeros_like(out), np.full_like(lse, -np.inf)
    garbage = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    for parts in (
        [(out, lse)], [(out, lse), unit], [unit, (out, lse)], [unit, garbage, (out, lse), unit]
    ):  # fmt: skip
        ours = combine(parts)
        assert same_bits(ours[0], out)
        assert same_bits(ours[1], lse)
    nothing = combine([unit, garbage])
    assert not nothing[0].any()
    assert np.isneginf(nothing[1]).all()


def test_interleaved_key_sets():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 3, 30, 8)) for _ in "qkv")
    sets = [masks.mask(lambda b, h, i, j, n=n: (j + i) % 3 == n) for n in range(3)]
    parts = [attention(q, k, v, mask=mask, return_lse=True) for mask in sets]
    out, lse = combine(parts)
    whole = attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, whole[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-13)


def test_by_hand():
    out, lse = combine(
        [(np.array([[2.0]]), np.array([0.0])), (np.array([[8.0]]), np.array([math.log(2)]))]
    )
    np.testing.assert_allclose(out, [[6.0]], rtol=1e-15)
    np.testing.assert_allclose(lse, [math.log(3)], rtol=1e-15)


def test_far_apart_and_huge():
    big = np.array([1e30, -1e30], np.float32)
    parts = [
        (np.array([[1.0], [2.0]], np.float32), big),
        (np.array([[3.0], [4.0]], np.float32), -big),
    ]
    out, lse = combine(parts)
    assert np.array_equal(out, [[1.0], [4.0]])
    assert np.array_equal(lse, np.abs(big))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [2, 3, 7, 20])
def test_parts_of_the_largest_number_combine_to_it(dtype, number):
    largest = Precision.of(dtype).output.largest
    accumulator = np.float64 if dtype == np.float64 else np.float32
    for sign in (1, -1):
        part = np.full((3, 5), sign * largest, dtype), np.full(3, 100, accumulator)
        out, lse = combine([part] * number)
        assert np.isfinite(out).all()
        unit = 8 * number * Precision.of(accumulator).unit
        assert_near(out, part[0].astype(np.longdouble), np.full((3, 5), largest * unit))
        np.testing.assert_allclose(lse, 100 + math.log(number), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "large"), [(np.float32, 3e38), (np.float64, 1.7e308)])
def test_parts_of_opposite_signs_are_weighted_before_they_are_added(dtype, large):
    heavy, light = np.zeros(1, dtype), np.full(1, -math.log(3), dtype)
    out, _ = combine(
        [(np.full((1, 2), large, dtype), heavy), (np.full((1, 2), -large, dtype), light)]
    )
    np.testing.assert_allclose(out, large / 2, rtol=1e-6)


def test_a_log_sum_exp_of_infinity_is_none():
    """Padding rows of other libraries' kernels may have one, whose part would be taken alone."""
    out, lse = np.ones((3, 2), np.float32), np.zeros(3, np.float32)
    bad = np.array([0, np.inf, 0], np.float32)
    for parts in ([(out, lse), (2 * out, bad)], [(2 * out, bad), (out, lse)], [(2 * out, bad)]):
        joined = combine(parts)
        assert np.array_equal(np.isnan(joined[1]), [False, True, False])
        assert np.array_equal(np.isnan(joined[0]).all(axis=1), [False, True, False])


def test_nan_stays_in_its_row():
    out, lse = np.ones((3, 2), np.float32), np.zeros(3, np.float32)
    bad_out, bad_lse = out.copy(), lse.copy()
    bad_out[1], bad_lse[1] = np.nan, np.nan
    for parts in ([(out, lse), (bad_out, bad_lse)], [(bad_out, bad_lse), (out, lse)]):
        joined = combine(parts)
        assert np.array_equal(np.isnan(joined[1]), [False, True, False])
        assert np.array_equal(np.isnan(joined[0]).all(axis=1), [False, True, False])
        np.testing.assert_allclose(joined[1][[0, 2]], math.log(2), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_change_no_bit(dtype):
    rng = np.random.default_rng(2)
    outs = [rng.standard_normal((2, 3, 9, 5)).astype(dtype) for _ in range(3)]
    accumulator = np.float64 if dtype == np.float64 else np.float32
    lses = [rng.standard_normal((2, 3, 9)).astype(accumulator) for _ in range(3)]
    expected = combine(list(zip(outs, lses, strict=True)))
    for _ in range(10):
        placed = [
            Placed(x.shape, x.dtype, random_layout(rng, x.ndim, x.itemsize), x) for x in outs + lses
        ]
        views = [x.view for x in placed]
        ours = combine(list(zip(views[:3], views[3:], strict=True)))
        for a, b in zip(ours, expected, strict=True):
            assert same_bits(a, b)
        for x in placed:
            x.check()


def test_the_gradient_of_the_lse_makes_split_keys_differentiable():
    """What `dlse` is for: the gradient through `combine`, part by part, is that of the whole."""
    rng = np.random.default_rng(3)
    q, k, v, do = (rng.standard_normal((2, 12, 6)) for _ in range(4))
    soft = scores.softcap(2.0)
    whole = attend_backward(do, q, k, v, score_mod=soft)
    parts = [attend(q, k[:, s], v[:, s], score_mod=soft) for s in (slice(0, 5), slice(5, 12))]
    out, lse = combine([x[:2] for x in parts])
    dq = np.zeros_like(q)
    for part, s in zip(parts, (slice(0, 5), slice(5, 12)), strict=True):
        weight = np.exp(part.lse - lse)
        dlse = weight * (do * (part.out - out)).sum(axis=-1)
        ours = attend_backward(
            weight[..., None] * do, q, k[:, s], v[:, s], dlse=dlse, score_mod=soft
        )
        np.testing.assert_allclose(ours.dk, whole.dk[:, s], rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(ours.dv, whole.dv[:, s], rtol=1e-10, atol=1e-13)
        dq += ours.dq
    np.testing.assert_allclose(dq, whole.dq, rtol=1e-10, atol=1e-13)
