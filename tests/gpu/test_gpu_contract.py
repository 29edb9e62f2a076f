"""What calls on CuPy arrays promise beside right numbers: streams, graphs, memory, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from gpu_calls import precision_of

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, lookup, masks, scores
from cupyflash.arrays import cuda_device
from cupyflash.gpu import compiled, jit
from cupyflash.gpu import launch as launches
from cupyflash.reference.cpu import philox
from cupyflash.reference.spec import naive
from cupyflash.testing import forward_bound, rho

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def draw(shape=(2, 4, 100, 32), dtype=np.float32, count=3, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(count)]


def close(found, wanted, tolerance=2e-5):
    np.testing.assert_allclose(found.get(), wanted, rtol=tolerance, atol=tolerance)


# -- arrays in and out ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_results_are_like_their_inputs(cupy, dtype):
    q, k, v = (cupy.asarray(x) for x in draw(dtype=dtype))
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, mask=masks.causal())
    gradients = vjp(out)
    for x in (out, *gradients[:3]):
        assert (x.shape, x.dtype) == (q.shape, q.dtype)
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    host = [x.get() for x in (q, k, v)]
    precision = precision_of(dtype)
    bound = forward_bound(*host, mask=masks.causal(), precision=precision, block_kv=8)
    assert rho(out.get(), *bound.out).value <= 1
    assert rho(lse.get(), *bound.lse).value <= 1


def test_the_output_has_the_memory_order_of_q(cupy):
    q, k, v = (cupy.asarray(x).swapaxes(-3, -2) for x in draw((2, 100, 4, 32)))
    out = cupyflash.attention(q, k, v)
    assert out.strides == q.strides
    gradient = cupyflash.attention_vjp(q, k, v)[1](out).dq
    assert gradient.strides == q.strides


def test_matrices_and_empty_axes(cupy):
    q = cupy.ones((5, 4), np.float32)
    assert cupyflash.attention(q, q, q).shape == (5, 4)
    none = cupy.ones((2, 0, 4), np.float32)
    assert cupyflash.attention(none, none, none).shape == (2, 0, 4)
    out, lse = cupyflash.attention(cupy.ones((2, 3, 4), np.float32), none, none, return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()
    gradients = cupyflash.attention_backward(
        out, cupy.ones((2, 3, 4), np.float32), none, none, out, lse
    )
    assert not gradients.dq.any()


def test_arrays_of_torch_come_by_dlpack(cupy):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.as_tensor(x, device="cuda") for x in draw())
    wanted = naive.attention(*(x.cpu().numpy() for x in (q, k, v)))
    close(cupyflash.attention(q, k, v), wanted.out)
    half = [x.to(torch.bfloat16) for x in (q, k, v)]
    out = cupyflash.attention(*half)
    assert out.dtype == ml_dtypes.bfloat16
    close(out.astype(np.float32), wanted.out, 0.05)
    assert torch.from_dlpack(cupyflash.attention(q, k, v)).device.type == "cuda"


# -- dropout --------------------------------------------------------------------------------------


def test_dropped_pairs_are_those_of_the_cpu(cupy):
    # Equal scores and the unit matrix as values: an output is 0 where its pair was dropped.
    size, seed, p = 96, 2**63 + 12345, 0.37
    q = np.zeros((2, 3, size, 8), np.float32)
    v = np.broadcast_to(np.eye(size, dtype=np.float32), (2, 3, size, size))
    q, v = cupy.asarray(q), cupy.asarray(v)
    b_h = np.arange(6).reshape(2, 3, 1, 1)
    kept = philox.keep(seed, p, b_h, np.arange(size)[:, None], np.arange(size))
    for given in (seed, cupy.asarray(np.uint64(seed))):
        out = cupyflash.attention(q, q, v, dropout=p, seed=given)
        np.testing.assert_array_equal(out.get() != 0, kept)


# -- packed sequences -----------------------------------------------------------------------------


def packed(cupy, dtype=np.int64):
    lengths = [3, 0, 70, 1]
    offsets = cupy.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(dtype))
    q, k, v = (cupy.asarray(x) for x in draw((4, sum(lengths), 16)))
    return q, k, v, offsets


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("check", [None, True, False])
def test_offsets_on_the_gpu(cupy, dtype, check):
    q, k, v, offsets = packed(cupy, dtype)
    out = cupyflash.attention_varlen(q, k, v, offsets, offsets, check=check, mask=masks.causal())
    arrays = [x.get() for x in (q, k, v, offsets, offsets)]
    close(out, naive.attention_varlen(*arrays, mask=masks.causal()).out)


def test_offsets_that_are_wrong(cupy):
    q, k, v, offsets = packed(cupy)
    for wrong in ([0, 5, 4, 73, 74], [0, 3, 3, 73, 10**12], [-5, 3, 3, 73, 74]):
        wrong = cupy.asarray(np.array(wrong))
        with pytest.raises(ArgumentError, match="offsets_k"):
            cupyflash.attention_varlen(q, k, v, offsets, wrong, check=True)
        # Not read, they are held in range: wrong numbers, but no wrong memory.
        for check in (False, None):
            out = cupyflash.attention_varlen(q, k, v, offsets, wrong, check=check)
            assert np.isfinite(out.get()).all()
        with pytest.raises(ArgumentError, match=r"^offsets_k: an earlier call"):
            cupyflash.attention_varlen(q, k, v, offsets, offsets)
        cupyflash.attention_varlen(q, k, v, offsets, offsets)  # it is told once


# -- look-ups -------------------------------------------------------------------------------------


def test_look_ups_are_read_at_every_call(cupy):
    q, k, v = (cupy.asarray(x) for x in draw())
    limit = cupy.asarray(np.array([10, 60]))
    mask = masks.lengths(limit) & masks.segments(cupy.arange(100, dtype=np.int32) // 30)
    for _ in range(2):
        host = masks.lengths(limit.get()) & masks.segments(np.arange(100) // 30)
        wanted = naive.attention(*(x.get() for x in (q, k, v)), mask=host).out
        close(cupyflash.attention(q, k, v, mask=mask), wanted)
        limit += 7


def test_indices_that_hang_on_the_gpu_must_be_clipped(cupy):
    q, k, v = (cupy.asarray(x) for x in draw())
    index, table = lookup(cupy.zeros(100, np.int32)), lookup(cupy.zeros(5, bool))
    with pytest.raises(ArgumentError, match="clip"):
        cupyflash.attention(q, k, v, mask=masks.mask(lambda b, h, i, j: table[index[j]]))


# -- where arrays live ----------------------------------------------------------------------------


def test_host_and_device_arrays_do_not_mix(cupy):
    q, k, v = (cupy.asarray(x) for x in draw())
    for bad in (
        {"k": k.get()},
        {"bias": np.zeros((100, 100), np.float32)},
        {"sink": np.zeros(4, np.float32)},
        {"mask": np.ones((100, 100), bool)},
        {"score_mod": scores.alibi(np.ones(4, np.float32))},
        {"out": np.empty(q.shape, np.float32)},
    ):
        with pytest.raises(ArgumentTypeError, match="host memory"):
            cupyflash.attention(q, **({"k": k, "v": v} | bad))


def test_outputs_that_overlap_are_refused(cupy):
    q, k, v = (cupy.asarray(x) for x in draw())
    before = q.copy()
    with pytest.raises(ArgumentError, match="share memory"):
        cupyflash.attention(q, k, v, out=q)
    with pytest.raises(ArgumentError, match="several elements at one address"):
        cupyflash.attention(q, k, v, out=cupy.broadcast_to(q[:1], q.shape))
    assert (q == before).all()
    packed = cupy.zeros((2, 4, 100, 3, 32), np.float32)
    views = [packed[..., n, :] for n in range(3)]
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    gradients = cupyflash.attention_backward(out, q, k, v, out, lse, grads_out=views)
    alone = cupyflash.attention_backward(out, q, k, v, out, lse)
    for ours, wanted in zip(gradients[:3], alone, strict=False):
        assert (ours == wanted).all()


def test_devices_of_one_process(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    arrays = draw()
    wanted = naive.attention(*arrays).out
    with cupy.cuda.Device(1):
        moved = [cupy.asarray(x) for x in arrays]
    out = cupyflash.attention(*moved)  # while device 0 is current
    assert out.device.id == 1
    close(out, wanted)
    with pytest.raises(ArgumentTypeError, match="GPU 1"):
        cupyflash.attention(cupy.asarray(arrays[0]), *moved[1:])


# -- memory, streams, graphs ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_memory_is_linear_in_the_length(cupy, dtype):
    pool = cupy.get_default_memory_pool()
    for length in (1024, 4096):
        q = cupy.ones((1, 2, length, 64), dtype)
        out, lse = cupyflash.attention(q, q, q, return_lse=True)
        cupyflash.attention_backward(out, q, q, q, out, lse)
        before = pool.used_bytes()
        made = cupyflash.attention(q, q, q, return_lse=True)
        assert pool.used_bytes() - before <= out.nbytes + lse.nbytes + 1024
        del made
        # Tensor cores' dq is added up in float32.
        added = 4 * q.size if dtype == np.float16 else 0
        assert cupyflash.workspace_size(q, q, q) <= 2 * lse.nbytes + added


def test_threads_with_a_stream_each(cupy):
    """The first calls come at once too: they compile, and are remembered, side by side."""
    arrays = [[cupy.asarray(x) for x in draw((2, 4, 60 + n, 24), seed=n)] for n in range(8)]
    mask = masks.window(20 + len(arrays), 3)
    together = threading.Barrier(len(arrays))

    def work(n):
        results = []
        with cupy.cuda.Stream(non_blocking=True) as stream:
            together.wait()
            for _ in range(20):
                out, vjp = cupyflash.attention_vjp(*arrays[n], mask=mask)
                gradients = vjp(out)
                stream.synchronize()
                results.append([x.get() for x in (out, *gradients[:3])])
        return results

    cupy.cuda.Device().synchronize()
    with ThreadPoolExecutor(len(arrays)) as pool:
        found = list(pool.map(work, range(len(arrays))))
    for each, results in zip(arrays, found, strict=True):
        out, vjp = cupyflash.attention_vjp(*each, mask=mask)
        wanted = [x.get() for x in (out, *vjp(out)[:3])]
        for result in results:
            for ours, theirs in zip(result, wanted, strict=True):
                assert np.array_equal(ours, theirs)


def test_a_captured_call_replays(cupy):
    q, k, v = (cupy.asarray(x) for x in draw())
    seed = cupy.asarray(np.uint64(5))
    options = {"mask": masks.causal(), "dropout": 0.25, "seed": seed}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)  # compiles
    do = cupy.asarray(draw(seed=9)[0])
    cupyflash.attention_backward(do, q, k, v, out, lse, **options)
    size = cupyflash.workspace_size(q, k, v, **options)
    workspace = cupy.empty(size, np.uint8)
    gradients = [cupy.empty_like(x) for x in (q, k, v)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(ArgumentError, match="workspace"):
            cupyflash.attention_backward(do, q, k, v, out, lse, grads_out=gradients, **options)
        cupyflash.attention(q, k, v, out=out, lse_out=lse, **options)
        cupyflash.attention_backward(
            do, q, k, v, out, lse, grads_out=gradients, workspace=workspace, **options
        )
        graph = stream.end_capture()
    # Memory that is taken between the replays is nobody else's.
    taken = [cupy.full(size, 7, np.uint8) for size in (256, 4096, workspace.size, q.nbytes) * 8]
    for n in range(3):
        q += 0.25
        seed += 1
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        host = [x.get() for x in (q, k, v)]
        plain = {"mask": masks.causal(), "dropout": 0.25, "seed": 6 + n}
        close(out, naive.attention(*host, **plain).out)
        wanted = naive.attention_backward(do.get(), *host, **plain)
        for ours, theirs in zip(gradients, wanted, strict=False):
            close(ours, theirs, 1e-4)
    assert all((x == 7).all() for x in taken)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("check", [None, False])
def test_offsets_are_not_read_back_in_a_capture(cupy, dtype, check):
    q, k, v, offsets = packed(cupy, dtype)
    host, options = offsets.get(), {"mask": masks.causal(), "check": check}
    out, lse = cupyflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True, **options)
    gradients = tuple(cupy.empty_like(x) for x in (q, k, v))
    size = cupyflash.workspace_size(q, k, v, offsets_q=offsets, offsets_k=offsets)
    workspace = cupy.empty(size, np.uint8)
    given_back = {"grads_out": gradients, "workspace": workspace}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for given, more, named in ((offsets, {"check": True}, "check"), (host, {}, "offsets_q")):
            with pytest.raises(ArgumentError, match=named):
                cupyflash.attention_varlen(q, k, v, given, given, out=out, **options | more)
        into = {"out": out, "lse_out": lse}
        cupyflash.attention_varlen(q, k, v, offsets, offsets, **into, **options)
        cupyflash.attention_varlen_backward(
            q, q, k, v, out, lse, offsets, offsets, **given_back, **options
        )
        graph = stream.end_capture()
    taken = [cupy.full(64, 7) for _ in range(64)]  # it would be in memory that a graph lost
    for ends in ([0, 3, 3, 73, 74], [0, 30, 31, 31, 74]):
        q *= 2
        offsets[:] = cupy.asarray(ends)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        arrays = [x.get() for x in (q, k, v, offsets, offsets)]
        close(out, naive.attention_varlen(*arrays, mask=masks.causal()).out)
        wanted = naive.attention_varlen_backward(arrays[0], *arrays, mask=masks.causal())
        for ours, theirs in zip(gradients, wanted, strict=False):
            close(ours, theirs, 1e-4)
    assert all((x == 7).all() for x in taken)
    offsets[1] = 75
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    if check is None:
        with pytest.raises(ArgumentError, match="offsets_q, offsets_k: an earlier call"):
            cupyflash.attention_varlen(q, k, v, offsets, offsets, **options)


def test_too_much_memory_says_what_was_asked_for(cupy):
    row = cupy.zeros((1, 1, 1, 64), np.float32)
    q = cupy.broadcast_to(row, (2**22, 64, 64, 64))
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        cupyflash.attention(q, q, q)
    assert "shape (4194304, 64, 64, 64)" in "".join(caught.value.__notes__)
    assert not row.any()
    assert cupyflash.attention(row, row, row).shape == row.shape  # and the next call works


def test_debugging_waits_for_every_launch(cupy, monkeypatch):
    waited = []
    monkeypatch.setattr(cuda_device, "synchronize", lambda: waited.append(True))
    q, k, v = (cupy.asarray(x) for x in draw())
    for wait in (True, False):  # a process says so before its first call: launches are learned
        monkeypatch.setattr(compiled, "WAIT_AFTER_LAUNCH", wait)
        close(cupyflash.attention(q, k, v), naive.attention(*draw()).out)
        assert len(waited) == wait
        waited.clear()


def test_an_error_of_a_kernel_names_it(cupy, tmp_path):
    # In a process of its own: after such an error a process cannot use the GPU any more.
    program = """
