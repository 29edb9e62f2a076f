"""The first and last key of every query, of masks that leave each query neighbouring keys.

Causal masks, windows, lengths, prefixes and what is made of them are such masks: the CPU kernels
then compare keys with two numbers, and interpret nothing.
"""

from __future__ import annotations

import numpy as np

from ..expr.evaluate import evaluate
from ..expr.key_range import key_range
from ..expr.nodes import Expr
from ..problem.call import Array, Problem

_FIRST, _LAST = 0, 2**62


def ends(problem: Problem, allowed: Expr | None) -> tuple[Array, Array] | None:
    """Return the ends of each query's keys, or None without a mask or where it has no ranges.

    Parameters
    ----------
    problem : Problem
        Whose queries they are.
    allowed : Expr or None
        The bound mask.

    Returns
    -------
    tuple of (numpy.ndarray, numpy.ndarray) or None
        The first and the last key, int64, (B or 1, H or 1, L), or (H or 1, total) of packed
        sequences. A query without keys has a last key before its first.
    """
    found = None if allowed is None else key_range(allowed, problem)
    if found is None:
        return None
    symbols, shape = _positions(problem)
    low, high = (
        np.asarray(unbounded if end is None else evaluate(end, symbols), np.int64)
        for end, unbounded in zip(found, (_FIRST, _LAST), strict=True)
    )
    own = np.broadcast_shapes(low.shape, high.shape, (1,) * (len(shape) - 1) + shape[-1:])
    low, high = (np.broadcast_to(end, own) for end in (low, high))
    if not problem.packed:
        return low, high
    # Rows between the sequences have no query.
    rows = symbols["i"] + symbols["start_q"]
    made = []
    for end in (low, high):
        spread = np.zeros((own[0], int(rows.max(initial=-1)) + 1), np.int64)
        spread[:, rows[0]] = end
        made.append(spread)
    return made[0], made[1]


def _positions(problem: Problem) -> tuple[dict[str, Array], tuple[int, ...]]:
    """Return the symbols of an expression without j, and the shape that they span."""
    names = ("len_q", "len_k", "start_q", "start_k")
    batch = int(np.prod(problem.lead, dtype=np.int64))
    lengths = {
        name: np.broadcast_to(np.asarray(getattr(problem, name), np.int64), (batch,))
        for name in names
    }
    if problem.packed:
        b = np.repeat(np.arange(batch, dtype=np.int64), lengths["len_q"])
        first = np.cumsum(lengths["len_q"]) - lengths["len_q"]
        i = np.arange(b.size, dtype=np.int64) - first[b]
        h = np.arange(problem.heads, dtype=np.int64)[:, None]
        symbols = {"b": b[None], "h": h, "i": i[None]}
        symbols |= {name: lengths[name][b][None] for name in names}
        return symbols, (problem.heads, b.size)
    queries = int(problem.len_q)
    symbols = {
        "b": np.arange(batch, dtype=np.int64)[:, None, None],
        "h": np.arange(problem.heads, dtype=np.int64)[:, None],
        "i": np.arange(queries, dtype=np.int64),
    }
    symbols |= {name: np.asarray(getattr(problem, name), np.int64) for name in names}
    return symbols, (batch, problem.heads, queries)
