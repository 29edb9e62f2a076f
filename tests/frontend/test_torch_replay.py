"""Recognised calls on tensors on a GPU, without a GPU: what kernels are told, and on which stream.

Tensors in host memory say that they are on a GPU, whose memory is that of `host_cupy`.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import gpu_host
import numpy as np
import pytest
from recognised import fields, told, unchecked

from cupyflash import ArgumentError, ArgumentTypeError, masks, scores
from cupyflash.arrays import reports
from cupyflash.gpu import params, tma
from cupyflash.problem import validate
from cupyflash.problem.options import NAMES

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import (  # noqa: E402 (after the skip)
    attention,
    attention_varlen,
    autograd,
    compute,
    pending,
    recognised,
    scaled_dot_product_attention,
    tensors,
)

LSE = params.params(0, 0, 0).place("lse") // 8
CAUSAL = masks.causal()
SEEN, ENDS = torch.ones(40, 40, dtype=torch.bool), torch.tensor([0, 40])


def gradients(q, k, v, do, **options):
    """Return the gradients of a call without PyTorch's engine, as an operator of PyTorch does."""
    settings = autograd.Settings(**options)
    x = autograd.Operands(q, k, v)
    results = compute.forward(settings, x)
    return compute.backward(settings, x, results, do, None, False)


def by_engine(q, k, v, do, **options):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    made = attention(*leaves, **options)
    return torch.autograd.grad(made[0] if type(made) is tuple else made, leaves, do)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"mask": CAUSAL, "dropout": 0.5, "seed": 7}, {"mask": SEEN}], ids=str
)
def test_gradients_that_pytorchs_engine_asks_for(
    cupy, gpu_tensors, monkeypatch, deterministic, options
):
    """Their forward is recognised, and then they need no signature of their own."""
    options = options | {"deterministic": deterministic}
    for _ in range(2):
        before = len(cupy.launches)
        by_engine(*gpu_tensors(4, torch.float16), **options)
    slow = cupy.launches[before:]
    by_engine(*gpu_tensors(4, torch.float16), **options)  # a signature of theirs is known
    unchecked(monkeypatch)
    monkeypatch.setattr(compute, "backward", None)
    before = len(cupy.launches)
    arrays = gpu_tensors(4, torch.float16)
    made = by_engine(*arrays, **options)
    quick = cupy.launches[before:]
    assert [x[:1] + x[2:5] for x in quick] == [x[:1] + x[2:5] for x in slow]
    assert {x.stream for x in quick} == {70}
    assert {x.data_ptr() for x in (*arrays, *made)} <= told(quick)
    forward = told(quick[:1])
    assert all(x.data_ptr() in forward for x in arrays[:3])
    assert int(quick[0].words[LSE]) in told(quick[1:])
    for x, gradient in zip(arrays, made, strict=False):
        assert (gradient.shape, gradient.stride(), gradient.dtype) == (x.shape, x.stride(), x.dtype)


def moved(x):
    return x.clone()


