"""The gradient of an array that a score change looks up: a sum over the pairs that read an element.

Tiles are those of the backward, recomputed, with the derivative of the changed score by the element
in place of the slope. A program says which element each pair reads. Blocks of queries are divided
into parts, a number that does not depend on the threads: each part has sums of its own, in float64,
to which one thread adds in a fixed order.
"""

from __future__ import annotations

from numba import types

from .arguments import CHANGES, shape_of
from .bias import forget_tiles
from .gradient_tile import (
    apply_dscore,
    gradient_scratch_of,
    gradient_tile,
    load_row_statistics,
)
from .jit import INT, TABLE, caller, helper, kernel, takes, vector, whole_rows
from .memory import ROWS, first_address
from .microkernel import padded
from .packing import load_panel
from .program import PROGRAM, run
from .tile import EMPTY, FIRST, LAST, class_of_tile, describe_tile
from .widen import find_rows_at

_run = caller(run)


@helper
def add_to_elements(pointer, program, scratch, ri, rf, of_lanes, sums, ni, lanes):
    """Add the gradients of a tile, `scratch.ds`, to the sums of the elements that its pairs read.

    `of_lanes` has memory for a number of each query.
    """
    # 6 accumulate dbias
    ds, edges, symbols = scratch.ds, scratch.edges, scratch.symbols
    i0, j0, row = symbols[7], symbols[9], scratch.lse
    first, last = program.once_per_tile, program.code.shape[0]
    _run(pointer, (program, 0, first, ni, symbols, i0, row, ri, rf))
    place = ri[program.result]
    if first == last:  # all keys of a query read the same element
        for i in range(ni):
            of_lanes[i] = 0
        for j in range(edges[FIRST], edges[LAST]):
            for i in range(ni):
                of_lanes[i] += ds[j * lanes + i]
        for i in range(ni):
            sums[place[i]] += of_lanes[i]
        return
    for j in range(edges[FIRST], edges[LAST]):
        symbols[2] = j0 + j
        _run(pointer, (program, first, last, ni, symbols, i0, row, ri, rf))
        at, total = place[0], of_lanes.dtype.type(0)
        for i in range(ni):
            if place[i] != at:
                sums[at] += total
                at, total = place[i], of_lanes.dtype.type(0)
            total += ds[j * lanes + i]
        sums[at] += total


@takes(
    lambda number: (
        (INT, INT, INT, INT, INT, TABLE, shape_of(number), CHANGES, PROGRAM)
        + (ROWS,) * 6
        + (whole_rows(types.float64), gradient_scratch_of(number), TABLE, whole_rows(number))
        + (vector(types.float64), vector(number), vector(number))
    )
)
@kernel
def backward_lookup(
    first, last, begin, end, parts, work, shape, changes, place, q, k, v, do, lse, delta, sums,
    scratch, place_ri, place_rf, of_lanes, q_panel, do_panel,
):  # fmt: skip
    """Add to the sums of the parts from `first` to `last`.

    Part n has every item of `work` from `begin` to before `end` whose number is n modulo `parts`,
    in order. Item m is block ``work[m, 2]`` of the queries of batch entry ``work[m, 0]`` and head
    ``work[m, 1]``. `place` is the program of the element's number; the derivative by the element
    is ``changes.slope``.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    columns, columns_v = padded(shape.d, vector), padded(shape.d_v, vector)
    zero, widen, edges = q_panel.dtype.type(0), changes.pointers.widen, scratch.edges
    forget_tiles(changes.score, scratch.score_ri)
    for part in range(first, last):
        for item in range(begin + (part - begin) % parts, end, parts):
            b, h = work[item, 0], work[item, 1]
            h_kv, i0 = h // shape.group, work[item, 2] * shape.block_q
            end_i = min(i0 + shape.block_q, shape.len_q[b])
            # The block's queries and gradients of the output.
            for i in range(i0, end_i, changes.panel):
                ni = min(changes.panel, end_i - i)
                lanes = padded(ni, vector)
                panel = first_address(q_panel) + (i - i0) * shape.d * itemsize
                row, size = find_rows_at(widen, q, b, h, i, ni, shape.d, columns, scratch.q_wide)
                rows = (row, size * itemsize, ni, lanes, shape.d, itemsize, panel, 0, zero)
                load_panel(changes.pointers.load, rows)
                panel = first_address(do_panel) + (i - i0) * shape.d_v * itemsize
                row, size = find_rows_at(
                    widen, do, b, h, i, ni, shape.d_v, columns_v, scratch.q_wide
                )
                rows = (row, size * itemsize, ni, lanes, shape.d_v, itemsize, panel, 0, zero)
                load_panel(changes.pointers.load, rows)
            for j0 in range(0, shape.len_k[b], shape.block_kv):
                nj = min(shape.block_kv, shape.len_k[b] - j0)
                k_place, k_row = find_rows_at(
                    widen, k, b, h_kv, j0, nj, shape.d, columns, scratch.k_wide
                )
                v_place, v_row = find_rows_at(
                    widen, v, b, h_kv, j0, nj, shape.d_v, columns_v, scratch.v_wide
                )
                for i in range(i0, end_i, changes.panel):
                    ni = min(changes.panel, end_i - i)
                    lanes = padded(ni, vector)
                    describe_tile(scratch.symbols, shape, b, h, i, ni, j0, nj)
                    ri, rf = scratch.tile_ri, scratch.tile_rf
                    if class_of_tile(changes, scratch.symbols, ni, nj, edges, ri, rf) == EMPTY:
                        continue
                    load_row_statistics(shape, lse, delta, b, h, i, ni, lanes, scratch)
                    tile = (
                        shape, changes, scratch, b, h, i, ni, j0, nj, lanes,
                        first_address(q_panel) + (i - i0) * shape.d * itemsize,
                        first_address(do_panel) + (i - i0) * shape.d_v * itemsize,
                        k_place, k_row, v_place, v_row, 0,
                    )  # fmt: skip
                    gradient_tile(changes.pointers.gradient, tile)
                    if changes.slope.code.shape[0]:
                        apply_dscore(scratch, ni, lanes)
                    add_to_elements(
                        changes.pointers.run_number, place, scratch, place_ri, place_rf, of_lanes,
                        sums[part], ni, lanes,
                    )  # fmt: skip
