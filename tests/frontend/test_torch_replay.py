"""Recognised calls on tensors on a GPU, without a GPU: what kernels are told, and on which stream.

Tensors in host memory say that they are on a GPU, whose memory is that of `host_cupy`.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from recognised import fields

from cupyflash import ArgumentError, masks, scores
from cupyflash.arrays import device_arrays, reports
from cupyflash.gpu import params
from cupyflash.problem import validate

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import attention, autograd, recognised, tensors  # noqa: E402 (after the skip)

PLACES = {"q": 0, "k": 8, "v": 16, "out": 24}  # of addresses among a forward's words
CAUSAL = masks.causal()


@pytest.fixture
def gpu_tensors(cupy, monkeypatch):
    """Make a function that makes tensors, with CuPy's module as `cupy`."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0, raising=False)
    monkeypatch.setattr(device_arrays, "on_stream", lambda *_: nullcontext())
    monkeypatch.setattr(tensors, "raw_stream", lambda device: 70 + device)
    monkeypatch.setattr(recognised, "_known", {})
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: Device()), raising=False)

    class Device:
        type, index = "cuda", 0

        def __eq__(self, other):
            return isinstance(other, Device)

        __hash__ = None

    return lambda count=3, dtype=torch.float32, size=40: [
        torch.zeros(2, 4, size, 16, dtype=dtype) for _ in range(count)
    ]


