"""The backward call: every gradient against the specification, identities, and exact zeros."""

import math

import numpy as np
import pytest
from halves import mostly_thorough
from harness import (
    GRADIENTS,
    assert_near,
    attend,
    attend_backward,
    backward_bound_of,
    backward_ratios,
    bound_of,
    run_backward,
    run_forward,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from placement import same_bits
from strategies import BFLOAT16, DTYPES, plain, problems

import cupyflash
from cupyflash import masks, scores
from cupyflash.reference.spec import naive

BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
AT_LENGTH = mostly_thorough("times", [1, 4], quick=[1], why="the same, searched for longer")
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


# The bound


@AT_LENGTH
@BY_DTYPE
def test_gradients_are_within_the_bound(dtype, times):
    @settings(max_examples=times * settings().max_examples)
    @given(problems(dtype))
    def check(problem):
        out, lse = run_forward(problem)
        assume(np.isfinite(out).all())  # the backward reads what float16 made of O
        ratios = backward_ratios(problem, run_backward(problem, out, lse))
        assert max(ratios.values()) <= 1, ratios

    check()


@BY_DTYPE
def test_logits_of_any_size_give_finite_gradients(dtype):
    @given(problems(dtype, families=("huge logits",)))
    def check(problem):
        for gradient in run_backward(problem, *run_forward(problem)):
            if gradient is not None:
                assert not np.isnan(gradient).any()
                if (
                    gradient.dtype not in (np.float16, BFLOAT16)
                    or dtype == gradient.dtype == BFLOAT16
                ):
                    assert np.isfinite(gradient).all()

    check()


# Bit by bit


@given(problems(SINGLE), problems(DOUBLE))
def test_twice_is_bitwise_equal(single, double):
    for problem in (single, double):
        rows = run_forward(problem)
        first, again = (run_backward(problem, *rows) for _ in "12")
        for ours, others in zip(first, again, strict=True):
            assert ours is others is None or same_bits(ours, others)


@pytest.mark.parametrize("threads", ["1", "2", "3", "7"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_number_of_threads_changes_no_bit(monkeypatch, threads, dtype):
    rng = np.random.default_rng(3)
    q, do = (rng.standard_normal((2, 6, 90, 24)).astype(dtype) for _ in "12")
    k, v = (rng.standard_normal((3, 70, 24)).astype(dtype) for _ in "12")
    options = {
        "mask": masks.window(30, 5), "score_mod": scores.softcap(3.0), "dropout": 0.2, "seed": 5,
        "bias": rng.standard_normal((6, 1, 70)).astype(dtype), "sink": np.ones(6, dtype),
    }  # fmt: skip
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "4")
    expected = attend_backward(do, q, k, v, (16, 8), **options)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
    ours = attend_backward(do, q, k, v, (16, 8), **options)
    for a, b in zip(ours[:5], expected[:5], strict=True):
        assert same_bits(a, b)


@given(problems(SINGLE))
def test_vjp_is_the_backward(problem):
    problem.tiles = None  # those that `attention_vjp` takes
    arrays = problem.q, problem.k, problem.v
    out, lse, vjp = cupyflash.attention_vjp(*arrays, return_lse=True, **problem.options)
    ours = vjp(problem.do, problem.dlse)
    expected = run_backward(problem, *run_forward(problem))
    for a, b in zip(ours, expected, strict=True):
        assert a is b is None or same_bits(a, b)
    short = cupyflash.attention_vjp(*arrays, **problem.options)
    assert len(short) == 2
    assert same_bits(short[0], out)
    assert lse.shape == out.shape[:-1]


@given(plain(), st.tuples(*[st.sampled_from([1, 5, 16, 64])] * 2))
def test_other_tiles_agree_within_the_bounds(p, tiles):
    options = {"mask": masks.causal(), "sink": np.zeros(p.q.shape[1], np.float32)}
    ours, others = (attend_backward(p.do, p.q, p.k, p.v, t, **options) for t in (p.tiles, tiles))
    bounds = [backward_bound_of(p.do, p.q, p.k, p.v, t, **options) for t in (p.tiles, tiles)]
    for name in ("dq", "dk", "dv", "dsink"):
        limits = (getattr(b, name).bound for b in bounds)
        assert_near(getattr(ours, name), getattr(others, name), *limits)


def test_causal_visits_528_of_1024_tiles():
    x = np.ones((1, 1024, 1), np.float32)
    assert attend_backward(x, x, x, x, (32, 32), mask=masks.causal()).visited == 528
    assert attend_backward(x, x, x, x, (32, 32)).visited == 1024


# Identities


def gradients_of(p, **options):
    ours = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options)
    return ours, backward_bound_of(p.do, p.q, p.k, p.v, p.tiles, **options)


def full_bias(p):
    return np.zeros((2, p.q.shape[1], p.q.shape[2], p.k.shape[2]), p.accumulator)


def per_query_head(p, x):
    return np.repeat(x, p.q.shape[1] // p.k.shape[1], axis=1)


@given(plain(), st.booleans())
def test_rows_of_ds_and_columns_of_dk_sum_to_zero(p, causal):
    # without dlse and without a sink
    mask = masks.causal() if causal else None
    ours, bound = gradients_of(p, bias=full_bias(p), mask=mask)
    rows = ours.dbias.sum(axis=-1, dtype=np.longdouble)
    assert_near(rows, 0 * rows, bound.dbias.bound.sum(axis=-1))
    columns = ours.dk.astype(np.longdouble).sum(axis=-2)
    assert_near(columns, 0 * columns, bound.dk.bound.sum(axis=-2))


@given(plain())
def test_dv_sums_to_do_of_the_rows_that_see_something(p):
    ours, bound = gradients_of(p, mask=masks.causal())
    sees = masks.causal().to_array(1, 1, p.q.shape[2], p.k.shape[2]).any(axis=-1)[..., None]
    do = np.where(sees, p.do.astype(np.longdouble), 0).sum(axis=-2)
    do = do.reshape(2, p.k.shape[1], -1, do.shape[-1]).sum(axis=2)
    assert_near(ours.dv.astype(np.longdouble).sum(axis=-2), do, bound.dv.bound.sum(axis=-2))


@given(plain(), st.booleans())
def test_inner_products_agree(p, with_dlse):
    dlse = p.rng.standard_normal(p.q.shape[:3]).astype(p.accumulator) if with_dlse else None
    options = {"mask": masks.window(7, 3)}
    ours, bound = gradients_of(p, dlse=dlse, **options)
    wide = [x.astype(np.longdouble) for x in (p.q, p.k, p.v, p.do)]
    q, k, v, do = wide
    dq, dk, dv = (x.astype(np.longdouble) for x in ours[:3])
    limits = [(b.bound * np.abs(x)).sum() for b, x in ((bound.dq, q), (bound.dk, k), (bound.dv, v))]
    assert_near((dq * q).sum(), (dk * k).sum(), *limits[:2])
    out = attend(p.q, p.k, p.v, p.tiles, **options).out.astype(np.longdouble)
    out_bound = bound_of(p.q, p.k, p.v, p.tiles, **options).out.bound
    assert_near((dv * v).sum(), (do * out).sum(), limits[2], (out_bound * np.abs(do)).sum())


@given(plain(dtypes=(SINGLE, DOUBLE, BFLOAT16)), st.booleans())
def test_twice_do_is_bitwise_twice_the_gradients(p, dropout):
    options = {"dropout": 0.3, "seed": 9} if dropout else {}
    once = attend_backward(p.do, p.q, p.k, p.v, p.tiles, mask=masks.causal(), **options)
    twice = attend_backward(p.do * 2, p.q, p.k, p.v, p.tiles, mask=masks.causal(), **options)
    for a, b in zip(once[:3], twice[:3], strict=True):
        assert np.array_equal(a * 2, b)


@given(plain(integers=True))
def test_gradients_are_linear_in_do(p):
    other = (p.rng.integers(-12, 13, p.do.shape) / 8).astype(p.dtype)
    parts = [attend_backward(do, p.q, p.k, p.v, p.tiles) for do in (p.do, other, p.do + other)]
    bounds = [backward_bound_of(do, p.q, p.k, p.v, p.tiles) for do in (p.do, other, p.do + other)]
    for name in ("dq", "dk", "dv"):
        a, b, both = (getattr(x, name).astype(np.float64) for x in parts)
        assert_near(a + b, both, *(getattr(x, name).bound for x in bounds))


@given(plain())
def test_a_constant_v_gives_no_gradient_to_q_and_k(p):
    p.v[:] = 1.5
    ours, bound = gradients_of(p)
    assert_near(ours.dq, 0 * ours.dq, bound.dq.bound)
    assert_near(ours.dk, 0 * ours.dk, bound.dk.bound)


@given(plain())
def test_dlse_alone(p):
    dlse = p.rng.standard_normal(p.q.shape[:3]).astype(p.accumulator)
    p.do[:] = 0
    ours, bound = gradients_of(p, dlse=dlse)
    assert not ours.dv.any()
    q, k = p.q.astype(np.float64), per_query_head(p, p.k.astype(np.float64))
    scale = 1 / math.sqrt(q.shape[-1])
    probs = np.exp(scale * q @ k.swapaxes(-1, -2))
    probs /= probs.sum(axis=-1, keepdims=True)
    dq = scale * (probs * dlse[..., None]) @ k
    assert_near(ours.dq, dq, bound.dq.bound + (1e-13 if p.dtype == DOUBLE else 0))


@given(plain(group=3))
def test_shared_heads_are_repeated_heads(p):
    ours, bound = gradients_of(p, mask=masks.causal())
    k, v = (per_query_head(p, x) for x in (p.k, p.v))
    apart = attend_backward(p.do, p.q, k, v, p.tiles, mask=masks.causal())
    limits = backward_bound_of(p.do, p.q, k, v, p.tiles, mask=masks.causal())
    assert same_bits(ours.dq, apart.dq)
    for name in ("dk", "dv"):
        shape = (2, p.k.shape[1], 3, *getattr(p, name[1]).shape[2:])
        summed = getattr(apart, name).astype(np.float64).reshape(shape).sum(axis=2)
        limit = getattr(limits, name).bound.reshape(shape).sum(axis=2)
        assert_near(getattr(ours, name), summed, getattr(bound, name).bound, limit)


# Exact zeros


@given(plain(), st.booleans())
def test_masked_keys_get_exact_zeros(p, by_bias):
    hidden = p.rng.random(p.k.shape[2]) < 0.4
    options = {"bias": np.where(hidden, -np.inf, 0).astype(np.float32)[None]}
    if not by_bias:
        options = {"mask": ~hidden[None]}
    ours = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options)
    assert not ours.dk[:, :, hidden].any()
    assert not ours.dv[:, :, hidden].any()
    if by_bias:
        assert not ours.dbias[:, hidden].any()
    if hidden.all():
        assert not ours.dq.any()


@given(plain(square=True))
def test_later_keys_get_no_gradient_from_earlier_queries(p):
    i = int(p.rng.integers(p.q.shape[2]))
    p.do[:, :, np.arange(p.q.shape[2]) != i] = 0
    ours = attend_backward(p.do, p.q, p.k, p.v, p.tiles, mask=masks.causal())
    assert not ours.dk[:, :, i + 1 :].any()
    assert not ours.dv[:, :, i + 1 :].any()
    assert not ours.dq[:, :, np.arange(p.q.shape[2]) != i].any()
    assert ours.dv[:, :, : i + 1].any()


@given(plain(), st.booleans())
def test_empty_rows_have_zero_gradients_whatever_their_do_and_dlse(p, with_sink):
    n = p.q.shape[2]
    empty = p.rng.random(n) < 0.5
    allowed = np.broadcast_to(~empty[:, None], (n, p.k.shape[2]))
    options = {"mask": allowed, "bias": full_bias(p)}
    dlse = p.rng.standard_normal(p.q.shape[:3]).astype(p.accumulator)
    p.do[:, :, empty] = 0
    dlse[:, :, empty] = 0
    if with_sink:
        options["sink"] = np.ones(p.q.shape[1], np.float32)
    clean = attend_backward(p.do, p.q, p.k, p.v, p.tiles, dlse=dlse, **options)
    p.do[:, :, empty] = np.nan
    p.q[:, :, empty] = np.inf
    if not with_sink:  # the LSE of such a row is the sink, and dlse is its gradient
        dlse[:, :, empty] = np.nan
    ours = attend_backward(p.do, p.q, p.k, p.v, p.tiles, dlse=dlse, **options)
    assert not ours.dq[:, :, empty].any()
    assert not ours.dbias[:, :, empty].any()
    for name in GRADIENTS:
        a, b = getattr(ours, name), getattr(clean, name)
        assert a is b is None or np.array_equal(a, b), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_broadcast_to_nothing_gets_zeros(dtype):
    q, k, v = np.ones((0, 1, 2, 3, 4)), np.ones((2, 1, 5, 4)), np.ones((1, 1, 5, 6))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    bias, sink = np.ones((1, 3, 1), np.float32), np.ones(2, np.float32)
    options = {"bias": bias, "sink": sink}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    made = [np.full(x.shape, np.nan, x.dtype) for x in (q, k, v, bias, sink)]
    ours = cupyflash.attention_backward(out, q, k, v, out, lse, grads_out=made, **options)
    for gradient, owner in zip(ours, (q, k, v, bias, sink), strict=True):
        assert gradient.shape == owner.shape
        assert not gradient.any()
    nothing = np.ones((0, 2, 3, 4), dtype)
    out, lse = cupyflash.attention(nothing[:, :1], k[:1], v, return_lse=True)
    assert not cupyflash.attention_backward(out, nothing[:, :1], k[:1], v, out, lse).dk.any()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_axes(shape):
    q, k = np.ones((2, 3, shape[0], 4)), np.ones((2, 3, shape[1], 4))
    options = {"bias": np.ones((3, 1, 1)), "sink": np.ones(3)}
    out, lse = cupyflash.attention(q, k, k, return_lse=True, **options)
    dlse = np.full(lse.shape, 0.5)
    ours = cupyflash.attention_backward(out, q, k, k, out, lse, dlse=dlse, **options)
    for gradient, owner in zip(ours[:4], (q, k, k, options["bias"]), strict=True):
        assert gradient.shape == owner.shape
        assert not gradient.any()
    np.testing.assert_allclose(ours.dsink, 2 * shape[0] * 0.5)  # p_sink = 1 and out = 0


# The derivative, by float64 differences


def loss(arrays, do, dlse, tiles, options):
    q, k, v, bias, sink = arrays
    out, lse, _ = attend(q, k, v, tiles, bias=bias, sink=sink, **options)
    return (out * do).sum() + (np.where(np.isneginf(lse), 0, lse) * dlse).sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": masks.causal()},
        {"score_mod": [scores.softcap(2.0), scores.alibi(np.array([0.5, 0.1]))], "scale": -0.8},
        {"score_mod": scores.score(lambda s, b, h, i, j: s * s / (1.0 + j) + s * i)},
        {"dropout": 0.4, "seed": 3, "mask": masks.window(4, 2)},
    ],
    ids=["plain", "causal", "scores", "user score", "dropout"],
)
def test_central_differences_and_the_adjoint(options):
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(x) for x in ((2, 2, 9, 5), (1, 11, 5), (2, 1, 11, 3), (9, 1), (2,))
    ]
    do, dlse = rng.standard_normal((2, 2, 9, 3)), rng.standard_normal((2, 2, 9))
    tiles = (4, 4)
    q, k, v, bias, sink = arrays
    ours = attend_backward(do, q, k, v, tiles, dlse=dlse, bias=bias, sink=sink, **options)
    step = 1e-5
    for _ in range(3):  # all inputs at once: <VJP(do, dlse), direction> = <(do, dlse), JVP>
        direction = [rng.standard_normal(x.shape) for x in arrays]
        ends = [
            loss([x + sign * step * t for x, t in zip(arrays, direction, strict=True)], do, dlse,
                 tiles, options)
            for sign in (1, -1)
        ]  # fmt: skip
        inner = sum((g * t).sum() for g, t in zip(ours[:5], direction, strict=True))
        assert inner == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-7, abs=1e-7)
    for n, (x, gradient) in enumerate(zip(arrays, ours[:5], strict=True)):  # one element at a time
        for place in rng.choice(x.size, min(x.size, 4), replace=False):
            ends = []
            for sign in (1, -1):
                moved = [y.copy() for y in arrays]
                moved[n].flat[place] += sign * step
                ends.append(loss(moved, do, dlse, tiles, options))
            difference = (ends[0] - ends[1]) / (2 * step)
            assert gradient.flat[place] == pytest.approx(difference, rel=1e-6, abs=1e-7)


