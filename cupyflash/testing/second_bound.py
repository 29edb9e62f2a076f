"""Bounds of second derivatives: results of `cupyflash.attention_backward_jvp`.

Nothing is new in the sums: each is one of `rounding` or of `tangent_bound`. What enters them is a
product of two numbers of which each errs, so numbers carry a bound of their error here: with sizes
x, y and errors dx, dy, a product errs by ``x dy + y dx + dx dy + u (x + dx)(y + dy)``, and a sum by
``dx + dy + u (|x + y| + dx + dy)``. In this way the errors of

    tP = P (tt - mu),    dT = P g,    tdT = tP g + P (tdP - tdelta),    tdS = f' tdT + f'' ts dT

follow from those of P, again from the stored LSE, of tt and mu, of g, of ``tdP - tdelta``, and of
the score chain. Every tangent of a gradient is then a sum of two kinds of terms, with as many
roundings as there are terms, as in `rounding`.

Tensor cores of 16-bit types multiply P, tP, dS and tdS that are rounded, so each errs by ``u_p``
more, and below the normal range by an absolute error. In float16, this is relative to the largest
of those that share a power of two: dS and tdS, or P and tP. They also read the tangent of O as it
is stored, where other kernels read it before it is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash.reference.spec import naive, naive_formulas, naive_tangents
from cupyflash.reference.spec.naive_tangents import Directions, SecondTangent, Tangent

from .bound import BLOCK_KV, Bounded, bounded_sum, reduced, rounding_of, safe, tiles_of
from .magnitudes import Floats, Terms, exponent, growth, magnitude, matmul, times
from .precision import NOT_ROUNDED, Precision
from .rounding import forward_errors, weight_errors
from .tangent_bound import TangentErrors, logit_tangent_errors, tangent_errors

__all__ = ["SecondBound", "second_bound"]


class SecondBound(NamedTuple):
    """Bounds of the tangents of gradients.

    Parameters
    ----------
    dq, dk, dv : Bounded
        Their tangents, as stored.
    dbias, dsink : Bounded or None
        None if there was no bias or sink.
    tout, tlse : Bounded
        The tangents of O and LSE.
    ill_conditioned : int
        Number of rows about which nothing is claimed.
    """

    dq: Bounded
    dk: Bounded
    dv: Bounded
    dbias: Bounded | None
    dsink: Bounded | None
    tout: Bounded
    tlse: Bounded
    ill_conditioned: int


class Number(NamedTuple):
    """Magnitudes, and bounds of the errors of what is computed for them."""

    size: Floats
    error: Floats


class Arithmetic(NamedTuple):
    """Sums and products of numbers that err."""

    unit: float
    lam: float

    def times(self, x: Number, y: Number) -> Number:
        """Return a product."""
        error = times(x.size, y.error) + times(y.size, x.error) + times(x.error, y.error)
        rounded = self.unit * times(x.size + x.error, y.size + y.error)
        return Number(times(x.size, y.size), error + rounded + self.lam)

    def plus(self, size: Any, x: Number, y: Number) -> Number:
        """Return a sum or a difference of this exact value."""
        error, held = x.error + y.error, magnitude(size)
        return Number(held, error + self.unit * (held + error) + self.lam)


def _curve(f: naive.Forward, score_mod: tuple[Any, ...], precision: Precision) -> Number:
    """Return the second derivative of the score chain, with its error."""
    of = Arithmetic(precision.unit, precision.underflow)
    s, s_error = f.scores, raw_score_errors(f, precision)
    slope = Number(np.ones(s.shape), np.zeros(s.shape))
    curve = Number(np.zeros(s.shape), np.zeros(s.shape))
    for change in score_mod:
        own = Number(*map(magnitude, change.curvature(
            s, s_error, *f.positions, f.sizes, precision.unit
        )))  # fmt: skip
        s, s_error, d, d_error = change.evaluate_with_error(
            s, s_error, *f.positions, f.sizes, precision.unit
        )
        first, other = Number(magnitude(d), magnitude(d_error)), of.times(slope, slope)
        parts = of.times(own, other), of.times(first, curve)
        curve = of.plus(parts[0].size + parts[1].size, *parts)
        slope = of.times(slope, first)
    # The whole chain is one expression, of which common parts may be rounded once more.
    return Number(curve.size, 2 * curve.error)


def raw_score_errors(f: naive.Forward, precision: Precision) -> Floats:
    products = magnitude(f.q) @ magnitude(f.k).swapaxes(-1, -2)
    scale = float(abs(f.scale))
    depth = f.q.shape[-1]
    error = precision.gamma(depth + 3) * scale * products
    error = error + (scale * depth + 1) * precision.underflow
    return np.where(f.allowed, error, 0)


def _operand(
    x: Number, shared: tuple[Number, ...], here: Callable[[Floats], Floats], precision: Precision
) -> Number:
    """Return a number as a product of matrices takes it; `shared` are those of one scale."""
    size, rounding = x.size + here(x.error), precision.product
    underflow = rounding.underflow
    if precision.scaled_underflow:
        largest = max(here(y.size + y.error).max(initial=0) for y in shared)
        underflow = precision.scaled_underflow * largest
    return Number(x.size, x.error + rounding.unit * size + underflow)


class SecondErrors(NamedTuple):
    """Each tangent of a gradient as a sum that is still to be reduced."""

    dq: Terms
    dk: Terms
    dv: Terms
    dbias: Terms
    dsink: Terms | None


@np.errstate(all="ignore")
def second_errors(
    f: naive.Forward,
    g: naive.Backward,
    t: Tangent,
    second: SecondTangent,
    score_mod: tuple[Any, ...],
    precision: Precision,
    *,
    tiles: int,
    dropout: bool,
) -> SecondErrors:
    """Bound the errors of the terms of the tangents of gradients."""
    unit, lam = precision.unit, precision.underflow
    of = Arithmetic(unit, lam)
    how: dict[str, Any] = {"tiles": tiles, "splits": 1, "dropout": dropout}
    e = forward_errors(f, score_mod, precision, **how)
    w = weight_errors(f, score_mod, precision, **how)
    rounds = precision.product.unit > 0
    read = precision if rounds else replace(precision, output=NOT_ROUNDED)
    te = tangent_errors(f, t, score_mod, read, tiles=tiles, dropout=dropout)
    allowed, width = f.allowed, f.v.shape[-1]
    counts, seen = allowed.astype(np.float64), allowed.any(axis=-1)
    z, value, do = magnitude(f.weights), magnitude(f.v), magnitude(g.do)
    out, tdo = magnitude(f.out), magnitude(second.tdo)

    def here(x: Floats) -> Floats:
        return np.where(allowed, np.where(np.isnan(x), np.inf, x), 0)

    # P, from the stored LSE.
    error_exp = exponent(precision.exp2_error)
    lse = np.where(np.isinf(f.lse), 0, np.asarray(f.lse, np.float64))
    size = magnitude(np.where(allowed, f.logits, 0))
    row = e.lse + 3 * unit * (np.abs(lse) + e.lse) + error_exp
    b = e.logits + 3 * unit * (size + e.logits) + row[..., None]
    gap = np.where(allowed, np.asarray(f.logits, np.float64) - lse[..., None], -np.inf)
    p = Number(magnitude(f.probs), here(growth(magnitude(f.probs), gap, b) + lam))

    # tt - mu, and tP.
    tt = Number(magnitude(t.tlogits), logit_tangent_errors(f, t, w, precision))
    mu = Number(magnitude(t.tlse)[..., None], np.where(seen, te.tlse, 0)[..., None])
    moved = of.plus(np.where(allowed, t.tlogits - t.tlse[..., None], 0), tt, mu)
    tp = of.times(p, Number(moved.size, here(moved.error)))

    # g and tdP - tdelta.
    def rows(a: Floats, b: Floats, b_error: Floats) -> tuple[Floats, Floats]:
        reach = times(a, b + b_error).sum(axis=-1)
        return reach, times(a, b_error).sum(axis=-1)

    reach, delta = rows(do, out, e.out)
    delta = delta + precision.gamma(width + 2) * (reach + magnitude(g.dlse)) + width * lam
    delta = np.where(seen, delta, 0)
    tout = magnitude(t.tout)
    reach, error = rows(do, tout, te.tout)
    more, own = rows(tdo, out, e.out)
    tdelta = error + own + precision.gamma(2 * width + 3) * (reach + more + magnitude(second.tdlse))
    tdelta = np.where(seen, tdelta + 2 * width * lam, 0)

    def products(*pairs: tuple[Floats, Floats]) -> Floats:
        every = sum(matmul(a, b.swapaxes(-1, -2)) for a, b in pairs)
        held = precision.gamma(len(pairs) * width + 3) * every + 2 * width * lam
        return here(times(z, np.where(every < precision.largest / 2, held, np.inf)))

    dp = Number(magnitude(g.dprobs), products((do, value)))
    tdp = Number(magnitude(second.tdprobs), products((tdo, value), (do, magnitude(t.tv))))
    shift = Number(magnitude(g.delta - g.dlse)[..., None], delta[..., None])
    tshift = Number(magnitude(second.tdelta - second.tdlse)[..., None], tdelta[..., None])
    exact = np.where(allowed, g.dprobs - (g.delta - g.dlse)[..., None], 0)
    gradient = of.plus(exact, dp, shift)
    exact = np.where(allowed, second.tdprobs - (second.tdelta - second.tdlse)[..., None], 0)
    change = of.plus(exact, tdp, tshift)

    # Logits, and scores.
    dt = of.times(p, gradient)
    parts = of.times(tp, gradient), of.times(p, change)
    tdt = of.plus(second.tdlogits, *parts)
    slope = Number(magnitude(f.slope), e.slope)
    curve = _curve(f, score_mod, precision)
    ts = Number(magnitude(t.tscores), here(logit_tangent_errors(f, t, w, precision, raw=True)))
    ds = of.times(slope, dt)
    bent = of.times(of.times(curve, ts), dt) if score_mod else Number(0 * counts, 0 * counts)
    tds = of.plus(second.tdscores, of.times(slope, tdt), bent)

    def term(exact: Any, pairs: Any, number: Floats, scale: float = 1.0) -> Terms:
        errors: Any = sum(matmul(here(a.error), b) for a, b in pairs)
        sizes: Any = sum(matmul(here(a.size + a.error), b) for a, b in pairs)
        most = max(1.0, scale) * sizes
        errors = scale * errors + (scale + 1) * lam * number
        errors = np.where(most < precision.largest / 2 / max(1, f.q.shape[0]), errors, np.inf)
        return Terms(exact, errors, scale * sizes, 2 * number)

    def of_keys(exact: Any, pairs: Any, scale: float = 1.0) -> Terms:
        number = counts.sum(axis=-2)[..., None]
        errors: Any = sum(matmul(here(a.error).swapaxes(-1, -2), b) for a, b in pairs)
        sizes: Any = sum(matmul(here(a.size + a.error).swapaxes(-1, -2), b) for a, b in pairs)
        limit = precision.largest / 2 / max(1, f.q.shape[0] * f.q.shape[1])
        errors = scale * errors + (scale + 1) * lam * number
        errors = np.where(max(1.0, scale) * sizes < limit, errors, np.inf)
        return Terms(exact, errors, scale * sizes, 2 * number)

    scale = float(abs(f.scale))
    q, k, tq, tk = (magnitude(x) for x in (f.q, f.k, t.tq, t.tk))
    factor = Number(z, 2 * unit * z)
    ds, tds = (_operand(x, (ds, tds), here, precision) for x in (ds, tds))
    held, weights = (of.times(_operand(x, (tp, p), here, precision), factor) for x in (tp, p))
    dsink = None
    if f.sink_probs is not None and f.sink is not None:
        dsink = _sink(f, g, t, second, row, (delta, tdelta, te), of)
    return SecondErrors(
        term(second.tdq, ((tds, k), (ds, tk)), counts.sum(axis=-1)[..., None], scale),
        of_keys(second.tdk, ((tds, q), (ds, tq)), scale),
        of_keys(second.tdv, ((held, do), (weights, tdo))),
        Terms(second.tdlogits, here(tdt.error), here(tdt.size + tdt.error), counts),
        dsink,
    )


def _sink(
    f: naive.Forward,
    g: naive.Backward,
    t: Tangent,
    second: SecondTangent,
    row: Floats,
    errors: tuple[Floats, Floats, TangentErrors],
    of: Arithmetic,
) -> Terms:
    """Bound the terms of the tangent of the sink's gradient."""
    delta, tdelta, te = errors
    assert f.sink is not None
    finite = np.isfinite(f.sink)
    sink = np.where(finite, np.asarray(f.sink, np.float64), 0)
    lse = np.where(np.isinf(f.lse), 0, np.asarray(f.lse, np.float64))
    probs = magnitude(f.sink_probs)
    b = 4 * of.unit * np.abs(sink) + row
    p = Number(probs, growth(probs, np.where(finite, sink - lse, -np.inf), b) + of.lam)
    tsink = np.zeros(f.sink.shape) if t.tsink is None else np.asarray(t.tsink, np.float64)
    own = Number(magnitude(tsink), of.unit * magnitude(tsink))
    moved = of.plus(tsink - t.tlse, own, Number(magnitude(t.tlse), te.tlse))
    shift, exact = Number(magnitude(g.dlse - g.delta), delta), second.tdlse - second.tdelta
    product = of.times(moved, shift)
    signed = (tsink - t.tlse) * (g.dlse - g.delta)
    sums = of.plus(signed + exact, product, Number(magnitude(exact), tdelta))
    terms = of.times(p, sums)
    kept = np.where(finite, terms.error, 0)
    number = np.full(kept.shape[:-1], float(f.lse.shape[-1]))
    sizes = (terms.size + kept).sum(axis=-1)
    return Terms(second.tdsink, kept.sum(axis=-1), sizes, number)


