"""Write new keys and values to a cache, and rotate keys and queries: the CPU twin of append."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cache import Scales
from .rope import rope
from .rows_launch import quantize

Array = np.ndarray[Any, Any]
Rotary = tuple[Array, Array, bool]  # cos, sin, interleaved


def append(
    k_new: Array,
    v_new: Array,
    k: Array,
    v: Array,
    lengths: Array,
    table: Array | None,
    offsets: Array | None,
    page_size: int,
    q: Array | None,
    out: Array | None,
    rotary: Rotary | None,
    positions: Array | None,
    scales: tuple[Scales | None, Scales | None] | None = None,
) -> None:
    """Append new rows (B, H, n, D), or with offsets (H, total, D), to those of a cache.

    `lengths` (B,) counts what the cache holds afterwards. New rows of keys or values that are codes
    are quantised, and their scales written to those in `scales`. All arguments are already checked.
    """
    rows = k_new.shape[-2]
    if offsets is None:
        entries = np.arange(len(k_new))[:, None]
        behind = rows - np.arange(rows)
    else:
        entries = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        behind = offsets[1:][entries] - np.arange(rows)
    held = lengths[entries] - behind  # position of every row in its entry
    page, row = held // page_size, held % page_size
    page = np.broadcast_to(entries, held.shape) if table is None else table[entries, page]
    if rotary is not None:
        turned_by = held if positions is None else positions
        rotated = np.empty_like(k_new)
        rope(k_new, turned_by, *rotary, False, rotated)
        k_new = rotated
        if q is not None and out is not None:
            rope(q, turned_by, *rotary, False, out)
    for cache, new, of in zip((k, v), (k_new, v_new), scales or (None, None), strict=True):
        if of is None:
            _put(cache, page, row, new)
        elif new.shape[-1]:  # no columns: values are columns of the keys
            groups = of.array.shape[-1]
            codes = np.empty((*new.shape[:-1], cache.shape[-1]), np.uint8)
            scale = np.empty((*new.shape[:-1], groups), np.float32)
            quantize(new, new.shape[-1] // groups, of.form, codes, scale)
            _put(cache.view(np.uint8), page, row, codes)
            _put(of.array, page, row, scale)


def _put(cache: Array, page: Array, row: Array, new: Array) -> None:
    """Write rows (..., H, n, X) to those of a cache, (pages, H, rows, X)."""
    cache.swapaxes(1, 2)[page, row] = new.swapaxes(-3, -2)
