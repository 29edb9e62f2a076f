"""Layers of transformers on a GPU, without one: what kernels are told, and how outputs lie.

Tensors in host memory say that they are on a GPU, whose memory is that of `host_cupy`.
"""

from __future__ import annotations

import types

import numpy as np
import pytest
from recognised import LEAST_ADDRESS, fields, told, unchecked

from cupyflash.gpu import driver, params

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import compute  # noqa: E402 (after the skip)
from cupyflash.torch import transformers as adapter  # noqa: E402

OUT = params.params(0, 0, 0).place("out") // 8


def layers(model="GPT-2"):
    """Return q, k and v as a model has them, and do.

    GPT-2 has views of rows as queries, and copies of keys and values; Whisper has copies of all.
    """
    wide = torch.zeros(2, 40, 3, 4, 16).transpose(1, 3)
    q, *kv = (wide[:, :, n] for n in range(3))
    q = q.contiguous() if model == "Whisper" else q
    return q, *(x.contiguous() for x in kv), torch.zeros(2, 40, 4, 16)


def a_layer(q, k, v, mask=None, dropout=0):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    module = types.SimpleNamespace(is_causal=True)
    return adapter.attention_forward(module, *leaves, mask, dropout=dropout)[0], leaves


@pytest.mark.parametrize("how", ["causal", "mask", "dropout"])
@pytest.mark.parametrize("model", ["GPT-2", "Whisper"])
def test_a_layer_of_transformers_has_rows_before_heads(cupy, gpu_tensors, monkeypatch, model, how):
    """Its output is the kernel's, and neither it nor its gradient is a transposed view.

    Gradients have rows before heads in memory, whatever the tensors of the layer have.
    """
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool) if how == "mask" else None
    rest = mask, 0.1 if how == "dropout" else 0
    for _ in range(3):
        *qkv, do = layers(model)
        out, leaves = a_layer(*qkv, *rest)
        torch.autograd.grad(out, leaves, do)
    slow = cupy.launches[-3:]
    with torch.no_grad():
        for _ in range(2):
            a_layer(*layers(model)[:3], *rest)
    unchecked(monkeypatch)
    monkeypatch.setattr(compute, "backward", None)
    cupy.launches.clear()
    *qkv, do = layers(model)
    out, leaves = a_layer(*qkv, *rest)
    assert out.grad_fn.name() == "_ReplayedBackward"
    assert (out.shape, out.is_contiguous(), out._is_view()) == ((2, 40, 4, 16), True, False)
    made = torch.autograd.grad(out, leaves, do)
    assert all(x.transpose(1, 2).is_contiguous() for x in made)
    words = params.params(0, 0, 0)
    of_last = fields(cupy.launches[-1], words)
    for name, x in zip(("dk", "dv"), made[1:], strict=True):
        strides = of_last[name]
        assert (strides["lead"][-1], strides["head"], strides["row"]) == x.stride()[:3]
    assert [x.kernel for x in cupy.launches] == [x.kernel for x in slow]
    forward, *backward = cupy.launches
    assert int(forward.words[OUT]) == out.data_ptr()
    for n, x in enumerate(slow):  # the same strides: all but addresses is equal
        differ = cupy.launches[n].words != x.words
        assert np.count_nonzero(differ) <= np.count_nonzero(cupy.launches[n].words > LEAST_ADDRESS)
    assert {x.data_ptr() for x in (*qkv, do, out, *made)} <= told(backward)
    with torch.no_grad():
        alone = a_layer(*layers(model)[:3], *rest)[0]
    assert (alone.shape, alone.is_contiguous()) == ((2, 40, 4, 16), True)


@pytest.mark.parametrize("way", ["double backward", "another layout of do", "no context"])
def test_a_layer_of_transformers_whose_gradients_go_another_way(cupy, gpu_tensors, way):
    for _ in range(3):
        *qkv, do = layers()
        out, leaves = a_layer(*qkv)
        torch.autograd.grad(out, leaves, do)
    *qkv, do = layers()
    if way == "no context":
        driver._thread.devices.clear()
    out, leaves = a_layer(*qkv)
    assert (out.shape, out.is_contiguous()) == ((2, 40, 4, 16), True)
    if way == "another layout of do":
        do = do.transpose(1, 2).contiguous().transpose(1, 2)
    cupy.launches.clear()
    made = torch.autograd.grad(out, leaves, do, create_graph=way == "double backward")
    assert {do.data_ptr(), *(x.data_ptr() for x in made)} <= told(cupy.launches)
    assert [x.shape for x in made] == [x.shape for x in qkv]
    if way == "no context":
        return  # the output is a copy of what the gradients read
    assert out.data_ptr() in told(cupy.launches)
    words = params.params(0, 0, 0)
    strides = fields(cupy.launches[0], words)["d_out"]
    wanted = do.transpose(1, 2).stride()
    assert (strides["lead"][-1], strides["head"], strides["row"]) == wanted[:3]
    if way == "double backward":
        (again,) = torch.autograd.grad(made[0].sum(), leaves[1])
        assert again.shape == qkv[1].shape
