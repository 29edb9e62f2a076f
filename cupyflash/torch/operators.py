"""The same calls as PyTorch operators for torch.compile, which cannot trace their Python code.

An operator takes only tensors and numbers. Masks, score changes and the other options of a call are
therefore stored under a number. Each call that torch.compile meets while it compiles gets one. The
options are stored until the process ends: a number never changes its meaning, and no new object
gets the identity of a stored one, which a graph's guards compare. Only a compilation stores
anything, and what it makes itself takes far more memory. Of masks and score changes that
`graph_inputs` has in parts, only the fixed part is stored, and the others are arguments.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..errors import ArgumentError
from ..scores import Score
from . import compute, graph_inputs, recipes
from .batching import Rule, batched
from .operands import Operands, Settings
from .tensors import array_of

_kept: dict[int, Settings] = {}
_numbers: dict[Any, int] = {}
_count = itertools.count(1)


@torch.compiler.assume_constant_result  # called at compile time, while the objects are alive
def _number(
    scale: Any, precision: Any, deterministic: Any, check: Any, mask: Any, *changes: Any
) -> int:
    """Return the number of a call. It takes what `_constant` returns of a mask and of changes."""
    graph_inputs.watch()
    key = scale, precision, deterministic, check, mask, *changes
    if key not in _numbers:
        number = next(_count)
        made = [recipes.made(_object(each)) for each in (mask, *changes)]
        _refuse_learned(made[1:])
        _kept[number] = Settings(
            mask=made[0],
            score_mod=tuple(made[1:]) or None,
            scale=scale,
            precision=precision,
            deterministic=deterministic,
            check=check,
        )
        _numbers[key] = number
    return _numbers[key]


def _refuse_learned(changes: Sequence[Any]) -> None:
    """Refuse look-ups of tensors that would get no gradient."""
    scores = [each for each in changes if isinstance(each, Score)]
    for table in [table for each in scores for table in each.learned_tables]:
        if table.owner is not None and table.owner.requires_grad:
            raise ArgumentError(
                f"score_mod: got a learned look-up of a tensor of shape {tuple(table.array.shape)} "
                "inside of torch.compile, where it has no gradient; expected none. Decorate the "
                "function that calls attention with torch.compiler.disable."
            )


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    """Return whether torch.export traces the call: in 2.11, Dynamo itself always says that it does.

    Such a function is run while the call is traced, and its result is a constant of the graph.
    """
    return torch.compiler.is_exporting()


def _constant(value: Any, inputs: list[Any]) -> Any:
    """Return a value that torch.compile takes for a constant, and append its parts to `inputs`.

    That of an object is its identity. To ask for `id` makes the identity of the object a guard of
    the graph. Before 2.13, PyTorch passes objects themselves to no function with a constant result.
    """
    if value is None or isinstance(value, tuple):
        return value
    if torch.compiler.is_dynamo_compiling() and not _is_exporting():
        parts = getattr(value, "_compiled_as", None)
        if parts is not None:
            inputs.append(parts)
            return parts.text
    return id(value)


def _object(constant: Any) -> Any:
    """Return the value for which `_constant` returned a constant."""
    if type(constant) is str:
        return graph_inputs.blank(constant)
    if type(constant) is not int:
        return constant
    return ctypes.cast(constant, ctypes.py_object).value


def numbered(settings: Settings) -> tuple[list[torch.Tensor], list[int]]:
    """Return the tables and the numbers that stand for a call's mask, score changes and options."""
    changes = settings.score_mod
    if changes is None:
        changes = ()
    elif not isinstance(changes, list) and not _is_sequence(changes):
        changes = (changes,)
    inputs: list[Any] = []
    number = _number(
        settings.scale,
        settings.precision,
        settings.deterministic,
        settings.check,
        _constant(settings.mask, inputs),
        *[_constant(change, inputs) for change in changes],
    )
    tables = [table for parts in inputs for table in parts.tables]
    return tables, [number, *[value for parts in inputs for value in parts.integers]]


