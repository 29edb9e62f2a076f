"""The rule for torch.func.vmap, under which tensors have one more axis.

The mapped axis becomes a leading axis of a single call if that gives the same results. Otherwise
the calls are made one by one. This happens if something depends on the flat batch index, as dropout
does, or if a mapped operand cannot have leading axes, as a sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..expr.nodes import walk
from ..masks import Mask
from ..scores import Score
from .operands import Operands, Settings


class Rule(NamedTuple):
    """A function of settings and tensors that vmap maps.

    Attributes
    ----------
    run : callable
        It takes settings and tensors, and returns tensors.
    leading : int
        The number of tensors before the operands of the call; they have the axes of out or lse.
    expands : bool
        Whether each result belongs to an operand, as gradients do. Then each operand needs the
        mapped axis.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    leading: int
    expands: bool


def batched(
    rule: Rule, size: int, dims: Sequence[Any], settings: Settings, tensors: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return the results, whose mapped axis is the first, and its place in each, for PyTorch."""
    dims = _of_tensors(dims, tensors)
    operands, axes = Operands(*tensors[rule.leading :]), Operands(*dims[rule.leading :])
    together = (
        size > 0
        and settings.dropout == 0
        and operands.offsets_q is None
        and (axes.sink is None if not rule.expands else operands.sink is None)
        and not _reads_the_batch(settings)
    )
    made = (_together if together else _one_by_one)(rule, size, dims, settings, tensors)
    return made, (0,) * len(made)


def _of_tensors(dims: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Return mapped axes, None where there is no tensor."""
    return [None if x is None else dim for dim, x in zip(dims, tensors, strict=True)]


def one_by_one(
    rule: Rule, size: int, dims: Sequence[Any], settings: Settings, tensors: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return what `batched` does, always by one call for each entry of the mapped axis."""
    made = _one_by_one(rule, size, _of_tensors(dims, tensors), settings, tensors)
    return made, (0,) * len(made)


def _one_by_one(
    rule: Rule, size: int, dims: Sequence[Any], settings: Settings, tensors: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    pairs = list(zip(tensors, dims, strict=True))
    if not size:  # a call with zeros tells the shapes
        zeros = [x if d is None else x.new_zeros(_without(x, d)) for x, d in pairs]
        return tuple(x.new_empty((0, *x.shape)) for x in rule.run(settings, *zeros))
    calls = [
        rule.run(settings, *(x if d is None else x.select(d, n) for x, d in pairs))
        for n in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*calls, strict=True))


def _without(x: torch.Tensor, axis: int) -> list[int]:
    return [length for n, length in enumerate(x.shape) if n != axis % x.ndim]


def _together(
    rule: Rule, size: int, dims: Sequence[Any], settings: Settings, tensors: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    pairs = list(zip(tensors, dims, strict=True))
    ranks = [0 if x is None else x.ndim - (dim is not None) for x, dim in pairs]
    qkv = slice(rule.leading, rule.leading + 3)
    q, k, v = ranks[qkv]
    axes = max(3, q, k, v)  # of the call, including heads
    # The leading axes of a call are those of q, k and v, so one of them needs the mapped axis.
    lends = None if rule.expands or any(dim is not None for dim in dims[qkv]) else rule.leading
    moved: list[Any] = []
    for n, ((x, dim), rank) in enumerate(zip(pairs, ranks, strict=True)):
        operand = n - rule.leading
        if operand == _SEED:
            moved.append(None)  # nothing is dropped
            continue
        if x is None or operand == _SINK or (dim is None and not rule.expands and n != lends):
            moved.append(x)
            continue
        first = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        wanted = axes - 1 if operand < 0 and n in _ROWS else axes
        moved.append(first.reshape(size, *(1,) * (wanted - rank), *first.shape[1:]))
    made = rule.run(settings, *moved)
    if not rule.expands:
        return tuple(x.squeeze(1) for x in made) if q == k == v == 2 else tuple(made)
    owners = [(x, dim) for x, dim in pairs[rule.leading :][: len(made)] if x is not None]
    return tuple(
        x.reshape(size, *(owner.shape if dim is None else _without(owner, dim)))
        for x, (owner, dim) in zip(made, owners, strict=True)
    )


_SINK, _SEED = (Operands._fields.index(name) for name in ("sink", "seed"))
_ROWS = 1, 3  # dlse and lse, which have no columns, among do, dlse, out, lse


def _reads_the_batch(settings: Settings) -> bool:
    changes = settings.score_mod
    made = [settings.mask, *(changes if isinstance(changes, (list, tuple)) else [changes])]
    for each in made:
        if isinstance(each, (Mask, Score)):
            for node in walk(each.expr):
                if node.op == "symbol" and node.value == "b":
                    return True
                if node.op == "aligned" and node.value.array.ndim > len(node.value.axes):
                    return True
        elif getattr(each, "ndim", 0) > 3:
            return True  # a NumPy mask with leading axes
    return False
