"""Libraries that need an NVIDIA GPU. Arrays are copied there, and widths filled up with zeros."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cupyflash import masks

from .base import (
    Documented,
    Functions,
    Peer,
    all_rounded,
    mask_or_bias,
    no_gradient_of_more,
    positive_scale,
)
from .with_jax import dot_product_attention
from .with_torch import GENERAL, SDPA, TORCH, by_autograd, one_width, sdpa

if TYPE_CHECKING:
    from ..subject import Call

DEVICE = "cuda"
EIGHT = tuple(range(8, 257, 8))  # widths


def filled(attend: Callable[..., Any], widths: Sequence[int] = EIGHT) -> Callable[..., Any]:
    """Fill up columns of q, k and v to a width that a kernel has; the scale is as without."""

    def by_width(q: Any, k: Any, v: Any, *, scale: float | None = None, **options: Any) -> Any:
        from torch.nn.functional import pad

        columns = max(q.shape[-1], v.shape[-1])
        width = min(x for x in widths if x >= columns)
        wide = [pad(x, (0, width - x.shape[-1])) for x in (q, k, v)]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = attend(*wide, scale=scale, **options)
        return out[..., : v.shape[-1]], lse

    return by_width


def at_most(columns: int, serves: Callable[[Call], bool]) -> Callable[[Call], bool]:
    """Serve heads of at most so many columns, and of those what `serves` says."""
    return lambda call: max(call.q.shape[-1], call.v.shape[-1]) <= columns and serves(call)


def causal_or_none(call: Call) -> bool:
    """Serve scales above 0, without a mask or with the causal one, aligned at the last key."""
    mask = call.options.get("mask")
    return one_width(call) and positive_scale(call) and (mask is None or mask == masks.causal())


def _without_groups() -> bool:
    """Whether the installed `varlen_attn` has no option for shared heads."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" not in inspect.signature(varlen_attn).parameters


def _of_varlen(call: Call) -> bool:
    grouped = call.q.shape[-3] != call.k.shape[-3]
    return causal_or_none(call) and not (grouped and _without_groups())


