"""Computes calls on tensors with the kernels for arrays, without recording derivatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import dispatch, execute
from ..problem.arguments import DENSE, Dense, Packed
from ..problem.call import Gradients
from ..problem.options import Options
from ..request import Request
from . import recognised, tensors
from .tensors import array_of, tensor_of


class Settings(NamedTuple):
    """The options of a call that are not tensors, as `cupyflash.attention` takes them.

    Attributes
    ----------
    mask : Mask or None
        A mask that is a tensor is in `Operands` instead.
    score_mod : Score, sequence of Score or None
    scale : float or None
    dropout : float
    seed : int or None
        A seed that is a tensor is in `Operands` instead.
    precision : str or None
    deterministic : bool
        Whether gradients have the same bits in every run.
    check : bool or None
        How offsets on a GPU are checked, as `cupyflash.attention_varlen` takes it.
    """

    mask: Any = None
    score_mod: Any = None
    scale: float | None = None
    dropout: float = 0.0
    seed: Any = None
    precision: Any = None
    deterministic: bool = False
    check: bool | None = None


class Operands(NamedTuple):
    """The tensors of a call. Those that it does not have are None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    offsets_q: torch.Tensor | None = None
    offsets_k: torch.Tensor | None = None


def _request(settings: Settings, x: Operands) -> Request:
    options = Options.of(
        mask=settings.mask if x.mask is None else array_of(x.mask),
        score_mod=settings.score_mod,
        bias=array_of(x.bias),
        sink=array_of(x.sink),
        scale=settings.scale,
        dropout=settings.dropout,
        seed=settings.seed if x.seed is None else _seed(x),
        precision=settings.precision,
    )
    rows: Dense | Packed = DENSE
    if x.offsets_q is not None:
        offsets_q = offsets_k = array_of(x.offsets_q)
        if x.offsets_k is not x.offsets_q:
            offsets_k = array_of(x.offsets_k)
        rows = Packed(offsets_q, offsets_k, settings.check)
    return Request(array_of(x.q), array_of(x.k), array_of(x.v), rows, options=options)


def _seed(x: Operands) -> Any:
    """Return a seed on a GPU as an array that the kernel reads, and any other as a number."""
    assert x.seed is not None
    if x.seed.is_cuda and x.q.is_cuda:
        return array_of(x.seed.view(torch.uint64))
    return int(x.seed) % 2**64


def shapes(x: Operands) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of out and lse. The computation refuses operands that do not fit."""
    if x.offsets_q is not None:
        rows = tuple(x.q.shape[:-1])
    else:
        lead = torch.broadcast_shapes(*(each.shape[:-3] for each in x[:3]))
        axes = -2 if x.q.ndim == x.k.ndim == x.v.ndim == 2 else -3
        heads = x.q.shape[axes:-1] if x.q.ndim > 2 or axes == -2 else (1, x.q.shape[0])
        rows = (*lead, *heads)
    return (*rows, x.v.shape[-1]), rows


def empty(x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised out and lse from PyTorch's allocator."""
    out, lse = shapes(x)
    return tensors.empty_in_order_of(x.q, out), x.q.new_empty(lse, dtype=tensors.lse_dtype(x.q))


def forward(
    settings: Settings, x: Operands, place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse. With `place`, tensors on the CPU have the strides of `empty`, too."""
    on_gpu = x.q.is_cuda
    if on_gpu:
        seen = _signature("forward", settings, x, {})
        made = recognised.launch(seen, x.q)
        if made is not None:
            return made[0], made[1]
    request = _request(settings, x)
    if not place and not on_gpu:
        out, lse = execute.forward(request, True, None, None)
        return tensor_of(out), tensor_of(lse)
    try:
        out, lse = empty(x)
    except (IndexError, RuntimeError):
        _ = request.call  # its error says what does not fit
        raise
    results = array_of(out), array_of(lse)
    with tensors.stream_of(x.q.device):
        execute.forward(request, True, *results)
    if on_gpu:
        of_arrays = execute.forward_signature(request, True, *results)
        recognised.keep(seen, of_arrays, {"out": out, "lse": lse})
    return out, lse


def backward(
    settings: Settings,
    x: Operands,
    results: tuple[torch.Tensor, torch.Tensor],
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    wants_bias: bool,
    place: bool = False,
) -> list[torch.Tensor]:
    """Return dq, dk, dv, dbias if `wants_bias`, and dsink if there is a sink."""
    out, lse = results
    if do is None:
        do = torch.zeros_like(out)
    on_gpu = x.q.is_cuda
    if on_gpu:
        kind = "deterministic backward" if settings.deterministic else "backward"
        kind += "" if wants_bias else " without dbias"
        read = {"d_out": do, "out": out, "lse": lse, "dlse": dlse}
        seen = _signature(kind, settings, x, read)
        made = recognised.launch(seen, x.q)
        if made is not None:
            return made
    request = _request(settings, x)
    arrays = array_of(do), array_of(out), array_of(lse), array_of(dlse)
    if not place and not on_gpu:
        host = execute.backward(request, *arrays, settings.deterministic, None, None, wants_bias)
        return [tensor_of(each) for each in host if each is not None]
    gradients = empty_gradients(x, wants_bias)
    names = [*_QKV, *(["dbias"] if wants_bias else []), *([] if x.sink is None else ["dsink"])]
    named = dict(zip(names, gradients, strict=True))
    targets = Gradients(*(array_of(named.get(name)) for name in Gradients._fields))
    rest = *arrays, settings.deterministic, targets
    with tensors.stream_of(x.q.device):
        if not on_gpu:
            execute.backward(request, *rest, None, wants_bias)
            return gradients
        call = request.call
        size = dispatch.backend_of(call.q).workspace_size(call)
        scratch = array_of(x.q.new_empty(size, dtype=torch.uint8))
        execute.backward(request, *rest, scratch, wants_bias)
    recognised.keep(seen, execute.backward_signature(request, *rest, scratch, wants_bias), named)
    return gradients


_QKV = "dq", "dk", "dv"


def _signature(
    kind: str, settings: Settings, x: Operands, read: dict[str, Any]
) -> recognised.Signature | None:
    """Return the signature of a call on a GPU that reads more tensors than its operands."""
    named = {"q": x.q, "k": x.k, "v": x.v, **read}
    if x.offsets_q is not None:
        if settings.check is not None and settings.check is not False:
            return None  # what its offsets hold is read every time
        kind += " packed" if settings.check is None else " packed, trusted"
        named["offsets_q"] = x.offsets_q
        if x.offsets_k is x.offsets_q:
            kind += " alike"
        else:
            named["offsets_k"] = x.offsets_k
    seed = settings.seed
    if x.seed is not None:
        seed = x.seed if x.seed.is_cuda else _seed(x)
    options = Options.of(
        mask=settings.mask if x.mask is None else x.mask,
        score_mod=settings.score_mod,
        bias=x.bias,
        sink=x.sink,
        scale=settings.scale,
        dropout=settings.dropout,
        seed=seed,
        precision=settings.precision,
    )
    return recognised.signature(kind, named, options)


def empty_gradients(x: Operands, wants_bias: bool) -> list[torch.Tensor]:
    """Return uninitialised tensors for the results of `backward`."""
    owners = [x.q, x.k, x.v, x.bias if wants_bias else None, x.sink]
    return [torch.empty_like(each) for each in owners if each is not None]
