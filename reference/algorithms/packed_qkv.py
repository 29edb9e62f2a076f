"""Packed QKV: one array (L, 3, H, D), as a projection writes it and FlashAttention's code takes it.

Queries, keys and values of a head are strided views of it: nothing is unpacked by copying. Heads
are independent, and each runs FlashAttention-2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import flash_attention_2
from .hbm import Array, Memory


class Forward(NamedTuple):
    """O, (L, H, D) in the layout of the input, and the log-sum-exp, (H, L)."""

    o: Array
    lse: Array


def unpack(qkv: Array, head: int) -> tuple[Array, Array, Array]:
    """Return views of a head's queries, keys and values, (L, D) each."""
    if qkv.ndim != 4 or qkv.shape[1] != 3:
        raise ValueError(f"packed queries, keys and values are (L, 3, H, D), not {qkv.shape}")
    return qkv[:, 0, head], qkv[:, 1, head], qkv[:, 2, head]


def forward(
    qkv: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 64,
    block_kv: int = 64,
    hbm: Memory | None = None,
) -> Forward:
    """Attention of every head of a packed array."""
    hbm = hbm or Memory()
    length, _, heads, d = qkv.shape
    o, lse = np.empty((length, heads, d), qkv.dtype), np.empty((heads, length), qkv.dtype)
    for h in range(heads):
        made = flash_attention_2.forward(
            *unpack(qkv, h),
            scale=scale,
            causal=causal,
            block_q=block_q,
            block_kv=block_kv,
            hbm=hbm,
        )
        o[:, h], lse[h] = made.o, made.lse
    return Forward(o, lse)
