"""Forward mode: results and tangents against the specification, and what they promise."""

import tracemalloc

import numpy as np
import pytest
from halves import mostly_thorough
from harness import assert_near
from hypothesis import given
from placement import same_bits
from strategies import BFLOAT16, DTYPES, problems
from tangents import directions_of, jvp_ratios, run_jvp

import cupyflash
from cupyflash import ArgumentError, masks, scores
from cupyflash.dispatch import CPU
from cupyflash.reference.spec import naive, naive_tangents
from cupyflash.testing import Directions, Precision, jvp_bound, problem, rho

BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OPTIONS = {
    "mask": masks.window(30, 5), "score_mod": scores.softcap(3.0), "dropout": 0.2, "seed": 5,
}  # fmt: skip


def drawn(rng, dtype=np.float64, heads=6, heads_kv=3, len_q=60, len_k=70):
    """Arrays, a direction, and options: everything that a call can have."""

    def array(*shape):
        return rng.standard_normal(shape).astype(dtype)

    shapes = (2, heads, len_q, 24), (2, heads_kv, len_k, 24), (2, heads_kv, len_k, 16)
    arrays, along = [array(*x) for x in shapes], [array(*x) for x in shapes]
    more = {"bias": array(heads, len_q, len_k), "sink": array(heads)}
    direction = Directions(*along, array(heads, len_q, len_k), array(heads))
    return arrays, direction, OPTIONS | more


def jvp(arrays, direction, **options):
    """`attention_jvp` with the LSE."""
    tq, tk, tv, tbias, tsink = direction
    return cupyflash.attention_jvp(
        *arrays, tq, tk, tv, tbias=tbias, tsink=tsink, return_lse=True, **options
    )


# The bound, and the specification


@mostly_thorough(
    ("dtype", "packed"),
    [(dtype, packed) for packed in (False, True) for dtype in DTYPES],
    quick=[(BFLOAT16, False), (np.dtype(np.float32), True)],
    why="the same kernel for other types and rows",
    ids=str,
)
def test_results_and_tangents_are_within_the_bound(dtype, packed):
    @given(problems(dtype, packed=packed))
    def check(problem):
        directions = directions_of(problem)
        ratios = jvp_ratios(problem, directions, run_jvp(problem, directions))
        assert max(ratios.values()) <= 1, ratios

    check()


def test_a_weight_of_zero_bounds_an_infinite_range_of_tangents():
    """Nothing is claimed of such tangents; their products with weights of zero are no NaN."""
    found = problem(
        "bfloat16", q=(1, 63, 15), k=(1, 191, 15), v=(1, 191, 1), family="negative scores",
        scores=("user",), scale=12.909944487358056, layouts="plain", seed=504170,
    )  # fmt: skip
    directions = directions_of(found)
    ratios = jvp_ratios(found, directions, run_jvp(found, directions))
    assert max(ratios.values()) <= 1, ratios


def test_the_specification_is_the_derivative_of_the_specification():
    arrays, direction, options = drawn(np.random.default_rng(0), len_q=9, len_k=11)
    t = naive_tangents.attention_jvp(*arrays, direction, **options)

    def at(step):
        moved = [np.longdouble(x) + step * d for x, d in zip(arrays, direction, strict=False)]
        more = {
            name: np.longdouble(options[name]) + step * d
            for name, d in zip(("bias", "sink"), direction[3:], strict=True)
        }
        made = naive.attention(*moved, **options | more, dtype=np.longdouble)
        return made.out, made.lse

    step = np.longdouble(1e-6)
    for ours, after, before in zip((t.tout, t.tlse), at(step), at(-step), strict=True):
        assert np.abs((after - before) / (2 * step) - ours).max() < 1e-9


