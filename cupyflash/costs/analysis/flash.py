"""Traffic of FlashAttention's versions, of block-sparse and of split attention."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ...errors import ArgumentError
from .tiles import rows_of
from .traffic import Traffic, check, given, made, parts


def flash_attention(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    *,
    block_q: int,
    block_kv: int,
    padding: bool = False,
    dropout: bool = False,
) -> Traffic:
    """Return the traffic of FlashAttention, whose outer loop is over keys.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int
        B_r and B_c; `block_sizes` gives the paper's.
    padding, dropout : bool
        Whether there is a key-padding mask, and dropout, whose generator's state is saved.

    Returns
    -------
    Traffic
        Q, O, l and m pass once per block of keys; with a causal mask, too, because no tile is
        skipped.

    References
    ----------
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention", 2022, Algorithm 2 and Theorem 2.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    t_c = parts(n_k, block_kv)
    return made(
        _update_peak(min(block_q, n_q), min(block_kv, n_k), d, d_v, padding, dropout),
        {
            "k": n_k * d,
            "v": n_k * d_v,
            "padding": n_k * padding,
            "q": t_c * n_q * d,
            "o": t_c * n_q * d_v,
            "l": t_c * n_q,
            "m": t_c * n_q,
        },
        {
            "rng": int(dropout),
            "o": (t_c + 1) * n_q * d_v,
            "l": (t_c + 1) * n_q,
            "m": (t_c + 1) * n_q,
        },
    )


def _update_peak(rows: int, cols: int, d: int, d_v: int, padding: bool, dropout: bool) -> int:
    # K_j, V_j, padding; Q_i, O_i; l and m: the old ones, the tile's and the new ones; S_ij; the
    # state.
    keys = cols * (d + d_v + padding)
    return keys + rows * (d + d_v) + 6 * rows + rows * cols + dropout


def flash_attention_backward(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    *,
    block_q: int,
    block_kv: int,
    padding: bool = False,
    dropout: bool = False,
) -> Traffic:
    """Return the traffic of FlashAttention's gradients, which recompute P.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int
        B_r and B_c; `block_sizes` gives the paper's.
    padding, dropout : bool
        Whether there is a key-padding mask, and dropout, whose generator's state is read.

    Returns
    -------
    Traffic
        Q, O, dO, dQ, l and m pass once per block of keys.

    References
    ----------
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention", 2022, Algorithm 4 and Theorem 5.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    t_c = parts(n_k, block_kv)
    rows, cols = min(block_q, n_q), min(block_kv, n_k)
    return made(
        # K, dK, V, dV, padding; Q, dQ, O, dO; l, m, D; P, dP and Z; the state.
        cols * (2 * d + 2 * d_v + padding)
        + rows * (2 * d + 2 * d_v)
        + 3 * rows
        + (2 + dropout) * rows * cols
        + dropout,
        {
            "rng": int(dropout),
            "k": n_k * d,
            "v": n_k * d_v,
            "padding": n_k * padding,
            "q": t_c * n_q * d,
            "dq": t_c * n_q * d,
            "o": t_c * n_q * d_v,
            "do": t_c * n_q * d_v,
            "l": t_c * n_q,
            "m": t_c * n_q,
        },
        {"dq": (t_c + 1) * n_q * d, "dk": 2 * n_k * d, "dv": 2 * n_k * d_v},
    )


def block_sparse_attention(
    layout: ArrayLike,
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    *,
    block_q: int,
    block_kv: int,
    padding: bool = False,
    dropout: bool = False,
) -> Traffic:
    """Return the traffic of block-sparse FlashAttention.

    Parameters
    ----------
    layout : array_like of bool, shape (ceil(n_q / block_q), ceil(n_k / block_kv))
        True for the blocks that are not zero.
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int
        B_r and B_c.
    padding, dropout : bool
        Whether there is a key-padding mask, and dropout, whose generator's state is saved.

    Returns
    -------
    Traffic
        Q, O, l and m pass only for blocks that are not zero: Theta(N d + N**2 d**2 s / M), where s
        is the fraction of such blocks.

    References
    ----------
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention", 2022, Algorithm 5, Proposition 4.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    layout = np.asarray(layout, bool)
    t_r, t_c = parts(n_q, block_q), parts(n_k, block_kv)
    if layout.shape != (t_r, t_c):
        raise ArgumentError(
            f"layout: got shape {layout.shape}; expected {(t_r, t_c)}, one per block"
        )
    rows = np.minimum(block_q, n_q - block_q * np.arange(t_r))
    cols = np.minimum(block_kv, n_k - block_kv * np.arange(t_c))
    passed = int(rows @ layout.sum(axis=1))  # rows of Q that are loaded
    tiles = [(rows[i], cols[j]) for i, j in np.argwhere(layout)]
    most = max(
        (_update_peak(int(r), int(c), d, d_v, padding, dropout) for r, c in tiles), default=0
    )
    keys = int(cols.max()) * (d + d_v + padding) + dropout
    return made(
        max(keys, most) + 1,  # and an entry of the layout
        {
            "k": n_k * d,
            "v": n_k * d_v,
            "padding": n_k * padding,
            "layout": t_r * t_c,
            "q": passed * d,
            "o": passed * d_v,
            "l": passed,
            "m": passed,
        },
        {"rng": int(dropout), "o": (passed + n_q) * d_v, "l": passed + n_q, "m": passed + n_q},
    )


