"""The specification of derivatives along a direction: every formula written out, in float64.

With the letters of `naive_formulas`, and tq, tk, tv, tbias, tsink for the direction, which are the
tangents of the arrays::

    ts_ij  = scale * sum_d (tq_id k_jd + q_id tk_jd)
    tt_ij  = (d score_mod / d s)_ij ts_ij + tbias_ij     0 where a pair is not allowed
    mu_i   = sum_j P_ij tt_ij + p_i tsink                the tangent of the LSE
    tP_ij  = P_ij (tt_ij - mu_i)
    tO_ic  = sum_j Z_ij (tP_ij v_jc + P_ij tv_jc)

A row that may see nothing has tO = 0, and mu = 0 (mu = tsink with a sink).

The tangents of the gradients, with tdO and tdLSE for those of dO and dLSE, f' and f'' for
derivatives of the score changes, g_ij = dP_ij - delta_i + dLSE_i, and dT, dS as in
`naive_formulas`::

    tdelta_i = sum_c tdO_ic O_ic + dO_ic tO_ic
    tdT_ij   = tP_ij g_ij + P_ij (Z_ij sum_c (tdO_ic v_jc + dO_ic tv_jc) - tdelta_i + tdLSE_i)
    tdS_ij   = f'_ij tdT_ij + f''_ij ts_ij dT_ij
    tdQ_id   = scale * sum_j (tdS_ij k_jd + dS_ij tk_jd)
    tdK_jd   = scale * sum_i (tdS_ij q_id + dS_ij tq_id)
    tdV_jc   = sum_i Z_ij (tP_ij dO_ic + P_ij tdO_ic)
    tdsink   = sum_i p_i ((tsink - mu_i) (dLSE_i - delta_i) + tdLSE_i - tdelta_i)

Where the direction is that of gradients by dQ, dK, dV, dbias and dsink, and tdO and tdLSE are 0,
these are the gradients of a double backward, and those by dO and dLSE are tO and mu, because second
derivatives are symmetric.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import naive
from .naive_formulas import Array, Backward, Forward, score_chain, select_matmul

__all__ = [
    "Directions",
    "NaiveTangent",
    "SecondTangent",
    "Tangent",
    "attention_jvp",
    "attention_varlen_jvp",
    "broadcast_directions",
    "chain_curve",
    "second_block",
    "tangent_block",
    "tangent_dense",
]


class Directions(NamedTuple):
    """Tangents of the arrays of a call; None stands for zeros.

    Parameters
    ----------
    tq, tk, tv, tbias, tsink : array_like or None
        Each of its array's shape.
    """

    tq: Any = None
    tk: Any = None
    tv: Any = None
    tbias: Any = None
    tsink: Any = None


class Tangent(NamedTuple):
    """All arrays of the tangent, with one entry per query head.

    Parameters
    ----------
    tq, tk, tv : ndarray, shape (B, Hq, L, D or Dv)
        Directions, repeated for the query heads that share them; zeros for None.
    tbias : ndarray, shape (B, Hq, Lq, Lk), or None
        The direction of the bias, broadcast.
    tsink : ndarray, shape (1, Hq, 1), or None
        That of the sink's logits.
    tscores, tlogits : ndarray, shape (B, Hq, Lq, Lk)
        ts and tt; 0 where not allowed.
    tlse : ndarray, shape (B, Hq, Lq)
        mu.
    tprobs : ndarray, shape (B, Hq, Lq, Lk)
        tP.
    tout : ndarray, shape (B, Hq, Lq, Dv)
        tO.
    """

    tq: Array
    tk: Array
    tv: Array
    tbias: Array | None
    tsink: Array | None
    tscores: Array
    tlogits: Array
    tlse: Array
    tprobs: Array
    tout: Array


class NaiveTangent(NamedTuple):
    """Results of the specification, in its computing type.

    Parameters
    ----------
    out, tout : ndarray, shape (..., Hq, Lq, Dv)
        O and its tangent.
    lse, tlse : ndarray, shape (..., Hq, Lq)
        LSE and its tangent.
    """

    out: Array
    tout: Array
    lse: Array
    tlse: Array


@np.errstate(all="ignore")
def tangent_block(forward: Forward, directions: Directions) -> Tangent:
    """Apply the formulas to what `forward_block` returned, and to directions of its shapes."""
    f = forward
    tq, tk, tv = (
        np.zeros(x.shape, x.dtype) if t is None else t
        for x, t in zip((f.q, f.k, f.v), directions, strict=False)
    )
    tbias, tsink = directions.tbias, directions.tsink
    allowed = f.allowed
    # Selected, because a pair that is not allowed may have NaN.
    tscores = tq @ f.k.swapaxes(-1, -2) + f.q @ tk.swapaxes(-1, -2)
    tscores = np.where(allowed, f.scale * tscores, 0)
    tlogits = f.slope * tscores
    if tbias is not None:
        tlogits = tlogits + tbias
    tlogits = np.where(allowed, tlogits, 0)
    tlse = (f.probs * tlogits).sum(axis=-1)
    if f.sink_probs is not None and tsink is not None:
        tlse = tlse + f.sink_probs * tsink
    tprobs = np.where(allowed, f.probs * (tlogits - tlse[..., None]), 0)
    tout = select_matmul(f.weights * tprobs, allowed, f.v)
    tout = tout + select_matmul(f.weights * f.probs, allowed, tv)
    return Tangent(tq, tk, tv, tbias, tsink, tscores, tlogits, tlse, tprobs, tout)


class SecondTangent(NamedTuple):
    """All arrays of the tangent of the backward, with one entry per query head.

    Parameters
    ----------
    tdo, tdlse : ndarray
        The directions of dO and of dLSE; zeros for None.
    curve : ndarray, shape (B, Hq, Lq, Lk)
        f''; 0 where not allowed.
    tdprobs, tdlogits, tdscores : ndarray, shape (B, Hq, Lq, Lk)
        The tangents of dP (with its dropout weights), dT and dS.
    tdelta : ndarray, shape (B, Hq, Lq)
        That of delta.
    tdq, tdk, tdv : ndarray, shape (B, Hq, L, D or Dv)
        Those of the gradients per query head.
    tdsink : ndarray, shape (B, Hq), or None
        That of the sink's gradient per batch entry.
    """

    tdo: Array
    tdlse: Array
    curve: Array
    tdprobs: Array
    tdelta: Array
    tdlogits: Array
    tdscores: Array
    tdq: Array
    tdk: Array
    tdv: Array
    tdsink: Array | None


def chain_curve(f: Forward, score_mod: Any) -> Array:
    """Return the second derivative of the score changes, joined by the rule for chains."""
    s, slope, curve = f.scores, np.ones(f.scores.shape, f.q.dtype), np.zeros_like(f.scores)
    for change in score_chain(score_mod):
        own, _ = change.curvature(s, np.zeros(s.shape), *f.positions, f.sizes, 2.0**-53)
        s, d = change.evaluate(s, *f.positions, f.sizes)
        curve = own * slope**2 + d * curve
        slope = slope * d
    return np.where(f.allowed, curve, 0)


@np.errstate(all="ignore")
def second_block(
    f: Forward, g: Backward, t: Tangent, curve: Array, tdo: Array | None, tdlse: Array | None
) -> SecondTangent:
    """Apply the formulas of the backward's tangent, given `chain_curve`."""
    tdo = np.zeros_like(g.do) if tdo is None else tdo
    tdlse = np.zeros_like(g.dlse) if tdlse is None else tdlse
    allowed, allowed_t = f.allowed, f.allowed.swapaxes(-1, -2)
    tdprobs = tdo @ f.v.swapaxes(-1, -2) + g.do @ t.tv.swapaxes(-1, -2)
    tdprobs = np.where(allowed, f.weights * tdprobs, 0)
    tdelta = (tdo * f.out + g.do * t.tout).sum(axis=-1)
    tdelta = np.where(allowed.any(axis=-1), tdelta, 0)
    gap = g.dprobs - (g.delta - g.dlse)[..., None]
    tdlogits = t.tprobs * gap + f.probs * (tdprobs - (tdelta - tdlse)[..., None])
    tdlogits = np.where(allowed, tdlogits, 0)
    # Selected, because a derivative may be infinite where the gradient is left out.
    tdscores = np.where(tdlogits == 0, 0, f.slope * tdlogits)
    tdscores = tdscores + np.where(g.dlogits == 0, 0, curve * t.tscores * g.dlogits)
    tdscores = np.where(allowed, tdscores, 0)
    tdq = select_matmul(tdscores, allowed, f.k) + select_matmul(g.dscores, allowed, t.tk)
    of_keys = tdscores.swapaxes(-1, -2), g.dscores.swapaxes(-1, -2)
    tdk = select_matmul(of_keys[0], allowed_t, f.q) + select_matmul(of_keys[1], allowed_t, t.tq)
    moved, weights = ((f.weights * x).swapaxes(-1, -2) for x in (t.tprobs, f.probs))
    tdv = select_matmul(moved, allowed_t, g.do) + select_matmul(weights, allowed_t, tdo)
    tdsink = None
    if f.sink_probs is not None:
        tsink = 0 if t.tsink is None else t.tsink
        terms = (tsink - t.tlse) * (g.dlse - g.delta) + tdlse - tdelta
        tdsink = (f.sink_probs * terms).sum(axis=-1)
    return SecondTangent(
        tdo, tdlse, curve, tdprobs, tdelta, tdlogits, tdscores, f.scale * tdq, f.scale * tdk, tdv,
        tdsink,
    )  # fmt: skip


