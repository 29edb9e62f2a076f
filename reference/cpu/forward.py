"""Tiled attention, forward: the CPU twin of the forward kernels.

FlashAttention-2 (Dao 2023), Algorithm 1: one block of queries stays, blocks of keys and values pass
by, and the output is divided by the row sum once, at the end. Lines refer to that algorithm.
"""

from __future__ import annotations

import math

import numpy as np

from .accumulate import accumulate, padded
from .arguments import CHANGES, shape_of
from .jit import INT, INTS, TABLE, kernel, takes, vector
from .memory import ROWS, load_transposed, row_address, store
from .microkernel import multiply
from .softmax import exponentiate, init_state, rescale, row_max
from .tile import (
    EMPTY,
    PARTIAL,
    apply_mask,
    apply_score,
    class_of_tile,
    describe_tile,
    dropout_factors,
    make_registers,
    note_seen,
    scale_tile,
)


@takes(
    lambda number: (
        INT, INT, TABLE, shape_of(number), CHANGES, ROWS, ROWS, ROWS, vector(number), ROWS, ROWS,
        INTS,
    )
)  # fmt: skip
@kernel
def forward(first, last, work, shape, changes, q, k, v, sink, out, lse, visited):
    """Compute out and lse of the work items from `first` to `last`.

    Item n is query block ``work[n // heads, 1]`` of batch entry ``work[n // heads, 0]``, head
    ``n % heads``. `sink` has one logit per head (-inf: none). ``visited[n]`` receives how many
    tiles of keys were not EMPTY.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    most = padded(shape.block_q, vector)
    columns = padded(shape.d_v, vector)
    zero, one = sink.dtype.type(0), sink.dtype.type(1)
    qt = np.empty(shape.d * most, sink.dtype)
    s = np.empty(shape.block_kv * most, sink.dtype)
    z = np.empty(shape.block_kv * most if shape.drop_below else 0, sink.dtype)
    seen = np.empty(shape.block_kv * most if changes.careful else 0, np.bool_)
    acc = np.empty(most * columns, sink.dtype)
    m = np.empty(most, sink.dtype)
    m_new = np.empty(most, sink.dtype)
    l = np.empty(most, sink.dtype)
    symbols = np.empty(11, np.int64)
    score_ri, score_rf = make_registers(changes.score, most, sink)
    mask_ri, mask_rf = make_registers(changes.mask, most, np.empty(0, np.float32))
    tile_ri, tile_rf = make_registers(changes.tile, 1, np.empty(0, np.float32))

    for item in range(first, last):
        b = work[item // shape.heads, 0]
        h = item % shape.heads
        h_kv = h // shape.group
        i0 = work[item // shape.heads, 1] * shape.block_q
        ni = min(shape.block_q, shape.len_q[b] - i0)
        lanes = padded(ni, vector)
        count = 0

        # 1 load q
        load_transposed(q, b, h, i0, ni, lanes, shape.d, itemsize, qt)
        init_state(m, l, acc, lanes, columns, sink[h])
        for j0 in range(0, shape.len_k[b], shape.block_kv):
            nj = min(shape.block_kv, shape.len_k[b] - j0)
            describe_tile(symbols, shape, b, h, i0, ni, j0, nj)
            tile_class = class_of_tile(changes, symbols, ni, nj, tile_ri, tile_rf)
            if tile_class == EMPTY:
                continue
            count += 1

            # 2 scores
            k_tile = row_address(k, b, h_kv, j0, itemsize)
            multiply(
                shape.scale,
                k_tile,
                k.row,
                1,
                qt.ctypes.data,
                lanes,
                s.ctypes.data,
                lanes,
                nj,
                lanes,
                shape.d,
                itemsize,
            )
            # 3 score mod
            if changes.score.code.shape[0]:
                ri, rf = score_ri, score_rf
                apply_score(
                    changes.pointers, changes.score, symbols, i0, ni, nj, lanes, s, s, ri, rf
                )
            # 4 mask
            if tile_class == PARTIAL:
                apply_mask(changes, symbols, ni, nj, lanes, s, mask_ri, mask_rf)
            if changes.careful:
                note_seen(s, seen, nj * lanes)
            # 5 row max
            if row_max(s, nj, lanes, m, m_new):
                # 6 rescale
                rescale(m, m_new, l, acc, lanes, columns, shape.log2_e)
            exponentiate(s, nj, lanes, m, l, shape.log2_e)
            # 7 accumulate p v
            if shape.drop_below:
                dropout_factors(shape, changes, b, h, i0, ni, j0, nj, lanes, z)
                scale_tile(s, z, nj * lanes)
            accumulate(
                one,
                s,
                1,
                lanes,
                ni,
                nj,
                v,
                b,
                h_kv,
                j0,
                columns,
                itemsize,
                acc,
                changes.careful,
                seen,
            )

        for i in range(ni):
            # 8 normalise
            empty = l[i] == 0
            inverse = zero if empty else one / l[i]
            target = row_address(out, b, h, i0 + i, itemsize)
            for d in range(shape.d_v):
                store(target + d * itemsize, acc[i * columns + d] * inverse)
            # 9 store lse
            natural = -math.inf if empty else m[i] + math.log(l[i])
            store(row_address(lse, b, h, i0 + i, itemsize), sink.dtype.type(natural))
        visited[item] = count
