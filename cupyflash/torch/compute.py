"""Computes calls on tensors with the kernels for arrays, without recording derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import dispatch, execute
from ..expr.nodes import LookupTable
from ..problem import lookups
from ..problem.arguments import DENSE, Dense, Packed
from ..problem.call import Gradients
from ..problem.options import Options
from ..problem.tangents import SecondTangents, Tangents
from ..request import Request
from . import recognised, recognised_cpu, tensors
from .operands import Operands, Settings
from .tensors import array_of, tensor_of


def _request(settings: Settings, x: Operands) -> Request:
    options = Options.of(
        mask=settings.mask if x.mask is None else array_of(x.mask),
        score_mod=settings.score_mod,
        bias=array_of(x.bias),
        sink=array_of(x.sink),
        scale=settings.scale,
        dropout=settings.dropout,
        seed=settings.seed if x.seed is None else _seed(x.seed, x.q),
        precision=settings.precision,
    )
    rows: Dense | Packed = DENSE
    if x.offsets_q is not None:
        offsets_q = offsets_k = array_of(x.offsets_q)
        if x.offsets_k is not x.offsets_q:
            offsets_k = array_of(x.offsets_k)
        rows = Packed(offsets_q, offsets_k, settings.check, settings.longest)
    return Request(array_of(x.q), array_of(x.k), array_of(x.v), rows, options=options)


def _seed(seed: torch.Tensor, q: torch.Tensor) -> Any:
    """Return a seed on a GPU as an array that the kernel reads, and any other as a number."""
    if seed.is_cuda and q.is_cuda:
        return array_of(seed.view(torch.uint64))
    return int(seed) % 2**64


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


def empty(x: Operands, rows_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised out and lse from PyTorch's allocator.

    Out has the memory order of the queries, or rows before heads.
    """
    shape, of_lse = shapes(x)
    out = _empty_rows(x.q, shape) if rows_first else tensors.empty_in_order_of(x.q, shape)
    return out, x.q.new_empty(of_lse, dtype=tensors.lse_dtype(x.q))