def broadcast_directions(directions: Directions, lead: naive.Lead, f: Forward) -> Directions:
    """Return directions with an entry for each query head, in the computing type."""
    dtype = f.q.dtype
    tq, tk, tv = (
        None if x is None else naive.per_query_head(np.asarray(x), lead, dtype)
        for x in directions[:3]
    )
    tbias, tsink = directions.tbias, directions.tsink
    if tbias is not None:
        full = lead.axes + f.allowed.shape[1:]
        tbias = np.broadcast_to(np.asarray(tbias).astype(dtype), full).reshape(f.allowed.shape)
    if tsink is not None:
        tsink = np.asarray(tsink).astype(dtype).reshape(1, lead.heads, 1)
    return Directions(tq, tk, tv, tbias, tsink)


def tangent_dense(
    q: Any, k: Any, v: Any, directions: Directions, **options: Any
) -> tuple[naive.Lead, Forward, Tangent]:
    """Run `attention_jvp` and return everything it materialises; the arguments are the same."""
    lead, f = naive.forward_dense(q, k, v, **options)
    return lead, f, tangent_block(f, broadcast_directions(directions, lead, f))


def attention_jvp(q: Any, k: Any, v: Any, directions: Directions, **options: Any) -> NaiveTangent:
    """Differentiate `naive.attention` along a direction.

    Parameters
    ----------
    q, k, v : array_like
        As in `naive.attention`.
    directions : Directions
        The direction.
    **options
        As in `naive.attention`.

    Returns
    -------
    NaiveTangent
        Results and their tangents.
    """
    lead, f, t = tangent_dense(q, k, v, directions, **options)

    def shaped(x: Array) -> Array:
        return x.reshape(x.shape[2:] if lead.flat else lead.axes + x.shape[1:])

    return NaiveTangent(*map(shaped, (f.out, t.tout, f.lse, t.tlse)))


