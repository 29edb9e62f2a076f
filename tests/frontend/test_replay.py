"""Recognised calls, without a GPU: what kernels are told, and by whom they are launched."""

from __future__ import annotations

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from host_cupy import HostCupy

import cupyflash
from cupyflash import ArgumentError, lookup, masks, scores
from cupyflash.arrays import cuda_device, device_arrays
from cupyflash.gpu import driver, launch_cache, params, tma
from cupyflash.gpu import jit as compiler
from cupyflash.problem import cached as cached_calls
from cupyflash.problem import validate
from cupyflash.problem.options import NAMES, Options

PLACES = {"q": 0, "k": 8, "v": 16, "out": 24}  # of addresses among a kernel's words


@pytest.fixture
def install(monkeypatch):
    """Make a module the CuPy of this process, with nothing remembered of another one."""

    def install(cupy):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(compiler, "_kernels", {})
        monkeypatch.setattr(launch_cache, "_entries", {})
        monkeypatch.setattr(driver, "_thread", driver._Thread())
        for cached in (driver.queue, cuda_device.of):
            cached.cache_clear()
        return cupy

    yield install
    for cached in (driver.queue, cuda_device.of):
        cached.cache_clear()


@pytest.fixture
def cupy(install):
    return install(HostCupy())


@pytest.fixture
def unchecked(monkeypatch):
    """Make every check an error: what runs now was recognised."""

    def refuse(*_, **__):
        raise AssertionError("the call was checked again")

    def forbid():
        monkeypatch.setattr(validate, "call", refuse)
        monkeypatch.setattr(validate, "varlen_call", refuse)

    return forbid


def draw(cupy, shape=(2, 4, 40, 16), dtype=np.float32, count=3):
    return [cupy.asarray(np.zeros(shape, dtype)) for _ in range(count)]


def told(launch, **arrays):
    """Assert that a kernel got the addresses of arrays."""
    for name, array in arrays.items():
        assert launch.words[PLACES[name]] == array.data.ptr, name


def test_a_recognised_call_tells_the_same_but_addresses(cupy, unchecked):
    first = draw(cupy)
    held = [cupyflash.attention(*first)]  # kept alive: no other array lies there
    unchecked()
    others = [draw(cupy) for _ in range(3)]
    held += [cupyflash.attention(*arrays) for arrays in others]
    assert [x.by_driver for x in cupy.launches] == [False, True, True, True]
    for arrays, out, launch in zip((first, *others), held, cupy.launches, strict=True):
        q, k, v = arrays
        told(launch, q=q, k=k, v=v, out=out)
        assert (out.shape, out.strides, out.dtype) == (q.shape, q.strides, q.dtype)
        same = np.delete(launch.words, list(PLACES.values()))
        assert (same == np.delete(cupy.launches[0].words, list(PLACES.values()))).all()
        assert launch[2:5] == cupy.launches[0][2:5]


@pytest.mark.parametrize("given", [False, True], ids=["new memory", "memory given"])
def test_a_step_over_a_cache_is_recognised(cupy, monkeypatch, given):
    """Also where lengths and pages have changed: the device knows them."""
    (q,) = draw(cupy, (2, 4, 1, 16), count=1)
    k, v = draw(cupy, (6, 2, 16, 16), count=2)
    table = cupy.asarray(np.zeros((2, 3), np.int32))
    size = cupyflash.workspace_size_cached(q, k, v, table=table)
    held = []
    for n in range(3):
        lengths = cupy.asarray(np.full(2, n + 7, np.int32))
        more = {}
        if given:
            more["workspace"] = cupy.asarray(np.zeros(size, np.uint8))
            more["out"] = cupy.asarray(np.zeros(q.shape, np.float32))
        out = cupyflash.attention_cached(q, k, v, lengths, table=table, **more)
        assert not given or out is more["out"]
        held.append((lengths, out, more))
        if n == 0:
            monkeypatch.setattr(cached_calls, "call", None)
    assert [x.by_driver for x in cupy.launches] == [False, True, True]
    layout = params.params(0, 0, 0)
    for (lengths, out, more), launch in zip(held, cupy.launches, strict=True):
        found = fields(launch, layout)
        assert found["lengths"] == lengths.data.ptr
        assert found["table"] == table.data.ptr
        assert found["out"]["data"] == out.data.ptr
        if given:
            begin = more["workspace"].data.ptr
            assert begin <= found["workspace"] < begin + 512


