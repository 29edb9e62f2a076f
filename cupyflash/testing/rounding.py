"""Where rounding errors enter attention: the derivation behind `bound`, term by term.

Every statement below holds for any order of summation, any tiles and any schedule. u is the
accumulator's unit roundoff, e the error of exp2, lam the underflow, and gamma(n) bounds n roundings
(`Precision.gamma`). A relative error x is carried as an *exponent*,
``a = -log(1 - x)``, because exponents of factors add and ``|factors - 1| <= exp(a) - 1``.

Logits. A computed s errs by at most ``gamma(d + 3) sigma`` with ``sigma = |scale| |q||k|^T``: d for
the products and their sum, 3 for the conversion of the scale and its product; where numbers are
split for tensor cores, every product errs by `Precision.split`, too. The score chain turns that
into an error of t and of its slope by its own running error analysis; a bias adds its conversion
and the sum. A scale errs by its type, and scores that are kept in a narrower one by that at each of
these steps, and before the scale. The result is ``tau_ij``.

Weights. Any number may stand for the row maximum, since it cancels, so that only the evaluation of
``t - m`` counts: at most ``3u(|t| + |m|)`` whichever way it is computed (conversion of log2 e,
product, difference, or one FMA with a rounded ``m log2 e``), and tile rescalings telescope to the
same. With one exp2 per tile::

    a_ij = tau_ij + 3u (|t_ij| + tau_ij + M_i) + (T + 1) e,      M_i = max_j |t_ij| + tau_ij, |sink|

That number is another one of the row's t, and below their maximum by `Precision.lag` at most: then
weights, their sum, the numerator and what is lost by underflow are up to ``exp(lag)`` larger.

Output. With n_i = visible keys + 2 T + 2 roundings of products, sums, rescalings and the division
(2 more with dropout, whose factor is converted and multiplied), u_p for P as an operand, and Z for
the dropout weights::

    error of the numerator / l     N_ic = sum_j P_ij (exp(a_ij + gamma + u_p) - 1) Z_ij |v_jc| + ...
    error of l, relative           theta_i = sum_j P_ij (exp(a_ij + gamma) - 1) + the sink's
    B_O = (1 + u_o) (N + theta |O|) / (1 - theta) + u_o |O| + lam_o

Where keys and values are codes with scales, a scale is a factor of either product and rounds it
once: `Precision.with_codes` adds u to `split`, 2u to u_p, and to lam_o what values lose below the
normal range.

Where queries, keys and values are codes of float8, their numbers ``scale * code`` are exact, and
`Precision.of_codes` says what is rounded. If they become numbers of another type first, `split` has
the roundings of q and k, and u_p that of v. If tensor cores multiply the codes, their sums keep few
bits: `code_errors` follows the sums of a score, step by step, and u_p has those of a tile of keys.

A sink is one more term of l, with an exponent of its own and no numerator. Without dropout the
computed row is a convex combination of values (and of 0, with a sink) up to gamma, so
``max_j |v_jc - O_ic|`` caps the bound. Rows with ``theta >= 1/2`` are ill-conditioned: nothing is
claimed of them, their bound is infinite.

LSE. ``ln l`` inherits ``-log(1 - theta)``; conversions of m between bases and the sum add
``4u (|m| + |ln l| + 2 lag)``, the logarithm e.

Backward. P is computed again from the stored LSE: ``b_ij = tau_ij + B_L + 3u(...) + e``. delta uses
the stored, rounded O, so ``B_D = sum_c |dO| B_O + gamma(dv) sum_c |dO| (|O| + B_O)``. With
``Delta = dP - delta + dLSE`` and ``H = gamma(dv + 2) Z |dO||V|^T + B_D + ...`` its error before the
sums, and ``W = H + 2u(|Delta| + H)`` after them::

    error of dT:  E = (P (exp(b) - 1) + lam)(|Delta| + W) + P W + u P exp(b) (|Delta| + W) + lam

The slope of the score chain multiplies it; u_p rounds it as an operand. Where that is float16, dS
may overflow or vanish, so kernels multiply it by a power of two, which is exact, and divide the sum
by it. The power belongs to a tile or to all tiles so far, and is such that the largest dS of them
comes to 2^7 at least: what is lost below float16's normal range is at most ``lam_p / 2^7`` of that,
hence of the largest dS of all. Where dS is rounded as it is, lam_p is lost.

Each gradient is then one sum over all pairs that reach it, over queries, the heads of a group and
broadcast axes alike: ``sum of term errors + gamma(terms + 3) * sum of |terms|``, then the output's
rounding.

Domain. A sum may overflow on the way to a result that does not: where the magnitudes of its terms
come to half the accumulator's largest number, the bound is infinite. That concerns a logit's
products and the sums of dq and dk, before and after the scale; weighted values; do v and do out.

References
----------
N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 2002, section 3.1.
P. Blanchard et al., "Accurately computing the log-sum-exp and softmax functions", IMA J. Numer.
Anal. 41, 2021.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyflash.reference.spec.naive import Backward, Forward

from .code_sums import code_errors
from .magnitudes import (
    Floats,
    Terms,
    exponent,
    growth,
    held,
    kept,
    magnitude,
    matmul,
    stored,
    times,
)
from .precision import Precision


class Errors(NamedTuple):
    """Bounds of everything the forward pass computes, per query head.

    Parameters
    ----------
    logits, slope : ndarray, shape (B, Hq, Lq, Lk)
        tau and the error of dt/ds; 0 where not allowed.
    out : ndarray, shape (B, Hq, Lq, Dv)
        B_O.
    lse : ndarray, shape (B, Hq, Lq)
        B_L.
    ill_conditioned : ndarray of bool, shape (B, Hq, Lq)
        Rows of which nothing is claimed.
    """

    logits: Floats
    slope: Floats
    out: Floats
    lse: Floats
    ill_conditioned: NDArray[np.bool_]


def logit_errors(f: Forward, score_mod: tuple[Any, ...], precision: Precision) -> tuple[Any, ...]:
    """Bound the errors of the logits and of the score chain's slope.

    Parameters
    ----------
    f : Forward
        Exact values.
    score_mod : tuple
        Score changes with ``evaluate_with_error``.
    precision : Precision
        The arithmetic.

    Returns
    -------
    tuple of 2 ndarray, shape (B, Hq, Lq, Lk)
        tau and the slope's error; 0 where not allowed, infinite where something may overflow.
    """
    unit, lam = precision.unit, precision.underflow
    depth = f.q.shape[-1]
    products = magnitude(f.q) @ magnitude(f.k).swapaxes(-1, -2)
    scale = float(abs(f.scale))
    error = precision.gamma(depth + 3) * scale * products + (scale * depth + 1) * lam
    if precision.split:
        sizes = magnitude(f.q).sum(axis=-1)[..., None] + magnitude(f.k).sum(axis=-1)[..., None, :]
        error = error + scale * (1.01 * precision.split * products + 2 * lam * sizes)
        error = error + 1.01 * scale * precision.operand_underflow * sizes
        products = np.maximum(products, sizes)  # a split number may be rounded up
    error = error + 1.01 * precision.scale.unit * scale * products
    if precision.scores.unit:  # before the scale, and after it
        error = kept(error, scale * products, precision.scores)
        error = kept(error, magnitude(f.scores), precision.scores)
    if precision.code_unit:
        error = error + 1.01 * scale * code_errors(f.q, f.k, precision.code_unit)
    # Products that may overflow the accumulator, before or after the scale.
    safe = np.maximum(products, scale * products) < precision.largest / 2
    error = np.where(f.allowed, np.where(safe, error, np.inf), 0)
    s, s_error = f.scores, error
    slope, slope_error = np.ones(error.shape), np.zeros(error.shape)
    for change in score_mod:
        s, s_error, d, d_error = change.evaluate_with_error(s, s_error, *f.positions, f.sizes, unit)
        d, d_error = magnitude(d), np.asarray(d_error, np.float64)
        product = (slope + slope_error) * (d + d_error)
        slope_error = slope * d_error + slope_error * (d + d_error) + unit * product
        slope = slope * d
        if precision.scores.unit:
            s_error = kept(np.asarray(s_error, np.float64), magnitude(s), precision.scores)
    error = np.asarray(s_error, np.float64)
    if f.bias is not None:
        error = error + unit * magnitude(f.bias)
        sums = magnitude(np.where(f.allowed, f.logits, 0))
        error += unit * (sums + error)
        if precision.scores.unit:
            error = kept(error + precision.scores.unit * magnitude(f.bias), sums, precision.scores)

    def clean(x: Floats) -> Floats:
        return np.where(f.allowed, np.where(np.isnan(x), np.inf, x), 0)

    return clean(error), clean(slope_error)


def spread(f: Forward) -> Floats:
    """Return ``max_j |v_jc - O_ic|`` over the visible keys (and 0, for a sink) of each row."""
    out = np.asarray(f.out, np.float64)
    result = np.abs(out) if f.sink is not None else np.zeros(out.shape)
    batch, heads, rows, width = out.shape
    keys = f.v.shape[2]
    step = max(1, 2**21 // max(1, keys * width))
    for b, h in np.ndindex(batch, heads):
        values = np.asarray(f.v[b, h], np.float64)
        for start in range(0, rows, step):
            here = slice(start, start + step)
            visible = f.allowed[b, h, here, :, None]
            high = np.where(visible, values, -np.inf).max(axis=1, initial=-np.inf)
            low = np.where(visible, values, np.inf).min(axis=1, initial=np.inf)
            x = out[b, h, here]
            result[b, h, here] = np.maximum(result[b, h, here], np.maximum(high - x, x - low))
    return result


class WeightErrors(NamedTuple):
    """Bounds of the weights of each row, which its sums share.

    Parameters
    ----------
    logits, slope : ndarray, shape (B, Hq, Lq, Lk)
        As in `Errors`.
    exponents : ndarray, shape (B, Hq, Lq, Lk)
        Those of weights before they are divided by their sum, a.
    gap : ndarray, shape (B, Hq, Lq, Lk)
        Logits less the LSE; -inf where not allowed.
    shared : ndarray, shape (B, Hq, Lq)
        What all exponents of a row have.
    lost : ndarray, shape (B, Hq, Lq)
        What a weight loses by underflow.
    theta : ndarray, shape (B, Hq, Lq)
        The relative error of the sum of weights; infinite in rows of which nothing is claimed.
    summation : ndarray, shape (B, Hq, Lq)
        The exponent of the roundings of a sum over keys.
    """

    logits: Floats
    slope: Floats
    exponents: Floats
    gap: Floats
    shared: Floats
    lost: Floats
    theta: Floats
    summation: Floats


def weight_errors(
    f: Forward,
    score_mod: tuple[Any, ...],
    precision: Precision,
    *,
    tiles: int,
    splits: int,
    dropout: bool,
) -> WeightErrors:
    """Bound the errors of the weights; the parameters are those of `forward_errors`."""
    unit, lam = precision.unit, precision.underflow
    error_exp = exponent(precision.exp2_error)
    tau, slope = logit_errors(f, score_mod, precision)
    size = magnitude(np.where(f.allowed, f.logits, 0))
    probs, l = magnitude(f.probs), magnitude(f.total)
    lse = np.asarray(f.lse, np.float64)
    count = f.allowed.sum(axis=-1)
    largest = (size + tau).max(axis=-1, initial=0)
    if f.sink is not None:
        largest = np.maximum(largest, np.where(np.isinf(f.sink), 0, magnitude(f.sink)))
    weight = np.exp(precision.lag)  # the largest, before the division

    # Exponents of the weights; `shared` is what every weight of a row has.
    shared = 3 * unit * largest + (tiles + 1) * error_exp
    if splits > 1:  # each part's stored LSE, and its weight exp(lse_part - lse) in the combination
        shared = shared + 10 * unit * (largest + np.log1p(count)) + 2 * error_exp
    a = tau + 3 * unit * (size + tau) + shared[..., None]
    roundings = count + 2 * tiles + 2 + (2 if dropout else 0) + (4 if splits > 1 else 0)
    summation = exponent(precision.gamma(roundings))
    gap = np.where(f.allowed, np.asarray(f.logits, np.float64) - lse[..., None], -np.inf)
    inverse = np.where(l > 0, 1 / l, 0) * (count > 0)
    lost = weight * lam * inverse

    theta = growth(probs, gap, a + summation[..., None]).sum(axis=-1) + count * lost
    if f.sink is not None and f.sink_probs is not None:
        sink = np.where(np.isinf(f.sink), 0, magnitude(f.sink))
        a_sink = 4 * unit * sink + shared + summation
        gap_sink = np.where(f.sink == -np.inf, -np.inf, np.asarray(f.sink, np.float64) - lse)
        theta = theta + growth(magnitude(f.sink_probs), gap_sink, a_sink)
    theta = np.where(theta < 0.5, theta, np.inf)
    return WeightErrors(tau, slope, a, gap, shared, lost, theta, summation)


@np.errstate(all="ignore")
def forward_errors(
    f: Forward,
    score_mod: tuple[Any, ...],
    precision: Precision,
    *,
    tiles: int,
    splits: int,
    dropout: bool,
) -> Errors:
    """Bound the errors of O and LSE.

    Parameters
    ----------
    f : Forward
        Exact values.
    score_mod : tuple
        Score changes with ``evaluate_with_error``.
    precision : Precision
        The arithmetic.
    tiles, splits : int
        Key tiles, and parts the keys are split into and combined by their LSE.
    dropout : bool
        Whether dropout weights are multiplied in.

    Returns
    -------
    Errors
        The bounds.
    """
    unit = precision.unit
    w = weight_errors(f, score_mod, precision, tiles=tiles, splits=splits, dropout=dropout)
    tau, gap, lost, theta, summation = w.logits, w.gap, w.lost, w.theta, w.summation
    ill = ~np.isfinite(theta)
    error_exp = exponent(precision.exp2_error)
    probs, l = magnitude(f.probs), magnitude(f.total)
    lse, count = np.asarray(f.lse, np.float64), f.allowed.sum(axis=-1)
    weight = np.exp(precision.lag)  # the largest, before the division
    log_l = magnitude(np.log(np.where(l > 0, l, 1)))
    inverse = np.where(l > 0, 1 / l, 0) * (count > 0)

    out, value = magnitude(f.out), magnitude(f.v)
    weights = magnitude(f.weights) * f.allowed
    operand = exponent(precision.product.unit)
    numerator = matmul(
        growth(probs, gap, w.exponents + summation[..., None] + operand) * weights, value
    )
    reach = matmul(weights, value)
    flushed = lost + precision.product.underflow * inverse
    flushed = flushed[..., None] * (reach + count[..., None])
    numerator = numerator + flushed
    bound = (numerator + times(theta[..., None], out)) / (1 - np.minimum(theta, 0.5))[..., None]
    if not dropout:
        relative = np.expm1(2 * summation + operand)[..., None]
        hull = spread(f)
        bound = np.minimum(bound, hull + relative * (hull + out) + 2 * flushed)
    bound = stored(bound, f.out, precision.output)
    fits = weight * reach < precision.largest / 2  # the numerator before the division
    bound = np.where(fits & ~ill[..., None], bound, np.inf)

    log_theta = exponent(theta)
    m = magnitude(f.maximum) + tau.max(axis=-1, initial=0)
    bound_lse = log_theta + 4 * unit * (m + log_l + log_theta + 2 * precision.lag) + error_exp
    if precision.lse.unit:
        bound_lse = kept(bound_lse, magnitude(lse), precision.lse)
    nothing = count == 0
    unseen = nothing if f.sink is None else nothing & np.isinf(f.lse)
    return Errors(
        logits=tau,
        slope=w.slope,
        out=np.where(nothing[..., None], 0, bound),
        lse=np.where(unseen, 0, np.where(ill, np.inf, bound_lse)),
        ill_conditioned=ill & ~unseen,
    )


class BackwardErrors(NamedTuple):
    """Bounds of delta, and each gradient as a sum that is still to be reduced.

    Parameters
    ----------
    delta : ndarray, shape (B, Hq, Lq)
        B_D.
    dq, dk, dv, dbias : Terms, shapes (B, Hq, L, D or Dv) and (B, Hq, Lq, Lk)
        Per query head.
    dsink : Terms, shape (B, Hq), or None
        Per batch entry.
    """

    delta: Floats
    dq: Terms
    dk: Terms
    dv: Terms
    dbias: Terms
    dsink: Terms | None


@np.errstate(all="ignore")
def backward_errors(
    f: Forward, g: Backward, e: Errors, precision: Precision, *, with_dlse: bool
) -> BackwardErrors:
    """Bound the errors of delta and of the terms of every gradient.

    Parameters
    ----------
    f, g : Forward, Backward
        Exact values.
    e : Errors
        Bounds of the forward pass.
    precision : Precision
        The arithmetic.
    with_dlse : bool
        Whether a gradient by the LSE takes part.

    Returns
    -------
    BackwardErrors
        The bounds.
    """
    unit, lam = precision.unit, precision.underflow
    error_exp = exponent(precision.exp2_error)
    allowed = f.allowed
    counts = allowed.astype(np.float64)
    do, out, value = magnitude(g.do), magnitude(f.out), magnitude(f.v)
    width = f.v.shape[-1]
    seen = allowed.any(axis=-1)

    # delta, and what dLSE adds to it
    delta = times(do, e.out).sum(axis=-1)
    delta = delta + precision.gamma(width) * times(do, out + e.out).sum(axis=-1) + width * lam
    delta = held(delta, times(do, out + e.out).sum(axis=-1), precision.largest / 2)
    delta = np.where(seen, delta, 0)
    shift = delta
    if with_dlse:
        shift = delta + 2 * unit * (magnitude(g.delta) + magnitude(g.dlse) + delta)

    # P again, from the stored LSE
    lse = np.where(np.isinf(f.lse), 0, np.asarray(f.lse, np.float64))
    size = magnitude(np.where(allowed, f.logits, 0))
    row = e.lse + 3 * unit * (np.abs(lse) + e.lse) + error_exp
    b = e.logits + 3 * unit * (size + e.logits) + row[..., None]
    gap = np.where(allowed, np.asarray(f.logits, np.float64) - lse[..., None], -np.inf)
    probs, weights = magnitude(f.probs), magnitude(f.weights)
    probs_error = growth(probs, gap, b) + lam * counts

    # dV: terms P Z dO
    b_value = b + exponent(precision.product.unit) + exponent(2 * unit)
    value_error = growth(probs, gap, b_value) + (lam + precision.product.underflow) * counts
    value_error = times(value_error, weights).swapaxes(-1, -2)
    value_terms = (probs * weights).swapaxes(-1, -2)
    visits = counts.sum(axis=-2)[..., None]
    limit = precision.largest / 2 / max(1, f.q.shape[0] * f.q.shape[1])  # sums may be shared
    size_dv = matmul(value_terms + value_error, do)
    dv = Terms(g.dv, held(matmul(value_error, do) + lam * visits, size_dv, limit), size_dv, visits)

    # dT, which is the bias's gradient
    reach = np.where(allowed, matmul(do, value.swapaxes(-1, -2)), 0)
    products = times(weights, precision.gamma(width + 2) * reach + width * lam)
    if precision.split:
        sizes = do.sum(axis=-1)[..., None] + value.sum(axis=-1)[..., None, :]
        products = products + times(weights, 1.01 * precision.split * reach + 2 * lam * sizes)
        reach = np.maximum(reach, sizes)
    products = np.where(reach < precision.largest / 2, products, np.inf)
    size_delta = magnitude(g.dprobs - (g.delta - g.dlse)[..., None])
    size_delta = np.where(allowed, size_delta, 0)

    def term_error(p: Floats, p_error: Floats, size: Floats, before: Floats) -> Floats:
        after = before + 2 * unit * (size + before)
        reached = size + after
        result = times(p_error, reached) + times(p, after)
        return result + unit * times(p + p_error, reached) + lam

    dlogits_error = term_error(probs, probs_error, size_delta, products + shift[..., None])
    dlogits_error = np.where(allowed, dlogits_error, 0)
    dlogits = magnitude(g.dlogits)
    dbias = Terms(g.dlogits, dlogits_error, dlogits + dlogits_error, counts)

    # dS, an operand of the last two products
    slope, scale = magnitude(f.slope), float(abs(f.scale))
    error = times(dlogits_error, slope) + times(dlogits + dlogits_error, e.slope)
    if slope.size and not (np.all(f.slope[allowed] == 1) and not e.slope.any()):
        error = error + unit * times(dlogits + dlogits_error, slope + e.slope) + lam * counts
    dscores = magnitude(g.dscores)
    underflow = precision.product.underflow
    if precision.scaled_underflow:
        underflow = precision.scaled_underflow * (dscores + error).max(initial=0)
    error = error + precision.product.unit * (dscores + error) + times(counts, underflow)
    keys, queries = magnitude(f.k), magnitude(f.q)
    seen_keys = counts.sum(axis=-1)[..., None]
    size_dq = matmul(dscores + error, keys)  # sums are multiplied by the scale at the end
    size_dk = matmul((dscores + error).swapaxes(-1, -2), queries)
    dq_error = scale * matmul(error, keys) + (scale + 1) * lam * seen_keys
    dk_error = scale * matmul(error.swapaxes(-1, -2), queries) + (scale + 1) * lam * visits
    most = max(1.0, scale)  # what broadcast axes share is summed after the scale
    dq = Terms(g.dq, held(dq_error, most * size_dq, limit), scale * size_dq, seen_keys)
    dk = Terms(g.dk, held(dk_error, most * size_dk, limit), scale * size_dk, visits)

    dsink = None
    if f.sink is not None and f.sink_probs is not None:
        finite = np.isfinite(f.sink)
        sink = np.where(finite, np.asarray(f.sink, np.float64), 0)
        p = magnitude(f.sink_probs)
        b_sink = 4 * unit * np.abs(sink) + row
        p_error = growth(p, np.where(finite, sink - lse, -np.inf), b_sink) + lam
        size_row = magnitude(g.dlse - g.delta)
        row_error = np.where(finite, term_error(p, p_error, size_row, shift), 0)
        terms = (times(p, size_row) + row_error).sum(axis=-1)
        number = np.full(terms.shape, float(f.lse.shape[-1]))
        dsink = Terms(g.dsink, row_error.sum(axis=-1), terms, number)
    return BackwardErrors(delta, dq, dk, dv, dbias, dsink)
