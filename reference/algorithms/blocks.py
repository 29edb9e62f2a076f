"""What the algorithms share: blocks of rows, masks, dropout, and exponentials of -inf.

The papers leave out queries that may see no key. Here such a row has m = -inf and l = 0, and gives
0 with log-sum-exp -inf: only `exponentials` and `divide` handle this case. No epsilon is ever added
to a row sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..cpu import philox
from .hbm import Array


class Tiles(NamedTuple):
    """Block sizes: rows of Q (B_r) and rows of K and V (B_c)."""

    block_q: int
    block_kv: int


def tiles_for(sram: int, d: int) -> Tiles:
    """B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d): FlashAttention, Algorithm 1, line 1.

    K and V then take M / 2, Q and O up to another M / 2, and S, of B_r x B_c, up to M / 4 more: up
    to 5/4 M in total, rounded up to whole rows. M is `sram`, in elements.
    """
    if sram < 4 * d:
        raise ValueError(
            f"sram: got {sram} elements with d = {d}; expected at least 4 d = {4 * d}, for one row "
            "of each of Q, K, V and O"
        )
    block_kv = -(-sram // (4 * d))
    return Tiles(min(block_kv, d), block_kv)


def blocks(n: int, size: int | None) -> Iterator[slice]:
    """Cut n rows into blocks of `size`, the last one ragged; None is one block of them all."""
    if size is not None and size < 1:
        raise ValueError(f"block: got {size} rows; expected at least one")
    step = max(n, 1) if size is None else size
    for first in range(0, n, step):
        yield slice(first, min(first + step, n))


def size_of(block: slice) -> int:
    """Return the number of rows of a block."""
    return int(block.stop - block.start)


def default_scale(q: Array, scale: float | None) -> Any:
    """Return the factor of the scores, 1/sqrt(D) unless given, in the type of q."""
    return q.dtype.type(1 / math.sqrt(q.shape[-1]) if scale is None else scale)


class Mask(NamedTuple):
    """Which pairs attend.

    Parameters
    ----------
    offset : int or None
        Query i sees keys j <= i + offset; None: all. Lk - Lq lets the last query see every key.
    padded : bool
        Whether there is a key-padding mask in HBM, called "padding", (Lk,) bool, True = attend.
    """

    offset: int | None = None
    padded: bool = False

    def apply(self, s: Array, rows: slice, cols: slice, padding: Array | None) -> Array:
        """Return a tile of scores with -inf where pairs do not attend."""
        if self.offset is not None:
            i, j = np.ogrid[rows, cols]
            s = np.where(j <= i + self.offset, s, -np.inf).astype(s.dtype)
        if padding is not None:
            s = np.where(padding, s, -np.inf).astype(s.dtype)
        return s


def check(q: Array, k: Array, v: Array, do: Array | None = None) -> None:
    """Raise where q, k, v, and do if given, are not one head of floats."""
    shapes = f"{q.shape}, {k.shape}, {v.shape}"
    if not (q.ndim == k.ndim == v.ndim == 2 and q.shape[1] == k.shape[1] and len(k) == len(v)):
        raise ValueError(f"q, k, v of one head are (Lq, D), (Lk, D), (Lk, Dv), not {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in (np.float32, np.float64)):
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(f"q, k, v are all float32 or all float64 here, not {dtypes}")
    if do is not None and (do.shape != (len(q), v.shape[1]) or do.dtype != q.dtype):
        wanted = f"{(len(q), v.shape[1])} {q.dtype}"
        raise ValueError(f"do is shaped like the output, {wanted}, not {do.shape} {do.dtype}")


def mask_of(q: Array, k: Array, v: Array, causal: bool, padding: Array | None) -> Mask:
    """Check a call and return its mask; causal is aligned at the end, as in the whole package."""
    check(q, k, v)
    if padding is not None and (padding.shape != k.shape[:1] or padding.dtype != np.bool_):
        raise ValueError(f"the key-padding mask is ({len(k)},) bool, not {padding.shape}")
    return Mask(len(k) - len(q) if causal else None, padding is not None)


class Dropout(NamedTuple):
    """Dropout of probability p, a function of the seed and of (i, j): no state advances."""

    p: float = 0.0
    seed: int | None = None

    def factors(self, rows: slice, cols: slice, like: Array) -> Array:
        """Return Z of a tile: 0 where a pair is dropped, 1 / (1 - p) where it is kept.

        The bits are those of `cupyflash.attention` for the first head of the first batch entry.
        """
        if self.p == 0 or self.seed is None:
            return np.ones((size_of(rows), size_of(cols)), like.dtype)
        i, j = np.ogrid[rows, cols]
        kept = philox.keep(self.seed, self.p, 0, i, j)
        return np.where(kept, 1 / philox.keep_probability(self.p), 0).astype(like.dtype)


def dropout_of(p: float, seed: int | None) -> Dropout:
    """Check dropout's arguments."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout is a probability from 0 to below 1, not {p}")
    if p and seed is None:
        raise ValueError("dropout needs a seed")
    return Dropout(p, seed)


def exponentials(x: Array, m: Array) -> Array:
    """exp(x - m), and 0 where x is -inf, whatever m is."""
    result: Array = np.exp(x - np.where(m == -np.inf, 0, m).astype(x.dtype))
    return result


def divide(o: Array, l: Array) -> Array:
    """diag(l)^-1 o, and 0 for rows that saw no key."""
    result: Array = o / np.where(l == 0, 1, l).astype(o.dtype)[:, None]
    return result


def log_sum_exp(m: Array, l: Array) -> Array:
    """m + log l, and -inf for rows that saw no key."""
    with np.errstate(divide="ignore"):
        result: Array = m + np.log(l)
    return result
