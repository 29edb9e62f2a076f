"""How sums of products of codes of 8 bits err on tensor cores, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .precision import CODE_TERMS

CODE_DEPTH = 32  # products that tensor cores add at a time


def code_errors(q: Any, k: Any, unit: float) -> NDArray[np.float64]:
    """Bound the errors of q k^T as tensor cores add products of codes, `CODE_DEPTH` at a time.

    A step cuts off each of its products, and the sum before it, at `unit` times the largest of
    them, and then its sum at `unit` times that.
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64).swapaxes(-1, -2)
    sums = np.zeros((*q.shape[:-1], k.shape[-1]))
    error = np.zeros(sums.shape)
    for begin in range(0, q.shape[-1], CODE_DEPTH):
        here = slice(begin, begin + CODE_DEPTH)
        largest = np.abs(sums) + error
        for c in range(*here.indices(q.shape[-1])):
            largest = np.maximum(largest, np.abs(q[..., c, None] * k[..., c, None, :]))
        sums = sums + q[..., here] @ k[..., here, :]
        error = error + CODE_TERMS * unit * largest
        error = error + unit * (np.abs(sums) + error)
    return error
