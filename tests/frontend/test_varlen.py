"""Packed sequences: against the specification, and bit by bit what each sequence is alone."""

import math

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough
from harness import (
    attend,
    attend_backward,
    backward_ratios,
    forward_ratios,
    run_backward,
    run_forward,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from placement import same_bits
from strategies import DTYPES, problems

import cupyflash
from cupyflash import masks, scores

BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
AT_LENGTH = mostly_thorough("times", [1, 3], quick=[1], why="the same, searched for longer")


@AT_LENGTH
@mostly_thorough(
    "dtype", DTYPES, quick=DTYPES[1:3], why="each type is quick in dense calls", ids=str
)
def test_every_output_is_within_the_bound(dtype, times):
    @settings(max_examples=times * settings().max_examples)
    @given(problems(dtype, packed=True))
    def check(problem):
        out, lse = run_forward(problem)
        ratios = forward_ratios(problem, out, lse)
        assert max(ratios.values()) <= 1, ratios
        assume(np.isfinite(out).all())  # the backward reads what float16 made of O
        ratios |= backward_ratios(problem, run_backward(problem, out, lse))
        assert max(ratios.values()) <= 1, ratios

    check()


@given(problems(np.dtype(np.float32), packed=True))
def test_vjp_is_the_backward(problem):
    problem.tiles = None  # those that `attention_varlen_vjp` takes
    arrays = (problem.q, problem.k, problem.v, *problem.offsets)
    out, lse, vjp = cupyflash.attention_varlen_vjp(*arrays, return_lse=True, **problem.options)
    rows = run_forward(problem)
    assert same_bits(out, rows[0])
    assert same_bits(lse, rows[1])
    ours, expected = vjp(problem.do, problem.dlse), run_backward(problem, *rows)
    for a, b in zip(ours, expected, strict=True):
        assert a is b is None or same_bits(a, b)


def packed(dtype, lengths_q, lengths_k, heads=4, heads_kv=2, d=7, d_v=5, seed=0):
    rng = np.random.default_rng(seed)
    offsets = tuple([0, *np.cumsum(x).tolist()] for x in (lengths_q, lengths_k))
    shapes = [(heads, sum(lengths_q), d), (heads_kv, sum(lengths_k), d),
              (heads_kv, sum(lengths_k), d_v), (heads, sum(lengths_q), d_v)]  # fmt: skip
    return [rng.standard_normal(x).astype(dtype) for x in shapes], offsets


LENGTHS = st.lists(st.sampled_from([0, 1, 4, 5, 6, 11, 16, 17]), min_size=1, max_size=4)


@given(st.sampled_from(DTYPES), LENGTHS, st.data(), st.booleans())
def test_each_sequence_is_bitwise_what_it_is_alone(dtype, lengths_q, data, with_options):
    """With causal and ALiBi aligned by its own lengths, and its own part of the bias."""
    some = st.sampled_from([0, 1, 4, 5, 6, 11, 16, 17])
    lengths_k = [data.draw(some) for _ in lengths_q]
    tiles = data.draw(st.sampled_from([(16, 16), (5, 8)]))
    (q, k, v, do), offsets = packed(dtype, lengths_q, lengths_k)
    rng = np.random.default_rng(1)
    options, bias = {}, None
    if with_options:
        bias = rng.standard_normal((len(lengths_q), 1, max(lengths_q), max(lengths_k)))
        bias = bias.astype(np.float32)
        options = {"mask": masks.causal(), "score_mod": scores.alibi(np.linspace(0.1, 0.5, 4)),
                   "sink": np.linspace(-1, 1, 4)}  # fmt: skip
    whole = options if bias is None else options | {"bias": bias}
    together = attend(q, k, v, tiles, offsets, **whole)
    gradients = attend_backward(do, q, k, v, tiles, offsets, **whole)
    visited = 0
    for b, (len_q, len_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows = slice(offsets[0][b], offsets[0][b] + len_q)
        keys = slice(offsets[1][b], offsets[1][b] + len_k)
        own = options if bias is None else options | {"bias": bias[b, :, :len_q, :len_k]}
        parts = q[:, rows], k[:, keys], v[:, keys]
        alone = attend(*parts, tiles, **own)
        visited += alone.visited
        assert same_bits(together.out[:, rows], alone.out)
        assert same_bits(together.lse[:, rows], alone.lse)
        ours = attend_backward(do[:, rows], *parts, tiles, **own)
        assert same_bits(gradients.dq[:, rows], ours.dq)
        assert same_bits(gradients.dk[:, keys], ours.dk)
        assert same_bits(gradients.dv[:, keys], ours.dv)
        if bias is not None:
            assert same_bits(gradients.dbias[b, :, :len_q, :len_k], ours.dbias)
            assert not gradients.dbias[b, :, len_q:].any()
            assert not gradients.dbias[b, :, :, len_k:].any()
    assert together.visited == visited


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_a_neighbour_holds_changes_no_bit(value):
    lengths = [6, 9, 4]
    arrays, offsets = packed(np.float32, lengths, [5, 12, 7])
    bias = np.zeros((3, 1, 9, 12), np.float32)
    bias[1] = value  # a neighbour's bias, and what lies beyond a sequence's lengths
    bias[0, :, 6:], bias[0, :, :, 5:], bias[2, :, 4:], bias[2, :, :, 7:] = (value,) * 4
    clean = np.where(np.isfinite(bias), bias, 0)
    for options, poisoned in (
        ({}, {}),
        ({"mask": masks.window(3, 2), "score_mod": scores.softcap(5.0)},) * 2,
        ({"bias": clean}, {"bias": bias}),
    ):
        q, k, v, do = (x.copy() for x in arrays)
        before = attend(q, k, v, (4, 4), offsets, **options)
        gradients = attend_backward(do, q, k, v, (4, 4), offsets, **options)
        for x, (first, last) in zip(
            (q, k, v, do), ((6, 15), (5, 17), (5, 17), (6, 15)), strict=True
        ):
            x[:, first:last] = value
        with np.errstate(invalid="ignore"):
            after = attend(q, k, v, (4, 4), offsets, **poisoned)
            changed = attend_backward(do, q, k, v, (4, 4), offsets, **poisoned)
        for rows in (slice(0, 6), slice(15, 19)):
            assert same_bits(before.out[:, rows], after.out[:, rows])
            assert same_bits(before.lse[:, rows], after.lse[:, rows])
            assert same_bits(gradients.dq[:, rows], changed.dq[:, rows])
        for keys in (slice(0, 5), slice(17, 24)):
            assert same_bits(gradients.dk[:, keys], changed.dk[:, keys])
            assert same_bits(gradients.dv[:, keys], changed.dv[:, keys])


def test_indices_are_local_to_the_sequence():
    q, k = np.zeros((1, 7, 1)), np.zeros((1, 9, 1))
    offsets = [0, 3, 7], [0, 5, 9]
    steps = scores.score(lambda s, b, h, i, j: s + 100.0 * b + 10.0 * i)
    first = masks.mask(lambda b, h, i, j: j == 0)
    v = np.arange(9.0)[None, :, None]
    out, lse, _ = attend(q, k, v, offsets=offsets, score_mod=steps, mask=first)
    assert np.array_equal(lse[0], [0, 10, 20, 100, 110, 120, 130])
    assert np.array_equal(out[0, :, 0], [0, 0, 0, 5, 5, 5, 5])


def test_segments_and_lengths_of_packed_arrays():
    (q, k, v, _), offsets = packed(np.float64, [4, 6], [4, 6])
    ids = np.array([0, 0, 1, 1, 0, 1, 1, 1, 2, 2])
    ours = attend(q, k, v, (4, 4), offsets, mask=masks.segments(ids))
    finer = [0, 2, 4, 5, 8, 10]
    expected = attend(q, k, v, (4, 4), (finer, finer))
    np.testing.assert_allclose(ours.out, expected.out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(ours.lse, expected.lse, rtol=1e-12)
    ours = attend(q, k, v, (4, 4), offsets, mask=masks.lengths(np.array([3, 0])))
    assert np.isneginf(ours.lse[:, 4:]).all()
    assert not ours.out[:, 4:].any()
    expected = attend(q[:, :4], k[:, :3], v[:, :3], (4, 4))
    assert same_bits(ours.out[:, :4], expected.out)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_no_sequences_and_empty_sequences(dtype):
    (q, k, v, do), offsets = packed(dtype, [0, 3, 0, 2], [2, 0, 0, 4])
    sink, bias = np.zeros(4, np.float32), np.zeros((3, 4), dtype)
    out, lse = cupyflash.attention_varlen(q, k, v, *offsets, return_lse=True)
    assert not out[:, :3].any()
    assert np.isneginf(lse[:, :3]).all()
    ours = cupyflash.attention_varlen_backward(do, q, k, v, out, lse, *offsets)
    assert not ours.dq[:, :3].any()
    assert not ours.dk[:, :2].any()
    assert not ours.dv[:, :2].any()
    assert ours.dv[:, 2:].any()
    none = [x[:, :0] for x in (q, k, v, do)]
    bias = bias[:0, :0]
    options = {"bias": bias, "sink": sink, "return_lse": True}
    out, lse, vjp = cupyflash.attention_varlen_vjp(*none[:3], [0], [0], **options)
    assert out.shape == (4, 0, 5)
    assert not vjp(none[3]).dsink.any()


def test_the_default_scale_and_dropout_count_by_sequence():
    (q, k, v, _), offsets = packed(np.float64, [3, 5], [4, 2])
    options = {"dropout": 0.5, "seed": 11}
    ours = attend(q, k, v, (4, 4), offsets, **options)
    # b = 1 of a dense batch of two draws the same numbers
    doubled = [np.stack([x, x]) for x in (q[:, 3:], k[:, 4:], v[:, 4:])]
    expected = attend(*doubled, (4, 4), **options)
    assert same_bits(ours.out[:, 3:], expected.out[1])
    unscaled = attend(q, k, v, (4, 4), offsets, scale=1 / math.sqrt(7), **options)
    assert same_bits(ours.out, unscaled.out)
