"""The forward call: every option against the specification, and what it promises bit by bit."""

import math

import numpy as np
import pytest
from halves import mostly_thorough
from harness import (
    assert_near,
    attend,
    bound_forward,
    bound_of,
    forward_ratios,
    run_forward,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import same_bits
from strategies import BFLOAT16, DTYPES, MASKS, Sizes, plain, problems

import cupyflash
from cupyflash import masks, scores
from cupyflash.testing import Precision

BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
AT_LENGTH = mostly_thorough("times", [1, 4], quick=[1], why="the same, searched for longer")


# The bound


@AT_LENGTH
@BY_DTYPE
def test_out_and_lse_are_within_the_bound(dtype, times):
    @settings(max_examples=times * settings().max_examples)
    @given(problems(dtype))
    def check(problem):
        ratios = forward_ratios(problem, *run_forward(problem))
        assert max(ratios.values()) <= 1, ratios

    check()


@BY_DTYPE
def test_logits_of_any_size_give_finite_convex_rows(dtype):
    @given(problems(dtype, families=("huge logits",)))
    def check(problem):
        if "dropout" in problem.options:
            del problem.options["dropout"], problem.options["seed"]
        out, lse = run_forward(problem)
        exact = bound_forward(problem)
        assert np.isfinite(out).all()
        assert np.array_equal(np.isneginf(lse), np.isneginf(exact.lse.exact))
        assert not np.isnan(lse).any()
        # Whatever the weights, each row is a mean of values (and 0, for a sink or an empty row), up
        # to the roundings of its numerator, of its row sum and of the result.
        v = problem.v.astype(np.float64)
        low, high = min(v.min(initial=0), 0), max(v.max(initial=0), 0)
        precision = Precision.of(dtype)
        roundings = 2 * precision.gamma(3 * problem.k.shape[-2] + 4) + precision.output.unit
        slack = max(-low, high) * 1.01 * roundings
        assert out.astype(np.float64).min(initial=0) >= low - slack
        assert out.astype(np.float64).max(initial=0) <= high + slack

    check()


@pytest.mark.thorough("what is drawn; it changes with the strategies alone")
def test_the_problems_drawn_are_not_idle():
    """What the strategy is for: most problems have options, several tiles and something to see."""
    seen = []

    @settings(max_examples=max(400, 4 * settings().max_examples))  # so many that chance is small
    @given(problems(np.dtype(np.float32)))
    def collect(problem):
        seen.append(problem)

    collect()
    number = len(seen)
    assert number >= 100
    several = [
        p for p in seen if p.tiles and p.q.shape[-2] > p.tiles[0] and p.k.shape[-2] > p.tiles[1]
    ]
    assert len(several) > number / 20
    for name in ("mask", "score_mod", "bias", "sink", "scale", "dropout"):
        assert sum(name in p.options for p in seen) > number / 10, name
    assert sum(p.dlse is not None for p in seen) > number / 5
    assert sum(p.layouts == "random" and p.q.size for p in seen) > number / 10
    assert sum(p.q.size * p.k.size > 0 for p in seen) > number / 2
    assert sum(p.q.shape[:-3] != p.k.shape[:-3] for p in seen) > 0


# Bit by bit


@given(problems(np.dtype(np.float32)), problems(np.dtype(np.float64)))
def test_twice_is_bitwise_equal(single, double):
    for problem in (single, double):
        first = [x.copy() for x in run_forward(problem)]
        for ours, again in zip(first, run_forward(problem), strict=True):
            assert same_bits(ours, again)


@pytest.mark.parametrize("threads", ["1", "2", "3", "7"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_number_of_threads_changes_no_bit(monkeypatch, threads, dtype):
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.standard_normal((2, h, n, 24)).astype(dtype) for h, n in ((6, 90), (3, 70), (3, 70))
    )
    options = {
        "mask": masks.window(30, 5), "score_mod": scores.softcap(3.0), "dropout": 0.2, "seed": 5,
        "bias": rng.standard_normal((6, 90, 70)).astype(dtype), "sink": np.ones(6, dtype),
    }  # fmt: skip
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "4")
    expected = attend(q, k, v, (16, 8), **options)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
    ours = attend(q, k, v, (16, 8), **options)
    assert same_bits(ours.out, expected.out)
    assert same_bits(ours.lse, expected.lse)


@given(plain(), st.booleans(), st.booleans())
def test_a_batch_entry_is_bitwise_what_it_is_alone(p, with_options, poison):
    options = {}
    if with_options:
        shape = (2, p.q.shape[1], p.q.shape[2], p.k.shape[2])
        options = {
            "bias": p.rng.standard_normal(shape).astype(np.float32),
            "mask": p.rng.random(shape) < 0.8,
            "score_mod": scores.softcap(2.0),
        }
    q, k, v = p.q.copy(), p.k.copy(), p.v.copy()
    if poison:  # in the other entry
        for x in (q, k, v):
            x[1].flat[:: max(x[1].size // 3, 1)] = np.nan
    together = attend(q, k, v, p.tiles, **options)
    own = {name: x[0] if isinstance(x, np.ndarray) else x for name, x in options.items()}
    alone = attend(q[0], k[0], v[0], p.tiles, **own)
    assert same_bits(together.out[0], alone.out)
    assert same_bits(together.lse[0], alone.lse)


@given(plain(group=1))
def test_a_head_is_bitwise_what_it_is_alone(p):
    together = attend(p.q, p.k, p.v, p.tiles)
    for h in range(p.q.shape[1]):
        parts = (x[:, h : h + 1] for x in (p.q, p.k, p.v))
        alone = attend(*parts, p.tiles)
        assert same_bits(together.out[:, h : h + 1], alone.out)
        assert same_bits(together.lse[:, h : h + 1], alone.lse)


@BY_DTYPE
def test_strides_change_no_bit(dtype):
    @given(problems(dtype))
    def check(problem):
        out, lse = (x.copy() for x in run_forward(problem))
        for name in "qkv":
            setattr(problem, name, np.ascontiguousarray(getattr(problem, name)))
        for name in ("bias", "sink"):
            if name in problem.options:
                problem.options[name] = np.array(problem.options[name], order="C")
        problem.layouts, problem.placed = "plain", []
        straight = run_forward(problem)
        assert same_bits(out, straight[0])
        assert same_bits(lse, straight[1])

    check()


@given(plain(), st.tuples(*[st.sampled_from([1, 5, 16, 64])] * 2))
def test_other_tiles_agree_within_the_bounds(p, tiles):
    options = {"mask": masks.causal(), "sink": np.zeros(p.q.shape[1], np.float32)}
    ours, others = (attend(p.q, p.k, p.v, t, **options) for t in (p.tiles, tiles))
    bounds = [bound_of(p.q, p.k, p.v, t, **options) for t in (p.tiles, tiles)]
    assert_near(ours.out, others.out, *(b.out.bound for b in bounds))
    assert_near(ours.lse, others.lse, *(b.lse.bound for b in bounds))


# Exact inputs, bitwise


@BY_DTYPE
@pytest.mark.parametrize("number", [1, 2, 16, 64, 256])
def test_no_queries_to_speak_of_give_the_exact_mean(dtype, number):
    rng = np.random.default_rng(number)
    q = np.zeros((2, 9, 16), dtype)
    k = rng.standard_normal((2, number, 16)).astype(dtype)
    v = rng.integers(-2, 3, (2, number, 5)).astype(dtype)
    mean = v.astype(np.float64).mean(axis=1, keepdims=True)  # an exact multiple of 2**-8
    for tiles in ((16, 16), (8, 64), (5, 7)):
        out, lse, _ = attend(q, k, v, tiles)
        assert same_bits(out, np.broadcast_to(mean, (2, 9, 5)).astype(dtype))
        np.testing.assert_allclose(
            lse, math.log(number), rtol=2**-22 if dtype.itemsize < 8 else 1e-15
        )


@BY_DTYPE
def test_distant_keys_select_rows_of_v(dtype):
    rng = np.random.default_rng(0)
    codes = np.where((np.arange(64)[:, None] >> np.arange(6)) & 1, 1, -1)  # 64 codes of 6 signs
    v = rng.standard_normal((64, 33)).astype(dtype)
    chosen = rng.integers(0, 64, 100)
    q = (codes[chosen] * 64).astype(dtype)[None]
    # The nearest other key differs in one sign: its logit is 2 * 64 * 16 = 2048 lower.
    for tiles in ((16, 16), (32, 8), (5, 64)):
        out, lse, _ = attend(q, codes.astype(dtype)[None], v[None], tiles, scale=16.0)
        assert same_bits(out[0], v[chosen])
        assert np.array_equal(lse[0], np.full(100, 6 * 64 * 16.0))


def test_bfloat16_of_133120():
    rng = np.random.default_rng(1)
    signs = rng.choice([-1.0, 1.0], (1, 64, 64))
    q = (133120 * rng.choice([-1.0, 1.0], (1, 40, 64))).astype(BFLOAT16)
    k = (133120 * signs).astype(BFLOAT16)
    v = rng.integers(-3, 4, (1, 64, 7)).astype(BFLOAT16)
    out, lse, _ = attend(q, k, v)
    logits = (
        q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / 8
    )  # exact in float32 too
    best = logits == logits.max(axis=-1, keepdims=True)  # others lie 4e9 lower
    count = best.sum(axis=-1)
    mean = (best @ v.astype(np.float64)) / count[..., None]
    unit = 2.0**-8
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out.astype(np.float64), mean, rtol=unit, atol=1e-6)
    np.testing.assert_allclose(lse, logits.max(axis=-1), rtol=2**-23)
    same = attend(np.abs(q), np.abs(k), v)  # every logit 133120**2 * 64 / 8
    exact = v.astype(np.float64).mean(axis=1)[:, None]
    assert same_bits(same.out, np.broadcast_to(exact, same.out.shape).astype(BFLOAT16))


# Tiles that are visited


def test_causal_visits_528_of_1024_tiles():
    x = np.ones((1, 1024, 1), np.float32)
    assert attend(x, x, x, (32, 32), mask=masks.causal()).visited == 528
    assert attend(x, x, x, (32, 32)).visited == 1024


EXACT_TILES = [
    "causal", "causal with offset", "window", "lengths", "lengths of both", "prefix", "dense",
]  # fmt: skip


def tiles_with_a_pair(allowed, tiles):
    """Number of tiles of (..., Lq, Lk) with any pair."""
    count = 0
    for i in range(0, allowed.shape[-2], tiles[0]):
        for j in range(0, allowed.shape[-1], tiles[1]):
            tile = allowed[..., i : i + tiles[0], j : j + tiles[1]]
            count += int(tile.any(axis=(-1, -2)).sum())
    return count


@given(
    st.sampled_from(EXACT_TILES),
    st.integers(0, 100),
    st.integers(0, 100),
    st.tuples(*[st.sampled_from([8, 16, 21])] * 2),
    st.integers(0, 2**32 - 1),
)
def test_no_tile_is_visited_in_vain(kind, len_q, len_k, tiles, seed):
    sizes = Sizes((2,), 2, len_q, len_k, None, np.random.default_rng(seed))
    mask = MASKS[kind](sizes)
    q, k = np.ones((2, 2, len_q, 1), np.float32), np.ones((2, 2, len_k, 1), np.float32)
    allowed = mask.to_array(2, 2, len_q, len_k)
    assert attend(q, k, k, tiles, mask=mask).visited == tiles_with_a_pair(allowed, tiles)


def test_a_program_looks_at_parts_of_a_tile():
    """Of a whole tile, it knows less: a product of differences may be negative there."""
    q, k = np.ones((1, 40, 1), np.float32), np.ones((1, 288, 1), np.float32)
    hides_all = masks.mask(lambda b, h, i, j: (j - 144) * (j - 144) < 0)
    assert attend(q, k, k, (64, 288), mask=hides_all).visited == 0
    assert attend(q, k, k, (64, 288), mask=masks.mask(lambda b, h, i, j: j != 144)).visited == 1


# The contract in single sentences


def test_scale_zero_and_negative():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, 8)).astype(np.float32) for _ in "qkv")
    out, lse, _ = attend(q, k, v, scale=0)
    np.testing.assert_allclose(
        out, np.broadcast_to(v.mean(axis=1, keepdims=True), out.shape), atol=1e-6
    )
    np.testing.assert_allclose(lse, math.log(20), rtol=1e-6)
    negative, mirrored = attend(q, k, v, scale=-0.7), attend(-q, k, v, scale=0.7)
    assert same_bits(negative.out, mirrored.out)
    assert same_bits(negative.lse, mirrored.lse)


