"""Attention over a cache on a GPU: numbers, bits, graphs, errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cache_machine import CacheMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import cupyflash
from cupyflash import ArgumentError, cache_update, masks, scores
from cupyflash.gpu.kernels import decode
from cupyflash.problem import cached as calls
from cupyflash.testing import Precision, forward_bound, rho

pytestmark = pytest.mark.gpu
TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def bits(array):
    return array.get().view(f"u{array.dtype.itemsize}")


def cache(cupy, dtype=np.float16, batch=3, room=3000, dim=64, seed=0):
    q, k, v = draw(
        dtype, (batch, 8, 2, dim), (batch, 2, room, dim), (batch, 2, room, dim), seed=seed
    )
    return [cupy.asarray(x) for x in (q, k, v)]


OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(200, 0)},
    "softcap and alibi": {"score_mod": [scores.softcap(5.0), scores.alibi(np.full(8, 0.125))]},
    "not a range": {"mask": masks.mask(lambda b, h, i, j: (i + j + h) % 3 != 0)},
}


@pytest.mark.parametrize("dtype", TYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_entry_is_within_the_bound(cupy, dtype, name):
    options, lengths = OPTIONS[name], [3000, 0, 1111]
    on_device = {key: value for key, value in options.items() if key != "score_mod"}
    if "score_mod" in options:
        slopes = cupy.full(8, 0.125, cupy.float32)
        on_device["score_mod"] = [scores.softcap(5.0), scores.alibi(slopes)]
    q, k, v = cache(cupy, dtype)
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = np.nan
    out, lse = cupyflash.attention_cached(
        q, k, v, cupy.asarray(lengths, cupy.int32), return_lse=True, **on_device
    )
    precision = Precision.of(np.dtype(dtype), np.dtype(dtype).itemsize == 2)
    for b, length in enumerate(lengths):
        own = [x[b : b + 1].get() for x in (q, k[:, :, :length], v[:, :, :length])]
        bound = forward_bound(*own, precision=precision, block_kv=64, **options)
        assert rho(out[b : b + 1].get(), *bound.out).value <= 1
        assert rho(lse[b : b + 1].get(), *bound.lse).value <= 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("page", [1, 16, 100])
def test_pages_drafts_and_batches_change_no_bit(cupy, dtype, page):
    q, k, v = cache(cupy, dtype, room=2400)
    lengths = cupy.asarray([2400, 77, 1600], cupy.int64)
    out = cupyflash.attention_cached(q, k, v, lengths, mask=masks.causal())
    each = 2400 // page
    order = np.random.default_rng(1).permutation(3 * each + 5)[: 3 * each].reshape(3, each)
    pages = [cupy.full((3 * each + 5, 2, page, 64), np.nan, dtype) for _ in range(2)]
    for made, array in zip(pages, (k, v), strict=True):
        split = array.reshape(3, 2, each, page, 64).swapaxes(1, 2).reshape(-1, 2, page, 64)
        made[cupy.asarray(order.reshape(-1))] = split
    table = cupy.asarray(order, cupy.int32)
    paged = cupyflash.attention_cached(q, *pages, lengths, table=table, mask=masks.causal())
    assert np.array_equal(bits(paged), bits(out))
    alone = cupyflash.attention_cached(
        q[2:], k[2:, :, :1600], v[2:, :, :1600], 1600, mask=masks.causal()
    )
    assert np.array_equal(bits(alone), bits(out[2:]))
    for n in range(2):
        step = cupyflash.attention_cached(q[:, :, n : n + 1], k, v, lengths - 1 + n)
        assert np.array_equal(bits(step), bits(out[:, :, n : n + 1]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
def test_what_entries_share_changes_no_bit(cupy, dtype):
    q, k, v = cache(cupy, dtype, room=2400, seed=6)
    pages_k, pages_v = (x.reshape(3, 2, 150, 16, 64).swapaxes(1, 2).reshape(-1, 2, 16, 64)
                        for x in (k, v))  # fmt: skip
    table = np.arange(450, dtype=np.int32).reshape(3, 150)
    table[1:, :100] = table[0, :100]
    table, lengths = cupy.asarray(table), cupy.asarray([2400, 1000, 1700], cupy.int32)
    arrays = q, cupy.ascontiguousarray(pages_k), cupy.ascontiguousarray(pages_v), lengths
    for mask in (masks.causal(), masks.window(900, 0)):
        out = cupyflash.attention_cached(*arrays, table=table, mask=mask)
        for shared in (1600, 1601 - 65, 3):
            hinted = cupyflash.attention_cached(*arrays, table=table, mask=mask, shared=shared)
            assert np.array_equal(bits(hinted), bits(out))


def sharing(cupy, dtype, lengths, n, group=4, len_q=1, dim=64, page=16):
    """Arrays of entries whose first n positions are in the same pages, and their table."""
    batch, each = len(lengths), -(-max(lengths) // page)
    shape = batch * each, 2, page, dim
    q, k, v = draw(dtype, (batch, 2 * group, len_q, dim), shape, shape)
    table = np.random.default_rng(1).permutation(batch * each).reshape(batch, each)
    table[1:, : n // page] = table[0, : n // page]
    return [cupy.asarray(x) for x in (q, k, v)], cupy.asarray(table.astype(np.int32))


SHARING = {  # batch, heads in a group, queries: teams of one, two and four warps
    "a warp": (3, 4, 1),
    "two warps": (8, 4, 1),
    "drafts": (5, 4, 3),
    "many": (70, 8, 1),
}


@pytest.mark.parametrize(
    ("shape", "dim", "name"),
    [
        ("a warp", 64, "plain"),
        ("two warps", 128, "window"),
        ("drafts", 128, "causal"),
        ("drafts", 64, "window"),
        ("many", 256, "plain"),
        ("many", 128, "not a range"),
    ],
)
def test_shared_keys_have_a_kernel(cupy, monkeypatch, shape, dim, name):
    """Its results, and those of others behind it, have the bits of calls without the hint."""
    monkeypatch.setattr(decode, "FEWEST_SHARED_BYTES", 0)
    batch, group, len_q = SHARING[shape]
    lengths = np.random.default_rng(2).integers(1500, 3100, batch)
    lengths[1] = 0
    arrays, table = sharing(cupy, ml_dtypes.bfloat16, lengths, 1600, group, len_q, dim)
    arrays.append(cupy.asarray(lengths, cupy.int32))
    given = {"table": table, "return_lse": True, **OPTIONS[name]}
    expected = [bits(x) for x in cupyflash.attention_cached(*arrays, **given)]
    given["shared"] = 1600
    del given["return_lse"]
    assert "decode_sm80_shared" in cupyflash.plan_cached(*arrays, **given).reason
    for _ in range(3):
        made = cupyflash.attention_cached(*arrays, **given, return_lse=True)
        assert all(np.array_equal(bits(x), y) for x, y in zip(made, expected, strict=True))


def test_a_graph_of_shared_keys_serves_all_lengths(cupy, monkeypatch):
    """Many calls in a row, each of which may begin while the one before ends."""
    monkeypatch.setattr(decode, "FEWEST_SHARED_BYTES", 0)
    arrays, table = sharing(cupy, np.float16, np.full(40, 3000), 2048, 8, 1, 128)
    lengths, out = cupy.zeros(40, cupy.int32), cupy.empty_like(arrays[0])
    given = {"table": table, "shared": 2048}
    size = cupyflash.workspace_size_cached(*arrays, **given)
    workspace = cupy.empty(size, cupy.uint8)
    given |= {"out": out, "workspace": workspace}
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupyflash.attention_cached(*arrays, lengths, **given)
        stream.begin_capture()
        for _ in range(20):
            lengths += 1
            cupyflash.attention_cached(*arrays, lengths, **given)
        graph = stream.end_capture()
        for first in (2900, 2030, 0):
            lengths[...] = first
            graph.launch(stream)
            stream.synchronize()
            got = bits(out)
            want = cupyflash.attention_cached(*arrays, cupy.full(40, first + 20), table=table)
            stream.synchronize()
            assert np.array_equal(got, bits(want))


@pytest.mark.parametrize("dtype", TYPES[:2], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("heads", [128, 64, 16])
def test_compressed_keys(cupy, dtype, heads):
    """On Hopper by a kernel of their own: its numbers, and its bits with pages and drafts."""
    lengths, room, mask = [5000, 0, 1111], 5120, masks.causal()
    q, k = map(cupy.asarray, draw(dtype, (3, heads, 2, 576), (3, 1, room, 576)))
    for b, length in enumerate(lengths):
        k[b, :, length:] = np.nan
    arrays = q, k, k[..., :512], cupy.asarray(lengths, cupy.int32)
    out, lse = cupyflash.attention_cached(*arrays, mask=mask, return_lse=True)
    if cupy.cuda.Device().compute_capability == "90":
        assert cupyflash.plan_cached(*arrays, mask=mask).kernel == "decode_sm90"
    precision = Precision.of(np.dtype(dtype), True)
    for b, n in np.ndindex(3, 2):
        # Heads that share their keys are as queries of one head: one product has all of them.
        keys = k[b : b + 1, :, : max(lengths[b] - 1 + n, 0)].get()
        bound = forward_bound(
            q[b : b + 1, :, n].get()[None], keys, keys[..., :512], precision=precision, block_kv=64
        )
        assert rho(out[b : b + 1, :, n].get()[None], *bound.out).value <= 1
        assert rho(lse[b : b + 1, :, n].get()[None], *bound.lse).value <= 1
    for page in (5, 16, 64):
        each = room // page
        order = np.random.default_rng(page).permutation(3 * each).reshape(3, each)
        pages = cupy.empty((3 * each, 1, page, 576), dtype)
        pages[cupy.asarray(order.reshape(-1)), 0] = k.reshape(-1, page, 576)
        paged = cupyflash.attention_cached(
            q, pages, pages[..., :512], arrays[3], table=cupy.asarray(order), mask=mask
        )
        assert np.array_equal(bits(paged), bits(out))
    for n in range(2):
        step = cupyflash.attention_cached(q[:1, :, n : n + 1], *(x[:1] for x in arrays[1:3]),
                                          lengths[0] - 1 + n)  # fmt: skip
        assert np.array_equal(bits(step), bits(out[:1, :, n : n + 1]))


def test_one_graph_serves_all_lengths(cupy):
    q, k, v = cache(cupy, seed=2)
    lengths = cupy.asarray([10, 20, 30], cupy.int32)
    workspace = cupy.empty(cupyflash.workspace_size_cached(q, k, v), cupy.uint8)
    workspace[:] = cupy.random.randint(0, 256, workspace.size).astype(cupy.uint8)
    out = cupy.empty_like(q)
    cupyflash.attention_cached(q, k, v, lengths)  # compiles
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cupyflash.attention_cached(q, k, v, lengths, out=out, workspace=workspace)
        graph = stream.end_capture()
    for n in ([3000, 1, 0], [64, 65, 513], [2999, 3000, 4]):
        lengths[:] = cupy.asarray(n, cupy.int32)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(bits(out), bits(cupyflash.attention_cached(q, k, v, lengths)))


@pytest.mark.parametrize("page", [16, 5])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_what_is_written_just_before_is_read(cupy, page, captured):
    """Kernels begin before those ahead have ended: lengths, pages, keys and queries may be new."""
    steps, batch = 30, 3
    rng = np.random.default_rng(page)
    (all_q,) = draw(np.float16, (steps, batch, 8, 1, 64))
    pools = draw(np.float16, (200, 2, page, 64), (200, 2, page, 64), seed=1)
    new = [cupy.asarray(x) for x in draw(np.float16, *[(batch, 2, 1, 64)] * 2, seed=2)]
    all_q, k, v = (cupy.asarray(x) for x in (all_q, *pools))
    lengths_of = cupy.asarray(rng.integers(1, 40 * page + 1, (steps, batch)), cupy.int32)
    orders = [rng.permutation(200)[: batch * 40].reshape(batch, 40) for _ in range(steps)]
    tables = cupy.asarray(np.stack(orders), cupy.int32)
    q, lengths, table = all_q[0].copy(), lengths_of[0].copy(), tables[0].copy()
    workspace = cupy.empty(cupyflash.workspace_size_cached(q, k, v, table=table), cupy.uint8)
    outs = cupy.empty_like(all_q)

    def run(wait):
        for n in range(steps):
            q[...], lengths[...], table[...] = all_q[n], lengths_of[n], tables[n]
            wait()
            cupyflash.append(*new, k, v, lengths, table=table)
            wait()
            cupyflash.attention_cached(
                q, k, v, lengths, table=table, out=outs[n], workspace=workspace
            )
            wait()

    stream = cupy.cuda.Stream(non_blocking=True)
    held = k.copy(), v.copy()
    with stream:
        run(stream.synchronize)
        want, outs[...] = bits(outs), 0
        k[...], v[...] = held
        if captured:
            stream.begin_capture()
        run(lambda: None)
        if captured:
            stream.end_capture().launch(stream)
        stream.synchronize()
    assert np.array_equal(bits(outs), want)


def test_a_graph_needs_a_workspace(cupy):
    q, k, v = cache(cupy)
    lengths = cupy.asarray([10, 20, 30], cupy.int32)
    cupyflash.attention_cached(q, k, v, lengths)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(ArgumentError, match="workspace: got None while a CUDA graph"):
            cupyflash.attention_cached(q, k, v, lengths)
        stream.end_capture()


def test_a_graph_of_attention_keeps_its_scratch(cupy):
    """Few queries and many keys need scratch memory, which later calls must not get."""
    q, k, v = cache(cupy, seed=3)
    want = cupyflash.attention(q, k, v)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        out = cupyflash.attention(q, k, v)
        graph = stream.end_capture()
    fills = [cupy.full(1 << 20, 255, cupy.uint8) for _ in range(64)]
    graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(bits(out), bits(want))
    assert all(int(x.min()) == 255 for x in fills)


def test_lengths_and_pages_out_of_range_stay_in_the_cache(cupy):
    q, k, v = cache(cupy, room=16, batch=3, seed=4)
    table = cupy.asarray([[0, 1], [-1, 2**31 - 1], [7, -9]], cupy.int32)
    out = cupyflash.attention_cached(q, k, v, cupy.asarray([32, 2**31 - 1, -5]), table=table)
    held = cupy.clip(table, 0, 2)
    want = cupyflash.attention_cached(q, k, v, cupy.asarray([32, 32, 0]), table=held)
    assert np.array_equal(bits(out), bits(want))


def test_a_paged_cache_is_lists_of_rows(cupy):
    machine = type("OnTheGpu", (CacheMachine,), {"xp": cupy})
    run_state_machine_as_test(machine, settings=settings(max_examples=5, stateful_step_count=20))


@pytest.mark.parametrize("name", ["plain", "causal", "window"])
def test_steps_of_one_length_are_recognised(cupy, monkeypatch, name):
    q, k, v = cache(cupy)
    k_new, v_new = k[:, :, :2].copy(), v[:, :, :2].copy()
    held = [x.copy() for x in (k, v)]
    lengths = [2, 700, 701, 1, 3000, 0, 64]
    given = [cupy.full(3, n, np.int32) for n in lengths]
    wanted = [bits(cupyflash.attention_cached(q, k, v, n, **OPTIONS[name])) for n in given]
    for n in (500, 3000):
        cupyflash.append(k_new, v_new, *held, n)
        cupyflash.attention_cached(q, k, v, n, **OPTIONS[name])
    monkeypatch.setattr(calls, "call", lambda *_: pytest.fail("it was checked again"))
    monkeypatch.setattr(cache_update, "checked_append", None)
    for n, expected in zip(lengths, wanted, strict=True):
        found = cupyflash.attention_cached(q, k, v, n, **OPTIONS[name])
        assert (bits(found) == expected).all()
    for n in (2, 1000):
        held[0][:, :, n - 2 : n] = 7
        cupyflash.append(k_new, v_new, *held, n)
        assert (held[0][:, :, n - 2 : n] == k_new).all()
