"""The gradient of a bias is summed in parts: which ones, in which order, and with which bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement import same_bits
from strategies import BFLOAT16, DTYPES

import cupyflash
from cupyflash import masks
from cupyflash.problem import replay
from cupyflash.reference.cpu import backward_call, backward_work

HEADS = 4
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Leading axes of q and do, of k and v, and of the bias.
LEADS = {
    "one entry": ((), (), ()),
    "shared": ((5,), (5,), (1,)),
    "each its own": ((5,), (5,), (5,)),
    "shared keys": ((5,), (1,), (1,)),
    "shared keys, each its own": ((5,), (1,), (5,)),
    "one axis": ((2, 3), (2, 3), (2, 1)),
    "crossed": ((2, 3), (2, 1), (1, 3)),
    "keys share more": ((2, 3), (2, 1), (2, 3)),
    "the bias shares more": ((2, 3), (2, 3), (1, 3)),
}


def drawn(rng, lead, kv_lead, queries, keys, heads_kv=HEADS, d=16, dtype=np.float32):
    q, do = (rng.standard_normal((*lead, HEADS, queries, d)).astype(dtype) for _ in "12")
    k, v = (rng.standard_normal((*kv_lead, heads_kv, keys, d)).astype(dtype) for _ in "12")
    return do, q, k, v


def gradients(do, q, k, v, bias, **options):
    out, lse = cupyflash.attention(q, k, v, bias=bias, return_lse=True, **options)
    return cupyflash.attention_backward(do, q, k, v, out, lse, bias=bias, **options)


def assert_sum(dbias, do, q, k, v, bias, allowed=True):
    """`dbias` is the sum of dS over the axes along which the bias was broadcast."""
    single = dbias.dtype != np.float64
    do, q, k, v, bias = (x.astype(np.float64) for x in (do, q, k, v, bias))
    k, v = (np.repeat(x, HEADS // x.shape[-3], axis=-3) for x in (k, v))
    s = np.where(allowed, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + bias, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    axes = (1,) * (ds.ndim - bias.ndim) + bias.shape
    over = tuple(axis for axis, size in enumerate(axes) if size != ds.shape[axis])
    wanted, size = (x.sum(axis=over).reshape(bias.shape) for x in (ds, abs(ds)))
    assert (abs(dbias - wanted) <= (3e-5 if single else 1e-13) * (size + 0.1)).all()


@pytest.mark.parametrize("heads_kv", [4, 2], ids=["own keys", "grouped"])
@pytest.mark.parametrize("lead", LEADS)
def test_it_is_the_sum_whichever_axes_are_broadcast(lead, heads_kv, monkeypatch):
    rng = np.random.default_rng(0)
    of_q, of_kv, of_bias = LEADS[lead]
    do, q, k, v = drawn(rng, of_q, of_kv, 20, 37, heads_kv)
    for axes in itertools.product((HEADS, 1), (20, 1), (37, 1)):
        bias = rng.standard_normal((*of_bias, *axes)).astype(np.float32)
        found = []
        for threads in ("1", "50"):  # in one pass, and in two
            monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
            found.append(gradients(do, q, k, v, bias))
        for one, two in zip(*found, strict=True):
            assert one is two is None or same_bits(one, two)
        assert_sum(found[0].dbias, do, q, k, v, bias)


@BY_DTYPE
def test_several_blocks_of_queries_and_keys(dtype):
    rng = np.random.default_rng(1)
    do, q, k, v = drawn(rng, (3,), (3,), 210, 150, dtype=np.float32)
    away = np.arange(150) - np.arange(210)[:, None]
    allowed = (away >= -150) & (away <= 20)
    for axes in itertools.product((HEADS, 1), (210, 1), (150, 1)):
        bias = rng.standard_normal(axes).astype(np.float32)
        same = [x.astype(dtype) for x in (do, q, k, v, bias)]
        dbias = gradients(*same, mask=masks.window(150, 20, offset=0)).dbias
        assert dbias.dtype == dtype
        if dtype in (np.float32, np.float64):
            assert_sum(dbias, *same, allowed=allowed)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_an_entry_alone_has_the_same_bits(dtype):
    """Those of a bias that other entries do not share do not depend on them."""
    rng = np.random.default_rng(2)
    arrays = drawn(rng, (3, 40), (3, 40), 20, 37, dtype=dtype)
    for own in ((3, 40), (3, 1)):
        bias = rng.standard_normal((*own, HEADS, 20, 37)).astype(dtype)
        whole = gradients(*arrays, bias).dbias
        alone = gradients(*(x[1:2] for x in arrays), bias[1:2]).dbias
        assert same_bits(whole[1:2], alone)
    bias = rng.standard_normal((3, 40, HEADS, 20, 37)).astype(dtype)
    whole = gradients(*arrays, bias).dbias
    alone = gradients(*(x[1, 7] for x in arrays), bias[1, 7]).dbias
    assert same_bits(whole[1, 7], alone)


def test_packed_sequences_have_their_own_or_a_shared_one():
    rng = np.random.default_rng(3)
    lengths = np.array([30, 1, 0, 40, 25])
    offsets = [np.append(0, np.cumsum(lengths))] * 2
    do, q, k, v = drawn(rng, (), (), int(lengths.sum()), int(lengths.sum()), 2)

    def dbias(bias):
        out, lse = cupyflash.attention_varlen(q, k, v, *offsets, bias=bias, return_lse=True)
        return cupyflash.attention_varlen_backward(do, q, k, v, out, lse, *offsets, bias=bias).dbias

    shared = rng.standard_normal((HEADS, 40, 40)).astype(np.float32)
    each = np.broadcast_to(shared, (5, *shared.shape))
    of_each, of_all = dbias(each), dbias(shared)
    np.testing.assert_allclose(of_all, of_each.sum(axis=0), rtol=1e-4, atol=1e-5)
    for n, (begin, size) in enumerate(zip(offsets[0][:-1], lengths, strict=True)):
        part = [x[:, begin : begin + size] for x in (do, q, k, v)]
        if size:
            alone = gradients(*part, np.ascontiguousarray(shared[:, :size, :size])).dbias
            assert same_bits(of_each[n, :, :size, :size], alone)
        outside = of_each[n].copy()
        outside[:, :size, :size] = 0
        assert not outside.any()


def test_other_turns_have_the_same_bits(monkeypatch):
    """Work is cut so that Ctrl-C is heard: between the entries whose sums are one part."""
    monkeypatch.setattr(backward_work, "_MOST_BYTES", 1)
    rng = np.random.default_rng(4)
    do, q, k, v = drawn(rng, (9,), (9,), 210, 150)
    bias = rng.standard_normal((HEADS, 210, 150)).astype(np.float32)
    turns, blocks = [], backward_call.key_blocks

    def watched(*arguments):
        made = list(blocks(*arguments))
        turns.append(len(made))
        return made

    monkeypatch.setattr(backward_call, "key_blocks", watched)
    expected = gradients(do, q, k, v, bias)
    for most in (1, 5 * 10**6):
        monkeypatch.setattr(backward_work, "_MOST_PRODUCTS", most)
        monkeypatch.setattr(replay, "_entries", {})
        for ours, others in zip(gradients(do, q, k, v, bias), expected, strict=True):
            assert ours is others is None or same_bits(ours, others)
    assert turns[1] > turns[2] > turns[0] == 1


def test_large_sums_have_few_parts(monkeypatch):
    rng = np.random.default_rng(5)
    do, q, k, v = drawn(rng, (9,), (9,), 20, 37)
    bias = rng.standard_normal((HEADS, 20, 37)).astype(np.float32)
    sizes, divide = [], backward_work.bias_parts

    def watched(*arguments):
        made = divide(*arguments)
        sizes.append(made.sums.sums.nbytes)
        return made

    monkeypatch.setattr("cupyflash.reference.cpu.bias_totals.bias_parts", watched)
    for parts in (9, 3, 1):
        most = 2**26 if not sizes else parts * sizes[0] // 9
        monkeypatch.setattr(backward_work, "_MOST_BYTES", most)
        monkeypatch.setattr(replay, "_entries", {})
        assert_sum(gradients(do, q, k, v, bias).dbias, do, q, k, v, bias)
    many, some, one = sizes
    assert many == 9 * one
    assert one < some < many
    assert some <= 3 * one
    assert one < HEADS * 37 * 64 * 4  # of 20 queries, and not of a whole block


def test_nan_beyond_a_short_sequence_stays_there():
    """Lanes without a query add nothing to a bias that longer sequences share."""
    rng = np.random.default_rng(6)
    q, k, v, do = (rng.standard_normal((HEADS, 60, 16)).astype(np.float32) for _ in "1234")
    k[:, 0] = np.inf  # of a sequence of one query, whose tile has lanes for more
    offsets = [np.array([0, 1, 60])] * 2
    bias = np.zeros((HEADS, 59, 59), np.float32)
    out, lse = cupyflash.attention_varlen(q, k, v, *offsets, bias=bias, return_lse=True)
    found = cupyflash.attention_varlen_backward(do, q, k, v, out, lse, *offsets, bias=bias).dbias
    assert np.isnan(found[:, 0, 0]).all()
    assert np.isfinite(found.reshape(HEADS, -1)[:, 1:]).all()


@pytest.mark.parametrize("shape", [(0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)], ids=str)
def test_an_axis_without_elements_gives_zeros(shape):
    batch, heads, queries, keys = shape
    q = np.ones((batch, heads, queries, 4), np.float32)
    k = np.ones((batch, heads, keys, 4), np.float32)
    for axes in itertools.product(*({size, 1} for size in shape)):
        bias = np.ones(axes, np.float32)
        out, lse = cupyflash.attention(q, k, k, bias=bias, return_lse=True)
        found = cupyflash.attention_backward(out, q, k, k, out, lse, bias=bias).dbias
        assert found.shape == axes
        assert not found.any()


@pytest.mark.thorough("the same, of drawn sizes")
def test_drawn_sizes(monkeypatch):
    rng = np.random.default_rng(7)
    for _ in range(200):
        of_q, of_kv, of_bias = list(LEADS.values())[rng.integers(len(LEADS))]
        queries, keys = (int(x) for x in rng.integers(1, 260, 2))
        do, q, k, v = drawn(rng, of_q, of_kv, queries, keys, int(2 ** rng.integers(3)))
        axes = [1 if rng.random() < 0.3 else size for size in (HEADS, queries, keys)]
        bias = rng.standard_normal((*of_bias, *axes)).astype(np.float32)
        found = []
        for threads in ("1", "50"):
            monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
            found.append(gradients(do, q, k, v, bias))
        for one, two in zip(*found, strict=True):
            assert one is two is None or same_bits(one, two)
        assert_sum(found[0].dbias, do, q, k, v, bias)
