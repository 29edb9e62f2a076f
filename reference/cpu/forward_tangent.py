"""Tiled attention with its derivative along a direction, in one pass over keys and values.

As `forward`, with a tangent for each number: ts of the scores, tt of the logits. Tangents join the
online softmax as two more sums, which are rescaled with its own. With e = exp(t - m)::

    l = sum of e                       acc = sum of e Z v
    r = sum of e (tt - ref)            w   = sum of e (tt - ref) Z v + e Z tv

and at the end, O = acc / l, tO = (w - r O) / l, and the tangent of the LSE is ref + r / l. The sink
is one more key, of tangent tsink. Any number may stand for `ref`: a row takes the weighted mean
of tt over the first tile of keys that it sees, so that what all tangents of a row have in common
costs no digits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .accumulate import add_columns
from .arguments import CHANGES, Registers, TileSizes, shape_of
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector, whole_rows
from .memory import ROWS, aligned, first_address, row_address, store
from .microkernel import multiply, padded, round_up
from .narrow import write_narrow
from .packing import has_nonfinite, load_panel, pair_lanes, size_of_pairs, store_panel
from .program import PROGRAM
from .softmax import begin_maxima, exponentiate, finish_state, rescale, row_max
from .structs import Struct
from .tile import (
    EMPTY,
    FIRST,
    LAST,
    SYMBOL_COUNT,
    WORDS,
    apply_mask,
    apply_score,
    class_of_tile,
    describe_tile,
    dropout_factors,
    include_all,
    make_registers,
    note_seen,
    scale_tile,
)
from .widen import NATIVE, find_rows_at

Array = np.ndarray[Any, Any]


class Tangents(NamedTuple):
    """Which tangents a call has, as numbers 0 or 1, and the program that adds that of the bias."""

    q: int
    k: int
    v: int
    bias: Any  # an empty program if there is none


TANGENTS = Struct(Tangents, (INT, INT, INT, PROGRAM))


class TangentScratch(NamedTuple):
    """What one thread needs to work on tiles; tiles of scores are kept as [key, query]."""

    qt: Array  # queries, as `load_columns` leaves them
    tqt: Array  # their tangents
    s: Array  # scores, then weights
    ts: Array  # their tangents, then weighted
    slope: Array  # derivative of the score change
    z: Array  # dropout factors
    wide: Array  # rows of 16-bit floats, widened
    tk_wide: Array
    v_wide: Array
    tv_wide: Array
    words: Array  # of the generator, (4, lanes)
    seen: Array  # which pairs take part
    sums: Array  # acc, w and r, (2 Dv + 1, lanes) of each panel
    m: Array
    m_new: Array
    l: Array
    l_old: Array
    weight: Array  # of a tile's keys together
    ref: Array
    has_ref: Array
    symbols: Array
    edges: Array  # of the tile's keys, see `tile.FIRST`
    score_ri: Array
    score_rf: Array
    slope_ri: Array
    slope_rf: Array
    bias_ri: Array
    bias_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def tangent_scratch_of(number: types.Type) -> Struct:
    """Return the type of `TangentScratch`, given the accumulator's."""
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        TangentScratch,
        (*(tile,) * 10, WORDS, vector(types.boolean), *(tile,) * 8, INTS, INTS)
        + (TABLE, whole_rows(number)) * 3
        + (TABLE, of_mask) * 2,
    )


