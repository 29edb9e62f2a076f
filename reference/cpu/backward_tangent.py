"""Tiled attention, the tangent of the backward: the derivative of all gradients along a direction.

As `backward`, with two kernels: one keeps a block of keys and values and lets the queries pass by,
the other a block of queries. Where there are enough heads, the first computes tdq, too, and adds it
up in memory. Both take each tile from `tangent_tile`::

    tdq = scale (tdS k + dS tk)        tdk = scale (tdS^T q + dS^T tq)
    tdv = (Z tP)^T do + (Z P)^T tdo    tdbias = tdT

Every element is one sum in a fixed order, the same either way.
"""

from __future__ import annotations

from .accumulate import accumulate, add_columns
from .arguments import CHANGES, shape_of
from .backward import search, store_dq, store_rows
from .bias_gradient import add_to_bias, bias_sums_of
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector
from .memory import ROWS, clear, first_address, row_address
from .microkernel import padded
from .packing import load_panel, pair_lanes
from .tangent_tile import MOVING, apply_slopes, fill_tile, load_statistics, scratch_of
from .tile import EMPTY, FIRST, LAST, class_of_tile, describe_tile, include_all
from .widen import find_rows_at


@helper
def load_rows(shape, changes, scratch, rows, b, h, i, ni, lanes, depth, columns, pairs):
    """Load a panel of rows of queries as columns and as pairs; return whether NaN matters."""
    zero, width = scratch.lse.dtype.type(0), padded(depth, shape.lanes_per_vector)
    place, size = find_rows_at(
        changes.pointers.widen, rows, b, h, i, ni, depth, width, scratch.q_wide
    )
    given = (
        place, size * shape.itemsize, ni, lanes, depth, shape.itemsize, first_address(columns),
        first_address(pairs), zero,
    )  # fmt: skip
    return load_panel(changes.pointers.load, given) & changes.may_mask


@helper
def load_queries(shape, changes, moving, scratch, q, tq, do, tdo, b, h, i, ni, lanes):
    """Load queries, gradients of the output, and their tangents; return whether NaN matters."""
    d, d_v = shape.d, shape.d_v
    careful = load_rows(
        shape, changes, scratch, q, b, h, i, ni, lanes, d, scratch.qt, scratch.q_pairs
    )
    careful |= load_rows(
        shape, changes, scratch, do, b, h, i, ni, lanes, d_v, scratch.dot, scratch.do_pairs
    )
    if moving.q:
        careful |= load_rows(
            shape, changes, scratch, tq, b, h, i, ni, lanes, d, scratch.tqt, scratch.tq_pairs
        )
    if moving.do:
        careful |= load_rows(
            shape, changes, scratch, tdo, b, h, i, ni, lanes, d_v, scratch.tdot, scratch.tdo_pairs
        )
    return careful


@helper
def add_product(shape, changes, scratch, tile, lanes, ni, nk, nj, pairs, columns, target, careful):
    """Add a tile times rows of queries, which lie as pairs, to a block's rows: dk or dv."""
    width, itemsize = pair_lanes(shape.itemsize), shape.itemsize
    begin, one = scratch.edges[FIRST], scratch.lse.dtype.type(1)
    weighted = (
        one, changes.pointers.product, first_address(tile) + begin * lanes * itemsize, lanes, 1,
        nk, ni, first_address(pairs), ni * width, columns, itemsize,
        first_address(target) + begin * width * itemsize, width, nj * width, careful, 0,
        scratch.seen,
    )  # fmt: skip
    accumulate(changes.pointers.accumulate, weighted)


