"""The criterion of every numerical test: an a-priori, componentwise rounding-error bound.

``rho = max |computed - exact| / bound`` is at most 1 for every correct implementation of the given
arithmetic, whatever its order of summation, tiles, splits or schedule; there is no tolerance to
choose. The bound is a function of the problem alone. `rounding` has its derivation.

It also has teeth, because it is componentwise and follows the data: a dropped key exceeds it, and
in float64 a constant with four digits or an epsilon in a row sum, too. What stays within it because
it allows for the worst case, `typical` finds.

Rows whose logits are so large that their rounding errors reach the weights (half or more of a
row's sum) are ill-conditioned. Nothing can be claimed about them, so their bound is infinite, and
they are counted. A test that needs every row judged checks that the count is 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupyflash.arrays.dtypes import DTYPES
from cupyflash.reference.spec import naive, naive_formulas

from .magnitudes import Terms, total
from .precision import Precision, Rounding
from .rounding import BackwardErrors, Errors, backward_errors, forward_errors

__all__ = [
    "BackwardBound",
    "Bounded",
    "ForwardBound",
    "Precision",
    "Rho",
    "Rounding",
    "backward_bound",
    "backward_bound_varlen",
    "forward_bound",
    "forward_bound_varlen",
    "rho",
]

BLOCK_KV = 64


class Bounded(NamedTuple):
    """An exact array, and a bound on the error of computed values.

    Parameters
    ----------
    exact : ndarray
        Exact values (float64; long double if float64 results are bounded).
    bound : ndarray of float64
        Largest legal absolute difference, elementwise.
    """

    exact: NDArray[Any]
    bound: NDArray[np.float64]


class ForwardBound(NamedTuple):
    """Bounds of the forward pass.

    Parameters
    ----------
    out, lse : Bounded
        O as stored, and LSE.
    ill_conditioned : int
        Number of rows about which nothing is claimed.
    """

    out: Bounded
    lse: Bounded
    ill_conditioned: int


class BackwardBound(NamedTuple):
    """Bounds of the backward pass.

    Parameters
    ----------
    dq, dk, dv : Bounded
        Gradients as stored.
    dbias, dsink : Bounded or None
        None if there was no bias or sink.
    delta : Bounded
        Row sums of do * out, with the stored out.
    ill_conditioned : int
        Number of rows about which nothing is claimed.
    """

    dq: Bounded
    dk: Bounded
    dv: Bounded
    dbias: Bounded | None
    dsink: Bounded | None
    delta: Bounded
    ill_conditioned: int


@dataclass(frozen=True)
class Rho:
    """The worst ratio of error to bound.

    Parameters
    ----------
    value : float
        ``max |actual - exact| / bound``; at most 1 is right.
    index : tuple of int
        Where the ratio is reached; empty for an empty array.
    """

    value: float
    index: tuple[int, ...]


def rho(actual: ArrayLike, exact: ArrayLike, bound: ArrayLike) -> Rho:
    """Measure computed values against exact ones in units of the bound.

    Parameters
    ----------
    actual : array_like
        Computed values, of any floating type.
    exact, bound : array_like, same shape
        Exact values and their bound, as in `Bounded`.

    Returns
    -------
    Rho
        The worst ratio and its index. An element without error counts 0 even if its bound is 0, and
        so do equal infinities and any number with an infinite bound. NaN in `actual` or `exact`
        counts as infinite, whatever the bound; leave out elements that should be NaN.
    """
    computed = np.asarray(actual).astype(np.longdouble)
    right = np.asarray(exact).astype(np.longdouble)
    limit = np.asarray(bound).astype(np.longdouble)
    if not computed.shape == right.shape == limit.shape:
        raise ValueError(
            f"shapes differ: actual {computed.shape}, exact {right.shape}, bound {limit.shape}"
        )
    if computed.size == 0:
        return Rho(0.0, ())
    with np.errstate(all="ignore"):
        error = np.abs(computed - right)
        ratio = np.where(np.isposinf(limit), 0, error / limit)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)  # NaN bounds; inf - inf and 0/0 follow below
    ratio = np.where((computed == right) & ~np.isnan(limit), 0, ratio)
    ratio = np.where(np.isnan(computed) | np.isnan(right), np.inf, ratio)
    worst = int(np.argmax(ratio))
    index = tuple(int(n) for n in np.unravel_index(worst, ratio.shape))
    return Rho(float(ratio[index]), index)


def tiles_of(length: int, block_kv: int) -> int:
    """Return how many tiles some keys are."""
    return max(1, -(-length // block_kv))


def safe(bound: Any, precision: Precision) -> NDArray[np.float64]:
    """Double the bound where long double is no wider than the float64 that is bounded."""
    coarse = np.finfo(precision.reference_dtype).eps > precision.unit / 8
    return np.asarray(bound, np.float64) * (2 if coarse else 1)


def _forward(
    f: naive.Forward, options: dict[str, Any], precision: Precision, block_kv: int, splits: int
) -> Errors:
    return forward_errors(
        f,
        naive_formulas.score_chain(options.get("score_mod")),
        precision,
        tiles=tiles_of(f.k.shape[2], block_kv),
        splits=splits,
        dropout=options.get("dropout", 0.0) > 0,
    )


def reduced(terms: Iterable[Any], lead: naive.Lead, shape: tuple[int, ...]) -> Terms:
    """Sum every part of `terms` over what was broadcast from `shape`."""
    exact, errors, size, count = terms
    shapes = (shape, shape, shape, shape)
    if count.shape != exact.shape:  # one count for a whole row
        shapes = (shape, shape, shape, (*shape[:-1], 1))
    parts = zip((exact, errors, size, count), shapes, strict=True)
    return Terms(*(naive.sum_to_shape(x, lead, to) for x, to in parts))


def bounded_sum(terms: Terms, precision: Precision, rounding: Rounding) -> Bounded:
    """Return a sum with the bound of what is stored of it."""
    with np.errstate(all="ignore"):
        return Bounded(terms.exact, safe(total(terms, 3, precision, rounding), precision))


def rounding_of(array: Any, precision: Precision) -> Rounding:
    """Rounding to the type of a bias or sink, whose gradient is stored in it."""
    dtype = np.asarray(array).dtype
    if dtype.name not in DTYPES:
        return precision.output
    return Rounding.to(dtype)


def forward_bound(
    q: Any,
    k: Any,
    v: Any,
    *,
    precision: Precision,
    block_kv: int = BLOCK_KV,
    splits: int = 1,
    **options: Any,
) -> ForwardBound:
    """Bound what a kernel may return for `cupyflash.attention`.

    Parameters
    ----------
    q, k, v : array_like
        Queries, keys and values.
    precision : Precision
        The kernel's arithmetic, for example ``Precision.of(q.dtype)``.
    block_kv : int
        Keys per tile; a smaller number gives a looser bound. Default: 64.
    splits : int
        Number of parts into which the keys are split; they are combined by their LSE.
    **options
        `mask`, `score_mod`, `bias`, `sink`, `scale`, `dropout`, `seed` as in `attention`. Score
        changes need ``evaluate_with_error``.

    Returns
    -------
    ForwardBound
        Exact values and bounds, shaped like the results.
    """
    lead, f = naive.forward_dense(q, k, v, dtype=precision.reference_dtype, **options)
    e = _forward(f, options, precision, block_kv, splits)

    def bounded(exact: Any, bound: Any) -> Bounded:
        shape = exact.shape[2:] if lead.flat else lead.axes + exact.shape[1:]
        return Bounded(exact.reshape(shape), safe(bound, precision).reshape(shape))

    ill = int(e.ill_conditioned.sum())
    return ForwardBound(bounded(f.out, e.out), bounded(f.lse, e.lse), ill)


def backward_bound(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    precision: Precision,
    block_kv: int = BLOCK_KV,
    splits: int = 1,
    **options: Any,
) -> BackwardBound:
    """Bound what a kernel may return for `cupyflash.attention_backward`.

    Parameters
    ----------
    do : array_like
        Gradient of the output.
    q, k, v : array_like
        Queries, keys and values.
    dlse : array_like or None
        Gradient of the LSE.
    precision : Precision
        The kernel's arithmetic.
    block_kv, splits : int
        As in `forward_bound`.
    **options
        As in `forward_bound`. The output and LSE given to the backward are taken to be the forward
        kernel's.

    Returns
    -------
    BackwardBound
        Exact values and bounds, shaped like the results; delta like the LSE.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    dtype = precision.reference_dtype
    lead, f = naive.forward_dense(q, k, v, dtype=dtype, **options)
    e = _forward(f, options, precision, block_kv, splits)
    do = np.asarray(do).astype(dtype).reshape(f.out.shape)
    dlse = None if dlse is None else np.asarray(dlse).astype(dtype).reshape(f.lse.shape)
    g = naive_formulas.backward_block(f, do, dlse)
    r = backward_errors(f, g, e, precision, with_dlse=dlse is not None)
    bias, sink = options.get("bias"), options.get("sink")

    def summed(terms: Terms, shape: tuple[int, ...], rounding: Rounding) -> Bounded:
        return bounded_sum(reduced(terms, lead, shape), precision, rounding)

    dbias = dsink = None
    if bias is not None:
        dbias = summed(r.dbias, np.shape(bias), rounding_of(bias, precision))
    if r.dsink is not None:
        dsink = _sink([r], rounding_of(sink, precision), precision)
    shape = g.delta.shape[2:] if lead.flat else lead.axes + g.delta.shape[1:]
    return BackwardBound(
        summed(r.dq, q.shape, precision.output),
        summed(r.dk, k.shape, precision.output),
        summed(r.dv, v.shape, precision.output),
        dbias,
        dsink,
        Bounded(g.delta.reshape(shape), safe(r.delta, precision).reshape(shape)),
        int(e.ill_conditioned.sum()),
    )


