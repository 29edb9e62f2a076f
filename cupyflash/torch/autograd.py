"""Autograd functions: derivatives in both modes, and rules for torch.func.vmap."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError
from . import compute, recognised, recognised_cpu
from .batching import Rule, batched, one_by_one
from .operands import MOVING, Operands, Settings, by_heads
from .tensors import PLAIN, is_transforming

_OTHER = (
    "Compute this derivative through torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has it."
)


class _Attention(torch.autograd.Function):
    """Computes out and lse of a call."""

    @staticmethod
    def forward(settings: Settings, *operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = compute.forward(settings, Operands(*operands))
        assert lse is not None
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.settings, *operands = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *output)
        if forward_ad._current_level >= 0 or is_transforming():
            ctx.save_for_forward(*operands, *output)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        return None, *_gradients(ctx, ctx.settings, ctx.saved_tensors, do, dlse)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], settings: Settings, *operands: Any) -> Any:
        return batched(_FORWARD, info.batch_size, in_dims[1:], settings, operands)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        *operands, _, _ = ctx.saved_tensors
        return _run(_Tangents, ctx.settings, *tangents[:MOVING], *operands)


class _Tangents(torch.autograd.Function):
    """Computes the tangents of out and lse; those of operands come before these."""

    @staticmethod
    def forward(settings: Settings, *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return compute.tangents(settings, Operands(*tensors[MOVING:]), tensors[:MOVING])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.settings, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Return gradients: by tangents those of a backward, by operands its derivatives."""
        tensors = ctx.saved_tensors
        along, operands = tensors[:MOVING], tensors[MOVING:]
        if all(each is None for each in cotangents):
            return None, *(None,) * len(tensors)
        x, wants_bias = Operands(*operands), operands[3] is not None
        out, lse = _run(_Attention, ctx.settings, *operands)
        rows = *cotangents, out, lse
        first = _run(_Gradients, ctx.settings, wants_bias, *rows, *operands)
        given = None, None, *rows, *along
        *made, _, _ = _run(_Second, ctx.settings, wants_bias, *given, *operands)
        first, made = (_by_operand(x, wants_bias, each) for each in (first, made))
        of_tangents = [g if t is not None else None for g, t in zip(first, along, strict=True)]
        return None, *of_tangents, *made, *_NONE[MOVING:]

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        raise _no_more("two derivatives in forward mode", "one, over or under reverse mode")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], settings: Settings, *tensors: Any) -> Any:
        return one_by_one(_FORWARD_TANGENTS, info.batch_size, in_dims[1:], settings, tensors)


