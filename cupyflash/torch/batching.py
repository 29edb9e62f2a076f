"""Calls whose tensors have one more axis, that of torch.func.vmap.

It becomes a leading axis of one call where that means the same. Else the calls are made one by one:
where something depends on the flat batch index, as dropout does, or is an operand without leading
axes, as a sink is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..expr.nodes import walk
from ..masks import Mask
from ..scores import Score
from .compute import Operands, Settings


class Rule(NamedTuple):
    """A function of settings and tensors that is to be batched.

    Attributes
    ----------
    run : callable
        Called with settings and tensors; returns tensors.
    leading : int
        How many tensors, with the axes of out or lse, come before the operands of the call.
    expands : bool
        Whether results belong to operands, so that each of them needs the axis.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    leading: int
    expands: bool


def batched(
    rule: Rule, size: int, dims: Sequence[Any], settings: Settings, tensors: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return the results with the axis first, and where it is, as `vmap` of PyTorch wants it."""
    dims = [None if x is None else dim for dim, x in zip(dims, tensors, strict=True)]
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


def _one_by_one(
    rule: Rule, size: int, dims: Sequence[Any], settings: Settings, tensors: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    pairs = list(zip(tensors, dims, strict=True))
    if not size:  # what one call would give says the shapes
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
    own = [
        None if x is None else x.ndim - (dim is not None)
        for x, dim in zip(tensors, dims, strict=True)
    ]
    operands = Operands(*tensors[rule.leading :])
    ranks = Operands(*own[rule.leading :])
    are_matrices = ranks.q == ranks.k == ranks.v == 2
    axes = max(3, ranks.q or 0, ranks.k or 0, ranks.v or 0)  # of a call, with heads
    moved = []
    for n, (x, dim, rank) in enumerate(zip(tensors, dims, own, strict=True)):
        name = Operands._fields[n - rule.leading] if n >= rule.leading else ""
        if x is None or name in ("sink", "seed"):
            moved.append(x)
            continue
        if dim is not None:
            x = x.movedim(dim, 0)  # noqa: PLW2901
        elif rule.expands:
            x = x.expand(size, *x.shape)  # noqa: PLW2901
        else:
            moved.append(x)
            continue
        wanted = axes - 1 if n in (1, 3) and rule.leading else axes  # dlse and lse have no columns
        shape = (size, *(1,) * (wanted - rank), *x.shape[1:])
        moved.append(x.reshape(shape))
    made = rule.run(settings, *moved)
    if not rule.expands:
        return tuple(x.squeeze(1) for x in made) if are_matrices else tuple(made)
    owners = [*operands[:3], *(x for x in operands[3:5] if x is not None)]
    at = [
        *dims[rule.leading :][:3],
        *(
            d
            for d, x in zip(dims[rule.leading :][3:5], operands[3:5], strict=True)
            if x is not None
        ),
    ]
    if len(made) == 3:
        owners, at = owners[:3], at[:3]
    return tuple(
        x.reshape(size, *(owner.shape if d is None else _without(owner, d)))
        for x, owner, d in zip(made, owners, at, strict=True)
    )


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
            return True  # an array of NumPy's, a mask with leading axes
    return False
