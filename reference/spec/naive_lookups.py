"""The gradients of learned look-ups, by the plain formula.

The changed score t of a pair reads elements of arrays, and dT is the gradient of the loss by it::

    dtheta_n = sum of dT dt/dtheta_n over the pairs that read element n

A score change whose ``learned(s, s_error, b, h, i, j, sizes, unit)`` lists ``(look-up, number of
the element that a pair reads, dt/dtheta, its error)`` has such gradients; ``look-up.array`` is the
array. In a chain of changes, dt/dtheta is multiplied by the slopes of those that follow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .naive import forward_dense, sequences
from .naive_formulas import Array, Backward, Forward, backward_block, score_chain

__all__ = ["attention_lookup_gradients", "attention_varlen_lookup_gradients"]


def attention_lookup_gradients(
    do: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, dtype: Any = np.float64, **options: Any
) -> dict[Any, Array]:
    """Differentiate `naive.attention` by the learned look-ups of its score changes.

    Parameters
    ----------
    do, q, k, v, dlse : array_like
        As in `naive.attention_backward`.
    dtype : type
        Computing type.
    **options
        `mask`, `score_mod`, `bias`, `sink`, `scale`, `dropout`, `seed` as in `naive.attention`.

    Returns
    -------
    dict
        A gradient in `dtype` for each learned look-up, with the shape of its array.
    """
    _, f = forward_dense(q, k, v, dtype=dtype, **options)
    do = np.asarray(do).astype(dtype).reshape(f.out.shape)
    dlse = None if dlse is None else np.asarray(dlse).astype(dtype).reshape(f.lse.shape)
    totals: dict[Any, Array] = {}
    _add(f, backward_block(f, do, dlse), options.get("score_mod"), totals)
    return totals


def attention_varlen_lookup_gradients(
    do: Any, q: Any, k: Any, v: Any, offsets_q: Any, offsets_k: Any, *, dlse: Any = None,
    dtype: Any = np.float64, **options: Any,
) -> dict[Any, Array]:  # fmt: skip
    """Differentiate `naive.attention_varlen` likewise; sequences add to the same gradients."""
    do = np.asarray(do).astype(dtype)
    totals: dict[Any, Array] = {}
    for rows, _, f in sequences(q, k, v, offsets_q, offsets_k, options=options, dtype=dtype):
        row_dlse = None if dlse is None else np.asarray(dlse).astype(dtype)[None, :, rows]
        g = backward_block(f, do[None, :, rows], row_dlse)
        _add(f, g, options.get("score_mod"), totals)
    return totals


@np.errstate(all="ignore")
def _add(f: Forward, g: Backward, score_mod: Any, totals: dict[Any, Array]) -> None:
    """Add what the pairs of a block contribute."""
    changes, scores = score_chain(score_mod), f.scores
    before = []  # the scores that each change gets
    slopes = []
    for change in changes:
        before.append(scores)
        scores, slope = change.evaluate(scores, *f.positions, f.sizes)
        slopes.append(slope)
    of_change = np.where(f.allowed, g.dlogits, 0)
    for change, s, slope in zip(changes[::-1], before[::-1], slopes[::-1], strict=True):
        unit = float(np.finfo(s.dtype).eps) / 2
        for table, place, derivative, _ in change.learned(s, 0.0, *f.positions, f.sizes, unit):
            total = totals.setdefault(table, np.zeros(table.array.shape, s.dtype))
            counts = f.allowed & (of_change != 0)
            np.add.at(total.reshape(-1), place[counts], (of_change * derivative)[counts])
        of_change = np.where(of_change != 0, of_change * slope, 0)
