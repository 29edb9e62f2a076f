"""Traffic of softmax, of standard attention, and of attention before FlashAttention."""

from __future__ import annotations

from .tiles import rows_of
from .traffic import Traffic, check, given, made, parts


def safe_softmax(n_rows: int, n: int) -> Traffic:
    """Return the traffic of softmax in three passes.

    Parameters
    ----------
    n_rows, n : int
        Number of rows, and of elements in each.

    Returns
    -------
    Traffic
        4 accesses per element: 3 reads and 1 write.

    References
    ----------
    M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, Algorithm 2.
    """
    check(n_rows=n_rows, n=n)
    return made(3 * n_rows, {"x": 3 * n_rows * n}, {"y": n_rows * n})


def online_softmax(n_rows: int, n: int) -> Traffic:
    """Return the traffic of softmax in two passes.

    Parameters
    ----------
    n_rows, n : int
        Number of rows, and of elements in each.

    Returns
    -------
    Traffic
        3 accesses per element: 2 reads and 1 write.

    References
    ----------
    M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, Algorithm 3.
    """
    check(n_rows=n_rows, n=n)
    return made(4 * n_rows, {"x": 2 * n_rows * n}, {"y": n_rows * n})


def standard_attention(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    *,
    padding: bool = False,
) -> Traffic:
    """Return the traffic of standard attention.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int, optional
        Blocks of the two matrix products; None keeps whole matrices on chip, which gives the least
        traffic.
    padding : bool
        Whether there is a key-padding mask.

    Returns
    -------
    Traffic
        S and P are written once and read once each: Theta(N d + N**2) for blocks of d rows or more.

    References
    ----------
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention", 2022, Algorithm 0 and Theorem 2.
    """
    d_v, block_q, block_kv = given(d_v, d), given(block_q, n_q), given(block_kv, n_k)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    t_r, pairs = parts(n_q, block_q), n_q * n_k
    rows, cols = min(block_q, n_q), min(block_kv, n_k)
    return made(
        max(
            rows * d + cols * d + cols * padding + rows * cols,
            n_k + 2,
            rows * d_v + cols * d_v + rows * cols,
        ),
        {
            "q": n_q * d,
            "k": t_r * n_k * d,
            "padding": t_r * n_k * padding,
            "s": pairs,
            "p": pairs,
            "v": t_r * n_k * d_v,
        },
        {"s": pairs, "p": pairs, "o": n_q * d_v},
    )


def standard_attention_backward(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Traffic:
    """Return the traffic of the gradients of standard attention, with P in HBM.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int, optional
        Blocks of the matrix products; None keeps whole matrices on chip.

    Returns
    -------
    Traffic
        P and dS are read twice, dP once: Theta(N d + N**2) for blocks of d rows or more.

    References
    ----------
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention", 2022, Algorithm 3.
    """
    d_v, block_q, block_kv = given(d_v, d), given(block_q, n_q), given(block_kv, n_k)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    t_r, t_c, pairs = parts(n_q, block_q), parts(n_k, block_kv), n_q * n_k
    rows, cols = min(block_q, n_q), min(block_kv, n_k)
    return made(
        max((rows + cols) * max(d, d_v) + rows * cols, 2 * n_k + 1),
        {
            "p": 2 * pairs,
            "dp": pairs,
            "ds": 2 * pairs,
            "do": (t_c + 1) * n_q * d_v,
            "v": t_r * n_k * d_v,
            "k": t_r * n_k * d,
            "q": t_c * n_q * d,
        },
        {"dp": pairs, "ds": pairs, "dq": n_q * d, "dk": n_k * d, "dv": n_k * d_v},
    )


def one_pass_attention(
    n_q: int, n_k: int, d: int, d_v: int | None = None, *, causal: bool = False
) -> Traffic:
    """Return the traffic of attention in one pass, one query at a time.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    causal : bool
        Whether query i sees only keys up to i + n_k - n_q.

    Returns
    -------
    Traffic
        Keys and values are read for every query.

    References
    ----------
    M. N. Rabe, C. Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, sections 2 and 3.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v)
    pairs = sum(row.keys for row in rows_of(n_q, n_k, 1, 1, n_k - n_q if causal else None))
    return made(
        2 * d + 2 * d_v + 4,
        {"q": n_q * d, "k": pairs * d, "v": pairs * d_v},
        {"o": n_q * d_v},
    )


def rabe_staats(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    block_q: int = 1024,
    block_kv: int = 4096,
) -> Traffic:
    """Return the traffic of chunked attention.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int
        Rows of a chunk of queries and of keys.

    Returns
    -------
    Traffic
        Every chunk of keys writes its own output; all outputs are read again at the end.

    References
    ----------
    M. N. Rabe, C. Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 4.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    t_r, t_c = parts(n_q, block_q), parts(n_k, block_kv)
    rows, cols = min(block_q, n_q), min(block_kv, n_k)
    summaries = {
        "chunk_values": t_c * n_q * d_v,
        "chunk_weights": t_c * n_q,
        "chunk_max": t_c * n_q,
    }
    chunk = rows * d + cols * (d + d_v) + rows * cols + rows * (d_v + 2)
    together = 2 * t_c * rows + 2 * rows + 2 * rows * d_v
    return made(
        max(chunk, together),
        {"q": n_q * d, "k": t_r * n_k * d, "v": t_r * n_k * d_v, **summaries},
        {**summaries, "o": n_q * d_v, "global_max": n_q, "all_weights": n_q},
    )


def rabe_staats_backward(
    n_q: int,
    n_k: int,
    d: int,
    d_v: int | None = None,
    block_q: int = 1024,
    block_kv: int = 4096,
) -> Traffic:
    """Return the traffic of the gradients of chunked attention, whose chunks are checkpointed.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    d, d_v : int
        Columns of q and k, and of v; d_v is d unless given.
    block_q, block_kv : int
        Rows of a chunk of queries and of keys.

    Returns
    -------
    Traffic
        Each chunk of queries reads and writes dk and dv once.

    References
    ----------
    M. N. Rabe, C. Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 4.
    """
    d_v = given(d_v, d)
    check(n_q=n_q, n_k=n_k, d=d, d_v=d_v, block_q=block_q, block_kv=block_kv)
    t_r = parts(n_q, block_q)
    rows, cols = min(block_q, n_q), min(block_kv, n_k)
    keys, values = n_k * d, n_k * d_v
    return made(
        # Q, dQ, O, dO; both maxima, the weights' sum, delta; K, dK, V, dV; P and dS.
        rows * (2 * d + 2 * d_v + 4) + 2 * cols * (d + d_v) + 2 * rows * cols,
        {
            "q": n_q * d,
            "do": n_q * d_v,
            "o": n_q * d_v,
            "global_max": n_q,
            "all_weights": n_q,
            "k": t_r * keys,
            "v": t_r * values,
            "dk": t_r * keys,
            "dv": t_r * values,
        },
        {"dq": n_q * d, "dk": (t_r + 1) * keys, "dv": (t_r + 1) * values},
    )
