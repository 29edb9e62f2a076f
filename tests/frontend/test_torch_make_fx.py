"""Functions that make_fx records: each call is an operator of the graph, or an error."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import ArgumentTypeError, Rotary, masks

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402 (after the skip)
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import cupyflash.torch as ours  # noqa: E402
from cupyflash.torch import attention  # noqa: E402

HELD = torch.tensor([9, 16], dtype=torch.int32)
ENDS = torch.tensor([0, 16, 32], dtype=torch.int32)
RECORDED = {
    "attention": lambda q, k, v: attention(q, k, v, mask=masks.causal()),
    "dropout": lambda q, k, v: attention(q, k, v, dropout=0.3, seed=5),
    "sdpa": lambda q, k, v: ours.scaled_dot_product_attention(q, k, v, is_causal=True),
    "flash_attn": lambda q, k, v: ours.flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), window_size=(3, 0)
    ),
    "packed": lambda q, k, v: ours.flash_attn_varlen_func(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), ENDS, ENDS, 16, 16
    ),
    "cached": lambda q, k, v: ours.attention_cached(q[:, :, :1], k, v, HELD),
    "gradients": lambda *qkv: _gradients(*qkv),
}


def _gradients(q, k, v):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves), leaves, v)[0]


@pytest.mark.parametrize("name", RECORDED)
def test_make_fx_records_operators(name):
    """Also of tensors that have elements: what computes beside operators is not in the graph."""

    def draw():
        return [torch.randn(2, 2, 16, 8) for _ in "qkv"]

    function, first = RECORDED[name], draw()
    for _ in range(3):
        function(*first)  # like a later call
    graph = make_fx(function, tracing_mode="real")(*first)
    assert sum("cupyflash" in str(node.target) for node in graph.graph.nodes) == 1 + (
        name == "gradients"
    )
    other = draw()
    torch.testing.assert_close(graph(*other), function(*other))


def test_make_fx_refuses_what_is_no_operator():
    x, positions = torch.randn(2, 2, 16, 8), torch.arange(16)
    turns = Rotary(np.ones((16, 4), np.float32), np.zeros((16, 4), np.float32))
    with pytest.raises(ArgumentTypeError, match="Call it outside of the graph"):
        make_fx(lambda x: ours.rope(x, positions, turns))(x)
    with FlopCounterMode(display=False):  # another mode, which is no recorder
        torch.testing.assert_close(ours.rope(x, positions, turns), x)