def _queries_outside(
    n_q: int, n_k: int, d: int, d_v: int, block_q: int, block_kv: int, offset: int | None
) -> Traffic:
    """Return the traffic of FlashAttention-2 in which query i sees keys j <= i + offset."""
    rows = list(rows_of(n_q, n_k, block_q, block_kv, offset))
    keys = sum(row.keys for row in rows)
    return made(
        # Q_i, O_i, m, l and the new m; K_j, V_j and S_ij, if there is a tile.
        max(
            row.rows * (d + d_v + 3) + (row.tiles > 0) * min(block_kv, n_k) * (d + d_v + row.rows)
            for row in rows
        ),
        {"q": n_q * d, "k": keys * d, "v": keys * d_v},
        {"o": n_q * d_v, "lse": n_q},
    )


def flash_attention_2(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    *,
    block_q: int,
    block_kv: int,
    causal: bool = False,
) -> Traffic:
    """Return the traffic of FlashAttention-2, whose outer loop is over queries.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int
        B_r and B_c.
    causal : bool
        Whether query i sees only keys up to i + n_k - n_q; tiles without a pair are skipped.

    Returns
    -------
    Traffic
        Keys and values pass once per block of queries; O and the log-sum-exp are written once.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithm 1 and section 3.1.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    offset = n_k - n_q if causal else None
    return _queries_outside(n_q, n_k, d, d_v, block_q, block_kv, offset)


def flash_attention_3(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    *,
    block_q: int,
    block_kv: int,
    causal: bool = False,
) -> Traffic:
    """Return the traffic of FlashAttention-3's two-stage order.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int
        B_r and B_c.
    causal : bool
        Whether query i sees only keys up to i + n_k - n_q; tiles without a pair are skipped.

    Returns
    -------
    Traffic
        That of FlashAttention-2, with a second tile of scores on chip.

    References
    ----------
    J. Shah et al., "FlashAttention-3", 2024, Algorithm 2.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    offset = n_k - n_q if causal else None
    rows = list(rows_of(n_q, n_k, block_q, block_kv, offset))
    keys, queries = sum(row.keys for row in rows), sum(row.rows for row in rows if row.tiles)
    peaks = [0]
    for row in rows:
        held = row.rows * (d_v + 2)  # O, l, m; Q once there is a tile
        first = min(block_kv, row.keys)
        second = min(block_kv, row.keys - first)
        last = row.keys - (row.tiles - 1) * block_kv
        peaks.append(held)
        if row.tiles:
            peaks.append(held + row.rows * d + first * (d + row.rows))  # lines 3-4
            peaks.append(held + row.rows * d + last * d_v + row.rows * last)  # line 18
        if row.tiles > 1:  # lines 8-13: K_j, V_(j-1), both tiles of scores, the old m
            tile = second * (d + row.rows) + first * (d_v + row.rows)
            peaks.append(held + row.rows * (d + 1) + tile)
    return made(
        max(peaks),
        {"q": queries * d, "k": keys * d, "v": keys * d_v},
        {"o": n_q * d_v, "lse": n_q},
    )


def split_kv(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    *,
    splits: int,
    block_q: int,
    block_kv: int,
    causal: bool = False,
) -> Traffic:
    """Return the traffic of attention over parts of the keys, which are combined at the end.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    splits : int
        The most parts; each has ceil(n_k / splits) keys.
    block_q, block_kv : int
        B_r and B_c.
    causal : bool
        Whether query i sees only keys up to i + n_k - n_q.

    Returns
    -------
    Traffic
        The traffic of FlashAttention-2 on every part, and the outputs and log-sum-exps of all
        parts.

    References
    ----------
    T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv, splits=splits)
    size = parts(n_k, splits)
    starts = range(0, n_k, size)
    each = []
    read = 0  # outputs of those parts that a query sees something of
    for start in starts:
        offset = n_k - n_q - start if causal else None
        keys = min(size, n_k - start)
        each.append(_queries_outside(n_q, keys, d, d_v, block_q, block_kv, offset))
        read += n_q if offset is None else min(n_q, max(n_q + offset, 0))
    loads = {name: sum(part.reads.get(name, 0) for part in each) for name in ("q", "k", "v")}
    count = len(starts)
    return made(
        max(count + 2 * d_v, *(part.peak for part in each)),
        {**loads, "lse_parts": count * n_q, "o_parts": read * d_v},
        {
            "o_parts": count * n_q * d_v,
            "lse_parts": count * n_q,
            "o": n_q * d_v,
            "lse": n_q,
        },
    )


def packed_qkv(
    n: int, heads: int, d: int, *, block_q: int, block_kv: int, causal: bool = False
) -> Traffic:
    """Return the traffic of FlashAttention-2 for all heads of a packed array (n, 3, heads, d).

    Parameters
    ----------
    n : int
        Number of queries, and of keys.
    heads : int
        Number of heads.
    d : int
        Columns of q, k and v.
    block_q, block_kv : int
        B_r and B_c.
    causal : bool
        Whether query i sees only keys up to i.

    Returns
    -------
    Traffic
        The traffic of one head, times the number of heads: unpacking moves nothing.
    """
    check(heads=heads)
    one = flash_attention_2(n, n, d, block_q=block_q, block_kv=block_kv, causal=causal)
    return one.times(heads)
