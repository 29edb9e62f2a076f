"""The public functions over a cache of keys and values: signatures and documentation, no logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsFloat, SupportsIndex, Unpack, overload

from numpy.typing import NDArray

from . import dispatch, execute
from .arrays.interop import DLPackArray
from .arrays.typed import CacheDType, F, FloatArray, Number
from .backends.host_recent import recognised_cached
from .masks import Mask
from .problem.arguments import Cached
from .problem.call import Array
from .problem.codes import CacheCodes
from .problem.keywords import explained
from .problem.options import Options
from .problem.signatures import CachedOptions
from .request import Request
from .scores import Score


@overload
def attention_cached(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CachedOptions],
) -> NDArray[F]: ...


@overload
def attention_cached(
    q: NDArray[F],
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    return_lse: Literal[True],
    **options: Unpack[CachedOptions],
) -> tuple[NDArray[F], FloatArray]: ...


@overload
def attention_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CachedOptions],
) -> Array: ...


@overload
def attention_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    return_lse: Literal[True],
    **options: Unpack[CachedOptions],
) -> tuple[Array, FloatArray]: ...


@overload
def attention_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    return_lse: bool,
    **options: Unpack[CachedOptions],
) -> Array | tuple[Array, FloatArray]: ...


@recognised_cached
@explained
def attention_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    table: DLPackArray | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    k_scale: DLPackArray | SupportsFloat | None = None,
    v_scale: DLPackArray | SupportsFloat | None = None,
    kv_dtype: CacheDType = None,
    shared: SupportsIndex = 0,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    lse_out: Array | None = None,
    workspace: Array | None = None,
) -> Array | tuple[Array, FloatArray]:
    """Compute attention of new queries over a cache of keys and values.

    `lengths` counts the positions that are in use after this step, including those of the queries:
    query i of entry b has position ``lengths[b] - Lq + i``. For masks and scores, Lk is lengths[b],
    so that under ``masks.causal()`` every query sees the positions up to its own. No bit of a
    result depends on other entries, on the room of the cache, on pages, or on how many queries a
    call has. On tensor cores, the last of these holds if the heads that share a key head have at
    most 64 queries in all. The kernels of `attention`, which are faster for many queries, compute
    an entry with more, such as a prompt, within the same bounds.

    Parameters
    ----------
    q : array, shape (B, Hq, Lq, D)
        Queries. With `offsets_q` they are packed: (Hq, total, D). Dtypes, strides and kinds of
        arrays are those of `attention`.
    k : array, shape (B, Hkv, S, D)
        Keys, with room for S positions: numbers in the dtype of `q`, or codes with `k_scale`. The
        first ``lengths[b]`` are read; the others may contain anything. With `table`, they are in
        pages of any length: (P, Hkv, page, D).
    v : array, shape (B, Hkv, S, Dv)
        Values. With `table`, they are in pages: (P, Hkv, page, Dv). They may be columns of `k`, as
        in multi-head latent attention: ``k[..., :512]`` of keys with 576 columns has a kernel of
        its own on Hopper.
    lengths : int or array, shape (B,)
        How many positions are in use, as int32 or int64, on the device of `q`. On a GPU, lengths
        are clamped and not read back, so a captured CUDA graph works for all later lengths.
    table : array, shape (B, N), optional
        Page numbers, as int32 or int64, on the device of `q`. Position j of entry b is row
        ``j % page`` of page ``table[b, j // page]``. Only the numbers that `lengths` needs are
        read. On a GPU, they are clamped.
    offsets_q : array, shape (B + 1,), optional
        Entry b has the packed queries from ``offsets_q[b]`` to ``offsets_q[b + 1]``. Entries may
        have any number of them.
    k_scale, v_scale : array of float32 or float, optional
        The scales of a cache of codes of 8 or 4 bits, on the device of `q`: the result is attention
        over ``k_scale * k`` and ``v_scale * v``, whose products are rounded to float32 once. They
        broadcast to (B, Hkv, S, 1), or with `table` to (P, Hkv, page, 1): there may be one for all,
        one for each head, or one for each row, as `append` writes them. For int4 the last axis may
        also be D / 32, and Dv / 32. A number is one for all; on a GPU, the first call with it
        copies it, so this call is before the capture of a graph. Codes and scales of positions that
        are not in use may be anything. Queries are float16, bfloat16 or float32. If only keys or
        only values are codes, the others have the dtype of `q`, and no scale.
    kv_dtype : str or dtype_like, or tuple of two, optional
        What the bytes of `k` and `v` are if they are uint8: "int8", "float8_e4m3fn", "float8_e5m2"
        or "int4". Arrays of int8, and those of the float8 types of ml_dtypes, say it themselves.
        With int4, two codes share a byte as in `quantize`, so `k` and `v` have D / 2 and Dv / 2
        columns. Keys and values may have different types: ("int8", "int4") are those of `k` and of
        `v`. None in a tuple is for an array that says its type itself.
    shared : int
        All entries have the same keys and values at their first `shared` positions: with `table`,
        their page numbers are those of entry 0, except for a page that extends further; otherwise,
        their rows are equal, as in arrays with a first axis of stride 0. Entries may be shorter,
        and those of entry 0 must be there even if ``lengths[0]`` is smaller. No bit depends on it.
        Shared keys are read once for several entries, and only as those of entry 0: on the CPU,
        and on tensor cores in 16-bit types, there in multiples of 512 positions and for heads up to
        256. Other calls ignore it; `plan_cached` says so.
    mask : Mask or array of bool, optional
        As in `attention`. An array broadcasts to (B, Hq, Lq, S).
    score_mod : Score or sequence of Score, optional
        As in `attention`.
    bias : array, optional
        As in `attention`. It broadcasts to (B, Hq, Lq, S).
    sink : array, shape (Hq,), optional
        As in `attention`.
    scale : float, optional
        As in `attention`.
    return_lse : bool
        Return (out, lse) instead of out.
    out : array, optional
        Where to write the output.
    lse_out : array, optional
        Where to write the log-sum-exp.
    workspace : array of uint8, optional
        Scratch memory of at least `workspace_size_cached` bytes on the device of `q`, with any
        contents. It is needed while a CUDA graph is being captured.

    Returns
    -------
    out : array, shape (B, Hq, Lq, Dv), or (Hq, total, Dv)
        In the dtype of `q`. A query that sees no key gets 0.
    lse : array, shape (B, Hq, Lq), or (Hq, total)
        Only with `return_lse`: as in `attention`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`, and if `lengths` or `table` in host memory are out of range. With the
        environment variable CUPYFLASH_DEBUG=1, those in device memory are checked, too.

    References
    ----------
    T. Dao and others, "Flash-Decoding for long-context inference", 2023. Here, the sums over keys
    form a fixed tree, whose leaves have 64 keys each.

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
    codes = CacheCodes.of(k_scale, v_scale, kv_dtype)
    request = Request(q, k, v, Cached(lengths, table, offsets_q, shared), codes, options)
    return execute.forward(request, return_lse, out, lse_out, workspace)


@explained
def workspace_size_cached(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    *,
    table: DLPackArray | None = None,
    offsets_q: DLPackArray | Sequence[int] | None = None,
    k_scale: DLPackArray | SupportsFloat | None = None,
    v_scale: DLPackArray | SupportsFloat | None = None,
    kv_dtype: CacheDType = None,
    shared: SupportsIndex = 0,
) -> int:
    """Return how many bytes of workspace `attention_cached` needs at most for these shapes.

    Parameters
    ----------
    q, k, v, table, offsets_q : array
        As in `attention_cached`.
    k_scale, v_scale, kv_dtype
        As in `attention_cached`.
    shared : int
        As in `attention_cached`: a call with fewer shared positions needs no more.

    Returns
    -------
    int
        The number of bytes, which is 0 for NumPy arrays, and where one kernel on a GPU does all.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_cached`.
    """
    codes = CacheCodes.of(k_scale, v_scale, kv_dtype)
    call = Request(q, k, v, Cached(0, table, offsets_q, shared), codes).call
    return dispatch.backend_of(call.q).workspace_size_cached(call)
