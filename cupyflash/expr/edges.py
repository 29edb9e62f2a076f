"""Whether a mask has edges between large regions of pairs, within which all tiles are alike."""

from __future__ import annotations

from .nodes import LOOKUPS, Expr, walk


def has_edges(mask: Expr) -> bool:
    """Return whether a bound condition, judged by its form, changes rarely from key to key.

    Comparisons of positions, and of array elements at a position, change rarely. Remainders, and
    conditions that an array has for each key, may change at every key, so that possibly no tile is
    FULL.
    """
    of_key: set[Expr] = set()  # nodes that vary with j
    for node in walk(mask):
        indices = [arg for arg in node.args if arg in of_key]
        if not indices and not (node.op == "symbol" and node.value == "j"):
            continue
        of_key.add(node)
        if node.op == "remainder":
            return False
        each = any(index.op not in ("floor_divide", "right_shift") for index in indices)
        if node.op in LOOKUPS and node.type == "bool" and each:
            return False
    return True
