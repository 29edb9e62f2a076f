"""FlashAttention-3's order of products and softmax: Shah et al. 2024, Algorithm 2.

The softmax of tile j depends only on the product Q K_j^T, and the product P V of tile j - 1 only on
the softmax of tile j - 1. So both products are issued before either is waited for, and the softmax
of tile j runs while the tensor cores multiply. These two stages cost a second tile of scores on
chip. The results are those of FlashAttention-2.

The paper prints the loop as 1 <= j < T_c - 1, which would leave out tile T_c - 1; here, the loop
includes it. Each thread block has one Q_i, and a copy to shared memory is a load from HBM.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .blocks import (
    blocks,
    default_scale,
    divide,
    exponentials,
    log_sum_exp,
    mask_of,
    size_of,
)
from .causal_tiles import seen
from .hbm import Array, Memory


class Forward(NamedTuple):
    """O, the log-sum-exp L, and what happened: (query block, event, key block), in order."""

    o: Array
    lse: Array
    schedule: list[tuple[int, str, int]]


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 64,
    block_kv: int = 64,
    hbm: Memory | None = None,
) -> Forward:
    """Attention of one head in the two-stage order, without causal tiles that hold nothing."""
    hbm = hbm or Memory()
    tau, mask = default_scale(q, scale), mask_of(q, k, v, causal, None)
    n_q, d_v = len(q), v.shape[1]
    hbm.place(q=q, k=k, v=v)
    hbm.make("o", (n_q, d_v), q.dtype)
    hbm.make("lse", (n_q,), q.dtype)
    schedule: list[tuple[int, str, int]] = []

    for i, rows in enumerate(blocks(n_q, block_q)):
        tiles = seen(rows, len(k), block_kv, mask.offset)
        o_i = hbm.hold("o", np.zeros((size_of(rows), d_v), q.dtype))  # line 2
        l_i = hbm.hold("l", np.zeros(size_of(rows), q.dtype))
        m_i = hbm.hold("m", np.full(size_of(rows), -np.inf, q.dtype))
        if tiles:
            q_i, k_0 = hbm.load("q", rows), hbm.load("k", tiles[0])  # line 3
            schedule += [(i, "issue q k", 0), (i, "wait q k", 0)]
            cur = hbm.hold("s_cur", mask.apply(tau * (q_i @ k_0.T), rows, tiles[0], None))  # line 4
            hbm.release("k")  # line 5
            schedule.append((i, "softmax", 0))
            m_i = hbm.hold("m", cur.max(axis=1))  # line 6: nothing to rescale yet
            cur = hbm.hold("s_cur", exponentials(cur, m_i[:, None]))
            l_i = hbm.hold("l", cur.sum(axis=1))
        for j in range(1, len(tiles)):  # line 7
            k_j = hbm.load("k", tiles[j])  # line 8
            schedule.append((i, "issue q k", j))
            following = mask.apply(tau * (q_i @ k_j.T), rows, tiles[j], None)  # line 9
            hbm.hold("s_next", following)
            v_before = hbm.load("v", tiles[j - 1])  # line 10
            schedule.append((i, "issue p v", j - 1))
            o_i = hbm.hold("o", o_i + cur @ v_before)  # line 11
            schedule += [(i, "wait q k", j), (i, "softmax", j)]  # line 12
            m_old = hbm.hold("m_old", m_i)  # line 13
            m_i = hbm.hold("m", np.maximum(m_old, following.max(axis=1)))
            following = hbm.hold("s_next", exponentials(following, m_i[:, None]))
            l_i = hbm.hold("l", exponentials(m_old, m_i) * l_i + following.sum(axis=1))
            schedule.append((i, "wait p v", j - 1))
            o_i = hbm.hold("o", exponentials(m_old, m_i)[:, None] * o_i)  # line 14
            hbm.release("k", "v", "m_old")  # line 15
            cur = hbm.hold("s_cur", following)  # line 16
            hbm.release("s_next")
        if tiles:
            last = len(tiles) - 1
            v_last = hbm.load("v", tiles[last])  # line 18
            schedule += [(i, "issue p v", last), (i, "wait p v", last)]
            o_i = hbm.hold("o", o_i + cur @ v_last)  # line 19
        hbm.store("o", divide(o_i, l_i), rows)  # line 20
        hbm.store("lse", hbm.hold("m", log_sum_exp(m_i, l_i)), rows)
        hbm.release()
    return Forward(hbm.result("o"), hbm.result("lse"), schedule)
