"""Tiled attention, backward: the CPU twin of the backward kernels.

FlashAttention-2 (Dao 2023), Algorithm 2. `backward_dkdv` keeps a block of keys and values and lets
the queries pass by. A work item of it that has all blocks of a key-value head adds to dq in memory
too, which no other item does: one pass of five products. Where there are fewer heads than threads,
an item has one block, and `backward_dq`, which keeps a block of queries, computes dq in a second
pass. Every element of a gradient is the same sum in the same order either way, and whoever computes
it.
"""

from __future__ import annotations

from .accumulate import accumulate, add_columns
from .ahead import forget, load_later
from .arguments import CHANGES, shape_of
from .bias import forget_tiles
from .bias_gradient import add_to_bias, bias_sums_of
from .gradient_tile import (
    apply_dscore,
    gradient_scratch_of,
    gradient_tile,
    load_row_statistics,
)
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector
from .memory import ROWS, clear, first_address, row_address
from .microkernel import multiply, padded
from .narrow import write_narrow
from .packing import (
    has_nonfinite,
    load_panel,
    pair_lanes,
    store_pairs,
    store_panel,
)
from .tile import EMPTY, FIRST, LAST, class_of_tile, describe_tile, include_all
from .widen import NATIVE, find_rows_at


@helper
def store_dq(shape, changes, scratch, sums, dq, b, h, i, ni, lanes):
    """Write the rows of dq whose sums are at `sums`, (d, lanes), multiplied by the scale."""
    itemsize, zero = shape.itemsize, scratch.delta.dtype.type(0)
    for n in range(lanes):
        scratch.delta[n] = shape.scale
    place, columns = row_address(dq, b, h, i), padded(shape.d, shape.lanes_per_vector)
    target, size = place, dq.row * itemsize
    if dq.kind != NATIVE:
        target, size = first_address(scratch.q_wide), columns * itemsize
    factors = first_address(scratch.delta)
    scaled = (sums, ni, lanes, shape.d, itemsize, factors, target, size, zero)
    store_panel(changes.pointers.store, scaled)
    if dq.kind != NATIVE:
        rounded = (target, size, ni, shape.d, place, dq.row * dq.itemsize)
        write_narrow(changes.pointers.narrow, rounded)


@helper
def search(changes, place, row, rows, columns, itemsize, zero):
    """Return whether rows have NaN or infinity, where that matters: where pairs are left out."""
    if not changes.may_mask:
        return 0
    return has_nonfinite(place, row * itemsize, rows, columns, itemsize, zero)


@helper
def store_rows(narrow, tile, count, columns, itemsize, factor, rows, place, width, wide):
    """Write rows that lie as pairs of vectors, multiplied by a factor, to where `rows` has them.

    Those of 16 bits are rounded by the kernel at `narrow`; `wide` has memory for them.
    """
    target, size = place, rows.row * itemsize
    if rows.kind != NATIVE:
        target, size = first_address(wide), width * itemsize
    store_pairs(first_address(tile), count, columns, itemsize, factor, target, size)
    if rows.kind != NATIVE:
        rounded = (target, size, count, columns, place, rows.row * rows.itemsize)
        write_narrow(narrow, rounded)


