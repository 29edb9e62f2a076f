"""Calls over a cache of keys and values: turns what users pass into a `Call`, or into an error.

Lengths and tables in device memory are not read: kernels keep them in range. Those in host memory
are checked, and with ``CUPYFLASH_DEBUG=1``, all of them are.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import cuda_device, device_arrays
from ..arrays.integers import integer
from ..arrays.interop import array, floats
from ..errors import ArgumentError, ArgumentTypeError
from ..expr.nodes import walk
from ..masks import Mask
from . import codes, device_args, validate
from .cached_rows import CachedRows
from .call import Array, Cache, Call, Problem
from .options import DEFAULTS, Options
from .rows import DenseRows, PackedRows

CHECKS_ALL = os.environ.get("CUPYFLASH_DEBUG") == "1"
MOST_POSITIONS = 2**31 - 1
MAX_HEAD_SIZE = 576  # of compressed keys, with their rotated columns


def call(
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    table: Any = None,
    offsets_q: Any = None,
    options: Options = DEFAULTS,
    given: codes.CacheCodes | codes.NoCodes = codes.NONE,
    shared: Any = 0,
) -> Call:
    """Validate a call over a cache."""
    q = floats(q, "q")
    k, v, encoding = codes.codes_of(k, v, given, q)
    numbers = {"q": q, **codes.numbers_of(k, v, encoding)}
    dtype = codes.same_dtype(numbers)
    encoding.check_queries(dtype, "q")
    q_axes = "(B, Hq, Lq, D)" if offsets_q is None else "(Hq, total, D), packed by offsets_q"
    _check_axes("q", q, 4 if offsets_q is None else 3, q_axes)
    made = cache(k, v, table)
    codes.check_columns(q, "q", encoding.k_form, k, "k")
    d, d_v = validate.head_sizes(q, *codes.shapes_of(k, v, encoding), MAX_HEAD_SIZE)
    batch, queries = _queries(q, offsets_q, made.capacity)
    heads, heads_kv = validate.heads_of(q, k, v)
    made = replace(
        made,
        table=table_array(table, batch),
        lengths=lengths_of(lengths, batch, made.capacity),
        encoding=encoding,
        shared=shared_positions(shared, made.capacity),
    )
    if made.table is None and k.shape[0] not in (1, batch):
        raise too_few_entries(k, batch)
    check_pages(made, k.shape[0])
    problem = Problem(
        lead=(batch,),
        heads=heads,
        heads_kv=heads_kv,
        rows=CachedRows.of(queries, made),
        d=d,
        d_v=d_v,
        dtype=dtype,
    )
    if offsets_q is not None:
        _refuse_packed_rows(options.mask)
    checked = validate.with_options(
        problem, q, k, v, (False, False, False), options, encoding=encoding
    )
    if checked.problem.dropout:
        raise ArgumentError(
            f"dropout: got {checked.problem.dropout}; expected 0, because attention over a cache "
            "has no dropout. Leave it out, or call attention for training."
        )
    return checked


def _queries(q: Array, offsets_q: Any, room: int) -> tuple[int, DenseRows | PackedRows]:
    """Return how many entries there are, and where their queries lie."""
    if offsets_q is None:
        return q.shape[0], DenseRows(q.shape[-2], room)
    offsets = validate.offsets_array(offsets_q, "offsets_q")
    total = q.shape[1]
    held, read = device_args.offsets_to_check(offsets, "offsets_q", q, CHECKS_ALL)
    if read is None:
        lengths, starts = device_args.unread(total, total)
    else:
        bounds = validate.checked_offsets(read, "offsets_q", total)
        lengths, starts = np.diff(bounds), bounds[:-1]
    keys = np.full(len(lengths), room), np.zeros(len(lengths), np.int64)
    rows = PackedRows(lengths, keys[0], starts, keys[1], {"offsets_q": held})
    return offsets.size - 1, rows


def too_few_entries(k: Array, batch: int) -> ArgumentError:
    """Return the error for a cache that has no place for some of the entries."""
    return ArgumentError(
        f"k: got shape {k.shape} with {batch} batch entries; expected a first axis of length "
        f"{batch}, or a table (B, N) of page numbers for a cache in pages."
    )


def _check_axes(name: str, value: Array, axes: int, wanted: str) -> None:
    if value.ndim != axes:
        raise ArgumentError(f"{name}: got shape {value.shape}; expected {wanted}.")


def cache(k: Array, v: Array, table: Any) -> Cache:
    """Return a cache's capacity and page size; its table and lengths are not looked at yet."""
    wanted = "(B, Hkv, S, D)" if table is None else "pages, (P, Hkv, page, D)"
    for name, x in (("k", k), ("v", v)):
        _check_axes(name, x, 4, wanted)
    if k.shape[0] != v.shape[0]:
        raise ArgumentError(
            f"v: got shape {v.shape} with k of shape {k.shape}; expected equal numbers of "
            f"{'batch entries' if table is None else 'pages'}, but {v.shape[0]} is not "
            f"{k.shape[0]}."
        )
    rows = k.shape[-2]
    if table is None:
        capacity = rows
    else:
        table = array(table, "table")
        if table.ndim != 2 or table.dtype not in (np.int32, np.int64):
            raise ArgumentTypeError(
                f"table: got shape {table.shape}, dtype {table.dtype}; expected (B, N) of int32 "
                "or int64, with the page numbers of every batch entry."
            )
        if not rows:
            raise ArgumentError(
                f"k: got pages of shape {k.shape[1:]}; expected pages of one position or more."
            )
        capacity = rows * table.shape[1] if k.shape[0] else 0  # without pages there is no room
    if capacity > MOST_POSITIONS:
        raise ArgumentError(
            f"k: got room for {capacity} positions; expected at most {MOST_POSITIONS} for a batch "
            "entry. Pass fewer pages in table."
        )
    return Cache(capacity, 0, None, rows)


