"""The first and last key of every query, for masks that let each query see one range of keys.

Causal masks, windows, lengths, prefixes and many combinations of them are such masks. For these the
CPU kernels compare keys with two numbers, and interpret nothing.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..expr.evaluate import NUMPY, evaluate, node_value
from ..expr.key_range import KeyRange
from ..expr.nodes import Expr, walk
from ..masks import position_symbols
from ..problem.call import Array, Problem

_FIRST, _LAST = 0, 2**62


def ends(problem: Problem, found: KeyRange, len_k: Array | None = None) -> tuple[Array, Array]:
    """Return the ends of each query's keys.

    Parameters
    ----------
    problem : Problem
        The problem.
    found : KeyRange
        Both ends as expressions.
    len_k : numpy.ndarray, optional
        The number of keys of each batch entry, (B,), if the problem has only its range.

    Returns
    -------
    tuple of (numpy.ndarray, numpy.ndarray)
        The first and the last key, int64, (B or 1, H or 1, L), or (H or 1, total) for packed
        sequences. If a query has no keys, its last key is before its first.
    """
    if problem.packed:
        return _of_packed(problem, found, problem.len_k if len_k is None else len_k)
    b, h, i = np.ix_(*map(np.arange, (math.prod(problem.lead), problem.heads, problem.len_q)))
    symbols = position_symbols(b, h, i, 0, problem)
    if len_k is not None:
        symbols["len_k"] = len_k[:, None, None]
    return _evaluated(found, symbols, (1, 1, problem.len_q))


class GrowingEnds:
    """The ends of each query's keys in a cache, for any lengths of its entries.

    What does not depend on these is computed once, when this is made.

    Parameters
    ----------
    problem : Problem
        The problem.
    found : KeyRange
        Both ends as expressions.
    """

    def __init__(self, problem: Problem, found: KeyRange) -> None:
        self._problem, self._found = problem, found
        self._steps: list[tuple[int, Any, list[int]]] = []
        self._is_simple = not problem.packed
        if not self._is_simple:
            return
        shape = math.prod(problem.lead), problem.heads, problem.len_q
        symbols = position_symbols(*np.ix_(*map(np.arange, shape)), 0, problem)
        slots: dict[Expr, int] = {}
        self._values: list[Any] = [None]  # the lengths, and those of all nodes
        self._varies: list[bool] = [True]
        self._ends = [self._slot(end, slots, symbols) for end in found]

    def _slot(self, end: Expr | None, slots: dict[Expr, int], symbols: dict[str, Array]) -> Any:
        """Return the place of an end among the values, or its value if it is the same always."""
        if end is None:
            return None
        with np.errstate(all="ignore"):
            for node in walk(end, known=slots):
                if node.op == "symbol" and node.value == "len_k":
                    slots[node] = 0
                    continue
                args = [slots[arg] for arg in node.args]
                slots[node] = len(self._values)
                varies = any(self._varies[arg] for arg in args)
                self._varies.append(varies)
                value = None
                if varies:
                    self._is_simple &= node.op in _QUIET
                    self._steps.append((slots[node], NUMPY.get(node.op), args))
                else:
                    value = node_value(node, [self._values[x] for x in args], symbols, np.float32)
                self._values.append(value)
        return slots[end]

    def __call__(self, len_k: Array) -> tuple[Array, Array]:
        """Return both ends, as `ends` does, or of shapes that broadcast to that."""
        if not self._is_simple:
            return ends(self._problem, self._found, len_k)
        values = self._values
        values[0] = len_k[:, None, None]
        for slot, function, args in self._steps:
            values[slot] = function(*[values[arg] for arg in args])
        low, high = (
            unbounded if end is None else values[end]
            for end, unbounded in zip(self._ends, (_FIRST, _LAST), strict=True)
        )
        return low, high


# Operations on integers and conditions in which nothing can be out of range.
_QUIET = frozenset(
    "add subtract multiply minimum maximum negative less less_equal equal not_equal logical_and "
    "logical_or logical_xor logical_not where".split()
)


def _evaluated(
    found: KeyRange, symbols: dict[str, Array], shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Return both ends, of this shape or larger along axes on which they depend."""
    low, high = (
        np.asarray(unbounded if end is None else evaluate(end, symbols), np.int64)
        for end, unbounded in zip(found, (_FIRST, _LAST), strict=True)
    )
    own = np.broadcast_shapes(low.shape, high.shape, shape)
    return np.broadcast_to(low, own), np.broadcast_to(high, own)


def _of_packed(problem: Problem, found: KeyRange, len_k: Array) -> tuple[Array, Array]:
    """Return the ends by packed row; rows between the sequences have no query."""
    lengths, starts = problem.len_q, problem.start_q
    b = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    i = np.arange(b.size, dtype=np.int64) - (np.cumsum(lengths) - lengths)[b]
    h = np.arange(problem.heads)[:, None]
    start_k = np.broadcast_to(problem.start_k, lengths.shape)
    of_rows = SimpleNamespace(
        len_q=lengths[b], len_k=len_k[b], start_q=starts[b], start_k=start_k[b]
    )
    rows = starts[b] + i
    low, high = _evaluated(found, position_symbols(b, h, i, 0, of_rows), (1, b.size))
    spread = np.zeros((2, len(low), int(rows.max(initial=-1)) + 1), np.int64)
    spread[:, :, rows] = low, high
    return spread[0], spread[1]
