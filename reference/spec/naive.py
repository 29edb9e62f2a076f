"""The specification's public calls, which handle shapes for the formulas of `naive_formulas`.

`attention` and `attention_backward` follow `numpy.matmul`: leading axes broadcast, two-dimensional
arrays are one head, query heads share key heads in groups of Hq / Hkv, and the gradient of an array
that was broadcast or shared is a sum. The variable-length calls run the same formulas once per
sequence. Nothing here is tiled, and nothing is rounded to the type of the inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .naive_formulas import (
    Array,
    Backward,
    Forward,
    Sizes,
    backward_block,
    forward_block,
)

__all__ = [
    "Backward",
    "Forward",
    "Gradients",
    "Lead",
    "Naive",
    "Sizes",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "forward_dense",
    "sequences",
    "sum_to_shape",
]


class Naive(NamedTuple):
    """Output of the specification, in its computing type.

    Parameters
    ----------
    out : ndarray, shape (..., Hq, Lq, Dv)
        O.
    lse : ndarray, shape (..., Hq, Lq)
        Natural logarithm of the row sums, before dropout, with the sink.
    probs : ndarray, shape (..., Hq, Lq, Lk), or None
        P before dropout, if asked for.
    """

    out: Array
    lse: Array
    probs: Array | None


class Gradients(NamedTuple):
    """Gradients, each of its input's shape.

    Parameters
    ----------
    dq, dk, dv : ndarray
        Shaped like q, k and v.
    dbias, dsink : ndarray or None
        Shaped like the bias and the sink; None if there was none.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsink: Array | None


class Lead(NamedTuple):
    """How the leading axes of q, k and v broadcast.

    Parameters
    ----------
    axes : tuple of int
        The broadcast leading axes.
    batch : int
        Their product B.
    heads : int
        Query heads Hq.
    flat : bool
        Whether all three arrays are two-dimensional; then results are, too.
    """

    axes: tuple[int, ...]
    batch: int
    heads: int
    flat: bool


def with_heads(x: Array) -> Array:
    """Give a two-dimensional array its head axis; others are returned as they are."""
    return x[None] if x.ndim == 2 else x


def lead_of(q: Array, k: Array, v: Array) -> Lead:
    """Read the leading axes and heads off the shapes, as `numpy.matmul` would."""
    flat = q.ndim == k.ndim == v.ndim == 2
    q, k, v = with_heads(q), with_heads(k), with_heads(v)
    if k.shape[-3] != v.shape[-3] or (k.shape[-3] and q.shape[-3] % k.shape[-3]):
        raise ValueError(f"heads of q, k, v do not match: {q.shape}, {k.shape}, {v.shape}")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"shapes of q, k, v do not match: {q.shape}, {k.shape}, {v.shape}")
    axes = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return Lead(axes, int(np.prod(axes, dtype=np.int64)), q.shape[-3], flat)


