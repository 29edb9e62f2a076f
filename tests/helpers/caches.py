"""Caches of keys and values for tests: in pages, and with NaN where nothing is held."""

from __future__ import annotations

import numpy as np


def results(call):
    """Return memory for out and lse of a call over a cache; it holds NaN."""
    shape = (*(() if call.problem.packed else call.problem.lead), *call.q.shape[-3:-1])
    out = np.full((*shape, call.problem.d_v), np.nan, call.q.dtype)
    return out, np.full(shape, np.nan, call.problem.accumulator)


def hidden(array, lengths):
    """Return a copy whose positions that are not held are NaN."""
    copy = array.copy()
    for b, length in enumerate(lengths):
        copy[b, :, length:] = np.nan
    return copy


def in_pages(array, page, rng, spare=2, fill=np.nan):
    """Return pages of a permuted cache, and the table that finds them."""
    batch, heads, size, columns = array.shape
    each = -(-size // page)
    whole = np.full((batch, heads, each * page, columns), fill, array.dtype)
    whole[:, :, :size] = array
    split = whole.reshape(batch, heads, each, page, columns).swapaxes(1, 2)
    table = rng.permutation(batch * each + spare)[: batch * each].reshape(batch, each)
    pages = np.full((batch * each + spare, heads, page, columns), fill, array.dtype)
    pages[table.reshape(-1)] = split.reshape(-1, heads, page, columns)
    return pages, table.astype(np.int32)
