"""Recognised calls of tensors with heads behind rows, without a GPU: no view of a tensor is made.

Tensors in host memory say that they are on a GPU, whose memory is that of `host_cupy`.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from recognised import LEAST_ADDRESS, fields, told, unchecked

from cupyflash import ArgumentError, ArgumentTypeError, masks
from cupyflash.arrays import reports
from cupyflash.gpu import driver, params
from cupyflash.problem import cached

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import (  # noqa: E402 (after the skip)
    attention,
    compute,
    cute,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    longest,
    recognised,
    varlen_attn,
)

CAUSAL = masks.causal()


class Aux:
    lse = True


def ends_of(one):
    ends = torch.tensor([0, 11, 40], dtype=torch.int32)
    return ends, ends if one else ends.clone()


# Each takes q, k and v.
CALLS = {
    "dense": lambda *x: flash_attn_func(*x, causal=True),
    "dense, lse": lambda *x: flash_attn_func(*x, window_size=(7, 0), return_attn_probs=True),
    "softcap": lambda *x: flash_attn_func(*x, softcap=5.0, softmax_scale=0.5),
    "packed": lambda *x: flash_attn_varlen_func(*x, *ends_of(False), 40, 40, causal=True),
    "packed, dropout": lambda *x: flash_attn_varlen_func(*x, *ends_of(True), 40, 40, 0.25),
    "packed, short": lambda *x: flash_attn_varlen_func(*x, *ends_of(True), 29, 29, causal=True),
    "varlen_attn": lambda *x: varlen_attn(*x, *ends_of(True), 40, 40, window_size=(-1, 0)),
    "varlen_attn, lse": lambda *x: varlen_attn(*x, *ends_of(True), 40, 40, return_aux=Aux),
    "sink": lambda *x: cute.flash_attn_func(*x, causal=True, learnable_sink=torch.ones(4)),
}


def drawn(name, layout="rows"):
    """Return q, k, v and do; rows lie behind heads in memory unless `layout` says otherwise."""
    is_packed = name.startswith(("packed", "varlen"))
    shape = (40, 4, 16) if is_packed else (2, 40, 4, 16)
    if layout == "heads":
        turned = torch.zeros(shape).transpose(-3, -2).contiguous().transpose(-3, -2)
        return [turned.clone() for _ in range(4)]
    if layout == "one tensor":
        wide = torch.zeros(*shape[:-2], 3, *shape[-2:])
        return [*wide.unbind(-3), torch.zeros(shape)]
    return [torch.zeros(shape) for _ in range(4)]


def first(made):
    return made[0] if type(made) is tuple else made


def by_engine(name, layout):
    """Return out and the gradients of a call."""
    *qkv, do = drawn(name, layout)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = first(CALLS[name](*leaves))
    return out, torch.autograd.grad(out, leaves, do)


def refuse_views(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a view of a tensor was made")

    for view in ("transpose", "swapaxes", "permute", "view"):
        monkeypatch.setattr(torch.Tensor, view, refuse)


def alike(found, wanted):
    """Whether launches differ in addresses alone, and in the seed of dropout."""
    assert [x[:1] + x[2:5] for x in found] == [x[:1] + x[2:5] for x in wanted]
    assert {x.stream for x in found} == {70}  # PyTorch's
    for a, b in zip(found, wanted, strict=True):
        assert (a.words[a.words != b.words] > LEAST_ADDRESS).all()


@pytest.mark.parametrize("layout", ["rows", "heads", "one tensor"])
@pytest.mark.parametrize("name", CALLS)
def test_recognised_calls_make_no_views(cupy, gpu_tensors, monkeypatch, name, layout):
    """They launch what the checked calls launched, for the same tensors, and so do gradients."""
    with torch.no_grad():
        checked_alone = first(CALLS[name](*drawn(name, layout)[:3]))
        alone = cupy.launches[:]
    cupy.launches.clear()
    checked, of_checked = by_engine(name, layout)
    both = cupy.launches[:]
    for _ in range(2):
        by_engine(name, layout)
        with torch.no_grad():
            CALLS[name](*drawn(name, layout)[:3])
    unchecked(monkeypatch)
    if name != "sink":
        monkeypatch.setattr(compute, "backward", None)
    *qkv, do = drawn(name, layout)
    leaves = [x.detach().requires_grad_() for x in qkv]
    cupy.launches.clear()
    with monkeypatch.context() as patched:
        refuse_views(patched)
        with torch.no_grad():
            out = first(CALLS[name](*qkv))
        alike(cupy.launches, alone)
        assert {x.data_ptr() for x in (*qkv, out)} <= told(cupy.launches)
        cupy.launches.clear()
        recorded = first(CALLS[name](*leaves))
        if name != "sink":
            made = torch.autograd.grad(recorded, leaves, do)
    if name == "sink":
        made = torch.autograd.grad(recorded, leaves, do)
    alike(cupy.launches, both)
    assert {x.data_ptr() for x in (*qkv, do, recorded, *made)} <= told(cupy.launches)
    for x in (out, recorded, checked_alone):
        assert (x.shape, x.stride(), x.dtype) == (checked.shape, checked.stride(), checked.dtype)
    assert recorded.grad_fn.name() == "_ReplayedBackward"
    assert not recorded._is_view()
    for x, y in zip(made, of_checked, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize(
    "way", ["double backward", "another layout of do", "no context", "lse", "lse alone"]
)
@pytest.mark.parametrize("name", ["dense", "packed", "sink"])
def test_gradients_that_go_another_way(cupy, gpu_tensors, name, way):
    """They are computed with heads before rows, and come back with rows before heads."""
    call = CALLS[name]
    if way.startswith("lse"):
        call = {
            "dense": lambda *x: flash_attn_func(*x, return_attn_probs=True),
            "packed": CALLS["varlen_attn, lse"],
            "sink": lambda *x: cute.flash_attn_func(*x, learnable_sink=torch.ones(4)),
        }[name]
    for _ in range(3):
        *qkv, do = drawn(name)
        leaves = [x.requires_grad_() for x in qkv]
        torch.autograd.grad(first(call(*leaves)), leaves, do)
    if way == "no context":
        driver._thread.devices.clear()
    *qkv, do = drawn(name)
    leaves = [x.requires_grad_() for x in qkv]
    made = call(*leaves)
    out = first(made)
    assert out.grad_fn.name() == "_ReplayedBackward"
    assert (out.shape, out.is_contiguous(), out._is_view()) == (qkv[0].shape, True, False)
    if way == "another layout of do":
        do = do.transpose(0, 1).contiguous().transpose(0, 1)
    results, given = (out,), (do,)
    if way.startswith("lse"):
        dlse = torch.zeros(made[1].shape)
        results, given = (made[1],) if "alone" in way else made[:2], (dlse,)
        given = given if "alone" in way else (do, dlse)
    cupy.launches.clear()
    found = torch.autograd.grad(results, leaves, given, create_graph=way == "double backward")
    assert [x.shape for x in found] == [x.shape for x in qkv]
    assert [x.is_contiguous() for x in found] == [True] * 3
    words = told(cupy.launches)
    assert {x.data_ptr() for x in (*qkv, *given, *found)} <= words
    assert out.data_ptr() in words
    if way == "double backward":
        (again,) = torch.autograd.grad(found[0].sum(), leaves[1])
        assert (again.shape, again.is_contiguous()) == (qkv[1].shape, True)


def test_a_step_of_generation_has_one_more_key(cupy, gpu_tensors, monkeypatch):
    """Calls of one query are known for other numbers of keys, too, as parts of a room."""

    def step(keys):
        kv = [torch.zeros(2, 300, 4, 16)[:, :keys] for _ in range(2)]
        with torch.no_grad():
            return flash_attn_func(torch.zeros(2, 1, 4, 16), *kv), kv

    for keys in range(200, 204):
        step(keys)
    unchecked(monkeypatch)
    cupy.launches.clear()
    out, kv = step(210)
    assert {x.data_ptr() for x in (out, *kv)} <= told(cupy.launches)
    assert out.shape == (2, 1, 4, 16)


WRONG = {
    "q: got shape": lambda x: flash_attn_func(*(y[0] for y in x)),
    "heads": lambda x: varlen_attn(x[0][0], *(y[0, :, :2] for y in x[1:]), *ends_of(True), 40, 40),
    "got list": lambda x: flash_attn_func(x[0].tolist(), *x[1:]),
    "one dtype": lambda x: flash_attn_func(x[0], x[1].double(), x[2]),
    "window_size": lambda x: flash_attn_func(*x, window_size=(1.5, 0)),
    "softmax_scale|scale": lambda x: flash_attn_func(*x, softmax_scale="1"),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_refused_after_a_recognised_call(cupy, gpu_tensors, words):
    """Also what is a call that is known with heads before rows, or of another function."""
    for _ in range(3):
        x = drawn("dense")[:3]
        attention(*(y[0].transpose(0, 1) for y in x))
        flash_attn_func(*x)
        few = [y[0, :, :2] for y in x[1:]]
        varlen_attn(x[0][0], *few, *ends_of(True), 40, 40, enable_gqa=True)
    assert recognised._known
    cupy.launches.clear()
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        WRONG[words](drawn("dense")[:3])
    assert not cupy.launches


def test_parts_of_one_tensor_are_recognised_by_their_strides(cupy, gpu_tensors, monkeypatch):
    for _ in range(3):
        flash_attn_qkvpacked_func(torch.zeros(2, 40, 3, 4, 16), causal=True)
    unchecked(monkeypatch)
    cupy.launches.clear()
    qkv = torch.zeros(2, 40, 3, 4, 16)
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    places = {qkv.data_ptr() + 4 * 64 * n for n in range(3)}
    assert {*places, out.data_ptr()} <= told(cupy.launches)


SHORT = {
    "flash_attn": lambda x, ends, n: flash_attn_varlen_func(*x, ends, ends, n, n),
    "one tensor": lambda x, ends, n: flash_attn_varlen_qkvpacked_func(
        torch.stack(x, dim=1), ends, n
    ),
    "two tensors": lambda x, ends, n: flash_attn_varlen_kvpacked_func(
        x[0], torch.stack(x[1:], dim=1), ends, ends, n, n
    ),
    "cute": lambda x, ends, n: cute.flash_attn_varlen_func(
        *x, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=n, max_seqlen_k=n
    ),
    "varlen_attn": lambda x, ends, n: varlen_attn(*x, ends, ends, n, n),
}


@pytest.mark.parametrize("name", SHORT)
def test_the_longest_lengths_choose_kernels(cupy, gpu_tensors, name):
    """Kernels rely on lengths of at most 128, so that others check them."""
    ends = torch.tensor([0, 0, 60, 140, 200], dtype=torch.int32)
    x = [torch.zeros(200, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
    kernels = {}
    for most in (80, 75, 129, 200, 2**40):
        for _ in range(2):
            cupy.launches.clear()
            SHORT[name](x, ends, most)
            kernels[most] = cupy.launches[-1].kernel
            before = [x for x in cupy.launches if x.kernel.startswith("offsets")]
            if most > 128:
                assert before == [] or not fields(before[0], params.rowwise("offsets"))["limited"]
                continue
            assert len(cupy.launches) == 2
            it = fields(*before, params.rowwise("offsets"))
            assert (it["limited"], *it["limits"]) == (2, 80, 80)  # nothing else is reported
            assert it["reports"].all()
    assert kernels[80] == kernels[75] != kernels[129] == kernels[200] == kernels[2**40]
    assert "_one_" in kernels[80]
    assert kernels[80].endswith("__q64_kv80")  # lengths are thought to be half of it, on average
    for n in range(2):  # a call that is known raises it, and so does one that is not
        place = ctypes.c_uint64.from_address(reports.address(0, reports.OFFSETS_Q))
        place.value = 2 << reports.KIND_BITS | 4
        with pytest.raises(
            ArgumentError, match="entry 2 ends a sequence that is longer than bias, mask or"
        ):
            SHORT[name](x, ends, 80 - 20 * n)


@pytest.mark.parametrize("name", SHORT)
def test_the_debug_variable_finds_the_call(cupy, gpu_tensors, monkeypatch, name):
    """Of offsets that are read, the call says which sequence is longer."""
    monkeypatch.setattr(cached, "CHECKS_ALL", True)
    ends = torch.tensor([0, 0, 60, 140, 200], dtype=torch.int32)
    x = [torch.zeros(200, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
    SHORT[name](x, ends, 80)
    cupy.launches.clear()
    for _ in range(2):
        words = "^offsets_q: entry 3 ends a sequence of 80 rows; expected at most 64, which is max"
        with pytest.raises(ArgumentError, match=words):
            SHORT[name](x, ends, 50)
    assert not cupy.launches
    none = torch.zeros(1, dtype=torch.int32)
    assert first(SHORT[name]([each[:0] for each in x], none, 50)).shape == (0, 4, 64)


def test_few_lengths_have_kernels_of_their_own():
    assert longest.known(1, 1) == (16, 16)
    assert longest.known(128, 113) == (128, 128)
    assert longest.known(129, 17) == (256, 32)
    assert longest.known(np.int64(40), np.int32(5)) == (48, 16)
    for pair in (
        (0, 5),
        (5, 0),
        (5, 129),
        (-1, 5),
        (5, -1),
        (None, 5),
        (True, 5),
        (torch.tensor(5), 5),
    ):
        assert longest.known(*pair) is None
