"""Spread rows over all of their columns by an orthogonal transform: the CPU twin of hadamard.

Columns get random signs; then a row is multiplied by a Hadamard matrix, the product of a small one
and one of a power of two, by sums and differences, and by 1 / sqrt(D). The inverse multiplies by
the transpose, and columns get their signs at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from .jit import INT, INTS, kernel, takes, vector, whole_rows
from .philox import MASK_32, philox4x32, split_seed

Array = np.ndarray[Any, Any]
LANES = 16  # rows that are transformed at a time


def signs_of(seed: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """Return the signs of columns, 1 and -1.

    Their counters are those of no pair that dropout draws: there is no such head.
    """
    groups = np.arange(-(-columns // 4))
    words = philox4x32((groups, 0, MASK_32, MASK_32), split_seed(seed))
    drawn = np.stack(words, axis=-1).reshape(-1)[:columns]
    return np.where(drawn >> np.uint32(31), -1, 1).astype(dtype)


@takes(
    lambda number: (
        *(INT, INT, whole_rows(number), INT, INTS, INT),
        *(vector(number), vector(number), whole_rows(number), vector(number)),
    )
)
@kernel
def hadamard(first, last, x, power, factor, inverse, signs, scale, out, work):
    """Transform blocks `first` to `last` of `LANES` rows of `x`.

    `power` is the power of two. Bit n of ``factor[m]`` is set where column n of the small matrix's
    row m is -1. `scale` is one number; `work` is scratch, (2 * D * LANES,). Rows lie side by side
    there, so that compilers work on several of them at once.
    """
    columns = x.shape[1]
    size = columns * LANES
    for block in range(first, last):
        begin = block * LANES
        rows = min(LANES, x.shape[0] - begin)
        for d in range(columns):
            sign = signs.dtype.type(1) if inverse else signs[d]
            for r in range(LANES):
                work[d * LANES + r] = x[begin + r, d] * sign if r < rows else 0
        step = LANES
        while step < power * LANES:
            for low in range(0, size, 2 * step):
                lower, upper = work[low : low + step], work[low + step : low + 2 * step]
                for e in range(step):
                    a, b = lower[e], upper[e]
                    lower[e] = a + b
                    upper[e] = a - b
            step *= 2
        result = work[:size]
        if factor.size > 1:
            result = work[size : 2 * size]
            width = power * LANES
            for m in range(factor.size):
                total = result[m * width : (m + 1) * width]
                for n in range(factor.size):
                    term = work[n * width : (n + 1) * width]
                    negative = (factor[m] >> types.int64(n)) & 1
                    sign = signs.dtype.type(1 - 2 * negative)
                    for e in range(width):
                        value = term[e] * sign
                        total[e] = total[e] + value if n else value
        for r in range(rows):
            for d in range(columns):
                value = result[d * LANES + r] * scale[0]
                out[begin + r, d] = value * signs[d] if inverse else value
