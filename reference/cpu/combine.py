"""Join attention over disjoint sets of keys: the CPU twin of the combine kernel.

From (out, lse) of each set, it computes the result of one call over all keys:
``lse = log sum exp(lse_n)`` and ``out = sum exp(lse_n - lse) out_n``. Each part is multiplied by
its normalised weight before the sum, and no element of the sum is larger than the parts' largest,
so that finite parts have a finite mean. A set that saw nothing (lse = -inf) is ignored, so (0,
-inf) is the unit. An lse of +inf, which is that of no numbers, counts as NaN.
"""

from __future__ import annotations

import math

from .jit import INT, INTS, helper, kernel, takes, vector, whole_rows
from .memory import load


@helper
def weight_of(lse, m):
    """Return exp(lse - m): exactly 1 for the largest lse, 0 for a set without keys."""
    zero = type(lse)(0)
    if lse == -math.inf:
        return zero
    return type(lse)(1) if lse == m else type(lse)(math.exp(lse - m))


@takes(
    lambda number: (INT, INT, INTS, INTS, INT, INT, whole_rows(number))
    + (vector(number),) * 2
)  # fmt: skip
@kernel
def combine(first, last, outs, lses, columns, itemsize, out, lse, most):
    """Combine rows `first` to `last`.

    `outs` and `lses` are addresses of contiguous (rows, columns) and (rows,) arrays, one per set;
    `most` is scratch, (columns,).
    """
    one = lse.dtype.type(1)
    for row in range(first, last):
        m = lse.dtype.type(-math.inf)
        for n in range(outs.size):
            value = load(lses[n] + row * itemsize, one)
            value = value - value if value == math.inf else value
            m = value if value > m or value != value else m
        l = one - one
        for n in range(outs.size):
            l += weight_of(load(lses[n] + row * itemsize, one), m)
        for d in range(columns):
            out[row, d] = 0
            most[d] = 0
        if m == -math.inf:
            lse[row] = m
            continue
        lse[row] = m + lse.dtype.type(math.log(l))
        inverse = one / l
        for n in range(outs.size):
            value = load(lses[n] + row * itemsize, one)
            if value == -math.inf:
                continue
            weight = weight_of(value, m) * inverse
            source = outs[n] + row * columns * itemsize
            for d in range(columns):
                element = load(source + d * itemsize, one)
                out[row, d] += weight * element
                most[d] = abs(element) if abs(element) > most[d] else most[d]
        # Rounded weights may add up to more than 1, but a mean must not be larger than its
        # elements.
        for d in range(columns):
            if abs(out[row, d]) > most[d]:
                out[row, d] = math.copysign(most[d], out[row, d])
