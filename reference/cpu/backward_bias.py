"""The gradient of a bias, summed over the axes along which it was broadcast.

There is one work item for each tile of the stored bias. It loops over the batch entries, heads and
blocks that use this tile, in that order, and recomputes their dS.
"""

from __future__ import annotations

from numba import types

from .arguments import CHANGES, shape_of
from .gradient_tile import gradient_scratch_of, gradient_tile, load_row_statistics
from .jit import INT, INTS, TABLE, kernel, takes
from .memory import ROWS, row_address
from .microkernel import padded
from .tile import EMPTY, FIRST, LAST, class_of_tile, describe_tile
from .widen import find_rows_at


@takes(
    lambda number: (INT, INT, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 6
    + (types.Array(number, 4, "C"), gradient_scratch_of(number))
)  # fmt: skip
@kernel
def backward_bias(
    first, last, work, members, shape, changes, k, v, lse, delta, qt, dot, dbias, scratch
):
    """Compute some tiles of `dbias` (entries, heads or 1, queries or 1, keys or 1).

    Row n of `work` names a tile: the range of `members` (batch entries that share it), the bias's
    own batch entry, head, query block and key block; a broadcast axis has the single index 0.
    """
    vector = shape.lanes_per_vector
    columns, columns_v = padded(shape.d, vector), padded(shape.d_v, vector)
    widen = changes.pointers.widen
    one_head, one_query, one_key = dbias.shape[1] == 1, dbias.shape[2] == 1, dbias.shape[3] == 1
    for item in range(first, last):
        entry, head = work[item, 2], work[item, 3]
        q_block, kv_block = work[item, 4], work[item, 5]
        target = dbias[entry, head]
        for member in range(work[item, 0], work[item, 1]):
            b = members[member]
            for h in range(0 if one_head else head, shape.heads if one_head else head + 1):
                i_end = (
                    shape.len_q[b]
                    if one_query
                    else min((q_block + 1) * shape.block_q, shape.len_q[b])
                )
                j_end = (
                    shape.len_k[b]
                    if one_key
                    else min((kv_block + 1) * shape.block_kv, shape.len_k[b])
                )
                for i0 in range(0 if one_query else q_block * shape.block_q, i_end, shape.block_q):
                    ni = min(shape.block_q, shape.len_q[b] - i0)
                    lanes = padded(ni, vector)
                    load_row_statistics(shape, lse, delta, b, h, i0, ni, lanes, scratch)
                    q_panel = row_address(qt, b, h, i0 // shape.block_q)
                    do_panel = row_address(dot, b, h, i0 // shape.block_q)
                    j_start = 0 if one_key else kv_block * shape.block_kv
                    for j0 in range(j_start, j_end, shape.block_kv):
                        nj = min(shape.block_kv, shape.len_k[b] - j0)
                        describe_tile(scratch.symbols, shape, b, h, i0, ni, j0, nj)
                        edges, ri, rf = scratch.edges, scratch.tile_ri, scratch.tile_rf
                        if class_of_tile(changes, scratch.symbols, ni, nj, edges, ri, rf) == EMPTY:
                            continue
                        h_kv = h // shape.group
                        k_place, k_row = find_rows_at(
                            widen, k, b, h_kv, j0, nj, shape.d, columns, scratch.k_wide
                        )
                        v_place, v_row = find_rows_at(
                            widen, v, b, h_kv, j0, nj, shape.d_v, columns_v, scratch.v_wide
                        )
                        tile = (
                            shape, changes, scratch, b, h, i0, ni, j0, nj, lanes, q_panel, do_panel,
                            k_place, k_row, v_place, v_row,
                        )  # fmt: skip
                        gradient_tile(changes.pointers.gradient, tile)
                        # 6 accumulate dbias
                        for j in range(edges[FIRST], edges[LAST]):
                            for i in range(ni):
                                row, column = 0 if one_query else i0 + i, 0 if one_key else j0 + j
                                target[row, column] += scratch.ds[j * lanes + i]