def test_a_length_of_all_entries_is_told_anew(cupy):
    (q,) = draw(cupy, (2, 4, 1, 16), count=1)
    k, v = draw(cupy, (2, 2, 64, 16), count=2)
    for n in (7, 8):
        cupyflash.attention_cached(q, k, v, n)
    told = [fields(x, params.params(0, 0, 0))["len_k"] for x in cupy.launches]
    assert told == [7, 8]


def test_maps_follow_the_parameters(cupy, unchecked, monkeypatch):
    def encode(made, address):
        rows = (address, *made.shape, *made.strides, made.rows)
        return np.array([*rows, *(0,) * (16 - len(rows))], np.uint64).tobytes()

    monkeypatch.setattr(tma, "encode", encode)
    held = []
    for n in range(3):
        arrays = draw(cupy, (2, 512, 64), np.float16)
        held.append((arrays, cupyflash.attention(*arrays)))
        if n == 0:
            unchecked()
    assert [x.by_driver for x in cupy.launches] == [False, True, True]
    for (arrays, out), launch in zip(held, cupy.launches, strict=True):
        assert launch.kernel.startswith("forward_sm90__")
        told(launch, **dict(zip("qkv", arrays, strict=True)), out=out)
        maps = launch.words[-64:].reshape(4, 16)
        assert maps[:, 0].tolist() == [x.data.ptr for x in (*arrays, out)]
        assert maps[:, 1:4].tolist() == [[64, 512, 2]] * 4
        assert maps[:, 10].tolist() == [64, 128, 128, 16]


def test_the_stream_is_that_of_the_moment_and_thread(cupy):
    arrays = draw(cupy)

    def work(n):
        for pointer in (10 * n + 1, 10 * n + 2, 10 * n + 3):
            with cupy.stream(pointer):
                cupyflash.attention(*arrays)

    for n in (1, 2):
        thread = threading.Thread(target=work, args=(n,))
        thread.start()
        thread.join()
    assert [x.stream for x in cupy.launches] == [11, 12, 13, 21, 22, 23]
    # A thread's first launch is CuPy's, which makes a context for it.
    assert [x.by_driver for x in cupy.launches] == [False, True, True] * 2


