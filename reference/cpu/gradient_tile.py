"""One tile of the backward: scores recomputed, probabilities, and the gradient of the scores.

Every backward kernel goes through here, so that dq, dk, dv and dbias see the same dS.
FlashAttention-2 (Dao 2023), Algorithm 2, lines 11-15, with score changes, masks and dropout.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .ahead import nothing
from .arguments import CHANGES, TileSizes, shape_of
from .jit import INT, INTS, TABLE, caller, helper, kernel, takes, vector, whole_rows
from .memory import aligned, first_address, load, row_address
from .microkernel import VECTOR_BYTES, multiply, round_up
from .packing import pair_lanes
from .structs import Struct
from .tile import (
    FIRST,
    LAST,
    SYMBOL_COUNT,
    WORDS,
    apply_mask,
    apply_score,
    dropout_factors,
    make_registers,
    note_seen,
)
from .vectors import INT as WORD
from .vectors import Emitter, emit_exp2, emit_loop

Array = np.ndarray[Any, Any]


class GradientScratch(NamedTuple):
    """What one thread needs to work on tiles; tiles are kept as [key, query]."""

    p: Array  # scores, then probabilities after dropout
    ds: Array  # dP, then dS
    z: Array  # dropout factors
    words: Array  # of the generator, (4, lanes)
    slope: Array  # derivative of the score change
    seen: Array  # which pairs take part
    lse: Array  # of the tile's queries
    delta: Array
    k_wide: Array  # rows of 16-bit floats, widened: the tile's keys, its values, its queries
    v_wide: Array
    q_wide: Array
    symbols: Array
    edges: Array  # of the tile's keys, see `tile.FIRST`
    ahead: Array  # what to load while products are computed, see `ahead`
    score_ri: Array
    score_rf: Array
    slope_ri: Array
    slope_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def gradient_scratch_of(number: types.Type) -> Struct:
    """Return the type of `GradientScratch`, given the accumulator's."""
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        GradientScratch,
        (tile, tile, tile, WORDS, tile, vector(types.boolean), *(tile,) * 5, INTS, INTS, INTS)
        + (TABLE, whole_rows(number)) * 2
        + (TABLE, of_mask) * 2,
    )


