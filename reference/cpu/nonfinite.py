"""The search for NaN and infinity, which masked pairs must not meet."""

from __future__ import annotations

from .jit import INT, INTS, kernel, takes, vector
from .memory import ROWS, load
from .widen import find_rows_at


@takes(lambda number: (INT, INT, INT, INT, INTS, ROWS, INT, vector(number), vector(number)))
@kernel
def count_nonfinite(first, last, widen, heads, lengths, rows, columns, found, wide):
    """Count the elements that are not finite in found[n], n = b * heads + h.

    `widen` is the address of `widen_rows`, and `wide` has memory for a row.
    """
    like = found.dtype.type(0)
    for item in range(first, last):
        b, h = item // heads, item % heads
        total = 0
        for i in range(lengths[b]):
            row, _ = find_rows_at(widen, rows, b, h, i, 1, columns, columns, wide)
            for d in range(columns):
                value = load(row + d * found.itemsize, like)
                total += value - value != 0
        found[item] = total
