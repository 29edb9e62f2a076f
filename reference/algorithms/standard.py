"""Standard attention: FlashAttention (Dao et al. 2022), Algorithm 0, and Algorithm 3, its backward.

S, P and, in the backward, dP and dS are written to HBM and read again, N^2 elements each time.
Algorithms 0 and 3 leave out scale, mask and dropout; here they are where the equations of the
paper's Appendix B.3 have them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .blocks import (
    blocks,
    check,
    default_scale,
    divide,
    dropout_of,
    exponentials,
    mask_of,
    size_of,
)
from .hbm import Array, Memory


class Forward(NamedTuple):
    """O, and P before dropout, which the backward needs."""

    o: Array
    p: Array


class Gradients(NamedTuple):
    """Gradients by q, k and v."""

    dq: Array
    dk: Array
    dv: Array


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    padding: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    hbm: Memory | None = None,
) -> Forward:
    """Attention of one head with S and P in HBM; blocks None hold whole matrices on chip."""
    hbm = hbm or Memory()
    tau, mask, drop = (
        default_scale(q, scale),
        mask_of(q, k, v, causal, padding),
        dropout_of(dropout, seed),
    )
    n_q, n_k, d_v = len(q), len(k), v.shape[1]
    hbm.place(q=q, k=k, v=v)
    if padding is not None:
        hbm.place(padding=padding)
    for name in ("s", "p"):
        hbm.make(name, (n_q, n_k), q.dtype)
    hbm.make("o", (n_q, d_v), q.dtype)

    # Line 1: load Q, K by blocks, compute S = Q K^T, write S.
    for rows in blocks(n_q, block_q):
        q_i = hbm.load("q", rows)
        for cols in blocks(n_k, block_kv):
            k_j = hbm.load("k", cols)
            padding_j = hbm.load("padding", cols) if mask.padded else None
            s_ij = hbm.hold("s", mask.apply(tau * (q_i @ k_j.T), rows, cols, padding_j))
            hbm.store("s", s_ij, rows, cols)
    hbm.release()

    # Line 2: read S, compute P = softmax(S), write P.
    for row in blocks(n_q, 1):
        s_i = hbm.load("s", row)
        m = hbm.hold("m", s_i.max(axis=1, initial=-np.inf))
        p_i = hbm.hold("s", exponentials(s_i, m[:, None]))
        l = hbm.hold("l", p_i.sum(axis=1))
        hbm.store("p", divide(p_i, l), row)
    hbm.release()

    # Line 3: load P and V by blocks, compute O = P V, write O.
    for rows in blocks(n_q, block_q):
        o_i = hbm.hold("o", np.zeros((size_of(rows), d_v), q.dtype))
        for cols in blocks(n_k, block_kv):
            p_ij, v_j = hbm.load("p", rows, cols), hbm.load("v", cols)
            o_i += (p_ij * drop.factors(rows, cols, p_ij)) @ v_j
        hbm.store("o", o_i, rows)
    hbm.release()
    return Forward(hbm.result("o"), hbm.result("p"))  # line 4


def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    p: Array,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    hbm: Memory | None = None,
) -> Gradients:
    """Gradients from P, which the forward left in HBM, by Algorithm 3."""
    check(q, k, v, do)
    if p.shape != (len(q), len(k)):
        raise ValueError(f"p is {(len(q), len(k))}, not {p.shape}")
    hbm = hbm or Memory()
    tau, drop = default_scale(q, scale), dropout_of(dropout, seed)
    (n_q, d), (n_k, d_v) = q.shape, v.shape
    hbm.place(q=q, k=k, v=v, do=do, p=p)
    for name in ("dp", "ds"):
        hbm.make(name, (n_q, n_k), q.dtype)
    for name, shape in (("dq", (n_q, d)), ("dk", (n_k, d)), ("dv", (n_k, d_v))):
        hbm.make(name, shape, q.dtype)

    # Line 1: load P, dO by blocks, compute dV = P^T dO, write dV.
    for cols in blocks(n_k, block_kv):
        dv_j = hbm.hold("dv", np.zeros((size_of(cols), d_v), q.dtype))
        for rows in blocks(n_q, block_q):
            p_ij, do_i = hbm.load("p", rows, cols), hbm.load("do", rows)
            dv_j += (p_ij * drop.factors(rows, cols, p_ij)).T @ do_i
        hbm.store("dv", dv_j, cols)
    hbm.release()

    # Line 2: load dO, V by blocks, compute dP = dO V^T, write dP.
    for rows in blocks(n_q, block_q):
        do_i = hbm.load("do", rows)
        for cols in blocks(n_k, block_kv):
            v_j = hbm.load("v", cols)
            dp_ij = hbm.hold("dp", (do_i @ v_j.T) * drop.factors(rows, cols, do_i))
            hbm.store("dp", dp_ij, rows, cols)
    hbm.release()

    # Line 3: read P, dP, compute dS_ij = P_ij (dP_ij - sum_l P_il dP_il), write dS.
    for row in blocks(n_q, 1):
        p_i, dp_i = hbm.load("p", row), hbm.load("dp", row)
        delta = hbm.hold("delta", (p_i * dp_i).sum(axis=1))
        hbm.store("ds", p_i * (dp_i - delta[:, None]), row)
    hbm.release()

    # Line 4: load dS and K by blocks, compute dQ = dS K, write dQ.
    for rows in blocks(n_q, block_q):
        dq_i = hbm.hold("dq", np.zeros((size_of(rows), d), q.dtype))
        for cols in blocks(n_k, block_kv):
            ds_ij, k_j = hbm.load("ds", rows, cols), hbm.load("k", cols)
            dq_i += tau * (ds_ij @ k_j)
        hbm.store("dq", dq_i, rows)
    hbm.release()

    # Line 5: load dS and Q by blocks, compute dK = dS^T Q, write dK.
    for cols in blocks(n_k, block_kv):
        dk_j = hbm.hold("dk", np.zeros((size_of(cols), d), q.dtype))
        for rows in blocks(n_q, block_q):
            ds_ij, q_i = hbm.load("ds", rows, cols), hbm.load("q", rows)
            dk_j += tau * (ds_ij.T @ q_i)
        hbm.store("dk", dk_j, cols)
    hbm.release()
    return Gradients(hbm.result("dq"), hbm.result("dk"), hbm.result("dv"))  # line 6
