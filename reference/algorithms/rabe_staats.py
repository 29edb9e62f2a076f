"""Chunked attention: Rabe & Staats 2021, "Self-attention Does Not Need O(n^2) Memory", section 4.

Queries and keys are cut into chunks. Every chunk of keys yields its own sum of values, sum of
weights and maximum, and all of them are put together when the last is there: one copy per chunk of
keys, where FlashAttention keeps a single one up to date. Names and line numbers are those of the
paper's program, Figure 1. Backward (section 5.2), a chunk is checkpointed, line 11 there: what it
computed on the way is forgotten and computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .blocks import blocks, check, default_scale, exponentials, size_of
from .hbm import Array, Memory
from .standard import Gradients


class Forward(NamedTuple):
    """O, and what differentiation keeps of each chunk: (T_c, Lq) maxima and sums of weights."""

    o: Array
    chunk_max: Array
    chunk_weights: Array


def summarize_chunk(hbm: Memory, q_i: Array, k_j: Array, tau: float) -> tuple[Array, Array]:
    """Return the weights exp(s - max) of a chunk and its maxima: lines 12-16.

    The maxima have no derivative: the result does not depend on what is subtracted.
    """
    s = hbm.hold("s", tau * (q_i @ k_j.T))
    m = s.max(axis=1)
    return hbm.hold("s", exponentials(s, m[:, None])), m


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    block_q: int = 1024,
    block_kv: int = 4096,
    hbm: Memory | None = None,
) -> Forward:
    """Attention of one head; the paper's chunk sizes are the defaults. At least one key."""
    check(q, k, v)
    hbm = hbm or Memory()
    tau = default_scale(q, scale)
    n_q, d_v = len(q), v.shape[1]
    chunks = list(blocks(len(k), block_kv))
    if not chunks:
        raise ValueError("there is no chunk of keys to summarize: k has no rows")
    hbm.place(q=q, k=k, v=v)
    hbm.make("o", (n_q, d_v), q.dtype)
    hbm.make("chunk_values", (len(chunks), min(block_q, n_q), d_v), q.dtype)
    hbm.make("chunk_weights", (len(chunks), n_q), q.dtype)
    hbm.make("chunk_max", (len(chunks), n_q), q.dtype)

    for rows in blocks(n_q, block_q):  # lines 54-55
        here = slice(0, size_of(rows))
        q_i = hbm.load("q", rows)
        for j, cols in enumerate(chunks):  # lines 30-31
            k_j, v_j = hbm.load("k", cols), hbm.load("v", cols)
            p, m = summarize_chunk(hbm, q_i, k_j, tau)
            # lines 17-19
            hbm.store("chunk_values", hbm.hold("chunk_values", p @ v_j), j, here)
            hbm.store("chunk_weights", hbm.hold("chunk_weights", p.sum(axis=1)), j, rows)
            hbm.store("chunk_max", hbm.hold("chunk_max", m), j, rows)
        hbm.release()
        # Lines 33-40: bring each chunk to the global maximum, sum, and divide.
        chunk_max = hbm.load("chunk_max", slice(None), rows)
        chunk_weights = hbm.load("chunk_weights", slice(None), rows)
        factors = hbm.hold("chunk_max", exponentials(chunk_max, chunk_max.max(axis=0)))
        all_weights = hbm.hold("all_weights", (factors * chunk_weights).sum(axis=0))
        all_values = hbm.hold("all_values", np.zeros((size_of(rows), d_v), q.dtype))
        for j in range(len(chunks)):
            all_values += factors[j][:, None] * hbm.load("chunk_values", j, here)
        hbm.store("o", all_values / all_weights[:, None], rows)
        hbm.release()
    return Forward(hbm.result("o"), hbm.result("chunk_max"), hbm.result("chunk_weights"))


def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    saved: Forward,
    *,
    scale: float | None = None,
    block_q: int = 1024,
    block_kv: int = 4096,
    hbm: Memory | None = None,
) -> Gradients:
    """Pull gradients back through `forward`, a chunk at a time, with the same chunk sizes.

    O = all_values / all_weights, so d all_values = dO / all_weights and d all_weights =
    -rowsum(dO o O) / all_weights; a chunk's share is its factor times that.
    """
    hbm = hbm or Memory()
    tau = default_scale(q, scale)
    hbm.place(q=q, k=k, v=v, do=do, o=saved.o)
    hbm.place(chunk_max=saved.chunk_max, chunk_weights=saved.chunk_weights)
    hbm.make("dq", q.shape, q.dtype)
    hbm.make("dk", k.shape, q.dtype, 0)
    hbm.make("dv", v.shape, q.dtype, 0)
    for rows in blocks(len(q), block_q):
        q_i, do_i, o_i = (hbm.load(name, rows) for name in ("q", "do", "o"))
        chunk_max = hbm.load("chunk_max", slice(None), rows)
        chunk_weights = hbm.load("chunk_weights", slice(None), rows)
        factors = hbm.hold("chunk_max", exponentials(chunk_max, chunk_max.max(axis=0)))
        all_weights = (factors * chunk_weights).sum(axis=0)
        factors = hbm.hold("chunk_max", factors / all_weights)
        hbm.release("chunk_weights")
        delta = hbm.hold("delta", (do_i * o_i).sum(axis=1))
        hbm.release("o")
        dq_i = hbm.hold("dq", np.zeros_like(q_i))
        for j, cols in enumerate(blocks(len(k), block_kv)):
            k_j, v_j = hbm.load("k", cols), hbm.load("v", cols)
            p, _ = summarize_chunk(hbm, q_i, k_j, tau)  # the checkpoint: computed again
            share = factors[j][:, None]
            hbm.store("dv", hbm.load("dv", cols) + p.T @ (share * do_i), cols)
            ds = hbm.hold("ds", p * share * (do_i @ v_j.T - delta[:, None]))
            dq_i += tau * (ds @ k_j)
            hbm.store("dk", hbm.load("dk", cols) + tau * (ds.T @ q_i), cols)
        hbm.store("dq", dq_i, rows)
        hbm.release()
    return Gradients(hbm.result("dq"), hbm.result("dk"), hbm.result("dv"))