def second_bound(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    directions: Directions,
    *,
    dlse: Any = None,
    tdo: Any = None,
    tdlse: Any = None,
    precision: Precision,
    block_kv: int = BLOCK_KV,
    **options: Any,
) -> SecondBound:
    """Bound what a kernel may return for `cupyflash.attention_backward_jvp`.

    Parameters
    ----------
    do, q, k, v : array_like
        As in `backward_bound`.
    directions : Directions
        As in `jvp_bound`.
    dlse : array_like or None
        Gradient of the LSE.
    tdo, tdlse : array_like or None
        Tangents of `do` and `dlse`.
    precision : Precision
        The kernel's arithmetic.
    block_kv : int
        As in `forward_bound`.
    **options
        As in `forward_bound`.

    Returns
    -------
    SecondBound
        Exact values and bounds, shaped like the results.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    dtype, score_mod = precision.reference_dtype, options.get("score_mod")
    lead, f, t = naive_tangents.tangent_dense(q, k, v, directions, dtype=dtype, **options)

    def rows(x: Any, like: Any) -> Any:
        return None if x is None else np.asarray(x).astype(dtype).reshape(like.shape)

    g = naive_formulas.backward_block(f, rows(do, f.out), rows(dlse, f.lse))
    curve = naive_tangents.chain_curve(f, score_mod)
    second = naive_tangents.second_block(f, g, t, curve, rows(tdo, f.out), rows(tdlse, f.lse))
    chain = naive_formulas.score_chain(score_mod)
    how: dict[str, Any] = {
        "tiles": tiles_of(f.k.shape[2], block_kv), "dropout": options.get("dropout", 0.0) > 0
    }  # fmt: skip
    r = second_errors(f, g, t, second, chain, precision, **how)
    te = tangent_errors(f, t, chain, precision, **how)
    e = forward_errors(f, chain, precision, splits=1, **how)
    bias, sink = options.get("bias"), options.get("sink")

    def summed(terms: Terms, shape: tuple[int, ...], like: Any) -> Bounded:
        return bounded_sum(reduced(terms, lead, shape), precision, rounding_of(like, precision))

    def bounded(exact: Any, bound: Any) -> Bounded:
        shape = exact.shape[2:] if lead.flat else lead.axes + exact.shape[1:]
        return Bounded(exact.reshape(shape), safe(bound, precision).reshape(shape))

    dbias = None if bias is None else summed(r.dbias, np.shape(bias), bias)
    dsink = None
    if r.dsink is not None:
        columns = Terms(*(x.sum(axis=0) for x in r.dsink))
        dsink = bounded_sum(columns, precision, rounding_of(sink, precision))
    return SecondBound(
        summed(r.dq, q.shape, q),
        summed(r.dk, k.shape, k),
        summed(r.dv, v.shape, v),
        dbias,
        dsink,
        bounded(t.tout, te.tout),
        bounded(t.tlse, te.tlse),
        int(e.ill_conditioned.sum()),
    )