def _empty_rows(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an uninitialised tensor of this shape, whose rows come before heads in memory."""
    *lead, heads, rows, columns = shape
    return x.new_empty((*lead, rows, heads, columns)).transpose(-3, -2)


def forward(
    settings: Settings, x: Operands, place: bool = False, wants_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and, if it is wanted, lse.

    With `place`, tensors on the CPU have the strides of `empty`, too.
    """
    on_gpu = x.q.is_cuda
    if on_gpu:
        seen = recognised.signature(recognised.FORWARD[wants_lse], settings, x)
        made = None if seen is None else seen.launch(x.q)
        if made is not None:
            out = made[0].transpose(-3, -2) if settings.rows_first else made[0]
            return out, made[1] if wants_lse else None
    request = _request(settings, x)
    if not place and not on_gpu:
        with tensors.stream_of(x.q.device):
            results = execute.forward(request, wants_lse, None, None)
        host = results if wants_lse else (results,)
        made = [tensor_of(each) for each in host]
        of_tensors = recognised_cpu.signature(recognised.FORWARD[wants_lse], settings, x)
        if of_tensors is not None:
            named = dict(zip(("out", "lse"), made, strict=False))
            of_tensors.keep_forward(request.seen, named, x.q.dtype)
        return made[0], made[1] if wants_lse else None
    try:
        out, lse = empty(x, on_gpu and settings.rows_first)
    except (IndexError, RuntimeError):
        _ = request.call  # its error says what does not fit
        raise
    if not wants_lse:
        lse = None
    targets = array_of(out), array_of(lse)
    with tensors.stream_of(x.q.device):
        execute.forward(request, wants_lse, *targets)
        if on_gpu:
            of_arrays = execute.forward_signature(request, wants_lse, *targets)
            written = {"out": out} if lse is None else {"out": out, "lse": lse}
            recognised.keep(seen, of_arrays, written, x.q.dtype, settings.rows_first)
            if seen is not None and seen.form is not None:
                how = x.q.dtype, settings.rows_first
                recognised.keep_growing(seen, request.call, written, *how)
    return out, lse


def tangents(
    settings: Settings, x: Operands, along: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tangents of out and lse, given those of q, k, v, the bias and the sink."""
    request = _request(settings, x)
    moved = Tangents(*(array_of(each) for each in along))
    if not x.q.is_cuda:
        with tensors.stream_of(x.q.device):
            made = execute.forward_tangent(request, moved, True, (None,) * 4)
        return tensor_of(made[1]), tensor_of(made[3])
    (out, lse), (tout, tlse) = empty(x), empty(x)
    with tensors.stream_of(x.q.device):
        targets = tuple(array_of(each) for each in (out, tout, lse, tlse))
        execute.forward_tangent(request, moved, True, targets)
    return tout, tlse


def backward(
    settings: Settings,
    x: Operands,
    results: tuple[torch.Tensor, torch.Tensor],
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    wants_bias: bool,
    place: bool = False,
    forward: Any = None,
) -> list[torch.Tensor]:
    """Return dq, dk, dv, dbias if `wants_bias`, and dsink if there is a sink.

    `forward` is the signature of the forward if that has gradients.
    """
    if lookups.learns(settings.score_mod):  # of operators: see `learned`
        lookups.refuse(_request(settings, x).call, "inside of torch.compile")
    out, lse = results
    if do is None:
        do = torch.zeros_like(out)
    on_gpu = x.q.is_cuda
    if on_gpu:
        kind = recognised.GRADIENTS[bool(settings.deterministic)][wants_bias]
        read = {"d_out": do, "out": out, "lse": lse, "dlse": dlse}
        seen = recognised.signature(kind, settings, x, read)
        made = None if seen is None else seen.launch(x.q)
        if made is not None:
            if forward is not None and seen is not None and dlse is None:
                forward.keep_gradients((bool(settings.deterministic), False), do, seen)
            return made
    request = _request(settings, x)
    arrays = array_of(do), array_of(out), array_of(lse), array_of(dlse)
    if not place and not on_gpu:
        how = settings.deterministic, None, None, wants_bias
        with tensors.stream_of(x.q.device):
            host = execute.backward(request, *arrays, *how)
        made = [tensor_of(each) for each in host if each is not None]
        if forward is not None and dlse is None:
            of_arrays = execute.backward_signature(request, *arrays, *how)
            forward.keep_gradients((bool(settings.deterministic), wants_bias), do, of_arrays, made)
        return made
    gradients = empty_gradients(x, wants_bias, on_gpu and settings.rows_first)
    named = _named(x, gradients, wants_bias)
    targets = _as_arrays(named)
    rest = *arrays, settings.deterministic, targets
    with tensors.stream_of(x.q.device):
        if not on_gpu:
            execute.backward(request, *rest, None, wants_bias)
            return gradients
        call = request.call
        size = dispatch.backend_of(call.q).workspace_size(call)
        scratch = array_of(x.q.new_empty(size, dtype=torch.uint8))
        execute.backward(request, *rest, scratch, wants_bias)
    of_arrays = execute.backward_signature(request, *rest, scratch, wants_bias)
    recognised.keep(seen, of_arrays, named, x.q.dtype)
    return gradients


def backward_learned(
    settings: Settings,
    tables: Sequence[LookupTable],
    x: Operands,
    results: tuple[torch.Tensor, torch.Tensor],
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    wants_bias: bool,
) -> list[torch.Tensor]:
    """Return what `backward` does, and the gradients of the tensors of learned look-ups."""
    request = _request(settings, x)
    if any(table.owner is None for table in tables):
        remedy = "Make each of a tensor: cupyflash.lookup(tensor, learned=True)."
        lookups.refuse(request.call, "for arrays in calls on tensors", remedy)
    out, lse = results
    do = torch.zeros_like(out) if do is None else do
    gradients = empty_gradients(x, wants_bias)
    of_tables = [torch.empty_like(table.owner) for table in tables]
    targets = _as_arrays(_named(x, gradients, wants_bias))
    targets.dlookups = dict(zip(tables, map(array_of, of_tables), strict=True))
    arrays = array_of(do), array_of(out), array_of(lse), array_of(dlse)
    rest = *arrays, settings.deterministic, targets
    with tensors.stream_of(x.q.device):
        scratch = None
        if x.q.is_cuda:
            size = dispatch.backend_of(request.call.q).workspace_size(request.call)
            scratch = array_of(x.q.new_empty(size, dtype=torch.uint8))
        execute.backward(request, *rest, scratch, wants_bias)
    return [*gradients, *of_tables]


def second(
    settings: Settings,
    x: Operands,
    rows: dict[str, torch.Tensor | None],
    along: Sequence[torch.Tensor | None],
    wants_bias: bool,
    tdo: torch.Tensor | None = None,
    tdlse: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the tangents of what `backward` returns, and those of out and lse.

    `rows` are do, out, lse and dlse; `along` are the tangents of q, k, v, the bias and the sink.
    """
    request = _request(settings, x)
    if rows["do"] is None:
        rows = rows | {"do": torch.zeros_like(rows["out"])}
    read = {name: array_of(each) for name, each in rows.items()}
    arrays = Tangents(*(array_of(each) for each in along))
    moved = SecondTangents(arrays, array_of(tdo), array_of(tdlse))
    with tensors.stream_of(x.q.device):
        if x.q.is_cuda:
            return _second_on_gpu(settings, request, x, read, moved, wants_bias)
        how = settings.deterministic, wants_bias
        made = execute.backward_tangent(request, read, moved, None, *how)
    every = *made.gradients, made.tout, made.tlse
    return [tensor_of(each) for each in every if each is not None]


def _second_on_gpu(
    settings: Settings,
    request: Request,
    x: Operands,
    read: dict[str, Any],
    moved: SecondTangents,
    wants_bias: bool,
) -> list[torch.Tensor]:
    """Do the same in memory of PyTorch's allocator."""
    gradients, results = empty_gradients(x, wants_bias), empty(x)
    size = dispatch.backend_of(request.q).workspace_size(request.call, second=True)
    scratch = array_of(x.q.new_empty(size, dtype=torch.uint8))
    targets = _as_arrays(_named(x, gradients, wants_bias))
    arrays = array_of(results[0]), array_of(results[1])
    how = settings.deterministic, wants_bias, scratch, arrays
    execute.backward_tangent(request, read, moved, targets, *how)
    return [*gradients, *results]


_QKV = "dq", "dk", "dv"


def _named(x: Operands, made: list[torch.Tensor], wants_bias: bool) -> dict[str, torch.Tensor]:
    """Return what `empty_gradients` made, by name."""
    names = [*_QKV, *(["dbias"] if wants_bias else []), *([] if x.sink is None else ["dsink"])]
    return dict(zip(names, made, strict=True))


def _as_arrays(named: dict[str, torch.Tensor]) -> Gradients:
    return Gradients(*(array_of(named.get(name)) for name in Gradients._fields))


def empty_gradients(x: Operands, wants_bias: bool, rows_first: bool = False) -> list[torch.Tensor]:
    """Return uninitialised tensors for the results of `backward`.

    Those of q, k and v have the memory order of these, or rows before heads.
    """
    if rows_first:
        made = [_empty_rows(each, tuple(each.shape)) for each in x[:3]]
    else:
        made = [torch.empty_like(each) for each in x[:3]]
    others = x.bias if wants_bias else None, x.sink
    return made + [torch.empty_like(each) for each in others if each is not None]
