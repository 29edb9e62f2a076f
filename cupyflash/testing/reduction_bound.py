"""Bounds of reductions: how far results of `cupyflash.reduce` may lie from the exact ones.

The letters are those of `rounding`. A kernel computes a weight from its logit and the stored
log-sum-exp, so that the errors of both are in its exponent, and so is the rounding of their
difference; u_f is the error of an exponential::

    a_ij  = tau_ij + B_L,i + 3u (|t - L| + tau + B_L)
    e_p   = P (exp(a + u_f) - 1) + underflow

Errors of an expression's value x, given those of p, t and the log-sum-exp, are what the rules of
`cupyflash.expr` say. A sum of n values in any order, and a maximum::

    B_y = sum (error of x) + gamma(n) sum (|x| + error of x)
    B_y = max (error of x)

The latter also bounds each of the n largest. The gradients' dT is ``P (F - R)``, where F is a sum
of expressions of p, and R is a sum over keys; what follows are the sums of the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyflash.expr.rounding import FUNCTION_ULPS
from cupyflash.reference.spec import naive, naive_formulas, naive_reductions

from .bound import BLOCK_KV, Bounded, bounded_sum, reduced, rounding_of, safe, tiles_of
from .magnitudes import Floats, Terms, exponent, growth, magnitude, matmul, times
from .precision import Precision
from .rounding import Errors, forward_errors, logit_errors

__all__ = ["ReductionGradientsBound", "reduction_bound", "reduction_gradients_bound"]


class ReductionGradientsBound(NamedTuple):
    """Bounds of the gradients of reductions.

    Parameters
    ----------
    dq, dk : Bounded
        Gradients of queries and keys, as stored.
    dbias, dsink : Bounded or None
        None if there was no bias or no sink.
    """

    dq: Bounded
    dk: Bounded
    dbias: Bounded | None
    dsink: Bounded | None


class _Pairs(NamedTuple):
    """p, t and the log-sum-exp of each pair, and their errors."""

    values: tuple[Any, Any, Any]
    errors: tuple[Floats, Floats, Floats]


def _forward(f: naive.Forward, options: dict[str, Any], precision: Precision) -> Errors:
    chain = naive_formulas.score_chain(options.get("score_mod"))
    tiles = tiles_of(f.k.shape[2], BLOCK_KV)
    return forward_errors(f, chain, precision, tiles=tiles, splits=1, dropout=False)


@np.errstate(all="ignore")
def _pairs(f: naive.Forward, e: Errors, precision: Precision) -> _Pairs:
    """Return what expressions of pairs are made of."""
    unit, counts = precision.unit, f.allowed.astype(np.float64)
    lse = np.broadcast_to(np.where(np.isfinite(f.lse), f.lse, 0)[..., None], f.logits.shape)
    logits = np.where(f.allowed, f.logits, 0)
    lse_error = np.broadcast_to(e.lse[..., None], f.logits.shape)
    gap = np.where(f.allowed, np.asarray(logits - lse, np.float64), -np.inf)
    shift = e.logits + lse_error
    # The difference is rounded, and a product with log2 e, which is rounded, too.
    shift = shift + 3 * unit * (np.where(f.allowed, np.abs(gap), 0) + shift)
    a = shift + exponent(max(2 * FUNCTION_ULPS * unit, precision.exp2_error))
    p_error = growth(magnitude(f.probs), gap, a) + precision.underflow * counts
    return _Pairs((f.probs, logits, lse), (p_error, e.logits, lse_error))


def _clean(error: Any, seen: Any) -> Floats:
    """Return errors where a pair takes part, infinite where nothing is known."""
    return np.where(seen, np.where(np.isnan(error), np.inf, error), 0)


@np.errstate(all="ignore")
def reduction_bound(
    q: Any, k: Any, reduction: Any, *, precision: Precision, **options: Any
) -> Bounded:
    """Bound what a kernel may return for a reduction of `cupyflash.reduce`.

    Parameters
    ----------
    q, k : array_like
        Queries and keys.
    reduction : Reduction
        What is taken; by "top", the bound is of the values, and not of positions, which errors may
        exchange.
    precision : Precision
        The kernel's arithmetic, for example ``Precision.of(q.dtype)``.
    **options
        mask, score_mod, bias, sink and scale, as `cupyflash.reduce` takes them.

    Returns
    -------
    Bounded
        Exact values and bounds, shaped like the result.

    Raises
    ------
    ValueError
        If the result is an array of positions.
    """
    if reduction.by == "argmax":
        raise ValueError("reduction: got one by 'argmax', whose result is no number to be bounded")
    lead, f = _exact(q, k, options, precision)
    e, by_sum = _forward(f, options, precision), reduction.by == "sum"
    seen = naive_reductions.taking_part(f, reduction)
    if reduction.raw:
        scores = f._replace(logits=f.scores, bias=None)
        value, error = f.scores, logit_errors(scores, (), precision)[0]
    else:
        pairs = _pairs(f, e, precision)
        value, error = reduction.evaluate_with_error(*pairs, *f.positions, f.sizes, precision.unit)
    error = _clean(error, seen)
    exact = naive_reductions.taken(value, seen, f, reduction)[0]
    if by_sum:
        size = np.where(seen, magnitude(value), 0) + error
        errors, sizes, count = (
            naive_reductions.taken(x, seen, f._replace(sink=None), reduction)[0]
            for x in (error, size, seen.astype(np.float64))
        )
        if reduction.name == "entropy" and f.sink is not None and f.sink_probs is not None:
            of_sink, largest = _entropy_of_sink(f, e, precision)
            errors, sizes, count = errors + of_sink, sizes + largest, count + 1
        bound = errors + times(precision.gamma(count), sizes)
    else:
        at_most = naive_reductions.taken(error, seen, f, _largest(reduction))[0]
        bound = np.maximum(at_most, 0)
        if reduction.by == "top":
            bound = np.broadcast_to(bound[..., None], exact.shape)
    bound = np.where(np.isfinite(np.asarray(exact, np.float64)) | by_sum, bound, 0)
    shape = exact.shape[2:] if lead.flat else lead.axes + exact.shape[1:]
    return Bounded(exact.reshape(shape), safe(bound, precision).reshape(shape))


def _largest(reduction: Any) -> Any:
    """Return the reduction that takes one number of the pairs of another one: the largest."""
    return type(reduction)(
        reduction.expr, reduction.along, "max", block=reduction.block, queries=reduction.queries,
        per_head=reduction.per_head,
    )  # fmt: skip


def _exact(
    q: Any, k: Any, options: dict[str, Any], precision: Precision
) -> tuple[naive.Lead, naive.Forward]:
    k = np.asarray(k)
    v = np.zeros((*k.shape[:-1], 1), k.dtype)
    return naive.forward_dense(q, k, v, dtype=precision.reference_dtype, **options)


def _sink_weights(f: naive.Forward, e: Errors, precision: Precision) -> tuple[Any, ...]:
    """Return weights of sinks, LSE - sink, and the errors of both."""
    assert f.sink is not None, "there are sinks"
    assert f.sink_probs is not None, "as there are sinks"
    finite = np.isfinite(f.sink) & np.isfinite(f.lse)
    gap = np.where(finite, f.lse - f.sink, 0)
    shift = e.lse + precision.unit * (magnitude(gap) + e.lse)
    shift = np.where(finite, shift, 0)
    a = shift + exponent(max(2 * FUNCTION_ULPS * precision.unit, precision.exp2_error))
    p = magnitude(f.sink_probs)
    p_error = growth(p, np.where(finite, -np.asarray(gap, np.float64), -np.inf), a)
    return p, p_error + precision.underflow, gap, shift


def _entropy_of_sink(f: naive.Forward, e: Errors, precision: Precision) -> tuple[Floats, Floats]:
    """Return the error of a sink's part of entropies, and its size."""
    p, p_error, gap, shift = _sink_weights(f, e, precision)
    size = times(p + p_error, magnitude(gap) + shift)
    error = times(p_error, magnitude(gap) + shift) + times(p, shift) + precision.unit * size
    return error + precision.underflow, size


