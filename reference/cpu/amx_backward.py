"""Tiled attention of 16-bit numbers, backward, in tiles of a matrix unit throughout.

As `backward`, with dQ^T = K^T dS^T for a panel of queries, and dV = P dO and dK = dS Q for a block
of them. Weights and gradients of scores are rounded to the sum of two numbers of bfloat16, as in
`amx_forward`. Products with infinity and NaN are added apart.
"""

from __future__ import annotations

from typing import Any

from .amx_code import MatrixUnit, helper_for, multiplier, session
from .amx_gradient import tile_gradient, tile_gradient_scratch_of
from .amx_gradient_code import pack_gradients
from .amx_memory import DEPTH, PARTS, ROW, SIDE, TILE, whole
from .amx_pack import SIZE, Packing
from .amx_rows import store_rows
from .amx_softmax import turn_columns
from .amx_variants import variants
from .arguments import CHANGES, shape_of
from .bias import forget_tiles
from .bias_gradient import add_to_bias, bias_sums_of
from .gradient_tile import apply_dscore, load_row_statistics
from .jit import INT, INTS, TABLE, Kernel, helper, kernel, takes
from .memory import ROWS, clear, first_address, load, prefetch_rows, row_address, store
from .tile import EMPTY, FIRST, LAST, class_of_tile, describe_tile

_FLOAT = 4  # bytes of a float32

rounded_up = helper(whole)