def table_array(value: Any, batch: int) -> Array | None:
    """Return a table of page numbers; `cache` has checked all but its first axis."""
    if value is None:
        return None
    table = array(value, "table")
    if table.shape[0] != batch:
        raise ArgumentError(
            f"table: got shape {table.shape} with {batch} batch entries; expected ({batch}, N)."
        )
    return table


def lengths_of(value: Any, batch: int, capacity: int) -> Any:
    """Return lengths as a number or an array (B,), checked where they can be read."""
    wanted = f"an integer from 0 to {capacity}, or ({batch},) of int32 or int64"
    if isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"lengths: got {value!r}; expected {wanted}.")
    if not device_arrays.is_device_array(value) and (number := integer(value)) is not None:
        _check_lengths(np.array([number]), capacity)
        return number
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    if not hasattr(value, "dtype") and not hasattr(value, "__dlpack__"):
        raise ArgumentTypeError(f"lengths: got {value!r}; expected {wanted}.")
    lengths = array(value, "lengths")
    if (
        not lengths.ndim
        and not device_arrays.is_device_array(lengths)
        and lengths.dtype.kind in "iu"
    ):
        return lengths_of(int(lengths), batch, capacity)
    if lengths.shape != (batch,) or lengths.dtype not in (np.int32, np.int64):
        raise ArgumentTypeError(
            f"lengths: got shape {lengths.shape}, dtype {lengths.dtype}; expected {wanted}: how "
            "many positions the cache holds for each batch entry, including those of this step."
        )
    read = readable(lengths)
    if read is not None:
        _check_lengths(read, capacity)
    return lengths


def _check_lengths(lengths: Array, capacity: int) -> None:
    bad = np.flatnonzero((lengths < 0) | (lengths > capacity))
    if bad.size:
        n = int(bad[0])
        raise ArgumentError(
            f"lengths: entry {n} is {int(lengths[n])}; expected 0 to {capacity}, because the "
            "cache has room for no more. Make k and v longer, or give the entry more pages in "
            "table."
        )


def readable(value: Any) -> Array | None:
    """Return integers in host memory, or None of those on a device unless all are checked."""
    if not device_arrays.is_device_array(value):
        return np.asarray(value)
    if not CHECKS_ALL:
        return None
    device = device_arrays.device_of(value)
    assert device is not None
    with cuda_device.current(device):
        return None if cuda_device.is_capturing() else device_arrays.read_back(value)


def shared_positions(value: Any, capacity: int) -> int:
    """Return how many positions entries share."""
    number = integer(value)
    if number is None:
        raise ArgumentTypeError(
            f"shared: got {value!r}; expected an integer, how many positions all batch entries "
            "share. If some share more than others, pass what all of them share."
        )
    if not 0 <= number <= capacity:
        raise ArgumentError(
            f"shared: got {number}; expected 0 to {capacity}, because the cache has room for "
            "no more positions. Entries may be shorter than what they share."
        )
    return number


def check_pages(cache: Cache, pages: int, new: Array | None = None) -> None:
    """Check the page numbers in use, if they and the lengths can be read.

    If only the last rows of entries are written, `new` (B,) says how many these are.
    """
    if cache.table is None:
        return
    table = readable(cache.table)
    lengths = cache.lengths if isinstance(cache.lengths, int) else readable(cache.lengths)
    if table is None or lengths is None:
        return
    lengths, page_size = np.broadcast_to(lengths, (len(table),)), cache.page_size
    number = np.arange(table.shape[1])
    is_used = number < -(-lengths[:, None] // page_size)
    if cache.shared and len(table):
        is_used = _check_shared_pages(cache, table, lengths, is_used)
    if new is not None:
        is_used &= (new[:, None] > 0) & (number >= ((lengths - new) // page_size)[:, None])
    bad = np.argwhere(is_used & ((table < 0) | (table >= pages)))
    if len(bad):
        b, n = (int(x) for x in bad[0])
        raise ArgumentError(
            f"table: entry ({b}, {n}) is {int(table[b, n])}, and the cache has {pages} pages; "
            f"expected 0 to {pages - 1} for the pages that lengths says are in use."
        )


def _check_shared_pages(cache: Cache, table: Array, lengths: Array, is_used: Array) -> Array:
    """Return which page numbers are used if entries share pages; compare them if all is checked."""
    page_size, number = cache.page_size, np.arange(table.shape[1])
    is_shared = number < cache.shared // page_size
    if CHECKS_ALL:
        differs = is_used & is_shared & (table != table[:1])
        if differs.any():
            b, n = (int(x) for x in np.argwhere(differs)[0])
            raise ArgumentError(
                f"table: entry ({b}, {n}) is {int(table[b, n])} and entry (0, {n}) is "
                f"{int(table[0, n])}, with shared={cache.shared}; expected the same pages in all "
                f"batch entries for the first {cache.shared} positions. Pass a smaller shared."
            )
    is_used = is_used & ~is_shared
    most = min(cache.shared, int(lengths.max()))
    is_used[0] |= number < max(-(-most // page_size), -(-int(lengths[0]) // page_size))
    return is_used


def _refuse_packed_rows(mask: Any) -> None:
    if isinstance(mask, Mask) and any(
        node.op == "aligned" and node.value.packed for node in walk(mask.expr)
    ):
        raise ArgumentError(
            "mask: got masks.segments with offsets_q; expected another mask, because a cache has "
            "no packed keys. Compare look-ups by position in masks.mask, or leave offsets_q out."
        )
