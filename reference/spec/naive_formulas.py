"""The formulas of the specification: attention and its gradients with every score written out.

Kernels are compared with this code, so it follows only the formulas: it has no tiles and no running
maximum, and the whole ``(Lq, Lk)`` matrix is in memory, in float64 or long double. For one head,
with i over queries, j over keys and c over value columns::

    s_ij = scale * sum_d q_id k_jd                       raw scores
    t_ij = score_mod(s_ij) + bias_ij                     logits; allowed where the mask is True
                                                         and t_ij is not -inf
    l_i  = sum_j exp(t_ij) + exp(sink)                   j over the allowed keys of row i
    LSE_i = ln l_i
    P_ij = exp(t_ij - LSE_i)     p_i = exp(sink - LSE_i)
    Z_ij = kept_ij / P(kept)                             dropout; 1 without it
    O_ic = sum_j P_ij Z_ij v_jc

and in the backward, for a loss whose derivatives with respect to O and LSE are dO and dLSE::

    dV_jc    = sum_i P_ij Z_ij dO_ic
    dP_ij    = Z_ij sum_c dO_ic v_jc
    delta_i  = sum_c dO_ic O_ic                          equals sum_j P_ij dP_ij
    dT_ij    = P_ij (dP_ij - delta_i + dLSE_i)           gradient of the logits, hence of the bias
    dS_ij    = dT_ij * (d score_mod / d s)_ij
    dQ_id    = scale * sum_j dS_ij k_jd
    dK_jd    = scale * sum_i dS_ij q_id
    dsink    = sum_i p_i (dLSE_i - delta_i)

A row that may see nothing has O = 0, LSE = -inf (O = 0 and LSE = sink with a sink) and zero
gradients. A pair that is not allowed has no influence: nothing in its query, key or value, not even
NaN, changes another number, because its products are left out instead of being multiplied by zero.

References
----------
T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention", 2022, Algorithm 0 and Appendix B.2-B.4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cpu import philox

Array = NDArray[Any]


class Sizes(NamedTuple):
    """What a mask or a score may know about the problem besides the position of a pair.

    Parameters
    ----------
    lead : tuple of int
        The broadcast leading axes; b is the flat C-order index over them. ``(n,)`` for n packed
        sequences.
    heads : int
        Number of query heads.
    len_q, len_k : int or ndarray
        Lengths; arrays that broadcast with b in variable-length calls.
    start_q, start_k : int or ndarray
        First packed row of sequence b; 0 if nothing is packed.
    """

    lead: tuple[int, ...]
    heads: int
    len_q: Any
    len_k: Any
    start_q: Any = 0
    start_k: Any = 0


class Forward(NamedTuple):
    """All arrays of the forward pass, four-dimensional, with one entry per *query* head.

    Parameters
    ----------
    q : ndarray, shape (B, Hq, Lq, D)
        Queries in the computing type.
    k, v : ndarray, shape (B, Hq, Lk, D) and (B, Hq, Lk, Dv)
        Keys and values, repeated for the query heads that share them.
    scale : floating
        The scale in the computing type.
    positions : tuple of 4 ndarray
        b, h, i, j, shaped to broadcast to (B, Hq, Lq, Lk).
    sizes : Sizes
        The sizes that masks and scores get.
    scores, logits, slope : ndarray, shape (B, Hq, Lq, Lk)
        s, t and dt/ds; 0, -inf and 0 where not allowed.
    allowed : ndarray of bool, shape (B, Hq, Lq, Lk)
        Pairs that take part.
    bias : ndarray, shape (B, Hq, Lq, Lk), or None
        The bias, broadcast.
    sink : ndarray, shape (1, Hq, 1), or None
        The sink's logits.
    maximum, total, lse : ndarray, shape (B, Hq, Lq)
        Row maximum m of the logits and the sink (0 for a row with nothing to see),
        ``total = sum exp(t - m)`` and ``lse = m + ln total``.
    probs, weights : ndarray, shape (B, Hq, Lq, Lk)
        P and the dropout weights Z.
    sink_probs : ndarray, shape (B, Hq, Lq), or None
        Probability of the sink.
    out : ndarray, shape (B, Hq, Lq, Dv)
        O.
    """

    q: Array
    k: Array
    v: Array
    scale: Any
    positions: tuple[Array, Array, Array, Array]
    sizes: Sizes
    scores: Array
    logits: Array
    slope: Array
    allowed: NDArray[np.bool_]
    bias: Array | None
    sink: Array | None
    maximum: Array
    total: Array
    lse: Array
    probs: Array
    weights: Array
    sink_probs: Array | None
    out: Array


class Backward(NamedTuple):
    """All arrays of the backward pass, with one entry per query head; nothing is summed yet.

    Parameters
    ----------
    do, dlse : ndarray, shape (B, Hq, Lq, Dv) and (B, Hq, Lq)
        The incoming gradients; zeros for an absent `dlse`.
    dprobs, dlogits, dscores : ndarray, shape (B, Hq, Lq, Lk)
        dP (with its dropout weights), dT and dS.
    delta : ndarray, shape (B, Hq, Lq)
        Row sums of dO * O; 0 for a row with nothing to see.
    dq, dk, dv : ndarray, shape (B, Hq, L, D or Dv)
        Gradients per query head.
    dsink : ndarray, shape (B, Hq), or None
        The sink's gradient per batch entry.
    """

    do: Array
    dlse: Array
    dprobs: Array
    delta: Array
    dlogits: Array
    dscores: Array
    dq: Array
    dk: Array
    dv: Array
    dsink: Array | None


def score_chain(score_mod: Any) -> tuple[Any, ...]:
    """One score change, a sequence of them or None, as a tuple in order of application."""
    if score_mod is None:
        return ()
    return (score_mod,) if hasattr(score_mod, "evaluate") else tuple(score_mod)


def select_matmul(weights: Array, allowed: Array, values: Array) -> Array:
    """Sum ``weights[m, n] * values[n]`` over n, for allowed pairs only.

    A pair that is not allowed has weight 0, which is enough for finite values. Rows of `values`
    with NaN or infinities are added one by one, only to the rows that may see them.

    Parameters
    ----------
    weights, allowed : ndarray, shape (B, H, M, N)
        Weights (0 for pairs that are not allowed), and which pairs are allowed.
    values : ndarray, shape (B, H, N, C)
        The values to sum.

    Returns
    -------
    ndarray, shape (B, H, M, C)
        The sums.
    """
    finite: Array = np.all(np.isfinite(values), axis=-1)
    result: Array = weights @ np.where(finite[..., None], values, 0)
    for b, h, n in np.argwhere(~finite):
        pair = allowed[b, h, :, n, None]
        result[b, h] += np.where(pair, weights[b, h, :, n, None] * values[b, h, n], 0)
    return result


@np.errstate(all="ignore")
def forward_block(
    q: Array,
    k: Array,
    v: Array,
    positions: tuple[Array, Array, Array, Array],
    sizes: Sizes,
    *,
    mask: Any,
    score_mod: Any,
    bias: Array | None,
    sink: Array | None,
    scale: float | None,
    dropout: float,
    seed: Any,
) -> Forward:
    """Apply the forward formulas to (B, Hq, L, D) arrays of the computing type.

    `mask` has an `evaluate`, or is a boolean array of the shape (B, Hq, Lq, Lk), or is None; `bias`
    is None or of that shape. `scale` None means 1/sqrt(D). See `attention`.
    """
    dtype = q.dtype.type
    b, h, i, j = positions
    shape = (*q.shape[:3], k.shape[2])
    if mask is None:
        allowed = np.ones(shape, bool)
    else:
        allowed = mask.evaluate(b, h, i, j, sizes) if hasattr(mask, "evaluate") else mask
        allowed = np.broadcast_to(np.asarray(allowed, bool), shape)
    if bias is not None:
        allowed = allowed & (bias != -np.inf)

    # Raw scores, score changes in order, bias. A pair that is masked never reaches a score change.
    scaling = 1 / np.sqrt(dtype(q.shape[-1])) if scale is None else dtype(scale)
    scores = np.where(allowed, scaling * (q @ k.swapaxes(-1, -2)), 0)
    logits, slope = scores, np.ones(shape, dtype)
    for change in score_chain(score_mod):
        logits, derivative = change.evaluate(logits, b, h, i, j, sizes)
        slope = slope * derivative
    if bias is not None:
        logits = logits + bias
    allowed = allowed & (logits != -np.inf)  # NaN stays: it poisons its row
    scores = np.where(allowed, scores, 0)
    logits = np.where(allowed, logits, -np.inf)
    slope = np.where(allowed, slope, 0)

    # Softmax. Subtracting the maximum changes only the range of the exponentials.
    maximum = logits.max(axis=-1, initial=-np.inf)
    if sink is not None:
        maximum = np.maximum(maximum, sink)
    maximum = np.where(maximum == -np.inf, 0, maximum)
    exponentials = np.where(allowed, np.exp(logits - maximum[..., None]), 0)
    total = exponentials.sum(axis=-1)
    sink_exponential = None if sink is None else np.exp(sink - maximum)
    if sink_exponential is not None:
        total = total + sink_exponential
    lse = maximum + np.log(total)
    divisor = np.where(total == 0, 1, total)
    probs = exponentials / divisor[..., None]
    sink_probs = None if sink_exponential is None else sink_exponential / divisor

    weights = np.ones(shape, dtype)
    if dropout > 0:
        kept = philox.keep(seed, dropout, b * q.shape[1] + h, i, j)
        weights = np.where(kept, 1 / dtype(philox.keep_probability(dropout)), dtype(0))
    out = select_matmul(probs * weights, allowed, v)
    return Forward(
        q, k, v, scaling, positions, sizes, scores, logits, slope, allowed, bias, sink,
        maximum, total, lse, probs, weights, sink_probs, out,
    )  # fmt: skip


@np.errstate(all="ignore")
def backward_block(forward: Forward, do: Array, dlse: Array | None) -> Backward:
    """Apply the backward formulas to what `forward_block` returned; see `attention_backward`."""
    f = forward
    if dlse is None:
        dlse = np.zeros(f.lse.shape, f.lse.dtype)
    allowed, allowed_t = f.allowed, f.allowed.swapaxes(-1, -2)
    dv = select_matmul((f.probs * f.weights).swapaxes(-1, -2), allowed_t, do)
    dprobs = np.where(allowed, f.weights * (do @ f.v.swapaxes(-1, -2)), 0)
    delta = np.where(allowed.any(axis=-1), (do * f.out).sum(axis=-1), 0)
    dlogits = np.where(allowed, f.probs * (dprobs - (delta - dlse)[..., None]), 0)
    # Selected, because the slope of a score may be infinite where the gradient is left out.
    dscores = np.where(allowed, dlogits * f.slope, 0)
    dq = f.scale * select_matmul(dscores, allowed, f.k)
    dk = f.scale * select_matmul(dscores.swapaxes(-1, -2), allowed_t, f.q)
    dsink = None if f.sink_probs is None else (f.sink_probs * (dlse - delta)).sum(axis=-1)
    return Backward(do, dlse, dprobs, delta, dlogits, dscores, dq, dk, dv, dsink)
