"""Join attention over disjoint sets of keys: the CPU twin of the combine kernel.

Given (out, lse) of each set, the result is what one call over all keys gives:
``lse = log sum exp(lse_n)`` and ``out = sum exp(lse_n - lse) out_n``. A set that saw nothing
(lse = -inf) takes no part, so (0, -inf) is the unit.
"""

from __future__ import annotations

import math

from .jit import INT, INTS, kernel, takes, vector, whole_rows
from .memory import load


@takes(lambda number: (INT, INT, INTS, INTS, INT, INT, whole_rows(number), vector(number)))
@kernel
def combine(first, last, outs, lses, columns, itemsize, out, lse):
    """Combine rows `first` to `last`.

    `outs` and `lses` are addresses of contiguous (rows, columns) and (rows,) arrays, one per set.
    """
    one = lse.dtype.type(1)
    for row in range(first, last):
        m = lse.dtype.type(-math.inf)
        for n in range(outs.size):
            value = load(lses[n] + row * itemsize, one)
            m = value if value > m or value != value else m
        l = one - one
        out[row, :] = 0
        for n in range(outs.size):
            value = load(lses[n] + row * itemsize, one)
            if value == -math.inf:
                continue
            weight = one if value == m else lse.dtype.type(math.exp(value - m))
            l += weight
            source = outs[n] + row * columns * itemsize
            for d in range(columns):
                out[row, d] += weight * load(source + d * itemsize, one)
        if m == -math.inf:
            lse[row] = m
        else:
            lse[row] = m + lse.dtype.type(math.log(l))
            inverse = one / l
            for d in range(columns):
                out[row, d] *= inverse