@np.errstate(all="ignore")
def reduction_gradients_bound(
    q: Any, k: Any, terms: list[tuple[Any, Any]], *, precision: Precision, **options: Any
) -> ReductionGradientsBound:
    """Bound what a kernel may return for gradients of `cupyflash.reduce_vjp`.

    Parameters
    ----------
    q, k : array_like
        Queries and keys.
    terms : list of tuple
        Reductions, each with the gradient of its result.
    precision : Precision
        As in `reduction_bound`.
    **options
        As in `reduction_bound`.

    Returns
    -------
    ReductionGradientsBound
        Exact values and bounds, shaped like the gradients.
    """
    q, k = np.asarray(q), np.asarray(k)
    lead, f = _exact(q, k, options, precision)
    e = _forward(f, options, precision)
    unit, lam, bias = precision.unit, precision.underflow, options.get("bias")
    flat = lead.batch, lead.heads
    given = [(x, np.asarray(c).reshape(*flat, *_rest(x, c))) for x, c in terms]
    shapes = q.shape, k.shape, None if bias is None else np.shape(bias)
    exact = naive_reductions.reduced_gradients(f, lead, given, shapes)
    pairs, counts = _pairs(f, e, precision), f.allowed.astype(np.float64)
    values = (f.probs, f.logits, np.broadcast_to(f.lse[..., None], f.logits.shape))

    # F, its size and its error
    factor, size, error = (np.zeros(f.probs.shape) for _ in range(3))
    of_sink = np.zeros(f.lse.shape)
    for n, (reduction, c) in enumerate(given):
        slope, slope_error = reduction.evaluate_with_error(
            *pairs, *f.positions, f.sizes, unit, slope=True
        )
        slope = np.where(f.allowed, reduction.evaluate_slope(*values, *f.positions, f.sizes), 0)
        along = magnitude(naive_reductions.gathered(c, f, reduction))
        own, own_error = along * magnitude(slope), times(along, _clean(slope_error, f.allowed))
        factor = factor + naive_reductions.gathered(c, f, reduction) * slope
        size = size + own + own_error
        error = error + own_error + unit * (own + own_error) + (n > 0) * unit * size + lam
        if reduction.name == "entropy":
            of_sink = of_sink + magnitude(c)
    error = np.where(f.allowed, error, 0)

    # R, which is a sum over keys
    probs, p_error = magnitude(f.probs), pairs.errors[0]
    each = times(p_error, size) + times(probs, error)
    each_size = times(probs + p_error, size + error)
    count = f.allowed.sum(axis=-1)
    total = each.sum(axis=-1) + precision.gamma(count + 3) * each_size.sum(axis=-1) + count * lam
    exact_total = (f.probs * factor).sum(axis=-1)
    weight, weight_error, gap, shift = (np.zeros(f.lse.shape) for _ in range(4))
    if f.sink is not None and f.sink_probs is not None:
        weight, weight_error, gap, shift = _sink_weights(f, e, precision)
        gap = np.where(np.isneginf(f.sink), 0, magnitude(gap) + 1)
        shift = shift + unit * (gap + shift)
        own = times(of_sink, gap + shift)
        total = total + times(weight_error, own) + times(weight, of_sink * shift)
        total = total + precision.gamma(4) * times(weight + weight_error, own) + lam
        exact_total = exact_total + np.where(
            np.isneginf(f.sink), 0, f.sink_probs * sum(
                (c * (f.lse - f.sink - 1) for x, c in given if x.name == "entropy"),
                start=np.zeros(f.lse.shape),
            )
        )  # fmt: skip
    total = total + 2 * unit * (magnitude(exact_total) + total)

    # dT and dS
    reach = size + (magnitude(exact_total) + total)[..., None]
    inner = error + total[..., None] + 2 * unit * reach
    dlogits_error = times(p_error, reach) + times(probs, inner)
    dlogits_error = dlogits_error + 3 * unit * times(probs + p_error, reach) + lam * counts
    dlogits_error = np.where(f.allowed, dlogits_error, 0)
    dlogits = magnitude(exact.dlogits)
    slope, slope_error = magnitude(f.slope), e.slope
    dscores = magnitude(exact.dscores)
    # The slope is a factor of F - R, before P is.
    error = times(dlogits_error, slope + slope_error)
    error = error + times(times(probs + p_error, reach), slope_error)
    error = error + 2 * unit * times(times(probs + p_error, reach), slope + slope_error)
    error = error + precision.product.unit * (dscores + error)
    error = np.where(f.allowed, error + precision.product.underflow, 0)
    scale, keys, queries = float(abs(f.scale)), magnitude(f.k), magnitude(f.q)
    visits, seen_keys = counts.sum(axis=-2)[..., None], counts.sum(axis=-1)[..., None]
    flipped, flipped_size = error.swapaxes(-1, -2), (dscores + error).swapaxes(-1, -2)
    allowed_t = f.allowed.swapaxes(-1, -2)
    dq = Terms(
        f.scale * naive_formulas.select_matmul(exact.dscores, f.allowed, f.k),
        scale * matmul(error, keys) + (scale + 1) * lam * seen_keys,
        scale * matmul(dscores + error, keys), seen_keys,
    )  # fmt: skip
    dk = Terms(
        f.scale * naive_formulas.select_matmul(exact.dscores.swapaxes(-1, -2), allowed_t, f.q),
        scale * matmul(flipped, queries) + (scale + 1) * lam * visits,
        scale * matmul(flipped_size, queries), visits,
    )  # fmt: skip
    dbias = dsink = None
    if bias is not None:
        of_bias = Terms(exact.dlogits, dlogits_error, dlogits + dlogits_error, counts)
        made = reduced(of_bias, lead, np.shape(bias))
        dbias = bounded_sum(made, precision, rounding_of(bias, precision))
    if f.sink is not None and exact.dsink is not None:
        reach = times(of_sink, gap + shift) + magnitude(exact_total) + total
        row = times(weight_error, reach) + times(weight, times(of_sink, shift) + total)
        row = row + 4 * unit * times(weight + weight_error, reach) + lam
        number = np.full(lead.heads, float(f.lse.shape[0] * f.lse.shape[2]))
        sizes = (times(weight, reach) + row).sum(axis=(0, 2))
        made = Terms(exact.dsink, row.sum(axis=(0, 2)), sizes, number)
        dsink = bounded_sum(made, precision, rounding_of(options["sink"], precision))
    return ReductionGradientsBound(
        bounded_sum(reduced(dq, lead, q.shape), precision, precision.output),
        bounded_sum(reduced(dk, lead, k.shape), precision, precision.output),
        dbias,
        dsink,
    )


def _rest(reduction: Any, c: Any) -> tuple[int, ...]:
    """Return the axes of a result after those of entries and heads."""
    axes = {"keys": 1, "queries": 1, "distance": 1, "blocks": 2}[reduction.along]
    shape: tuple[int, ...] = np.shape(c)[-axes:]
    return shape
