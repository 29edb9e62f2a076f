"""Chunked attention: Rabe & Staats 2021, "Self-attention Does Not Need O(n^2) Memory", section 4.

Queries and keys are cut into chunks. Every chunk of keys yields its own sum of values, sum of
weights and maximum, and all of them are combined at the end: there is one summary per chunk of
keys, where FlashAttention keeps updating a single one. Names and line numbers are those of the
paper's program, Figure 1. In the backward (section 5.2), a chunk is checkpointed (line 11 there):
its intermediate results are forgotten and computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .blocks import blocks, check, default_scale, exponentials, size_of
from .hbm import Array, Memory
from .standard import Gradients


class Forward(NamedTuple):
    """O, and what put the chunks together, which the backward needs: (Lq,) each."""

    o: Array
    global_max: Array
    all_weights: Array


def summarize_chunk(hbm: Memory, q_i: Array, k_j: Array, tau: float) -> tuple[Array, Array]:
    """Return the weights exp(s - max) of a chunk and its maxima: lines 12-16.

    The maxima have no derivative: the result does not depend on what is subtracted.
    """
    s = hbm.hold("s", tau * (q_i @ k_j.T))
    m = hbm.hold("chunk_max", s.max(axis=1))
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
    for name, shape in (("o", (n_q, d_v)), ("global_max", (n_q,)), ("all_weights", (n_q,))):
        hbm.make(name, shape, q.dtype)
    most = min(block_q, n_q)  # summaries are of one chunk of queries at a time
    hbm.make("chunk_values", (len(chunks), most, d_v), q.dtype)
    hbm.make("chunk_weights", (len(chunks), most), q.dtype)
    hbm.make("chunk_max", (len(chunks), most), q.dtype)

    for rows in blocks(n_q, block_q):  # lines 54-55
        here = slice(0, size_of(rows))
        q_i = hbm.load("q", rows)
        for j, cols in enumerate(chunks):  # lines 30-31
            k_j, v_j = hbm.load("k", cols), hbm.load("v", cols)
            p, m = summarize_chunk(hbm, q_i, k_j, tau)
            hbm.store("chunk_values", hbm.hold("chunk_values", p @ v_j), j, here)  # lines 17-19
            hbm.store("chunk_weights", hbm.hold("chunk_weights", p.sum(axis=1)), j, here)
            hbm.store("chunk_max", m, j, here)
        hbm.release()
        # Lines 33-40: bring each chunk to the global maximum, sum, and divide.
        chunk_max = hbm.load("chunk_max", slice(None), here)
        chunk_weights = hbm.load("chunk_weights", slice(None), here)
        global_max = hbm.hold("global_max", chunk_max.max(axis=0))
        factors = hbm.hold("chunk_max", exponentials(chunk_max, global_max))
        all_weights = hbm.hold("all_weights", (factors * chunk_weights).sum(axis=0))
        all_values = hbm.hold("all_values", np.zeros((size_of(rows), d_v), q.dtype))
        for j in range(len(chunks)):
            all_values += factors[j][:, None] * hbm.load("chunk_values", j, here)
        hbm.store("o", all_values / all_weights[:, None], rows)
        hbm.store("global_max", global_max, rows)
        hbm.store("all_weights", all_weights, rows)
        hbm.release()
    return Forward(*(hbm.result(name) for name in Forward._fields))


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
    """Pull gradients back through `forward`, one chunk at a time.

    O = all_values / all_weights, so d all_values = dO / all_weights and d all_weights =
    -rowsum(dO o O) / all_weights; a chunk's share is its factor times that. Automatic
    differentiation would also keep each chunk's maximum; here it is computed again.
    """
    check(q, k, v, do)
    hbm = hbm or Memory()
    tau = default_scale(q, scale)
    hbm.place(q=q, k=k, v=v, do=do, **saved._asdict())
    hbm.make("dq", q.shape, q.dtype)
    hbm.make("dk", k.shape, q.dtype, 0)
    hbm.make("dv", v.shape, q.dtype, 0)
    for rows in blocks(len(q), block_q):
        q_i, do_i, o_i = (hbm.load(name, rows) for name in ("q", "do", "o"))
        global_max, all_weights = hbm.load("global_max", rows), hbm.load("all_weights", rows)
        delta = hbm.hold("delta", (do_i * o_i).sum(axis=1))
        dq_i = hbm.hold("dq", np.zeros_like(q_i))
        for cols in blocks(len(k), block_kv):
            k_j, v_j = hbm.load("k", cols), hbm.load("v", cols)
            p, m = summarize_chunk(hbm, q_i, k_j, tau)  # the checkpoint: computed again
            share = (exponentials(m, global_max) / all_weights)[:, None]
            hbm.store("dv", hbm.load("dv", cols) + p.T @ (share * do_i), cols)
            ds = hbm.hold("ds", p * share * (do_i @ v_j.T - delta[:, None]))
            dq_i += tau * (ds @ k_j)
            hbm.store("dk", hbm.load("dk", cols) + tau * (ds.T @ q_i), cols)
        hbm.store("dq", dq_i, rows)
        hbm.release()
    return Gradients(hbm.result("dq"), hbm.result("dk"), hbm.result("dv"))
