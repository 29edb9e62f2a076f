"""Bounds of tangents: how far results of `cupyflash.attention_jvp` may lie from the exact ones.

The letters are those of `rounding`. A tangent of a score is a sum of 2 d products; f' is the slope
of the score chain, with its error, and a tangent of a bias adds its conversion and the sum::

    e_ij = gamma(2 d + 3) |scale| (|tq||k|^T + |q||tk|^T)
    E_ij = |f'| e + (error of f') (|ts| + e) + 2u (|tt| + ...)          the error of tt

Sums over keys may be formed relative to any number ``ref``, because the sums r and w have it in
common, so that it cancels from ``w - r O``. All that is claimed is that it is a mean of a row's tt,
so that ``|tt_ij - ref| <= D_ij``, the distance of tt_ij from the farther end of the row's range.
Errors of tt widen that range. With the exponents a_ij of weights, and gamma of all roundings of a
sum::

    R_i   = sum_j P (exp(a + gamma) - 1) D + P exp(a + gamma) (E + u D)     and the sink's term
    rho_i = sum_j P D                                                       likewise
    R'    = (R + theta rho) / (1 - theta)                                   error of r / l
    N_ic  = sum_j Z P ((exp(a + gamma + u_p) - 1) (D |v| + |tv|) + exp(..) (E + u D) |v|)
    B_tO  = (N + theta M) / (1 - theta) + |O| R' + (rho + R') B_O + 4u (M + rho |O| + ...)
    B_mu  = R' + 3u (|mu| + rho + R')

where M is the numerator's size, ``sum_j Z P (D |v| + |tv|)``, and B_O the bound of an output that
is not rounded yet. The result's rounding comes last. The range of tt is in the bound, and not its
size: a kernel that sums tt itself exceeds it where all tangents of a row have much in common.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash.reference.spec import naive, naive_formulas, naive_tangents
from cupyflash.reference.spec.naive_tangents import Directions, Tangent

from .bound import BLOCK_KV, Bounded, safe, tiles_of
from .magnitudes import Floats, exponent, growth, magnitude, matmul, stored, times
from .precision import NOT_ROUNDED, Precision
from .rounding import Errors, WeightErrors, forward_errors, weight_errors

__all__ = ["Directions", "JvpBound", "jvp_bound", "jvp_bound_varlen"]


class JvpBound(NamedTuple):
    """Bounds of a forward with tangents.

    Parameters
    ----------
    out, tout : Bounded
        O and its tangent, as stored.
    lse, tlse : Bounded
        LSE and its tangent.
    ill_conditioned : int
        Number of rows about which nothing is claimed.
    """

    out: Bounded
    tout: Bounded
    lse: Bounded
    tlse: Bounded
    ill_conditioned: int


class TangentErrors(NamedTuple):
    """Bounds of tangents, per query head.

    Parameters
    ----------
    tout : ndarray, shape (B, Hq, Lq, Dv)
        B_tO.
    tlse : ndarray, shape (B, Hq, Lq)
        B_mu.
    """

    tout: Floats
    tlse: Floats


def logit_tangent_errors(
    f: naive.Forward, t: Tangent, w: WeightErrors, precision: Precision, raw: bool = False
) -> Floats:
    """Bound the errors of tt, or with `raw` of ts; 0 where not allowed."""
    unit, lam, depth = precision.unit, precision.underflow, f.q.shape[-1]
    scale = float(abs(f.scale))
    pairs = ((t.tq, f.k), (f.q, t.tk))
    products = sum(magnitude(a) @ magnitude(b).swapaxes(-1, -2) for a, b in pairs)
    error = precision.gamma(2 * depth + 3) * scale * products + (2 * scale * depth + 1) * lam
    if precision.split:
        sizes = sum(
            magnitude(a).sum(axis=-1)[..., None] + magnitude(b).sum(axis=-1)[..., None, :]
            for a, b in pairs
        )
        error = error + scale * (1.01 * precision.split * products + 2 * lam * sizes)
        products = np.maximum(products, sizes)
    safe_sums = np.maximum(products, scale * products) < precision.largest / 2
    error = np.where(safe_sums, error, np.inf)
    if raw:
        return np.where(f.allowed, error, 0)
    slope, size = magnitude(f.slope), magnitude(t.tscores) + error
    changed = times(slope, error) + times(w.slope, size)
    error = changed + unit * times(slope + w.slope, size) + lam
    if t.tbias is not None:
        error = error + unit * magnitude(t.tbias)
        error = error + unit * (magnitude(t.tlogits) + error)
    return np.where(f.allowed, error, 0)


@np.errstate(all="ignore")
def tangent_errors(
    f: naive.Forward,
    t: Tangent,
    score_mod: tuple[Any, ...],
    precision: Precision,
    *,
    tiles: int,
    dropout: bool,
) -> TangentErrors:
    """Bound the errors of the tangents of O and LSE.

    Parameters
    ----------
    f, t : Forward, Tangent
        Exact values.
    score_mod : tuple
        Score changes with ``evaluate_with_error``.
    precision : Precision
        The arithmetic.
    tiles : int
        Key tiles.
    dropout : bool
        Whether dropout weights are multiplied in.

    Returns
    -------
    TangentErrors
        The bounds.
    """
    unit, lam = precision.unit, precision.underflow
    how: dict[str, Any] = {"tiles": tiles, "splits": 1, "dropout": dropout}
    w = weight_errors(f, score_mod, precision, **how)
    exact_output = replace(precision, output=NOT_ROUNDED)
    out_error = forward_errors(f, score_mod, exact_output, **how).out
    error = logit_tangent_errors(f, t, w, precision)
    count = f.allowed.sum(axis=-1)
    tt = np.asarray(t.tlogits, np.float64)
    size, probs, gap, theta = magnitude(tt), magnitude(f.probs), w.gap, w.theta

    # The range of tt in each row, which has any mean of it.
    largest = size.max(axis=-1, initial=0)
    slack = error.max(axis=-1, initial=0) + precision.gamma(count + 4) * largest
    low = np.where(f.allowed, tt, np.inf).min(axis=-1, initial=np.inf) - slack
    high = np.where(f.allowed, tt, -np.inf).max(axis=-1, initial=-np.inf) + slack
    low, high = np.where(count > 0, low, 0), np.where(count > 0, high, 0)
    reach = np.maximum(tt - low[..., None], high[..., None] - tt)
    reach = np.where(f.allowed, reach, 0)
    error = error + unit * (reach + error)

    roundings = 2 * count + 2 * tiles + 6 + (2 if dropout else 0)
    summation = exponent(precision.gamma(roundings))[..., None]
    grown = growth(probs, gap, w.exponents + summation)
    row = times(grown, reach) + times(probs + grown, error)
    row_error = row.sum(axis=-1) + times(w.lost[..., None], reach + size).sum(axis=-1)
    row_size = times(probs, reach).sum(axis=-1)
    if f.sink is not None and f.sink_probs is not None:
        tsink = np.zeros(f.sink.shape) if t.tsink is None else np.asarray(t.tsink, np.float64)
        finite = np.isfinite(f.sink)
        tsink = np.where(finite, tsink, 0)
        far = np.maximum(np.abs(tsink - low), np.abs(high - tsink))
        ends = np.maximum(np.abs(low), np.abs(high))
        each = precision.gamma(tiles + 5) * (np.abs(tsink) + ends)
        p = magnitude(f.sink_probs)
        lse = np.asarray(f.lse, np.float64)
        a_sink = 4 * unit * np.where(finite, magnitude(f.sink), 0) + w.shared + summation[..., 0]
        p_grown = growth(p, np.where(finite, np.asarray(f.sink, np.float64) - lse, -np.inf), a_sink)
        row_error = row_error + times(p_grown, far + each) + times(p + p_grown, each)
        row_size = row_size + times(p, far)

    value, tangent = magnitude(f.v), magnitude(t.tv)
    weights = magnitude(f.weights) * f.allowed
    operand = exponent(precision.product.unit)
    grown = growth(probs, gap, w.exponents + summation + operand)
    terms = times(grown, reach) + times(probs + grown, error)
    numerator = matmul(times(terms, weights), value) + matmul(times(grown, weights), tangent)
    l = magnitude(f.total)
    inverse = np.where(l > 0, 1 / l, 0) * (count > 0)
    lost = (w.lost + precision.product.underflow * inverse)[..., None]
    every = matmul(times(weights, reach + size + 1), value) + matmul(weights, tangent)
    numerator = numerator + times(lost, every + 2 * count[..., None])
    magnitudes = matmul(times(probs * weights, reach), value) + matmul(probs * weights, tangent)

    rest = 1 - np.minimum(theta, 0.5)
    row_error = (row_error + times(theta, row_size)) / rest
    out, row_most = magnitude(f.out), row_size + row_error
    bound = (numerator + times(theta[..., None], magnitudes)) / rest[..., None]
    bound = bound + times(out, row_error[..., None]) + times(row_most[..., None], out_error)
    bound = bound + 4 * unit * (magnitudes + bound + times(row_most[..., None], out + out_error))
    bound = stored(bound + 4 * lam, t.tout, precision.output)
    weight = np.exp(precision.lag)  # the largest, before the division
    fits = weight * every < precision.largest / 2
    ill = ~np.isfinite(theta)
    bound = np.where(fits & ~ill[..., None], bound, np.inf)
    tlse = magnitude(t.tlse)
    bound_tlse = row_error + 3 * unit * (tlse + row_most) + 4 * lam
    bound_tlse = np.where(ill | np.isnan(bound_tlse), np.inf, bound_tlse)
    nothing = count == 0
    return TangentErrors(
        np.where(nothing[..., None], 0, bound), np.where(nothing, 2 * unit * tlse, bound_tlse)
    )


def _errors(
    f: naive.Forward, t: Tangent, options: dict[str, Any], precision: Precision, block_kv: int
) -> tuple[Errors, TangentErrors]:
    """Return the bounds of a forward and of its tangents."""
    chain = naive_formulas.score_chain(options.get("score_mod"))
    tiles, dropout = tiles_of(f.k.shape[2], block_kv), options.get("dropout", 0.0) > 0
    e = forward_errors(f, chain, precision, tiles=tiles, splits=1, dropout=dropout)
    return e, tangent_errors(f, t, chain, precision, tiles=tiles, dropout=dropout)


def jvp_bound(
    q: Any,
    k: Any,
    v: Any,
    directions: Directions,
    *,
    precision: Precision,
    block_kv: int = BLOCK_KV,
    **options: Any,
) -> JvpBound:
    """Bound what a kernel may return for `cupyflash.attention_jvp`.

    Parameters
    ----------
    q, k, v : array_like
        Queries, keys and values.
    directions : Directions
        ``Directions(tq, tk, tv, tbias, tsink)``, each an array or None.
    precision : Precision
        The kernel's arithmetic.
    block_kv : int
        As in `forward_bound`.
    **options
        As in `forward_bound`.

    Returns
    -------
    JvpBound
        Exact values and bounds, shaped like the results.
    """
    options_spec = {**options, "dtype": precision.reference_dtype}
    lead, f, t = naive_tangents.tangent_dense(q, k, v, directions, **options_spec)
    e, te = _errors(f, t, options, precision, block_kv)

    def bounded(exact: Any, bound: Any) -> Bounded:
        shape = exact.shape[2:] if lead.flat else lead.axes + exact.shape[1:]
        return Bounded(exact.reshape(shape), safe(bound, precision).reshape(shape))

    return JvpBound(
        bounded(f.out, e.out),
        bounded(t.tout, te.tout),
        bounded(f.lse, e.lse),
        bounded(t.tlse, te.tlse),
        int(e.ill_conditioned.sum()),
    )


def jvp_bound_varlen(
    q: Any,
    k: Any,
    v: Any,
    offsets_q: Any,
    offsets_k: Any,
    directions: Directions,
    *,
    precision: Precision,
    block_kv: int = BLOCK_KV,
    **options: Any,
) -> JvpBound:
    """Bound what a kernel may return for `cupyflash.attention_varlen_jvp`.

    Parameters
    ----------
    q, k, v, offsets_q, offsets_k : array_like
        Packed arrays and the offsets of their sequences.
    directions : Directions
        As in `jvp_bound`; those of q, k and v are packed.
    precision : Precision
        The kernel's arithmetic.
    block_kv : int
        As in `forward_bound`.
    **options
        As in `forward_bound`.

    Returns
    -------
    JvpBound
        Exact values and bounds, packed like the results.
    """
    q, v = np.asarray(q), np.asarray(v)
    dtype, wide, rows = precision.reference_dtype, (*q.shape[:2], v.shape[-1]), q.shape[:2]
    shapes = wide, wide, rows, rows
    exact = [np.zeros(shape, dtype) for shape in shapes]
    exact[2][...] = -np.inf
    bounds = [np.zeros(shape) for shape in shapes]
    parts = naive_tangents.tangent_sequences(
        q, k, v, offsets_q, offsets_k, directions, options=options, dtype=dtype
    )
    ill = 0
    for here, f, t in parts:
        e, te = _errors(f, t, options, precision, block_kv)
        found = (f.out, e.out), (t.tout, te.tout), (f.lse, e.lse), (t.tlse, te.tlse)
        for n, (right, bound) in enumerate(found):
            exact[n][:, here], bounds[n][:, here] = right[0], safe(bound[0], precision)
        ill += int(e.ill_conditioned.sum())
    out, tout, lse, tlse = (Bounded(*pair) for pair in zip(exact, bounds, strict=True))
    return JvpBound(out, tout, lse, tlse, ill)
