"""Packed calls on CuPy arrays: recognised, right, without a wait, and wrong offsets are told."""

from __future__ import annotations

import itertools
import threading

import ml_dtypes
import numpy as np
import pytest
from gpu_calls import precision_of

import cupyflash
from cupyflash import ArgumentError, masks, scores
from cupyflash.arrays import device_arrays, reports
from cupyflash.problem import validate
from cupyflash.reference.spec import naive
from cupyflash.testing import forward_bound_varlen, rho

pytestmark = pytest.mark.gpu
TOTAL = 700
ENDS = [[0, 3, 3, 600, TOTAL], [0, 640, 641, 650, TOTAL], [0, TOTAL, TOTAL, TOTAL, TOTAL]]
KINDS = ["host", "list", "int64", "int32", "uint16", "steps"]


@pytest.fixture
def cupy(gpu):
    import cupy

    yield cupy
    cupy.cuda.get_current_stream().synchronize()
    for word in reports.OF_OFFSETS.values():
        reports.taken(cupy.cuda.runtime.getDevice(), word)  # no other test is told


def draw(cupy, dtype=np.float16, count=3, seed=0):
    rng = np.random.default_rng(seed)
    drawn = (rng.standard_normal((4, TOTAL, 64), dtype=np.float32) for _ in range(count))
    return [cupy.asarray(x.astype(dtype)) for x in drawn]


def offsets_of(cupy, kind, ends):
    if kind == "list":
        return ends
    held = np.array(ends)
    if kind == "host":
        return held
    if kind == "steps":
        return cupy.asarray(np.repeat(held, 3))[::3]
    return cupy.asarray(held.astype(kind))


def everything(q, k, v, *offsets, **options):
    """Return all results of a forward, a backward and a function of gradients."""
    alone = cupyflash.attention_varlen(q, k, v, *offsets, **options)
    out, lse = cupyflash.attention_varlen(q, k, v, *offsets, return_lse=True, **options)
    how = {"deterministic": True}
    made = cupyflash.attention_varlen_backward(q, q, k, v, out, lse, *offsets, **options, **how)
    again = cupyflash.attention_varlen_vjp(q, k, v, *offsets, **options, **how)[1](q)
    return [alone, out, lse, *made[:3], *again[:3]]