class _Replayed(torch.autograd.Function):
    """Computes out, and lse if it is wanted, of a call like an earlier one.

    It is for calls without a transform, whose gradients mostly need no check either. An lse that
    nobody wants is kept for the gradients, but is no result: results cost PyTorch time.
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Settings, Any, bool], *operands: Any) -> Any:
        settings, seen, wants_lse = call
        made = seen.known.launch(seen.addresses, operands[0])
        out, lse = made or _computed(settings, seen.known, Operands(*operands))
        pending = None
        if made:
            wants_bias = len(operands) > _BIAS and ctx.needs_input_grad[1 + _BIAS]
            pending = seen.pending((bool(settings.deterministic), wants_bias), out)
        if wants_lse:
            ctx.call = settings, seen, pending, None
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*operands, out, lse)
            return out, lse
        ctx.call = settings, seen, pending, lse
        ctx.save_for_backward(*operands, out)
        return out

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> tuple[Any, ...]:
        settings, seen, pending, lse = ctx.call
        saved = ctx.saved_tensors
        if lse is None:
            *saved, lse = saved
            if pending is not None and lse.data_ptr() != pending.rest[0]:
                pending = None
        if pending is not None and dlse is None and not (records() or is_transforming()):
            made = pending.gradients.compute(pending, saved, do)
            if made is not None:
                return None, *made, *_NONE[: len(saved) - 1 - len(made)]
        *operands, out = saved
        by_rows = settings.by_rows
        if by_rows:
            settings, x = by_heads(settings, Operands(*operands))
            operands = x[: len(operands)]
        if by_rows or seen.known.has_rows_first:
            out, do = out.transpose(-3, -2), None if do is None else do.transpose(-3, -2)
        made = _gradients(ctx, settings, (*operands, out, lse), do, dlse, seen)
        if by_rows and made[0] is not None:
            made[:_QKV] = [each.transpose(-3, -2) for each in made[:_QKV]]
        return None, *made


def _computed(settings: Settings, known: Any, x: Operands) -> tuple[torch.Tensor, Any]:
    """Return out and lse of a call that cannot be launched as the earlier one, like its results."""
    by_rows = settings.by_rows
    if by_rows:
        settings, x = by_heads(settings, x)
    out, lse = compute.forward(settings, x)
    if by_rows:
        out = out.transpose(-3, -2).clone()  # no view; it lies in memory as before
    elif known.has_rows_first:
        out = out.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return out, lse


# PyTorch calls `apply` of a function's node, which looks for `backward` and calls it. On a thread
# that has nothing of that in its caches, it takes as long as a launch.
vars(_Replayed)["_backward_cls"].apply = _Replayed.backward

# Whether gradients are recorded, also of gradients.
records = torch.is_grad_enabled

_ONE = (1,)
_BIAS = Operands._fields.index("bias")
_QKV = 3  # the first operands
_NONE = (None,) * len(Operands._fields)


def _gradients(
    ctx: Any,
    settings: Settings,
    saved: tuple[Any, ...],
    do: Any,
    dlse: Any,
    seen: Any = None,
) -> list[Any]:
    """Return the gradients of a call's operands, which are the second argument and so on."""
    *operands, out, lse = saved
    if do is None and dlse is None:
        return [None] * len(operands)
    x = Operands(*operands)
    wanted = x.bias is not None and ctx.needs_input_grad[4]
    if records() or is_transforming():  # gradients are recorded for derivatives
        if not is_transforming():
            out = out.detach()  # otherwise, PyTorch would ask for the gradients of a zero do, too
        made = _run(_Gradients, settings, wanted, do, dlse, out, lse, *operands)
    else:
        made = compute.backward(settings, x, (out, lse), do, dlse, wanted, forward=seen)
    found = [*made[:3], made[3] if wanted else None, None if x.sink is None else made[-1], *_NONE]
    return found[: len(operands)]


