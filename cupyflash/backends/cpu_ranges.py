"""The first and last key of every query, for masks that let each query see one range of keys.

Causal masks, windows, lengths, prefixes and many combinations of them are such masks. For these the
CPU kernels compare keys with two numbers, and interpret nothing.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from ..expr.evaluate import evaluate
from ..expr.key_range import KeyRange
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
