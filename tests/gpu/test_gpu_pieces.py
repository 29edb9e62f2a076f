"""Calls by pieces on a GPU: streamed from host memory, and over ranks, on one GPU or on several."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import mpi_processes
import numpy as np
import pytest
from placement import same_bits

import cupyflash
from cupyflash import distributed, masks, scores, streamed
from cupyflash.arrays import tape
from cupyflash.testing import (
    Precision,
    backward_bound,
    backward_bound_varlen,
    forward_bound,
    forward_bound_varlen,
    rho,
)

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
HEADS, HEADS_KV, QUERIES, KEYS, D = 4, 2, 700, 900, 64
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
BIAS = np.random.default_rng(4).standard_normal((HEADS, QUERIES, KEYS)).astype(np.float32)
KINDS = "plain", "causal", "window, scores and sink", "documents", "prefix and bias"
CASES = [(dtype, "causal") for dtype in DTYPES if dtype != BFLOAT16]
CASES += [(BFLOAT16, kind) for kind in KINDS]
EACH = pytest.mark.parametrize(("dtype", "kind"), CASES, ids=str)


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def options_of(kind, place=np.asarray):
    """Return the options of a kind of call, with arrays that `place` put where they belong."""
    if kind == "causal":
        return {"mask": masks.causal()}
    if kind == "window, scores and sink":
        score_mod = [scores.alibi(place(np.full(HEADS, 0.1))), scores.softcap(20.0)]
        sink = place(np.linspace(-1, 1, HEADS))
        return {"mask": masks.window(200, 10), "score_mod": score_mod, "sink": sink}
    if kind == "documents":
        documents = np.arange(QUERIES) // 250, np.arange(KEYS) // 300
        return {"mask": masks.segments(*map(place, documents))}
    if kind == "prefix and bias":
        return {"mask": masks.prefix(128) | masks.causal(), "bias": BIAS}
    return {}


def draw(dtype):
    rng = np.random.default_rng(3)
    shapes = (1, HEADS, QUERIES, D), (1, HEADS_KV, KEYS, D), (1, HEADS_KV, KEYS, D)
    q, k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)
    return q, k, v, rng.standard_normal(q.shape, np.float32).astype(dtype)


def bounds(dtype, arrays, do, options, merges):
    """Return the bounds of a call, which take the host seconds."""
    how = {"precision": Precision.of(dtype, dtype.itemsize == 2), "block_kv": 64, **options}
    forward = forward_bound(*arrays, splits=merges, **how)
    return forward, backward_bound(do, *arrays, splits=merges, **how)


@functools.cache
def bounds_of_kind(dtype, kind):
    """Return the bounds of a kind of call, whose keys merge by blocks."""
    q, k, v, do = draw(dtype)
    return bounds(dtype, (q, k, v), do, options_of(kind), -(-KEYS // 128))


def check(limits, out, lse, gradients):
    """Hold results in host memory to the bounds."""
    forward, backward = limits
    assert rho(out, *forward.out).value <= 1
    assert rho(lse, *forward.lse).value <= 1
    for name in ("dq", "dk", "dv"):
        assert rho(getattr(gradients, name), *getattr(backward, name)).value <= 1, name


@EACH
@pytest.mark.parametrize("chunk", [(256, 300), "auto"], ids=str)
def test_streamed_calls_are_within_the_bound(dtype, kind, chunk, cupy):
    q, k, v, do = draw(dtype)
    options = options_of(kind)
    out, lse, vjp = streamed.attention_vjp(
        q, k, v, chunk=chunk, device=0, return_lse=True, **options
    )
    check(bounds_of_kind(dtype, kind), out, lse, vjp(do))


@pytest.mark.parametrize("home", ["keys", "all"])
def test_streamed_heads_have_the_bits_of_one_call(home, cupy):
    """All keys of some heads are on the GPU at a time: with dropout, which counts heads."""
    length, heads = 16384, 16
    options = {"mask": masks.causal(), "dropout": 0.2, "seed": 3}
    shape = 1, heads, length, D
    drawn = (cupy.random.default_rng(n).standard_normal(shape, dtype=np.float32) for n in range(4))
    q, k, v, do = (x.astype(np.float16) for x in drawn)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    more = {"deterministic": True} | options
    expected = cupyflash.attention_backward(do, q, k, v, out, lse, **more)
    hk, hv = k.get(), v.get()
    at = [q, do, out, lse] if home == "keys" else [x.get() for x in (q, do, out, lse)]
    ours = streamed.attention(at[0], hk, hv, device=0, return_lse=True, **options)
    made = streamed.attention_backward(at[1], at[0], hk, hv, *at[2:], device=0, **more)
    pairs = [*zip(ours, (out, lse), strict=True), *zip(made[:3], expected[:3], strict=True)]
    assert all(same_bits(np.asarray(x if isinstance(x, np.ndarray) else x.get()), y.get())
               for x, y in pairs)  # fmt: skip


def over_ranks(comms, q, k, v, do, options, scheme="rounds"):
    """Compute a call on the ranks of `comms`; return the whole results in host memory.

    `options` returns the options, given what puts arrays on the rank's GPU.
    """
    import cupy

    whole = [np.empty_like(q), np.empty(q.shape[:-1], lse_type(q))]
    made = [np.empty_like(x) for x in (q, k, v)]
    errors = []

    def work(comm, device):
        try:
            with cupy.cuda.Device(device):
                layout = distributed.layout(comm, q.shape[-2], mask=None, kind="zigzag")
                layout_k = distributed.layout(comm, k.shape[-2], kind="contiguous")
                own = options(cupy.asarray)
                if "bias" in own:
                    own["bias"] = cupy.asarray(layout.take(own["bias"]))
                arrays = [cupy.asarray(each.take(x)) for each, x in
                          ((layout, q), (layout_k, k), (layout_k, v))]  # fmt: skip
                out, lse, vjp = distributed.attention_vjp(
                    *arrays, comm=comm, layout=layout, layout_k=layout_k, return_lse=True,
                    scheme=scheme, **own,
                )  # fmt: skip
                gradients = vjp(cupy.asarray(layout.take(do)))
                layout.put(out.get(), whole[0])
                layout.put(lse.get(), whole[1], axis=-1)
                for each, x, to in zip((layout, layout_k, layout_k), gradients, made, strict=False):
                    each.put(x.get(), to)
        except BaseException as error:
            errors.append(error)
            comm.abort(str(error))
            raise

    threads = [threading.Thread(target=work, args=each) for each in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return *whole, cupyflash.Gradients(*made, None, None)


def lse_type(q):
    return np.float64 if q.dtype == np.float64 else np.float32


@EACH
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_share_a_gpu_are_within_the_bound(dtype, kind, ranks, cupy):
    q, k, v, do = draw(dtype)
    options = functools.partial(options_of, kind)
    comms = [(comm, 0) for comm in distributed.Threads(ranks).ranks]
    out, lse, gradients = over_ranks(comms, q, k, v, do, options)
    check(bounds_of_kind(dtype, kind), out, lse, gradients)


def on_gpus(count):
    """Return communicators by NCCL of ranks that are threads, with their devices."""
    made = distributed.Threads(count).run(lambda comm: distributed.communicator(comm, comm.rank))
    return list(zip(made, range(count), strict=True))


@pytest.fixture
def two(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    return on_gpus(2)


@EACH
def test_two_gpus_are_within_the_bound_and_repeat_their_bits(dtype, kind, two):
    q, k, v, do = draw(dtype)
    options = functools.partial(options_of, kind)
    first = over_ranks(two, q, k, v, do, options)
    check(bounds_of_kind(dtype, kind), *first)
    again = over_ranks(two, q, k, v, do, options)
    assert same_bits(first[0], again[0])
    assert same_bits(first[1], again[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", [1, 4])
def test_relays_between_nodes_are_within_the_bound(gpus, kind, cupy):
    """Two nodes of two ranks each, which share a GPU, or have one each."""
    if cupy.cuda.runtime.getDeviceCount() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    threads = distributed.Threads(4, 2)
    comms = [(comm, 0) for comm in threads.ranks]
    if gpus == 4:
        made = threads.run(lambda comm: distributed.communicator(comm, comm.rank))
        comms = list(zip(made, range(4), strict=True))
    q, k, v, do = draw(BFLOAT16)
    options = functools.partial(options_of, kind)
    first = over_ranks(comms, q, k, v, do, options, "nodes")
    check(bounds_of_kind(BFLOAT16, kind), *first)
    again = over_ranks(comms, q, k, v, do, options, "nodes")
    assert same_bits(first[0], again[0])


@pytest.mark.parametrize("gpus", [1, 2])
def test_whole_documents_have_the_bits_of_a_call_of_their_rank(gpus, cupy):
    """With other documents in the same memory, a call is that of these."""
    if cupy.cuda.runtime.getDeviceCount() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    comms = on_gpus(2) if gpus == 2 else [(comm, 0) for comm in distributed.Threads(2).ranks]
    length = 3000
    ends = np.cumsum(np.random.default_rng(5).integers(100, 500, 20))
    documents = np.searchsorted(ends[ends < length], np.arange(length), side="right")
    others = np.roll(documents, 250)
    rng = np.random.default_rng(6)
    whole = [rng.standard_normal((1, 2, length, 64)).astype(np.float32) for _ in range(4)]
    by_hand = [masks.causal() & masks.segments(x) for x in (documents, others)]
    found = [cupyflash.attention_vjp(*whole[:3], mask=mask) for mask in by_hand]
    wanted = [(out, *vjp(whole[3])[:3]) for out, vjp in found]

    def work(comm, device):
        with cupy.cuda.Device(device):
            layout = distributed.layout(comm, length, mask=by_hand[0])
            assert (layout.kind, layout.price.received) == ("documents", 0)
            there = cupy.asarray(documents)
            own = [cupy.asarray(layout.take(x).astype(BFLOAT16)) for x in whole]
            mine = masks.causal() & masks.segments(cupy.asarray(documents[layout.positions]))
            options = {"mask": masks.causal() & masks.segments(there), "comm": comm}
            options |= {"layout": layout, "check": False, "deterministic": True}
            alone, of_alone = cupyflash.attention_vjp(*own[:3], mask=mine, deterministic=True)
            alone = [alone, *of_alone(own[3])[:3]]
            for n in (0, 0, 0, 1, 1, 0, 1):
                there[...] = cupy.asarray((documents, others)[n])
                out, vjp = distributed.attention_vjp(*own[:3], **options)
                made = [out, *vjp(own[3])[:3]]
                if not n:
                    assert all(
                        same_bits(x.get(), y.get()) for x, y in zip(made, alone, strict=True)
                    )
                for x, y in zip(made, wanted[n], strict=True):
                    error = np.abs(x.get().astype(np.float32) - layout.take(y))
                    assert error.max() <= 0.03 * np.abs(y).max()

    def work_or_end(each):
        try:
            work(*each)
        except BaseException as error:
            each[0].abort(str(error))
            raise

    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(work_or_end, each) for each in comms]:
            ended.result()


DOCUMENTS = np.arange(KEYS) // 250
WEIGHTS = np.random.default_rng(6).standard_normal(KEYS).astype(np.float32)


def with_parts(parts):
    """Return a mask and a score that read arrays with an element for each position."""
    weights = parts(WEIGHTS)
    change = scores.score(lambda s, b, h, i, j: s + weights[j])
    return {"mask": masks.causal() & masks.segments(parts(DOCUMENTS)), "score_mod": change}


@pytest.mark.parametrize("scheme", ["rounds", "gather"])
@pytest.mark.parametrize("shared", [True, False], ids=["one GPU", "two GPUs"])
def test_parts_of_look_ups_travel_with_keys(scheme, shared, cupy, request):
    comms = [(x, 0) for x in distributed.Threads(2).ranks]
    comms = comms if shared else request.getfixturevalue("two")
    rng = np.random.default_rng(3)
    shapes = [(1, heads, KEYS, D) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    q, k, v, do = (rng.standard_normal(shape, np.float32).astype(BFLOAT16) for shape in shapes)
    made = [np.empty_like(q), np.empty(q.shape[:-1], np.float32)]
    made += [np.empty_like(x) for x in (q, k, v)]

    def work(rank):
        comm, device = comms[rank.rank]
        with cupy.cuda.Device(device):
            layout = distributed.layout(comm, KEYS, kind="zigzag")
            options = with_parts(
                lambda x: distributed.sharded(cupy.asarray(layout.take(x, axis=-1)))
            )
            arrays = [cupy.asarray(layout.take(x)) for x in (q, k, v, do)]
            given = {"comm": comm, "layout": layout, "scheme": scheme, "timeout": 60, **options}
            out, lse, vjp = distributed.attention_vjp(*arrays[:3], return_lse=True, **given)
            for x, whole in zip((out, lse, *vjp(arrays[3])[:3]), made, strict=True):
                layout.put(x.get(), whole, axis=-1 if whole is made[1] else -2)

    distributed.Threads(2).run(work)
    gradients = cupyflash.Gradients(*made[2:], None, None)
    options = with_parts(cupyflash.lookup)
    limits = bounds(BFLOAT16, (q, k, v), do, options, -(-KEYS // 128))
    check(limits, *made[:2], gradients)


@pytest.mark.parametrize("scheme", ["rounds", "gather", "heads"])
def test_long_messages_between_two_gpus_have_the_results_of_one(scheme, two, cupy):
    """They take several turns of all slots of a mailbox, in both directions at once."""
    length, heads = 2**15, 16
    shape = 1, heads, length, 128
    drawn = (cupy.random.default_rng(n).standard_normal(shape, dtype=np.float32) for n in range(4))
    q, k, v, do = (x.astype(np.float16) for x in drawn)
    out, vjp = cupyflash.attention_vjp(q, k, v, mask=masks.causal())
    expected = [x.get() for x in (out, *vjp(do)[:3])]
    arrays = [x.get() for x in (q, k, v, do)]
    made = [np.empty_like(x) for x in expected]

    def work(rank):
        comm, device = two[rank.rank]
        with cupy.cuda.Device(device):
            layout = distributed.layout(comm, length, mask=masks.causal())
            own = [cupy.asarray(layout.take(x)) for x in arrays]
            given = {"comm": comm, "layout": layout, "scheme": scheme, "mask": masks.causal()}
            for _ in range(2):
                out, vjp = distributed.attention_vjp(*own[:3], **given)
                gradients = vjp(own[3])
            for x, to in zip((out, *gradients[:3]), made, strict=True):
                layout.put(x.get(), to)

    distributed.Threads(2).run(work)
    for x, y in zip(made, expected, strict=True):
        largest = np.abs(y).max().astype(np.float32)
        assert np.abs(x.astype(np.float32) - y).max() <= 4e-3 * largest


@pytest.mark.parametrize("scheme", ["rounds", "heads"])
def test_dropout_drops_the_pairs_of_one_gpu(scheme, two, cupy):
    q, k, v, do = draw(np.dtype(np.float32))
    options = {"dropout": 0.4, "seed": 9}
    ours = over_ranks(two, q, k, v, do, lambda place: dict(options), scheme)
    out, vjp = cupyflash.attention_vjp(*map(cupy.asarray, (q, k, v)), **options)
    assert np.abs(ours[0] - out.get()).max() < 1e-5
    assert np.abs(ours[2].dv - vjp(cupy.asarray(do)).dv.get()).max() < 1e-4


def test_a_rank_that_gives_up_ends_the_others(two, cupy):
    comms = [comm for comm, _ in two]
    errors = {}

    def work(comm, device):
        with cupy.cuda.Device(device):
            x = cupy.ones((2, 256, 64), cupy.float16)
            layout = distributed.layout(comm, 512)
            try:
                if comm.rank == 1:
                    comm.abort("rank 1 gave up")
                distributed.attention(x, x, x, comm=comm, layout=layout, scheme="rounds")
                comm.synchronize(10)
            except distributed.DistributedError as error:
                errors[comm.rank] = str(error)

    began = time.monotonic()
    threads = [
        threading.Thread(target=work, args=each) for each in zip(comms, range(2), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - began < 20
    assert set(errors) == {0, 1}
    assert all("rank 1 gave up" in text for text in errors.values())


@pytest.mark.parametrize("how", ["threads", "processes"])
def test_the_example_runs_with_a_gpu_for_each_rank(how, cupy):
    """The example fails if results differ. Only GPUs of different processes copy to each other."""
    count = cupy.cuda.runtime.getDeviceCount()
    if how == "processes":
        printed = mpi_processes.run("examples/ring.py", "--gpus", ranks=count)
    else:
        command = [sys.executable, "examples/ring.py", "--threads", str(count), "--gpus"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    assert f"4096 positions on {count} ranks" in printed
    assert {"none", "causal", "window", "documents"} <= set(printed.split())


LONG = 1024  # positions of 16 heads: tiles that share a grid with messages are many


@pytest.mark.parametrize("kind", ["none", "causal", "window"])
@pytest.mark.parametrize("shared", [True, False], ids=["one GPU", "two GPUs"])
def test_calls_that_are_made_again_repeat_their_bits(kind, shared, cupy, request, monkeypatch):
    """By tapes, with joined pieces: other arrays of the same sizes, and the first ones again."""
    comms = [(x, 0) for x in distributed.Threads(2).ranks]
    comms = comms if shared else request.getfixturevalue("two")
    mask = {"none": None, "causal": masks.causal(), "window": masks.window(700, 0)}[kind]
    played, play = [], tape.Tape.play
    monkeypatch.setattr(tape.Tape, "play", lambda *x: (played.append(1), play(*x))[1])
    layouts = [distributed.layout(comm, LONG, kind="zigzag") for comm, _ in comms]
    options = {"mask": mask, "scheme": "rounds", "timeout": 60}

    def draw_long(seed):
        rng = np.random.default_rng(seed)
        shapes = [(1, heads, LONG, 128) for heads in (16, 8, 8, 16)]
        return [rng.standard_normal(shape, np.float32).astype(BFLOAT16) for shape in shapes]

    def run(q, k, v, do):
        made = [np.empty_like(q), np.empty(q.shape[:-1], np.float32)]
        made += [np.empty_like(x) for x in (q, k, v)]

        def work(comm):
            device = comms[comm.rank][1]
            comm, layout = comms[comm.rank][0], layouts[comm.rank]
            with cupy.cuda.Device(device):
                arrays = [cupy.asarray(layout.take(x)) for x in (q, k, v, do)]
                given = {"comm": comm, "layout": layout, **options}
                out, lse = distributed.attention(*arrays[:3], return_lse=True, **given)
                gradients = distributed.attention_backward(
                    arrays[3], *arrays[:3], out, lse, deterministic=True, **given
                )
                for x, whole in zip((out, lse, *gradients[:3]), made, strict=True):
                    layout.put(x.get(), whole, axis=-1 if whole is made[1] else -2)

        distributed.Threads(2).run(work)
        return made

    arrays = draw_long(0)
    first = run(*arrays)
    assert not played
    others = run(*draw_long(1))
    assert len(played) == 4
    again = run(*arrays)
    assert len(played) == 8
    assert all(map(same_bits, first, again))
    assert not same_bits(first[0], others[0])
    # The bound takes the host seconds for each head, so it is that of one key-value head.
    q, k, v, do, out, lse, dq, dk, dv = (x[:, : x.shape[1] // 8] for x in (*arrays, *first))
    gradients = cupyflash.Gradients(dq, dk, dv, None, None)
    of_mask = {} if mask is None else {"mask": mask}
    check(bounds(BFLOAT16, (q, k, v), do, of_mask, 4), out, lse, gradients)


@pytest.mark.parametrize("scheme", ["rounds", "heads"])
@pytest.mark.parametrize("shared", [True, False], ids=["one GPU", "two GPUs"])
def test_packed_sequences_over_ranks_are_within_the_bound(scheme, shared, cupy, request):
    """With dropout, which counts heads and sequences from elsewhere in pieces."""
    comms = [(x, 0) for x in distributed.Threads(2).ranks]
    comms = comms if shared else request.getfixturevalue("two")
    offsets = np.array([0, 300, 300, 333, 1100, 1200, 1500])
    rng = np.random.default_rng(7)
    shapes = [(heads, 1500, 64) for heads in (4, 2, 2, 4)]
    q, k, v, do = (rng.standard_normal(shape, np.float32).astype(BFLOAT16) for shape in shapes)
    options = {"mask": masks.causal(), "dropout": 0.3, "seed": 11}
    made = [np.empty_like(q), np.empty(q.shape[:-1], np.float32)]
    made += [np.empty_like(x) for x in (q, k, v)]

    def work(rank):
        comm, device = comms[rank.rank]
        with cupy.cuda.Device(device):
            layout = distributed.layout(comm, 1500, offsets_q=offsets)
            arrays = [cupy.asarray(layout.take(x)) for x in (q, k, v, do)]
            given = {"comm": comm, "layout": layout, "scheme": scheme, "timeout": 300, **options}
            ends = cupy.asarray(offsets), cupy.asarray(offsets)
            out, lse, vjp = distributed.attention_varlen_vjp(
                *arrays[:3], *ends, return_lse=True, **given
            )
            for x, whole in zip((out, lse, *vjp(arrays[3])[:3]), made, strict=True):
                layout.put(x.get(), whole, axis=-1 if whole is made[1] else -2)

    distributed.Threads(2).run(work)
    how = {"precision": Precision.of(BFLOAT16, True), "block_kv": 64, "splits": 3, **options}
    bound = forward_bound_varlen(q, k, v, offsets, offsets, **how)
    assert rho(made[0], *bound.out).value <= 1
    assert rho(made[1], *bound.lse).value <= 1
    bounds = backward_bound_varlen(do, q, k, v, offsets, offsets, **how)
    for name, x in zip(("dq", "dk", "dv"), made[2:], strict=True):
        assert rho(x, *getattr(bounds, name)).value <= 1, name
