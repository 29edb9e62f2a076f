"""Score changes: every constructor against a formula, chains, and errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from expressions import score_by_machine
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from cupyflash import lookup, masks, scores
from cupyflash.errors import ArgumentError, ArgumentTypeError, TraceError
from cupyflash.expr import (
    absolute,
    exp,
    floor,
    len_k,
    len_q,
    minimum,
    where,
)
from cupyflash.expr.bind import bind
from cupyflash.expr.derivative import derivative
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

rng = np.random.default_rng(9)


def positions(B, H, Lq, Lk):
    return np.ix_(np.arange(B), np.arange(H), np.arange(Lq), np.arange(Lk))


def same(change, s, sizes, expected, slope, rtol=1e-13):
    """Compare a change with formulas: by NumPy, and by the CPU kernels' machine."""
    found, found_slope = change.evaluate(s, *positions(*s.shape), sizes)
    assert found.shape == found_slope.shape == s.shape
    assert found.dtype == found_slope.dtype == s.dtype
    expected, slope = np.broadcast_to(expected, s.shape), np.broadcast_to(slope, s.shape)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(found_slope, slope, rtol=rtol, atol=rtol)
    if s.dtype == np.longdouble:
        return
    bound = bind(change.expr, flat_sizes(sizes))
    b, h = s.shape[0] - 1, s.shape[1] - 1
    tile = (b, h, 0, s.shape[2], 0, s.shape[3])
    for root, numbers in ((bound, expected), (derivative(bound), slope)):
        by_machine = score_by_machine(root, sizes, tile, s[b, h])
        np.testing.assert_allclose(by_machine, numbers[b, h], rtol=rtol, atol=rtol)


@st.composite
def problems(draw):
    B, H, Lq, Lk = (draw(st.integers(1, 5)) for _ in range(4))
    s = np.random.default_rng(draw(st.integers(0, 99))).normal(0, 4, (B, H, Lq, Lk))
    return s.astype(draw(st.sampled_from([np.float64, np.longdouble]))), Sizes((B,), H, Lq, Lk)


def slopes_of(heads, dtype=np.float64):
    return np.linspace(0.1, 1, heads).astype(dtype)


@given(problems())
def test_alibi(problem):
    s, sizes = problem
    slopes = slopes_of(sizes.heads)
    _, _, i, j = positions(*s.shape)
    distance = abs(i + sizes.len_k - sizes.len_q - j)
    same(scores.alibi(slopes), s, sizes, s - slopes[:, None, None] * distance, 1)


@given(problems(), st.booleans())
def test_alibi_of_each_batch_entry(problem, shared):
    s, sizes = problem
    slopes = rng.uniform(0.1, 1, (s.shape[0], 1 if shared else sizes.heads))
    _, _, i, j = positions(*s.shape)
    distance = abs(i + sizes.len_k - sizes.len_q - j)
    same(scores.alibi(slopes), s, sizes, s - slopes[:, :, None, None] * distance, 1)


@pytest.mark.parametrize("lead", [(2, 3), (2, 1), (1, 3), (3,)])
def test_alibi_of_two_leading_axes(lead):
    slopes = rng.uniform(0.1, 1, (*lead, 4))
    q, k, v = (rng.standard_normal((2, 3, 4, n, 8)) for n in (5, 7, 7))
    distance = abs(np.arange(5)[:, None] + 2 - np.arange(7))
    bias = -slopes[..., None, None] * distance
    ours = cupyflash.attention(q, k, v, score_mod=scores.alibi(slopes))
    np.testing.assert_allclose(ours, cupyflash.attention(q, k, v, bias=bias), rtol=1e-12)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2.0**-8]),
        (2, [2.0**-4, 2.0**-8]),
        (8, [2.0**-n for n in range(1, 9)]),
        (16, [2.0 ** (-n / 2) for n in range(1, 17)]),
        (3, [2.0**-4, 2.0**-8, 2.0**-2]),
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
        (12, [*(2.0**-n for n in range(1, 9)), *(2.0 ** (-n / 2) for n in (1, 3, 5, 7))]),
    ],
)
def test_slopes_of_the_paper(heads, slopes):
    found = scores.alibi_slopes(heads)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.array(slopes, np.float32))


