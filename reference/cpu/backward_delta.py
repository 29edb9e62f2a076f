"""delta = rowsum(do * out) - dlse, and the gradient of the sink; runs before the backward kernels.

FlashAttention-2 (Dao 2023), Algorithm 2, line 4.
"""

from __future__ import annotations

import math

from .arguments import shape_of
from .jit import INT, helper, kernel, takes, vector
from .memory import ROWS, load, row_address, store
from .widen import find_rows_at


@takes(
    lambda number: (
        INT, INT, shape_of(number), INT, ROWS, ROWS, ROWS, ROWS, vector(number), ROWS,
        *(vector(number),) * 3,
    )
)  # fmt: skip
@kernel
def backward_delta(
    first, last, shape, widen, do, out, dlse, lse, sink, delta, dsink, do_wide, out_wide
):
    """Compute delta of batch entry and head ``n = b * heads + h`` from `first` to `last`.

    ``dsink[n]`` receives that entry's part of the sink's gradient. `widen` is the address of
    `widen_rows`; `do_wide` and `out_wide` have memory for a row.
    """
    itemsize, columns = shape.itemsize, shape.d_v
    zero, one = sink.dtype.type(0), sink.dtype.type(1)
    for item in range(first, last):
        b, h = item // shape.heads, item % shape.heads
        # If there is a sink, outputs of 0 are left out: an empty row adds nothing to the sink's
        # gradient, whatever its do contains.
        skips = sink[h] != -math.inf
        for i in range(shape.len_q[b]):
            do_row, _ = find_rows_at(widen, do, b, h, i, 1, columns, columns, do_wide)
            out_row, _ = find_rows_at(widen, out, b, h, i, 1, columns, columns, out_wide)
            value = zero
            for d in range(columns):
                element = load(out_row + d * itemsize, one)
                if not skips or element != zero:
                    value += element * load(do_row + d * itemsize, one)
            value -= load(row_address(dlse, b, h, i), one)
            store(row_address(delta, b, h, i), value)
        dsink[item] = backward_sink(shape, lse, sink, delta, b, h)


@helper
def backward_sink(shape, lse, sink, delta, b, h):
    """Return the sum over the queries of p_sink * (dlse - rowsum(do * out)), or -p_sink * delta."""
    zero = sink.dtype.type(0)
    total = zero
    for i in range(shape.len_q[b]):
        row_lse = load(row_address(lse, b, h, i), zero)
        if sink[h] == -math.inf or row_lse == -math.inf:
            continue
        p_sink = sink.dtype.type(math.exp(min(sink[h] - row_lse, zero)))
        total -= p_sink * load(row_address(delta, b, h, i), zero)
    return total
