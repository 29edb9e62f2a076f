"""The bound: values worked by hand, no false alarm, and teeth."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from honest_kernel import Causal, Softcap, judge, kernel, options_of, problem

import cupyflash
from cupyflash.reference.spec import naive, naive_formulas
from cupyflash.testing import (
    Precision,
    backward_bound,
    backward_bound_varlen,
    forward_bound,
    forward_bound_varlen,
    rho,
)

SINGLE = Precision.of(np.float32)


# No false alarm


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(
    "name", ["plain", "mask", "score", "bias", "sink", "dropout", "dlse", "scale", "all"]
)
def test_an_honest_kernel_passes(dtype, name):
    ratios = judge(*problem(dtype), **options_of(name))
    assert max(ratios.values()) <= 1, ratios
    if dtype in (np.float16, ml_dtypes.bfloat16):  # the output's own rounding fills the bound
        assert ratios["out"] > 0.5


@pytest.mark.parametrize("seed", range(40))
def test_an_honest_kernel_passes_on_random_problems(seed):
    rng = np.random.default_rng(seed)
    rows, keys, depth = (int(rng.integers(1, n)) for n in (20, 150, 70))
    dtype = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64][seed % 4]
    arrays = problem(dtype, rows, keys, depth, seed)
    q, _, v, _ = arrays
    change = ["none", "large", "small", "offset", "equal"][seed % 5]
    if change == "large":
        q *= q.dtype.type(20)
    elif change == "small":
        v *= v.dtype.type(1e-3)
    elif change == "offset":
        v += v.dtype.type(10)
    elif change == "equal":
        q *= q.dtype.type(0)
    options = {} if seed % 3 else {"mask": Causal(), "sink": np.ones(4, np.float32)}
    block_kv = int(rng.choice([16, 32, 64]))
    ratios = judge(*arrays, block_kv=block_kv, lag=8 * (seed % 2), rng=rng, **options)
    assert max(ratios.values()) <= 1, (change, ratios)


@pytest.mark.parametrize("name", ["plain", "mask", "sink", "all"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_maxima_may_lag(dtype, name):
    q, k, v, do = problem(dtype)
    q[:] = 1
    k -= k.mean(axis=-1, keepdims=True)
    k += np.linspace(0, 1.25, k.shape[-2])[:, None].astype(dtype)  # logits rise to 5 = 7.2 log 2
    ratios = judge(q, k, v, do, lag=8, **options_of(name))
    assert max(ratios.values()) <= 1, ratios


def test_numerators_of_a_maximum_that_lags_fit():
    q, k, v, _ = problem()
    large = v * 2.0**110
    lags = dataclasses.replace(SINGLE, lag=8 * np.log(2))
    assert np.isfinite(forward_bound(q, k, large, precision=lags).out.bound).all()
    large *= 2.0**9
    assert np.isfinite(forward_bound(q, k, large, precision=SINGLE).out.bound).all()
    assert np.isinf(forward_bound(q, k, large, precision=lags).out.bound).any()


# Teeth


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("bug", "caught_by"),
    [
        ("key", ["out", "lse", "dq", "dk", "dv"]),
        ("log2e", ["out", "lse", "dv"]),
        ("scale", ["out", "lse", "dv"]),
        ("rescale", ["out", "lse"]),
        ("group", ["dk"]),
        ("slope", ["dq", "dk"]),
    ],
)
def test_bugs_are_caught(dtype, bug, caught_by):
    options = {"score_mod": Softcap(3.0)} if bug == "slope" else {}
    arrays = problem(dtype)
    ratios = judge(*arrays, bug=bug, **options)
    for name in caught_by:
        assert ratios[name] > 1, (name, ratios)


def test_a_delta_off_by_a_thousandth_is_caught():
    q, k, v, do = problem()
    assert judge(q, k, v + 3, do, bug="delta")["delta"] > 1  # the offset keeps delta from 0


def test_one_dropped_key_of_a_thousand_is_caught_in_nearly_every_row():
    q, k, v, do = problem(keys=1024)
    out, _, _, _ = kernel(q, k, v, do, bug="key")
    exact, bound = forward_bound(q, k, v, precision=SINGLE, block_kv=32).out
    caught = (np.abs(out - exact) / bound).max(axis=-1) > 1  # but where its weight is tiny
    assert caught.mean() > 0.95


def test_an_epsilon_in_the_row_sum_is_caught():
    # It shows where the row sum is near 1: few keys, or one that dominates.
    q, k, v, do = problem(keys=1)
    assert judge(q, k, v, do)["lse"] <= 1
    assert judge(q, k, v, do, bug="epsilon")["lse"] > 1


def test_a_bug_in_float64_far_below_float32_is_caught():
    q, k, v, do = problem(np.float64)
    out, _, _, _ = kernel(q, k, v, do)
    bounded = forward_bound(q, k, v, precision=Precision.of(np.float64), block_kv=32).out
    assert bounded.exact.dtype == np.longdouble
    assert rho(out, *bounded).value <= 1
    assert rho(out * (1 + 1e-11), *bounded).value > 1


# By hand


def test_one_key_by_hand():
    # One key: P = 1 and O = v, up to the rounding of p v / p; LSE = s = 2 * 3.
    q, k, v = (np.array([[x]], np.float32) for x in (2.0, 3.0, 5.0))
    forward = forward_bound(q, k, v, scale=1.0, precision=SINGLE, block_kv=64)
    assert forward.out.exact == 5.0
    assert forward.lse.exact == 6.0
    u, e = 2.0**-24, 2.0**-22
    # The hull of one value is that value; n = 1 + 2 + 2 roundings on either side of the division.
    hull = 2 * 5 * u * 5.0
    assert forward.out.bound[0, 0] == pytest.approx(hull + u * 5.0, rel=1e-5)
    # tau = gamma(1 + 3) * 6; a = tau + 3u (|t| + M) + 2e; theta = a + gamma(5); B_L adds 4u |m| + e
    tau = 4 * u * 6
    theta = tau + 3 * u * (6 + 6) + 2 * e + 5 * u
    assert forward.lse.bound[0] == pytest.approx(theta + 4 * u * 6 + e, rel=1e-4)


def test_uniform_weights_by_hand():
    # q = 0: every logit is exactly 0, so that only exp2, the sums and the division err.
    keys = 8
    q, k = np.zeros((1, 4), np.float32), np.ones((keys, 4), np.float32)
    v = np.where(np.arange(keys) % 2 == 0, 1, -1).astype(np.float32)[:, None]
    forward = forward_bound(q, k, v, precision=SINGLE, block_kv=4)
    u, e, tiles = 2.0**-24, 2.0**-22, 2
    theta = (tiles + 1) * e + (keys + 2 * tiles + 2) * u
    assert forward.out.exact == 0
    assert forward.out.bound[0, 0] == pytest.approx(theta, rel=1e-4)  # |P| |V| = 1, O = 0
    assert forward.lse.bound[0] == pytest.approx(theta + 4 * u * np.log(keys) + e, rel=1e-4)


def test_delta_by_hand():
    q, k, v = (np.array([[x]], np.float32) for x in (2.0, 3.0, 5.0))
    do = np.array([[-7.0]], np.float32)
    backward = backward_bound(do, q, k, v, scale=1.0, precision=SINGLE)
    out = forward_bound(q, k, v, scale=1.0, precision=SINGLE).out
    assert backward.delta.exact == -35.0
    by_hand = 7 * out.bound[0, 0] + 2.0**-24 * 7 * (5 + out.bound[0, 0])
    assert backward.delta.bound[0] == pytest.approx(by_hand, rel=1e-6)
    # One key: dT = P (dP - delta) = 0, and what may be computed is the error of the difference.
    assert backward.dq.exact == 0
    assert 3 * by_hand < backward.dq.bound[0, 0] < 3 * 3 * by_hand


def test_output_rounding_of_each_type():
    q, k, v, _ = problem()
    bounds = {}
    for dtype, unit in ((np.float16, 2.0**-11), (ml_dtypes.bfloat16, 2.0**-8)):
        parts = [x.astype(dtype) for x in (q, k, v)]
        exact, bound = forward_bound(*parts, precision=Precision.of(dtype)).out
        assert np.all(bound >= unit * np.abs(exact))
        bounds[dtype] = forward_bound(*parts, precision=Precision.of(dtype, tensor_cores=True))
        assert np.all(bounds[dtype].out.bound > bound)  # P is an operand of 16 bits there


@pytest.mark.parametrize(("size", "power", "legal"), [
    (2.0**-13, 26, True), (2.0**-13, 21, True), (2.0**-13, 0, False),
    (2.0**18, -5, True), (2.0**18, 0, False), (2.0**18, -32, False),
])  # fmt: skip
def test_ds_in_float16_neither_vanishes_nor_overflows(size, power, legal):
    q, k, v, do = (x.astype(np.float64) for x in problem())
    k, do = 64 * k, size * do
    q = q / 64
    _, f = naive.forward_dense(q, k, v)
    ds = naive_formulas.backward_block(f, do, None).dscores
    with np.errstate(over="ignore", invalid="ignore"):
        stored = (ds * 2.0**power).astype(np.float16).astype(np.float64)
        dq = f.scale * (stored * 2.0**-power) @ f.k
    precision = dataclasses.replace(
        Precision.of(np.float16, tensor_cores=True), output=Precision.of(np.float32).output
    )
    bound = backward_bound(do, q, k, v, precision=precision)
    assert (rho(dq, *bound.dq).value <= 1) == legal


def test_masked_rows_and_keys_have_zero_exact_values_and_tiny_bounds():
    q, k, v, do = problem(rows=6, keys=4)  # causal: rows 0 and 1 see nothing
    k[:, 3] = np.nan  # only the last row sees the last key
    forward = forward_bound(q, k, v, mask=Causal(), precision=SINGLE)
    assert np.all(forward.out.bound[..., :2, :] == 0)
    assert np.all(forward.lse.exact[..., :2] == -np.inf)
    assert np.isfinite(forward.out.bound[..., :5, :]).all()
    assert np.isinf(forward.out.bound[..., 5, :]).all()
    assert forward.ill_conditioned == 2 * 4
    backward = backward_bound(do, q, k, v, mask=Causal(), precision=SINGLE)
    assert np.all(backward.dq.bound[..., :2, :] <= 2.0**-120)
    assert np.isfinite(backward.dq.bound[..., :5, :]).all()


def test_huge_logits_are_ill_conditioned_and_counted():
    q, k, v, do = problem()
    q[0, 1, 3] *= 1e6
    forward = forward_bound(q, k, v, precision=SINGLE)
    assert forward.ill_conditioned == 1
    assert np.isinf(forward.out.bound[0, 1, 3]).all()
    assert np.isinf(forward.lse.bound[0, 1, 3])
    assert np.isinf(forward.out.bound).sum() == 8
    backward = backward_bound(do, q, k, v, precision=SINGLE)
    assert backward.ill_conditioned == 1
    assert np.isinf(backward.dq.bound[..., 0]).sum() == 1
    assert np.isinf(backward.dk.bound[0]).any()  # heads 0 and 1 share key head 0
    assert np.isfinite(backward.dk.bound[1]).all()


def test_products_that_overflow_the_accumulator_are_not_judged():
    q, k = np.full((1, 4), 1e30, np.float32), np.full((3, 4), 1e30, np.float32)
    forward = forward_bound(q, k, np.ones((3, 1)), scale=1e-60, precision=SINGLE)
    assert forward.ill_conditioned == 1


def test_float16_overflow_is_legal_where_the_exact_value_is_near_it():
    q, k = np.zeros((1, 1), np.float16), np.zeros((2, 1), np.float16)
    v, do = np.full((2, 2), 65504.0, np.float16), np.ones((1, 2), np.float16)
    v[:, 1] = 1000.0
    precision = Precision.of(np.float16)
    bound = forward_bound(q, k, v, precision=precision).out.bound
    assert np.isinf(bound[0, 0])
    assert np.isfinite(bound[0, 1])
    assert backward_bound(do, q, k, v, precision=precision).ill_conditioned == 0


def test_constant_values_are_capped_by_their_hull():
    q, k, _, _ = problem()
    q *= 20  # logits near 200: without the hull the bound would be a thousand times wider
    exact, bound = forward_bound(q, k, np.ones((2, 100, 3), np.float32), precision=SINGLE).out
    np.testing.assert_allclose(exact, 1, rtol=1e-14)
    assert bound.max() < 300 * 2.0**-24


def test_packed_bounds_are_the_bounds_of_each_sequence():
    rng = np.random.default_rng(0)
    offsets = [0, 3, 3, 10]
    q, k, v, do = (rng.standard_normal((h, 10, 4)).astype(np.float32) for h in (4, 2, 2, 4))
    bias, sink = rng.standard_normal((3, 1, 7, 7)), rng.standard_normal(4).astype(np.float32)
    dlse = rng.standard_normal((4, 10))
    options = {"precision": SINGLE, "sink": sink, "mask": Causal()}
    forward = forward_bound_varlen(q, k, v, offsets, offsets, bias=bias, **options)
    packed = backward_bound_varlen(do, q, k, v, offsets, offsets, dlse=dlse, bias=bias, **options)
    dsink = np.zeros(4)
    for b, rows in ((0, slice(0, 3)), (2, slice(3, 10))):
        n = rows.stop - rows.start
        parts = [x[:, rows] for x in (q, k, v)]
        local = options | {"bias": bias[b, :, :n, :n]}
        one = forward_bound(*parts, **local)
        back = backward_bound(do[:, rows], *parts, dlse=dlse[:, rows], **local)
        for ours, theirs in (
            (forward.out, one.out), (forward.lse, one.lse), (packed.dq, back.dq),
            (packed.dk, back.dk), (packed.dv, back.dv), (packed.delta, back.delta),
        ):  # fmt: skip
            np.testing.assert_array_equal(ours.exact[:, rows], theirs.exact)
            np.testing.assert_array_equal(ours.bound[:, rows], theirs.bound)
        np.testing.assert_allclose(packed.dbias.bound[b, :, :n, :n], back.dbias.bound, rtol=1e-12)
        dsink += back.dsink.exact
    np.testing.assert_allclose(packed.dsink.exact, dsink, rtol=1e-13)
    assert np.all(packed.dsink.bound > 0)
    assert forward.ill_conditioned == packed.ill_conditioned == 0


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_axes(shape):
    rows, keys = shape
    q, k, v, do = (
        np.zeros((2, n, 4), np.float32) for n in (rows, keys, keys, rows)
    )  # fmt: skip
    options = {"precision": SINGLE, "bias": np.zeros((rows, keys)), "sink": np.zeros(2)}
    forward = forward_bound(q, k, v, **options)
    assert rho(np.zeros((2, rows, 4)), *forward.out).value == 0
    assert rho(np.zeros((2, rows)), *forward.lse).value == 0
    backward = backward_bound(do, q, k, v, **options)
    assert rho(np.zeros((2, keys, 4)), *backward.dk).value == 0
    assert rho(np.zeros((rows, keys)), *backward.dbias).value == 0
    assert rho(np.zeros(2), *backward.dsink).value == 0


# rho and Precision


def test_rho_at_the_edges():
    inf, nan = np.inf, np.nan
    assert rho(1.5, 1.0, 1.0).value == 0.5
    assert rho(1.0, 1.0, 0.0).value == 0  # 0 / 0
    assert rho(1.0, 0.0, 0.0).value == inf
    assert rho(-inf, -inf, 0.0).value == 0  # equal infinities
    assert rho(-inf, inf, 1.0).value == inf
    assert rho(inf, 0.0, 1.0).value == inf
    assert rho(5.0, 0.0, inf).value == 0  # ill-conditioned
    assert rho(inf, 0.0, inf).value == 0
    assert rho(nan, 0.0, inf).value == inf  # NaN always fails
    assert rho(nan, nan, inf).value == inf
    assert rho(0.0, 0.0, nan).value == inf
    empty = rho(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3)))
    assert (empty.value, empty.index) == (0, ())
    with pytest.raises(ValueError, match="shapes differ"):
        rho(np.zeros(3), np.zeros((3, 1)), np.zeros(3))


def test_rho_says_where():
    actual = np.zeros((2, 3), ml_dtypes.bfloat16)
    actual[1, 2] = -4
    worst = rho(actual, np.zeros((2, 3)), np.ones((2, 3)))
    assert (worst.value, worst.index) == (4.0, (1, 2))


def test_rho_resolves_errors_below_float64():
    exact = np.longdouble(1) + np.longdouble(2) ** -60
    assert rho(1.0, exact, 2.0**-60).value == 1


def test_precision_of_each_type():
    assert Precision.of(np.float32).unit == 2.0**-24
    assert Precision.of(np.float64).unit == 2.0**-53
    half = Precision.of(np.float16, tensor_cores=True)
    assert (half.unit, half.product.unit, half.output.unit) == (2.0**-24, 2.0**-11, 2.0**-11)
    assert half.truncates
    assert half.scaled_underflow == 2.0**-32
    assert half.lag == Precision.of("bfloat16", tensor_cores=True).lag == 8 * np.log(2)
    assert Precision.of(np.float32, precision="tf32x3").lag == Precision.of(np.float16).lag == 0
    assert Precision.stated(lag=3.0).lag == 3
    assert Precision.of("bfloat16", tensor_cores=True).scaled_underflow == 0
    assert Precision.of("bfloat16").product.unit == 2.0**-16  # a CPU with AMX rounds so
    assert Precision.of("float32").product.unit == 0
    assert Precision.of(np.float32, tensor_cores=True).product.unit == 0
    split = Precision.of(np.float32, precision="tf32x3")
    assert 2.0**-19 < split.split == split.product.unit < 2.0**-18
    assert split.truncates
    assert Precision.of(np.float64, tensor_cores=True) == Precision.of(np.float64)
    np.testing.assert_allclose(SINGLE.gamma([0, 1, 2**23, 2**24]), [0, 2.0**-24, 1, np.inf], 1e-6)
    with pytest.raises(TypeError, match="int32"):
        Precision.of(np.int32)


# The domain


def near_the_edge(name, factor):
    """Arrays and a scale, one sum of which is `factor` times half the largest number."""
    half = SINGLE.largest / 2
    ones = {x: np.ones((16, 4), np.float32) for x in ("do", "q", "k", "v")}
    rng = np.random.default_rng(0)
    scale = 1.0
    if name == "out":
        ones["v"] *= half / 16 * factor
        ones["do"] *= 1e-30
    elif name == "logits":
        ones["q"] *= np.sqrt(half / 4 * factor)
        ones["k"] *= np.sqrt(half / 4 * factor)
        scale = 1e-38
    elif name == "scaled logits":
        ones["q"] *= np.float32(half / 4 * factor * 1e-3)
        scale = 1e3
    elif name == "dv":
        ones["do"] *= half / 16 * factor * 16
        ones["v"] *= 1e-30
    elif name == "dk":
        # do and v make dS about 1 / 16, of both signs.
        ones["q"] = np.where(rng.random((16, 4)) < 0.5, -1, 1).astype(np.float32) * (half * factor)
        ones["k"] *= 1e-38
        ones["v"] = rng.standard_normal((16, 4)).astype(np.float32)
    return ones, scale


@pytest.mark.parametrize("name", ["out", "logits", "scaled logits", "dv", "dk"])
def test_nothing_is_claimed_beyond_the_domain(name):
    arrays, scale = near_the_edge(name, 2)
    q, k, v = (arrays[x] for x in "qkv")
    forward = forward_bound(q, k, v, scale=scale, precision=SINGLE)
    backward = backward_bound(arrays["do"], q, k, v, scale=scale, precision=SINGLE)
    result = name if name in ("dv", "dk") else "out"
    bound = getattr(forward if result == "out" else backward, result)
    assert np.isinf(bound.bound).any()


@pytest.mark.parametrize("name", ["out", "dv", "dk"])
def test_the_kernels_keep_the_bound_up_to_the_edge(name):
    arrays, scale = near_the_edge(name, 0.1)
    do, q, k, v = (arrays[x] for x in ("do", "q", "k", "v"))
    out, lse = cupyflash.attention(q, k, v, scale=scale, return_lse=True)
    forward = forward_bound(q, k, v, scale=scale, precision=SINGLE)
    assert np.isfinite(forward.out.bound).all()
    assert rho(out, *forward.out).value <= 1
    ours = cupyflash.attention_backward(do, q, k, v, out, lse, scale=scale)
    bound = backward_bound(do, q, k, v, scale=scale, precision=SINGLE)
    for x in ("dq", "dk", "dv"):
        exact = getattr(bound, x)
        assert np.isfinite(exact.bound).all()
        assert rho(getattr(ours, x), *exact).value <= 1


def test_partial_sums_over_broadcast_axes_must_not_overflow_either():
    """What broadcast axes share is summed after the scale, where a sum may be too large."""
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, 2, 1, 8, 4))
    k, v = rng.standard_normal((2, 1, 8, 4))
    exact = Precision.of("float64")
    for size, known in ((1e104, True), (4e107, False)):
        bound = backward_bound(do * size, q, k * 1e-200, v, precision=exact, scale=1e200)
        assert (np.abs(bound.dk.exact) < np.finfo(np.float64).max).all()
        assert np.isfinite(bound.dk.bound).all() == known
