"""A bias is added by vectors with the bits that its program gives, pair by pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement import same_bits
from strategies import BFLOAT16, DTYPES

import cupyflash
from cupyflash import ArgumentError, lookup, masks, scores
from cupyflash.expr import lower, where
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.strided import strided_bias
from cupyflash.problem import replay
from cupyflash.reference.cpu.program import NO_RESULT

_B, _H, _I, _J = POSITIONS
INFINITY = float("inf")
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def calls(q, k, v, do, bias, **options):
    """The forward's and the backward's arrays."""
    out, lse = cupyflash.attention(q, k, v, bias=bias, return_lse=True, **options)
    return out, lse, *cupyflash.attention_backward(do, q, k, v, out, lse, bias=bias, **options)


def packed_calls(q, k, v, do, bias, offsets, **options):
    out, lse = cupyflash.attention_varlen(q, k, v, *offsets, bias=bias, return_lse=True, **options)
    gradients = cupyflash.attention_varlen_backward(
        do, q, k, v, out, lse, *offsets, bias=bias, **options
    )
    return out, lse, *gradients


def drawn(rng, shape, dtype, nan=False):
    """A bias with hidden pairs, and zeros of both signs."""
    bias = rng.standard_normal(shape)
    bias[rng.random(shape) < 0.2] = -INFINITY
    bias[rng.random(shape) < 0.1] = -0.0
    if nan:
        bias[rng.random(shape) < 0.02] = np.nan
    return bias.astype(dtype)


def assert_bits_of_the_program(monkeypatch, run):
    """`run` takes the vectors, and has the same bits without them."""
    recognised = []
    replay._entries.clear()
    monkeypatch.setattr(lower, "strided_bias", lambda root: recognised.append(strided_bias(root)))
    by_program = run()
    monkeypatch.undo()
    replay._entries.clear()  # what follows is another program
    assert any(recognised)
    by_vectors = run()
    for ours, others in zip(by_vectors, by_program, strict=True):
        assert ours is others is None or same_bits(ours, others)


SHAPES = {
    "whole": (2, 3, 49, 61),
    "of heads": (3, 49, 61),
    "of keys": (1, 1, 1, 61),
    "of queries": (2, 1, 49, 1),
    "number": (1,),
}


def arrays(rng, dtype, batch=2, queries=49, keys=61, d=17):
    q, do = (rng.standard_normal((batch, 3, queries, d)).astype(dtype) for _ in "12")
    k, v = (rng.standard_normal((batch, 3, keys, d)).astype(dtype) for _ in "12")
    return q, k, v, do


@BY_DTYPE
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bias_of_any_axes(monkeypatch, shape, dtype):
    rng = np.random.default_rng(0)
    bias = drawn(rng, SHAPES[shape], dtype)
    each = arrays(rng, dtype)
    assert_bits_of_the_program(monkeypatch, lambda: calls(*each, bias))


@pytest.mark.parametrize(("stored", "dtype"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_a_bias_of_another_dtype(monkeypatch, stored, dtype):
    rng = np.random.default_rng(1)
    bias = drawn(rng, (3, 20, 61), stored, nan=True)
    each = arrays(rng, dtype, queries=20)
    assert_bits_of_the_program(monkeypatch, lambda: calls(*each, bias))


STRIDES = {
    "keys first": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: x[..., ::-1, ::-1],
    "repeated": lambda x: np.broadcast_to(x[..., :1, :], x.shape),
    "a part": lambda x: np.pad(x, [(0, 0)] * 2 + [(3, 4), (1, 2)])[..., 3:-4, 1:-2],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_any_strides(monkeypatch, dtype, strides):
    rng = np.random.default_rng(2)
    bias = STRIDES[strides](drawn(rng, (2, 3, 49, 61), dtype))
    each = arrays(rng, dtype)
    assert_bits_of_the_program(monkeypatch, lambda: calls(*each, bias))


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_tiles_beside_others(monkeypatch, dtype):
    rng = np.random.default_rng(3)
    bias = drawn(rng, (3, 210, 270), dtype, nan=True)
    each = arrays(rng, dtype, batch=1, queries=210, keys=270)
    options = {"mask": masks.window(100, 30), "dropout": 0.1, "seed": 3}
    assert_bits_of_the_program(monkeypatch, lambda: calls(*each, bias))
    assert_bits_of_the_program(monkeypatch, lambda: calls(*each, bias, **options))
    change = {"score_mod": scores.softcap(3.0)}
    assert_bits_of_the_program(monkeypatch, lambda: calls(*each, bias, **change))


@pytest.mark.parametrize("bias_lead", [(2,), ()], ids=["each", "shared"])
def test_packed_rows(monkeypatch, bias_lead):
    rng = np.random.default_rng(4)
    q, k, v, do = (x[0] for x in arrays(rng, np.float32, queries=70, keys=70))
    bias = drawn(rng, (*bias_lead, 3, 40, 40), np.float32)
    offsets = [np.array([0, 30, 70])] * 2
    assert_bits_of_the_program(monkeypatch, lambda: packed_calls(q, k, v, do, bias, offsets))


def test_few_queries_of_many_keys(monkeypatch):
    rng = np.random.default_rng(5)
    q, k, v, _ = arrays(rng, np.float32, queries=3, keys=600)
    bias = drawn(rng, (2, 1, 3, 600), np.float32)
    assert_bits_of_the_program(
        monkeypatch, lambda: cupyflash.attention(q, k, v, bias=bias, return_lse=True)
    )


@pytest.mark.thorough("the same, of drawn sizes, strides and types")
def test_drawn_biases(monkeypatch):
    rng = np.random.default_rng(6)
    for _ in range(300):
        dtype, stored = (DTYPES[rng.integers(len(DTYPES))] for _ in "12")
        batch, queries, keys = rng.integers(1, 4), *rng.integers(1, 150, 2)
        whole = (batch, 3, queries, keys)
        axes = 4 - rng.integers(0, 3)
        shape = tuple(1 if rng.random() < 0.25 else size for size in whole)[4 - axes :]
        bias = drawn(rng, shape, stored, nan=rng.random() < 0.3)
        if min(shape[-2:]) > 1 and len(shape) == 4:
            bias = [lambda x: x, *STRIDES.values()][rng.integers(len(STRIDES) + 1)](bias)
        each = arrays(rng, dtype, batch, queries, keys, d=rng.integers(1, 40))
        assert_bits_of_the_program(monkeypatch, lambda e=each, b=bias: calls(*e, b))


# Which expressions are recognised


def added(index, score=SCORE, hidden=-INFINITY, shape=(200, 200)):
    read = lookup(np.zeros(shape, np.float32))[index]
    return where(read == hidden, hidden, score + read)


def test_what_is_recognised():
    for index, steps in (
        ((_I, _J), (800, 4)),
        ((_J, _I), (4, 800)),
        ((_I, 0), (800, 0)),
        ((2 * _I + _H, 5 + _J), (1600, 4)),
        ((_H * _B, _J - _I + 60), (-4, 4)),
        ((_H % 3, _I * 2 - _J * 2), (8, -8)),
    ):
        found = strided_bias(added(index))
        assert found is not None, index
        assert (found.query_step, found.key_step) == steps
        assert found.other is SCORE


def test_what_is_not_recognised():
    for index in ((_I // 2, _J), (_I * _J, 0), (where(_I < 3, _I, 0), _J), (_I, _J % 7)):
        assert strided_bias(added(index)) is None, index
    read = lookup(np.zeros((9, 9), np.float32))[_I, _J]
    for change in (
        SCORE,
        SCORE + read,
        added((_I, _J), hidden=-1e30),
        where(read == INFINITY, -INFINITY, SCORE + read),
        where(read == -INFINITY, -INFINITY, SCORE * read),
        where(read == -INFINITY, -INFINITY, read + SCORE),
        where(SCORE == -INFINITY, -INFINITY, SCORE + read),
        where(read <= -INFINITY, -INFINITY, SCORE + read),
        where(_I == _J, -INFINITY, SCORE + read),
    ):
        assert strided_bias(change) is None, change


def test_a_program_of_a_bias_alone_has_nothing_to_do_for_a_key():
    program = lower.lower(added((_I, _J)))
    assert program.result == NO_RESULT
    assert program.once_per_tile == len(program.code)


def test_an_index_out_of_range_is_an_error_as_before():
    x = np.zeros((1, 1, 300, 8), np.float32)
    change = scores.score(lambda score, b, h, i, j: added((i, j), score, shape=(299, 300)))
    with pytest.raises(ArgumentError, match=r"axis 0 of an array of shape \(299, 300\)"):
        cupyflash.attention(x, x, x, score_mod=change)