def test_threads_do_not_share_parameters(cupy):
    arrays = [draw(cupy) for _ in range(4)]
    together = threading.Barrier(4, timeout=60)
    cupy.during_launch = together.wait

    def work(n):
        return [cupyflash.attention(*arrays[n]) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    launches = [x for x in cupy.launches if x.by_driver]
    assert len(launches) == 16
    found = {int(x.words[PLACES["q"]]): x for x in launches}
    assert found.keys() == {each[0].data.ptr for each in arrays}
    written = {int(x.words[PLACES["out"]]) for x in cupy.launches}
    assert written == {out.data.ptr for outs in results for out in outs}


@pytest.mark.parametrize("version", ["12.9.0", "15.0.0", "14.2.0"])
def test_cupy_launches_where_its_driver_is_not_known(install, monkeypatch, version):
    if version == "14.2.0":
        monkeypatch.setenv("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
    cupy = install(HostCupy(version))
    del cupy.cuda.driver
    arrays = draw(cupy)
    for _ in range(3):
        out = cupyflash.attention(*arrays)
        told(cupy.launches[-1], **dict(zip("qkv", arrays, strict=True)), out=out)
    assert [x.by_driver for x in cupy.launches] == [False] * 3


def test_an_error_of_a_launch_names_the_kernel_and_passes(cupy):
    arrays = draw(cupy)
    cupyflash.attention(*arrays)

    def fail():
        raise RuntimeError("too many resources requested for launch")

    cupy.during_launch = fail
    with pytest.raises(RuntimeError) as caught:
        cupyflash.attention(*arrays)
    assert "while running the kernel forward" in caught.value.__notes__[0]
    cupy.during_launch = lambda: None
    cupyflash.attention(*arrays)
    assert len(cupy.launches) == 2


def test_a_call_is_computed_where_its_arrays_are(install):
    cupy = install(HostCupy(devices=2))
    with cupy.Device(1):
        arrays = draw(cupy)
    for _ in range(2):
        out, lse = cupyflash.attention(*arrays, return_lse=True)
        assert out.data.device_id == lse.data.device_id == 1
        for gradient in cupyflash.attention_backward(out, *arrays, out, lse)[:3]:
            assert gradient.data.device_id == 1
    assert cupy.device == 0
    assert cupyflash.attention(*draw(cupy)).data.device_id == 0  # other keys, other kernels
    assert launch_cache.kept() == 3


def test_memory_order_is_kept(cupy, unchecked):
    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0)]
    lengths = [(2, 4, 40, 16), (1, 4, 1, 16), (1, 1, 1, 16)]
    calls = []
    for shape, order in itertools.product(lengths, orders):
        inverse = np.argsort(order)
        memory = draw(cupy, tuple(shape[axis] for axis in order))
        arrays = [x.transpose(inverse) for x in memory]
        out, lse = cupyflash.attention(*arrays, return_lse=True)
        gradients = cupyflash.attention_backward(out, *arrays, out, lse)
        calls.append((arrays, out, lse, gradients))
    unchecked()
    for arrays, out, lse, gradients in calls:
        again, lse_again = cupyflash.attention(*arrays, return_lse=True)
        assert (again.shape, again.strides, again.dtype) == (out.shape, out.strides, out.dtype)
        assert (lse_again.strides, lse_again.dtype) == (lse.strides, lse.dtype)
        computed = cupyflash.attention_backward(out, *arrays, out, lse)
        for ours, wanted in zip(computed[:3], gradients[:3], strict=True):
            assert (ours.shape, ours.strides) == (wanted.shape, wanted.strides)


def test_a_backward_adds_to_zeros_whatever_its_memory_held(cupy, monkeypatch):
    import ml_dtypes

    arrays = draw(cupy, (1, 2, 64, 64), ml_dtypes.bfloat16)
    out, lse = cupyflash.attention(*arrays, return_lse=True)
    clean = cupy.alloc

    def dirty(size):
        memory = clean(size)
        memory.held[:] = 0x7F
        return memory

    cupy.cuda.alloc = dirty
    size = cupyflash.workspace_size(*arrays)
    for workspace in (None, None, cupy.ndarray((size,), np.uint8), cupy.ndarray((size,), np.uint8)):
        if workspace is not None:
            workspace.fill(0x7F)
        gradients = cupyflash.attention_backward(out, *arrays, out, lse, workspace=workspace)
        assert (gradients.dq.host == 0).all()  # no kernel has run: it is the sum's scratch


@pytest.mark.parametrize("packed", [False, True])
def test_a_vjp_is_as_deterministic_as_it_was_asked_to_be(cupy, packed):
    q, k, v = draw(cupy, (4, 40, 16))
    offsets = [cupy.asarray(np.array([0, 11, 40]))] * 2 if packed else []
    check = {"check": False} if packed else {}
    vjp_of = cupyflash.attention_varlen_vjp if packed else cupyflash.attention_vjp
    backward = cupyflash.attention_varlen_backward if packed else cupyflash.attention_backward
    kernels = {}
    for deterministic in (False, True, False, True):  # checked first, then recognised
        out, lse, vjp = vjp_of(
            q, k, v, *offsets, **check, deterministic=deterministic, return_lse=True
        )
        cupy.launches.clear()
        vjp(q)
        ours = [x.kernel for x in cupy.launches]
        cupy.launches.clear()
        backward(q, q, k, v, out, lse, *offsets, **check, deterministic=deterministic)
        assert ours == [x.kernel for x in cupy.launches]
        assert kernels.setdefault(deterministic, ours) == ours
    assert kernels[False] != kernels[True]


