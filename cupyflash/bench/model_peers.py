"""PyTorch's side of the suite `models`: its kernels on the same arrays."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .contenders import Array
from .measure import Gpu, Meter, Work
from .model_rows import Cached, Model, Packed
from .tasks import torch_of
from .torch_peers import PEERS, Sdpa, Tensor, on_its_stream, on_stream, to_torch, told_why

Attend = Callable[..., Tensor]
# Of PyTorch and the arrays as tensors, attention as a function, and what it is a function of.
Ready = Callable[..., tuple[Attend, list[Tensor]]]
Works = dict[str, Callable[[], Work]]
SDPA = {peer.name: peer for peer in PEERS if isinstance(peer, Sdpa)}
FLEX, VARLEN = "torch-flex", "torch-varlen"


def work_of(
    meter: Meter,
    arrays: list[Array],
    do: Array | None,
    ready: Ready,
    turned: Callable[[Tensor], Tensor] = lambda x: x,
) -> Work:
    """Return a forward, or gradients where there is one of the output; results are `turned`."""
    torch = torch_of()
    tensors = [to_torch(torch, x) for x in arrays]
    if isinstance(meter, Gpu):
        torch.cuda.set_device(tensors[0].device)
    grad = None if do is None else turned(to_torch(torch, do))
    with on_stream(torch, meter, tensors[0]), told_why():
        attend, made = ready(torch, *tensors)
        leaves = [x.detach().requires_grad_(grad is not None) for x in made]
        with torch.set_grad_enabled(grad is not None):
            o = attend(*leaves)  # a kernel refuses at its first call

    def run() -> Any:
        if grad is not None:
            found = torch.autograd.grad(o, leaves, grad, retain_graph=True)
            return tuple(turned(x) for x in found)
        with torch.set_grad_enabled(False):
            return turned(attend(*leaves))

    return on_its_stream(torch, meter, tensors[0], run)


def of_dense(
    meter: Meter,
    model: Model,
    arrays: list[Array],
    do: Array | None,
    lengths: np.ndarray[Any, Any] | None,
) -> Works:
    """Return the peers' work on whole arrays: kernels of SDPA, or Flex for what they cannot do."""
    if model.special:
        return {FLEX: lambda: work_of(meter, arrays, do, functools.partial(flex, model))}
    return {
        name: functools.partial(
            work_of, meter, arrays, do, functools.partial(sdpa, peer, model, lengths)
        )
        for name, peer in SDPA.items()
    }


def sdpa(
    peer: Sdpa,
    model: Model,
    lengths: np.ndarray[Any, Any] | None,
    torch: Any,
    *tensors: Tensor,
) -> tuple[Attend, list[Tensor]]:
    """Attention by a kernel of SDPA; a bias is the fourth tensor, and its mask."""
    options: dict[str, Any] = {"is_causal": True} if model.causal else {}
    if model.heads != model.key_heads:
        options["enable_gqa"] = True
    if model.dropout:
        options["dropout_p"] = model.dropout
    if lengths is not None:
        seen = np.arange(model.keys) < lengths[:, None, None, None]
        options["attn_mask"] = torch.from_numpy(seen).to(tensors[0].device)
    return functools.partial(peer.attention(torch), **options), list(tensors)


def flex(model: Model, torch: Any, *tensors: Tensor) -> tuple[Attend, list[Tensor]]:
    """Attention by FlexAttention, compiled; its block mask is made before."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    special, device = model.special, tensors[0].device
    assert special is not None, "others are for SDPA"
    options: dict[str, Any] = {"enable_gqa": True} if model.heads != model.key_heads else {}
    seen, score = special.mask, special.score
    if seen is not None:
        options["block_mask"] = module.create_block_mask(
            lambda b, h, i, j: seen(i, j), None, None, model.len_q, model.keys, device=device
        )
    if score is not None:
        options["score_mod"] = lambda s, b, h, i, j: score(torch, model, s, h, i, j)
    attend = torch.compile(module.flex_attention, dynamic=False)
    return functools.partial(attend, **options), list(tensors)


def varlen(
    torch: Any, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Any, Any], causal: bool
) -> tuple[Attend, list[Tensor]]:
    """FlashAttention over packed (T, H, D), whose key heads are repeated before it is timed."""
    module = importlib.import_module("torch.nn.attention.varlen")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).contiguous() for x in (k, v))
    ends = [torch.from_numpy(x).to(q.device) for x in offsets]
    longest = [int(np.diff(x).max()) for x in offsets]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            return module.varlen_attn(
                q, k, v, *ends, *longest, window_size=(-1, 0 if causal else -1)
            )
        except TypeError:  # releases before said it so
            return module.varlen_attn(q, k, v, *ends, *longest, is_causal=causal)

    return attend, [q.contiguous(), k, v]


def of_packed(meter: Meter, model: Packed, arrays: list[Array], do: Array | None) -> Works:
    """Return the work of FlashAttention on packed sequences, which holds tokens first."""
    ends = model.offsets

    def ready(torch: Any, *tensors: Tensor) -> tuple[Attend, list[Tensor]]:
        q, k, v = (x.transpose(0, 1) for x in tensors)
        return varlen(torch, q, k, v, (ends, ends), model.causal)

    return {VARLEN: lambda: work_of(meter, arrays, do, ready, lambda x: x.transpose(0, 1))}


def of_cached(meter: Meter, model: Cached, arrays: list[Array]) -> Works:
    """Return the peers' work of queries over keys in one piece, the last of which is their own."""

    def by_sdpa(peer: Sdpa, torch: Any, *tensors: Tensor) -> tuple[Attend, list[Tensor]]:
        options: dict[str, Any] = {"enable_gqa": True} if model.heads != model.key_heads else {}
        if model.len_q > 1:
            module = importlib.import_module("torch.nn.attention.bias")
            options["attn_mask"] = module.causal_lower_right(model.len_q, model.keys)
        return functools.partial(peer.attention(torch), **options), list(tensors)

    def by_varlen(torch: Any, *tensors: Tensor) -> tuple[Attend, list[Tensor]]:
        q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], model.d) for x in tensors)
        ends = tuple(
            np.arange(model.batch + 1, dtype=np.int32) * n for n in (model.len_q, model.keys)
        )
        return varlen(torch, q, k, v, (ends[0], ends[1]), causal=model.len_q > 1)

    def unpacked(x: Tensor) -> Tensor:
        return x.reshape(model.batch, model.len_q, model.heads, model.d).transpose(1, 2)

    return {
        VARLEN: lambda: work_of(meter, arrays, None, by_varlen, unpacked),
        **{
            name: functools.partial(work_of, meter, arrays, None, functools.partial(by_sdpa, peer))
            for name, peer in SDPA.items()
        },
    }