def attention(settings: Settings, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of a call, through which gradients flow."""
    tables, numbers = numbered(settings)
    has_seed = settings.seed is not None
    seed = settings.seed if has_seed else 0
    if seed >= 2**63:  # integers of operators are signed
        seed -= 2**64
    out, lse = _attention(*x, tables, numbers, settings.dropout, has_seed, seed)
    return out, lse


def _is_sequence(changes: Any) -> bool:
    return isinstance(changes, tuple) and not (changes and type(changes[0]) is str)


def settings_of(
    tables: Sequence[torch.Tensor],
    numbers: Sequence[int],
    dropout: float,
    has_seed: bool,
    seed: int,
    array_of: Callable[[torch.Tensor], Any] = array_of,
) -> Settings:
    """Return the options of a call, of which the first number is that under which they are stored.

    The tables and the other numbers fill the parts of its mask and score changes.
    """
    number, *integers = numbers
    if number not in _kept:
        raise ArgumentError(
            "attention: got a graph that another process made; expected one of this process, "
            "because masks and scores are Python objects. Compile it here."
        )
    settings = _kept[number]
    if tables or integers:
        rest = iter(tables), iter(integers), array_of
        mask, changes = settings.mask, settings.score_mod
        settings = settings._replace(
            mask=mask.filled(*rest) if isinstance(mask, graph_inputs.Blank) else mask,
            score_mod=changes
            and tuple(
                each.filled(*rest) if isinstance(each, graph_inputs.Blank) else each
                for each in changes
            ),
        )
    return settings._replace(dropout=dropout, seed=seed % 2**64 if has_seed else None)


@torch.library.custom_op("cupyflash::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed_tensor: torch.Tensor | None,
    offsets_q: torch.Tensor | None,
    offsets_k: torch.Tensor | None,
    tables: Sequence[torch.Tensor],
    numbers: Sequence[int],
    dropout: float,
    has_seed: bool,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = Operands(q, k, v, bias, sink, mask, seed_tensor, offsets_q, offsets_k)
    return compute.forward(settings_of(tables, numbers, dropout, has_seed, seed), x, place=True)


@_attention.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return compute.empty(Operands(*args[:9]))


@torch.library.custom_op("cupyflash::attention_backward", mutates_args=())
def _attention_backward(
    wants_bias: bool,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed_tensor: torch.Tensor | None,
    offsets_q: torch.Tensor | None,
    offsets_k: torch.Tensor | None,
    tables: Sequence[torch.Tensor],
    numbers: Sequence[int],
    dropout: float,
    has_seed: bool,
    seed: int,
) -> list[torch.Tensor]:
    x = Operands(q, k, v, bias, sink, mask, seed_tensor, offsets_q, offsets_k)
    settings = settings_of(tables, numbers, dropout, has_seed, seed)
    return compute.backward(settings, x, (out, lse), do, dlse, wants_bias, place=True)


@_attention_backward.register_fake
def _(wants_bias: bool, *args: Any) -> list[torch.Tensor]:
    return compute.empty_gradients(Operands(*args[4:13]), wants_bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.numbers = inputs[10:]
    ctx.tables = len(inputs[9])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9], *inputs[9], *output)


def _backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    operands, tables = tensors[:9], tensors[9:]
    rest = (*(None,) * 4, [None] * ctx.tables, *(None,) * 4)
    if do is None and dlse is None:
        return (*(None,) * 5, *rest)
    wanted = ctx.needs_input_grad[3]
    made = _attention_backward(wanted, do, dlse, out, lse, *operands, tables, *ctx.numbers)
    dbias = made[3] if wanted else None
    dsink = None if operands[4] is None else made[-1]
    return (*made[:3], dbias, dsink, *rest)


_attention.register_autograd(_backward, setup_context=_setup)


def _no_second(ctx: Any, *_: Any) -> NoReturn:  # noqa: ARG001 (PyTorch passes it)
    raise ArgumentError(
        "attention: got a request for a second derivative; expected only first ones "
        "(create_graph=False)."
    )


_attention_backward.register_autograd(_no_second)


def _shapes(*rest: Any) -> Settings:
    """Return the options of a call, with tensors in place of arrays: they may be fake tensors."""
    tables, numbers, dropout, has_seed, seed = rest
    return settings_of(tables, numbers, dropout, has_seed, seed, lambda table: table)


@_attention.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    rule = Rule(lambda _, *tensors: _attention(*tensors, *args[9:]), 0, expands=False)
    settings = _shapes(*args[9:])
    return batched(rule, info.batch_size, in_dims[:9], settings, args[:9])


@_attention_backward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], wants_bias: bool, *args: Any) -> Any:
    rule = Rule(
        lambda _, *tensors: _attention_backward(wants_bias, *tensors, *args[13:]), 4, expands=True
    )
    settings = _shapes(*args[13:])
    made, dims = batched(rule, info.batch_size, in_dims[1:14], settings, args[:13])
    return list(made), list(dims)
