"""Tiled attention of 16-bit numbers, forward, in tiles of a matrix unit throughout.

As `forward.forward`, with scores S^T = K Q^T and outputs O^T = V^T P^T: queries are columns, so
that maxima, sums and their rescaling are lane by lane. Rows of K are multiplied where they lie, if
they are bfloat16; V is turned once for all queries of an item. Weights are rounded to the sum of
two numbers of bfloat16, by 2^-16 of them at most; numbers of float16 are the sum of two, which is
exact. What tiles do not multiply as float32 would (subnormal queries and keys of bfloat16, infinite
ones of float16; weights by infinity and NaN) is computed by itself. A subnormal value may count as
0; the bound allows that.

Scores, and then weights and their products, are computed by chunks of keys, which stay in the L1
cache.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .ahead import load_later, load_some, nothing
from .amx_code import MatrixUnit, helper_for, multiplier, session
from .amx_memory import CHUNK, DEPTH, PARTS, ROW, SIDE, TILE, whole
from .amx_pack import BFLOAT, SIZE, Packing
from .amx_rows import store_rows
from .amx_scores import score_mender, scores_filler
from .amx_softmax import (
    find_maxima,
    rescale,
    scale_scores,
    turn_columns,
    weigh,
    weigh_and_drop,
)
from .amx_variants import variants
from .arguments import CHANGES, TileSizes, shape_of
from .bias import forget_tiles
from .jit import INT, INTS, TABLE, Kernel, helper, kernel, takes, vector, whole_rows
from .memory import ROWS, aligned, first_address, load, row_address, store
from .softmax import begin_maxima, finish_state, row_max
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
    is_bias,
    look_at_all,
    make_registers,
)

Array = np.ndarray[Any, Any]

_FLOAT = 4  # bytes of a float32
P_TILES = CHUNK * PARTS  # of 16 queries

rounded = helper(whole)
load_part = BFLOAT.load


class TileScratch(NamedTuple):
    """What one thread needs; all that tiles read or write is float32, whatever it holds."""

    q: Array  # queries as columns of B, in tiles (16 queries, step, part)
    k: Array  # the rows of keys that are not read in place
    v: Array  # values as columns of A, in tiles (16 columns, step, part)
    p: Array  # a chunk's weights as columns of B, in tiles (16 queries, step, part)
    s: Array  # scores (key, query)
    z: Array  # dropout factors
    acc: Array  # output before it is normalised, by panels of queries, (column, query)
    rows: Array  # of the output
    m: Array
    m_new: Array
    l: Array
    words: Array  # of the generator, (4, lanes)
    q_flags: Array  # of the block's queries: whether they have subnormal numbers
    k_flags: Array
    symbols: Array
    edges: Array  # of the tile's keys, see `tile.FIRST`
    ahead: Array  # what to load meanwhile, see `ahead`
    score_ri: Array
    score_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def _scratch_of(number: types.Type) -> Struct:
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        TileScratch,
        (*(tile,) * 11, WORDS, *(INTS,) * 5)
        + (TABLE, whole_rows(number))
        + (TABLE, of_mask) * 2,
    )  # fmt: skip


def tile_scratch(sizes: TileSizes, number: np.dtype[Any], parts: int) -> TileScratch:
    """Allocate the scratch of one thread. Numbers of the arrays have so many parts."""
    lanes, keys = whole(sizes.block_q, SIDE), whole(sizes.block_kv, DEPTH)
    columns, depth = whole(sizes.d_v, SIDE), whole(sizes.d, DEPTH)
    panel = min(lanes, whole(sizes.panel, SIDE))
    cells = keys * panel
    q, k, v, p, s, z, acc, rows, m, m_new, l = aligned(
        (*(parts * count // 2 for count in (lanes * depth, keys * depth, columns * keys)),
         panel // SIDE * P_TILES * TILE // _FLOAT, cells, cells if sizes.drops else 0,
         lanes * columns, SIDE * columns, lanes, panel, lanes),
        number,
    )  # fmt: skip
    return TileScratch(
        q,
        k,
        v,
        p,
        s,
        z,
        acc,
        rows,
        m,
        m_new,
        l,
        np.empty((4, panel if sizes.drops else 0), np.uint32),
        np.empty(lanes, np.int64),
        np.empty(keys, np.int64),
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        nothing(),
        *make_registers(sizes.score, lanes, number, keeps=True),
        *make_registers(sizes.mask, lanes, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    )


@helper
def begin_outputs(scratch, out, lse, b, h, i0, ni, lanes, columns, d_v, sink, resumes):
    """Begin with nothing seen, or the sink, or what `out` and `lse` say of other keys.

    Sinks are a key of that logit and value 0; other keys are one of that logit and value.
    """
    m, l = scratch.m, scratch.l
    for i in range(ni):
        m[i] = load(row_address(lse, b, h, i0 + i), sink) if resumes else sink
        l[i] = 0 if m[i] == -math.inf else 1
    for i in range(ni, lanes):
        m[i] = -math.inf
        l[i] = 0
    for n in range(lanes * columns):
        scratch.acc[n] = 0


@helper
def resume_outputs(acc, lanes, out, b, h, i0, n, d_v, l):
    """Let a panel begin with what `out` says of other keys."""
    for i in range(n):
        row = row_address(out, b, h, i0 + i)
        if l[i]:
            for d in range(d_v):
                acc[d * lanes + i] = load(row + d * _FLOAT, l[i])


def _make_forward(name: str, unit: type[MatrixUnit], packing: Packing) -> Kernel:
    """Make the kernel that multiplies by the tiles of some unit."""
    fill_scores, mend_scores = scores_filler(unit, packing), score_mender(packing)
    multiply_values = multiplier(unit, packing.parts, PARTS, True)
    start, stop = session(unit)
    parts, load_number = packing.parts, packing.load
    pack_queries, pack_keys, pack_values = packing.queries, packing.keys, packing.turned

    @helper_for(unit.__name__, packing.name)
    def multiply_nonfinite(s, lanes, n, begin, end, first, v, v_size, d_v, p, acc):
        """Add the products with infinity and NaN, which are 0 in the tiles, if pairs are seen.

        The weights in the tiles are those of keys from `first` on.
        """
        for j in range(begin, end):
            for d in range(d_v):
                value = load_number(v + j * v_size + d * SIZE)
                if value - value != 0:
                    for i in range(n):
                        if s[j * lanes + i] != -math.inf:
                            # A weight is 0 if its first part is.
                            tile = i // SIDE * P_TILES + (j - first) // DEPTH * PARTS
                            tile = p + tile * TILE
                            place = tile + j % SIDE * ROW + i % SIDE * _FLOAT + j // SIDE % 2 * SIZE
                            acc[d * lanes + i] += load_part(place) * value

    @helper_for(unit.__name__, packing.name)
    def add_values(v, p, steps, first, last, lanes, columns, acc):
        """Add what a chunk's steps of keys, `first` to `last`, give to a panel's outputs."""
        tile, size, beside = parts * TILE, steps * TILE, P_TILES * TILE
        for d in range(0, columns, 2 * SIDE):
            place = v + (d // SIDE * size + first * TILE) * parts
            for i in range(0, lanes, 2 * SIDE):
                weights = p + i // SIDE * beside
                multiply_values(
                    place, ROW, place + size * parts, ROW, tile, weights, weights + beside,
                    PARTS * TILE, last - first, acc + (d * lanes + i) * _FLOAT, lanes * _FLOAT,
                    columns - d, lanes - i,
                )  # fmt: skip

    def forward_by_tiles(
        first, last, work, shape, changes, q, k, v, sink, resumes, out, lse, visited, scratch
    ):
        depth_steps = (shape.d + DEPTH - 1) // DEPTH
        columns = rounded(shape.d_v, SIDE)
        s, z, edges, symbols, m_new = (
            scratch.s, scratch.z, scratch.edges, scratch.symbols, scratch.m_new,
        )  # fmt: skip
        q_tiles, k_copies = first_address(scratch.q), first_address(scratch.k)
        v_tiles, p_tiles = first_address(scratch.v), first_address(scratch.p)
        s_place, rows = first_address(s), first_address(scratch.rows)
        one = sink.dtype.type(1)
        is_changed, later = changes.score.code.shape[0], scratch.ahead
        ahead = first_address(later)
        q_size, k_size, v_size = q.row * SIZE, k.row * SIZE, v.row * SIZE
        forget_tiles(changes.score, scratch.score_ri)
        start()

        for item in range(first, last):
            b, h = work[item // shape.heads, 0], item % shape.heads
            h_kv = h // shape.group
            i0 = work[item // shape.heads, 1] * shape.block_q
            ni = min(shape.block_q, shape.len_q[b] - i0)
            count = 0

            # As in `forward`, what the next head reads is loaded ahead.
            next_b = next_h = -1
            if item + 1 < last and ni == shape.len_q[b]:
                next_b, next_h = work[(item + 1) // shape.heads, 0], (item + 1) % shape.heads
                most = min(shape.len_k[next_b], shape.block_kv)
                load_later(later, k, next_b, next_h // shape.group, 0, most, shape.d)
                load_later(later, v, next_b, next_h // shape.group, 0, most, shape.d_v)
            # Step 1: load q
            q_place = row_address(q, b, h, i0)
            special_q = pack_queries(
                q_place, q_size, ni, shape.d, depth_steps, q_tiles, scratch.q_flags
            )
            begin_outputs(
                scratch, out, lse, b, h, i0, ni, rounded(ni, SIDE), columns, shape.d_v, sink[h],
                resumes,
            )  # fmt: skip
            if resumes:
                for p0 in range(0, ni, changes.panel):
                    n = min(changes.panel, ni - p0)
                    panel = scratch.acc[p0 * columns :]
                    lanes, l = rounded(n, SIDE), scratch.l[p0:]
                    resume_outputs(panel, lanes, out, b, h, i0 + p0, n, shape.d_v, l)
            for j0 in range(0, shape.len_k[b], shape.block_kv):
                nj = min(shape.block_kv, shape.len_k[b] - j0)
                steps = (nj + DEPTH - 1) // DEPTH
                k_place, v_place = row_address(k, b, h_kv, j0), row_address(v, b, h_kv, j0)
                is_visited = in_place = special_k = nonfinite = 0
                for p0 in range(0, ni, changes.panel):
                    n = min(changes.panel, ni - p0)
                    lanes = rounded(n, SIDE)
                    describe_tile(symbols, shape, b, h, i0 + p0, n, j0, nj)
                    ri, rf = scratch.tile_ri, scratch.tile_rf
                    if class_of_tile(changes, symbols, n, nj, edges, ri, rf) == EMPTY:
                        continue
                    if not is_visited:
                        in_place, special_k = pack_keys(
                            k_place, k_size, nj, shape.d, depth_steps, k_copies, scratch.k_flags
                        )
                        nonfinite = pack_values(v_place, v_size, nj, shape.d_v, v_tiles)
                    is_visited = 1
                    begin, end = edges[FIRST], edges[LAST]
                    begin_step, end_step = begin // DEPTH, (end + DEPTH - 1) // DEPTH
                    m, l, acc = scratch.m[p0:], scratch.l[p0:], scratch.acc[p0 * columns :]
                    row, maxima = lanes * _FLOAT, first_address(m_new)
                    acc_place = first_address(acc)

                    if j0 == 0 and next_b >= 0:
                        most = min(n, shape.len_q[next_b] - p0)
                        load_later(later, q, next_b, next_h, p0, most, shape.d)
                        load_later(later, out, next_b, next_h, p0, most, shape.d_v)
                    # Step 2: scores
                    begin_maxima(m, lanes, m_new)
                    panel = q_tiles + p0 // SIDE * depth_steps * parts * TILE
                    is_special = (special_q | special_k) != 0
                    is_plain = not is_changed and not is_special and shape.scale > 0
                    is_whole = edges[WHOLE_FIRST] == begin and edges[WHOLE_LAST] == end
                    factor = shape.scale
                    for c in range(begin_step // CHUNK * CHUNK, end_step, CHUNK):
                        before, low = max(c, begin_step), max(c * DEPTH, begin)
                        high = min((c + CHUNK) * DEPTH, end)
                        load_some(ahead)
                        fill_scores(
                            k_place, k_size, in_place, k_copies, panel, before * DEPTH, high, lanes,
                            depth_steps, s_place,
                        )  # fmt: skip
                        if is_plain and is_whole:
                            for x in range(0, row, ROW):
                                place = s_place + low * row + x
                                find_maxima(place, row, high - low, shape.scale, maxima + x)
                    adds_bias = is_changed and is_whole and not is_special
                    if adds_bias and is_bias(changes.score):
                        # Steps 3 and 5: score mod, row max
                        factor, ri, rf = one, scratch.score_ri, scratch.score_rf
                        apply_bias(
                            changes.pointers, changes.score, symbols, n, edges, lanes, s,
                            shape.scale, m_new, ri, rf,
                        )  # fmt: skip
                    elif not (is_plain and is_whole):
                        factor = one
                        # The maxima of scores that stay as they are.
                        ignored = rows
                        for part in range(3):
                            j, many = edges[part], edges[part + 1] - edges[part]
                            is_final = is_plain and part == WHOLE_FIRST
                            for x in range(0, row, ROW):
                                place = s_place + j * row + x
                                largest = maxima + x if is_final else ignored
                                scale_scores(place, row, many, shape.scale, largest)
                        if is_special:
                            queries = q_place + p0 * q_size
                            mend_scores(
                                k_place, k_size, queries, q_size, shape.d, shape.scale, begin, end,
                                n, lanes, scratch.q_flags[p0:], scratch.k_flags, s,
                            )  # fmt: skip
                        # Step 3: score mod
                        if is_changed:
                            ri, rf = scratch.score_ri, scratch.score_rf
                            pointers, score = changes.pointers, changes.score
                            apply_score(pointers, score, symbols, n, edges, lanes, s, s, ri, rf)
                        # Step 4: mask
                        ri, rf = scratch.mask_ri, scratch.mask_rf
                        apply_mask(changes, symbols, n, edges, lanes, s, ri, rf)
                        # Step 5: row max
                        if not is_plain:
                            look_at_all(edges, nj)
                        for side in (FIRST, WHOLE_LAST):
                            low, high = max(edges[side], begin), min(edges[side + 1], end)
                            row_max(s, low, high, lanes, m_new)
                    for j in range(begin_step * DEPTH, begin):
                        for i in range(lanes):
                            s[j * lanes + i] = -math.inf
                    # Step 6: rescale
                    for x in range(0, row, ROW):
                        load_some(ahead)
                        rescale(
                            first_address(m) + x, maxima + x, first_address(l) + x, acc_place + x,
                            row, columns, shape.log2_e,
                        )  # fmt: skip
                    z_place = s_place
                    if shape.drop_below:
                        words = scratch.words
                        dropout_factors(shape, changes, b, h, i0 + p0, n, j0, nj, lanes, z, words)
                        z_place = first_address(z)
                    of_m, of_l = first_address(m), first_address(l)
                    # Chunks are those of all keys: a mask has the bits of its array.
                    for c in range(begin_step // CHUNK * CHUNK, end_step, CHUNK):
                        before, after = max(c, begin_step), min(c + CHUNK, end_step)
                        whole_steps = min(after, end // DEPTH) - before
                        left = end % DEPTH if after * DEPTH > end else 0
                        pairs = max(left - SIDE, 0)
                        singles = min(left, SIDE) - pairs
                        for x in range(0, row, ROW):
                            load_some(ahead)
                            offset = before * DEPTH * row + x
                            place, p = s_place + offset, p_tiles + x // ROW * P_TILES * TILE
                            if shape.drop_below:
                                weigh_and_drop(
                                    place, row, z_place + offset, whole_steps, pairs, singles,
                                    factor, shape.log2_e, of_m + x, of_l + x, p,
                                )  # fmt: skip
                            else:
                                weigh(
                                    place, row, z_place + offset, whole_steps, pairs, singles,
                                    factor, shape.log2_e, of_m + x, of_l + x, p,
                                )  # fmt: skip
                        # Step 7: accumulate p v
                        load_some(ahead)
                        add_values(
                            v_tiles, p_tiles, steps, before, after, lanes, columns, acc_place
                        )
                        if nonfinite:
                            low, high = max(before * DEPTH, begin), min(after * DEPTH, end)
                            multiply_nonfinite(
                                s, lanes, n, low, high, before * DEPTH, v_place, v_size, shape.d_v,
                                p_tiles, acc,
                            )  # fmt: skip
                count += is_visited

            for p0 in range(0, ni, changes.panel):
                n = min(changes.panel, ni - p0)
                lanes, acc_place = rounded(n, SIDE), first_address(scratch.acc)
                acc_place += p0 * columns * _FLOAT
                m, l = scratch.m[p0:], scratch.l[p0:]
                finish_state(m, l, lanes, s, m_new)
                for i in range(0, n, SIDE):
                    # Step 8: normalise
                    load_some(ahead)
                    place, factors = acc_place + i * _FLOAT, s_place + i * _FLOAT
                    turn_columns(place, lanes * _FLOAT, columns, factors, rows)
                    few, target = min(SIDE, n - i), row_address(out, b, h, i0 + p0 + i)
                    store_rows(changes.pointers.narrow, rows, few, columns, shape.d_v, out, target)
                # Step 9: store lse
                for i in range(n):
                    store(row_address(lse, b, h, i0 + p0 + i), m_new[i])
            visited[item] = count
        stop()

    forward_by_tiles.__doc__ = "Compute out and lse of the work items, as `forward.forward` does."
    forward_by_tiles.__name__ = forward_by_tiles.__qualname__ = f"forward_{name}"
    declare = takes(
        lambda number: (
            INT, INT, TABLE, shape_of(number), CHANGES, ROWS, ROWS, ROWS, vector(number), INT,
            ROWS, ROWS, INTS, _scratch_of(number),
        )
    )  # fmt: skip
    return declare(kernel(forward_by_tiles))


FORWARDS = variants(_make_forward)
