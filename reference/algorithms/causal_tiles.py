"""Causal tile skipping: FlashAttention-2 (Dao 2023), section 3.1, "Causal masking".

A tile of S whose keys all come after its queries is empty and is skipped; about half of the tiles
are. Only the tiles that the diagonal crosses are masked; the others need no mask. With 32 x 32
square tiles, 528 of 1024 remain: 32 on the diagonal and 496 below it.
"""

from __future__ import annotations

import numpy as np

from .blocks import blocks
from .hbm import Array

EMPTY, PARTIAL, FULL = 0, 1, 2


def classify(rows: slice, cols: slice, offset: int) -> int:
    """Return the class of a tile in which query i sees keys j <= i + offset."""
    any_pair = cols.start <= rows.stop - 1 + offset  # the first key, the last query
    all_pairs = cols.stop - 1 <= rows.start + offset  # the last key, the first query
    return int(any_pair) + int(all_pairs)


def seen(rows: slice, n_k: int, block_kv: int, offset: int | None) -> list[slice]:
    """Return the blocks of keys that queries `rows` do not skip; offset None: all of them."""
    return [
        cols
        for cols in blocks(n_k, block_kv)
        if offset is None or classify(rows, cols, offset) != EMPTY
    ]


def table(n_q: int, n_k: int, block_q: int, block_kv: int) -> Array:
    """Return the class of every tile, (T_r, T_c), of a causal mask aligned at the end."""
    offset = n_k - n_q
    return np.array(
        [
            [classify(rows, cols, offset) for cols in blocks(n_k, block_kv)]
            for rows in blocks(n_q, block_q)
        ],
        np.int64,
    )
