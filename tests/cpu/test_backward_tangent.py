"""Second derivatives: against the specification, by differences, and what they promise."""

import tracemalloc

import numpy as np
import pytest
from halves import mostly_thorough
from hypothesis import given
from placement import same_bits
from strategies import BFLOAT16, DTYPES, problems
from tangents import directions_of, second_ratios

import cupyflash
from cupyflash import ArgumentError, masks, scores
from cupyflash.reference.cpu import backward_tangent_call

OPTIONS = {
    "mask": masks.window(9, 5), "score_mod": [scores.softcap(2.0), scores.alibi(np.ones(4))],
    "dropout": 0.2, "seed": 5,
}  # fmt: skip
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


def drawn(seed, dtype=np.float64, len_q=21, len_k=26):
    """Operands by name, with a bias and a sink, and functions that draw and call."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (2, 4, len_q, 8), "k": (2, 2, len_k, 8), "v": (1, 2, len_k, 6),
        "bias": (4, len_q, len_k), "sink": (4,), "do": (2, 4, len_q, 6), "dlse": (2, 4, len_q),
    }  # fmt: skip

    def draw():
        return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}

    return draw(), draw


def gradients(x, **options):
    """All gradients at x, by name."""
    of = OPTIONS | {"bias": x["bias"], "sink": x["sink"]} | options
    arrays = x["q"], x["k"], x["v"]
    out, lse = cupyflash.attention(*arrays, return_lse=True, **of)
    return cupyflash.attention_backward(x["do"], *arrays, out, lse, dlse=x["dlse"], **of)


def second(x, t, **more):
    """The derivative of all gradients at x along t; names that t lacks are zeros."""
    of = OPTIONS | {"bias": x["bias"], "sink": x["sink"]}
    arrays = x["q"], x["k"], x["v"]
    out, lse = cupyflash.attention(*arrays, return_lse=True, **of)
    names = ("tq", "tk", "tv", "tbias", "tsink", "tdo", "tdlse")
    along = {name: t.get(name[1:]) for name in names}
    return cupyflash.attention_backward_jvp(
        x["do"], *arrays, out, lse, dlse=x["dlse"], **along, **of, **more
    )


def inner(gradients, t):
    return sum((g * t[name[1:]]).sum() for name, g in zip(GRADIENTS, gradients, strict=True))


@mostly_thorough(
    "dtype", DTYPES, quick=[BFLOAT16], why="the same kernel, and no rows to widen", ids=str
)
def test_second_derivatives_are_within_the_bound(dtype):
    @given(problems(dtype))
    def check(problem):
        ratios = second_ratios(problem, directions_of(problem))
        assert max(ratios.values(), default=0) <= 1, ratios

    check()


def test_they_are_the_differences_of_gradients():
    x, draw = drawn(0)
    t, step = draw(), 1e-5
    ends = [gradients({name: a + e * t[name] for name, a in x.items()}) for e in (step, -step)]
    made = second(x, t)
    for name, after, before in zip(GRADIENTS, *ends, strict=True):
        ours = getattr(made.gradients, name)
        assert np.abs((after - before) / (2 * step) - ours).max() < 1e-7, name


def test_a_double_backward_is_the_gradient_of_gradients():
    """psi = <ddq, dq> + ... has these gradients by every operand, by do and by dlse."""
    x, draw = drawn(1)
    cotangents, w, step = draw(), draw(), 1e-5
    made = second(x, {name: cotangents[name] for name in ("q", "k", "v", "bias", "sink")})

    def psi(e):
        return inner(gradients({name: a + e * w[name] for name, a in x.items()}), cotangents)

    ours = inner(made.gradients, w) + (made.tout * w["do"]).sum() + (made.tlse * w["dlse"]).sum()
    difference = (psi(step) - psi(-step)) / (2 * step)
    assert abs(difference - ours) < 1e-6 * max(1, abs(ours))


def test_the_hessian_is_symmetric():
    x, draw = drawn(2)
    one, other = draw(), draw()
    operands = ("q", "k", "v", "bias", "sink")
    made = [second(x, {name: t[name] for name in operands}).gradients for t in (one, other)]
    left, right = inner(made[0], other), inner(made[1], one)
    assert abs(left - right) < 1e-10 * max(1, abs(left))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_they_are_linear_in_the_direction(dtype):
    x, draw = drawn(3, dtype)
    t = draw()
    made, twice = second(x, t), second(x, {name: 2 * a for name, a in t.items()})
    for ours, doubled in zip(made.gradients, twice.gradients, strict=True):
        assert same_bits(doubled, 2 * ours)
    assert same_bits(twice.tout, 2 * made.tout)
    assert same_bits(twice.tlse, 2 * made.tlse)


def test_the_tangents_of_results_are_those_of_forward_mode():
    x, draw = drawn(4)
    t = draw()
    of = OPTIONS | {"bias": x["bias"], "sink": x["sink"]}
    expected = cupyflash.attention_jvp(
        x["q"], x["k"], x["v"], t["q"], t["k"], t["v"], tbias=t["bias"], tsink=t["sink"],
        return_lse=True, **of,
    )  # fmt: skip
    made = second(x, t)
    assert same_bits(made.tout, expected[1])
    assert same_bits(made.tlse, expected[3])


def test_without_a_direction_they_are_zero():
    x, _ = drawn(5)
    made = second(x, {})
    assert not any(g.any() for g in (*made.gradients, made.tout, made.tlse))


def test_keys_that_nobody_sees_have_none_and_change_no_bit():
    x, draw = drawn(6, np.float32)
    t, hidden = draw(), {"mask": masks.lengths([20, 20]), "score_mod": scores.softcap(2.0)}
    first = second_of(x, t, hidden)
    for each in (x["k"], x["v"], t["k"], t["v"]):
        each[:, :, 20:] = np.nan
    for ours, right in zip(second_of(x, t, hidden)[:3], first[:3], strict=True):
        assert same_bits(ours, right)
    assert not first.dk[:, :, 20:].any()
    assert not first.dv[:, :, 20:].any()


def second_of(x, t, options):
    """Tangents of gradients without a bias and a sink."""
    arrays = x["q"], x["k"], x["v"]
    out, lse = cupyflash.attention(*arrays, return_lse=True, **options)
    made = cupyflash.attention_backward_jvp(
        x["do"], *arrays, out, lse, t["q"], t["k"], t["v"], tdo=t["do"], **options
    )
    return made.gradients


def test_rows_that_see_nothing_add_nothing():
    x, draw = drawn(7)
    allowed = np.ones((21, 26), bool)
    allowed[3:9] = False
    t = draw()
    made = second_of(x, t, {"mask": allowed})
    assert not made.dq[:, :, 3:9].any()
    x["do"][:, :, 3:9] = np.nan
    again = second_of(x, t, {"mask": allowed})
    for ours, right in zip(again[:3], made[:3], strict=True):
        assert same_bits(ours, right)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_number_of_threads_changes_no_bit(monkeypatch, threads):
    x, draw = drawn(8, np.float32, len_q=200, len_k=150)
    t = draw()
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "2")
    expected = second(x, t).gradients
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
    for ours, right in zip(second(x, t).gradients, expected, strict=True):
        assert same_bits(ours, right)


def test_one_pass_and_two_have_the_same_bits(monkeypatch):
    x, draw = drawn(12, np.float32, len_q=200, len_k=150)
    t, made = draw(), []
    for one_pass in (False, True):
        monkeypatch.setattr(backward_tangent_call, "is_one_pass_faster", lambda _, y=one_pass: y)
        made.append(second(x, t).gradients)
    for one, two in zip(*made, strict=True):
        assert same_bits(one, two)


def test_packed_sequences_are_each_alone():
    rng = np.random.default_rng(9)
    ends_q, ends_k = [0, 7, 7, 20], [0, 9, 12, 25]
    q, tq, do = (rng.standard_normal((4, 20, 8)) for _ in range(3))
    k, v, tk, tv = (rng.standard_normal((2, 25, 8)) for _ in range(4))
    how = {"mask": masks.causal(), "score_mod": scores.softcap(2.0)}
    out, lse = cupyflash.attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, **how)
    made = cupyflash.attention_varlen_backward_jvp(
        do, q, k, v, out, lse, ends_q, ends_k, tq, tk, tv, **how
    )
    for n in range(3):
        rows, keys = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
        parts = [x[:, rows] for x in (do, q)] + [x[:, keys] for x in (k, v)]
        own = cupyflash.attention(*parts[1:], return_lse=True, **how)
        one = cupyflash.attention_backward_jvp(
            *parts, *own, tq[:, rows], tk[:, keys], tv[:, keys], **how
        )
        assert np.abs(made.gradients.dq[:, rows] - one.gradients.dq).max(initial=0) < 1e-12
        for ours, right in zip(made.gradients[1:3], one.gradients[1:3], strict=True):
            assert np.abs(ours[:, keys] - right).max(initial=0) < 1e-12


def test_vjp_has_the_same_bits():
    x, draw = drawn(10)
    t = draw()
    of = OPTIONS | {"bias": x["bias"], "sink": x["sink"]}
    _, vjp = cupyflash.attention_vjp(x["q"], x["k"], x["v"], **of)
    made = vjp.jvp(
        x["do"], t["q"], t["k"], t["v"], tbias=t["bias"], tsink=t["sink"], dlse=x["dlse"],
        tdo=t["do"], tdlse=t["dlse"],
    )  # fmt: skip
    expected = second(x, t)
    for ours, right in zip(made.gradients, expected.gradients, strict=True):
        assert same_bits(ours, right)


def test_gradients_go_where_they_are_wanted():
    x, draw = drawn(11)
    t = draw()
    expected = second(x, t).gradients
    packed = np.full((2, 4, 21, 16), np.nan)
    made = second(x, t, grads_out=(packed[..., :8], None, None)).gradients
    assert made.dq.base is packed
    assert same_bits(made.dq, expected.dq)
    assert second(x, t, bias_gradient=False).gradients.dbias is None
    with pytest.raises(ArgumentError, match=r"grads_out\.dq"):
        second(x, t, grads_out=(t["q"], None, None))


def test_memory_grows_with_length_alone():
    rng = np.random.default_rng(12)
    x = rng.standard_normal((1, 2500, 8)).astype(np.float32)
    out, lse = cupyflash.attention(x, x, x, return_lse=True)
    cupyflash.attention_backward_jvp(x, x, x, x, out, lse, x)  # compiles
    tracemalloc.start()
    cupyflash.attention_backward_jvp(x, x, x, x, out, lse, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2500 * 2500  # a quarter of a matrix of scores