def test_the_default_scale_is_one_over_root_d():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, 24)) for _ in "qkv")
    assert same_bits(attend(q, k, v).out, attend(q, k, v, scale=1 / math.sqrt(24)).out)


def test_rows_that_see_nothing():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, 8)).astype(np.float32) for _ in "qkv")
    allowed = np.ones((20, 20), bool)
    allowed[[0, 7, 19]] = False
    bias = np.where(allowed, 0, -np.inf).astype(np.float32)
    hide = scores.score(lambda s, b, h, i, j: s - cupyflash.expr.where(i == 7, math.inf, 0.0))
    for options in ({"mask": allowed}, {"bias": bias}, {"mask": allowed, "bias": bias}):
        out, lse, _ = attend(q, k, v, (8, 8), **options)
        assert not out[:, [0, 7, 19]].any()
        assert np.isneginf(lse[:, [0, 7, 19]]).all()
        assert np.isfinite(lse[:, 1:7]).all()
        sink = np.array([0.5, -1.25], np.float32)
        out, lse, _ = attend(q, k, v, (8, 8), sink=sink, **options)
        assert not out[:, [0, 7, 19]].any()
        assert np.array_equal(lse[:, [0, 7, 19]], np.broadcast_to(sink[:, None], (2, 3)))
    out, lse, _ = attend(q, k, v, (8, 8), score_mod=hide)
    assert not out[:, 7].any()
    assert np.array_equal(np.isneginf(lse), np.broadcast_to(np.arange(20) == 7, (2, 20)))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_axes(shape):
    q, k = np.ones((2, 3, shape[0], 4)), np.ones((2, 3, shape[1], 4))
    out, lse = cupyflash.attention(q, k, k, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]
    assert not out.any()
    assert np.isneginf(lse).all()
    out, lse = cupyflash.attention(q, k, k, return_lse=True, sink=np.ones(3))
    assert not out.any()
    assert (lse == 1).all()
    nobody = cupyflash.attention(q[:0], k[:1], k[:1])
    assert nobody.shape == (0, *q.shape[1:])
    headless = cupyflash.attention(q[:, :0], k[:, :0], k[:, :0])
    assert headless.shape == (2, 0, *q.shape[2:])


