"""Bounds of the gradients of learned look-ups.

A gradient is a sum over pairs of ``dT w``, as that of a bias is one of dT, of which `rounding` has
the errors. With numbers as in `second_bound`, the weight w, the derivative of the changed score by
what a pair reads, errs as the score change says, and the product once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyflash.expr.nodes import LookupTable
from cupyflash.reference.spec import naive, naive_formulas

from .bound import BLOCK_KV, Bounded, bounded_sum, rounding_of, tiles_of
from .magnitudes import Floats, Terms, magnitude
from .precision import Precision
from .rounding import backward_errors, forward_errors
from .second_bound import Arithmetic, Number, raw_score_errors

__all__ = ["LookupBound", "lookup_bound"]


class LookupBound(NamedTuple):
    """Bounds of the gradients of learned look-ups.

    Parameters
    ----------
    dlookups : dict of LookupTable to Bounded
        For each look-up that the score changes read, its gradient as stored.
    ill_conditioned : int
        Number of rows about which nothing is claimed.
    """

    dlookups: dict[LookupTable, Bounded]
    ill_conditioned: int


def lookup_bound(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    offsets: tuple[Any, Any] | None = None,
    dlse: Any = None,
    precision: Precision,
    block_kv: int = BLOCK_KV,
    **options: Any,
) -> LookupBound:
    """Bound what a kernel may return in ``Gradients.dlookups``.

    Parameters
    ----------
    do, q, k, v, dlse : array_like
        As in `backward_bound`.
    offsets : tuple of 2 array_like, optional
        The offsets of packed sequences, as in `backward_bound_varlen`.
    precision : Precision
        The kernel's arithmetic.
    block_kv : int
        As in `forward_bound`.
    **options
        As in `forward_bound`; score changes need ``learned``.

    Returns
    -------
    LookupBound
        Exact values and bounds, each shaped like its look-up's array.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    dtype = precision.reference_dtype
    do = np.asarray(do).astype(dtype)
    dlse = None if dlse is None else np.asarray(dlse).astype(dtype)
    chain = naive_formulas.score_chain(options.get("score_mod"))
    totals: dict[LookupTable, Terms] = {}
    for change in chain:
        for table in change.learned_tables:
            shape = table.array.shape
            totals[table] = Terms(np.zeros(shape, dtype), *(np.zeros(shape) for _ in range(3)))
    blocks: list[tuple[naive.Forward, Any, Any]] = []
    if offsets is None:
        _, f = naive.forward_dense(q, k, v, dtype=dtype, **options)
        row = None if dlse is None else dlse.reshape(f.lse.shape)
        blocks.append((f, do.reshape(f.out.shape), row))
    else:
        for rows, _, f in naive.sequences(q, k, v, *offsets, options=options, dtype=dtype):
            row = None if dlse is None else dlse[None, :, rows]
            blocks.append((f, do[None, :, rows], row))
    ill = 0
    for f, of_out, of_lse in blocks:
        how: dict[str, Any] = {"splits": 1, "dropout": options.get("dropout", 0.0) > 0}
        e = forward_errors(f, chain, precision, tiles=tiles_of(f.k.shape[2], block_kv), **how)
        g = naive_formulas.backward_block(f, of_out, of_lse)
        r = backward_errors(f, g, e, precision, with_dlse=dlse is not None)
        _add(f, r.dbias, chain, precision, totals)
        ill += int(e.ill_conditioned.sum())
    bounds = {
        table: bounded_sum(terms, precision, rounding_of(table.array, precision))
        for table, terms in totals.items()
    }
    return LookupBound(bounds, ill)


@np.errstate(all="ignore")
def _add(
    f: naive.Forward,
    logits: Terms,
    chain: tuple[Any, ...],
    precision: Precision,
    totals: dict[LookupTable, Terms],
) -> None:
    """Add the terms of a block's pairs."""
    of = Arithmetic(precision.unit, precision.underflow)
    where = (*f.positions, f.sizes, precision.unit)
    s, s_error = f.scores, raw_score_errors(f, precision)
    steps: list[tuple[Any, Any, Any, Any, Floats]] = []
    for change in chain:
        changed, error, slope, slope_error = change.evaluate_with_error(s, s_error, *where)
        steps.append((change, s, s_error, slope, magnitude(slope_error)))
        s, s_error = changed, error
    one = np.ones(f.scores.shape)
    exact, after = np.where(f.allowed, logits.exact, 0), Number(one, np.zeros(one.shape))
    dt = Number(magnitude(logits.exact), logits.errors)
    for change, s, s_error, slope, slope_error in reversed(steps):
        for table, place, weight, weight_error in change.learned(s, s_error, *where):
            own = of.times(after, Number(magnitude(weight), magnitude(weight_error)))
            # The whole chain is one expression, of which common parts may be rounded once more.
            term = of.times(dt, Number(own.size, 2 * own.error))
            total, at = totals[table], place[f.allowed]
            counts = exact != 0
            product = np.where(counts, exact * weight, 0)
            parts = product, term.error, term.size + term.error, one
            for to, part in zip(total, parts, strict=True):
                known = np.where(np.isnan(part), np.inf, part)
                np.add.at(to.reshape(-1), at, known[f.allowed])
        exact = np.where(exact != 0, exact * slope, 0)
        after = of.times(after, Number(magnitude(slope), slope_error))