def per_query_head(x: Array, lead: Lead, dtype: Any) -> Array:
    """Broadcast leading axes and repeat shared heads: (..., H, L, D) becomes (B, Hq, L, D)."""
    x = with_heads(x).astype(dtype)
    x = np.broadcast_to(x, lead.axes + x.shape[-3:]).reshape((lead.batch, *x.shape[-3:]))
    heads = x.shape[1]
    return np.repeat(x, lead.heads // heads if heads else 1, axis=1)


def sum_to_shape(gradient: Array, lead: Lead, shape: tuple[int, ...]) -> Array:
    """Sum (B, Hq, ...) over all axes along which an array of `shape` was broadcast or repeated.

    The heads that share a key or value head are neighbours, so they are summed first.
    """
    full = shape if len(shape) > 2 else (1,) * (3 - len(shape)) + shape
    gradient = gradient.reshape(lead.axes + gradient.shape[1:])
    axis = len(lead.axes)
    if full[-3] not in (1, lead.heads):
        split = (full[-3], lead.heads // full[-3])
        gradient = gradient.reshape(gradient.shape[:axis] + split + gradient.shape[axis + 1 :])
        gradient = gradient.sum(axis + 1)
    while gradient.ndim > len(full):
        gradient = gradient.sum(0)
    for n, size in enumerate(full):
        if size == 1:
            gradient = gradient.sum(n, keepdims=True)
    return gradient.reshape(shape)


def forward_dense(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    dtype: Any = np.float64,
) -> tuple[Lead, Forward]:
    """Run `attention` and return everything it materialises; the arguments are the same."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    lead = lead_of(q, k, v)
    shape = (lead.batch, lead.heads, q.shape[-2], k.shape[-2])
    full = lead.axes + shape[1:]
    sizes = Sizes(lead.axes, *shape[1:])
    b, h, i, j = np.ogrid[: shape[0], : shape[1], : shape[2], : shape[3]]
    if mask is not None and not hasattr(mask, "evaluate"):
        mask = np.broadcast_to(np.asarray(mask), full).reshape(shape)
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias).astype(dtype), full).reshape(shape)
    if sink is not None:
        sink = np.asarray(sink).astype(dtype).reshape(1, lead.heads, 1)
    query, key, value = (per_query_head(x, lead, dtype) for x in (q, k, v))
    return lead, forward_block(
        query, key, value, (b, h, i, j), sizes, mask=mask, score_mod=score_mod, bias=bias,
        sink=sink, scale=scale, dropout=dropout, seed=seed,
    )  # fmt: skip


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    dtype: Any = np.float64,
    return_probs: bool = False,
) -> Naive:
    """Compute exact attention with all scores in memory.

    Parameters
    ----------
    q : array_like, shape (..., Hq, Lq, D) or (Lq, D)
        Queries.
    k, v : array_like, shape (..., Hkv, Lk, D) and (..., Hkv, Lk, Dv), or two-dimensional
        Keys and values; ``Hq % Hkv == 0``. Leading axes broadcast.
    mask : object with ``evaluate(b, h, i, j, sizes)``, bool array, or None
        True = attend. An array broadcasts to (..., Hq, Lq, Lk).
    score_mod : object with ``evaluate(s, b, h, i, j, sizes) -> (t, dt_ds)``, sequence, or None
        Score changes, applied in order.
    bias : array_like, broadcastable to (..., Hq, Lq, Lk), or None
        Added to the logits after the score changes. -inf means masked.
    sink : array_like, shape (Hq,), or None
        Logit of one extra key of value 0.
    scale : float, optional
        Factor of q·k; 1/sqrt(D) by default.
    dropout : float
        Probability that a pair is dropped from the output.
    seed : int, optional
        64-bit seed of the dropout.
    dtype : type
        Computing type: ``numpy.float64`` or ``numpy.longdouble``.
    return_probs : bool
        Whether to return P.

    Returns
    -------
    Naive
        `out`, `lse` and `probs` in `dtype`, never rounded to the type of the inputs.
    """
    lead, f = forward_dense(
        q, k, v, mask=mask, score_mod=score_mod, bias=bias, sink=sink, scale=scale,
        dropout=dropout, seed=seed, dtype=dtype,
    )  # fmt: skip

    def shaped(x: Array) -> Array:
        return x.reshape(x.shape[2:] if lead.flat else lead.axes + x.shape[1:])

    return Naive(shaped(f.out), shaped(f.lse), shaped(f.probs) if return_probs else None)


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    mask: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    dtype: Any = np.float64,
) -> Gradients:
    """Differentiate `attention` by the plain formulas.

    Parameters
    ----------
    do : array_like, shaped like the output
        Gradient of the output.
    q, k, v : array_like
        As in `attention`.
    dlse : array_like, shaped like the LSE, or None
        Gradient of the LSE.
    mask, score_mod, bias, sink : optional
        As in `attention`.
    scale, dropout, seed, dtype : optional
        As in `attention`.

    Returns
    -------
    Gradients
        Gradients in `dtype`, each with its input's shape, summed over the axes along which that
        input was broadcast and over the query heads that share a key head.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    lead, f = forward_dense(
        q, k, v, mask=mask, score_mod=score_mod, bias=bias, sink=sink, scale=scale,
        dropout=dropout, seed=seed, dtype=dtype,
    )  # fmt: skip
    do = np.asarray(do).astype(dtype).reshape(f.out.shape)
    dlse = None if dlse is None else np.asarray(dlse).astype(dtype).reshape(f.lse.shape)
    g = backward_block(f, do, dlse)
    return Gradients(
        sum_to_shape(g.dq, lead, q.shape),
        sum_to_shape(g.dk, lead, k.shape),
        sum_to_shape(g.dv, lead, v.shape),
        None if bias is None else sum_to_shape(g.dlogits, lead, np.shape(bias)),
        None if g.dsink is None else g.dsink.sum(axis=0),
    )


def sequences(
    q: Any, k: Any, v: Any, offsets_q: Any, offsets_k: Any, *, options: dict[str, Any], dtype: Any
) -> list[tuple[slice, slice, Forward]]:
    """Run the forward pass of each packed sequence: its rows in q, in k and v, and its result."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    lead = Lead((1,), 1, q.shape[0], False)
    starts_q, starts_k = np.asarray(offsets_q, np.int64), np.asarray(offsets_k, np.int64)
    lengths_q, lengths_k = np.diff(starts_q), np.diff(starts_k)
    n = len(lengths_q)
    full = (n, lead.heads, int(lengths_q.max(initial=0)), int(lengths_k.max(initial=0)))
    mask, bias, sink = options.get("mask"), options.get("bias"), options.get("sink")
    if mask is not None and not hasattr(mask, "evaluate"):
        mask = np.broadcast_to(np.asarray(mask), full)
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias).astype(dtype), full)
    if sink is not None:
        sink = np.asarray(sink).astype(dtype).reshape(1, lead.heads, 1)
    result = []
    for s in range(n):
        rows_q = slice(int(starts_q[s]), int(starts_q[s + 1]))
        rows_k = slice(int(starts_k[s]), int(starts_k[s + 1]))
        len_q, len_k = int(lengths_q[s]), int(lengths_k[s])
        _, h, i, j = np.ogrid[0:1, 0 : lead.heads, 0:len_q, 0:len_k]
        b = np.full((1, 1, 1, 1), s, np.int64)  # arrays of b's shape, as in a batched call
        sizes = Sizes((n,), lead.heads, b * 0 + len_q, b * 0 + len_k, b * 0 + rows_q.start,
                      b * 0 + rows_k.start)  # fmt: skip
        here = (slice(s, s + 1), slice(None), slice(0, len_q), slice(0, len_k))
        parts = (q[None, :, rows_q], k[None, :, rows_k], v[None, :, rows_k])
        query, key, value = (per_query_head(x, lead, dtype) for x in parts)
        f = forward_block(
            query, key, value, (b, h, i, j), sizes, sink=sink,
            mask=mask[here] if isinstance(mask, np.ndarray) else mask,
            bias=None if bias is None else bias[here],
            score_mod=options.get("score_mod"), scale=options.get("scale"),
            dropout=options.get("dropout", 0.0), seed=options.get("seed"),
        )  # fmt: skip
        result.append((rows_q, rows_k, f))
    return result


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    offsets_q: Any,
    offsets_k: Any,
    *,
    dtype: Any = np.float64,
    **options: Any,
) -> Naive:
    """Run `attention` on each of n packed sequences.

    Parameters
    ----------
    q, k, v : array_like, shape (Hq, total_q, D), (Hkv, total_k, D), (Hkv, total_k, Dv)
        Packed sequences.
    offsets_q, offsets_k : array_like of int, shape (n + 1,)
        Sequence b has the rows ``offsets[b]`` to ``offsets[b + 1]``; b is its batch index, and i, j
        count from its first row.
    dtype : type
        Computing type.
    **options
        `mask`, `score_mod`, `bias`, `sink`, `scale`, `dropout`, `seed` as in `attention`; arrays
        broadcast to (n, Hq, max Lq, max Lk).

    Returns
    -------
    Naive
        `out` (Hq, total_q, Dv), `lse` (Hq, total_q); `probs` is None.
    """
    q, v = np.asarray(q), np.asarray(v)
    out = np.zeros((*q.shape[:2], v.shape[-1]), dtype)
    lse = np.full(q.shape[:2], -np.inf, dtype)
    for rows_q, _, f in sequences(q, k, v, offsets_q, offsets_k, options=options, dtype=dtype):
        out[:, rows_q] = f.out[0]
        lse[:, rows_q] = f.lse[0]
    return Naive(out, lse, None)


def attention_varlen_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    offsets_q: Any,
    offsets_k: Any,
    *,
    dlse: Any = None,
    dtype: Any = np.float64,
    **options: Any,
) -> Gradients:
    """Differentiate `attention_varlen`.

    Parameters
    ----------
    do : array_like, shape (Hq, total_q, Dv)
        Gradient of the output.
    q, k, v, offsets_q, offsets_k : array_like
        As in `attention_varlen`.
    dlse : array_like, shape (Hq, total_q), or None
        Gradient of the LSE.
    dtype : type
        Computing type.
    **options
        As in `attention_varlen`.

    Returns
    -------
    Gradients
        Gradients packed like the inputs; `dbias` and `dsink` are summed over the sequences that
        share them.
    """
    q, k, v, do = np.asarray(q), np.asarray(k), np.asarray(v), np.asarray(do).astype(dtype)
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (q, k, v))
    parts = sequences(q, k, v, offsets_q, offsets_k, options=options, dtype=dtype)
    bias, sink = options.get("bias"), options.get("sink")
    longest_q = max((f.q.shape[2] for _, _, f in parts), default=0)
    longest_k = max((f.k.shape[2] for _, _, f in parts), default=0)
    dlogits = np.zeros((len(parts), q.shape[0], longest_q, longest_k), dtype)
    dsink = np.zeros(q.shape[0], dtype)
    one = Lead((), 1, q.shape[0], False)
    for b, (rows_q, rows_k, f) in enumerate(parts):
        row_dlse = None if dlse is None else np.asarray(dlse).astype(dtype)[None, :, rows_q]
        g = backward_block(f, do[None, :, rows_q], row_dlse)
        dq[:, rows_q] = g.dq[0]
        dk[:, rows_k] = sum_to_shape(g.dk, one, dk[:, rows_k].shape)
        dv[:, rows_k] = sum_to_shape(g.dv, one, dv[:, rows_k].shape)
        dlogits[b, :, : f.q.shape[2], : f.k.shape[2]] = g.dlogits[0]
        dsink += 0 if g.dsink is None else g.dsink[0]
    all_sequences = Lead((len(parts),), len(parts), q.shape[0], False)
    return Gradients(
        dq,
        dk,
        dv,
        None if bias is None else sum_to_shape(dlogits, all_sequences, np.shape(bias)),
        None if sink is None else dsink,
    )