def test_lse_is_before_dropout_and_in_the_accumulator():
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        q, k, v = (rng.standard_normal((2, 20, 8)).astype(dtype) for _ in "qkv")
        dropped, whole = attend(q, k, v, dropout=0.9, seed=1), attend(q, k, v)
        assert same_bits(dropped.lse, whole.lse)
        assert dropped.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        assert not same_bits(dropped.out, whole.out)


def test_order_of_logits_is_score_bias_mask_sink():
    q, k, v = (np.full((1, n, 1), 3.0) for n in (1, 2, 2))
    bias = np.array([[1.0, 5.0]])
    _, lse, _ = attend(
        q, k, v, scale=2.0, score_mod=[scores.softcap(4.0), scores.score(lambda s, *_: s / 2)],
        bias=bias, mask=masks.prefix(1), sink=np.array([0.25]),
    )  # fmt: skip
    logit = 4 * math.tanh(18 / 4) / 2 + 1
    np.testing.assert_allclose(lse, [[math.log(math.exp(logit) + math.exp(0.25))]], rtol=1e-14)


def test_causal_looks_back_from_the_last_query():
    v = np.eye(7)[None]
    q, k = np.zeros((1, 4, 1)), np.zeros((1, 7, 1))
    out, _, _ = attend(q, k, v, mask=masks.causal())
    assert np.array_equal(out[0] > 0, np.tri(4, 7, 3, bool))
    out, _, _ = attend(q, k, v, mask=masks.causal(offset=0))
    assert np.array_equal(out[0] > 0, np.tri(4, 7, 0, bool))


def test_b_is_the_flat_index_over_broadcast_leading_axes():
    q, k = np.zeros((3, 1, 2, 1, 1)), np.zeros((2, 2, 4, 1))
    v = np.zeros((4, 1))[None]
    steps = scores.score(lambda s, b, h, i, j: s + 10.0 * b + h)
    _, lse, _ = attend(q, k, v[:, :, :].repeat(2, 0), score_mod=steps)
    expected = 10.0 * np.arange(6).reshape(3, 2, 1, 1) + np.arange(2)[:, None] + math.log(4)
    np.testing.assert_allclose(lse, expected, rtol=1e-14)


def test_a_precision_makes_no_difference_on_a_cpu():
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 2, 3, 40, 16), dtype=np.float32)
    plain, vjp = cupyflash.attention_vjp(q, k, v)
    other, other_vjp = cupyflash.attention_vjp(q, k, v, precision="tf32x3")
    assert same_bits(plain, other)
    for one, two in zip(vjp(do)[:3], other_vjp(do)[:3], strict=True):
        assert same_bits(one, two)