def _varlen() -> Functions:
    import torch
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    def attend(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
        batch, heads = q.shape[:2]
        options = {"enable_gqa": True} if heads != k.shape[1] else {}
        starts = [
            torch.arange(batch + 1, dtype=torch.int32, device=q.device) * x.shape[2] for x in (q, k)
        ]
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out, lse = varlen_attn(
            *packed, *starts, q.shape[2], k.shape[2], return_aux=AuxRequest(lse=True), scale=scale,
            window_size=(-1, 0) if causal else (-1, -1), **options,
        )  # fmt: skip
        lse = lse.reshape(heads, batch, -1).transpose(0, 1)
        return out.unflatten(0, (batch, -1)).transpose(1, 2), lse

    return by_autograd(filled(attend), device=DEVICE, masks=False)


def _flash_attn() -> Functions:
    from flash_attn import flash_attn_func

    def attend(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, _ = flash_attn_func(
            *turned, softmax_scale=scale, causal=causal, return_attn_probs=True
        )
        return out.transpose(1, 2), lse

    return by_autograd(filled(attend), device=DEVICE, masks=False)


def _flash_attn_4() -> Functions:
    from flash_attn.cute.interface import flash_attn_func

    def attend(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flash_attn_func(*turned, softmax_scale=scale, causal=causal, return_lse=True)
        return out.transpose(1, 2), lse

    return by_autograd(filled(attend, (64, 96, 128)), device=DEVICE, masks=False)


def _flashinfer() -> Functions:
    import flashinfer
    import torch

    def of_head(q: Any, k: Any, v: Any, scale: float, mask: Any) -> Any:
        """Of one sequence and one head, because its masks are those of all heads."""
        rows = (x[:, None] for x in (q, k, v))
        return flashinfer.prefill.single_prefill_with_kv_cache(
            *rows, custom_mask=mask, kv_layout="NHD", sm_scale=scale, return_lse=True
        )

    def attend(q: Any, k: Any, v: Any, scale: float, mask: Any = None) -> Any:
        batch, heads, rows = q.shape[:3]
        shared = heads // k.shape[1]
        allowed = None if mask is None else mask.expand(batch, heads, rows, k.shape[2])
        made = [
            of_head(q[b, h], k[b, h // shared], v[b, h // shared], scale,
                    None if allowed is None else allowed[b, h].contiguous())
            for b in range(batch) for h in range(heads)
        ]  # fmt: skip
        out, lse = (torch.stack(x).reshape(batch, heads, rows, -1) for x in zip(*made, strict=True))
        return out, lse[..., 0] * math.log(2)  # it is base 2

    return by_autograd(filled(attend, (64, 128, 256)), gradients=False, device=DEVICE)


def _xformers() -> Functions:
    import torch
    from xformers.ops import memory_efficient_attention

    if not hasattr(torch.ops.xformers, "efficient_attention_forward_cutlass"):
        raise ImportError("its kernels do not load with this PyTorch: python -m xformers.info")

    def attend(q: Any, k: Any, v: Any, scale: float, mask: Any = None, bias: Any = None) -> Any:
        shape = (*q.shape[:3], k.shape[2])
        added = None
        if mask is not None or bias is not None:  # it wants rows of a multiple of 8
            room = torch.zeros(*shape[:3], -(-shape[3] // 8) * 8, dtype=q.dtype, device=q.device)
            added = room[..., : shape[3]]
            if bias is not None:
                added += bias.to(q.dtype)
            if mask is not None:
                added.masked_fill_(~mask, -torch.inf)
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out = memory_efficient_attention(*turned, attn_bias=added, scale=scale)
        return out.transpose(1, 2), None

    return by_autograd(filled(attend), device=DEVICE)


SIXTEEN = ("float16", "bfloat16")
CAUSAL = ("causal", "scale", "gqa", "lengths", "strides")
LAST = "causal at the last key"
NATURAL = "natural logarithm, float32"
OF_CAUSAL = {
    "precision": all_rounded, "serves": at_most(256, causal_or_none), "empty_rows": "any",
}  # fmt: skip


def _masked(call: Call) -> bool:
    return mask_or_bias(call) and no_gradient_of_more(call)


def _of_cudnn(call: Call) -> bool:
    """Serve scales above 0, since others are NaN, and more than one key."""
    return _masked(call) and positive_scale(call) and call.k.shape[-2] > 1


def _of_jax_cudnn(call: Call) -> bool:
    """Serve scales above 0, and gradients of even numbers of queries and keys."""
    odd = call.q.shape[-2] % 2 or call.k.shape[-2] % 2
    return _masked(call) and positive_scale(call) and not (call.gradients and odd)


PEERS = (
    Peer(
        "torch-cudnn", "torch", "torch", TORCH, lambda: sdpa("cudnn", DEVICE, filled),
        SIXTEEN, ("masks", "bias", "scale", "lengths"),
        {"precision": all_rounded, "serves": at_most(256, _of_cudnn), "empty_rows": "any"}, SDPA,
        gpu=True,
    ),
    Peer(
        "torch-efficient", "torch", "torch", TORCH, lambda: sdpa("efficient", DEVICE, filled),
        (*SIXTEEN, "float32"), tuple(x for x in GENERAL if x not in ("gqa", "finite")),
        {"precision": all_rounded, "serves": at_most(256, _masked), "empty_rows": "any"}, SDPA,
        {"errors_are_typical": "Its results in float32 are too small on average, some 3e-7 of "
         "them, as products of numbers that are cut to fewer bits make them."},
        gpu=True,
    ),
    Peer(
        "torch-varlen", "torch", "torch", TORCH, _varlen, SIXTEEN, (*CAUSAL, "lse"),
        OF_CAUSAL | {"serves": at_most(256, _of_varlen)},
        Documented("(T, H, D), packed", alignment=f"a window of (-1, 0), {LAST}", lse=NATURAL),
        gpu=True,
    ),
    Peer(
        "jax-cudnn", "jax", "jax", "pip install 'jax[cuda13]'",
        lambda: dot_product_attention("cudnn"), SIXTEEN,
        ("masks", "bias", "scale", "gqa", "lengths"),
        {"precision": all_rounded, "serves": at_most(128, _of_jax_cudnn), "empty_rows": "any",
         "shapes": 3},
        Documented("(B, L, H, D)", alignment="is_causal at the first key",
                   lse="natural logarithm, in the type of the query"),
        gpu=True,
    ),
    Peer(
        "flash-attn", "flash-attn", "flash_attn.flash_attn_interface",
        "pip install flash-attn --no-build-isolation", _flash_attn, SIXTEEN, (*CAUSAL, "lse"),
        OF_CAUSAL, Documented("(B, L, H, D)", alignment=LAST, empty_rows="0", lse=NATURAL),
        gpu=True,
    ),
    Peer(
        "flash-attn-4", "flash-attn-4", "flash_attn.cute", "pip install --pre flash-attn-4",
        _flash_attn_4, SIXTEEN, (*CAUSAL, "lse"),
        OF_CAUSAL | {"serves": at_most(128, causal_or_none)},
        Documented("(B, L, H, D)", alignment=LAST, lse=NATURAL), gpu=True,
    ),
    Peer(
        "flashinfer", "flashinfer-python", "flashinfer", "pip install flashinfer-python",
        _flashinfer, SIXTEEN, ("masks", "scale", "gqa", "lengths", "lse"),
        {"precision": all_rounded, "serves": at_most(256, lambda call: True), "empty_rows": "any"},
        Documented("(L, H, D) or (H, L, D), one sequence", alignment=LAST, lse="base 2, float32"),
        gpu=True,
    ),
    Peer(
        "xformers", "xformers", "xformers", "pip install xformers", _xformers,
        (*SIXTEEN, "float32"), ("masks", "bias", "scale", "lengths"),
        {"precision": all_rounded, "serves": at_most(256, _masked), "empty_rows": "any"},
        Documented("(B, L, H, D)", alignment="LowerTriangularMask at the first key, and "
                   "LowerTriangularFromBottomRightMask at the last one"),
        gpu=True,
    ),
)  # fmt: skip