def relaid(x):
    """Return a tensor at the same address that goes through its memory in another order."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="cpu").stride())


SAVED = "q", "k", "v", "mask", "out", "lse"


@pytest.mark.parametrize(
    ("unpacked", "name"),
    [(moved, name) for name in SAVED] + [(relaid, name) for name in SAVED[:-1]],
)
def test_saved_tensors_that_hooks_put_elsewhere(cupy, gpu_tensors, unpacked, name):
    """A hook may return a tensor at another address, or at the same one with other strides."""
    options = {"mask": {"mask": SEEN.T}, "lse": {"return_lse": True}}.get(name, {})
    saved = [x for x in SAVED if x == name or x not in ("mask", "lse")]

    def rows():
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gpu_tensors(4)]

    for _ in range(3):
        by_engine(*rows(), **options)
    q, k, v, do = rows()
    seen = {}

    def unpack(x):
        now = saved[len(seen)]
        seen[now] = unpacked(x) if now == name else x
        return seen[now]

    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpack):
        out = attention(*leaves, **options)
    lse = None if name == "lse" else out.grad_fn.call[-1]  # which is no result, and is not saved
    before = len(cupy.launches)
    torch.autograd.grad(out[0] if name == "lse" else out, leaves, do)
    found = cupy.launches[before:]
    assert list(seen) == saved
    results = seen.pop("out"), seen.pop("lse", lse)
    before = len(cupy.launches)
    compute.backward(autograd.Settings(), autograd.Operands(**seen), results, do, None, False)
    wanted = cupy.launches[before:]
    seen = [*seen.values(), *results]
    assert {x.data_ptr() for x in seen} <= told(found)
    for a, b in zip(found, wanted, strict=True):  # all but the addresses of new memory
        assert a.kernel == b.kernel
        assert np.count_nonzero(a.words != b.words) <= 5


def long_rows(count=4):
    """Return tensors for which kernels take tensor maps, and add dq to sums."""
    return [torch.zeros(1, 2, 600, 64, dtype=torch.float16) for _ in range(count)]


@pytest.mark.parametrize("most", [0, 2**40], ids=["later", "early"])
def test_memory_of_gradients_that_is_asked_for(cupy, gpu_tensors, monkeypatch, most):
    """Kernels are told the same, whether the forward has asked for memory or not."""
    monkeypatch.setattr(pending, "SMALL", most)
    for _ in range(3):
        by_engine(*long_rows())
    place = params.params(0, 0, 0).place
    for _ in range(2):
        q, k, v, do = arrays = long_rows()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        forward = cupy.launches[-1]
        cupy.launches.clear()
        made = torch.autograd.grad(out, leaves, do)
        delta, dkdv, rows = cupy.launches
        kernels = "backward_delta", "backward_sm90_dkdv", "backward_dq_rows"
        assert [x.kernel.split("__")[0] for x in cupy.launches] == list(kernels)
        (sums,) = {int(x.words[place("dq_accum") // 8]) for x in (delta, dkdv, rows)}
        assert sums != 0
        maps = dkdv.words[-6 * tma.BYTES // 8 :: tma.BYTES // 8]
        assert maps.tolist() == [x.data_ptr() for x in (q, k, v, do, *made[1:])]
        assert {x.data_ptr() for x in (*arrays, *made, out)} <= told(cupy.launches)
        assert forward.words[LSE] in dkdv.words


def test_a_forward_of_a_thread_in_which_cupy_has_launched_nothing(cupy, gpu_tensors):
    """CuPy launches it, though the call is known; its gradients are of another thread."""
    for _ in range(3):
        by_engine(*gpu_tensors(4))
    q, k, v, do = gpu_tensors(4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    made = []
    thread = threading.Thread(target=lambda: made.append(attention(*leaves)))
    thread.start()
    thread.join()
    (forward,) = cupy.launches[-1:]
    assert not forward.by_driver
    before = len(cupy.launches)
    torch.autograd.grad(made[0], leaves, do)
    backward = cupy.launches[before:]
    assert {made[0].data_ptr(), int(forward.words[LSE])} <= told(backward)


def test_tensors_that_were_changed_in_place(cupy, gpu_tensors):
    for _ in range(3):
        by_engine(*gpu_tensors(4))
    q, k, v, do = gpu_tensors(4)
    leaf = q.requires_grad_()
    k = k + 1
    out = attention(leaf, k, v)
    k += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaf, do)


def test_second_derivatives_of_recognised_calls(cupy, gpu_tensors):
    for _ in range(3):
        by_engine(*gpu_tensors(4))
    q, k, v, do = gpu_tensors(4)
    (dq,) = torch.autograd.grad(attention(q.requires_grad_(), k, v), q, do, create_graph=True)
    cupy.launches.clear()
    (made,) = torch.autograd.grad(dq, q, do)
    kernels = [each.kernel.split("__")[0] for each in cupy.launches]
    assert kernels == [
        "forward_simt_tangent",
        "backward_tangent_delta",
        "backward_simt_tangent_dkdv",  # of float32: it adds to the tangent of dq, too
    ]
    assert made.data_ptr() in cupy.launches[-1].words


def test_a_log_sum_exp_that_nobody_wants_is_not_written(cupy, gpu_tensors):
    for _ in range(2):
        attention(*gpu_tensors())
        assert cupy.launches[-1].words[LSE] == 0
    for _ in range(2):
        _, lse = attention(*gpu_tensors(), return_lse=True)
        assert cupy.launches[-1].words[LSE] == lse.data_ptr()
    q, k, v = gpu_tensors()
    attention(q, k.requires_grad_(), v)
    assert cupy.launches[-1].words[LSE] != 0


class Named(torch.Tensor):
    pass


REFUSED = {
    "another dtype": lambda q, k, v: attention(q, k.half(), v),
    "another shape": lambda q, k, v: attention(q, k[:, :3], v),
    "a subclass": lambda q, k, v: attention(q, k.as_subclass(Named), v),
    "a subclass of the first": lambda q, k, v: attention(q.as_subclass(Named), k, v),
    "an array": lambda q, k, v: attention(q, k, np.zeros(v.shape, np.float32)),
    "a number": lambda q, k, v: attention(1.0, k, v),
    "a sparse one": lambda q, k, v: attention(q, k, v.to_sparse()),
    "an unknown option": lambda q, k, v: attention(q, k, v, precision="tf32"),
    "a scale": lambda q, k, v: attention(q, k, v, scale="1"),
    "a mask": lambda q, k, v: attention(q, k, v, mask=torch.ones(40, 40)),
    "a mask of a subclass": lambda q, k, v: attention(q, k, v, mask=SEEN.as_subclass(Named)),
    "a mask's shape": lambda q, k, v: attention(q, k, v, mask=SEEN[:, :3]),
    "a seed": lambda q, k, v: attention(q, k, v, dropout=0.5, seed=torch.tensor(3.0)),
    "no seed": lambda q, k, v: attention(q, k, v, dropout=0.5),
    "a flag": lambda q, k, v: attention(q, k, v, return_lse=1),
    "offsets": lambda q, k, v: attention_varlen(q[0], k[0], v[0], ENDS, ENDS + 1, check=True),
    "a mask twice": lambda q, k, v: scaled_dot_product_attention(q, k, v, SEEN, is_causal=True),
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused_after_a_recognised_call(cupy, gpu_tensors, wrong):
    q, k, v = gpu_tensors()
    for _ in range(2):
        attention(q, k, v)
        attention(q, k, v, mask=SEEN)
        attention(q, k, v, dropout=0.5, seed=torch.tensor(3))
        attention_varlen(q[0], k[0], v[0], ENDS, ENDS, check=True)
    before = len(cupy.launches)
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        REFUSED[wrong](q, k, v)
    assert len(cupy.launches) == before


def test_another_device_is_another_call(cupy, gpu_tensors, monkeypatch):
    q, k, v = gpu_tensors()
    attention(q, k, v)
    other = k.clone()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: int(x is other))
    x = autograd.Operands(q, other, v)
    kind = recognised.FORWARD[False]
    assert recognised.signature(kind, autograd.Settings(), autograd.Operands(q, k, v)).known
    assert recognised.signature(kind, autograd.Settings(), x).known is None


def test_autocast_converts_before_a_call_is_recognised(cupy, gpu_tensors, monkeypatch):
    q, k, v = gpu_tensors()
    attention(q, k, v)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast asks whether there is a GPU
    try:
        for _ in range(2):
            assert attention(q, k, v).dtype is torch.float16
            assert attention(q.half(), k, v).dtype is torch.float16
        unchecked(monkeypatch)
        monkeypatch.setattr(tensors, "check", None)
        assert attention(*gpu_tensors(dtype=torch.float16)).dtype is torch.float16
    finally:
        torch.set_autocast_enabled("cuda", False)


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
        {"precision": "tf32x3"},
    ]
    assert {name for kind in kinds for name in kind} == set(NAMES)
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


def test_the_parts_of_the_time_of_a_call_are_measured(cupy, gpu_tensors, monkeypatch):
    monkeypatch.setattr(gpu_host, "CALLS", 1)
    rows = gpu_host.of_tensors(cupy, torch, gpu_tensors(4), 1)
    assert [len(times) for times in rows.values()] == [2] * 3 + [1] * 6
    assert all(time > 0 for times in rows.values() for time in times)