def test_a_kernel_that_sums_tangents_themselves_exceeds_the_bound():
    """What `ref` is for: a part that all tangents of a row have in common costs no digits."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 40, 16)).astype(np.float32) for _ in "qkv")
    bias = rng.standard_normal((1, 40, 40)).astype(np.float32)
    direction = Directions(tbias=rng.standard_normal(bias.shape).astype(np.float32) + 1000)
    bound = jvp_bound(q, k, v, direction, precision=Precision.of("float32"), bias=bias)
    p = np.exp(q @ k.swapaxes(1, 2) / 4 + bias)
    p /= p.sum(axis=-1, keepdims=True)
    weighted = p * direction.tbias
    sloppy = weighted @ v - weighted.sum(axis=-1, keepdims=True) * (p @ v)
    ours = jvp((q, k, v), direction, bias=bias)[1]
    assert rho(ours, *bound.tout).value <= 1 < rho(sloppy, *bound.tout).value


# What tangents are


@BY_DTYPE
def test_tangents_are_linear_in_the_direction(dtype):
    rng = np.random.default_rng(2)
    arrays, one, options = drawn(rng, dtype)
    other = drawn(rng, dtype)[1]
    made = jvp(arrays, one, **options)
    twice = jvp(arrays, Directions(*(2 * x for x in one)), **options)
    for n in (1, 3):
        if np.dtype(dtype).name != "float16":  # whose small numbers lose digits
            assert same_bits(twice[n], 2 * made[n])
    if np.dtype(dtype).itemsize < 4:
        return  # the sum of two directions would be rounded
    joined = Directions(*(a + b for a, b in zip(one, other, strict=True)))
    how = {"precision": Precision.of(dtype), **options}
    bounds = [jvp_bound(*arrays, x, **how) for x in (one, other, joined)]
    second, both = jvp(arrays, other, **options), jvp(arrays, joined, **options)
    rounding = np.finfo(dtype).eps * 100  # of the sum of directions
    for n, name in ((1, "tout"), (3, "tlse")):
        limits = [getattr(x, name).bound for x in bounds]
        size = np.abs(made[n]).max() + np.abs(second[n]).max()
        assert_near(both[n], made[n].astype(float) + second[n], *limits, rounding * size)


def test_the_tangent_and_the_gradients_are_adjoint():
    rng = np.random.default_rng(3)
    arrays, direction, options = drawn(rng)
    out, tout, lse, tlse = jvp(arrays, direction, **options)
    do, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    gradients = cupyflash.attention_backward(do, *arrays, out, lse, dlse=dlse, **options)
    forward = (do * tout).sum() + (dlse * tlse).sum()
    backward = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
    assert abs(forward - backward) < 1e-11 * (np.abs(do * tout).sum() + np.abs(dlse * tlse).sum())


@BY_DTYPE
def test_a_constant_tangent_of_the_bias_moves_the_lse_alone(dtype):
    arrays, _, options = drawn(np.random.default_rng(4), dtype)
    del options["sink"], options["dropout"], options["seed"]
    direction = Directions(tbias=np.full_like(options["bias"], 100.0))
    bound = jvp_bound(*arrays, direction, precision=Precision.of(dtype), **options)
    _, tout, _, tlse = jvp(arrays, direction, **options)
    assert_near(tout, 0 * tout, bound.tout.bound)
    assert_near(tlse, 0 * tlse + 100, bound.tlse.bound)
    assert bound.tout.bound.max() < (1e-2 if np.dtype(dtype).itemsize < 8 else 1e-10)


def test_tangents_of_disjoint_keys_combine():
    """mu = sum w_n mu_n and tO = sum w_n (tO_n + (mu_n - mu) O_n), with w_n = exp(lse_n - lse)."""
    (q, k, v), direction, options = drawn(np.random.default_rng(5))
    direction = direction._replace(tsink=None)
    out, tout, lse, tlse = jvp((q, k, v), direction, bias=options["bias"])
    parts = []
    for keys in (slice(0, 30), slice(30, None)):
        here = [x[..., keys, :] for x in (k, v, direction.tk, direction.tv)]
        along = Directions(direction.tq, *here[2:], direction.tbias[..., keys])
        parts.append(jvp((q, *here[:2]), along, bias=options["bias"][..., keys]))
    weights = [np.exp(part[2] - lse)[..., None] for part in parts]
    mu = sum(w[..., 0] * part[3] for w, part in zip(weights, parts, strict=True))
    moved = sum(
        w * (part[1] + (part[3] - mu)[..., None] * part[0])
        for w, part in zip(weights, parts, strict=True)
    )
    assert np.abs(mu - tlse).max() < 1e-13
    assert np.abs(moved - tout).max() < 1e-13
    assert (
        np.abs(sum(w * part[0] for w, part in zip(weights, parts, strict=True)) - out).max() < 1e-13
    )


@BY_DTYPE
def test_rows_that_see_nothing_are_zero(dtype):
    arrays, direction, options = drawn(np.random.default_rng(6), dtype)
    hidden = np.ones((60, 70), bool)
    hidden[7:50] = False
    options["mask"] = hidden
    for sink in (options.pop("sink"), None):
        along = direction if sink is not None else direction._replace(tsink=None)
        _, tout, _, tlse = jvp(arrays, along, **options | {"sink": sink})
        assert not tout[:, :, 7:50].any()
        expected = np.zeros(6) if sink is None else along.tsink.astype(tlse.dtype)
        assert np.array_equal(tlse[:, :, 7:50], np.broadcast_to(expected[:, None], (2, 6, 43)))


@pytest.mark.parametrize("name", Directions._fields)
def test_a_tangent_that_is_none_is_zero(name):
    arrays, direction, options = drawn(np.random.default_rng(7))
    zero = np.zeros_like(getattr(direction, name))
    without = jvp(arrays, direction._replace(**{name: None}), **options)
    with_zero = jvp(arrays, direction._replace(**{name: zero}), **options)
    for a, b in zip(without, with_zero, strict=True):
        assert np.array_equal(a, b)


def test_without_a_direction_tangents_are_zero():
    arrays, _, options = drawn(np.random.default_rng(8))
    out, tout, lse, tlse = jvp(arrays, Directions(), **options)
    assert not tout.any()
    assert not tlse.any()
    expected = cupyflash.attention(*arrays, return_lse=True, **options)
    for ours, right in zip((out, lse), expected, strict=True):
        assert np.abs(ours - right).max() < 1e-14


@BY_DTYPE
def test_keys_that_nobody_sees_change_no_bit(dtype):
    arrays, direction, options = drawn(np.random.default_rng(9), dtype)
    options["mask"] = masks.lengths([40, 40])
    expected = jvp(arrays, direction, **options)
    for hidden in (*arrays[1:], *direction[1:3]):
        hidden[:, :, 40:] = np.nan
    direction.tbias[..., 40:] = np.inf
    for ours, right in zip(jvp(arrays, direction, **options), expected, strict=True):
        assert same_bits(ours, right)


# How it is computed


@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_number_of_threads_changes_no_bit(monkeypatch, threads):
    arrays, direction, options = drawn(np.random.default_rng(10), np.float32, len_q=300)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "2")
    expected = jvp(arrays, direction, **options)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
    for ours, right in zip(jvp(arrays, direction, **options), expected, strict=True):
        assert same_bits(ours, right)


@BY_DTYPE
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_call_like_an_earlier_one_is_recognised(monkeypatch, dtype, return_lse):
    rng = np.random.default_rng(11)

    def call(seed):
        arrays, direction, options = drawn(rng, dtype, len_q=33)
        options["seed"] = seed
        tq, tk, tv, tbias, tsink = direction
        made = cupyflash.attention_jvp(
            *arrays, tq, tk, tv, tbias=tbias, tsink=tsink, return_lse=return_lse, **options
        )
        assert len(made) == (4 if return_lse else 2)
        bound = jvp_bound(*arrays, direction, precision=Precision.of(dtype), **options)
        names = ("out", "tout", "lse", "tlse") if return_lse else ("out", "tout")
        for name, x in zip(names, made, strict=True):
            assert rho(x, *getattr(bound, name)).value <= 1

    call(1)
    monkeypatch.setattr(type(CPU), "forward_tangent", None)  # nothing is checked again
    call(2)


def test_the_tangent_of_a_bias_may_be_the_bias():
    rng = np.random.default_rng(12)
    q, k, v, bias = (rng.standard_normal((3, 20, 20)) for _ in range(4))
    for _ in range(2):
        made = cupyflash.attention_jvp(q, k, v, bias=bias, tbias=bias)
        expected = naive_tangents.attention_jvp(q, k, v, Directions(tbias=bias), bias=bias)
        assert np.abs(made[1] - expected.tout).max() < 1e-13


def test_memory_grows_with_length_alone():
    rng = np.random.default_rng(13)
    q, k, v, tq = (rng.standard_normal((1, 3000, 8)).astype(np.float32) for _ in range(4))
    cupyflash.attention_jvp(q[:, :9], k, v, tq[:, :9])  # compiles
    tracemalloc.start()
    cupyflash.attention_jvp(q, k, v, tq)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 3000 * 3000 / 8  # an eighth of a matrix of scores


# Errors


def test_a_tangent_of_another_form_is_refused():
    q, k, v = (np.ones((2, 5, 4), np.float32) for _ in "qkv")
    with pytest.raises(ArgumentError, match=r"tq: got shape \(2, 4, 4\).*those of q"):
        cupyflash.attention_jvp(q, k, v, q[:, :4])
    with pytest.raises(ArgumentError, match=r"tk: got shape .*, dtype float64; .*those of k"):
        cupyflash.attention_jvp(q, k, v, tk=k.astype(np.float64))
    with pytest.raises(ArgumentError, match=r"tbias: .*no bias; pass bias=np\.zeros_like"):
        cupyflash.attention_jvp(q, k, v, tbias=np.ones((5, 5), np.float32))
    with pytest.raises(ArgumentError, match=r"tsink: .*no sink; pass sink="):
        cupyflash.attention_jvp(q, k, v, tsink=np.ones(2, np.float32))
    with pytest.raises(ArgumentError, match="tout_out"):
        cupyflash.attention_jvp(q, k, v, q, tout_out=q)
    with pytest.raises(cupyflash.ArgumentTypeError, match="return_lse"):
        cupyflash.attention_jvp(q, k, v, q, return_lse=2)


def test_the_remedies_of_absent_arrays_work():
    rng = np.random.default_rng(14)
    q, k, v = (rng.standard_normal((2, 5, 4)) for _ in "qkv")
    tbias = rng.standard_normal((5, 5))
    tout = cupyflash.attention_jvp(q, k, v, tbias=tbias, bias=np.zeros_like(tbias))[1]
    exact = naive_tangents.attention_jvp(q, k, v, Directions(tbias=tbias), bias=0 * tbias)
    assert np.abs(tout - exact.tout).max() < 1e-14