@pytest.mark.parametrize("heads", range(1, 70))
def test_slopes_are_all_different_and_small(heads):
    found = scores.alibi_slopes(heads)
    assert found.shape == (heads,)
    assert len(set(found.tolist())) == heads
    assert (found >= 2.0**-8).all()
    assert (found < 1).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_alibi_of_every_type(dtype):
    s, sizes = rng.normal(size=(2, 3, 4, 5)), Sizes((2,), 3, 4, 5)
    slopes = slopes_of(3, dtype)
    _, _, i, j = positions(*s.shape)
    expected = s - slopes.astype(float)[:, None, None] * abs(i + 1 - j)
    for given_ in (slopes, lookup(slopes), np.repeat(slopes, 2)[::2]):
        same(scores.alibi(given_), s, sizes, expected, 1)
    same(scores.alibi([0.5]), s, sizes, s - 0.5 * abs(i + 1 - j), 1)
    same(
        scores.alibi([0.5, 1.0, 2.0]),
        s,
        sizes,
        s - np.array([[[0.5]], [[1]], [[2]]]) * abs(i + 1 - j),
        1,
    )


@given(problems(), st.floats(0.5, 50))
def test_softcap(problem, c):
    s, sizes = problem
    tanh = np.tanh(s / s.dtype.type(c))
    same(scores.softcap(c), s, sizes, c * tanh, 1 - tanh**2)


@given(problems(), st.integers(0, 4), st.sampled_from(["heads", "one", "flat"]))
def test_relative_bias(problem, reach, form):
    s, sizes = problem
    size = 2 * reach + 1
    shape = {"heads": (sizes.heads, size), "one": (1, size), "flat": (size,)}[form]
    table = np.random.default_rng(3).normal(size=shape)
    _, h, i, j = positions(*s.shape)
    place = np.clip(j - i - (sizes.len_k - sizes.len_q), -reach, reach) + reach
    wide = np.broadcast_to(table, (sizes.heads, size))
    same(scores.relative_bias(table), s, sizes, s + wide[h, place], 1)


def test_a_function():
    s, sizes = rng.normal(0, 3, (2, 3, 4, 5)), Sizes((2,), 3, 4, 5)
    b, h, i, j = positions(*s.shape)
    seen = []

    def rule(s, b, h, i, j):
        seen.append(s)
        return where((i - j) % 2 == 0, s * (h + 1), exp(minimum(s, 2)) - b * 0.5)

    even = np.broadcast_to((i - j) % 2 == 0, s.shape)
    expected = np.where(even, s * (h + 1), np.exp(np.minimum(s, 2)) - b * 0.5)
    slope = np.where(even, h + 1, np.where(s <= 2, np.exp(np.minimum(s, 2)), 0))
    same(scores.score(rule), s, sizes, expected, slope)
    assert len(seen) == 1
    same(scores.score(lambda s, b, h, i, j: i), s, sizes, i, 0)
    same(scores.score(lambda s, b, h, i, j: 3), s, sizes, 3, 0)
    same(scores.score(lambda s, *_: s), s, sizes, s, 1)
    same(scores.score(lambda s, *_: absolute(s)), s, sizes, abs(s), np.sign(s))
    same(scores.score(lambda s, *_: floor(s * 2) / 2), s, sizes, np.floor(s * 2) / 2, 0)
    hidden = scores.score(lambda s, b, h, i, j: where(j <= i + len_k - len_q, s, float("-inf")))
    same(hidden, s, sizes, np.where(j <= i + 1, s, -np.inf), j <= i + 1)


def test_arrays_stay_arrays():
    table = np.zeros((3, 5))
    change = scores.score(lambda s, b, h, i, j: s + lookup(table)[h, j])
    s, sizes = rng.normal(size=(2, 3, 4, 5)), Sizes((2,), 3, 4, 5)
    table[...] = rng.normal(size=table.shape)
    same(change, s, sizes, s + table[:, None, :], 1)


