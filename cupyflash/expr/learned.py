"""The learned look-ups of a score change: what it reads of them, where, and its derivatives."""

from __future__ import annotations

import math
from typing import NamedTuple

from .derivative import derivative
from .nodes import Expr, LookupTable, as_expr, convert, walk
from .structure import Structure, structure, table_of


class Read(NamedTuple):
    """What a bound score change reads of a learned look-up.

    Attributes
    ----------
    table : LookupTable
        The look-up.
    indices : tuple of Expr
        Those of the element that is read.
    place : Expr
        The number of that element, in C order.
    slope : Expr
        The derivative of the score change by that element.
    """

    table: LookupTable
    indices: tuple[Expr, ...]
    place: Expr
    slope: Expr


def reads(root: Expr) -> list[Read]:
    """Return what a bound score change reads of learned look-ups.

    Elements that are read in several places of the tree, by equal indices, are one.
    """
    nodes = [node for node in walk(root) if table_of(node) is not None]
    groups: dict[tuple[LookupTable, Structure, tuple[int, ...]], list[Expr]] = {}
    for node in nodes:
        index, arrays = structure(_place(node))
        key = node.value[2], index, tuple(map(id, arrays))
        groups.setdefault(key, []).append(node)
    return [
        Read(
            table,
            alike[0].args,
            _place(alike[0]),
            convert(derivative(root, frozenset(alike)), "float"),
        )
        for (table, *_), alike in groups.items()
    ]


def _place(node: Expr) -> Expr:
    """Return the number of the element that a node reads."""
    shape, place = node.value[0].shape, as_expr(0)
    for axis, index in enumerate(node.args):
        step = math.prod(shape[axis + 1 :])
        term = index if step == 1 else index * step
        place = term if place.op == "constant" and place.value == 0 else place + term
    return place
