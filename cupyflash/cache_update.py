"""The public functions that write to a cache and rotate rows: signatures and documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex, overload

from . import execute
from .arrays.interop import DLPackArray
from .arrays.typed import CacheDType
from .problem.append import Append, told_length
from .problem.append import append as checked_append
from .problem.call import Array
from .problem.codes import NONE, CacheCodes, NoCodes
from .problem.keywords import explained
from .problem.rotary import Rotary, Rotation, rotation
from .row_request import RowRequest
from .rowwise import APPEND, ROPE


@overload
def append(
    k_new: DLPackArray,
    v_new: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    table: DLPackArray | None = None,
    offsets: DLPackArray | Sequence[int] | None = None,
    shared: SupportsIndex = 0,
    q: None = None,
    rotary: Rotary | None = None,
    positions: DLPackArray | Sequence[Any] | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    kv_dtype: CacheDType = None,
    out: None = None,
) -> None: ...


@overload
def append(
    k_new: DLPackArray,
    v_new: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    table: DLPackArray | None = None,
    offsets: DLPackArray | Sequence[int] | None = None,
    shared: SupportsIndex = 0,
    q: DLPackArray,
    rotary: Rotary,
    positions: DLPackArray | Sequence[Any] | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    kv_dtype: CacheDType = None,
    out: Array | None = None,
) -> Array: ...


@explained
def append(
    k_new: DLPackArray,
    v_new: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    lengths: SupportsIndex | DLPackArray | Sequence[int],
    *,
    table: DLPackArray | None = None,
    offsets: DLPackArray | Sequence[int] | None = None,
    shared: SupportsIndex = 0,
    q: DLPackArray | None = None,
    rotary: Rotary | None = None,
    positions: DLPackArray | Sequence[Any] | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    kv_dtype: CacheDType = None,
    out: Array | None = None,
) -> Array | None:
    """Write new keys and values to a cache in place, and rotate keys and queries.

    `lengths` counts what the cache holds after this step, so new row i of entry b goes to position
    ``lengths[b] - n + i``: add n to the lengths, then append. One increment serves all layers of a
    model. Nothing else in the cache changes.

    Parameters
    ----------
    k_new : array, shape (B, Hkv, n, D)
        New keys; with `offsets`, packed keys of shape (Hkv, total, D). Dtypes, strides and kinds of
        arrays are those of `attention`.
    v_new : array, shape (B, Hkv, n, Dv)
        New values; with `offsets`, packed values of shape (Hkv, total, Dv).
    k : array, shape (B, Hkv, S, D)
        The cache's keys, with room for S positions, the dtype of `k_new` or codes of 8 or 4 bits,
        and any strides. With `table`, they are pages, (P, Hkv, page, D). They are written in place,
        and share no memory with another array.
    v : array, shape (B, Hkv, S, Dv)
        The cache's values, of the dtype of `v_new` or codes, whatever the keys are; with `table`,
        (P, Hkv, page, Dv). They may be the first columns of the keys, ``v = k[..., :Dv]``; then
        ``v_new`` must be ``k_new[..., :Dv]``, and they are written once.
    lengths : int or array, shape (B,)
        How many positions the cache holds after this step, as int32 or int64, on the device of `k`.
        On a GPU, lengths are not read back, and a row whose position is not in the cache is not
        written. A captured CUDA graph therefore works for all later lengths.
    table : array, shape (B, N), optional
        Page numbers, as int32 or int64, on the device of `k`. Position j of entry b is row
        ``j % page`` of page ``table[b, j // page]``. Only the numbers of pages that are written are
        read, and no row of a page may be written for two positions, except as `shared` says. On a
        GPU, a row is not written if its page does not exist.
    offsets : array, shape (B + 1,), optional
        Entry b has the packed rows from ``offsets[b]`` to ``offsets[b + 1]``; entries may have any
        number of them.
    shared : int
        Entries may write the same row of a page for the same position if this is below `shared`.
        Their new rows at these positions must be the same, such as those of a prompt that several
        entries share.
    q : array, shape (B, Hq, n, D), optional
        Queries of the same positions; with `offsets`, packed queries of shape (Hq, total, D). They
        are rotated, too, so `rotary` is needed.
    rotary : Rotary, optional
        Rotates keys and queries by their positions. Without it, keys are copied bit by bit, as
        values always are. On a GPU, positions beyond its arrays are clamped.
    positions : array, shape (B, n) or (total,), optional
        The positions by which rows are rotated, as int32 or int64, on the device of `k`; for
        example, the depth in a tree of drafts. By default they are the positions in the cache.
    k_scale, v_scale : array of float32, optional
        Where to write the scales of a cache of codes: (B, Hkv, S, 1), or with `table` (P, Hkv,
        page, 1). New rows, after their rotation, become the codes and scales that `quantize`
        returns for them, a scale for each row. With a last axis of D / 32 (Dv / 32), which int4 may
        have, it is one for each 32 columns. Keys or values that are not codes have none.
    kv_dtype : str or dtype_like, or tuple of two, optional
        Which codes `k` and `v` hold if they are uint8; see `attention_cached`.
    out : array, shape of q, optional
        Where to write the rotated queries.

    Returns
    -------
    array or None
        The rotated queries, in the dtype of `q`; None without `q`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A shape, dtype or device is wrong; lengths, offsets, positions or page numbers in host
        memory are out of range; or these page numbers make one row of two positions. With the
        environment variable CUPYFLASH_DEBUG=1, those in device memory are checked, too.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import append, attention_cached
    >>> rng = np.random.default_rng(0)
    >>> k, v = np.empty((2, 7, 4, 16, 32), np.float32)  # 7 pages of 16 positions
    >>> table = np.array([[3, 0, -1], [5, 1, 2]])
    >>> lengths = np.array([20, 40])
    >>> k_new, v_new = rng.standard_normal((2, 2, 4, 1, 32), dtype=np.float32)
    >>> lengths += 1
    >>> append(k_new, v_new, k, v, lengths, table=table)
    >>> bool((k[0, :, 4] == k_new[0, :, 0]).all())  # position 20 is row 4 of page 0
    True
    """
    given = CacheCodes(k_scale, v_scale, kv_dtype)
    request = append_request(
        k_new, v_new, k, v, lengths, table, offsets, q, rotary, positions, out, given, shared
    )
    return execute.rows(request).get("out")


def append_request(
    k_new: Any,
    v_new: Any,
    k: Any,
    v: Any,
    lengths: Any,
    table: Any = None,
    offsets: Any = None,
    q: Any = None,
    rotary: Any = None,
    positions: Any = None,
    out: Any = None,
    given: CacheCodes | NoCodes = NONE,
    shared: Any = 0,
) -> RowRequest[Append]:
    """Return a call of `append`, whose arguments these are, as the driver takes it."""
    length = told_length(k_new, k, lengths, table, offsets, positions, rotary)
    read = {"k_new": k_new, "v_new": v_new, "q": q, "lengths": lengths, "table": table}
    read |= {"offsets": offsets, "positions": positions}
    if length is not None:
        read["lengths"] = None

    def check() -> Append:
        return checked_append(
            k_new, v_new, k, v, lengths, table, offsets, q, rotary, positions, out, given, shared
        )

    written = {"k": k, "v": v, "out": out, "k_scale": given.k_scale, "v_scale": given.v_scale}
    numbers = given.kind, shared, length is None
    told = {} if length is None else {"length": length}
    return RowRequest(APPEND, check, read, written, numbers=numbers, rotary=rotary, told=told)


@explained
def rope(
    x: DLPackArray,
    positions: DLPackArray | Sequence[Any],
    rotary: Rotary,
    *,
    inverse: bool = False,
    out: Array | None = None,
) -> Array:
    """Rotate rows by their positions: rotary position embedding.

    The product of a rotated query and a rotated key depends only on the difference of their
    positions. The rotation is computed in float32, or in float64 for float64 arrays, and rounded
    once.

    Parameters
    ----------
    x : array, shape (B, H, L, D) or (H, total, D)
        Queries or keys. Dtypes, strides and kinds of arrays are those of `attention`.
    positions : array, shape (B, L) or (L,)
        Positions of the rows, the same for all heads, as int32 or int64, on the device of `x`. In
        device memory, positions beyond the angles are clamped.
    rotary : Rotary
        The angles.
    inverse : bool
        Rotate back. This is also the gradient: it turns dout into dx.
    out : array, shape of x, optional
        Where to write the result.

    Returns
    -------
    array
        The rotated rows, with the shape and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A shape, dtype or device is wrong, or positions in host memory have no angles.

    References
    ----------
    J. Su and others, "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    equation 34.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import Rotary, rope
    >>> angles = np.outer(np.arange(100), [1.0, 0.1]).astype(np.float32)
    >>> rotary = Rotary(np.cos(angles), np.sin(angles))
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 4))
    >>> def score(i, j):
    ...     return float(rope(q, [i], rotary)[0, 0] @ rope(k, [j], rotary)[0, 0])
    >>> abs(score(7, 3) - score(54, 50)) < 1e-6
    True
    """

    def check() -> Rotation:
        return rotation(x, positions, rotary, inverse, out)

    read, written = {"x": x, "positions": positions}, {"out": out}
    results = execute.rows(
        RowRequest(ROPE, check, read, written, numbers=(inverse,), rotary=rotary)
    )
    return results["out"]