@takes(
    lambda number: (INT, INT, INTS, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 6
    + (INT, ROWS, ROWS)
    + (ROWS, ROWS, bias_sums_of(number), INTS, gradient_scratch_of(number))
    + (vector(number),) * 7
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
    adds_dq,
    sums,
    dq,
    dk,
    dv,
    bias,
    visited,
    scratch,
    q_panel,
    do_panel,
    q_pairs,
    do_pairs,
    dq_tile,
    dk_tile,
    dv_tile,
):
    """Compute dk and dv of the work items from `first` to `last`.

    Item n is the rows ``runs[n] : runs[n + 1]`` of `work`, in order. Row m has the blocks of keys
    from ``work[m, 3]`` to before ``work[m, 4]`` of key-value head ``work[m, 2]``; the batch entries
    that share these keys are ``members[work[m, 0] : work[m, 1]]``. The sum runs over those entries,
    the group's heads and the query blocks, in that order. With `adds_dq`, a row computes dq, too:
    where it has all keys of a head, panel by panel; else blocks of keys add to `sums`, and the row
    with the last one writes dq. The gradient of a bias is added to the sums `bias`.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    columns, columns_v = padded(shape.d, vector), padded(shape.d_v, vector)
    zero, one = dk_tile.dtype.type(0), dk_tile.dtype.type(1)
    edges, width, widen = scratch.edges, pair_lanes(itemsize), changes.pointers.widen
    later = scratch.ahead
    # Whether a product can read rows of keys, and write those of dq, as they lie in memory.
    has_rows = dq.kind == NATIVE and shape.d == columns
    forget_tiles(changes.score, scratch.score_ri)
    for place in range(runs[first], runs[last]):
        h_kv = work[place, 2]
        keys = members[work[place, 0]]
        len_k = shape.len_k[keys]
        begin_head, end_head = h_kv * shape.group, (h_kv + 1) * shape.group
        # Whether this row has all keys of its head, in one block.
        is_whole = adds_dq and work[place, 3] == 0 and 0 < len_k <= shape.block_kv
        # Short heads come and go faster than what they read from memory and write there: gradients
        # of this one are loaded ahead, and what the next one reads.
        if is_whole:
            forget(later)
            load_later(later, dk, keys, h_kv, 0, len_k, shape.d)
            load_later(later, dv, keys, h_kv, 0, len_k, shape.d_v)
            numbers = min(shape.len_q[keys], shape.block_q)
            load_later(later, dq, keys, begin_head, 0, numbers, shape.d)
            if place + 1 < runs[last]:
                b, h = members[work[place + 1, 0]], work[place + 1, 2]
                count = min(shape.len_k[b], shape.block_kv)
                load_later(later, k, b, h, 0, count, shape.d)
                load_later(later, v, b, h, 0, count, shape.d_v)
                numbers = min(shape.len_q[b], shape.block_q)
                load_later(later, lse, b, h * shape.group, 0, 1, numbers)
                load_later(later, q, b, h * shape.group, 0, numbers, shape.d)
        if adds_dq and work[place, 3] == 0 and not is_whole:
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                for h in range(begin_head, end_head):
                    for i in range(0, shape.len_q[b], shape.block_q):
                        cells = padded(min(shape.block_q, shape.len_q[b] - i), vector) * shape.d
                        target = row_address(sums, b, h, i // shape.block_q)
                        clear(target, cells * itemsize)
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
                careful_k = search(changes, k_place, k_row, nj, shape.d, itemsize, zero)
            clear(first_address(dk_tile), padded(columns, width) * nj * itemsize)
            clear(first_address(dv_tile), padded(columns_v, width) * nj * itemsize)
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
                            target = first_address(dq_tile)
                            if adds_dq and not is_whole:
                                target = row_address(sums, b, h, i0 // shape.block_q)
                                target += (i - i0) * shape.d * itemsize
                            ri, rf = scratch.tile_ri, scratch.tile_rf
                            if class_of_tile(
                                changes, scratch.symbols, ni, nj, edges, ri, rf
                            ) == EMPTY:  # fmt: skip
                                if is_whole:
                                    clear(target, shape.d * lanes * itemsize)
                                    store_dq(
                                        shape, changes, scratch, target, dq, b, h, i, ni, lanes
                                    )
                                continue
                            is_visited = 1
                            load_row_statistics(shape, lse, delta, b, h, i, ni, lanes, scratch)
                            dot, qt = first_address(do_panel), first_address(q_panel)
                            row, size = find_rows_at(
                                widen, do, b, h, i, ni, shape.d_v, columns_v, scratch.q_wide
                            )
                            rows = (
                                row, size * itemsize, ni, lanes, shape.d_v, itemsize, dot,
                                first_address(do_pairs), zero,
                            )  # fmt: skip
                            careful_do = load_panel(changes.pointers.load, rows) & changes.may_mask
                            row, size = find_rows_at(
                                widen, q, b, h, i, ni, shape.d, columns, scratch.q_wide
                            )
                            rows = (
                                row, size * itemsize, ni, lanes, shape.d, itemsize, qt,
                                first_address(q_pairs), zero,
                            )  # fmt: skip
                            careful_q = load_panel(changes.pointers.load, rows) & changes.may_mask
                            careful = careful_do | careful_q | careful_k
                            if careful:
                                include_all(edges, nj)
                            tile = (
                                shape, changes, scratch, b, h, i, ni, j0, nj, lanes, qt, dot,
                                k_place, k_row, v_place, v_row, careful,
                            )  # fmt: skip
                            gradient_tile(changes.pointers.gradient, tile)
                            if bias.places.shape[0]:
                                add_to_bias(bias, shape, scratch, b, h, i, ni, j0, lanes)
                            begin, nk = edges[FIRST], edges[LAST] - edges[FIRST]
                            cells = begin * lanes * itemsize
                            p, ds = first_address(scratch.p), first_address(scratch.ds)
                            # 6 accumulate dv and dk
                            dv_place = first_address(dv_tile) + begin * width * itemsize
                            weighted = (
                                one, changes.pointers.product, p + cells, lanes, 1, nk, ni,
                                first_address(do_pairs), ni * width, columns_v, itemsize, dv_place,
                                width, pair, careful_do, first_address(later), scratch.seen,
                            )  # fmt: skip
                            accumulate(changes.pointers.accumulate, weighted)
                            if changes.slope.code.shape[0]:
                                apply_dscore(scratch, ni, lanes)
                            dk_place = first_address(dk_tile) + begin * width * itemsize
                            weighted = (
                                one, changes.pointers.product, ds + cells, lanes, 1, nk, ni,
                                first_address(q_pairs), ni * width, columns, itemsize, dk_place,
                                width, pair, careful_q, first_address(later), scratch.seen,
                            )  # fmt: skip
                            accumulate(changes.pointers.accumulate, weighted)
                            in_rows = is_whole and not careful_k and has_rows
                            if in_rows:
                                rows_of_dq = (
                                    shape.scale, ds + cells, 1, lanes,
                                    k_place + begin * k_row * itemsize, k_row, 0,
                                    row_address(dq, b, h, i), dq.row, 0, ni, shape.d, nk, itemsize,
                                    0, 0, first_address(later),
                                )  # fmt: skip
                                multiply(changes.pointers.product, rows_of_dq)
                            elif adds_dq:
                                if is_whole:
                                    clear(target, shape.d * lanes * itemsize)
                                columns_of_dq = (
                                    changes.pointers, one, ds + cells, lanes, ni, nk,
                                    k_place + begin * k_row * itemsize, k_row, shape.d, itemsize,
                                    target, careful_k, first_address(later), scratch.seen,
                                )  # fmt: skip
                                add_columns(changes.pointers.columns, columns_of_dq)
                            if is_whole and not in_rows:
                                store_dq(shape, changes, scratch, target, dq, b, h, i, ni, lanes)
                        count += is_visited
            # 7 scale and store
            narrow = changes.pointers.narrow
            target, wide = row_address(dk, keys, h_kv, j0), scratch.k_wide
            store_rows(
                narrow, dk_tile, nj, shape.d, itemsize, shape.scale, dk, target, columns, wide
            )
            target, wide = row_address(dv, keys, h_kv, j0), scratch.v_wide
            store_rows(narrow, dv_tile, nj, shape.d_v, itemsize, one, dv, target, columns_v, wide)
        if adds_dq and work[place, 4] * shape.block_kv >= len_k and not is_whole:
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                for h in range(begin_head, end_head):
                    for i0 in range(0, shape.len_q[b], shape.block_q):
                        end_i = min(i0 + shape.block_q, shape.len_q[b])
                        for i in range(i0, end_i, changes.panel):
                            ni = min(changes.panel, end_i - i)
                            target = row_address(sums, b, h, i0 // shape.block_q)
                            target += (i - i0) * shape.d * itemsize
                            lanes = padded(ni, vector)
                            store_dq(shape, changes, scratch, target, dq, b, h, i, ni, lanes)
        visited[place] = count


@takes(
    lambda number: (INT, INT, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 7
    + (gradient_scratch_of(number),) + (vector(number),) * 3
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
    edges, widen = scratch.edges, changes.pointers.widen
    forget_tiles(changes.score, scratch.score_ri)
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
            rows = (row, size * itemsize, ni, lanes, shape.d, itemsize, panel, 0, zero)
            load_panel(changes.pointers.load, rows)
        clear(first_address(dq_tile), padded(end_i - i0, vector) * shape.d * itemsize)
        for member in range(work[place, 0], work[place, 1]):
            b = members[member]
            for i in range(i0, end_i, changes.panel):
                ni = min(changes.panel, end_i - i)
                panel = first_address(do_panel) + (i - i0) * shape.d_v * itemsize
                lanes = padded(ni, vector)
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
                careful = search(changes, k_place, k_row, nj, shape.d, itemsize, zero)
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
                        changes.pointers, one,
                        first_address(scratch.ds) + begin * lanes * itemsize, lanes, ni, nk,
                        k_place + begin * k_row * itemsize, k_row, shape.d, itemsize,
                        first_address(dq_tile) + (i - i0) * shape.d * itemsize, careful, 0,
                        scratch.seen,
                    )  # fmt: skip
                    add_columns(changes.pointers.columns, weighted)
        # 7 scale and store
        for i in range(i0, end_i, changes.panel):
            ni = min(changes.panel, end_i - i)
            target = first_address(dq_tile) + (i - i0) * shape.d * itemsize
            store_dq(
                shape, changes, scratch, target, dq, queries, h, i, ni, padded(ni, vector)
            )  # fmt: skip
