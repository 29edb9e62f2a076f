"""Comparisons of queries' and keys' numbers that are ranges of keys: the same pairs, and bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement import same_bits

from cupyflash import attention, attention_backward, attention_varlen, masks, streamed
from cupyflash.backends import cpu_programs, cpu_runs
from cupyflash.expr.evaluate import evaluate
from cupyflash.expr.sizes import position_symbols
from cupyflash.problem import replay, validate
from cupyflash.problem.bound_exprs import trees
from cupyflash.problem.options import Options

F32 = np.dtype(np.float32)


def bound(mask, batch=2, len_q=14, len_k=17):
    q, k = (np.zeros((batch, 2, n, 8), F32) for n in (len_q, len_k))
    call = validate.call(q, k, k, Options(mask=mask))
    return call, trees(call).allowed


def pairs(call, condition):
    """Return the value of a condition for all pairs."""
    shape = call.problem.batch, call.problem.heads, call.problem.len_q, call.problem.len_k
    symbols = position_symbols(*np.ix_(*map(np.arange, shape)), call.problem)
    return np.broadcast_to(evaluate(condition, symbols), shape)


def runs(draws, length):
    """Numbers that come in one run each, in any order; or, seldom, in several."""
    sizes = draws.integers(0, 6, 12)
    names = draws.permutation(12) - 3
    if draws.random() < 0.2:
        names[draws.integers(0, 12, 3)] = 4
    made = np.repeat(names, sizes)
    return np.resize(made, length) if made.size < length else made[:length]


@given(st.integers(0, 2**32 - 1), st.sampled_from(["int64", "int8", "int32"]), st.booleans())
def test_they_let_the_same_pairs_attend(seed, dtype, of_entries):
    draws = np.random.default_rng(seed)
    rows = 2 if of_entries else 1
    q_ids, k_ids = (np.stack([runs(draws, n) for _ in range(rows)]) for n in (14, 17))
    q_ids, k_ids = (x.astype(dtype) if of_entries else x[0].astype(dtype) for x in (q_ids, k_ids))
    segments = masks.segments(q_ids, k_ids)
    for mask in segments, segments & masks.causal(), ~segments | masks.prefix(3):
        call, allowed = bound(mask)
        made = cpu_runs.with_ranges(allowed)
        assert np.array_equal(pairs(call, made), pairs(call, allowed))
        is_run = all(
            np.unique(x).size == 1 + np.count_nonzero(x[1:] != x[:-1]) for x in np.atleast_2d(k_ids)
        )
        assert (made is not allowed) == is_run


def test_other_comparisons_stay():
    ids = np.arange(14) // 4
    twice = np.array([0, 1, 0] * 6)[:14]
    for mask in (
        masks.segments(twice),
        masks.segments(ids % 2 == 0),
        masks.causal(),
        masks.dense(np.ones((14, 14), bool)),
        masks.mask(lambda b, h, i, j: i // 3 == j // 3),
    ):
        allowed = bound(mask, len_k=14)[1]
        assert cpu_runs.with_ranges(allowed) is allowed


def drawn(length, lead=(2, 4), kv=(2, 2)):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((*x, length, 16)).astype(F32) for x in (lead, kv, kv)]


DOCUMENTS = masks.segments(np.arange(200) // 30)
TWO = masks.segments(np.stack([np.arange(200) // 30, 9 - np.arange(200) // 77]))


@pytest.mark.parametrize(
    "mask",
    [DOCUMENTS, DOCUMENTS & masks.causal(), TWO & masks.window(20, 3)],
    ids=["documents", "causal", "of entries"],
)
def test_they_change_no_bit(monkeypatch, mask):
    x = drawn(200)

    def computed():
        monkeypatch.setattr(replay, "_entries", {})
        made = [attention(*x, mask=mask, return_lse=True) for _ in range(2)][1]
        grads = attention_backward(made[0], *x, *made, mask=mask)
        joined = streamed.attention(*x, mask=mask, chunk=(70, 90))
        return *made, *grads[:3], joined

    found = computed()
    call = validate.call(*x, Options(mask=mask))
    assert cpu_programs.needed(call).found is not None
    monkeypatch.setattr(cpu_runs, "with_ranges", lambda mask: mask)
    assert cpu_programs.needed(call).found is None
    for one, other in zip(found, computed(), strict=True):
        assert same_bits(one, other)


def test_packed_calls_have_them_too(monkeypatch):
    x = drawn(200, (4,), (2,))
    offsets = np.array([0, 90, 200])
    made = attention_varlen(*x, offsets, offsets, mask=DOCUMENTS)
    monkeypatch.setattr(replay, "_entries", {})
    monkeypatch.setattr(cpu_runs, "with_ranges", lambda mask: mask)
    assert same_bits(attention_varlen(*x, offsets, offsets, mask=DOCUMENTS)[:], made)


def test_documents_may_change_between_calls():
    x, ids = drawn(200), np.arange(200) // 30
    mask = masks.segments(ids)
    for seed in range(5):
        ids[...] = np.sort(np.random.default_rng(seed).integers(0, 9, 200))
        if seed == 3:
            ids[::2] = 20  # of several runs
        wanted = attention(*x, mask=ids[:, None] == ids)
        np.testing.assert_allclose(attention(*x, mask=mask), wanted, rtol=1e-5, atol=1e-6)