def _sink(parts: list[BackwardErrors], rounding: Rounding, precision: Precision) -> Bounded:
    """Sum the sink's gradient over batch entries and sequences."""
    terms = [x.dsink for x in parts if x.dsink is not None]
    columns = (np.concatenate(x, axis=0).sum(axis=0) for x in zip(*terms, strict=True))
    return bounded_sum(Terms(*columns), precision, rounding)


def forward_bound_varlen(
    q: Any,
    k: Any,
    v: Any,
    offsets_q: Any,
    offsets_k: Any,
    *,
    precision: Precision,
    block_kv: int = BLOCK_KV,
    splits: int = 1,
    **options: Any,
) -> ForwardBound:
    """Bound what a kernel may return for `cupyflash.attention_varlen`.

    Parameters
    ----------
    q, k, v, offsets_q, offsets_k : array_like
        Packed arrays and the offsets of their sequences.
    precision : Precision
        The kernel's arithmetic.
    block_kv, splits : int
        As in `forward_bound`.
    **options
        As in `forward_bound`.

    Returns
    -------
    ForwardBound
        Exact values and bounds, packed like the results.
    """
    q, v = np.asarray(q), np.asarray(v)
    dtype = precision.reference_dtype
    out, out_bound = (np.zeros((*q.shape[:2], v.shape[-1]), t) for t in (dtype, np.float64))
    lse, lse_bound = np.full(q.shape[:2], -np.inf, dtype), np.zeros(q.shape[:2])
    ill = 0
    parts = naive.sequences(q, k, v, offsets_q, offsets_k, options=options, dtype=dtype)
    for rows, _, f in parts:
        e = _forward(f, options, precision, block_kv, splits)
        out[:, rows], out_bound[:, rows] = f.out[0], safe(e.out[0], precision)
        lse[:, rows], lse_bound[:, rows] = f.lse[0], safe(e.lse[0], precision)
        ill += int(e.ill_conditioned.sum())
    return ForwardBound(Bounded(out, out_bound), Bounded(lse, lse_bound), ill)


