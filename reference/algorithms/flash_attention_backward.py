"""FlashAttention, backward: Dao, Fu, Ermon, Rudra, Re 2022, Algorithm 4.

P is computed again from Q, K, l and m, and the dropout mask Z from the generator's state, so the
forward keeps only O(N) numbers, and no array of N^2 elements is ever in HBM.
"""

from __future__ import annotations

import numpy as np

from .blocks import (
    Dropout,
    Tiles,
    blocks,
    check,
    default_scale,
    divide,
    dropout_of,
    exponentials,
    mask_of,
    size_of,
    tiles_for,
)
from .flash_attention import Forward, load_keys
from .hbm import Array, Memory
from .standard import Gradients


def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    saved: Forward,
    *,
    scale: float | None = None,
    causal: bool = False,
    padding: Array | None = None,
    dropout: float = 0.0,
    block_q: int = 64,
    block_kv: int = 64,
    sram: int | None = None,
    hbm: Memory | None = None,
) -> Gradients:
    """Gradients from what `flash_attention.forward` returned, with the same options."""
    check(q, k, v, do)
    hbm = hbm or Memory()
    tau, mask = default_scale(q, scale), mask_of(q, k, v, causal, padding)
    (n_q, d), (n_k, d_v) = q.shape, v.shape
    hbm.place(q=q, k=k, v=v, o=saved.o, do=do, l=saved.l, m=saved.m)
    if padding is not None:
        hbm.place(padding=padding)
    drop = Dropout()
    if (dropout > 0) != (saved.rng is not None):
        had = "no dropout, so no state of a generator" if saved.rng is None else "dropout"
        raise ValueError(f"the forward had {had}, and the backward has dropout={dropout}")
    if dropout:  # line 1
        hbm.place(rng=np.array(saved.rng, np.uint64))
        drop = dropout_of(dropout, int(hbm.load("rng")))
    tiles = tiles_for(sram, d) if sram is not None else Tiles(block_q, block_kv)  # line 2
    hbm.make("dq", (n_q, d), q.dtype, 0)  # line 5
    hbm.make("dk", (n_k, d), q.dtype, 0)
    hbm.make("dv", (n_k, d_v), q.dtype, 0)
    for cols in blocks(n_k, tiles.block_kv):  # lines 3, 4, 6
        k_j, v_j, padding_j = load_keys(hbm, cols, mask)  # line 7
        dk_j = hbm.hold("dk", np.zeros((size_of(cols), d), q.dtype))  # line 8
        dv_j = hbm.hold("dv", np.zeros((size_of(cols), d_v), q.dtype))
        for rows in blocks(n_q, tiles.block_q):  # line 9
            q_i, o_i, do_i = (hbm.load(name, rows) for name in ("q", "o", "do"))  # line 10
            dq_i, l_i, m_i = (hbm.load(name, rows) for name in ("dq", "l", "m"))
            s_ij = hbm.hold("s", tau * (q_i @ k_j.T))  # line 11
            s_ij = hbm.hold("s", mask.apply(s_ij, rows, cols, padding_j))  # line 12
            p_ij = hbm.hold("s", divide(exponentials(s_ij, m_i[:, None]), l_i))  # line 13
            z_ij = drop.factors(rows, cols, p_ij)  # line 14
            if drop.p:
                hbm.hold("z", z_ij)
            dv_j += (p_ij * z_ij).T @ do_i  # lines 15, 16
            dp_ij = hbm.hold("dp", do_i @ v_j.T)  # line 17
            dp_ij = hbm.hold("dp", dp_ij * z_ij)  # line 18
            delta_i = hbm.hold("delta", (do_i * o_i).sum(axis=1))  # line 19
            ds_ij = hbm.hold("dp", p_ij * (dp_ij - delta_i[:, None]))  # line 20
            hbm.store("dq", dq_i + tau * (ds_ij @ k_j), rows)  # line 21
            dk_j += tau * (ds_ij.T @ q_i)  # line 22
        hbm.store("dk", dk_j, cols)  # line 24
        hbm.store("dv", dv_j, cols)
    hbm.release()
    return Gradients(hbm.result("dq"), hbm.result("dk"), hbm.result("dv"))  # line 26
