"""The specification of reductions: weights written out, and summed or compared over pairs.

With the letters of `naive_formulas`, and x_ij for a reduction's expression of P_ij, t_ij and the
position, over pairs that are allowed::

    along keys       y_i  = sum_j x_ij           also the maximum, its place, the n largest
    along queries    y_j  = sum_i x_ij
    along distance   y_n  = sum x_ij over pairs with i - j = n - (Lk - 1)
    along blocks     y_ab = sum x_ij over pairs with floor(i / bq) = a and floor(j / bk) = b

The sum of no pair is 0, and the maximum -inf. The entropy of a row is the sum of ``-P log P``, in
which a sink is one more key::

    H_i = sum_j P_ij (LSE_i - t_ij) + p_i (LSE_i - sink)

For a loss whose derivatives by results are c, gathered to pairs as c_ij, and a sum of values x(P)
with the derivative x'(P), and for the entropy of LSE - t - 1 in place of it::

    R_i  = sum_j c_ij x'_ij P_ij + c_i p_i (LSE_i - sink - 1)      the latter of an entropy
    dT_ij = P_ij (c_ij x'_ij - R_i)                      gradient of the logits, hence of the bias
    dsink = sum_i p_i (c_i (LSE_i - sink - 1) - R_i)     likewise

and dS, dQ and dK follow from dT as in `naive_formulas`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .naive import Lead, sum_to_shape
from .naive_formulas import Array, Forward, select_matmul

__all__ = ["ReducedGradients", "gathered", "reduced", "reduced_gradients"]


class ReducedGradients(NamedTuple):
    """Gradients of reductions, each of its input's shape, and dT.

    Parameters
    ----------
    dq, dk : ndarray
        Shaped like q and k.
    dbias, dsink : ndarray or None
        Shaped like the bias and the sink; None if there was none.
    dlogits, dscores : ndarray, shape (B, Hq, Lq, Lk)
        dT and dS.
    """

    dq: Array
    dk: Array
    dbias: Array | None
    dsink: Array | None
    dlogits: Array
    dscores: Array


def _values(f: Forward, reduction: Any) -> Array:
    """Return x where a pair is allowed and its query takes part."""
    logits = f.scores if reduction.raw else f.logits
    lse = np.broadcast_to(f.lse[..., None], logits.shape)
    x: Array = reduction.evaluate(f.probs, logits, lse, *f.positions, f.sizes)
    return x


def taking_part(f: Forward, reduction: Any) -> Array:
    """Return which pairs a reduction is taken over."""
    first, last = reduction.rows_seen(f.allowed.shape[2])
    i = f.positions[2]
    seen: Array = f.allowed & (i >= first) & (i < last)
    return seen


@np.errstate(all="ignore")
def reduced(f: Forward, reduction: Any) -> tuple[Array, Array | None]:
    """Return what a reduction takes, (B, Hq, ...), and the positions of the n largest."""
    return taken(_values(f, reduction), taking_part(f, reduction), f, reduction)


def taken(x: Array, seen: Array, f: Forward, reduction: Any) -> tuple[Array, Array | None]:
    """Return what is taken of values of pairs."""
    if reduction.along == "keys" and reduction.by in ("argmax", "top"):
        count = min(reduction.count, x.shape[-1])
        # Those that are left out come last, after values of -inf.
        order = np.lexsort((-np.where(seen, x, 0), ~seen), axis=-1)[..., :count]
        indices = np.where(np.take_along_axis(seen, order, -1), order, -1)
        found = np.take_along_axis(np.where(seen, x, -np.inf), order, -1)
        missing = [(0, 0)] * 3 + [(0, reduction.count - count)]
        found = np.pad(found, missing, constant_values=-np.inf)
        indices = np.pad(indices, missing, constant_values=-1)
        return found, indices
    start = 0 if reduction.by == "sum" else -np.inf
    x = np.where(seen, x, start)
    take: Any = np.sum if reduction.by == "sum" else np.max
    if reduction.along == "keys":
        made = take(x, axis=-1, initial=start)
        if reduction.name == "entropy" and f.sink is not None and f.sink_probs is not None:
            made = made + np.where(f.sink_probs > 0, f.sink_probs * (f.lse - f.sink), 0)
        return (made.max(axis=-1, initial=-np.inf) if reduction.per_head else made), None
    if reduction.along == "queries":
        return take(x, axis=-2, initial=start), None
    len_q, len_k = x.shape[2:]
    if reduction.along == "distance":
        every = [
            take(np.diagonal(x, -n, 2, 3), axis=-1, initial=start) for n in range(1 - len_k, len_q)
        ]
        size = max(len_q + len_k - 1, 0)
        return (np.stack(every, axis=-1) if every else np.zeros((*x.shape[:2], size))), None
    rows, columns = reduction.block
    counts = -(-len_q // rows), -(-len_k // columns)
    whole = np.full((*x.shape[:2], counts[0] * rows, counts[1] * columns), start, x.dtype)
    whole[..., :len_q, :len_k] = x
    split = whole.reshape(*x.shape[:2], counts[0], rows, counts[1], columns)
    return take(split, axis=(3, 5), initial=start), None


def gathered(c: Array, f: Forward, reduction: Any) -> Array:
    """Return the derivative by the result to which each pair belongs, 0 where it takes no part."""
    i, j = f.positions[2:]
    if reduction.along == "keys":
        of_pairs = c[..., None]
    elif reduction.along == "queries":
        of_pairs = c[..., None, :]
    elif reduction.along == "distance":
        of_pairs = c[:, :, (i - j + f.allowed.shape[3] - 1)[0, 0]]
    else:
        rows, columns = reduction.block
        of_pairs = c[:, :, (i // rows)[0, 0], (j // columns)[0, 0]]
    return np.where(taking_part(f, reduction), of_pairs, 0)


@np.errstate(all="ignore")
def reduced_gradients(
    f: Forward,
    lead: Lead,
    terms: list[tuple[Any, Array]],
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None],
) -> ReducedGradients:
    """Differentiate sums by the plain formulas.

    Parameters
    ----------
    f, lead : Forward, Lead
        What `forward_dense` returned.
    terms : list of tuple
        Reductions, and the derivatives by what they took, (B, Hq, ...).
    shapes : tuple
        Shapes of q, of k, and of the bias or None.

    Returns
    -------
    ReducedGradients
    """
    lse = np.broadcast_to(f.lse[..., None], f.logits.shape)
    factor = np.zeros(f.probs.shape, f.probs.dtype)
    of_sink = np.zeros(f.lse.shape, f.lse.dtype)
    for reduction, given in terms:
        c = np.asarray(given, f.probs.dtype)
        slope = reduction.evaluate_slope(f.probs, f.logits, lse, *f.positions, f.sizes)
        factor = factor + np.where(f.allowed, gathered(c, f, reduction) * slope, 0)
        if reduction.name == "entropy" and f.sink is not None:
            of_sink = of_sink + c * np.where(np.isneginf(f.sink), 0, f.lse - f.sink - 1)
    total = (f.probs * factor).sum(axis=-1)
    if f.sink_probs is not None:
        total = total + f.sink_probs * of_sink
    dlogits = np.where(f.allowed, f.probs * (factor - total[..., None]), 0)
    dscores = np.where(f.allowed, dlogits * f.slope, 0)
    dq = f.scale * select_matmul(dscores, f.allowed, f.k)
    allowed_t = f.allowed.swapaxes(-1, -2)
    dk = f.scale * select_matmul(dscores.swapaxes(-1, -2), allowed_t, f.q)
    dsink = None
    if f.sink_probs is not None:
        dsink = (f.sink_probs * (of_sink - total)).sum(axis=(0, 2))
    return ReducedGradients(
        sum_to_shape(dq, lead, shapes[0]),
        sum_to_shape(dk, lead, shapes[1]),
        None if shapes[2] is None else sum_to_shape(dlogits, lead, shapes[2]),
        dsink,
        dlogits,
        dscores,
    )