def test_all_arithmetic_is_in_the_type_of_the_scores():
    sizes = Sizes((1,), 1, 1, 3)
    for dtype in (np.float32, np.float64, np.longdouble):
        s = np.array([1, 2, 3], dtype).reshape(1, 1, 1, 3)
        change = scores.score(lambda s, b, h, i, j: s / 3 + lookup(np.array([0.1]))[i])
        found, _ = change.evaluate(s, *positions(1, 1, 1, 3), sizes)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, s / dtype(3) + dtype(np.float64(0.1)))


def test_no_scores_at_all():
    for shape in ((0, 1, 2, 3), (1, 1, 0, 3), (1, 1, 3, 0)):
        s, sizes = np.zeros(shape), Sizes(shape[:1], *shape[1:])
        t, slope = scores.alibi([0.5]).evaluate(s, *positions(*shape), sizes)
        assert t.shape == slope.shape == shape
        parts = scores.alibi([0.5]).evaluate_with_error(s, s, *positions(*shape), sizes, 2.0**-24)
        assert [x.shape for x in parts] == [shape] * 4


# -- chains ---------------------------------------------------------------------------------------


def test_chains_apply_in_order():
    s, sizes = rng.normal(0, 3, (1, 2, 4, 5)), Sizes((1,), 2, 4, 5)
    slopes = slopes_of(2)
    _, _, i, j = positions(*s.shape)
    penalty = slopes[:, None, None] * abs(i + 1 - j)
    a, b = scores.alibi(slopes), scores.softcap(4.0)
    tanh = np.tanh((s - penalty) / 4)
    same(a.then(b), s, sizes, 4 * tanh, 1 - tanh**2)
    same(scores.chain([a, b]), s, sizes, 4 * tanh, 1 - tanh**2)
    same(scores.chain((b, a)), s, sizes, 4 * np.tanh(s / 4) - penalty, 1 - np.tanh(s / 4) ** 2)
    same(b.then(b).then(a), s, sizes, 4 * np.tanh(np.tanh(s / 4)) - penalty,
         (1 - np.tanh(s / 4) ** 2) * (1 - np.tanh(np.tanh(s / 4)) ** 2))  # fmt: skip
    assert scores.chain(a) is a
    assert scores.chain(None) is None
    assert scores.chain([]) is None
    assert scores.chain([a]) is a


def test_a_chains_slope_is_the_product_of_its_members_slopes():
    members = [scores.softcap(3.0), scores.score(lambda s, *_: s * s), scores.alibi([0.5])]
    s, sizes = rng.normal(0, 2, (1, 1, 3, 3)), Sizes((1,), 1, 3, 3)
    t, product = s, np.ones(s.shape)
    for change in members:
        t, slope = change.evaluate(t, *positions(*s.shape), sizes)
        product = product * slope
    same(scores.chain(members), s, sizes, t, product)


# -- packed sequences -----------------------------------------------------------------------------


def test_packed_sequences():
    len_q, len_k = [2, 5], [4, 3]
    table = rng.normal(size=(2, 5))
    for n in range(2):
        b = np.full((1, 1, 1, 1), n)
        sizes = Sizes((2,), 2, b * 0 + len_q[n], b * 0 + len_k[n], b * 0, b * 0)
        _, h, i, j = np.ogrid[0:1, 0:2, 0 : len_q[n], 0 : len_k[n]]
        s = rng.normal(size=(1, 2, len_q[n], len_k[n]))
        distance = j - i - (len_k[n] - len_q[n])
        for change, expected in (
            (scores.alibi([0.5, 2.0]), s - np.array([0.5, 2.0])[h] * abs(distance)),
            (scores.alibi(table[:, :2]), s - table[n, h] * abs(distance)),
            (scores.relative_bias(table), s + table[h, np.clip(distance, -2, 2) + 2]),
        ):
            found, slope = change.evaluate(s, b, h, i, j, sizes)
            np.testing.assert_allclose(found, expected, rtol=1e-14)
            assert (slope == 1).all()


# -- what it shows, and errors --------------------------------------------------------------------