def test_outputs_are_recognised_wherever_they_overlap_nothing(cupy, unchecked):
    q, k, v = draw(cupy)
    memory = cupy.asarray(np.zeros(4 * q.size, np.float32))
    outs = [memory[n * 8 : n * 8 + q.size].reshape(q.shape) for n in range(0, 60, 4)]
    cupyflash.attention(q, k, v, out=outs[0])
    with pytest.raises(ArgumentError, match="share memory"):
        cupyflash.attention(outs[1], k, v, out=outs[0])
    unchecked()
    for out in outs[1:]:
        assert cupyflash.attention(q, k, v, out=out) is out
        told(cupy.launches[-1], q=q, k=k, v=v, out=out)
    for near in (outs[1], outs[-1]):
        with pytest.raises(AssertionError, match="checked again"):
            cupyflash.attention(near, k, v, out=outs[5])
    after = memory[2 * q.size :][: q.size].reshape(q.shape)
    assert cupyflash.attention(after, k, v, out=outs[0]) is outs[0]


def test_columns_of_one_array_are_recognised(cupy, monkeypatch):
    q, k, v = draw(cupy)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    checked = []
    real = validate.call
    monkeypatch.setattr(validate, "call", lambda *a, **k: checked.append(1) or real(*a, **k))
    orders = [(0, 1, 2), (2, 0, 1), (1, 2, 0)]
    for n in range(9):
        packed = cupy.asarray(np.zeros((*q.shape[:-1], 3, 16), np.float32))
        targets = cupyflash.Gradients(*(packed[..., place, :] for place in orders[n % 3]))
        cupyflash.attention_backward(out, q, k, v, out, lse, grads_out=targets)
        assert len(checked) == min(n + 1, 3)
    for kind in (tuple, list):
        cupyflash.attention_backward(out, q, k, v, out, lse, grads_out=kind(targets[:3]))
    assert len(checked) == 3
    wrong = cupyflash.Gradients(targets.dq, targets.dq, targets.dv)
    with pytest.raises(ArgumentError, match="share memory"):
        cupyflash.attention_backward(out, q, k, v, out, lse, grads_out=wrong)


def variants():
    """Calls of which no two are alike."""
    one, other = np.arange(40), np.arange(40.0)
    bias = np.zeros((4, 1, 40), np.float32)
    yield {}
    for mask in (
        masks.causal(),
        masks.causal(1),
        masks.window(3, 4),
        masks.causal() | masks.prefix(2),
    ):
        yield {"mask": mask}
    for score_mod in (scores.softcap(1.0), scores.softcap(2.0)):
        yield {"score_mod": score_mod}
        yield {"score_mod": [score_mod, score_mod]}
    for scale in (0.5, 1, 1.0, 0.0, -0.0, np.float64(0.5), np.float32(0.5)):
        yield {"scale": scale}
    for dropout in (0.25, 0.5):
        yield {"dropout": dropout, "seed": 1}
    for array in (one, other):
        table = lookup(array)
        yield {"mask": masks.mask(lambda b, h, i, j, table=table: table[j] > 3)}
    yield {"bias": bias}
    yield {"bias": bias[:1]}
    yield {"bias": bias[..., :1]}
    yield {"sink": np.zeros(4, np.float32)}
    yield {"sink": np.zeros(4, np.float64)}
    yield {"bias": np.zeros(1, np.float32), "sink": np.zeros(4, np.float32)}
    yield {"return_lse": True}