def bits(found):
    return [x.get().tobytes() for x in found]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(9, 4)], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_short_sequences_have_the_same_bits_beside_a_long_one(cupy, d, mask, deterministic):
    # Alone, they have smaller tiles on some GPUs, and dq is stored without sums.
    ends = np.r_[0, np.cumsum([64, 1, 17, 64, 33] * 9)]
    q, k, v, do = (
        cupy.asarray(np.random.default_rng(n).standard_normal((4, ends[-1] + 700, d)))
        for n in range(4)
    )
    short, beside = [], []
    for found, offsets in ((short, ends), (beside, np.r_[ends, ends[-1] + 700])):
        arrays = [x[:, : offsets[-1]].astype(np.float16) for x in (q, k, v, do)]
        options = {"mask": mask, "deterministic": deterministic}
        out, vjp = cupyflash.attention_varlen_vjp(*arrays[:3], offsets, offsets, **options)
        found += [x[:, : ends[-1]] for x in (out, *vjp(arrays[3])[:3])]
    assert bits(short) == bits(beside)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_ones_whose_lengths_the_device_alone_knows_have_the_same_bits(cupy, dtype, d, grows):
    # On Hopper they have launches of their own, and blocks take turns at the others.
    rng = np.random.default_rng(d)
    queries, keys = (rng.integers(0, 70, 1000) for _ in range(2))
    queries[::50], keys[::50] = (rng.integers(0, 900, 20) for _ in range(2))
    offsets = [np.r_[0, np.cumsum(x)] for x in (queries, keys)]
    q, k, v, do = (rng.standard_normal((2, offsets[n][-1], d)) for n in (0, 1, 1, 0))
    if grows:  # dS in float16 outgrows scales
        do *= np.exp2(5.0 * (np.arange(do.shape[1]) // 64 % 4))[:, None] / 8192
        v *= np.exp2(3.0 * (np.arange(v.shape[1]) // 16 % 5))[:, None] / 128
    arrays = [cupy.asarray(x.astype(dtype)) for x in (q, k, v, do)]
    few = cupy.asarray(np.repeat(keys <= 64, queries))  # others have sums of dq in any order
    found = []
    for own in (offsets, [cupy.asarray(x) for x in offsets]):
        out, vjp = cupyflash.attention_varlen_vjp(*arrays[:3], *own, mask=masks.causal())
        dq, dk, dv = vjp(arrays[3])[:3]
        found.append([out, dq[:, few], dk, dv, dq.astype(np.float32)])
    assert bits(found[0][:4]) == bits(found[1][:4])
    most = float(abs(found[0][4]).max())
    assert cupy.allclose(found[0][4], found[1][4], rtol=0.02, atol=0.02 * most)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_wherever_offsets_are_results_have_the_same_bits(cupy, monkeypatch, kind, dtype):
    options = {"mask": masks.causal(), "score_mod": scores.softcap(20.0)}
    first, second = draw(cupy, dtype), draw(cupy, dtype, seed=1)
    wanted = {}
    for n, ends in enumerate(ENDS):
        here = cupy.asarray(np.array(ends))
        wanted[n] = bits(everything(*second, here, here, check=True, **options))
    for n, ends in enumerate(ENDS):
        offsets = offsets_of(cupy, kind, ends)
        everything(*first, offsets, offsets, **options)
        with monkeypatch.context() as patch:
            patch.setattr(validate, "varlen_call", lambda *_, **__: pytest.fail("it is checked"))
            found = everything(*second, offsets, offsets, **options)
        assert bits(found) == wanted[n]
    bound = forward_bound_varlen(
        *(x.get() for x in second), ends, ends, precision=precision_of(dtype), block_kv=8, **options
    )
    assert rho(found[1].get(), *bound.out).value <= 1
    assert rho(found[2].get(), *bound.lse).value <= 1


def test_a_recognised_call_copies_nothing_to_the_device(cupy, monkeypatch):
    arrays, offsets = draw(cupy), np.array(ENDS[0], np.int32)
    everything(*arrays, offsets, offsets)
    monkeypatch.setattr(device_arrays, "to_device", lambda *_: pytest.fail("it is copied"))
    everything(*arrays, offsets.copy(), offsets.copy())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits(cupy, kind):
    arrays, offsets = draw(cupy), offsets_of(cupy, kind, ENDS[0])
    everything(*arrays, offsets, offsets)
    cupy.cuda.get_current_stream().synchronize()
    big = cupy.zeros((2, 16, 8192, 128), np.float16)
    stream, done = cupy.cuda.get_current_stream(), cupy.cuda.Event()
    for _ in range(2):  # the first one compiles
        stream.synchronize()
        for _ in range(10):
            cupyflash.attention(big, big, big)
        done.record(stream)
        everything(*arrays, offsets, offsets)
        waited = done.done
    assert not waited


WRONG = {
    "does not begin with 0": ([1, 3, 3, 600, TOTAL], "entry 0 is not 0"),
    "decreases": ([0, 3, 2, 600, TOTAL], "entry 2 is smaller than the one before it"),
    "leaves the arrays": (
        [0, 3, 10**9, 10**9, TOTAL],
        "entry [23] is larger than the packed|entry 4 is sm",
    ),
    "ends early": ([0, 3, 3, 600, TOTAL - 1], "entry 4, the last one, is not the packed"),
    "ends far away": ([0, 3, 3, 600, 2**30], "entry 4, the last one, is not the packed"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_wrong_offsets_are_told_later_once(cupy, case, kind):
    (q, k, v), (ends, words) = draw(cupy), WRONG[case]
    right, wrong = offsets_of(cupy, kind, ENDS[0]), offsets_of(cupy, kind, ends)
    for n, pair in enumerate([(wrong, right), (right, wrong)] * 2):  # checked, then recognised
        name = ["offsets_q", "offsets_k"][n % 2]
        cupyflash.attention_varlen(q, k, v, *pair)
        cupy.cuda.get_current_stream().synchronize()
        with pytest.raises(ArgumentError, match=f"^{name}: an earlier call .*{words}"):
            cupyflash.attention_varlen(q, k, v, right, right)
        cupyflash.attention_varlen(q, k, v, right, right)
        with pytest.raises(ArgumentError, match=name):
            cupyflash.attention_varlen(q, k, v, *pair, check=True)
    out, lse = cupyflash.attention_varlen(q, k, v, right, right, return_lse=True)
    cupyflash.attention_varlen_backward(q, q, k, v, out, lse, wrong, wrong)
    with pytest.raises(ArgumentError, match=r"^offsets_q, offsets_k: an earlier call"):
        cupyflash.attention_varlen(q, k, v, right, right, check=True)  # it waits anyway


@pytest.mark.parametrize("check", [None, False])
def test_sequences_longer_than_a_bias_are_told_and_read_nothing_behind_it(cupy, check):
    q, k, v = draw(cupy)
    bias = draw(cupy, count=1)[0][:, :300, :50]
    bias = cupy.concatenate([bias] * 14, axis=-1)
    for n, ends in enumerate(([0, 300, 550, TOTAL], [0, 100, 150, TOTAL], [0, 300, 550, TOTAL])):
        offsets = cupy.asarray(np.array(ends))
        out = cupyflash.attention_varlen(q, k, v, offsets, offsets, bias=bias, check=check)
        if n != 1:
            wanted = cupyflash.attention_varlen(q, k, v, ends, ends, bias=bias[..., :300])
            assert cupy.allclose(out, wanted, rtol=2e-3, atol=1e-3)
        cupy.cuda.get_current_stream().synchronize()
        if n == 1 and check is None:
            with pytest.raises(
                ArgumentError, match=r"^offsets_q: .* entry 3 ends a sequence that is longer"
            ):
                cupyflash.attention_varlen(q, k, v, offsets, offsets, bias=bias)


def test_many_sequences(cupy):
    q, k, v = (cupy.asarray(x) for x in np.zeros((3, 2, 5000, 64), np.float16))
    ends = cupy.arange(5001, dtype=np.int32)
    v[...] = cupy.arange(5000).reshape(1, -1, 1) % 7
    assert bool((cupyflash.attention_varlen(q, k, v, ends, ends) == v).all())
    ends[3000] = 0
    cupyflash.attention_varlen(q, k, v, ends, ends)
    cupy.cuda.get_current_stream().synchronize()
    with pytest.raises(ArgumentError, match="entry 3000 is smaller"):
        cupyflash.attention_varlen(q, k, v, ends, ends)


def test_streams_and_threads_have_their_own_copies(cupy):
    arrays = draw(cupy)
    wanted = [bits(everything(*arrays, ends, ends)) for ends in ENDS]
    cupy.cuda.get_current_stream().synchronize()
    wrong = []

    def work(first):
        cupy.cuda.Device(arrays[0].device.id).use()
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        for n, stream in zip(range(first, first + 30), itertools.cycle(streams), strict=False):
            with stream:
                made = everything(*arrays, ENDS[n % 3], ENDS[n % 3])
                stream.synchronize()
                if bits(made) != wanted[n % 3]:
                    wrong.append((first, n))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_packed_queries_over_a_cache(cupy, monkeypatch):
    rng = np.random.default_rng(0)
    q = cupy.asarray(rng.standard_normal((8, 3, 64), dtype=np.float32))
    k, v = (cupy.asarray(rng.standard_normal((2, 2, 90, 64), dtype=np.float32)) for _ in "kv")
    lengths = cupy.asarray(np.array([40, 90], np.int32))
    offsets = cupy.asarray(np.array([0, 1, 3], np.int32))
    for n in range(2):
        out = cupyflash.attention_cached(q, k, v, lengths, offsets_q=offsets)
        for b, (rows, length) in enumerate(((slice(0, 1), 40), (slice(1, 3), 90))):
            host = [q[:, rows].get(), k[b, :, :length].get(), v[b, :, :length].get()]
            wanted = naive.attention(*host).out
            np.testing.assert_allclose(out[:, rows].get(), wanted, rtol=2e-5, atol=2e-5)
        if n == 0:
            monkeypatch.setattr(validate, "with_options", lambda *_, **__: pytest.fail("checked"))