def test_a_score_shows_itself():
    assert repr(scores.softcap(2)) == "<score (2.0 * tanh((score * 0.5)))>"
    assert "alibi: slopes[h] * absolute(" in repr(scores.alibi([0.5]))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: scores.alibi(0.5), ArgumentTypeError, "alibi: slopes: got float; expected a"),
        (
            lambda: scores.alibi([1, 2]),
            ArgumentTypeError,
            "alibi: slopes: got dtype int64; expected f",
        ),
        (lambda: scores.softcap("a"), ArgumentTypeError, "softcap: c is 'a'; expected a positive"),
        (lambda: scores.softcap(True), ArgumentTypeError, "softcap: c is True"),
        (lambda: scores.softcap(0), ArgumentError, "softcap: c is 0; expected a positive, finite"),
        (lambda: scores.softcap(-1.0), ArgumentError, "softcap: c is -1.0"),
        (lambda: scores.softcap(np.inf), ArgumentError, "softcap: c is inf"),
        (lambda: scores.softcap(np.nan), ArgumentError, "softcap: c is nan"),
        (
            lambda: scores.relative_bias(np.ones((2, 4))),
            ArgumentError,
            r"\(2, 4\); .*odd number",
        ),
        (lambda: scores.relative_bias(np.ones((1, 2, 3))), ArgumentError, r"got .*\(1, 2, 3\)"),
        (lambda: scores.relative_bias(np.ones(())), ArgumentError, r"shape \(\); expected"),
        (
            lambda: scores.relative_bias([1, 2, 3]),
            ArgumentTypeError,
            "relative_bias: table: got dtype int",
        ),
        (
            lambda: scores.score(3),
            ArgumentTypeError,
            r"score: got int; expected a function of \(s, b",
        ),
        (lambda: scores.score(lambda s: s), ArgumentTypeError, r"must take \(s, b, h, i, j\)"),
        (lambda: scores.score(lambda s, *_: None), TraceError, "score: its function returned None"),
        (
            lambda: scores.score(lambda s, *_: s < 3),
            TraceError,
            r"condition \(score < 3.0\); expected a",
        ),
        (
            lambda: scores.score(lambda s, *_: "no"),
            TraceError,
            "got str in a mask or score",
        ),
        (lambda: scores.score(lambda s, *_: s if s > 0 else 0), TraceError, "where"),
        (lambda: scores.score(lambda s, *_: max(s, 0)), TraceError, "maximum"),
        (
            lambda: scores.softcap(1.0).then(np.tanh),
            ArgumentTypeError,
            "then: got ufunc; expected a",
        ),
        (
            lambda: scores.chain(np.tanh),
            ArgumentTypeError,
            r"score_mod: got ufunc.*scores\.score\(",
        ),
        (lambda: scores.chain([scores.softcap(1), 3]), ArgumentTypeError, "score_mod: got int"),
        (lambda: scores.alibi_slopes(2.0), ArgumentTypeError, "heads is 2.0; expected a whole"),
        (lambda: scores.alibi_slopes(True), ArgumentTypeError, "heads is True; expected a whole"),
        (lambda: scores.alibi_slopes(0), ArgumentError, "heads is 0; expected at least 1"),
        (lambda: scores.chain("alibi"), ArgumentTypeError, "score_mod: got str"),
        (lambda: scores.chain([masks.causal()]), ArgumentTypeError, "score_mod: got Mask"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            scores.alibi(np.ones(4)),
            r"alibi: slopes: got an array of shape \(4,\); expected .*\(2, 3\)",
        ),
        (scores.alibi(np.ones((3, 3))), r"alibi: slopes: got .*\(3, 3\); expected .*\(2, 3\)"),
        (scores.relative_bias(np.ones((2, 5))), r"relative_bias: table: .*\(2, 5\).*\(3, 5\)"),
        (scores.score(lambda s, b, h, i, j: s + lookup(np.ones(4))[j]), "clip"),
        (scores.score(lambda s, b, h, i, j: s + lookup(np.ones(4))[floor(s)]), "clip"),
    ],
)
def test_errors_that_need_the_sizes(change, words):
    s = np.zeros((2, 3, 4, 5))
    with pytest.raises(ArgumentError, match=words):
        change.evaluate(s, *positions(*s.shape), Sizes((2,), 3, 4, 5))
    with pytest.raises(ArgumentError, match=words):
        change.evaluate_with_error(s, s, *positions(*s.shape), Sizes((2,), 3, 4, 5), 2.0**-24)
