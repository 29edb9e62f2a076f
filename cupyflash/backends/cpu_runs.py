"""Masks that compare numbers of queries and keys, such as those of documents, as ranges of keys.

Where each number of keys comes in one run, as documents that lie one after the other have it, the
keys of a query's number are a range. Its ends are looked up by the query, so that the kernels
compare keys with two numbers (see `cpu_ranges`) and ask nothing about pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..expr.key_range import is_range
from ..expr.nodes import Expr, lookup_node, rebuild, symbol, walk
from ..problem.call import Array

_NEVER = 1, 0  # ends of a range without keys


def with_ranges(mask: Expr) -> Expr:
    """Return a bound condition that says the same, in which such comparisons are ranges of keys."""
    return _replaced(mask, _range)


def may_be_range(mask: Expr) -> bool:
    """Return whether a condition, judged by its form, is a range of keys, or may be one so."""
    return is_range(_replaced(mask, _some_range))


def _replaced(mask: Expr, range_of_pair: Callable[[Expr, Expr], Expr | None]) -> Expr:
    """Replace comparisons of what varies with queries and with keys, given both in this order."""
    of_key: set[Expr] = set()
    compared = False
    for node in walk(mask):
        if (node.op == "symbol" and node.value == "j") or any(arg in of_key for arg in node.args):
            of_key.add(node)
            compared |= node.op == "equal"
    if not compared:
        return mask

    def range_of(node: Expr) -> Expr | None:
        if node.op != "equal" or node not in of_key:
            return None
        left, right = node.args
        if right not in of_key:
            left, right = right, left
        return None if left in of_key else range_of_pair(left, right)

    return rebuild(mask, range_of)


def _some_range(query: Expr, key: Expr) -> Expr | None:
    """Return any range of keys with two ends if a comparison may be one."""
    i, j = symbol("i"), symbol("j")
    return (i <= j) & (j <= i) if _is_of_numbers(query) and _is_of_numbers(key) else None


def _range(query: Expr, key: Expr) -> Expr | None:
    """Return where a key's number is a query's as a range of keys, or None if it is not one."""
    if not (_is_of_numbers(query) and _is_of_numbers(key)):
        return None
    numbers, (*lead, position) = key.value[0], key.args
    wanted = query.value[0]
    if numbers.ndim == 1:
        ends = _ends(wanted.reshape(1, -1), numbers[None])
    elif numbers.ndim == wanted.ndim == 2 and len(numbers) == len(wanted):
        ends = _ends(wanted, numbers) if query.args[0] is lead[0] else None
    else:
        return None
    if ends is None:
        return None
    low, high = (lookup_node(x.reshape(wanted.shape), query.args, proven=True) for x in ends)
    return (low <= position) & (position <= high)


def _is_of_numbers(node: Expr) -> bool:
    """Return whether a node is a look-up of integers at indices that are in range for sure."""
    is_proven = node.op == "aligned" or (node.op == "lookup" and node.value[1])
    return is_proven and node.type == "int"


def _ends(wanted: Array, numbers: Array) -> tuple[Array, Array] | None:
    """Return the first and the last place of each wanted number in its row of numbers.

    None if a number of a row comes in several runs.
    """
    low, high = np.empty((2, *wanted.shape), np.int64)
    for row, row_of in enumerate(numbers):
        if not row_of.size:
            return None
        starts = np.flatnonzero(np.append(True, row_of[1:] != row_of[:-1]))
        ends = np.append(starts[1:], row_of.size) - 1
        order = np.argsort(row_of[starts], kind="stable")
        known = row_of[starts][order].astype(np.int64)
        if (known[1:] == known[:-1]).any():
            return None
        own = wanted[row].astype(np.int64)
        place = np.minimum(np.searchsorted(known, own), known.size - 1)
        is_known = known[place] == own
        low[row] = np.where(is_known, starts[order][place], _NEVER[0])
        high[row] = np.where(is_known, ends[order][place], _NEVER[1])
    return low, high