class _Gradients(torch.autograd.Function):
    """Computes the gradients of a call, which `compute.backward` returns."""

    @staticmethod
    def forward(
        settings: Settings,
        wants_bias: bool,
        do: Any,
        dlse: Any,
        out: torch.Tensor,
        lse: torch.Tensor,
        *operands: Any,
    ) -> tuple[torch.Tensor, ...]:
        rows = do, dlse
        made = compute.backward(settings, Operands(*operands), (out, lse), *rows, wants_bias)
        return tuple(made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.settings, ctx.wants_bias, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0 or is_transforming():
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Return the gradients of a double backward."""
        tensors = ctx.saved_tensors
        x = Operands(*tensors[_ROWS:])
        if all(each is None for each in cotangents):
            return None, None, *(None,) * len(tensors)
        along = _by_operand(x, ctx.wants_bias, cotangents)
        given = None, None, *tensors[:_ROWS], *along
        made = _run(_Second, ctx.settings, ctx.wants_bias, *given, *x)
        *of_operands, by_do, by_dlse = made
        do, dlse = tensors[:2]
        of_rows = None if do is None else by_do, None if dlse is None else by_dlse
        found = _by_operand(x, ctx.wants_bias, of_operands)
        # What comes through out and lse is part of these.
        return None, None, *of_rows, None, None, *found, *_NONE[MOVING:]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        tensors, (tdo, tdlse, _, _, *along) = ctx.saved_tensors, tangents[2:]
        given = tdo, tdlse, *tensors[:_ROWS], *along[:MOVING]
        *made, _, _ = _run(_Second, ctx.settings, ctx.wants_bias, *given, *tensors[_ROWS:])
        return tuple(made)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], settings: Settings, wants_bias: bool, *tensors: Any
    ) -> Any:
        rule = Rule(
            lambda settings, *tensors: _run(_Gradients, settings, wants_bias, *tensors),
            leading=_ROWS,
            expands=True,
        )
        return batched(rule, info.batch_size, in_dims[2:], settings, tensors)


class _Second(torch.autograd.Function):
    """Computes the tangents of gradients, and those of out and lse.

    It takes those of do and dlse, then do, dlse, out and lse, the tangents of q, k, v, the bias and
    the sink, and the operands.
    """

    @staticmethod
    def forward(settings: Settings, wants_bias: bool, *tensors: Any) -> tuple[torch.Tensor, ...]:
        tdo, tdlse, do, dlse, out, lse, *rest = tensors
        rows = {"do": do, "dlse": dlse, "out": out, "lse": lse}
        along, x = rest[:MOVING], Operands(*rest[MOVING:])
        return tuple(compute.second(settings, x, rows, along, wants_bias, tdo, tdlse))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(*_: Any) -> NoReturn:
        raise _no_more("a third derivative", "second ones")

    jvp = backward

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], settings: Settings, wants_bias: bool, *tensors: Any
    ) -> Any:
        rule = Rule(
            lambda settings, *tensors: _run(_Second, settings, wants_bias, *tensors),
            leading=2 + _ROWS + MOVING,
            expands=False,
        )
        return one_by_one(rule, info.batch_size, in_dims[2:], settings, tensors)


_ROWS = 4  # do, dlse, out and lse, which come before the operands of a call


def _by_operand(x: Operands, wants_bias: bool, made: Sequence[Any]) -> list[Any]:
    """Return gradients of q, k, v, the bias and the sink; None for those that there are not."""
    sink = None if x.sink is None else made[-1]
    return [*made[:3], made[3] if wants_bias else None, sink]


def _no_more(what: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"attention: got a request for {what}; expected at most {expected}. {_OTHER}"
    )


_FUNCTIONS = _Attention, _Tangents, _Gradients, _Second, _Replayed
for _function in _FUNCTIONS:
    # PyTorch asks for the signature at every call of `apply`, so it is stored here.
    vars(_function)["forward"].__func__.__signature__ = inspect.signature(_function.forward)

_FORWARD = Rule(lambda settings, *tensors: _run(_Attention, settings, *tensors), 0, expands=False)
_FORWARD_TANGENTS = Rule(
    lambda settings, *tensors: _run(_Tangents, settings, *tensors), MOVING, expands=False
)

# PyTorch's own `apply` asks first whether a transform is active. Without one it then calls the
# method of its base class; calling that directly saves 20 us.
_APPLY = {function: super(torch.autograd.Function, function).apply for function in _FUNCTIONS}


_replay = _APPLY[_Replayed]


def _run(function: Any, *args: Any) -> Any:
    return function.apply(*args) if is_transforming() else _APPLY[function](*args)


def attention(
    settings: Settings, operands: Operands, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse of a call, through which gradients flow; lse may be None if not wanted."""
    if not (_may_have_derivatives(operands) or is_transforming()):
        return compute.forward(settings, operands, wants_lse=return_lse)
    out, lse = _run(_Attention, settings, *operands)
    return out, lse


def again(
    settings: Settings, operands: Operands, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return out and lse of a call like an earlier one; None if there was none.

    Nothing has to be checked before. With `settings.rows_first`, out is (B, L, H, D), and without
    gaps in memory on a GPU. With `settings.by_rows`, the tensors are on a GPU.
    """
    q, k, v, bias, sink, mask, seed, offsets, _ = operands
    if type(q) not in PLAIN or is_transforming() or forward_ad._current_level >= 0:
        return None
    on_gpu = q.is_cuda
    if on_gpu:
        if torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is not q.dtype:
            return None  # it has to be converted
    elif not q.is_cpu or torch.is_autocast_enabled("cpu"):
        return None
    try:
        recorded = records() and (q.requires_grad or _require_gradients(operands))
    except AttributeError:
        return None  # of what is no tensor
    kind = recognised.FORWARD[recorded or return_lse]
    if not (on_gpu or recorded or return_lse) and q.shape[-2:-1] == _ONE:
        out = recognised_cpu.one_query(settings, operands)
        if out is not None:
            return out.transpose(1, 2) if settings.rows_first else out, None
    make: Any = recognised.Signature if on_gpu else recognised_cpu.Signature
    try:
        seen = make(kind, settings, operands)
    except recognised.UNLIKE:
        return None
    if seen.known is None:
        return None
    if recorded:
        few = bias is sink is seed is None
        seen.has_gradients = few if on_gpu else seed is offsets is None
        given = (q, k, v) if few and mask is offsets is None else operands
        made = _replay((settings, seen, return_lse), *given)
        out, lse = made if return_lse else (made, None)
    else:
        made = seen.known.launch(seen.addresses, q)
        if made is None:
            return None
        out, lse = made[0], made[1] if return_lse else None
    if settings.rows_first and not seen.known.has_rows_first:
        out = out.transpose(1, 2)
    return out, lse


def _may_have_derivatives(operands: Operands) -> bool:
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and _require_gradients(operands)


def _require_gradients(operands: Operands) -> bool:
    q, k, v, bias, sink, *_ = operands
    return bool(
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    )
