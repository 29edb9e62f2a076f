"""What a tree computes, apart from the arrays that it reads: a value to compare and to look up.

Nodes compare by identity, because ``==`` makes a condition; a `Structure` compares by value.
"""

from __future__ import annotations

from typing import Any

from .nodes import Expr, walk


class Structure:
    """The operations and numbers of a tree. Equal structures compute alike on equal arrays.

    Attributes
    ----------
    nodes : tuple
        Of each node its operation, type, operands by their places, and value.
    """

    __slots__ = ("_hash", "nodes")

    def __init__(self, nodes: tuple[Any, ...]) -> None:
        self.nodes = nodes
        self._hash = hash(nodes)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self.nodes == other.nodes)


def structure(root: Expr) -> tuple[Structure, tuple[Any, ...]]:
    """Return the structure of a tree, and the arrays it reads, each once, in a fixed order."""
    places: dict[Expr, int] = {}
    arrays: dict[int, tuple[int, Any]] = {}  # by id: place and array
    nodes: list[Any] = []
    for node in walk(root):
        places[node] = len(nodes)
        args = tuple(places[arg] for arg in node.args)
        nodes.append((node.op, node.type, args, _value(node, arrays)))
    return Structure(tuple(nodes)), tuple(array for _, array in arrays.values())


def _value(node: Expr, arrays: dict[int, tuple[int, Any]]) -> Any:
    """Return a node's value as something that compares as it computes."""
    if node.op == "lookup":
        array, proven = node.value
        return _place(array, arrays), proven
    if node.op == "aligned":
        alignment = node.value
        axes = tuple((axis.size, axis.exact) for axis in alignment.axes)
        own = alignment.argument, alignment.lead, alignment.packed
        return _place(alignment.array, arrays), axes, own
    # -0.0 equals 0.0 and NaN does not equal itself, so numbers are compared by their digits.
    return node.value.hex() if isinstance(node.value, float) else node.value


def _place(array: Any, arrays: dict[int, tuple[int, Any]]) -> int:
    return arrays.setdefault(id(array), (len(arrays), array))[0]
