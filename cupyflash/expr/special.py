"""Functions that NumPy lacks, on arrays of float32, float64 and longer types."""

from __future__ import annotations

from typing import Any

import numpy as np

_WIDER = {np.dtype(np.float32): np.float64, np.dtype(np.float64): np.longdouble}
_MOST_TERMS = 300  # at |x| = 7, longer types than float64 need fewer than 200


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) without overflow."""
    grown = np.exp(-np.abs(x))
    one = grown.dtype.type(1)
    return np.where(np.less(x, 0), grown, one) / (one + grown)


def erf(x: Any) -> Any:
    """Return the error function: 2 / sqrt(pi) exp(-x**2) (x + 2 x**3 / 3 + 4 x**5 / 15 + ...).

    All terms of the sum have the sign of x, so that nothing cancels.
    """
    x = np.asarray(x)
    wide = x.astype(_WIDER.get(x.dtype, x.dtype))
    kind = wide.dtype.type
    # It is 1 beyond, in all types up to 64 bits of precision, and up to 113 at 9.
    held = np.clip(wide, -9, 9)
    square = held * held
    total, term = held.copy(), held.copy()
    for n in range(1, _MOST_TERMS):
        term = term * (square * kind(2) / kind(2 * n + 1))
        grown = total + term
        if np.array_equal(grown, total, equal_nan=True):
            break
        total = grown
    # x**2 in two parts, of which the first is exact: exp would multiply its rounding error.
    near = np.round(held * 16) / 16
    power = np.exp(-near * near) * np.exp((near - held) * (near + held))
    scale = kind(2) / np.sqrt(np.arctan2(kind(0), kind(-1)))
    result = np.clip(scale * power * total, -1, 1)
    return result.astype(x.dtype)[()]
