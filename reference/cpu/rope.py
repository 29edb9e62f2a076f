"""Rotate rows by their positions: the CPU twin of the rope kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from .float_modes import own_arithmetic

Array = np.ndarray[Any, Any]

CHUNK = 2**16  # pairs that are rotated at a time


@own_arithmetic
def rope(
    x: Array,
    positions: Array,
    cos: Array,
    sin: Array,
    interleaved: bool,
    inverse: bool,
    out: Array,
) -> None:
    """Write rows (..., H, L, D) to `out`, their first columns rotated by positions (..., L).

    Pair n of a row is columns n and n + R / 2, or 2 n and 2 n + 1 if interleaved; `cos` and `sin`
    are (S, R / 2). It is computed in the accumulator's type, and rounded once.
    """
    number = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    pairs = cos.shape[1]
    rotated = 2 * pairs
    if interleaved:
        firsts, seconds = slice(0, rotated, 2), slice(1, rotated, 2)
    else:
        firsts, seconds = slice(0, pairs), slice(pairs, rotated)
    out[..., rotated:] = x[..., rotated:]
    # Only a few rows at a time, so that they stay in the cache between loads and stores.
    length = x.shape[-2]
    step = max(1, CHUNK * length // max(1, x[..., 0].size * pairs))
    for begin in range(0, length, step):
        rows = slice(begin, begin + step)
        at = positions[..., rows]
        c, s = (table[at][..., None, :, :].astype(number, copy=False) for table in (cos, sin))
        if inverse:
            s = -s
        first, second = (
            x[..., rows, columns].astype(number, copy=False) for columns in (firsts, seconds)
        )
        out[..., rows, firsts] = first * c - second * s
        out[..., rows, seconds] = second * c + first * s
