"""Autograd functions: derivatives in reverse mode, and rules for torch.func.vmap."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError
from . import compute
from .batching import Rule, batched
from .compute import Operands, Settings
from .tensors import is_transforming

_OTHER = (
    "Compute this derivative through torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has it."
)


class _Attention(torch.autograd.Function):
    """Computes out and lse of a call."""

    @staticmethod
    def forward(settings: Settings, *operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return compute.forward(settings, Operands(*operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.settings = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], *output)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        *operands, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4]
        if do is None and dlse is None:
            return (None,) * (1 + len(operands))
        if torch.is_grad_enabled() or is_transforming():  # they may be differentiated
            made = _run(_Gradients, ctx.settings, wanted, do, dlse, out, lse, *operands)
        else:
            x = Operands(*operands)
            made = compute.backward(ctx.settings, x, (out, lse), do, dlse, wanted)
        gradients = [None, *made[:3], made[3] if wanted else None]
        gradients.append(None if operands[4] is None else made[-1])
        return (*gradients, *(None,) * (1 + len(operands) - len(gradients)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], settings: Settings, *operands: Any) -> Any:
        return batched(_FORWARD, info.batch_size, in_dims[1:], settings, operands)

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

_FORWARD = Rule(lambda settings, *tensors: _run(_Attention, settings, *tensors), 0, expands=False)

# PyTorch's own `apply` asks first whether a transform is active. Without one it then calls the
# method of its base class; calling that directly saves 20 us.
_APPLY = {
    function: super(torch.autograd.Function, function).apply
    for function in (_Attention, _Gradients)
}


def _run(function: Any, *args: Any) -> Any:
    return function.apply(*args) if is_transforming() else _APPLY[function](*args)


def attention(settings: Settings, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of a call, through which gradients flow."""
    if not (_may_have_derivatives(operands) or is_transforming()):
        return compute.forward(settings, operands)  # saves what autograd takes, some 10 us
    out, lse = _run(_Attention, settings, *operands)
    return out, lse


def _may_have_derivatives(operands: Operands) -> bool:
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    q, k, v, bias, sink, *_ = operands
    return bool(
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    )
