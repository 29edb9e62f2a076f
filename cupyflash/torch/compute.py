"""Computes calls on tensors with the kernels for arrays, without recording derivatives."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from .. import dispatch, execute
from ..expr.bind import Alignment, Axis, aligned
from ..expr.functions import POSITIONS, SCORE, where
from ..problem.call import Gradients
from ..problem.options import Options
from ..scores import Score, chain
from . import tensors
from .tensors import array_of, tensor_of

_, _H, _I, _J = POSITIONS


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
    check : bool
        Whether offsets on a GPU are read back and checked.
    """

    mask: Any = None
    score_mod: Any = None
    scale: float | None = None
    dropout: float = 0.0
    seed: Any = None
    precision: Any = None
    deterministic: bool = False
    check: bool = True


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


def _request(settings: Settings, x: Operands, bias_is_score: bool = False) -> execute.Request:
    bias, score_mod = array_of(x.bias), settings.score_mod
    if bias_is_score:
        change = _added(bias)
        before = chain(score_mod)
        bias, score_mod = None, change if before is None else before.then(change)
    options = Options.of(
        mask=settings.mask if x.mask is None else array_of(x.mask),
        score_mod=score_mod,
        bias=bias,
        sink=array_of(x.sink),
        scale=settings.scale,
        dropout=settings.dropout,
        seed=settings.seed if x.seed is None else _seed(x),
        precision=settings.precision,
    )
    offsets = None
    if x.offsets_q is not None:
        offsets = array_of(x.offsets_q), array_of(x.offsets_k)
    qkv = array_of(x.q), array_of(x.k), array_of(x.v)
    return execute.Request(*qkv, options, offsets, settings.check)


def _seed(x: Operands) -> Any:
    """Return a seed on a GPU as an array that the kernel reads, and any other as a number."""
    assert x.seed is not None
    if x.seed.is_cuda and x.q.is_cuda:
        return array_of(x.seed.view(torch.uint64))
    return int(x.seed) % 2**64


def _added(bias: Any) -> Score:
    """Return the score change that adds a bias without a gradient."""
    axes = (Axis(_H, "heads"), Axis(_I, "len_q"), Axis(_J, "len_k"))
    number = aligned(Alignment(bias, "bias", axes))
    hidden = float("-inf")
    return Score(where(number == hidden, hidden, SCORE + number))


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
    request = _request(settings, x)
    if not place and not x.q.is_cuda:
        out, lse = execute.forward(request, True, None, None)
        return tensor_of(out), tensor_of(lse)
    try:
        out, lse = empty(x)
    except (IndexError, RuntimeError):
        _ = request.call  # its error says what does not fit
        raise
    with tensors.stream_of(x.q.device):
        execute.forward(request, True, array_of(out), array_of(lse))
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
    request = _request(settings, x, bias_is_score=x.bias is not None and not wants_bias)
    rows = [torch.zeros_like(out) if do is None else do, out, lse, dlse]
    do_array, out_array, lse_array, dlse_array = map(array_of, rows)
    arrays = do_array, out_array, lse_array, dlse_array
    if not place and not x.q.is_cuda:
        made = execute.backward(request, *arrays, settings.deterministic, None, None)
        return [tensor_of(each) for each in made if each is not None]
    gradients = empty_gradients(x, wants_bias)
    dq, dk, dv, *others = map(array_of, gradients)
    dbias = others[0] if wants_bias else None
    targets = Gradients(dq, dk, dv, dbias, None if x.sink is None else others[-1])
    with tensors.stream_of(x.q.device):
        scratch = _workspace(request, settings, x)
        execute.backward(request, *arrays, settings.deterministic, targets, array_of(scratch))
    return gradients


def empty_gradients(x: Operands, wants_bias: bool) -> list[torch.Tensor]:
    """Return uninitialised tensors for the results of `backward`."""
    owners = [x.q, x.k, x.v, x.bias if wants_bias else None, x.sink]
    return [torch.empty_like(each) for each in owners if each is not None]


def _workspace(request: execute.Request, settings: Settings, x: Operands) -> torch.Tensor | None:
    """Return scratch memory from PyTorch's allocator for a backward on a GPU."""
    if not x.q.is_cuda:
        return None
    key = _key(settings, x)
    size = _sizes.get(key)
    if size is None:
        call = request.call
        size = dispatch.backend_of(call.q).workspace_size(call)
        _sizes[key] = size
        while len(_sizes) > _MOST:
            _sizes.popitem(last=False)
    return x.q.new_empty(size, dtype=torch.uint8)


_MOST = 512  # calls whose scratch size is remembered
_sizes: OrderedDict[Any, int] = OrderedDict()


def _key(settings: Settings, x: Operands) -> Any:
    """Return everything on which the size of the scratch memory depends."""
    parts: list[Any] = [settings.precision, settings.dropout > 0]
    for each in (x.q, x.k, x.v, x.sink, x.offsets_q):
        parts += (each is None,) if each is None else _form(each)
    return tuple(parts)


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    return x.dtype, x.device, x.shape, x.stride()
