"""Gradients of learned look-ups of tensors, by autograd, in reverse mode.

Such a look-up reads the memory of its tensor, so that an optimiser's steps in place are seen. The
tensor is an input of the function of autograd, which gives it the gradient of the look-up.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from ..arrays.device_arrays import address
from ..errors import ArgumentError, ArgumentTypeError
from ..expr.nodes import LookupTable
from ..problem import lookups
from . import compute
from .operands import Operands, Settings
from .tensors import PLAIN, is_transforming

_COUNT = len(Operands._fields)
_AS_BIAS = "Pass what the look-up adds to the scores as bias=, which has one."


def tables_of(settings: Settings) -> tuple[LookupTable, ...]:
    """Return the learned look-ups of a call's score changes, each once.

    Raises
    ------
    ArgumentError
        If the tensor of one has other memory than when the look-up was made.
    ArgumentTypeError
        If a transform of torch.func is active, and one is of a tensor.
    """
    found = lookups.Learned.of(settings.score_mod)
    if found is None:
        return ()
    for table in found.tables:
        owner = table.owner
        if owner is None:
            continue
        if is_transforming():
            raise ArgumentTypeError(
                f"score_mod: got a learned look-up of a tensor of shape {tuple(owner.shape)} under "
                f"a transform of torch.func, which has no gradient there; expected none. {_AS_BIAS}"
            )
        if owner.numel() and owner.data_ptr() != address(table.array):
            raise ArgumentError(
                f"score_mod: got a learned look-up of a tensor of shape {tuple(owner.shape)} that "
                "has other memory by now, as after .to() of a module; expected the memory of which "
                "the look-up was made. Make it again: cupyflash.lookup(tensor, learned=True)."
            )
    return found.tables


def attention(
    settings: Settings, x: Operands, tables: Sequence[LookupTable], return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse of a call, through which gradients flow; lse may be None if not wanted."""
    owners = [table.owner for table in tables]
    moving = [each for each in (*x, *owners) if each is not None]
    records = torch.is_grad_enabled() and any(each.requires_grad for each in moving)
    if not (records or forward_ad._current_level >= 0):
        return compute.forward(settings, x, wants_lse=return_lse)
    if any(type(each) not in PLAIN for each in moving):
        raise ArgumentTypeError(
            "score_mod: got a learned look-up in a call on tensors that PyTorch traces; expected "
            f"none. {_AS_BIAS}"
        )
    out, lse = _Learned.apply(settings, tables, *x, *owners)
    return out, lse


class _Learned(torch.autograd.Function):
    """Computes out and lse of a call; it takes its operands, and the tensors of look-ups."""

    @staticmethod
    def forward(
        settings: Settings,
        tables: Sequence[LookupTable],  # noqa: ARG004, of the gradients
        *tensors: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = compute.forward(settings, Operands(*tensors[:_COUNT]))
        assert lse is not None
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.settings, ctx.tables, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        nothing = None, None, *(None,) * len(tensors)
        if do is None and dlse is None:
            return nothing
        x = Operands(*tensors[:_COUNT])
        wants_bias = x.bias is not None and ctx.needs_input_grad[2 + _PLACE_OF_BIAS]
        call = ctx.settings, ctx.tables, wants_bias
        made = list(_Gradients.apply(call, do, dlse, out.detach(), lse, *tensors))
        of_tables = made[len(made) - len(ctx.tables) :]
        dbias = made[3] if wants_bias else None
        dsink = None if x.sink is None else made[3 + wants_bias]
        of_operands = [*made[:3], dbias, dsink, *(None,) * (_COUNT - 5)]
        return None, None, *of_operands, *of_tables

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        raise _no_more("a derivative in forward mode")

    vmap = jvp


class _Gradients(torch.autograd.Function):
    """Computes the gradients of a call, and after them those of its look-ups."""

    @staticmethod
    def forward(
        call: tuple[Settings, Sequence[LookupTable], bool],
        do: Any,
        dlse: Any,
        out: torch.Tensor,
        lse: torch.Tensor,
        *tensors: Any,
    ) -> tuple[torch.Tensor, ...]:
        settings, tables, wants_bias = call
        x, rows = Operands(*tensors[:_COUNT]), (do, dlse)
        return tuple(compute.backward_learned(settings, tables, x, (out, lse), *rows, wants_bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(*_: Any) -> NoReturn:
        raise _no_more("a second derivative")

    jvp = vmap = backward


_PLACE_OF_BIAS = Operands._fields.index("bias")


def _no_more(what: str) -> ArgumentError:
    return ArgumentError(
        f"score_mod: got a request for {what} of a call with learned look-ups; expected only first "
        f"derivatives in reverse mode (create_graph=False). {_AS_BIAS}"
    )


for _function in (_Learned, _Gradients):
    # PyTorch asks for the signature at every call of `apply`, so it is stored here.
    vars(_function)["forward"].__func__.__signature__ = inspect.signature(_function.forward)
