"""The public functions over a cache of keys and values: signatures and documentation, no logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex, overload

from . import dispatch, execute
from .arrays.interop import DLPackArray
from .masks import Mask
from .problem.call import Array
from .problem.keywords import explained
from .problem.options import Options
from .scores import Score


@overload
def attention_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    table: DLPackArray | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    out: Array | None = None,
    lse_out: Array | None = None,
    workspace: Array | None = None,
) -> Array: ...


@overload
def attention_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    table: DLPackArray | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    out: Array | None = None,
    lse_out: Array | None = None,
    workspace: Array | None = None,
) -> tuple[Array, Array]: ...


@explained
def attention_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    table: DLPackArray | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    lse_out: Array | None = None,
    workspace: Array | None = None,
) -> Any:
    """Compute attention of new queries over a cache of keys and values.

    `lengths` counts what the cache holds after this step, the keys of these queries among them:
    query i of entry b stands at position ``lengths[b] - Lq + i``. Masks and scores see Lk =
    lengths[b], so that ``masks.causal()`` lets every query see what was there before it. No bit of
    a result depends on other entries, on how much room the cache has, or on pages. It does not
    depend on how many queries come in one call either; on tensor cores, this holds up to 64 queries
    of the heads that share a key head. An entry with more queries, such as a prompt, is computed by
    the kernels of `attention`, which are faster there, within the same bounds.

    Parameters
    ----------
    q : array, shape (B, Hq, Lq, D)
        Queries, or with `offsets_q` packed ones, (Hq, total, D); dtypes, strides and kinds of
        arrays as in `attention`.
    k : array, shape (B, Hkv, S, D)
        Keys, with room for S positions, of which the first ``lengths[b]`` are held and read; the
        others may hold anything. With `table`, pages: (P, Hkv, page, D), of any length.
    v : array, shape (B, Hkv, S, Dv)
        Values; with `table` (P, Hkv, page, Dv).
    lengths : int or array, shape (B,)
        Positions that the cache holds, of int32 or int64, living where q lives. On a GPU they are
        not read back, and are held in range: a captured CUDA graph serves all later lengths.
    table : array, shape (B, N), optional
        Page numbers, of int32 or int64, living where q lives: position j of entry b is row
        ``j % page`` of page ``table[b, j // page]``. Only those that `lengths` needs are read. On a
        GPU they are held in range.
    offsets_q : array, shape (B + 1,), optional
        Entry b has the packed queries from ``offsets_q[b]`` to ``offsets_q[b + 1]``; entries may
        have any number of them.
    mask : Mask or array of bool, optional
        As in `attention`; an array broadcasts to (B, Hq, Lq, S).
    score_mod : Score or sequence of Score, optional
        As in `attention`.
    bias : array, optional
        As in `attention`; broadcasts to (B, Hq, Lq, S).
    sink : array, shape (Hq,), optional
        As in `attention`.
    scale : float, optional
        As in `attention`.
    return_lse : bool
        Return (out, lse) instead of out.
    out : array, optional
        Where to write the output.
    lse_out : array, optional
        Where to write the LSE.
    workspace : array of uint8, optional
        Scratch memory of at least `workspace_size_cached` bytes, where q lives; it may hold
        anything. Needed while a CUDA graph is being captured.

    Returns
    -------
    out : array, shape (B, Hq, Lq, Dv), or (Hq, total, Dv)
        In the dtype of `q`. A query that sees no key gets 0.
    lse : array, shape (B, Hq, Lq), or (Hq, total)
        Only with `return_lse`: as in `attention`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`; also where `lengths` or `table` in host memory name what the cache does
        not have. With the environment variable CUPYFLASH_DEBUG=1 those in device memory are
        checked, too.

    References
    ----------
    T. Dao and others, "Flash-Decoding for long-context inference", 2023; the sums over keys form a
    fixed tree of leaves of 64 keys.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention_cached, masks
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1, 2, 1000, 32), dtype=np.float32)
    >>> q = rng.standard_normal((1, 8, 3, 32), dtype=np.float32)
    >>> attention_cached(q, k, v, 700, mask=masks.causal()).shape
    (1, 8, 3, 32)
    """
    options = Options.of(
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        sink=sink,
        scale=scale,
        dropout=0.0,
        seed=None,
        precision=None,
    )
    request = execute.CachedRequest(q, k, v, options, lengths, table, offsets_q)
    return execute.cached(request, return_lse, out, lse_out, workspace)


@explained
def workspace_size_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    table: DLPackArray | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
) -> int:
    """Return how many bytes of workspace `attention_cached` needs at most, by shapes alone.

    Parameters
    ----------
    q, k, v, table, offsets_q : array
        As in `attention_cached`.

    Returns
    -------
    int
        Bytes; 0 for NumPy arrays.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_cached`.
    """
    request = execute.CachedRequest(q, k, v, Options(), 0, table, offsets_q)
    call = request.call
    return dispatch.backend_of(call.q).workspace_size_cached(call)