def tangent_scratch(
    sizes: TileSizes, has: Tangents, bias: Registers, number: np.dtype[Any]
) -> TangentScratch:
    """Allocate the scratch of one thread, for the tangents that a call has."""
    lanes = round_up(sizes.block_q, sizes.lanes_per_vector)
    width, width_v = (round_up(d, sizes.lanes_per_vector) for d in (sizes.d, sizes.d_v))
    panel = min(lanes, sizes.panel)
    cells = sizes.block_kv * panel
    queries = size_of_pairs(sizes.d, lanes, sizes.itemsize)
    rows = max(sizes.block_kv, panel) if sizes.widens else 0
    keys = sizes.block_kv * sizes.widens
    counts = (
        queries, queries * has.q, cells, cells, cells * sizes.changes_slope, cells * sizes.drops,
        rows * max(width, width_v), keys * width * has.k, keys * width_v, keys * width_v * has.v,
        lanes * (2 * sizes.d_v + 1), lanes, panel, lanes, panel, panel, lanes, lanes,
    )  # fmt: skip
    arrays: list[Any] = aligned(counts, number)
    made: list[Any] = [
        *arrays[:10],
        np.empty((4, panel if sizes.drops else 0), np.uint32),
        np.empty(cells if sizes.may_mask else 0, np.bool_),
        *arrays[10:],
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        *make_registers(sizes.score, lanes, number),
        *make_registers(sizes.slope, lanes, number),
        *make_registers(bias, lanes, number),
        *make_registers(sizes.mask, lanes, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    ]
    return TangentScratch(*made)


@helper
def init_sums(m, l, ref, has_ref, sums, lanes, depth, sink, tsink):
    """Begin with nothing seen, or with the sink: one key of that logit, tangent and value 0."""
    for i in range(lanes):
        m[i] = sink
        l[i] = 0 if sink == -math.inf else 1
        ref[i] = 0
        has_ref[i] = 0
    for n in range(lanes * depth):
        sums[n] = 0
    if sink != -math.inf:
        for i in range(lanes):
            sums[(depth - 1) * lanes + i] = tsink


@helper
def score_tangents(shape, changes, tangents, scratch, ni, lanes):
    """Make ts, products of directions, into tt: the tangents of logits; 0 where s is -inf."""
    ts, s, slope, scale = scratch.ts, scratch.s, scratch.slope, shape.scale
    begin, end = scratch.edges[FIRST] * lanes, scratch.edges[LAST] * lanes
    zero = ts.dtype.type(0)
    if tangents.q or tangents.k:
        if changes.slope.code.shape[0]:
            for n in range(begin, end):
                ts[n] = slope[n] * (scale * ts[n])
        else:
            for n in range(begin, end):
                ts[n] *= scale
    else:
        for n in range(begin, end):
            ts[n] = zero
    if tangents.bias.code.shape[0]:
        ri, rf, edges, symbols = scratch.bias_ri, scratch.bias_rf, scratch.edges, scratch.symbols
        apply_score(changes.pointers, tangents.bias, symbols, ni, edges, lanes, ts, ts, ri, rf)
    for n in range(begin, end):
        ts[n] = zero if s[n] == -math.inf else ts[n]


@helper
def weigh_tangents(scratch, p0, lanes, r):
    """Make tt into e (tt - ref), and add it to r; rows that see their first keys get a ref."""
    p, ts, begin, end = scratch.s, scratch.ts, scratch.edges[FIRST], scratch.edges[LAST]
    ref, has_ref = scratch.ref[p0 : p0 + lanes], scratch.has_ref[p0 : p0 + lanes]
    before, mean, weight = scratch.l_old, scratch.m_new, scratch.weight
    zero, one = p.dtype.type(0), p.dtype.type(1)
    missing = 0
    for i in range(lanes):
        missing |= has_ref[i] == zero
    if missing:
        # In rows that have seen nothing, l_old is the sink's part of the sum of weights.
        for i in range(lanes):
            mean[i] = weight[i] = zero
        for j in range(begin, end):
            row, weights = ts[j * lanes : (j + 1) * lanes], p[j * lanes : (j + 1) * lanes]
            for i in range(lanes):
                mean[i] += weights[i] * row[i]
                weight[i] += weights[i]
        for i in range(lanes):
            first = has_ref[i] == zero and weight[i] > zero
            number = mean[i] / weight[i] if first else zero
            ref[i] = number if first else ref[i]
            r[i] -= before[i] * number if first else zero
            has_ref[i] = one if first else has_ref[i]
    for j in range(begin, end):
        row, weights = ts[j * lanes : (j + 1) * lanes], p[j * lanes : (j + 1) * lanes]
        for i in range(lanes):
            value = weights[i] * (row[i] - ref[i])
            row[i] = value
            r[i] += value


@takes(
    lambda number: (
        INT, INT, TABLE, shape_of(number), CHANGES, TANGENTS, *(ROWS,) * 6, vector(number),
        vector(number), *(ROWS,) * 4, INTS, tangent_scratch_of(number),
    )
)  # fmt: skip
@kernel
def forward_tangent(
    first, last, work, shape, changes, tangents, q, k, v, tq, tk, tv, sink, tsink, out, tout, lse,
    tlse, visited, scratch,
):  # fmt: skip
    """Compute out, lse and their tangents of the work items from `first` to `last`.

    Items, `sink` and `visited` are as in `forward.forward`. `tangents` says which of the directions
    tq, tk and tv there are; the others are not read. `tsink` has one number per head.
    """
    itemsize, vector, depth = shape.itemsize, shape.lanes_per_vector, 2 * shape.d_v + 1
    pair = pair_lanes(itemsize)
    width, width_v = padded(shape.d, vector), padded(shape.d_v, vector)
    widen, wide, product = changes.pointers.widen, scratch.wide, changes.pointers.product
    zero, one = sink.dtype.type(0), sink.dtype.type(1)
    s, ts, z, seen, m_new = scratch.s, scratch.ts, scratch.z, scratch.seen, scratch.m_new
    symbols, edges, l_old = scratch.symbols, scratch.edges, scratch.l_old

    for item in range(first, last):
        b = work[item // shape.heads, 0]
        h = item % shape.heads
        h_kv = h // shape.group
        i0 = work[item // shape.heads, 1] * shape.block_q
        ni = min(shape.block_q, shape.len_q[b] - i0)
        count = 0

        # 1 load q
        for p0 in range(0, ni, changes.panel):
            n = min(changes.panel, ni - p0)
            lanes = padded(n, vector)
            place = first_address(scratch.qt) + p0 * shape.d * itemsize
            row, size = find_rows_at(widen, q, b, h, i0 + p0, n, shape.d, width, wide)
            rows = (row, size * itemsize, n, lanes, shape.d, itemsize, place, 0, zero)
            load_panel(changes.pointers.load, rows)
            if tangents.q:
                place = first_address(scratch.tqt) + p0 * shape.d * itemsize
                row, size = find_rows_at(widen, tq, b, h, i0 + p0, n, shape.d, width, wide)
                rows = (row, size * itemsize, n, lanes, shape.d, itemsize, place, 0, zero)
                load_panel(changes.pointers.load, rows)
            m, l, sums = scratch.m[p0:], scratch.l[p0:], scratch.sums[p0 * depth :]
            ref, has_ref = scratch.ref[p0:], scratch.has_ref[p0:]
            init_sums(m, l, ref, has_ref, sums, lanes, depth, sink[h], tsink[h])
        for j0 in range(0, shape.len_k[b], shape.block_kv):
            nj = min(shape.block_kv, shape.len_k[b] - j0)
            is_visited = careful = 0
            k_place = k_row = v_place = v_row = tk_place = tk_row = tv_place = tv_row = 0
            for p0 in range(0, ni, changes.panel):
                n = min(changes.panel, ni - p0)
                lanes = padded(n, vector)
                describe_tile(symbols, shape, b, h, i0 + p0, n, j0, nj)
                ri, rf = scratch.tile_ri, scratch.tile_rf
                if class_of_tile(changes, symbols, n, nj, edges, ri, rf) == EMPTY:
                    continue
                if not is_visited:
                    v_place, v_row = find_rows_at(
                        widen, v, b, h_kv, j0, nj, shape.d_v, width_v, scratch.v_wide
                    )
                    if tangents.v:
                        tv_place, tv_row = find_rows_at(
                            widen, tv, b, h_kv, j0, nj, shape.d_v, width_v, scratch.tv_wide
                        )
                    if changes.may_mask:
                        careful = has_nonfinite(
                            v_place, v_row * itemsize, nj, shape.d_v, itemsize, zero
                        )
                        if tangents.v:
                            careful |= has_nonfinite(
                                tv_place, tv_row * itemsize, nj, shape.d_v, itemsize, zero
                            )
                    k_place, k_row = find_rows_at(widen, k, b, h_kv, j0, nj, shape.d, width, wide)
                    if tangents.k:
                        tk_place, tk_row = find_rows_at(
                            widen, tk, b, h_kv, j0, nj, shape.d, width, scratch.tk_wide
                        )
                is_visited = 1
                if careful:
                    include_all(edges, nj)
                begin, end = edges[FIRST], edges[LAST]
                cells, keys = begin * lanes * itemsize, end - begin
                m, l = scratch.m[p0:], scratch.l[p0:]
                qt = first_address(scratch.qt) + p0 * shape.d * itemsize
                tqt = first_address(scratch.tqt) + p0 * shape.d * itemsize

                # 2 scores
                scores = (
                    shape.scale, k_place + begin * k_row * itemsize, k_row, 1, qt, pair,
                    pair * shape.d, first_address(s) + cells, lanes, 0, keys, lanes, shape.d,
                    itemsize, 0, 0, 0,
                )  # fmt: skip
                multiply(product, scores)
                if tangents.q:
                    of_queries = (
                        one, k_place + begin * k_row * itemsize, k_row, 1, tqt, pair,
                        pair * shape.d, first_address(ts) + cells, lanes, 0, keys, lanes, shape.d,
                        itemsize, 0, 0, 0,
                    )  # fmt: skip
                    multiply(product, of_queries)
                if tangents.k:
                    of_keys = (
                        one, tk_place + begin * tk_row * itemsize, tk_row, 1, qt, pair,
                        pair * shape.d, first_address(ts) + cells, lanes, 0, keys, lanes, shape.d,
                        itemsize, tangents.q, 0, 0,
                    )  # fmt: skip
                    multiply(product, of_keys)
                # 3 score mod
                if changes.slope.code.shape[0] and (tangents.q or tangents.k):
                    ri, rf, slope = scratch.slope_ri, scratch.slope_rf, scratch.slope
                    program = changes.slope
                    apply_score(
                        changes.pointers, program, symbols, n, edges, lanes, s, slope, ri, rf
                    )
                if changes.score.code.shape[0]:
                    ri, rf, program = scratch.score_ri, scratch.score_rf, changes.score
                    apply_score(changes.pointers, program, symbols, n, edges, lanes, s, s, ri, rf)
                # 4 mask
                apply_mask(changes, symbols, n, edges, lanes, s, scratch.mask_ri, scratch.mask_rf)
                if careful:
                    note_seen(s, seen, nj * lanes)
                score_tangents(shape, changes, tangents, scratch, n, lanes)
                # 5 row max
                begin_maxima(m, lanes, m_new)
                row_max(s, begin, end, lanes, m_new)
                # 6 rescale
                place = first_address(scratch.sums) + p0 * depth * itemsize
                rescale(m, m_new, l, place, lanes, depth, itemsize, shape.log2_e)
                for i in range(lanes):
                    l_old[i] = l[i]
                exponentiate(s, begin, end, lanes, m, l, shape.log2_e)
                first_r = p0 * depth + (depth - 1) * lanes
                weigh_tangents(scratch, p0, lanes, scratch.sums[first_r : first_r + lanes])
                # 7 accumulate p v
                if shape.drop_below:
                    words = scratch.words
                    dropout_factors(shape, changes, b, h, i0 + p0, n, j0, nj, lanes, z, words)
                    scale_tile(s, z, begin * lanes, end * lanes)
                    scale_tile(ts, z, begin * lanes, end * lanes)
                values, w = v_place + begin * v_row * itemsize, place + shape.d_v * lanes * itemsize
                weighted = (
                    changes.pointers, one, first_address(s) + cells, lanes, n, keys, values, v_row,
                    shape.d_v, itemsize, place, careful, 0, seen,
                )  # fmt: skip
                add_columns(changes.pointers.columns, weighted)
                weighted = (
                    changes.pointers, one, first_address(ts) + cells, lanes, n, keys, values,
                    v_row, shape.d_v, itemsize, w, careful, 0, seen,
                )  # fmt: skip
                add_columns(changes.pointers.columns, weighted)
                if tangents.v:
                    weighted = (
                        changes.pointers, one, first_address(s) + cells, lanes, n, keys,
                        tv_place + begin * tv_row * itemsize, tv_row, shape.d_v, itemsize, w,
                        careful, 0, seen,
                    )  # fmt: skip
                    add_columns(changes.pointers.columns, weighted)
            count += is_visited

        for p0 in range(0, ni, changes.panel):
            n = min(changes.panel, ni - p0)
            lanes = padded(n, vector)
            m, l = scratch.m[p0:], scratch.l[p0:]
            finish_state(m, l, lanes, s, m_new)
            # 8 normalise
            sums = scratch.sums[p0 * depth :]
            r = sums[(depth - 1) * lanes : depth * lanes]
            for i in range(lanes):
                l_old[i] = r[i] * s[i]
            for d in range(shape.d_v):
                acc = sums[d * lanes : (d + 1) * lanes]
                w = sums[(shape.d_v + d) * lanes : (shape.d_v + d + 1) * lanes]
                for i in range(lanes):
                    w[i] -= l_old[i] * acc[i]
            for part in range(2):
                result = tout if part else out
                place = first_address(sums) + part * shape.d_v * lanes * itemsize
                target, size = row_address(result, b, h, i0 + p0), result.row * itemsize
                if result.kind != NATIVE:
                    target, size = first_address(wide), width_v * itemsize
                normalised = (
                    place, n, lanes, shape.d_v, itemsize, first_address(s), target, size, zero,
                )  # fmt: skip
                store_panel(changes.pointers.store, normalised)
                if result.kind != NATIVE:
                    rounded = (
                        target, size, n, shape.d_v, row_address(result, b, h, i0 + p0),
                        result.row * result.itemsize,
                    )  # fmt: skip
                    write_narrow(changes.pointers.narrow, rounded)
            # 9 store lse
            for i in range(n):
                store(row_address(lse, b, h, i0 + p0 + i), m_new[i])
                store(row_address(tlse, b, h, i0 + p0 + i), scratch.ref[p0 + i] + l_old[i])
        visited[item] = count
