"""Tiled attention, backward: the CPU twin of the backward kernels.

FlashAttention-2 (Dao 2023), Algorithm 2. `backward_dkdv` keeps a block of keys and values and lets
the queries pass by. A work item of it that has all blocks of a key-value head adds to dq in memory
too, which no other item does: one pass of five products. Where there are fewer heads than threads,
an item has one block, and `backward_dq`, which keeps a block of queries, computes dq in a second
pass. Every element of a gradient is the same sum in the same order either way, and whoever computes
it.
"""

from __future__ import annotations

from .accumulate import accumulate
from .amx_memory import DEPTH
from .arguments import CHANGES, shape_of
from .bias_gradient import add_to_bias, bias_sums_of
from .gradient_tile import (
    apply_dscore,
    gradient_scratch_of,
    gradient_tile,
    load_row_statistics,
)
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector
from .memory import ROWS, first_address, load, row_address, store
from .microkernel import padded
from .narrow import write_narrow
from .packing import load_pairs, load_transposed, pair_lanes, store_pairs
from .tile import EMPTY, FIRST, LAST, class_of_tile, describe_tile, include_all
from .widen import NATIVE, find_rows_at


@helper
def scale_rows(rows, b, h, count, columns, itemsize, factor):
    """Multiply the rows of a head by a factor."""
    for i in range(count):
        target = row_address(rows, b, h, i)
        for x in range(target, target + columns * itemsize, itemsize):
            store(x, load(x, factor) * factor)


@helper
def clear_rows(rows, b, h, count, columns, itemsize, zero):
    """Set the rows of a head to 0."""
    for i in range(count):
        target = row_address(rows, b, h, i)
        for x in range(target, target + columns * itemsize, itemsize):
            store(x, zero)


@helper
def store_rows(narrow, tile, count, columns, itemsize, factor, rows, place, width, wide):
    """Write rows that lie as pairs of vectors, multiplied by a factor, to where `rows` has them.

    Those of 16 bits are rounded by the kernel at `narrow`; `wide` has memory for them.
    """
    target, size = place, rows.row * itemsize
    if rows.kind != NATIVE:
        target, size = first_address(wide), width * itemsize
    store_pairs(tile, count, columns, itemsize, factor, target, size)
    if rows.kind != NATIVE:
        rounded = (target, size, count, columns, place, rows.row * rows.itemsize)
        write_narrow(narrow, rounded)


