"""Whether a mask has edges: larger regions of pairs, so that tiles between edges are all alike."""

from __future__ import annotations

from .nodes import Expr, walk


def has_edges(mask: Expr) -> bool:
    """Return whether a bound condition changes rarely from key to key, as its form has it.

    Comparisons of positions and of what arrays say of a position do. Remainders, and conditions
    that an array has for each key, may change at every key: no tile of theirs may be FULL.
    """
    of_key: set[Expr] = set()  # nodes that vary with j
    for node in walk(mask):
        indices = [arg for arg in node.args if arg in of_key]
        if not indices and not (node.op == "symbol" and node.value == "j"):
            continue
        of_key.add(node)
        if node.op == "remainder":
            return False
        each = any(index.op != "floor_divide" for index in indices)
        if node.op == "lookup" and node.type == "bool" and each:
            return False
    return True