def sequence_directions(
    directions: Directions, b: int, rows_q: slice, rows_k: slice, f: Forward, longest: Any
) -> Directions:
    """Return the directions of one packed sequence, as `tangent_block` takes them."""
    dtype, heads = f.q.dtype, f.q.shape[1]
    lead = naive.Lead((1,), 1, heads, False)
    tq, tk, tv = (
        None if x is None else naive.per_query_head(np.asarray(x)[None, :, rows], lead, dtype)
        for x, rows in zip(directions[:3], (rows_q, rows_k, rows_k), strict=True)
    )
    tbias, tsink = directions.tbias, directions.tsink
    if tbias is not None:
        tbias = np.broadcast_to(np.asarray(tbias).astype(dtype), longest)
        tbias = tbias[b : b + 1, :, : f.allowed.shape[2], : f.allowed.shape[3]]
    if tsink is not None:
        tsink = np.asarray(tsink).astype(dtype).reshape(1, heads, 1)
    return Directions(tq, tk, tv, tbias, tsink)


def tangent_sequences(
    q: Any, k: Any, v: Any, offsets_q: Any, offsets_k: Any, directions: Directions, *,
    options: dict[str, Any], dtype: Any,
) -> list[tuple[slice, Forward, Tangent]]:  # fmt: skip
    """Run each packed sequence: its rows in q, and its results."""
    parts = naive.sequences(q, k, v, offsets_q, offsets_k, options=options, dtype=dtype)
    lengths = [max((f.allowed.shape[n] for _, _, f in parts), default=0) for n in (2, 3)]
    longest = (len(parts), np.shape(q)[0], *lengths)
    return [
        (
            rows_q,
            f,
            tangent_block(f, sequence_directions(directions, b, rows_q, rows_k, f, longest)),
        )
        for b, (rows_q, rows_k, f) in enumerate(parts)
    ]


def attention_varlen_jvp(
    q: Any, k: Any, v: Any, offsets_q: Any, offsets_k: Any, directions: Directions, *,
    dtype: Any = np.float64, **options: Any,
) -> NaiveTangent:  # fmt: skip
    """Differentiate `naive.attention_varlen` along a direction.

    Parameters
    ----------
    q, k, v, offsets_q, offsets_k : array_like
        As in `naive.attention_varlen`.
    directions : Directions
        The direction; those of q, k and v are packed like them.
    dtype : type
        Computing type.
    **options
        As in `naive.attention_varlen`.

    Returns
    -------
    NaiveTangent
        Results and their tangents, packed.
    """
    q, v = np.asarray(q), np.asarray(v)
    out, tout = (np.zeros((*q.shape[:2], v.shape[-1]), dtype) for _ in range(2))
    lse, tlse = np.full(q.shape[:2], -np.inf, dtype), np.zeros(q.shape[:2], dtype)
    arrays = q, k, v, offsets_q, offsets_k
    for rows, f, t in tangent_sequences(*arrays, directions, options=options, dtype=dtype):
        out[:, rows], tout[:, rows] = f.out[0], t.tout[0]
        lse[:, rows], tlse[:, rows] = f.lse[0], t.tlse[0]
    return NaiveTangent(out, tout, lse, tlse)
