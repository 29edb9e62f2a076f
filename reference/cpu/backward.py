"""Tiled attention, backward: the CPU twin of the backward kernels.

FlashAttention-2 (Dao 2023), Algorithm 2, in two passes that share `gradient_tile`: `backward_dkdv`
keeps a block of keys and values and lets the queries pass by, `backward_dq` keeps a block of
queries. Nothing is written by two work items, so the result does not depend on their order.
"""

from __future__ import annotations

from .accumulate import accumulate
from .arguments import CHANGES, shape_of
from .gradient_tile import apply_dscore, gradient_scratch_of, gradient_tile, load_row_statistics
from .jit import INT, INTS, TABLE, kernel, takes, vector
from .memory import ROWS, first_address, load_transposed, row_address, store
from .microkernel import padded
from .tile import EMPTY, class_of_tile, describe_tile


@takes(
    lambda number: (INT, INT, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 10
    + (INTS, gradient_scratch_of(number), vector(number), vector(number))
)  # fmt: skip
@kernel
def backward_dkdv(
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
    qt,
    dot,
    dk,
    dv,
    visited,
    scratch,
    dk_tile,
    dv_tile,
):
    """Compute dk and dv of the work items from `first` to `last`.

    Item n is key block ``work[n // heads_kv, 2]`` of key-value head ``n % heads_kv``; the batch
    entries that share these keys are ``members[work[n // heads_kv, 0] : work[n // heads_kv, 1]]``.
    `qt` and `dot` are panels of q and do. The sum runs over those entries, the group's heads and
    the query blocks, in that order.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    heads_kv = shape.heads // shape.group
    columns, columns_v = padded(shape.d, vector), padded(shape.d_v, vector)
    zero = dk_tile.dtype.type(0)
    for item in range(first, last):
        place = item // heads_kv
        h_kv = item % heads_kv
        j0 = work[place, 2] * shape.block_kv
        keys = members[work[place, 0]]
        nj = min(shape.block_kv, shape.len_k[keys] - j0)
        for n in range(nj * columns):
            dk_tile[n] = zero
        for n in range(nj * columns_v):
            dv_tile[n] = zero
        count = 0
        for member in range(work[place, 0], work[place, 1]):
            b = members[member]
            for h in range(h_kv * shape.group, (h_kv + 1) * shape.group):
                for i0 in range(0, shape.len_q[b], shape.block_q):
                    ni = min(shape.block_q, shape.len_q[b] - i0)
                    lanes = padded(ni, vector)
                    describe_tile(scratch.symbols, shape, b, h, i0, ni, j0, nj)
                    tile_class = class_of_tile(
                        changes, scratch.symbols, ni, nj, scratch.tile_ri, scratch.tile_rf
                    )
                    if tile_class == EMPTY:
                        continue
                    count += 1
                    load_row_statistics(shape, lse, delta, b, h, i0, ni, lanes, scratch)
                    q_panel = row_address(qt, b, h, i0 // shape.block_q, itemsize)
                    do_panel = row_address(dot, b, h, i0 // shape.block_q, itemsize)
                    gradient_tile(
                        changes.pointers.gradient,
                        (
                            shape,
                            changes,
                            scratch,
                            tile_class,
                            b,
                            h,
                            i0,
                            ni,
                            j0,
                            nj,
                            lanes,
                            q_panel,
                            do_panel,
                            k,
                            v,
                        ),
                    )
                    # 6 accumulate dv and dk
                    accumulate(
                        changes.pointers,
                        scratch.p,
                        lanes,
                        1,
                        nj,
                        ni,
                        do,
                        b,
                        h,
                        i0,
                        columns_v,
                        itemsize,
                        dv_tile,
                        changes.careful,
                        scratch.seen,
                    )
                    if changes.slope.code.shape[0]:
                        apply_dscore(scratch, ni, nj, lanes)
                    accumulate(
                        changes.pointers,
                        scratch.ds,
                        lanes,
                        1,
                        nj,
                        ni,
                        q,
                        b,
                        h,
                        i0,
                        columns,
                        itemsize,
                        dk_tile,
                        changes.careful,
                        scratch.seen,
                    )
        # 7 scale and store
        for j in range(nj):
            target = row_address(dk, keys, h_kv, j0 + j, itemsize)
            for d in range(shape.d):
                store(target + d * itemsize, dk_tile[j * columns + d] * shape.scale)
            target = row_address(dv, keys, h_kv, j0 + j, itemsize)
            for d in range(shape.d_v):
                store(target + d * itemsize, dv_tile[j * columns_v + d])
        visited[item] = count


@takes(
    lambda number: (INT, INT, TABLE, INTS, shape_of(number), CHANGES) + (ROWS,) * 7
    + (INTS, gradient_scratch_of(number)) + (vector(number),) * 3
)  # fmt: skip
@kernel
def backward_dq(
    first,
    last,
    work,
    members,
    shape,
    changes,
    k,
    v,
    q,
    do,
    lse,
    delta,
    dq,
    visited,
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
    columns = padded(shape.d, vector)
    zero = dq_tile.dtype.type(0)
    for item in range(first, last):
        place = item // shape.heads
        h = item % shape.heads
        i0 = work[place, 2] * shape.block_q
        queries = members[work[place, 0]]
        ni = min(shape.block_q, shape.len_q[queries] - i0)
        lanes = padded(ni, vector)
        # 1 load q
        load_transposed(q, queries, h, i0, ni, lanes, shape.d, itemsize, q_panel)
        for n in range(ni * columns):
            dq_tile[n] = zero
        count = 0
        for member in range(work[place, 0], work[place, 1]):
            b = members[member]
            h_kv = h // shape.group
            load_transposed(do, b, h, i0, ni, lanes, shape.d_v, itemsize, do_panel)
            load_row_statistics(shape, lse, delta, b, h, i0, ni, lanes, scratch)
            for j0 in range(0, shape.len_k[b], shape.block_kv):
                nj = min(shape.block_kv, shape.len_k[b] - j0)
                describe_tile(scratch.symbols, shape, b, h, i0, ni, j0, nj)
                tile_class = class_of_tile(
                    changes, scratch.symbols, ni, nj, scratch.tile_ri, scratch.tile_rf
                )
                if tile_class == EMPTY:
                    continue
                count += 1
                gradient_tile(
                    changes.pointers.gradient,
                    (
                        shape,
                        changes,
                        scratch,
                        tile_class,
                        b,
                        h,
                        i0,
                        ni,
                        j0,
                        nj,
                        lanes,
                        first_address(q_panel),
                        first_address(do_panel),
                        k,
                        v,
                    ),
                )
                # 6 accumulate dq
                if changes.slope.code.shape[0]:
                    apply_dscore(scratch, ni, nj, lanes)
                accumulate(
                    changes.pointers,
                    scratch.ds,
                    1,
                    lanes,
                    ni,
                    nj,
                    k,
                    b,
                    h_kv,
                    j0,
                    columns,
                    itemsize,
                    dq_tile,
                    changes.careful,
                    scratch.seen,
                )
        # 7 scale and store
        for i in range(ni):
            target = row_address(dq, queries, h, i0 + i, itemsize)
            for d in range(shape.d):
                store(target + d * itemsize, dq_tile[i * columns + d] * shape.scale)
        visited[item] = count
