"""FlashAttention, forward: Dao, Fu, Ermon, Rudra, Re 2022, Algorithms 1 and 2.

Keys and values are in the outer loop: each of their blocks is read once, and Q, O, l and m are
streamed once for every block. O in HBM is normalised after every block. Line numbers are those of
Algorithm 2 (Appendix B.3); Algorithm 1 is the same without scale, mask and dropout (scale=1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .blocks import (
    Dropout,
    Mask,
    Tiles,
    blocks,
    default_scale,
    dropout_of,
    exponentials,
    mask_of,
    tiles_for,
)
from .hbm import Array, Memory


class Forward(NamedTuple):
    """What Algorithm 2 returns: O, l, m, and the generator's state R, which is the seed."""

    o: Array
    l: Array
    m: Array
    rng: int | None


def begin(hbm: Memory, q: Array, k: Array, v: Array, padding: Array | None, drop: Dropout) -> None:
    """Place the inputs, save the generator's state, and write O = 0, l = 0, m = -inf."""
    hbm.place(q=q, k=k, v=v)
    if padding is not None:
        hbm.place(padding=padding)
    if drop.p:  # line 1
        hbm.make("rng", (), np.uint64, drop.seed)
        hbm.reserve("rng", 1)
    hbm.make("o", (len(q), v.shape[1]), q.dtype, 0)  # line 3
    hbm.make("l", (len(q),), q.dtype, 0)
    hbm.make("m", (len(q),), q.dtype, -np.inf)


def load_keys(hbm: Memory, cols: slice, mask: Mask) -> tuple[Array, Array, Array | None]:
    """Line 7: load K_j, V_j, and with them the padding mask of their keys."""
    k_j, v_j = hbm.load("k", cols), hbm.load("v", cols)
    return k_j, v_j, hbm.load("padding", cols) if mask.padded else None


def update(
    hbm: Memory,
    rows: slice,
    cols: slice,
    keys: tuple[Array, Array, Array | None],
    tau: float,
    mask: Mask,
    drop: Dropout,
) -> None:
    """Lines 9 to 16: bring O_i, l_i and m_i to what they are with block j seen, too."""
    k_j, v_j, padding_j = keys
    q_i, o_i = hbm.load("q", rows), hbm.load("o", rows)  # line 9
    l_i, m_i = hbm.load("l", rows), hbm.load("m", rows)
    s_ij = hbm.hold("s", tau * (q_i @ k_j.T))  # line 10
    s_ij = hbm.hold("s", mask.apply(s_ij, rows, cols, padding_j))  # line 11
    m_ij = hbm.hold("m_ij", s_ij.max(axis=1))  # line 12
    p_ij = hbm.hold("s", exponentials(s_ij, m_ij[:, None]))
    l_ij = hbm.hold("l_ij", p_ij.sum(axis=1))
    m_new = hbm.hold("m_new", np.maximum(m_i, m_ij))  # line 13
    old, new = exponentials(m_i, m_new), exponentials(m_ij, m_new)
    l_new = hbm.hold("l_new", old * l_i + new * l_ij)
    p_ij = hbm.hold("s", p_ij * drop.factors(rows, cols, p_ij))  # line 14
    total = (l_i * old)[:, None] * o_i + new[:, None] * (p_ij @ v_j)  # line 15
    inverse = 1 / np.where(l_new == 0, 1, l_new).astype(l_new.dtype)
    hbm.store("o", inverse[:, None] * total, rows)
    hbm.store("l", l_new, rows)  # line 16
    hbm.store("m", m_new, rows)
    hbm.release("q", "o", "l", "m", "s", "m_ij", "l_ij", "m_new", "l_new")


def end(hbm: Memory, drop: Dropout) -> Forward:
    """Return O, l, m, R."""
    hbm.release()
    return Forward(hbm.result("o"), hbm.result("l"), hbm.result("m"), drop.seed if drop.p else None)


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
    block_q: int = 64,
    block_kv: int = 64,
    sram: int | None = None,
    hbm: Memory | None = None,
) -> Forward:
    """FlashAttention of one head; `sram`, M in elements, sets the blocks if given.

    A causal mask is applied to every tile: none is skipped (see `flash_attention_2`).
    """
    hbm = hbm or Memory()
    tau, mask, drop = (
        default_scale(q, scale),
        mask_of(q, k, v, causal, padding),
        dropout_of(dropout, seed),
    )
    tiles = tiles_for(sram, q.shape[1]) if sram is not None else Tiles(block_q, block_kv)  # line 2
    begin(hbm, q, k, v, padding, drop)  # lines 1, 3
    for cols in blocks(len(k), tiles.block_kv):  # lines 4-6
        keys = load_keys(hbm, cols, mask)  # line 7
        for rows in blocks(len(q), tiles.block_q):  # line 8
            update(hbm, rows, cols, keys, tau, mask, drop)  # lines 9-16
    return end(hbm, drop)  # line 19
