"""Whether a mask has edges between large regions of pairs, within which all tiles are alike."""

from __future__ import annotations

import math

from .nodes import LOOKUPS, Expr, walk

_READS = *LOOKUPS, "aligned"  # the last one before it is bound
_DIVIDES = "floor_divide", "right_shift"


def has_edges(mask: Expr) -> bool:
    """Return whether a condition, judged by its form, changes rarely from key to key.

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
        each = any(index.op not in _DIVIDES for index in indices)
        if node.op in _READS and node.type == "bool" and each:
            return False
    return True


def block_size(mask: Expr) -> int:
    """Return the largest size of which all blocks are multiples that a condition divides by.

    It is 0 if a condition divides nothing.
    """
    found = 0
    for node in walk(mask):
        if node.op in _DIVIDES and node.args[1].op == "constant":
            size = int(node.args[1].value)
            found = math.gcd(found, 1 << size if node.op == "right_shift" else size)
    return found