@helper
def add_to_dq(
    shape, changes, moving, scratch, ni, lanes, k, k_row, tk, tk_row, target, careful
):  # fmt: skip
    """Add a tile times its keys, and their tangents, to sums of dq."""
    edges, itemsize, one = scratch.edges, shape.itemsize, scratch.lse.dtype.type(1)
    begin, nk = edges[FIRST], edges[LAST] - edges[FIRST]
    cells = begin * lanes * itemsize
    weighted = (
        changes.pointers, one, first_address(scratch.ds) + cells, lanes, ni, nk,
        k + begin * k_row * itemsize, k_row, shape.d, itemsize, target, careful, 0,
        scratch.seen,
    )  # fmt: skip
    add_columns(changes.pointers.columns, weighted)
    if moving.k:
        weighted = (
            changes.pointers, one, first_address(scratch.dt) + cells, lanes, ni, nk,
            tk + begin * tk_row * itemsize, tk_row, shape.d, itemsize, target, careful, 0,
            scratch.seen,
        )  # fmt: skip
        add_columns(changes.pointers.columns, weighted)


@helper
def clear_dq(shape, sums, b, heads):
    """Let the sums of dq of some heads of a batch entry be 0."""
    for h in range(heads[0], heads[1]):
        for i in range(0, shape.len_q[b], shape.block_q):
            rows = padded(min(shape.block_q, shape.len_q[b] - i), shape.lanes_per_vector)
            clear(row_address(sums, b, h, i // shape.block_q), rows * shape.d * shape.itemsize)


@helper
def store_sums(shape, changes, scratch, sums, dq, b, heads):
    """Write dq of some heads of a batch entry."""
    for h in range(heads[0], heads[1]):
        for start in range(0, shape.len_q[b], shape.block_q):
            end = min(start + shape.block_q, shape.len_q[b])
            for i in range(start, end, changes.panel):
                ni = min(changes.panel, end - i)
                place = row_address(sums, b, h, start // shape.block_q)
                place += (i - start) * shape.d * shape.itemsize
                lanes = padded(ni, shape.lanes_per_vector)
                store_dq(shape, changes, scratch, place, dq, b, h, i, ni, lanes)


@takes(
    lambda number: (
        (INT, INT, INTS, TABLE, INTS, shape_of(number), CHANGES, MOVING)
        + (ROWS,) * 14
        + (INT, ROWS, ROWS)
        + (bias_sums_of(number), INTS, scratch_of(number), vector(number), vector(number))
    )
)
@kernel
def backward_tangent_dkdv(
    first, last, runs, work, members, shape, changes, moving, q, k, v, do, tq, tk, tv, tdo, lse, mu,
    delta, tdelta, dk, dv, adds_dq, sums, dq, bias, visited, scratch, dk_tile, dv_tile,
):  # fmt: skip
    """Compute the tangents of dk and dv, and sums of that of dbias, of some work items.

    Items are those of `backward.backward_dkdv`. With `adds_dq`, they compute dq, too, whose sums
    wait in `sums` for the last block of keys.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    columns, columns_v = padded(shape.d, vector), padded(shape.d_v, vector)
    edges, width = scratch.edges, pair_lanes(shape.itemsize)
    widen, one = changes.pointers.widen, dk_tile.dtype.type(1)
    for place in range(runs[first], runs[last]):
        h_kv = work[place, 2]
        of_keys = members[work[place, 0]]
        len_k, count = shape.len_k[of_keys], 0
        heads = h_kv * shape.group, (h_kv + 1) * shape.group
        if adds_dq and work[place, 3] == 0:
            for member in range(work[place, 0], work[place, 1]):
                clear_dq(shape, sums, members[member], heads)
        for block in range(work[place, 3], work[place, 4]):
            j0 = block * shape.block_kv
            nj = min(shape.block_kv, len_k - j0)
            k_at, k_row = find_rows_at(
                widen, k, of_keys, h_kv, j0, nj, shape.d, columns, scratch.k_wide
            )
            v_at, v_row = find_rows_at(
                widen, v, of_keys, h_kv, j0, nj, shape.d_v, columns_v, scratch.v_wide
            )
            tk_at = tk_row = tv_at = tv_row = 0
            if moving.k:
                tk_at, tk_row = find_rows_at(
                    widen, tk, of_keys, h_kv, j0, nj, shape.d, columns, scratch.tk_wide
                )
            if moving.v:
                tv_at, tv_row = find_rows_at(
                    widen, tv, of_keys, h_kv, j0, nj, shape.d_v, columns_v, scratch.tv_wide
                )
            careful_k = 0
            if adds_dq:
                zero = dk_tile.dtype.type(0)
                careful_k = search(changes, k_at, k_row, nj, shape.d, itemsize, zero)
                if moving.k:
                    careful_k |= search(changes, tk_at, tk_row, nj, shape.d, itemsize, zero)
            clear(first_address(dk_tile), padded(columns, width) * nj * itemsize)
            clear(first_address(dv_tile), padded(columns_v, width) * nj * itemsize)
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                for h in range(heads[0], heads[1]):
                    for start in range(0, shape.len_q[b], shape.block_q):
                        end_i = min(start + shape.block_q, shape.len_q[b])
                        for i in range(start, end_i, changes.panel):
                            ni = min(changes.panel, end_i - i)
                            lanes = padded(ni, vector)
                            describe_tile(scratch.symbols, shape, b, h, i, ni, j0, nj)
                            ri, rf = scratch.tile_ri, scratch.tile_rf
                            if class_of_tile(
                                changes, scratch.symbols, ni, nj, edges, ri, rf
                            ) == EMPTY:  # fmt: skip
                                continue
                            count += 1
                            load_statistics(lse, mu, delta, tdelta, b, h, i, ni, lanes, scratch)
                            careful = careful_k | load_queries(
                                shape, changes, moving, scratch, q, tq, do, tdo, b, h, i, ni, lanes
                            )
                            if careful:
                                include_all(edges, nj)
                            fill_tile(
                                shape, changes, moving, scratch, b, h, i, ni, j0, nj, lanes, k_at,
                                k_row, tk_at, tk_row, v_at, v_row, tv_at, tv_row, careful,
                            )  # fmt: skip
                            if bias.places.shape[0]:
                                add_to_bias(bias, shape, scratch, b, h, i, ni, j0, lanes)
                            # 6 accumulate dv and dk
                            nk = edges[LAST] - edges[FIRST]
                            add_product(
                                shape, changes, scratch, scratch.tp, lanes, ni, nk, nj,
                                scratch.do_pairs, columns_v, dv_tile, careful,
                            )  # fmt: skip
                            if moving.do:
                                add_product(
                                    shape, changes, scratch, scratch.p, lanes, ni, nk, nj,
                                    scratch.tdo_pairs, columns_v, dv_tile, careful,
                                )  # fmt: skip
                            apply_slopes(changes, moving, scratch, lanes)
                            add_product(
                                shape, changes, scratch, scratch.ds, lanes, ni, nk, nj,
                                scratch.q_pairs, columns, dk_tile, careful,
                            )  # fmt: skip
                            if moving.q:
                                add_product(
                                    shape, changes, scratch, scratch.dt, lanes, ni, nk, nj,
                                    scratch.tq_pairs, columns, dk_tile, careful,
                                )  # fmt: skip
                            if adds_dq:
                                target = row_address(sums, b, h, start // shape.block_q)
                                target += (i - start) * shape.d * itemsize
                                add_to_dq(
                                    shape, changes, moving, scratch, ni, lanes, k_at, k_row,
                                    tk_at, tk_row, target, careful,
                                )  # fmt: skip
            # 7 scale and store
            narrow = changes.pointers.narrow
            target, wide = row_address(dk, of_keys, h_kv, j0), scratch.k_wide
            store_rows(
                narrow, dk_tile, nj, shape.d, itemsize, shape.scale, dk, target, columns, wide
            )
            target, wide = row_address(dv, of_keys, h_kv, j0), scratch.v_wide
            store_rows(narrow, dv_tile, nj, shape.d_v, itemsize, one, dv, target, columns_v, wide)
        if adds_dq and work[place, 4] * shape.block_kv >= len_k:
            for member in range(work[place, 0], work[place, 1]):
                store_sums(shape, changes, scratch, sums, dq, members[member], heads)
        visited[place] = count


@takes(
    lambda number: (
        (INT, INT, TABLE, INTS, shape_of(number), CHANGES, MOVING)
        + (ROWS,) * 13
        + (scratch_of(number), vector(number))
    )
)
@kernel
def backward_tangent_dq(
    first, last, work, members, shape, changes, moving, q, k, v, do, tq, tk, tv, tdo, lse, mu,
    delta, tdelta, dq, scratch, dq_tile,
):  # fmt: skip
    """Compute the tangent of dq of some work items, which are those of `backward.backward_dq`."""
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    columns, columns_v = padded(shape.d, vector), padded(shape.d_v, vector)
    zero = dq_tile.dtype.type(0)
    edges, widen = scratch.edges, changes.pointers.widen
    target = first_address(dq_tile)
    for item in range(first, last):
        place, h = item // shape.heads, item % shape.heads
        h_kv = h // shape.group
        i0 = work[place, 2] * shape.block_q
        queries = members[work[place, 0]]
        end_i = min(i0 + shape.block_q, shape.len_q[queries])
        for i in range(i0, end_i, changes.panel):
            ni = min(changes.panel, end_i - i)
            lanes = padded(ni, vector)
            clear(target, lanes * shape.d * itemsize)
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                # 1 load q
                of_rows = load_queries(
                    shape, changes, moving, scratch, q, tq, do, tdo, b, h, i, ni, lanes
                )
                load_statistics(lse, mu, delta, tdelta, b, h, i, ni, lanes, scratch)
                for j0 in range(0, shape.len_k[b], shape.block_kv):
                    nj = min(shape.block_kv, shape.len_k[b] - j0)
                    describe_tile(scratch.symbols, shape, b, h, i, ni, j0, nj)
                    ri, rf = scratch.tile_ri, scratch.tile_rf
                    if class_of_tile(changes, scratch.symbols, ni, nj, edges, ri, rf) == EMPTY:
                        continue
                    k_at, k_row = find_rows_at(
                        widen, k, b, h_kv, j0, nj, shape.d, columns, scratch.k_wide
                    )
                    v_at, v_row = find_rows_at(
                        widen, v, b, h_kv, j0, nj, shape.d_v, columns_v, scratch.v_wide
                    )
                    tk_at = tk_row = tv_at = tv_row = 0
                    careful = search(changes, k_at, k_row, nj, shape.d, itemsize, zero)
                    if moving.k:
                        tk_at, tk_row = find_rows_at(
                            widen, tk, b, h_kv, j0, nj, shape.d, columns, scratch.tk_wide
                        )
                        careful |= search(changes, tk_at, tk_row, nj, shape.d, itemsize, zero)
                    if moving.v:
                        tv_at, tv_row = find_rows_at(
                            widen, tv, b, h_kv, j0, nj, shape.d_v, columns_v, scratch.tv_wide
                        )
                    if careful or of_rows:
                        include_all(edges, nj)
                    fill_tile(
                        shape, changes, moving, scratch, b, h, i, ni, j0, nj, lanes, k_at, k_row,
                        tk_at, tk_row, v_at, v_row, tv_at, tv_row, careful,
                    )  # fmt: skip
                    apply_slopes(changes, moving, scratch, lanes)
                    # 6 accumulate dq
                    add_to_dq(
                        shape, changes, moving, scratch, ni, lanes, k_at, k_row, tk_at, tk_row,
                        target, careful,
                    )  # fmt: skip
            # 7 scale and store
            store_dq(shape, changes, scratch, target, dq, queries, h, i, ni, lanes)
