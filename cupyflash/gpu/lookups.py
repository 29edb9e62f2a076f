"""Gradients of learned look-ups that kernels compute as they do that of a bias.

Such a look-up is read by positions themselves: the entry, the head, the query, the key. Its
gradient is then an array that broadcasts to the pairs, like that of a bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays.unallocated import unallocated
from ..errors import ArgumentError
from ..expr.learned import Read, reads
from ..expr.nodes import Expr, LookupTable, walk
from ..problem.bound_exprs import bound
from ..problem.call import Array, Call, Problem
from ..problem.lookups import REMEDY, of_call


class Served(NamedTuple):
    """What a kernel computes.

    Attributes
    ----------
    gradient : array
        A view of it that broadcasts to (..., Hq, Lq, Lk), and has all of these axes.
    slope : Expr or None
        The derivative of the changed score by what a pair reads; None: 1.
    """

    gradient: Array
    slope: Expr | None


def check(call: Call) -> None:
    """Refuse look-ups whose gradients no kernel computes."""
    _places(call)


def served(call: Call, gradients: Mapping[LookupTable, Array]) -> list[Served]:
    """Return what kernels compute of a call that was checked, in the order of the gradients."""
    if not gradients:
        return []
    found = {}
    for read, axes in _places(call):
        is_one = read.slope.op == "constant" and read.slope.value == 1
        view = _view(gradients[read.table], axes, call.problem)
        found[read.table] = Served(view, None if is_one else read.slope)
    return [found[table] for table in gradients]


def shapes(call: Call) -> list[tuple[int, ...]]:
    """Return the shapes of gradients of a call as they broadcast to the pairs."""
    gradients = {x: unallocated(x.array.shape, x.array.dtype) for x in of_call(call)}
    return [each.gradient.shape for each in served(call, gradients)]


def _places(call: Call) -> list[tuple[Read, tuple[Any, ...]]]:
    """Return what score changes read, each with the axes of the pairs by which it is read."""
    assert call.score_mod is not None
    found: list[tuple[Read, tuple[Any, ...]]] = []
    for read in reads(bound(call.score_mod.expr, call.problem)):
        axes = _axes(read, call.problem)
        if axes is None:
            raise ArgumentError(
                f"score_mod: got a learned look-up of shape {tuple(read.table.array.shape)} that "
                f"is read as a table of {_kind(read)}, whose gradient no kernel of a GPU computes; "
                "expected indices b, h, i or j themselves, each along an axis of its length. "
                + REMEDY
            )
        if any(other.table is read.table for other, _ in found):
            raise ArgumentError(
                f"score_mod: got a learned look-up of shape {tuple(read.table.array.shape)} that "
                "is read by two different indices, whose gradient no kernel of a GPU computes; "
                f"expected one. {REMEDY}"
            )
        found.append((read, axes))
    return found


def _kind(read: Read) -> str:
    """Return in words what elements of a look-up belong to."""
    names = {node.value for node in walk(*read.indices) if node.op == "symbol"}
    if "score" in names:
        return "scores"
    if {"i", "j"} <= names:
        return "pairs of positions or of their distances"
    return "numbers that are made of positions"


def _axes(read: Read, problem: Problem) -> tuple[Any, ...] | None:
    """Return for each axis "h", "i", "j", "b" for all entries, a leading axis' number, or None.

    The latter stands for an axis of length 1. Returns None if an index is anything else.
    """
    sizes = {
        "b": problem.batch,
        "h": problem.heads,
        "i": int(np.max(problem.len_q, initial=0)),
        "j": int(np.max(problem.len_k, initial=0)),
    }
    found: list[Any] = []
    for index, size in zip(read.indices, read.table.array.shape, strict=True):
        if index.op == "constant" and size == 1:
            found.append(None)
        elif index.op == "symbol" and sizes.get(index.value) == size:
            found.append(index.value)
        else:
            axis = _leading(index, size, problem.lead)
            if axis is None:
                return None
            found.append(axis)
    named = [x for x in found if x is not None]
    mixed = "b" in named and any(isinstance(x, int) for x in named)
    return None if len(set(named)) < len(named) or mixed else tuple(found)


def _leading(index: Expr, size: int, lead: tuple[int, ...]) -> int | None:
    """Return the leading axis that an index is, ``b // stride % size``."""
    if index.op != "remainder" or index.args[0].op != "floor_divide":
        return None
    (entry, stride), length = index.args[0].args, index.args[1]
    if entry.op != "symbol" or entry.value != "b":
        return None
    for axis, own in enumerate(lead):
        if (own, math.prod(lead[axis + 1 :])) == (size, stride.value) and length.value == size:
            return axis
    return None


def _view(gradient: Array, axes: tuple[Any, ...], problem: Problem) -> Array:
    """Return a view of a gradient with leading axes, heads, queries and keys."""
    lead = problem.lead
    if "b" in axes:  # one axis becomes all leading ones
        place = axes.index("b")
        shape = gradient.shape
        gradient = gradient.reshape((*shape[:place], *lead, *shape[place + 1 :]))
        axes = (*axes[:place], *range(len(lead)), *axes[place + 1 :])
    every = (*range(len(lead)), "h", "i", "j")
    # With an ellipsis, an array without axes stays a view.
    gradient = gradient[(*(0 if x is None else slice(None) for x in axes), ...)]
    named = [x for x in axes if x is not None]
    gradient = gradient.transpose([named.index(x) for x in every if x in named])
    view: Array = gradient[tuple(slice(None) if x in named else None for x in every)]
    return view
