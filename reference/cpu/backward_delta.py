"""delta = rowsum(do * out) - dlse, and the gradient of the sink; runs before the backward kernels.

FlashAttention-2 (Dao 2023), Algorithm 2, line 4.
"""

from __future__ import annotations

import math

from .arguments import shape_of
from .jit import INT, helper, kernel, takes, vector
from .memory import ROWS, load, row_address, store


@takes(
    lambda number: (
        INT, INT, shape_of(number), ROWS, ROWS, ROWS, ROWS, vector(number), ROWS, vector(number)
    )
)  # fmt: skip
@kernel
def backward_delta(first, last, shape, do, out, dlse, lse, sink, delta, dsink):
    """Compute delta of batch entry and head ``n = b * heads + h`` from `first` to `last`.

    ``dsink[n]`` receives that entry's part of the sink's gradient.
    """
    itemsize = shape.itemsize
    zero, one = sink.dtype.type(0), sink.dtype.type(1)
    for item in range(first, last):
        b, h = item // shape.heads, item % shape.heads
        # If there is a sink, outputs of 0 are left out: an empty row adds nothing to the sink's
        # gradient, whatever its do contains.
        skips = sink[h] != -math.inf
        for i in range(shape.len_q[b]):
            do_row = row_address(do, b, h, i, itemsize)
            out_row = row_address(out, b, h, i, itemsize)
            value = zero
            for d in range(shape.d_v):
                element = load(out_row + d * itemsize, one)
                if not skips or element != zero:
                    value += element * load(do_row + d * itemsize, one)
            value -= load(row_address(dlse, b, h, i, itemsize), one)
            store(row_address(delta, b, h, i, itemsize), value)
        dsink[item] = backward_sink(shape, lse, sink, delta, b, h)


@helper
def backward_sink(shape, lse, sink, delta, b, h):
    """Return the sum over the queries of p_sink * (dlse - rowsum(do * out)), or -p_sink * delta."""
    zero = sink.dtype.type(0)
    total = zero
    for i in range(shape.len_q[b]):
        row_lse = load(row_address(lse, b, h, i, shape.itemsize), zero)
        if sink[h] == -math.inf or row_lse == -math.inf:
            continue
        p_sink = sink.dtype.type(math.exp(min(sink[h] - row_lse, zero)))
        total -= p_sink * load(row_address(delta, b, h, i, shape.itemsize), zero)
    return total
