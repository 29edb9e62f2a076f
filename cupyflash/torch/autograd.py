"""Autograd functions: derivatives in reverse mode, and rules for torch.func.vmap."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn, TypeAlias

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError
from . import compute, recognised
from .batching import Rule, batched
from .operands import Operands, Settings
from .tensors import PLAIN, is_transforming

_OTHER = (
    "Compute this derivative through torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has it."
)


# The options of a call, its signature if it is like an earlier one, and whether this has gradients.
_Call: TypeAlias = tuple[Settings, recognised.Signature | None, bool]


class _Attention(torch.autograd.Function):
    """Computes out and lse of a call."""

    @staticmethod
    def forward(call: _Call, *operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
        settings, seen, _ = call
        made = None if seen is None else seen.launch(operands[0])
        out, lse = made or compute.forward(settings, Operands(*operands))
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        (ctx.settings, seen, has_gradients), *operands = inputs
        ctx.seen = seen if has_gradients else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *output)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        settings, seen = ctx.settings, ctx.seen
        saved = ctx.saved_tensors
        records = torch.is_grad_enabled() or is_transforming()  # of gradients, for derivatives
        *operands, out, lse = saved
        nothing = (None,) * (1 + len(operands))
        if seen is not None and dlse is None and not records:
            made = seen.gradients(settings.deterministic, operands, out, lse, do)
            if made is not None:
                return None, *made, *nothing[4:]
        if do is None and dlse is None:
            return nothing
        x = Operands(*operands)
        wanted = x.bias is not None and ctx.needs_input_grad[4]
        if records:
            made = _run(_Gradients, settings, wanted, do, dlse, out, lse, *operands)
        else:
            made = compute.backward(settings, x, (out, lse), do, dlse, wanted, forward=seen)
        gradients = [None, *made[:3], made[3] if wanted else None]
        gradients.append(None if x.sink is None else made[-1])
        return (*gradients, *nothing[len(gradients) :])[: len(nothing)]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *operands: Any) -> Any:
        return batched(_FORWARD, info.batch_size, in_dims[1:], call[0], operands)

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        raise ArgumentError(
            "attention: got a request for a derivative in forward mode; expected reverse mode. "
            f"{_OTHER}"
        )


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
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(*_: Any) -> NoReturn:
        raise ArgumentError(
            "attention: got a request for a second derivative; expected only first ones "
            f"(create_graph=False). {_OTHER}"
        )

    jvp = backward

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], settings: Settings, wants_bias: bool, *tensors: Any
    ) -> Any:
        rule = Rule(
            lambda settings, *tensors: _run(_Gradients, settings, wants_bias, *tensors),
            leading=4,
            expands=True,
        )
        return batched(rule, info.batch_size, in_dims[2:], settings, tensors)


for _function in (_Attention, _Gradients):
    # PyTorch asks for the signature at every call of `apply`, so it is stored here.
    vars(_function)["forward"].__func__.__signature__ = inspect.signature(_function.forward)

_FORWARD = Rule(
    lambda settings, *tensors: _run(_Attention, (settings, None, False), *tensors), 0, expands=False
)

# PyTorch's own `apply` asks first whether a transform is active. Without one it then calls the
# method of its base class; calling that directly saves 20 us.
_APPLY = {
    function: super(torch.autograd.Function, function).apply
    for function in (_Attention, _Gradients)
}


def _run(function: Any, *args: Any) -> Any:
    return function.apply(*args) if is_transforming() else _APPLY[function](*args)


def attention(
    settings: Settings, operands: Operands, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse of a call, through which gradients flow; lse may be None if not wanted."""
    if not (_may_have_derivatives(operands) or is_transforming()):
        return compute.forward(settings, operands, wants_lse=return_lse)
    out, lse = _run(_Attention, (settings, None, False), *operands)
    return out, lse


def again(
    settings: Settings, operands: Operands, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return what `attention` does for a call like an earlier one; None if there was none.

    Nothing has to be checked before.
    """
    q = operands.q
    if not (type(q) in PLAIN and q.is_cuda) or is_transforming():
        return None
    if forward_ad._current_level >= 0:
        return None
    if torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is not q.dtype:
        return None  # it has to be converted
    try:
        records = torch.is_grad_enabled() and _require_gradients(operands)
    except AttributeError:
        return None  # of what is no tensor
    seen = recognised.signature(recognised.FORWARD[records or return_lse], settings, operands)
    if seen is None or seen.known is None:
        return None
    if records:
        q, k, v, bias, sink, mask, seed, offsets, _ = operands
        few = bias is sink is seed is offsets is None
        given = (q, k, v) if few and mask is None else operands
        out, lse = _APPLY[_Attention]((settings, seen, few), *given)
        return out, lse
    made = seen.launch(q)
    return None if made is None else (made[0], made[1] if return_lse else None)


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