@takes(
    lambda number: (INT, INT, INTS, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 8
    + (INT, ROWS, ROWS, ROWS, ROWS, bias_sums_of(number), INTS, gradient_scratch_of(number))
    + (vector(number),) * 5
)  # fmt: skip
@kernel
def backward_dkdv(
    first,
    last,
    runs,
    work,
    members,
    shape,
    changes,
    q,
    k,
    v,
    do,
    lse,
    delta,
    qt,
    dot,
    adds_dq,
    dq,
    rounded,
    dk,
    dv,
    bias,
    visited,
    scratch,
    k_pairs,
    dk_tile,
    dv_tile,
    q_pairs,
    do_pairs,
):
    """Compute dk and dv of the work items from `first` to `last`.

    Item n is the rows ``runs[n] : runs[n + 1]`` of `work`, in order. Row m has the blocks of keys
    from ``work[m, 3]`` to before ``work[m, 4]`` of key-value head ``work[m, 2]``; the batch entries
    that share these keys are ``members[work[m, 0] : work[m, 1]]``. `qt` and `dot` are panels of q
    and do. The sum runs over those entries, the group's heads and the query blocks, in that order.
    With `adds_dq`, a row adds what its blocks give to the rows of `dq`; that of the first block
    begins them, and that of the last one scales them, and writes them to `rounded` if that has 16
    bits. The gradient of a bias is added to the sums
    `bias`.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    columns, columns_v = padded(shape.d, vector), padded(shape.d_v, vector)
    zero, one = dk_tile.dtype.type(0), dk_tile.dtype.type(1)
    edges, width, widen = scratch.edges, pair_lanes(itemsize), changes.pointers.widen
    packed = first_address(scratch.packed)
    for place in range(runs[first], runs[last]):
        h_kv = work[place, 2]
        keys = members[work[place, 0]]
        len_k = shape.len_k[keys]
        begin_head, end_head = h_kv * shape.group, (h_kv + 1) * shape.group
        if adds_dq and work[place, 3] == 0:
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                for h in range(begin_head, end_head):
                    clear_rows(dq, b, h, shape.len_q[b], columns, itemsize, zero)
        count = 0
        for block in range(work[place, 3], work[place, 4]):
            j0 = block * shape.block_kv
            nj = min(shape.block_kv, len_k - j0)
            pair = nj * width
            k_place, k_row = find_rows_at(
                widen, k, keys, h_kv, j0, nj, shape.d, columns, scratch.k_wide
            )
            v_place, v_row = find_rows_at(
                widen, v, keys, h_kv, j0, nj, shape.d_v, columns_v, scratch.v_wide
            )
            careful_k = 0
            if adds_dq:
                careful_k = changes.may_mask & load_pairs(
                    k_place, k_row * itemsize, nj, columns, itemsize, k_pairs
                )
            for n in range((columns + width - 1) // width * pair):
                dk_tile[n] = zero
            for n in range((columns_v + width - 1) // width * pair):
                dv_tile[n] = zero
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                for h in range(begin_head, end_head):
                    for i0 in range(0, shape.len_q[b], shape.block_q):
                        end_i = min(i0 + shape.block_q, shape.len_q[b])
                        is_visited = 0
                        for i in range(i0, end_i, changes.panel):
                            ni = min(changes.panel, end_i - i)
                            lanes = padded(ni, vector)
                            describe_tile(scratch.symbols, shape, b, h, i, ni, j0, nj)
                            ri, rf = scratch.tile_ri, scratch.tile_rf
                            if class_of_tile(
                                changes, scratch.symbols, ni, nj, edges, ri, rf
                            ) == EMPTY:  # fmt: skip
                                continue
                            is_visited = 1
                            load_row_statistics(shape, lse, delta, b, h, i, ni, lanes, scratch)
                            q_panel = row_address(qt, b, h, i0 // shape.block_q)
                            do_panel = row_address(dot, b, h, i0 // shape.block_q)
                            q_panel += (i - i0) * shape.d * itemsize
                            do_panel += (i - i0) * shape.d_v * itemsize
                            row, size = find_rows_at(
                                widen, do, b, h, i, ni, shape.d_v, columns_v, scratch.q_wide
                            )
                            careful_do = changes.may_mask & load_pairs(
                                row, size * itemsize, ni, columns_v, itemsize, do_pairs
                            )
                            row, size = find_rows_at(
                                widen, q, b, h, i, ni, shape.d, columns, scratch.q_wide
                            )
                            careful_q = changes.may_mask & load_pairs(
                                row, size * itemsize, ni, columns, itemsize, q_pairs
                            )
                            careful = careful_do | careful_q | careful_k
                            if careful:
                                include_all(edges, nj)
                            tile = (
                                shape, changes, scratch, b, h, i, ni, j0, nj, lanes, q_panel,
                                do_panel, k_place, k_row, v_place, v_row, careful,
                            )  # fmt: skip
                            gradient_tile(changes.pointers.gradient, tile)
                            if bias.places.shape[0]:
                                add_to_bias(bias, shape, scratch, b, h, i, ni, j0, lanes)
                            begin, nk = edges[FIRST], edges[LAST] - edges[FIRST]
                            cells = begin * lanes * itemsize
                            p, ds = first_address(scratch.p), first_address(scratch.ds)
                            # 6 accumulate dv and dk
                            target = first_address(dv_tile) + begin * width * itemsize
                            weighted = (
                                one, changes.pointers.product, p + cells, lanes, 1, nk, ni, 0,
                                first_address(do_pairs), ni * width, columns_v, itemsize, target,
                                width, pair, careful_do, scratch.seen, packed,
                            )  # fmt: skip
                            accumulate(changes.pointers.accumulate, weighted)
                            if changes.slope.code.shape[0]:
                                apply_dscore(scratch, ni, lanes)
                            target = first_address(dk_tile) + begin * width * itemsize
                            weighted = (
                                one, changes.pointers.product, ds + cells, lanes, 1, nk, ni, 0,
                                first_address(q_pairs), ni * width, columns, itemsize, target,
                                width, pair, careful_q, scratch.seen, packed,
                            )  # fmt: skip
                            accumulate(changes.pointers.accumulate, weighted)
                            if adds_dq:
                                pairs = first_address(k_pairs)
                                pairs += begin * width * itemsize
                                weighted = (
                                    one, changes.pointers.product, ds + cells, 1, lanes, ni, nk,
                                    begin % DEPTH, pairs, pair, columns, itemsize,
                                    row_address(dq, b, h, i), dq.row, 0, careful_k,
                                    scratch.seen, packed,
                                )  # fmt: skip
                                accumulate(changes.pointers.accumulate, weighted)
                        count += is_visited
            # 7 scale and store
            narrow = changes.pointers.narrow
            target, wide = row_address(dk, keys, h_kv, j0), scratch.k_wide
            store_rows(
                narrow, dk_tile, nj, shape.d, itemsize, shape.scale, dk, target, columns, wide
            )
            target, wide = row_address(dv, keys, h_kv, j0), scratch.v_wide
            store_rows(narrow, dv_tile, nj, shape.d_v, itemsize, one, dv, target, columns_v, wide)
        if adds_dq and work[place, 4] * shape.block_kv >= len_k:
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                for h in range(begin_head, end_head):
                    scale_rows(dq, b, h, shape.len_q[b], columns, itemsize, shape.scale)
                    if rounded.kind != NATIVE:
                        target = row_address(rounded, b, h, 0)
                        rows_of_head = (
                            row_address(dq, b, h, 0), dq.row * itemsize, shape.len_q[b], shape.d,
                            target, rounded.row * rounded.itemsize,
                        )  # fmt: skip
                        write_narrow(changes.pointers.narrow, rows_of_head)
        visited[place] = count


@takes(
    lambda number: (INT, INT, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 7
    + (gradient_scratch_of(number),) + (vector(number),) * 4
)  # fmt: skip
@kernel
def backward_dq(
    first,
    last,
    work,
    members,
    shape,
    changes,
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
    scratch,
    k_pairs,
    q_panel,
    do_panel,
    dq_tile,
):
    """Compute dq of the work items from `first` to `last`.

    Item n is query block ``work[n // heads, 2]`` of head ``n % heads``; the batch entries that
    share these queries are ``members[work[n // heads, 0] : work[n // heads, 1]]``.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    columns, columns_v = padded(shape.d, vector), padded(shape.d_v, vector)
    zero, one = dq_tile.dtype.type(0), dq_tile.dtype.type(1)
    edges, widen, packed = scratch.edges, changes.pointers.widen, first_address(scratch.packed)
    for item in range(first, last):
        place = item // shape.heads
        h = item % shape.heads
        h_kv = h // shape.group
        i0 = work[place, 2] * shape.block_q
        queries = members[work[place, 0]]
        end_i = min(i0 + shape.block_q, shape.len_q[queries])
        # 1 load q
        for i in range(i0, end_i, changes.panel):
            ni = min(changes.panel, end_i - i)
            panel = first_address(q_panel) + (i - i0) * shape.d * itemsize
            lanes = padded(ni, vector)
            row, size = find_rows_at(widen, q, queries, h, i, ni, shape.d, columns, scratch.q_wide)
            load_transposed(row, size * itemsize, ni, lanes, shape.d, itemsize, panel, zero)
        for n in range((end_i - i0) * columns):
            dq_tile[n] = zero
        for member in range(work[place, 0], work[place, 1]):
            b = members[member]
            for i in range(i0, end_i, changes.panel):
                ni = min(changes.panel, end_i - i)
                panel = first_address(do_panel) + (i - i0) * shape.d_v * itemsize
                lanes = padded(ni, vector)
                row, size = find_rows_at(
                    widen, do, b, h, i, ni, shape.d_v, columns_v, scratch.q_wide
                )
                load_transposed(row, size * itemsize, ni, lanes, shape.d_v, itemsize, panel, zero)
            for j0 in range(0, shape.len_k[b], shape.block_kv):
                nj = min(shape.block_kv, shape.len_k[b] - j0)
                pair = nj * pair_lanes(itemsize)
                k_place, k_row = find_rows_at(
                    widen, k, b, h_kv, j0, nj, shape.d, columns, scratch.k_wide
                )
                v_place, v_row = find_rows_at(
                    widen, v, b, h_kv, j0, nj, shape.d_v, columns_v, scratch.v_wide
                )
                careful = changes.may_mask & load_pairs(
                    k_place, k_row * itemsize, nj, columns, itemsize, k_pairs
                )
                for i in range(i0, end_i, changes.panel):
                    ni = min(changes.panel, end_i - i)
                    lanes = padded(ni, vector)
                    describe_tile(scratch.symbols, shape, b, h, i, ni, j0, nj)
                    ri, rf = scratch.tile_ri, scratch.tile_rf
                    if class_of_tile(changes, scratch.symbols, ni, nj, edges, ri, rf) == EMPTY:
                        continue
                    if careful:
                        include_all(edges, nj)
                    load_row_statistics(shape, lse, delta, b, h, i, ni, lanes, scratch)
                    tile = (
                        shape, changes, scratch, b, h, i, ni, j0, nj, lanes,
                        first_address(q_panel) + (i - i0) * shape.d * itemsize,
                        first_address(do_panel) + (i - i0) * shape.d_v * itemsize,
                        k_place, k_row, v_place, v_row, careful,
                    )  # fmt: skip
                    gradient_tile(changes.pointers.gradient, tile)
                    # 6 accumulate dq
                    if changes.slope.code.shape[0]:
                        apply_dscore(scratch, ni, lanes)
                    begin, nk = edges[FIRST], edges[LAST] - edges[FIRST]
                    weighted = (
                        one, changes.pointers.product,
                        first_address(scratch.ds) + begin * lanes * itemsize, 1, lanes, ni, nk,
                        begin % DEPTH,
                        first_address(k_pairs) + begin * pair_lanes(itemsize) * itemsize, pair,
                        columns, itemsize, first_address(dq_tile) + (i - i0) * columns * itemsize,
                        columns, 0, careful, scratch.seen, packed,
                    )  # fmt: skip
                    accumulate(changes.pointers.accumulate, weighted)
        # 7 scale and store
        for n in range((end_i - i0) * columns):
            dq_tile[n] *= shape.scale
        if dq.kind != NATIVE:
            rows_of_block = (
                first_address(dq_tile), columns * itemsize, end_i - i0, shape.d,
                row_address(dq, queries, h, i0), dq.row * dq.itemsize,
            )  # fmt: skip
            write_narrow(changes.pointers.narrow, rows_of_block)
        else:
            for i in range(i0, end_i):
                target = row_address(dq, queries, h, i)
                for d in range(shape.d):
                    store(target + d * itemsize, dq_tile[(i - i0) * columns + d])