def test_dsink_by_its_formula():
    rng = np.random.default_rng(1)
    q, k, v, do = (rng.standard_normal((2, 2, 12, 4)) for _ in range(4))
    dlse, sink = rng.standard_normal((2, 2, 12)), np.array([0.3, -np.inf])
    ours = attend_backward(do, q, k, v, dlse=dlse, sink=sink)
    out, lse, _ = attend(q, k, v, sink=sink)
    by_hand = (np.exp(sink[:, None] - lse) * (dlse - (do * out).sum(axis=-1))).sum(axis=(0, 2))
    np.testing.assert_allclose(ours.dsink, by_hand, rtol=1e-12)
    assert ours.dsink[1] == 0
    exact = naive.attention_backward(do, q, k, v, dlse=dlse, sink=sink)
    np.testing.assert_allclose(ours.dsink, exact.dsink, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_score_change_that_changes_nothing(dtype):
    """It has a derivative, but no program of its own."""
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 2, 12, 4)).astype(dtype)
    same = scores.score(lambda s, b, h, i, j: s)
    out, vjp = cupyflash.attention_vjp(q, k, v, score_mod=same)
    plain_out, plain_vjp = cupyflash.attention_vjp(q, k, v)
    assert np.array_equal(out, plain_out)
    for one, other in zip(vjp(out)[:3], plain_vjp(out)[:3], strict=True):
        assert np.array_equal(one, other)
