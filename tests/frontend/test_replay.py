"""Recognised calls, without a GPU: what kernels are told, and by whom they are launched."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from host_cupy import INVALID_CONTEXT, TOO_MANY_RESOURCES, HostCupy
from recognised import draw

import cupyflash
from cupyflash import ArgumentError, lookup, masks, scores
from cupyflash.gpu import launch_cache, tma
from cupyflash.problem import replay, validate
from cupyflash.problem.options import NAMES, Options

PLACES = {"q": 0, "k": 8, "v": 16, "out": 24}  # of addresses among a kernel's words


@pytest.fixture
def unchecked(monkeypatch):
    """Make every check an error: what runs now was recognised."""

    def refuse(*_, **__):
        raise AssertionError("the call was checked again")

    def forbid():
        monkeypatch.setattr(validate, "call", refuse)
        monkeypatch.setattr(validate, "varlen_call", refuse)

    return forbid


def told(launch, **arrays):
    """Assert that a kernel got the addresses of arrays."""
    for name, array in arrays.items():
        assert launch.words[PLACES[name]] == array.data.ptr, name


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


def test_a_map_that_gets_no_address_is_an_error_and_nothing_is_launched(cupy):
    arrays = draw(cupy, (2, 512, 64), np.float16)
    for n in range(3):  # CuPy launches the first one
        cupy.during_replace = lambda: INVALID_CONTEXT
        with pytest.raises(RuntimeError, match=r"cuTensorMapReplaceAddress: .*INVALID_CONTEXT"):
            cupyflash.attention(*arrays)
        assert len(cupy.launches) == n
        cupy.during_replace = lambda: 0
        cupyflash.attention(*arrays)


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
    cupy.during_launch = lambda: together.wait() * 0 or None

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
    del cupy.library
    arrays = draw(cupy)
    for _ in range(3):
        out = cupyflash.attention(*arrays)
        told(cupy.launches[-1], **dict(zip("qkv", arrays, strict=True)), out=out)
    assert [x.by_driver for x in cupy.launches] == [False] * 3


def test_an_error_of_a_launch_names_the_kernel_and_passes(cupy):
    arrays = draw(cupy)
    cupyflash.attention(*arrays)
    cupy.during_launch = lambda: TOO_MANY_RESOURCES
    with pytest.raises(RuntimeError, match="OUT_OF_RESOURCES") as caught:
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
    trust = {"check": False}  # nothing is summed
    vjp_of = cupyflash.attention_varlen_vjp if packed else cupyflash.attention_vjp
    backward = cupyflash.attention_varlen_backward if packed else cupyflash.attention_backward
    kernels = {}
    for deterministic in (False, True, False, True):  # checked first, then recognised
        out, lse, vjp = vjp_of(
            q, k, v, *offsets, **trust, deterministic=deterministic, return_lse=True
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


def test_a_backward_without_the_gradient_of_the_bias_is_another_call(cupy, unchecked):
    q, k, v = draw(cupy)
    bias = cupy.asarray(np.zeros((4, 1, 40), np.float32))
    out, vjp = cupyflash.attention_vjp(q, k, v, bias=bias)
    without = cupyflash.attention_vjp(q, k, v, bias=bias, bias_gradient=False)[1]
    assert vjp(out).dbias is not None
    assert without(out).dbias is None
    unchecked()
    del cupy.launches[:]
    assert vjp(out).dbias is not None
    every = len(cupy.launches)
    assert without(out).dbias is None
    assert len(cupy.launches) == 2 * every - 1


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
    assert set(replay._TAKE) == set(NAMES)
    with pytest.raises(KeyError, match="later"):
        seen(Options.of(**vars(Options()), later=1))


def test_what_was_longest_unused_is_forgotten(cupy, monkeypatch):
    monkeypatch.setattr(replay, "MOST", 4)
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