def moved(cupy, value):
    """Return an option with its arrays where the GPU's are."""
    from cupyflash.expr.nodes import rebuild

    def node_moved(node):
        if node.op != "lookup":
            return None
        array, proven = node.value
        return type(node)(node.op, node.args, node.type, (cupy.asarray(array), proven))

    if isinstance(value, np.ndarray):
        return cupy.asarray(value)
    return masks.Mask(rebuild(value.expr, node_moved)) if isinstance(value, masks.Mask) else value


def test_every_option_is_part_of_the_signature(cupy, unchecked):
    arrays = draw(cupy)
    every = list(variants())
    for n, variant in enumerate(every):
        cupyflash.attention(*arrays, **{k: moved(cupy, x) for k, x in variant.items()})
        assert launch_cache.kept() == n + 1, variant
    first = [x.words.copy() for x in cupy.launches]
    unchecked()
    del cupy.launches[:]
    for variant in every:
        cupyflash.attention(*arrays, **{k: moved(cupy, x) for k, x in variant.items()})
    assert len(first) == len(cupy.launches) == len(every)
    for before, launch in zip(first, cupy.launches, strict=True):
        assert before.size == launch.words.size


def test_a_signature_takes_every_option(cupy):
    """An option that the signature does not know must not be recognised as if it were not there."""

    def seen(options):
        named = dict(zip("qkv", draw(cupy), strict=True))
        return launch_cache.signature("forward", named, options, {})

    assert seen(Options()) is not None
    assert set(launch_cache._TAKE) == set(NAMES)
    with pytest.raises(KeyError, match="later"):
        seen(Options.of(**vars(Options()), later=1))


def test_what_was_longest_unused_is_forgotten(cupy, monkeypatch):
    monkeypatch.setattr(launch_cache, "MOST", 4)
    arrays = draw(cupy)
    kernel_calls = lambda scale: cupyflash.attention(*arrays, scale=scale)  # noqa: E731
    for scale in (1.0, 2.0, 3.0, 4.0, 1.0, 5.0):
        kernel_calls(scale)
    assert launch_cache.kept() == 4
    checked = []
    real = validate.call
    monkeypatch.setattr(
        validate, "call", lambda *a, **k: checked.append(a[3].scale) or real(*a, **k)
    )
    for scale in (1.0, 3.0, 4.0, 5.0, 2.0):
        kernel_calls(scale)
    assert checked == [2.0]


def test_seeds_are_told(cupy, unchecked):
    arrays = draw(cupy)
    cupyflash.attention(*arrays, dropout=0.5, seed=1)
    unchecked()
    for seed in (2, 2**64 - 1):
        cupyflash.attention(*arrays, dropout=0.5, seed=seed)
        assert seed in [int(x) for x in cupy.launches[-1].words]


def fields(launch, layout):
    """Return what a kernel that is no part of attention was told, by its fields."""
    return np.frombuffer(launch.words.tobytes()[: layout.size], layout.dtype)[0]


