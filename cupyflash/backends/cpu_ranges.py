"""The first and last key of every query, for masks that let each query see one range of keys.

Causal masks, windows, lengths, prefixes and many combinations of them are such masks. For these the
CPU kernels compare keys with two numbers, and interpret nothing.
"""

from __future__ import annotations

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
    batch = problem.batch
    b, i = problem.rows.queries(batch)
    h = np.arange(problem.heads)[:, None]
    of_rows = {
        name: value if np.ndim(value) == 0 else np.broadcast_to(value, (batch,))[b]
        for name, value in (
            ("len_q", problem.len_q),
            ("len_k", problem.len_k if len_k is None else len_k),
            ("start_q", problem.start_q),
            ("start_k", problem.start_k),
        )
    }
    symbols = position_symbols(b, h, i, 0, SimpleNamespace(**of_rows))
    low, high = (
        np.asarray(unbounded if end is None else evaluate(end, symbols), np.int64)
        for end, unbounded in zip(found, (_FIRST, _LAST), strict=True)
    )
    shape = np.broadcast_shapes(low.shape, high.shape, (1,) * (i.ndim == 1) + i.shape)
    values = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    first, last = problem.rows.by_row(values, batch)
    return first, last