import cupy
import cupyflash
from cupyflash import masks

x = cupy.ones((1, 64, 16), cupy.float32)
gone = cupy.ndarray(64, cupy.int64, cupy.cuda.MemoryPointer(
    cupy.cuda.UnownedMemory(1 << 20, 512, None, 0), 0))
try:
    cupyflash.attention(x, x, x, mask=masks.segments(gone))
except Exception as error:
    print(type(error).__name__, *error.__notes__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUPYFLASH_DEBUG": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "while running the kernel forward_simt__f32_d16_dv16__mask" in done.stdout, done


# -- how much is compiled and visited --------------------------------------------------------------


def test_numbers_do_not_compile_kernels(cupy):
    q, k, v = (cupy.asarray(x) for x in draw((1, 1, 40, 16)))
    cupyflash.attention(q, k, v, mask=masks.causal(3), score_mod=scores.softcap(2.0))
    before = jit.compiled()
    for n in range(1000):
        some = q[:, :, : 1 + n % 40]
        options = {"mask": masks.causal(n % 77), "score_mod": scores.softcap(1.0 + n)}
        cupyflash.attention(some, k, v, scale=0.1 * n, **options)
    assert jit.compiled() == before


def test_causal_visits_528_of_1024_tiles(cupy):
    from cupyflash.problem import validate
    from cupyflash.problem.call import Plan
    from cupyflash.problem.options import Options

    q = cupy.ones((1, 1024, 16), np.float32)
    call = validate.call(q, q, q, Options(mask=masks.causal()))
    visited = cupy.zeros(1, np.uint64)
    plan = Plan("forward_simt", 32, 32, "for a test")
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    launches.forward(call, out, lse, plan, visited)
    assert int(visited[0]) == 528