@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_is_written_by_what_device_memory_holds_then(cupy, packed):
    lead, total = ((), 5) if packed else ((2,), 3)
    k_new, v_new = (cupy.asarray(np.zeros((*lead, 3, total, n), np.float16)) for n in (8, 16))
    k, v = (cupy.asarray(np.zeros((5, 3, 4, n), np.float16)) for n in (8, 16))
    q = cupy.asarray(np.zeros((*lead, 6, total, 8), np.float16))
    cos, sin = draw(cupy, (40, 2), count=2)
    # What reads them finds no such method of these arrays, and numbers that would be refused.
    lengths, table = cupy.asarray(np.array([-7, 10**9])), cupy.asarray(np.full((2, 6), 99, "i4"))
    positions = cupy.asarray(np.full((*lead, total), 10**12))
    offsets = cupy.asarray(np.array([4, 0, -9])) if packed else None
    rotary = cupyflash.Rotary(cos, sin, interleaved=True)
    out = cupyflash.append(
        k_new, v_new, k, v, lengths,
        table=table, offsets=offsets, q=q, rotary=rotary, positions=positions,
    )  # fmt: skip
    assert (out.shape, out.dtype, out.strides) == (q.shape, q.dtype, q.strides)
    (launch,) = cupy.launches
    assert launch.kernel == "append__f16"
    warps = (5 if packed else 6) * (3 + 3 + 6)
    assert (launch.threads, launch.grid) == (256, -(-warps // 8))
    told = fields(launch, params.append())
    arrays = {
        "k_new": k_new,
        "v_new": v_new,
        "k": k,
        "v": v,
        "q": q,
        "out": out,
        "cos": cos,
        "sin": sin,
    }
    for name, array in (
        arrays | {"lengths": lengths, "table": table, "positions": positions}
    ).items():
        assert told[name]["data"] == array.data.ptr, name
    assert told["offsets"] == (offsets.data.ptr if packed else 0)
    sizes = {
        "batch": 2,
        "rows": total,
        "capacity": 24,
        "pages": 5,
        "page_size": 4,
        "rotary_rows": 40,
    }
    sizes |= {
        "heads": 6,
        "heads_kv": 3,
        "columns": 8,
        "columns_v": 16,
        "pairs": 2,
        "interleaved": 1,
    }
    assert {name: told[name] for name in sizes} == sizes


def test_a_step_without_queries_and_a_length_of_all(cupy):
    k_new, v_new = draw(cupy, (2, 3, 1, 8), count=2)
    k, v = draw(cupy, (2, 3, 20, 8), count=2)
    assert cupyflash.append(k_new, v_new, k, v, 7) is None
    told = fields(cupy.launches[0], params.append())
    for name in ("q", "out", "cos", "sin", "lengths", "table", "positions"):
        assert told[name]["data"] == 0, name
    assert (told["length"], told["capacity"], told["page_size"]) == (7, 20, 20)
    assert (told["heads"], told["pairs"]) == (0, 0)
    cupyflash.append(*draw(cupy, (0, 3, 1, 8), count=2), *draw(cupy, (0, 3, 9, 8), count=2), 7)
    assert len(cupy.launches) == 1


def test_rows_are_rotated_by_what_device_memory_holds_then(cupy):
    (x,), (cos, sin) = draw(cupy, (2, 4, 5, 16), count=1), draw(cupy, (9, 8), count=2)
    positions = cupy.asarray(np.full(5, 99, "i4"))
    out = cupyflash.rope(x, positions, cupyflash.Rotary(cos, sin), inverse=True)
    told = fields(cupy.launches[0], params.rope())
    for name, array in {"x": x, "out": out, "cos": cos, "sin": sin, "positions": positions}.items():
        assert told[name]["data"] == array.data.ptr, name
    assert told["positions"]["lead"].tolist() == [0, 0, 0, 0]
    assert (told["inverse"], told["interleaved"], told["pairs"]) == (1, 0, 8)


@pytest.mark.parametrize("name", ["lengths", "table", "positions"])
def test_everything_is_checked_where_that_is_asked_for(cupy, name, monkeypatch):
    monkeypatch.setattr(cached_calls, "CHECKS_ALL", True)
    monkeypatch.setattr(device_arrays, "read_back", lambda array: array.host.copy())
    k_new, v_new = draw(cupy, (2, 3, 1, 8), count=2)
    k, v = draw(cupy, (5, 3, 4, 8), count=2)
    cos, sin = draw(cupy, (40, 2), count=2)
    right = {
        "lengths": np.array([1, 8]),
        "table": np.array([[0, -1], [1, 4]]),
        "positions": np.array([[0], [39]]),
    }
    wrong = {"lengths": [0, 8], "table": [[0, -1], [1, 5]], "positions": [[0], [40]]}
    rotary = cupyflash.Rotary(cos, sin)

    def call(integers):
        keywords = {each: cupy.asarray(np.array(values)) for each, values in integers.items()}
        return cupyflash.append(k_new, v_new, k, v, rotary=rotary, **keywords)

    call(right)
    with pytest.raises(ArgumentError, match=f"{name}: "):
        call(right | {name: wrong[name]})
