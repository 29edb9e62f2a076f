"""PyTorch: its attention functions, and those that transformers gives to models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyflash.arrays.dtypes import FLOATS

from ..options import mask_array
from .base import (
    Array,
    Documented,
    Functions,
    Peer,
    all_rounded,
    mask_or_bias,
    no_gradient_of_more,
    rounded_weights,
)

if TYPE_CHECKING:
    from ..subject import Call

TYPES = tuple(FLOATS)
# The softmax of others is in float32, whatever their type.
NARROW = tuple(x for x in TYPES if x != "float64")
WAYS = {"math": "MATH", "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION"}  # fmt: skip


def tensor(x: Array, grad: bool = False, device: str = "cpu") -> Any:
    """Return a tensor with the numbers of an array."""
    import torch

    x = np.array(x, order="C")  # PyTorch takes no negative strides
    if x.dtype.name == "bfloat16":
        made = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    else:
        made = torch.from_numpy(x)
    return made.to(device).requires_grad_(grad)


def array(x: Any, dtype: Any) -> Array:
    """Return the numbers of a tensor."""
    import torch

    x = x.detach().contiguous().cpu()
    if np.dtype(dtype).name == "bfloat16":
        return np.asarray(x.view(torch.int16).numpy()).view(dtype)
    return np.asarray(x.numpy())


def by_autograd(
    attend: Callable[..., Any], gradients: bool = True, device: str = "cpu", masks: bool = True
) -> Functions:
    """Make functions of one of tensors: ``attend(q, k, v, **options) -> (out, lse or None)``.

    Without `masks`, it gets ``causal=True`` for the causal mask, and no others.
    """

    def read_options(q: Array, k: Array, options: dict[str, Any]) -> dict[str, Any]:
        read = {name: x for name, x in options.items() if name != "return_lse"}
        if not masks:
            return read | {"causal": read.pop("mask", None) is not None}
        if options.get("mask") is not None:
            read["mask"] = tensor(np.array(mask_array(options["mask"], q, k)), device=device)
        if options.get("bias") is not None:
            read["bias"] = tensor(options["bias"], device=device)
        return read

    def forward(q: Array, k: Array, v: Array, **options: Any) -> Any:
        tensors = (tensor(x, device=device) for x in (q, k, v))
        out, lse = attend(*tensors, **read_options(q, k, options))
        return array(out, q.dtype), None if lse is None else array(lse, np.float32)

    def backward(do: Array, q: Array, k: Array, v: Array, *_: Any, **options: Any) -> Any:
        tensors = [tensor(x, grad=True, device=device) for x in (q, k, v)]
        read = read_options(q, k, options)
        bias = options.get("bias")
        if bias is not None:
            read["bias"].requires_grad_(True)
        made, _ = attend(*tensors, **read)
        if made.requires_grad:  # a result of no elements may need nothing
            made.backward(tensor(do, device=device))
        leaves = [*tensors, *([] if bias is None else [read["bias"]])]
        owners = [q, k, v, *([] if bias is None else [bias])]
        return tuple(
            np.zeros_like(owner) if x.grad is None else array(x.grad, owner.dtype)
            for x, owner in zip(leaves, owners, strict=True)
        )

    return Functions(forward, backward if gradients else None)


def sdpa(
    way: str,
    device: str = "cpu",
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda attend: attend,
) -> Functions:
    """Return `scaled_dot_product_attention` by one of its back ends, with `around` around it."""
    import torch
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention

    def attend(
        q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, dropout: float = 0.0,
        seed: int = 0, **options: Any,
    ) -> Any:  # fmt: skip
        if dropout:
            torch.manual_seed(seed)
            options["dropout_p"] = dropout
        given = mask if bias is None else bias.to(q.dtype)
        if given is not None:  # back ends refuse less axes, or strides of 0
            given = given.expand(*q.shape[:-1], k.shape[2]).contiguous()
        with attention.sdpa_kernel(getattr(attention.SDPBackend, WAYS[way])):
            grouped = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(q, k, v, given, enable_gqa=grouped, **options), None

    return by_autograd(around(attend), device=device)


def _flex() -> Functions:
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def attend(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, **options: Any) -> Any:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        allowed = None if mask is None else mask.expand(shape)
        added = None if bias is None else bias.expand(shape)

        def change(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if added is not None:
                s = s + added[b, h, i, j]
            return s if allowed is None else torch.where(allowed[b, h, i, j], s, -torch.inf)

        out, aux = flex_attention(
            q, k, v, score_mod=change, enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True), **options,
        )  # fmt: skip
        return out, aux.lse

    return by_autograd(attend, gradients=False)  # on a CPU it has none


def _multihead() -> Functions:
    """nn.MultiheadAttention, whose projections are the identity."""
    import torch

    def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        heads, width = q.shape[1], q.shape[3]
        layer = torch.nn.MultiheadAttention(
            heads * width, heads, bias=False, batch_first=True, dtype=q.dtype
        )
        with torch.no_grad():
            one = torch.eye(heads * width, dtype=q.dtype)
            layer.in_proj_weight.copy_(torch.cat([one, one, one]))
            layer.out_proj.weight.copy_(one)
        flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
        hidden = None
        if mask is not None:
            shape = (q.shape[0], heads, q.shape[2], k.shape[2])
            hidden = ~mask.expand(shape).reshape(-1, *shape[2:])
        out, _ = layer(*flat, attn_mask=hidden, need_weights=True)
        return out.unflatten(2, (heads, width)).transpose(1, 2), None

    return by_autograd(attend)


def _of_transformers(which: str) -> Functions:
    import torch

    if which == "eager":
        from transformers.models.llama.modeling_llama import eager_attention_forward as function
    else:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward as function

    def attend(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, **options: Any) -> Any:
        layer = torch.nn.Module()
        layer.is_causal, layer.num_key_value_groups = False, q.shape[1] // k.shape[1]
        scaling = options.get("scale", q.shape[-1] ** -0.5)
        shape = (*q.shape[:-1], k.shape[2])
        given = None if bias is None else bias.to(q.dtype).expand(shape)
        if mask is not None:  # as its models make masks
            least = torch.finfo(q.dtype).min
            given = torch.zeros(shape, dtype=q.dtype).masked_fill(~mask, least)
        out, _ = function(layer, q, k, v, given, scaling=scaling, is_causal=False)
        return out.transpose(1, 2), None

    return by_autograd(attend)


def one_width(call: Call) -> bool:
    """Serve calls with values as wide as keys, and without a mask and a bias at once."""
    same = call.q.shape[-1] == call.v.shape[-1]
    return mask_or_bias(call) and same and no_gradient_of_more(call)


STOPS = {"exact_sum_over_queries": "Sums of gradients in 16 bits stop growing: dV at 65536."}
TORCH = "pip install torch"
GENERAL = ("masks", "bias", "scale", "gqa", "lengths", "strides", "finite")
PLAIN = GENERAL[:-1]  # scores in 16 bits overflow
SDPA = Documented(
    alignment="is_causal at the first key, whatever the lengths",
    empty_rows="unsaid",
    lse="not returned",
)

PEERS = (
    Peer(
        "torch-math", "torch", "torch", TORCH, lambda: sdpa("math"), TYPES,
        (*GENERAL, "widths", "any_dropout"),
        {"precision": all_rounded, "serves": mask_or_bias}, SDPA,
    ),
    Peer(
        "torch-flash", "torch", "torch", TORCH, lambda: sdpa("flash"), TYPES, GENERAL,
        {"precision": all_rounded, "serves": one_width}, SDPA, STOPS,
    ),
    Peer(
        "torch-flex", "torch", "torch", TORCH, _flex, ("float32", "float64"),
        (*GENERAL, "lse"), {"precision": rounded_weights},
        Documented(empty_rows="0", lse="natural logarithm, float32"),
    ),
    Peer(
        "torch-multihead", "torch", "torch", TORCH, _multihead, ("float32", "float64"),
        ("masks", "lengths"), {"precision": rounded_weights, "empty_rows": "nan"},
        Documented("(B, L, H D)"),
    ),
    Peer(
        "transformers-eager", "transformers", "transformers", "pip install torch transformers",
        lambda: _of_transformers("eager"), NARROW, PLAIN,
        {"precision": all_rounded, "serves": mask_or_bias, "empty_rows": "any"},
    ),
    Peer(
        "transformers-sdpa", "transformers", "transformers", "pip install torch transformers",
        lambda: _of_transformers("sdpa"), NARROW, PLAIN,
        {"precision": all_rounded, "serves": mask_or_bias, "empty_rows": "any"}, instead=STOPS,
    ),
)  # fmt: skip
