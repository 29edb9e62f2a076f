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
    """Transform rows `first` to `last` of `x`.

    `power` is the power of two. Bit n of ``factor[m]`` is set where column n of the small matrix's
    row m is -1. `scale` is one number; `work` is scratch, (D,).
    """
    columns = x.shape[1]
    for row in range(first, last):
        for d in range(columns):
            out[row, d] = x[row, d] if inverse else x[row, d] * signs[d]
        step = 1
        while step < power:
            for begin in range(0, columns, 2 * step):
                for d in range(begin, begin + step):
                    a, b = out[row, d], out[row, d + step]
                    out[row, d] = a + b
                    out[row, d + step] = a - b
            step *= 2
        if factor.size > 1:
            for m in range(factor.size):
                for n in range(factor.size):
                    negative = (factor[m] >> types.int64(n)) & 1
                    for d in range(power):
                        value = out[row, n * power + d]
                        value = -value if negative else value
                        total = work[m * power + d] + value if n else value
                        work[m * power + d] = total
            for d in range(columns):
                out[row, d] = work[d]
        for d in range(columns):
            value = out[row, d] * scale[0]
            out[row, d] = value * signs[d] if inverse else value