def gradient_scratch(sizes: TileSizes, number: np.dtype[Any]) -> GradientScratch:
    """Allocate the scratch of one thread."""
    lanes = min(round_up(sizes.block_q, sizes.lanes_per_vector), sizes.panel)
    cells = sizes.block_kv * lanes
    dropped, changed = sizes.drops * cells, sizes.changes_slope * cells
    wide, wide_v = (round_up(columns, sizes.lanes_per_vector) for columns in (sizes.d, sizes.d_v))
    rows_q, rows_k = (sizes.widens * rows for rows in (lanes, sizes.block_kv))
    p, ds, z, slope, lse, delta, k_wide, v_wide, q_wide = aligned(
        (cells, cells, dropped, changed, lanes, lanes, rows_k * wide, rows_k * wide_v,
         rows_q * max(wide, wide_v)), number
    )  # fmt: skip
    return GradientScratch(
        p,
        ds,
        z,
        np.empty((4, lanes if sizes.drops else 0), np.uint32),
        slope,
        np.empty(cells if sizes.may_mask else 0, np.bool_),
        lse,
        delta,
        k_wide,
        v_wide,
        q_wide,
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        nothing(),
        *make_registers(sizes.score, lanes, number, keeps=True),
        *make_registers(sizes.slope, lanes, number),
        *make_registers(sizes.mask, lanes, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    )


@helper
def load_row_statistics(shape, lse, delta, b, h, i0, ni, lanes, scratch):
    """Load lse and delta of the tile's queries. An empty row gets lse = inf, so that its p is 0."""
    one = scratch.lse.dtype.type(1)
    for i in range(ni):
        value = load(row_address(lse, b, h, i0 + i), one)
        scratch.lse[i] = math.inf if value == -math.inf else value
        scratch.delta[i] = load(row_address(delta, b, h, i0 + i), one)
    for i in range(ni, lanes):
        scratch.lse[i] = math.inf
        scratch.delta[i] = 0


@intrinsic
def _weigh(typingctx, p, ds, z, row_size, keys, lse, delta, log2_e):
    """Make a vector of every key's scores and dP into weights and the gradient of the scores."""

    def codegen(context, builder, sig, args):
        p, ds, z, row_size, keys, lse, delta, log2_e = args
        emit = Emitter(builder, context.get_value_type(sig.args[7]))
        nothing = ir.Constant(emit.vector, [-math.inf] * emit.lanes)
        one = ir.Constant(emit.vector, [1.0] * emit.lanes)
        lse, delta, factor = emit.load(lse), emit.load(delta), emit.splat(log2_e)
        drops = builder.icmp_signed("!=", z, WORD(0))
        factors = builder.select(drops, z, p)  # some address to read from
        zero = emit.zero

        def step(j, values):
            offset = builder.mul(j, row_size)
            p_place, ds_place = builder.add(p, offset), builder.add(ds, offset)
            score, dp = emit.load(p_place), emit.load(ds_place)
            kept = builder.select(drops, emit.load(builder.add(factors, offset)), one)
            # A probability is at most 1; NaN stays.
            below = builder.fsub(score, lse)
            is_above = builder.fcmp_ordered(">", below, zero)
            below = builder.select(is_above, builder.fsub(below, below), below)
            weight = emit_exp2(builder, builder.fmul(below, factor))
            gradient = builder.fmul(weight, builder.fsub(builder.fmul(dp, kept), delta))
            weight = builder.fmul(weight, kept)
            masked = builder.fcmp_ordered("==", score, nothing)
            emit.store(builder.select(masked, zero, weight), p_place)
            emit.store(builder.select(masked, zero, gradient), ds_place)
            return []

        emit_loop(builder, keys, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, log2_e), codegen


@helper
def change_scores(shape, changes, scratch, ni, nj, lanes, careful):
    """Change and mask the scores of a tile, scratch.p, between the ends of `scratch.edges`.

    With `careful`, scratch.seen says which pairs take part.
    """
    p, symbols, edges = scratch.p, scratch.symbols, scratch.edges
    # 3 score mod
    if changes.slope.code.shape[0]:
        ri, rf = scratch.slope_ri, scratch.slope_rf
        slope = scratch.slope
        apply_score(changes.pointers, changes.slope, symbols, ni, edges, lanes, p, slope, ri, rf)
    if changes.score.code.shape[0]:
        ri, rf = scratch.score_ri, scratch.score_rf
        apply_score(changes.pointers, changes.score, symbols, ni, edges, lanes, p, p, ri, rf)
    # 4 mask
    apply_mask(changes, symbols, ni, edges, lanes, p, scratch.mask_ri, scratch.mask_rf)
    if careful:
        note_seen(p, scratch.seen, nj * lanes)


@helper
def weigh_scores(shape, changes, scratch, b, h, i0, ni, j0, nj, lanes):
    """Make scores and dP, scratch.p and scratch.ds, into weights and the gradient of the scores."""
    begin, size = scratch.edges[FIRST], lanes * shape.itemsize
    keys = scratch.edges[LAST] - begin
    p_place = first_address(scratch.p) + begin * size
    ds_place = first_address(scratch.ds) + begin * size
    z_place = 0
    if shape.drop_below:
        z, words = scratch.z, scratch.words
        dropout_factors(shape, changes, b, h, i0, ni, j0, nj, lanes, z, words)
        z_place = first_address(z) + begin * size
    lse, delta = first_address(scratch.lse), first_address(scratch.delta)
    for x in range(0, size, VECTOR_BYTES):
        z = z_place + x if z_place else 0
        _weigh(p_place + x, ds_place + x, z, size, keys, lse + x, delta + x, shape.log2_e)


@takes(
    lambda number: (
        shape_of(number), CHANGES, gradient_scratch_of(number), *(INT,) * 14
    )
)  # fmt: skip
@kernel
def fill_gradient_tile(
    shape, changes, scratch, b, h, i0, ni, j0, nj, lanes, qt, dot, k, k_row, v, v_row, careful
):
    """Fill scratch.p with p (after dropout) and scratch.ds with the gradient of the changed scores.

    They are filled for the keys between the ends of `scratch.edges`. `qt` and `dot` are addresses
    of the tile's queries and output gradients as `load_columns` leaves them; `k` and `v` are
    those of its keys and values, whose rows begin `k_row` and `v_row` elements apart. Where scores
    are changed, scratch.slope is their derivative: the gradient of the scores themselves is
    ds * slope. With `careful`, scratch.seen says which pairs take part.
    """
    itemsize, pair = shape.itemsize, pair_lanes(shape.itemsize)
    p, ds, edges = scratch.p, scratch.ds, scratch.edges
    one, ahead = p.dtype.type(1), first_address(scratch.ahead)
    begin, keys, size = edges[FIRST], edges[LAST] - edges[FIRST], lanes * itemsize
    k_tile, v_tile = k + begin * k_row * itemsize, v + begin * v_row * itemsize
    p_place, ds_place = first_address(p) + begin * size, first_address(ds) + begin * size
    # 2 scores
    scores = (
        shape.scale, k_tile, k_row, 1, qt, pair, pair * shape.d, p_place, lanes, 0, keys, lanes,
        shape.d, itemsize, 0, 0, ahead,
    )  # fmt: skip
    multiply(changes.pointers.product, scores)
    change_scores(shape, changes, scratch, ni, nj, lanes, careful)
    # 5 probabilities and the gradient of the output's weights
    dp = (
        one, v_tile, v_row, 1, dot, pair, pair * shape.d_v, ds_place, lanes, 0, keys, lanes,
        shape.d_v, itemsize, 0, 0, ahead,
    )  # fmt: skip
    multiply(changes.pointers.product, dp)
    weigh_scores(shape, changes, scratch, b, h, i0, ni, j0, nj, lanes)


gradient_tile = caller(fill_gradient_tile)


@helper
def apply_dscore(scratch, ni, lanes):
    """Make ds the gradient of the scores before they were changed; masked pairs stay 0."""
    zero = scratch.ds.dtype.type(0)
    for j in range(scratch.edges[FIRST], scratch.edges[LAST]):
        for i in range(ni):
            n = j * lanes + i
            ds = scratch.ds[n]
            scratch.ds[n] = zero if ds == zero else ds * scratch.slope[n]
