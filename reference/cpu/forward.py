"""Tiled attention, forward: the CPU twin of the forward kernels.

FlashAttention-2 (Dao 2023), Algorithm 1: one block of queries stays, blocks of keys and values pass
by, and the output is divided by the row sum once, at the end. Lines refer to that algorithm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from .accumulate import add_columns
from .ahead import load_later, nothing
from .arguments import CHANGES, TileSizes, shape_of
from .bias import forget_tiles
from .jit import INT, INTS, TABLE, kernel, takes, vector, whole_rows
from .memory import ROWS, aligned, first_address, row_address, store
from .microkernel import multiply, padded, round_up
from .narrow import write_narrow
from .packing import (
    has_nonfinite,
    load_panel,
    pair_lanes,
    size_of_pairs,
    store_panel,
)
from .softmax import (
    begin_maxima,
    exponentiate,
    finish_state,
    init_state,
    rescale,
    resume_state,
    row_max,
)
from .structs import Struct
from .tile import (
    EMPTY,
    FIRST,
    LAST,
    SYMBOL_COUNT,
    WHOLE_FIRST,
    WHOLE_LAST,
    WORDS,
    apply_bias,
    apply_mask,
    apply_score,
    class_of_tile,
    describe_tile,
    dropout_factors,
    include_all,
    is_bias,
    look_at_all,
    make_registers,
    note_seen,
    scale_tile,
)
from .widen import NATIVE, find_rows_at

Array = np.ndarray[Any, Any]


class ForwardScratch(NamedTuple):
    """What one thread needs to work on tiles; tiles of scores are kept as [key, query]."""

    qt: Array  # queries, as `load_columns` leaves them
    s: Array  # scores, then probabilities
    z: Array  # dropout factors
    wide: Array  # rows of 16-bit floats, widened
    v_wide: Array
    words: Array  # of the generator, (4, lanes)
    seen: Array  # which pairs take part
    acc: Array  # output before it is normalised, (columns, lanes) of each panel
    m: Array
    m_new: Array
    l: Array
    symbols: Array
    edges: Array  # of the tile's keys, see `tile.FIRST`
    ahead: Array  # what to load while products are computed, see `ahead`
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
        (*(tile,) * 5, WORDS, vector(types.boolean), *(tile,) * 4, INTS, INTS, INTS)
        + (TABLE, whole_rows(number))
        + (TABLE, of_mask) * 2,
    )


def forward_scratch(sizes: TileSizes, number: np.dtype[Any]) -> ForwardScratch:
    """Allocate the scratch of one thread."""
    lanes = round_up(sizes.block_q, sizes.lanes_per_vector)
    columns = round_up(sizes.d_v, sizes.lanes_per_vector)
    panel = min(lanes, sizes.panel)
    cells = sizes.block_kv * panel
    dropped = cells if sizes.drops else 0
    queries = size_of_pairs(sizes.d, lanes, sizes.itemsize)
    rows = max(sizes.block_kv, panel) if sizes.widens else 0
    wide = rows * max(columns, round_up(sizes.d, sizes.lanes_per_vector))
    wide_v = sizes.block_kv * columns if sizes.widens else 0
    qt, s, z, wide_rows, v_rows, acc, m, m_new, l = aligned(
        (queries, cells, dropped, wide, wide_v, lanes * columns, lanes,
         panel, lanes), number
    )  # fmt: skip
    return ForwardScratch(
        qt,
        s,
        z,
        wide_rows,
        v_rows,
        np.empty((4, panel if sizes.drops else 0), np.uint32),
        np.empty(cells if sizes.may_mask else 0, np.bool_),
        acc,
        m,
        m_new,
        l,
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        nothing(),
        *make_registers(sizes.score, lanes, number, keeps=True),
        *make_registers(sizes.mask, lanes, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    )


@takes(
    lambda number: (
        INT, INT, TABLE, shape_of(number), CHANGES, ROWS, ROWS, ROWS, vector(number), INT, ROWS,
        ROWS, INTS, forward_scratch_of(number),
    )
)  # fmt: skip
@kernel
def forward(first, last, work, shape, changes, q, k, v, sink, resumes, out, lse, visited, scratch):
    """Compute out and lse of the work items from `first` to `last`.

    Item n is query block ``work[n // heads, 1]`` of batch entry ``work[n // heads, 0]``, head
    ``n % heads``. `sink` has one logit per head (-inf: none). With `resumes`, `out` and `lse` have
    the result over other keys, and these keys join it. ``visited[n]`` receives how many tiles of
    keys were not EMPTY.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    pair = pair_lanes(itemsize)
    columns, width = padded(shape.d_v, vector), padded(shape.d, vector)
    widen, wide = changes.pointers.widen, scratch.wide
    later = scratch.ahead
    zero, one = sink.dtype.type(0), sink.dtype.type(1)
    s, z, seen, m_new = scratch.s, scratch.z, scratch.seen, scratch.m_new
    symbols, edges = scratch.symbols, scratch.edges
    is_changed = changes.score.code.shape[0]
    forget_tiles(changes.score, scratch.score_ri)

    for item in range(first, last):
        b = work[item // shape.heads, 0]
        h = item % shape.heads
        h_kv = h // shape.group
        i0 = work[item // shape.heads, 1] * shape.block_q
        ni = min(shape.block_q, shape.len_q[b] - i0)
        count = 0

        # Short heads come and go faster than what they read from memory, so that of the next one is
        # loaded ahead: keys here, and with each panel of queries one of its panels.
        next_b = next_h = -1
        if item + 1 < last and ni == shape.len_q[b]:
            next_b, next_h = work[(item + 1) // shape.heads, 0], (item + 1) % shape.heads
            ahead = min(shape.len_k[next_b], shape.block_kv)
            load_later(later, k, next_b, next_h // shape.group, 0, ahead, shape.d)
            load_later(later, v, next_b, next_h // shape.group, 0, ahead, shape.d_v)
        # 1 load q
        for p0 in range(0, ni, changes.panel):
            n = min(changes.panel, ni - p0)
            lanes = padded(n, vector)
            qt = first_address(scratch.qt) + p0 * shape.d * itemsize
            row, size = find_rows_at(widen, q, b, h, i0 + p0, n, shape.d, width, wide)
            rows = (row, size * itemsize, n, lanes, shape.d, itemsize, qt, 0, zero)
            load_panel(changes.pointers.load, rows)
        init_state(scratch.m, scratch.l, scratch.acc, padded(ni, vector), columns, sink[h])
        if resumes:
            for p0 in range(0, ni, changes.panel):
                n = min(changes.panel, ni - p0)
                m, l, acc = scratch.m[p0:], scratch.l[p0:], scratch.acc[p0 * columns :]
                lanes = padded(n, vector)
                resume_state(m, l, acc, lanes, out, lse, b, h, i0 + p0, n, shape.d_v, itemsize)
        for j0 in range(0, shape.len_k[b], shape.block_kv):
            nj = min(shape.block_kv, shape.len_k[b] - j0)
            is_visited = k_place = k_row = v_place = v_row = careful = 0
            for p0 in range(0, ni, changes.panel):
                n = min(changes.panel, ni - p0)
                lanes = padded(n, vector)
                describe_tile(symbols, shape, b, h, i0 + p0, n, j0, nj)
                ri, rf = scratch.tile_ri, scratch.tile_rf
                if class_of_tile(changes, symbols, n, nj, edges, ri, rf) == EMPTY:
                    continue
                if not is_visited:
                    v_place, v_row = find_rows_at(
                        widen, v, b, h_kv, j0, nj, shape.d_v, columns, scratch.v_wide
                    )
                    if changes.may_mask:
                        careful = has_nonfinite(
                            v_place, v_row * itemsize, nj, shape.d_v, itemsize, zero
                        )
                    k_place, k_row = find_rows_at(widen, k, b, h_kv, j0, nj, shape.d, width, wide)
                is_visited = 1
                if careful:
                    include_all(edges, nj)
                begin, end = edges[FIRST], edges[LAST]
                m, l = scratch.m[p0:], scratch.l[p0:]
                qt = first_address(scratch.qt) + p0 * shape.d * itemsize

                if j0 == 0 and next_b >= 0:
                    ahead = min(n, shape.len_q[next_b] - p0)
                    load_later(later, q, next_b, next_h, p0, ahead, shape.d)
                    load_later(later, out, next_b, next_h, p0, ahead, shape.d_v)
                # 2 scores
                begin_maxima(m, lanes, m_new)
                for part in range(3):
                    j = edges[part]
                    if j < edges[part + 1]:
                        # The product finds the maxima of scores that stay as they are.
                        is_whole = part == WHOLE_FIRST and not is_changed
                        scores = (
                            shape.scale, k_place + j * k_row * itemsize, k_row, 1, qt, pair,
                            pair * shape.d,
                            first_address(s) + j * lanes * itemsize, lanes, 0,
                            edges[part + 1] - j, lanes, shape.d, itemsize, 0,
                            first_address(m_new) if is_whole else 0, first_address(later),
                        )  # fmt: skip
                        multiply(changes.pointers.product, scores)
                # 3 score mod
                ri, rf, score = scratch.score_ri, scratch.score_rf, changes.score
                sees_all = edges[WHOLE_FIRST] == begin and edges[WHOLE_LAST] == end
                adds_bias = sees_all and is_bias(score)
                if adds_bias:  # and 5 row max
                    apply_bias(
                        changes.pointers, score, symbols, n, edges, lanes, s, one, m_new, ri, rf
                    )
                elif is_changed:
                    apply_score(changes.pointers, score, symbols, n, edges, lanes, s, s, ri, rf)
                # 4 mask
                apply_mask(changes, symbols, n, edges, lanes, s, scratch.mask_ri, scratch.mask_rf)
                if careful:
                    note_seen(s, seen, nj * lanes)
                # 5 row max
                if is_changed and not adds_bias:
                    look_at_all(edges, nj)
                for side in (FIRST, WHOLE_LAST):
                    row_max(s, max(edges[side], begin), min(edges[side + 1], end), lanes, m_new)
                # 6 rescale
                acc = first_address(scratch.acc) + p0 * columns * itemsize
                rescale(m, m_new, l, acc, lanes, shape.d_v, itemsize, shape.log2_e)
                exponentiate(s, begin, end, lanes, m, l, shape.log2_e)
                # 7 accumulate p v
                if shape.drop_below:
                    words = scratch.words
                    dropout_factors(shape, changes, b, h, i0 + p0, n, j0, nj, lanes, z, words)
                    scale_tile(s, z, begin * lanes, end * lanes)
                weighted = (
                    changes.pointers, one, first_address(s) + begin * lanes * itemsize, lanes, n,
                    end - begin, v_place + begin * v_row * itemsize, v_row, shape.d_v, itemsize,
                    acc, careful, first_address(later), seen,
                )  # fmt: skip
                add_columns(changes.pointers.columns, weighted)
            count += is_visited

        for p0 in range(0, ni, changes.panel):
            n = min(changes.panel, ni - p0)
            lanes = padded(n, vector)
            m, l, acc = scratch.m[p0:], scratch.l[p0:], scratch.acc[p0 * columns :]
            finish_state(m, l, lanes, s, m_new)
            # 8 normalise
            target, size = row_address(out, b, h, i0 + p0), out.row * itemsize
            if out.kind != NATIVE:
                target, size = first_address(wide), columns * itemsize
            normalised = (
                first_address(acc), n, lanes, shape.d_v, itemsize, first_address(s), target, size,
                zero,
            )  # fmt: skip
            store_panel(changes.pointers.store, normalised)
            if out.kind != NATIVE:
                rounded = (
                    target, size, n, shape.d_v, row_address(out, b, h, i0 + p0),
                    out.row * out.itemsize,
                )  # fmt: skip
                write_narrow(changes.pointers.narrow, rounded)
            # 9 store lse
            for i in range(n):
                store(row_address(lse, b, h, i0 + p0 + i), m_new[i])
        visited[item] = count
