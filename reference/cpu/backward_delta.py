"""delta = rowsum(do * out) - dlse, and the gradient of the sink: what gradients of scores need.

FlashAttention-2 (Dao 2023), Algorithm 2, line 4.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import intrinsic

from .arguments import shape_of
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector
from .memory import ROWS, first_address, load, prefetch_rows, row_address, store
from .microkernel import VECTOR_BYTES
from .vectors import INT as WORD
from .vectors import Emitter
from .widen import find_rows_at

BLOCK = 32  # rows that are widened at once: whole squares


@intrinsic
def _add_products(typingctx, a, b, a_row, b_row, rows, columns, skips, sums, like):
    """Add to a vector the sums of products of rows of two squares; maybe of those with a != 0."""

    def codegen(context, builder, sig, args):
        a, b, a_row, b_row, rows, columns, skips, sums, _ = args
        emit = Emitter(builder, context.get_value_type(sig.args[8]))
        none = builder.icmp_signed("==", skips, WORD(0))
        products = []
        for x, y in zip(*(
            emit.load_rows(
                [builder.add(place, builder.mul(row, WORD(n))) for n in range(emit.lanes)],
                rows, columns, emit.zero, emit.itemsize,
            )
            for place, row in ((a, a_row), (b, b_row))
        ), strict=True):  # fmt: skip
            counts = builder.or_(builder.fcmp_unordered("!=", x, emit.zero), emit.every(none))
            products.append(builder.select(counts, builder.fmul(x, y), emit.zero))
        total = emit.load(sums)
        for column in emit.transposed(products):
            total = builder.fadd(total, column)
        emit.store(total, sums)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, like), codegen


@takes(
    lambda number: (
        INT, INT, INTS, TABLE, INTS, shape_of(number), INT, INT, ROWS, ROWS, ROWS, ROWS,
        vector(number), ROWS, *(vector(number),) * 4,
    )
)  # fmt: skip
@kernel
def backward_delta(
    first,
    last,
    runs,
    work,
    members,
    shape,
    widen,
    prefetch,
    do,
    out,
    dlse,
    lse,
    sink,
    delta,
    dsink,
    do_wide,
    out_wide,
    sums,
):
    """Compute delta of the query heads of some work items from `first` to `last`.

    Items are those of `backward.backward_dkdv`; of rows of work for one head of keys, the one with
    its first block counts. ``dsink[b * heads + h]`` receives the part of the sink's gradient of
    batch entry b and head h. `widen` and `prefetch` are the addresses of `widen_rows` and
    `load_ahead`; `do_wide` and `out_wide` have memory for `BLOCK` rows, `sums` for as many numbers.
    """
    itemsize, columns = shape.itemsize, shape.d_v
    one, square = sink.dtype.type(1), VECTOR_BYTES // itemsize
    for place in range(runs[first], runs[last]):
        if work[place, 3] != 0:
            continue
        h_kv = work[place, 2]
        if place + 1 < runs[last]:
            # Short heads come and go faster than what they read from memory.
            next_b, next_h = members[work[place + 1, 0]], work[place + 1, 2] * shape.group
            ahead = min(shape.len_q[next_b], shape.block_kv)
            prefetch_rows(prefetch, do, next_b, next_h, 0, ahead, columns)
            prefetch_rows(prefetch, out, next_b, next_h, 0, ahead, columns)
        for member in range(work[place, 0], work[place, 1]):
            b = members[member]
            for h in range(h_kv * shape.group, (h_kv + 1) * shape.group):
                # If there is a sink, outputs of 0 are left out: an empty row adds nothing to the
                # sink's gradient, whatever its do contains.
                skips = np.int64(sink[h] != -math.inf)
                for begin in range(0, shape.len_q[b], BLOCK):
                    count = min(BLOCK, shape.len_q[b] - begin)
                    do_row, do_size = find_rows_at(
                        widen, do, b, h, begin, count, columns, columns, do_wide
                    )
                    out_row, out_size = find_rows_at(
                        widen, out, b, h, begin, count, columns, columns, out_wide
                    )
                    do_size, out_size = do_size * itemsize, out_size * itemsize
                    for i in range(count):
                        sums[i] = 0
                    for i in range(0, count, square):
                        for d in range(0, columns, square):
                            _add_products(
                                out_row + i * out_size + d * itemsize,
                                do_row + i * do_size + d * itemsize,
                                out_size, do_size, count - i, columns - d, skips,
                                first_address(sums) + i * itemsize, one,
                            )  # fmt: skip
                    for i in range(count):
                        value = sums[i] - load(row_address(dlse, b, h, begin + i), one)
                        store(row_address(delta, b, h, begin + i), value)
                dsink[b * shape.heads + h] = backward_sink(shape, lse, sink, delta, b, h)


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