@helper
def pack_weights(scratch, n, nj, lanes, most, before):
    """Pack weights and gradients of scores; those of keys that no query sees are 0.

    Return whether a gradient, for which 0 stands, is not finite. There are `before` steps of other
    queries, and `most` in all.
    """
    p, ds, steps = scratch.p, scratch.ds, (nj + DEPTH - 1) // DEPTH
    zero = p.dtype.type(0)
    for cell in range(scratch.edges[FIRST] * lanes):
        p[cell] = ds[cell] = zero
    for cell in range(scratch.edges[LAST] * lanes, steps * DEPTH * lanes):
        p[cell] = ds[cell] = zero
    size, found = PARTS * TILE, 0
    for x in range(0, lanes, DEPTH):
        for s in range(steps):
            cell = (s * DEPTH * lanes + x) * _FLOAT
            across = (2 * s * most + before + x // DEPTH) * size
            along = (x // SIDE * steps + s) * size
            found |= pack_gradients(
                first_address(p) + cell, first_address(ds) + cell, lanes * _FLOAT, n - x,
                first_address(scratch.p_across) + across, first_address(scratch.ds_across) + across,
                most * size, first_address(scratch.ds_along) + along, steps * size,
            )  # fmt: skip
    return found


@helper
def store_sums(narrow, sums, count, width, columns, factor, rows, place):
    """Write sums, `width` numbers a row, times a factor to where `rows` has them."""
    for n in range(count * width):
        sums[n] *= factor
    store_rows(narrow, first_address(sums), count, width, columns, rows, place)


def _nonfinite_adders(packing: Packing) -> Any:
    """Make the helpers that add what tiles leave out: numbers, and weights, that are not finite."""
    load_number = packing.load

    @helper_for(packing.name)
    def add_nonfinite(
        source, size, first, last, columns, weights, across, along, count, target, target_row,
        target_column, careful, seen,
    ):  # fmt: skip
        """Add the products of weights with infinity and NaN in some rows, where pairs are seen."""
        for r in range(first, last):
            for d in range(columns):
                value = load_number(source + r * size + d * SIZE)
                if value - value != 0:
                    for o in range(count):
                        cell = r * across + o * along
                        if not careful or seen[cell]:
                            place = target + o * target_row + d * target_column
                            store(place, load(place, value) + weights[cell] * value)

    @helper_for(packing.name)
    def add_weighted(
        source, size, weights, across, along, first, last, count, columns, target, target_row,
        target_column,
    ):  # fmt: skip
        """Add the products of weights that are not finite and rows."""
        for r in range(first, last):
            for o in range(count):
                weight = weights[r * across + o * along]
                if weight - weight != 0:
                    for d in range(columns):
                        value = load_number(source + r * size + d * SIZE)
                        place = target + o * target_row + d * target_column
                        store(place, load(place, value) + weight * value)

    return add_nonfinite, add_weighted


def _row_packers(packing: Packing) -> Any:
    """Make the helpers that prepare a panel of queries, and a block of keys."""
    pack_queries, pack_keys = packing.queries, packing.keys

    @helper_for(packing.name)
    def pack_panel(rows, depth, b, h, i, n, target, flags):
        """Pack a panel of queries; return its address, the rows' distance, and what is special."""
        place, size = row_address(rows, b, h, i), rows.row * SIZE
        steps = (depth + DEPTH - 1) // DEPTH
        return place, size, pack_queries(place, size, n, depth, steps, target, flags)

    @helper_for(packing.name)
    def pack_block(rows, depth, b, h, j0, nj, target, flags):
        """Prepare a block of keys; return its address, the distance of rows, and as `pack_keys`."""
        place, size = row_address(rows, b, h, j0), rows.row * SIZE
        steps = (depth + DEPTH - 1) // DEPTH
        in_place, special = pack_keys(place, size, nj, depth, steps, target, flags)
        return place, size, in_place, special

    return pack_panel, pack_block


def _dq_adder(unit: type[MatrixUnit], packing: Packing) -> Any:
    """Make the helper that adds what a tile gives to dq of a panel, (column, query)."""
    parts = packing.parts
    multiply_along = multiplier(unit, parts, PARTS, True)

    @helper_for(unit.__name__, packing.name)
    def add_dq(scratch, nj, lanes, columns, target):
        steps, row = (nj + DEPTH - 1) // DEPTH, lanes * _FLOAT
        begin, end = scratch.edges[FIRST] // DEPTH, (scratch.edges[LAST] + DEPTH - 1) // DEPTH
        size, turned = steps * TILE, first_address(scratch.k_turned)
        for x in range(0, lanes, 2 * SIDE):
            weights = first_address(scratch.ds_along) + (x // SIDE * size + begin * TILE) * PARTS
            for d in range(0, columns, 2 * SIDE):
                keys = turned + (d // SIDE * size + begin * TILE) * parts
                multiply_along(
                    keys, ROW, keys + size * parts, ROW, parts * TILE, weights,
                    weights + size * PARTS, PARTS * TILE, end - begin,
                    target + d * row + x * _FLOAT, row, columns - d, lanes - x,
                )  # fmt: skip

    return add_dq


@helper
def store_dq(shape, narrow, scratch, sums, dq, b, h, i, n):
    """Write the rows of dq whose sums are at `sums`, (column, query), multiplied by the scale."""
    columns, row = rounded_up(shape.d, SIDE), rounded_up(n, SIDE) * _FLOAT
    rows = first_address(scratch.rows)
    for x in range(SIDE):
        scratch.delta[x] = shape.scale
    for x in range(0, n, SIDE):
        turn_columns(sums + x * _FLOAT, row, columns, first_address(scratch.delta), rows)
        target = row_address(dq, b, h, i + x)
        store_rows(narrow, rows, min(SIDE, n - x), columns, shape.d, dq, target)


def _make_dkdv(name: str, unit: type[MatrixUnit], packing: Packing) -> Kernel:
    parts, pack_pairs, pack_turned = packing.parts, packing.pairs, packing.turned
    multiply_across = multiplier(unit, PARTS, parts, True)
    add_dq, (start, stop) = _dq_adder(unit, packing), session(unit)
    add_nonfinite, add_weighted = _nonfinite_adders(packing)
    pack_panel, pack_block = _row_packers(packing)

    @helper_for(unit.__name__, packing.name)
    def add_block(weights, rows, most, steps, nj, columns, sums):
        """Add the product of weights of a block of keys and queries to sums of the keys."""
        size = most * PARTS * TILE
        for j in range(0, nj, 2 * SIDE):
            place = weights + j // SIDE * size
            for d in range(0, columns, 2 * SIDE):
                other = rows + d // SIDE * most * parts * TILE
                beside = other + most * parts * TILE
                multiply_across(
                    place, ROW, place + size, ROW, PARTS * TILE, other, beside, parts * TILE, steps,
                    sums + (j * columns + d) * _FLOAT, columns * _FLOAT, nj - j, columns - d,
                )  # fmt: skip

    def dkdv(
        first, last, runs, work, members, shape, changes, q, k, v, do, lse, delta, adds_dq, sums,
        dq, dk, dv, bias, visited, scratch,
    ):  # fmt: skip
        columns, columns_v = rounded_up(shape.d, SIDE), rounded_up(shape.d_v, SIDE)
        zero, one = scratch.p.dtype.type(0), scratch.p.dtype.type(1)
        edges, narrow = scratch.edges, changes.pointers.narrow
        prefetch = changes.pointers.prefetch
        q_pairs, do_pairs = first_address(scratch.q_pairs), first_address(scratch.do_pairs)
        dk_place, dv_place = first_address(scratch.dk), first_address(scratch.dv)
        p_across, ds_across = first_address(scratch.p_across), first_address(scratch.ds_across)
        most = scratch.q_pairs.shape[0] * 2 // (parts * DEPTH * columns)
        forget_tiles(changes.score, scratch.score_ri)
        start()
        for place in range(runs[first], runs[last]):
            h_kv = work[place, 2]
            keys = members[work[place, 0]]
            len_k = shape.len_k[keys]
            begin_head, end_head = h_kv * shape.group, (h_kv + 1) * shape.group
            # Whether this row has all keys of its head, in one block.
            is_whole = adds_dq and work[place, 3] == 0 and 0 < len_k <= shape.block_kv
            # As in `backward`, what the next head reads is loaded ahead.
            next_b = next_h = -1
            if is_whole and place + 1 < runs[last]:
                next_b, next_h = members[work[place + 1, 0]], work[place + 1, 2] * shape.group
                ahead = min(shape.len_k[next_b], shape.block_kv)
                prefetch_rows(prefetch, k, next_b, work[place + 1, 2], 0, ahead, shape.d)
                prefetch_rows(prefetch, v, next_b, work[place + 1, 2], 0, ahead, shape.d_v)
                numbers = min(shape.len_q[next_b], shape.block_q)
                prefetch_rows(prefetch, lse, next_b, next_h, 0, 1, numbers)
                prefetch_rows(prefetch, delta, next_b, next_h, 0, 1, numbers)
            if adds_dq and work[place, 3] == 0 and not is_whole:
                for member in range(work[place, 0], work[place, 1]):
                    b = members[member]
                    for h in range(begin_head, end_head):
                        for i in range(0, shape.len_q[b], shape.block_q):
                            ni = min(shape.block_q, shape.len_q[b] - i)
                            target = row_address(sums, b, h, i // shape.block_q)
                            clear(target, rounded_up(ni, SIDE) * columns * _FLOAT)
            count = 0
            for block in range(work[place, 3], work[place, 4]):
                j0 = block * shape.block_kv
                nj = min(shape.block_kv, len_k - j0)
                k_place, k_size, k_in_place, k_special = pack_block(
                    k, shape.d, keys, h_kv, j0, nj, first_address(scratch.k), scratch.k_flags
                )
                v_place, v_size, v_in_place, v_special = pack_block(
                    v, shape.d_v, keys, h_kv, j0, nj, first_address(scratch.v), scratch.v_flags
                )
                nonfinite_k = 0
                if adds_dq:
                    turned = first_address(scratch.k_turned)
                    nonfinite_k = pack_turned(k_place, k_size, nj, shape.d, turned)
                for n in range(rounded_up(nj, DEPTH) * columns):
                    scratch.dk[n] = zero
                for n in range(rounded_up(nj, DEPTH) * columns_v):
                    scratch.dv[n] = zero
                for member in range(work[place, 0], work[place, 1]):
                    b = members[member]
                    for h in range(begin_head, end_head):
                        for i0 in range(0, shape.len_q[b], shape.block_q):
                            end_i = min(i0 + shape.block_q, shape.len_q[b])
                            steps = 0  # of queries that see a key
                            for i in range(i0, end_i, changes.panel):
                                ni = min(changes.panel, end_i - i)
                                lanes = rounded_up(ni, SIDE)
                                describe_tile(scratch.symbols, shape, b, h, i, ni, j0, nj)
                                of_dq = first_address(scratch.dq)
                                if is_whole:
                                    clear(of_dq, columns * lanes * _FLOAT)
                                elif adds_dq:
                                    of_dq = row_address(sums, b, h, i0 // shape.block_q)
                                    of_dq += (i - i0) * columns * _FLOAT
                                ri, rf = scratch.tile_ri, scratch.tile_rf
                                if class_of_tile(
                                    changes, scratch.symbols, ni, nj, edges, ri, rf
                                ) == EMPTY:  # fmt: skip
                                    if is_whole:
                                        store_dq(shape, narrow, scratch, of_dq, dq, b, h, i, ni)
                                    continue
                                load_row_statistics(shape, lse, delta, b, h, i, ni, lanes, scratch)
                                if next_b >= 0:
                                    ahead = min(ni, shape.len_q[next_b] - i)
                                    prefetch_rows(prefetch, q, next_b, next_h, i, ahead, shape.d)
                                    prefetch_rows(prefetch, do, next_b, next_h, i, ahead, shape.d_v)
                                q_place, q_size, q_special = pack_panel(
                                    q, shape.d, b, h, i, ni, first_address(scratch.q),
                                    scratch.q_flags,
                                )  # fmt: skip
                                do_place, do_size, do_special = pack_panel(
                                    do, shape.d_v, b, h, i, ni, first_address(scratch.do),
                                    scratch.do_flags,
                                )  # fmt: skip
                                nonfinite_q = nonfinite_do = 0
                                for x in range(0, ni, DEPTH):
                                    step = (steps + x // DEPTH) * parts * TILE
                                    nonfinite_q |= pack_pairs(
                                        q_place + x * q_size, q_size, ni - x, shape.d,
                                        q_pairs + step, most,
                                    )  # fmt: skip
                                    nonfinite_do |= pack_pairs(
                                        do_place + x * do_size, do_size, ni - x, shape.d_v,
                                        do_pairs + step, most,
                                    )  # fmt: skip
                                nonfinite = (nonfinite_q | nonfinite_do | nonfinite_k) != 0
                                careful = changes.may_mask * nonfinite
                                tile = (
                                    shape, changes, scratch, b, h, i, ni, j0, nj, lanes, q_place,
                                    q_size, q_special, do_place, do_size, do_special, k_place,
                                    k_size, k_in_place, k_special, v_place, v_size, v_in_place,
                                    v_special, careful,
                                )  # fmt: skip
                                tile_gradient(changes.pointers.gradient, tile)
                                begin, end = edges[FIRST], edges[LAST]
                                if bias.places.shape[0]:
                                    add_to_bias(bias, shape, scratch, b, h, i, ni, j0, lanes)
                                # Step 6: accumulate dv and dk
                                cells = begin * lanes
                                if nonfinite_do:
                                    add_nonfinite(
                                        do_place, do_size, 0, ni, shape.d_v, scratch.p[cells:], 1,
                                        lanes, end - begin, dv_place + begin * columns_v * _FLOAT,
                                        columns_v * _FLOAT, _FLOAT, careful, scratch.seen[cells:],
                                    )  # fmt: skip
                                if changes.slope.code.shape[0]:
                                    apply_dscore(scratch, ni, lanes)
                                if nonfinite_q:
                                    add_nonfinite(
                                        q_place, q_size, 0, ni, shape.d, scratch.ds[cells:], 1,
                                        lanes, end - begin, dk_place + begin * columns * _FLOAT,
                                        columns * _FLOAT, _FLOAT, careful, scratch.seen[cells:],
                                    )  # fmt: skip
                                special = pack_weights(scratch, ni, nj, lanes, most, steps)
                                if special:
                                    add_weighted(
                                        q_place, q_size, scratch.ds[cells:], 1, lanes, 0, ni,
                                        end - begin, shape.d, dk_place + begin * columns * _FLOAT,
                                        columns * _FLOAT, _FLOAT,
                                    )  # fmt: skip
                                if adds_dq:
                                    add_dq(scratch, nj, lanes, columns, of_dq)
                                    if special:
                                        add_weighted(
                                            k_place, k_size, scratch.ds, lanes, 1, begin, end, ni,
                                            shape.d, of_dq, _FLOAT, lanes * _FLOAT,
                                        )  # fmt: skip
                                    if nonfinite_k:
                                        add_nonfinite(
                                            k_place, k_size, begin, end, shape.d, scratch.ds,
                                            lanes, 1, ni, of_dq, _FLOAT, lanes * _FLOAT,
                                            careful, scratch.seen,
                                        )  # fmt: skip
                                    if is_whole:
                                        store_dq(shape, narrow, scratch, of_dq, dq, b, h, i, ni)
                                steps += (lanes + DEPTH - 1) // DEPTH
                            if steps:
                                add_block(p_across, do_pairs, most, steps, nj, columns_v, dv_place)
                                add_block(ds_across, q_pairs, most, steps, nj, columns, dk_place)
                            count += steps > 0
                # Step 7: scale and store
                target, scale = row_address(dk, keys, h_kv, j0), shape.scale
                store_sums(narrow, scratch.dk, nj, columns, shape.d, scale, dk, target)
                target = row_address(dv, keys, h_kv, j0)
                store_sums(narrow, scratch.dv, nj, columns_v, shape.d_v, one, dv, target)
            if adds_dq and work[place, 4] * shape.block_kv >= len_k and not is_whole:
                for member in range(work[place, 0], work[place, 1]):
                    b = members[member]
                    for h in range(begin_head, end_head):
                        for i0 in range(0, shape.len_q[b], shape.block_q):
                            end_i = min(i0 + shape.block_q, shape.len_q[b])
                            block_place = row_address(sums, b, h, i0 // shape.block_q)
                            for i in range(i0, end_i, changes.panel):
                                ni = min(changes.panel, end_i - i)
                                of_dq = block_place + (i - i0) * columns * _FLOAT
                                store_dq(shape, narrow, scratch, of_dq, dq, b, h, i, ni)
            visited[place] = count
        stop()

    dkdv.__doc__ = "Compute dk and dv, and maybe dq, as `backward.backward_dkdv` does."
    dkdv.__name__ = dkdv.__qualname__ = f"backward_dkdv_{name}"
    declare = takes(
        lambda number: (INT, INT, INTS, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 6
        + (INT, ROWS, ROWS, ROWS, ROWS, bias_sums_of(number), INTS)
        + (tile_gradient_scratch_of(number),)
    )  # fmt: skip
    return declare(kernel(dkdv))


def _make_dq(name: str, unit: type[MatrixUnit], packing: Packing) -> Kernel:
    parts, pack_turned = packing.parts, packing.turned
    add_dq, (start, stop) = _dq_adder(unit, packing), session(unit)
    add_nonfinite, add_weighted = _nonfinite_adders(packing)
    pack_panel, pack_block = _row_packers(packing)

    def backward_dq(
        first, last, work, members, shape, changes, q, k, v, do, lse, delta, dq, scratch
    ):
        columns, edges = rounded_up(shape.d, SIDE), scratch.edges
        most = scratch.q_pairs.shape[0] * 2 // (parts * DEPTH * columns)
        sums, turned = first_address(scratch.dq), first_address(scratch.k_turned)
        forget_tiles(changes.score, scratch.score_ri)
        start()
        for item in range(first, last):
            place, h = item // shape.heads, item % shape.heads
            h_kv = h // shape.group
            i0 = work[place, 2] * shape.block_q
            queries = members[work[place, 0]]
            end_i = min(i0 + shape.block_q, shape.len_q[queries])
            clear(sums, rounded_up(end_i - i0, SIDE) * columns * _FLOAT)
            for member in range(work[place, 0], work[place, 1]):
                b = members[member]
                for j0 in range(0, shape.len_k[b], shape.block_kv):
                    nj = min(shape.block_kv, shape.len_k[b] - j0)
                    k_place, k_size, k_in_place, k_special = pack_block(
                        k, shape.d, b, h_kv, j0, nj, first_address(scratch.k), scratch.k_flags
                    )
                    v_place, v_size, v_in_place, v_special = pack_block(
                        v, shape.d_v, b, h_kv, j0, nj, first_address(scratch.v), scratch.v_flags
                    )
                    nonfinite = pack_turned(k_place, k_size, nj, shape.d, turned) != 0
                    careful = changes.may_mask * nonfinite
                    for i in range(i0, end_i, changes.panel):
                        ni = min(changes.panel, end_i - i)
                        lanes = rounded_up(ni, SIDE)
                        describe_tile(scratch.symbols, shape, b, h, i, ni, j0, nj)
                        ri, rf = scratch.tile_ri, scratch.tile_rf
                        if class_of_tile(
                            changes, scratch.symbols, ni, nj, edges, ri, rf
                        ) == EMPTY:  # fmt: skip
                            continue
                        load_row_statistics(shape, lse, delta, b, h, i, ni, lanes, scratch)
                        q_place, q_size, q_special = pack_panel(
                            q, shape.d, queries, h, i, ni, first_address(scratch.q),
                            scratch.q_flags,
                        )  # fmt: skip
                        do_place, do_size, do_special = pack_panel(
                            do, shape.d_v, b, h, i, ni, first_address(scratch.do), scratch.do_flags
                        )
                        tile = (
                            shape, changes, scratch, b, h, i, ni, j0, nj, lanes, q_place, q_size,
                            q_special, do_place, do_size, do_special, k_place, k_size, k_in_place,
                            k_special, v_place, v_size, v_in_place, v_special, careful,
                        )  # fmt: skip
                        tile_gradient(changes.pointers.gradient, tile)
                        # Step 6: accumulate dq
                        if changes.slope.code.shape[0]:
                            apply_dscore(scratch, ni, lanes)
                        special = pack_weights(scratch, ni, nj, lanes, most, 0)
                        of_dq = sums + (i - i0) * columns * _FLOAT
                        add_dq(scratch, nj, lanes, columns, of_dq)
                        if special:
                            add_weighted(
                                k_place, k_size, scratch.ds, lanes, 1, edges[FIRST], edges[LAST],
                                ni, shape.d, of_dq, _FLOAT, lanes * _FLOAT,
                            )  # fmt: skip
                        if nonfinite:
                            add_nonfinite(
                                k_place, k_size, edges[FIRST], edges[LAST], shape.d, scratch.ds,
                                lanes, 1, ni, of_dq, _FLOAT, lanes * _FLOAT, careful,
                                scratch.seen,
                            )  # fmt: skip
            # Step 7: scale and store
            for i in range(i0, end_i, changes.panel):
                ni, of_dq = min(changes.panel, end_i - i), sums + (i - i0) * columns * _FLOAT
                store_dq(shape, changes.pointers.narrow, scratch, of_dq, dq, queries, h, i, ni)
        stop()

    backward_dq.__doc__ = "Compute dq as `backward.backward_dq` does."
    backward_dq.__name__ = backward_dq.__qualname__ = f"backward_dq_{name}"
    declare = takes(
        lambda number: (INT, INT, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 7
        + (tile_gradient_scratch_of(number),)
    )  # fmt: skip
    return declare(kernel(backward_dq))


DKDV, DQ = variants(_make_dkdv), variants(_make_dq)
