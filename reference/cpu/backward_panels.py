"""q and do as pairs of columns, the form in which products take them; runs before the backward.

Every block of keys reads all queries of its head, so they are laid out once.
"""

from __future__ import annotations

from .arguments import shape_of
from .jit import INT, helper, kernel, takes, vector
from .memory import ROWS, row_address
from .microkernel import padded
from .packing import load_transposed, pair_lanes
from .widen import find_rows_at


@takes(
    lambda number: (INT, INT, shape_of(number), INT, ROWS, ROWS, ROWS, ROWS, *(vector(number),) * 2)
)
@kernel
def backward_panels(first, last, shape, widen, q, qt, do, dot, q_wide, do_wide):
    """Lay out the blocks of queries of batch entry and head ``n = b * heads + h``.

    `qt` and `dot` receive the blocks of q and do. `widen` is the address of `widen_rows`; `q_wide`
    and `do_wide` have memory for as many rows as a pair of vectors has lanes.
    """
    zero = q_wide.dtype.type(0)
    for item in range(first, last):
        b, h = item // shape.heads, item % shape.heads
        for block in range((shape.len_q[b] + shape.block_q - 1) // shape.block_q):
            load_block(shape, widen, q, b, h, block, shape.d, q_wide, qt, zero)
            load_block(shape, widen, do, b, h, block, shape.d_v, do_wide, dot, zero)


@helper
def load_block(shape, widen, rows, b, h, block, depth, wide, panels, zero):
    """Load a block of rows as pairs of columns. Columns without a row are 0."""
    itemsize, pair = shape.itemsize, pair_lanes(shape.itemsize)
    columns = padded(depth, shape.lanes_per_vector)
    i0, target = block * shape.block_q, row_address(panels, b, h, block)
    end = min(i0 + shape.block_q, shape.len_q[b])
    for i in range(i0, end, pair):
        count = min(pair, end - i)
        place, size = find_rows_at(widen, rows, b, h, i, count, depth, columns, wide)
        load_transposed(place, size * itemsize, count, pair, depth, itemsize, target, zero)
        target += pair * depth * itemsize
