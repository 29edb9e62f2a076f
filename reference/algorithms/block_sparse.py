"""Block-sparse FlashAttention: Dao, Fu, Ermon, Rudra, Re 2022, Algorithm 5.

This is Algorithm 2, but it skips the blocks of S that a mask of blocks declares to be zero. So the
traffic of Q, O, l and m shrinks with the fraction of other blocks (Proposition 4). K_j and V_j are
loaded, as in the paper, even if the whole column of blocks is zero.
"""

from __future__ import annotations

from .blocks import blocks, default_scale, dropout_of, mask_of
from .flash_attention import Forward, begin, end, load_keys, update
from .hbm import Array, Memory


def forward(
    q: Array,
    k: Array,
    v: Array,
    layout: Array,
    *,
    block_q: int,
    block_kv: int,
    scale: float | None = None,
    causal: bool = False,
    padding: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    hbm: Memory | None = None,
) -> Forward:
    """Attention of one head over the blocks that `layout`, (T_r, T_c) bool, holds True for."""
    hbm = hbm or Memory()
    tau, mask, drop = (
        default_scale(q, scale),
        mask_of(q, k, v, causal, padding),
        dropout_of(dropout, seed),
    )
    wanted = (-(-len(q) // block_q), -(-len(k) // block_kv))
    if layout.shape != wanted:
        raise ValueError(f"the layout has an entry per block, {wanted}, not {layout.shape}")
    begin(hbm, q, k, v, padding, drop)  # lines 1, 2
    hbm.place(layout=layout)
    for j, cols in enumerate(blocks(len(k), block_kv)):  # lines 3-5
        keys = load_keys(hbm, cols, mask)  # line 6
        for i, rows in enumerate(blocks(len(q), block_q)):  # line 7
            if hbm.load("layout", slice(i, i + 1), j).any():  # line 8
                update(hbm, rows, cols, keys, tau, mask, drop)  # lines 9-16
    return end(hbm, drop)  # line 20