def backward_bound_varlen(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    offsets_q: Any,
    offsets_k: Any,
    *,
    dlse: Any = None,
    precision: Precision,
    block_kv: int = BLOCK_KV,
    splits: int = 1,
    **options: Any,
) -> BackwardBound:
    """Bound what a kernel may return for `cupyflash.attention_varlen_backward`.

    Parameters
    ----------
    do, q, k, v, offsets_q, offsets_k : array_like
        As the call takes them.
    dlse : array_like or None
        Gradient of the LSE.
    precision : Precision
        The kernel's arithmetic.
    block_kv, splits : int
        As in `forward_bound`.
    **options
        As in `forward_bound`.

    Returns
    -------
    BackwardBound
        Exact values and bounds, packed like the results.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    dtype = precision.reference_dtype
    do = np.asarray(do).astype(dtype)
    bias, sink = options.get("bias"), options.get("sink")
    parts = naive.sequences(q, k, v, offsets_q, offsets_k, options=options, dtype=dtype)
    arrays = {"dq": q, "dk": k, "dv": v}
    exact = {name: np.zeros(x.shape, dtype) for name, x in arrays.items()}
    bounds = {name: np.zeros(x.shape) for name, x in arrays.items()}
    delta, delta_bound = np.zeros(q.shape[:2], dtype), np.zeros(q.shape[:2])
    longest = [max((f.allowed.shape[n] for _, _, f in parts), default=0) for n in (2, 3)]
    full = (len(parts), q.shape[0], *longest)
    dbias = Terms(np.zeros(full, dtype), np.zeros(full), np.zeros(full), np.zeros(full))
    one = naive.Lead((), 1, q.shape[0], False)
    results, ill = [], 0
    for b, (rows_q, rows_k, f) in enumerate(parts):
        e = _forward(f, options, precision, block_kv, splits)
        row_dlse = None if dlse is None else np.asarray(dlse).astype(dtype)[None, :, rows_q]
        g = naive_formulas.backward_block(f, do[None, :, rows_q], row_dlse)
        r = backward_errors(f, g, e, precision, with_dlse=dlse is not None)
        for name, rows, terms in (("dq", rows_q, r.dq), ("dk", rows_k, r.dk), ("dv", rows_k, r.dv)):
            here = exact[name][:, rows]
            x = bounded_sum(reduced(terms, one, here.shape), precision, precision.output)
            exact[name][:, rows], bounds[name][:, rows] = x.exact, x.bound
        delta[:, rows_q], delta_bound[:, rows_q] = g.delta[0], safe(r.delta[0], precision)
        for target, part in zip(dbias, r.dbias, strict=True):
            target[b, :, : f.allowed.shape[2], : f.allowed.shape[3]] = part[0]
        results.append(r)
        ill += int(e.ill_conditioned.sum())
    every = naive.Lead((len(parts),), len(parts), q.shape[0], False)
    bias_bound = sink_bound = None
    if bias is not None:
        terms = reduced(dbias, every, np.shape(bias))
        bias_bound = bounded_sum(terms, precision, rounding_of(bias, precision))
    if sink is not None:
        empty = np.zeros(np.shape(sink))
        sink_bound = Bounded(empty.astype(dtype), empty)
        if results:
            sink_bound = _sink(results, rounding_of(sink, precision), precision)
    dq, dk, dv = (Bounded(exact[name], bounds[name]) for name in arrays)
    return BackwardBound(
        dq,
        dk,
        dv,
        bias_bound,
        sink_bound,
        Bounded(delta, delta_bound),
        ill,
    )
