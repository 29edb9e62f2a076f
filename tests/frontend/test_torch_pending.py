"""Gradients of recognised calls on tensors, which their forward prepares, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from host_cupy import TOO_MANY_RESOURCES
from recognised import told, unchecked

from cupyflash.gpu import driver, params, tma

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.arrays import reports  # noqa: E402 (after the skip)
from cupyflash.errors import ArgumentError  # noqa: E402
from cupyflash.torch import (  # noqa: E402
    attention,
    attention_varlen,
    compute,
    pending,
    tensors,
)


def by_engine(q, k, v, do, **options):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    made = attention(*leaves, **options)
    return torch.autograd.grad(made[0] if type(made) is tuple else made, leaves, do)


@pytest.mark.parametrize("why", ["small", "large", "capturing", "capturing the backward"])
def test_a_forward_asks_for_the_memory_of_small_gradients(cupy, gpu_tensors, monkeypatch, why):
    """Not while a graph is captured, which may run several times: sums are 0 only once."""
    small = why == "small"
    if why == "large":
        monkeypatch.setattr(pending, "SMALL", 0)
    monkeypatch.setattr(tensors, "is_capturing", lambda: why == "capturing")
    for _ in range(3):
        by_engine(*gpu_tensors(4))
    unchecked(monkeypatch)
    monkeypatch.setattr(compute, "backward", None)
    q, k, v, do = gpu_tensors(4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    made = out.grad_fn.call[2]
    there = {x.data_ptr() for results, *_ in made.ready for x in results}
    assert len(there) == (3 if why in ("small", "capturing the backward") else 0)
    monkeypatch.setattr(tensors, "is_capturing", lambda: why.startswith("capturing"))
    before = len(cupy.launches)
    first, second = (torch.autograd.grad(out, leaves, do, retain_graph=True) for _ in range(2))
    assert there & {x.data_ptr() for x in first} == (there if small else set())
    assert len({x.data_ptr() for x in (*first, *second)}) == 6  # nobody else has them
    launches = cupy.launches[before:]
    half = len(launches) // 2
    for made, launched in ((first, launches[:half]), (second, launches[half:])):
        assert {x.data_ptr() for x in (q, k, v, do, *made)} <= told(launched)


def test_maps_of_gradients_have_the_addresses_of_the_moment(cupy, gpu_tensors, monkeypatch):
    def encode(made, address):
        rows = (address, *made.shape, *made.strides, made.rows)
        return np.array([*rows, *(0,) * (16 - len(rows))], np.uint64).tobytes()

    def arrays():
        return [torch.zeros(1, 2, 2048, 128, dtype=torch.float16) for _ in range(4)]

    monkeypatch.setattr(tma, "encode", encode)
    for _ in range(3):
        by_engine(*arrays())
    monkeypatch.setattr(compute, "backward", None)
    q, k, v, do = arrays()
    before = len(cupy.launches)
    made = by_engine(q, k, v, do)
    (launch,) = [x for x in cupy.launches[before:] if x.kernel.startswith("backward_sm90")]
    size = launch.words.size
    maps = launch.words[size - size // 16 * 16 :].reshape(-1, 16)
    shown = {int(row[0]) for row in maps}
    assert {x.data_ptr() for x in (q, k, v, do)} <= shown
    assert {x.data_ptr() for x in made} <= told(cupy.launches[before:])


@pytest.mark.parametrize("again", [False, True], ids=["ready", "computed twice"])
def test_each_launch_of_gradients_is_told_where_sums_are(cupy, gpu_tensors, again):
    """The first one sets them to 0, the second adds to them, and the third reads them."""
    for _ in range(3):
        by_engine(*gpu_tensors(4, torch.float16, 144))
    q, k, v, do = gpu_tensors(4, torch.float16, 144)  # so many keys are several tiles
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    place = params.params(0, 0, 0).place("dq_accum") // 8
    for _ in range(1 + again):
        before = len(cupy.launches)
        torch.autograd.grad(out, leaves, do, retain_graph=True)
        made = cupy.launches[before:]
        kernels = "backward_delta", "backward_sm90_dkdv", "backward_dq_rows"
        assert [x.kernel.partition("__")[0] for x in made] == list(kernels)
        (sums,) = {int(x.words[place]) for x in made}
        assert sums % 256 == 0
        assert sums != 0


def test_what_is_ready_for_gradients_that_nobody_wants_is_used_again(cupy, gpu_tensors):
    for _ in range(3):
        by_engine(*gpu_tensors(4))
    leaves = [x.requires_grad_() for x in gpu_tensors()]
    buffers = []
    for _ in range(3):
        made = attention(*leaves).grad_fn.call[2]
        buffers.append(made.ready[0][1])
        del made
    assert buffers[0] is buffers[1] is buffers[2]


@pytest.mark.parametrize("why", ["no context", "a fault"])
def test_the_first_launch_of_a_thread_of_pytorchs(cupy, gpu_tensors, monkeypatch, why):
    """It may have no context yet: then CuPy launches. Other errors are the user's."""
    for _ in range(3):
        by_engine(*gpu_tensors(4))
    q, k, v, do = gpu_tensors(4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    if why == "no context":
        monkeypatch.setattr(driver, "_thread", driver._Thread())
    before = len(cupy.launches)
    cupy.during_launch = lambda: TOO_MANY_RESOURCES
    if why == "a fault":
        with pytest.raises(RuntimeError, match="OUT_OF_RESOURCES"):
            torch.autograd.grad(out, leaves, do)
        return
    made = torch.autograd.grad(out, leaves, do)
    launches = cupy.launches[before:]
    assert not any(x.by_driver for x in launches)
    assert {x.data_ptr() for x in (q, k, v, do, *made)} <= told(launches)


def packed(size, alike):
    """Return q, k, v and do of two packed sequences, and offsets of both or of each."""
    ends = [torch.tensor([0, 11, size], dtype=torch.int32) for _ in range(2)]
    arrays = [torch.zeros(4, size, 16, dtype=torch.float16) for _ in range(4)]
    return arrays, ends[:1] * 2 if alike else ends


def packed_by_engine(size, alike, check=None):
    (*qkv, do), ends = packed(size, alike)
    leaves = [x.requires_grad_() for x in qkv]
    out = attention_varlen(*leaves, *ends, check=check)
    made = torch.autograd.grad(out, leaves, do)
    return [*qkv, do, out, *ends, *made]


@pytest.mark.parametrize("check", [None, False])
@pytest.mark.parametrize("alike", [False, True], ids=["two", "one"])
@pytest.mark.parametrize("size", [40, 4000], ids=["small", "large"])
def test_gradients_of_packed_calls(cupy, gpu_tensors, monkeypatch, size, alike, check):
    """They are prepared as those of others, and read the offsets of their own call."""
    for _ in range(3):
        packed_by_engine(size, alike, check)
    half = len(cupy.launches) // 3
    slow = [x.kernel for x in cupy.launches[-half:]]
    unchecked(monkeypatch)
    monkeypatch.setattr(compute, "backward", None)
    for _ in range(2):
        cupy.launches.clear()
        arrays = packed_by_engine(size, alike, check)
        assert [x.kernel for x in cupy.launches] == slow
        assert {x.data_ptr() for x in arrays} <= told(cupy.launches)
        ends = {x.data_ptr() for x in arrays[5:7]}
        readers = [x for x in cupy.launches if x.kernel.startswith("offsets")]
        assert len(readers) == 2  # before the forward, and before its gradients
        assert all(ends <= told([x]) for x in readers)


def test_gradients_of_a_packed_call_tell_of_wrong_offsets(cupy, gpu_tensors):
    """As every later call on the device does."""
    for _ in range(3):
        packed_by_engine(40, True)
    (*qkv, do), ends = packed(40, True)
    leaves = [x.requires_grad_() for x in qkv]
    out = attention_varlen(*leaves, *ends)
    words = reports.words(0)
    words[reports.OFFSETS_Q] = (1 << reports.KIND_BITS) + 2
    with pytest.raises(ArgumentError, match="offsets_q: an earlier call"):
        torch.autograd.grad(out, leaves, do, retain_graph=True)
    torch.autograd.grad(out, leaves, do)


def test_offsets_that_came_back_elsewhere(cupy, gpu_tensors):
    for _ in range(3):
        packed_by_engine(40, False)
    (*qkv, do), ends = packed(40, False)
    leaves = [x.requires_grad_() for x in qkv]
    copies = []

    def copied(x):
        copies.append(x.clone())
        return len(copies) - 1

    with torch.autograd.graph.saved_tensors_hooks(copied, lambda n: copies[n]):
        out = attention_varlen(*(x * 1 for x in leaves), *ends)
    cupy.launches.clear()
    torch.autograd.grad(out, leaves, do)
    found = {x.data_ptr() for x in copies} & told(cupy.launches)
    assert len(found) == len(copies) == 6  # q, k, v, both offsets, and out
