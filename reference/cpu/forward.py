"""Tiled attention, forward: the CPU twin of the forward kernels.

FlashAttention-2 (Dao 2023), Algorithm 1: one block of queries stays, blocks of keys and values pass
by, and the output is divided by the row sum once, at the end. Lines refer to that algorithm.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .accumulate import accumulate
from .arguments import CHANGES, Changes, Shape, shape_of
from .jit import INT, INTS, TABLE, kernel, takes, vector, whole_rows
from .memory import ROWS, first_address, load_transposed, row_address, store
from .microkernel import multiply, padded, round_up
from .softmax import exponentiate, init_state, rescale, row_max
from .structs import Struct
from .tile import (
    EMPTY,
    PARTIAL,
    SYMBOL_COUNT,
    WORDS,
    apply_mask,
    apply_score,
    class_of_tile,
    describe_tile,
    dropout_factors,
    make_registers,
    note_seen,
    scale_tile,
)

Array = np.ndarray[Any, Any]


class ForwardScratch(NamedTuple):
    """What one thread needs to work on tiles; tiles of scores are kept as [key, query]."""

    qt: Array  # queries, (D, lanes)
    s: Array  # scores, then probabilities
    z: Array  # dropout factors
    words: Array  # of the generator, (4, lanes)
    seen: Array  # which pairs take part
    acc: Array  # output before it is normalised, (lanes, columns)
    m: Array
    m_new: Array
    l: Array
    symbols: Array
    score_ri: Array
    score_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def forward_scratch_of(number: types.Type) -> Struct:
    """Return the type of `ForwardScratch`, given the accumulator's."""
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        ForwardScratch,
        (tile, tile, tile, WORDS, vector(types.boolean), *(tile,) * 4, INTS)
        + (TABLE, whole_rows(number))
        + (TABLE, of_mask) * 2,
    )


def forward_scratch(shape: Shape, changes: Changes, number: np.dtype[Any]) -> ForwardScratch:
    """Allocate the scratch of a problem."""
    lanes = round_up(shape.block_q, shape.lanes_per_vector)
    columns = round_up(shape.d_v, shape.lanes_per_vector)
    cells = shape.block_kv * lanes
    return ForwardScratch(
        np.empty(shape.d * lanes, number),
        np.empty(cells, number),
        np.empty(cells if shape.drop_below else 0, number),
        np.empty((4, lanes if shape.drop_below else 0), np.uint32),
        np.empty(cells if changes.careful else 0, np.bool_),
        np.empty(lanes * columns, number),
        np.empty(lanes, number),
        np.empty(lanes, number),
        np.empty(lanes, number),
        np.empty(SYMBOL_COUNT, np.int64),
        *make_registers(changes.score, lanes, number),
        *make_registers(changes.mask, lanes, np.dtype(np.float32)),
        *make_registers(changes.tile, 1, np.dtype(np.float32)),
    )


@takes(
    lambda number: (
        INT, INT, TABLE, shape_of(number), CHANGES, ROWS, ROWS, ROWS, vector(number), ROWS, ROWS,
        INTS, forward_scratch_of(number),
    )
)  # fmt: skip
@kernel
def forward(first, last, work, shape, changes, q, k, v, sink, out, lse, visited, scratch):
    """Compute out and lse of the work items from `first` to `last`.

    Item n is query block ``work[n // heads, 1]`` of batch entry ``work[n // heads, 0]``, head
    ``n % heads``. `sink` has one logit per head (-inf: none). ``visited[n]`` receives how many
    tiles of keys were not EMPTY.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    columns = padded(shape.d_v, vector)
    zero, one = sink.dtype.type(0), sink.dtype.type(1)
    qt, s, z, seen, acc = scratch.qt, scratch.s, scratch.z, scratch.seen, scratch.acc
    m, m_new, l, symbols = scratch.m, scratch.m_new, scratch.l, scratch.symbols

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
            tile_class = class_of_tile(changes, symbols, ni, nj, scratch.tile_ri, scratch.tile_rf)
            if tile_class == EMPTY:
                continue
            count += 1

            # 2 scores
            k_tile = row_address(k, b, h_kv, j0, itemsize)
            scores = (
                shape.scale, k_tile, k.row, 1, first_address(qt), lanes, first_address(s), lanes,
                nj, lanes, shape.d, itemsize, 0,
            )  # fmt: skip
            multiply(changes.pointers.product, scores)
            # 3 score mod
            if changes.score.code.shape[0]:
                ri, rf = scratch.score_ri, scratch.score_rf
                apply_score(
                    changes.pointers, changes.score, symbols, i0, ni, nj, lanes, s, s, ri, rf
                )
            # 4 mask
            if tile_class == PARTIAL:
                ri, rf = scratch.mask_ri, scratch.mask_rf
                apply_mask(changes, symbols, ni, nj, lanes, s, ri, rf)
            if changes.careful:
                note_seen(s, seen, nj * lanes)
            # 5 row max
            if row_max(s, nj, lanes, m, m_new):
                # 6 rescale
                rescale(m, m_new, l, acc, lanes, columns, shape.log2_e)
            exponentiate(s, nj, lanes, m, l, shape.log2_e)
            # 7 accumulate p v
            if shape.drop_below:
                words = scratch.words
                dropout_factors(shape, changes, b, h, i0, ni, j0, nj, lanes, z, words)
                scale_tile(s, z, nj * lanes)
            accumulate(
                changes.pointers,
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