def unchecked(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the call was checked, or made arrays, again")

    monkeypatch.setattr(validate, "call", refuse)
    monkeypatch.setattr(device_arrays, "borrowed", refuse)


def gradients(q, k, v, do, **options):
    """Return the gradients of a call, without PyTorch's engine, which would look for a GPU."""
    settings = autograd.compute.Settings(**options)
    x = autograd.Operands(q, k, v)
    results = autograd.compute.forward(settings, x)
    return autograd.compute.backward(settings, x, results, do, None, False)


def test_what_a_recognised_call_tells(cupy, gpu_tensors, monkeypatch):
    first, second = gpu_tensors(), gpu_tensors()
    attention(*first, mask=CAUSAL)
    unchecked(monkeypatch)
    out = attention(*second, mask=CAUSAL)
    slow, quick = cupy.launches
    assert (slow.by_driver, quick.by_driver, quick.stream) == (False, True, 70)
    for name, x in zip(PLACES, (*second, out), strict=True):
        assert quick.words[PLACES[name]] == x.data_ptr(), name
    different = set(np.flatnonzero(quick.words != slow.words).tolist())
    assert len(different - set(PLACES.values())) <= 1  # the address of the log-sum-exp
    assert quick[2:5] == slow[2:5]
    assert out.shape == first[0].shape


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(cupy, gpu_tensors, monkeypatch, deterministic):
    gradients(*gpu_tensors(4, torch.float16), mask=CAUSAL, deterministic=deterministic)
    before = len(cupy.launches)
    gradients(*gpu_tensors(4, torch.float16), mask=CAUSAL, deterministic=deterministic)
    half = len(cupy.launches)
    unchecked(monkeypatch)
    arrays = gpu_tensors(4, torch.float16)
    made = gradients(*arrays, mask=CAUSAL, deterministic=deterministic)
    slow, quick = cupy.launches[before:half], cupy.launches[half:]
    assert [x.kernel for x in quick] == [x.kernel for x in slow]
    for a, b in zip(slow, quick, strict=True):
        assert a[2:5] == b[2:5]
        assert b.stream == 70
    told = {int(word) for launch in quick for word in launch.words}
    assert {x.data_ptr() for x in (*arrays, *made)} <= told
    assert [x.shape for x in made] == [x.shape for x in arrays[:3]]


def test_an_array_in_the_memory_of_a_tensor_keeps_it(cupy, gpu_tensors):
    """Workspaces are tensors that nothing else keeps, and are written while a call is computed."""
    (tensor,) = gpu_tensors(1)
    alive = weakref.ref(tensor)
    array = tensors.array_of(tensor)
    assert array.data.ptr == tensor.data_ptr()
    rows = array[0, 1:].reshape(3 * 40, 16)
    del tensor, array
    gc.collect()
    assert alive() is not None
    rows.fill(2)
    assert float(alive().sum()) == 2 * 3 * 40 * 16
    del rows
    gc.collect()
    assert alive() is None


def test_other_calls_are_told_apart(cupy, gpu_tensors):
    q, k, v = gpu_tensors()
    kinds = [
        {},
        {"mask": CAUSAL},
        {"mask": masks.causal(3)},
        {"mask": torch.ones(40, 40, dtype=torch.bool)},
        {"score_mod": scores.softcap(2.0)},
        {"score_mod": [scores.softcap(2.0), scores.softcap(3.0)]},
        {"bias": torch.zeros(40, 40)},
        {"bias": torch.zeros(1, 40)},
        {"sink": torch.zeros(4)},
        {"scale": 2.0},
        {"dropout": 0.5, "seed": 3},
        {"dropout": 0.5, "seed": torch.tensor(3)},
    ]
    calls = [lambda o=o: attention(q, k, v, **o) for o in kinds]
    calls += [
        lambda: attention(*(x.half() for x in (q, k, v))),
        lambda: attention(q[:, :, :7], k, v),
        lambda: attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    ]
    for call in calls:
        call()
    assert len(recognised._known) == len(calls)
    for call in calls:
        call()
    assert len(recognised._known) == len(calls)


def test_an_integer_seed_is_not_part_of_a_call(cupy, gpu_tensors, monkeypatch):
    q, k, v = gpu_tensors()
    attention(q, k, v, dropout=0.5, seed=3)
    unchecked(monkeypatch)
    attention(q, k, v, dropout=0.5, seed=2**64 - 7)
    assert 2**64 - 7 in cupy.launches[-1].words.tolist()


def test_looked_up_arrays_are_read_where_they_lie(cupy, gpu_tensors, monkeypatch):
    q, k, v = gpu_tensors()
    bias, other = torch.zeros(40, 40), torch.zeros(40, 40)
    attention(q, k, v, bias=bias)
    unchecked(monkeypatch)
    attention(q, k, v, bias=other)
    words = cupy.launches[-1].words.tolist()
    assert other.data_ptr() in words
    assert bias.data_ptr() not in words


def test_new_calls_displace_old_ones(cupy, gpu_tensors, monkeypatch):
    monkeypatch.setattr(recognised, "MOST", 2)
    for size in (1, 2, 3):
        attention(*gpu_tensors(size=size))
    assert len(recognised._known) == 2


def packed_gradients(q, k, v, do, offsets, check):
    x = autograd.Operands(q, k, v, offsets_q=offsets[0], offsets_k=offsets[1])
    settings = autograd.compute.Settings(check=check)
    results = autograd.compute.forward(settings, x)
    return autograd.compute.backward(settings, x, results, do, None, False)


@pytest.mark.parametrize("check", [None, False])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_calls(cupy, gpu_tensors, monkeypatch, check, alike, dtype):
    def drawn():
        offsets = [torch.tensor([0, 11, 40], dtype=dtype) for _ in range(2)]
        arrays = [torch.zeros(4, 40, 16) for _ in range(4)]
        return arrays, offsets[:1] * 2 if alike else offsets

    def offsets_of(launches):
        found = [x for x in launches if x.kernel.startswith("offsets")]
        layout = params.rowwise("offsets")
        return [fields(x, layout)["inputs"].tolist() for x in found]

    for _ in range(2):
        packed_gradients(*drawn()[0], drawn()[1], check)
    unchecked(monkeypatch)
    monkeypatch.setattr(validate, "varlen_call", validate.call)
    cupy.launches.clear()
    arrays, offsets = drawn()
    packed_gradients(*arrays, offsets, check)
    assert all(x.stream == 70 for x in cupy.launches)
    places = [x.data_ptr() for x in offsets]
    launched = check is None or dtype == torch.int32
    assert offsets_of(cupy.launches) == [places] * 2 * launched
    words = {int(word) for launch in cupy.launches for word in launch.words}
    assert set(places) <= words
    if check is None:
        place = reports.address(0, reports.OFFSETS_Q)
        ctypes.c_uint64.from_address(place).value = 2 << reports.KIND_BITS | 2
        with pytest.raises(ArgumentError, match="offsets_q: an earlier call"):
            packed_gradients(*arrays, offsets, check)
        packed_gradients(*arrays, offsets, check)


def test_offsets_that_are_read_have_no_place_among_recognised_calls(cupy, gpu_tensors):
    offsets = [torch.tensor([0, 11, 40])] * 2
    for _ in range(2):
        packed_gradients(*(torch.zeros(4, 40, 16) for _ in range(4)), offsets, True)
    assert not recognised._known
    with pytest.raises(ArgumentError, match="offsets_q: runs from 0 to 41"):
        packed_gradients(
            *(torch.zeros(4, 40, 16) for _ in range(4)), [torch.tensor([0, 11, 41])] * 2, True
        )
