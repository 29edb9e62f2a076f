"""One tile of the backward's tangent: weights and gradients of scores, and their tangents.

With the letters of `gradient_tile` and of `forward_tangent`, g = Z dP - delta, and the tangent mu
of the log-sum-exp::

    tP  = P (tt - mu)
    dT  = P g                    tdT = tP g + P (Z tdP - tdelta)
    dS  = f' dT                  tdS = f' tdT + f'' ts dT

`delta` and `tdelta` are less the gradient of the log-sum-exp, and its tangent. Every pair that is
masked has 0 everywhere.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import Registers, TileSizes
from .jit import INT, INTS, TABLE, helper, vector, whole_rows
from .memory import aligned, first_address, load, row_address
from .microkernel import VECTOR_BYTES, multiply, round_up
from .packing import pair_lanes, size_of_pairs
from .program import PROGRAM
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


class Moving(NamedTuple):
    """Which tangents a call has, as numbers 0 or 1, and two programs.

    One adds the tangent of the bias; the other is the second derivative of the score changes. They
    are empty if there is none.
    """

    q: int
    k: int
    v: int
    do: int
    bias: Any
    curve: Any


MOVING = Struct(Moving, (INT, INT, INT, INT, PROGRAM, PROGRAM))


class TangentTileScratch(NamedTuple):
    """What one thread needs to work on tiles; tiles are kept as [key, query]."""

    p: Array  # scores, then weights after dropout
    tp: Array  # tangents of logits, then of those weights
    ts: Array  # tangents of scores
    dt: Array  # dP, then dT, then dS
    ds: Array  # tdP, then tdT, then tdS
    z: Array  # dropout factors
    slope: Array  # derivatives of the score changes
    curve: Array
    lse: Array  # of the tile's queries
    mu: Array
    delta: Array
    tdelta: Array
    k_wide: Array  # rows of 16-bit floats, widened
    tk_wide: Array
    v_wide: Array
    tv_wide: Array
    q_wide: Array
    qt: Array  # rows of a panel of queries, as columns
    tqt: Array
    dot: Array
    tdot: Array
    q_pairs: Array  # the same as pairs
    tq_pairs: Array
    do_pairs: Array
    tdo_pairs: Array
    words: Array  # of the generator, (4, lanes)
    seen: Array  # which pairs take part
    symbols: Array
    edges: Array  # of the tile's keys, see `tile.FIRST`
    score_ri: Array
    score_rf: Array
    slope_ri: Array
    slope_rf: Array
    curve_ri: Array
    curve_rf: Array
    bias_ri: Array
    bias_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def scratch_of(number: types.Type) -> Struct:
    """Return the type of `TangentTileScratch`, given the accumulator's."""
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        TangentTileScratch,
        (*(tile,) * 25, WORDS, vector(types.boolean), INTS, INTS)
        + (TABLE, whole_rows(number)) * 4
        + (TABLE, of_mask) * 2,
    )


def tile_scratch(
    sizes: TileSizes, curve: Registers, bias: Registers, number: np.dtype[Any]
) -> TangentTileScratch:
    """Allocate the scratch of one thread."""
    lanes = min(round_up(sizes.block_q, sizes.lanes_per_vector), sizes.panel)
    wide, wide_v = (round_up(d, sizes.lanes_per_vector) for d in (sizes.d, sizes.d_v))
    cells, rows_k = sizes.block_kv * lanes, sizes.block_kv * sizes.widens
    changed = cells * sizes.changes_slope
    columns = [size_of_pairs(d, lanes, sizes.itemsize) for d in (sizes.d, sizes.d_v)]
    pairs = [size_of_pairs(lanes, d, sizes.itemsize) for d in (wide, wide_v)]
    counts = (
        *(cells,) * 5, cells * sizes.drops, changed, changed, *(lanes,) * 4, rows_k * wide,
        rows_k * wide, rows_k * wide_v, rows_k * wide_v, lanes * max(wide, wide_v) * sizes.widens,
        columns[0], columns[0], columns[1], columns[1], pairs[0], pairs[0], pairs[1], pairs[1],
    )  # fmt: skip
    made: list[Any] = [
        *aligned(counts, number),
        np.empty((4, lanes if sizes.drops else 0), np.uint32),
        np.empty(cells if sizes.may_mask else 0, np.bool_),
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        *make_registers(sizes.score, lanes, number),
        *make_registers(sizes.slope, lanes, number),
        *make_registers(curve, lanes, number),
        *make_registers(bias, lanes, number),
        *make_registers(sizes.mask, lanes, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    ]
    return TangentTileScratch(*made)


@helper
def load_statistics(lse, mu, delta, tdelta, b, h, i0, ni, lanes, scratch):
    """Load what a tile's queries have one number of. An empty row gets lse = inf."""
    one = scratch.lse.dtype.type(1)
    for i in range(ni):
        value = load(row_address(lse, b, h, i0 + i), one)
        scratch.lse[i] = math.inf if value == -math.inf else value
        scratch.mu[i] = load(row_address(mu, b, h, i0 + i), one)
        scratch.delta[i] = load(row_address(delta, b, h, i0 + i), one)
        scratch.tdelta[i] = load(row_address(tdelta, b, h, i0 + i), one)
    for i in range(ni, lanes):
        scratch.lse[i] = math.inf
        scratch.mu[i] = scratch.delta[i] = scratch.tdelta[i] = 0


@intrinsic
def _weigh_vector(typingctx, tiles, z, row_size, keys, rows, log2_e):
    """Do what `_weigh` does for a vector of every key's queries."""

    def codegen(context, builder, sig, args):
        tiles, z, row_size, keys, rows, log2_e = args
        p, tp, dt, ds = cgutils.unpack_tuple(builder, tiles)
        emit = Emitter(builder, context.get_value_type(sig.args[5]))
        lse, mu, delta, tdelta = map(emit.load, cgutils.unpack_tuple(builder, rows))
        nothing = ir.Constant(emit.vector, [-math.inf] * emit.lanes)
        one = ir.Constant(emit.vector, [1.0] * emit.lanes)
        factor, zero = emit.splat(log2_e), emit.zero
        drops = builder.icmp_signed("!=", z, WORD(0))
        factors = builder.select(drops, z, p)  # some address to read from

        def step(j, values):
            offset = builder.mul(j, row_size)
            places = [builder.add(place, offset) for place in (p, tp, dt, ds)]
            score, tangent, dp, tdp = map(emit.load, places)
            kept = builder.select(drops, emit.load(builder.add(factors, offset)), one)
            # A probability is at most 1; NaN stays.
            below = builder.fsub(score, lse)
            is_above = builder.fcmp_ordered(">", below, zero)
            below = builder.select(is_above, builder.fsub(below, below), below)
            weight = emit_exp2(builder, builder.fmul(below, factor))
            moved = builder.fmul(weight, builder.fsub(tangent, mu))
            g = builder.fsub(builder.fmul(dp, kept), delta)
            change = builder.fsub(builder.fmul(tdp, kept), tdelta)
            made = (
                builder.fmul(weight, kept),
                builder.fmul(moved, kept),
                builder.fmul(weight, g),
                builder.fadd(builder.fmul(moved, g), builder.fmul(weight, change)),
            )
            masked = builder.fcmp_ordered("==", score, nothing)
            for value, place in zip(made, places, strict=True):
                emit.store(builder.select(masked, zero, value), place)
            return []

        emit_loop(builder, keys, [], step)
        return context.get_dummy_value()

    return types.void(tiles, *[types.int64] * 3, rows, log2_e), codegen


@helper
def _weigh(shape, scratch, lanes):
    """Make scores, dP and their tangents into weights and gradients of logits."""
    begin, size = scratch.edges[FIRST], lanes * shape.itemsize
    keys, first = scratch.edges[LAST] - begin, begin * size
    p, tp = first_address(scratch.p) + first, first_address(scratch.tp) + first
    dt, ds = first_address(scratch.dt) + first, first_address(scratch.ds) + first
    z = first_address(scratch.z) + first if shape.drop_below else 0
    lse, mu = first_address(scratch.lse), first_address(scratch.mu)
    delta, tdelta = first_address(scratch.delta), first_address(scratch.tdelta)
    for x in range(0, size, VECTOR_BYTES):
        tiles, rows = (p + x, tp + x, dt + x, ds + x), (lse + x, mu + x, delta + x, tdelta + x)
        _weigh_vector(tiles, z + x if z else 0, size, keys, rows, shape.log2_e)


@helper
def apply_slopes(changes, moving, scratch, lanes):
    """Make gradients of changed scores those of scores, and their tangents likewise."""
    dt, ds, ts, slope, curve = scratch.dt, scratch.ds, scratch.ts, scratch.slope, scratch.curve
    zero, bends = dt.dtype.type(0), moving.curve.code.shape[0] > 0
    if changes.slope.code.shape[0]:
        # Selected, because a derivative may be infinite where the gradient is left out.
        for n in range(scratch.edges[FIRST] * lanes, scratch.edges[LAST] * lanes):
            tangent = zero if ds[n] == zero else ds[n] * slope[n]
            if bends:
                tangent += zero if dt[n] == zero else curve[n] * ts[n] * dt[n]
            ds[n] = tangent
            dt[n] = zero if dt[n] == zero else dt[n] * slope[n]


@helper
def _product(changes, one, shape, place, row, columns, depth, target, lanes, keys, adds):
    """Multiply rows of keys or values by columns of queries: a tile, or more of one."""
    pair = pair_lanes(shape.itemsize)
    factors = (
        one, place, row, 1, columns, pair, pair * depth, target, lanes, 0, keys, lanes, depth,
        shape.itemsize, adds, 0, 0,
    )  # fmt: skip
    multiply(changes.pointers.product, factors)


@helper
def fill_tile(
    shape, changes, moving, scratch, b, h, i0, ni, j0, nj, lanes, k, k_row, tk, tk_row, v, v_row,
    tv, tv_row, careful,
):  # fmt: skip
    """Fill p, tp, dt and ds of `scratch` with weights, gradients of logits, and their tangents.

    They are filled for the keys between the ends of `scratch.edges`. `k`, `tk`, `v` and `tv` are
    addresses of rows that begin so many elements apart. With `careful`, scratch.seen says which
    pairs take part.
    """
    p, tp, ts, dt, ds = scratch.p, scratch.tp, scratch.ts, scratch.dt, scratch.ds
    symbols, edges, itemsize = scratch.symbols, scratch.edges, shape.itemsize
    zero, one = p.dtype.type(0), p.dtype.type(1)
    begin, end = edges[FIRST], edges[LAST]
    keys, cells = end - begin, begin * lanes * itemsize
    qt, dot = first_address(scratch.qt), first_address(scratch.dot)
    tqt, tdot = first_address(scratch.tqt), first_address(scratch.tdot)
    k, tk = k + begin * k_row * itemsize, tk + begin * tk_row * itemsize
    v, tv = v + begin * v_row * itemsize, tv + begin * tv_row * itemsize
    d, d_v = shape.d, shape.d_v
    # 2 scores
    # With dP, and the tangents of both.
    place = first_address(p) + cells
    _product(changes, shape.scale, shape, k, k_row, qt, d, place, lanes, keys, 0)
    place = first_address(ts) + cells
    if moving.q:
        _product(changes, one, shape, k, k_row, tqt, d, place, lanes, keys, 0)
    if moving.k:
        _product(changes, one, shape, tk, tk_row, qt, d, place, lanes, keys, moving.q)
    _product(changes, one, shape, v, v_row, dot, d_v, first_address(dt) + cells, lanes, keys, 0)
    place = first_address(ds) + cells
    if moving.do:
        _product(changes, one, shape, v, v_row, tdot, d_v, place, lanes, keys, 0)
    if moving.v:
        _product(changes, one, shape, tv, tv_row, dot, d_v, place, lanes, keys, moving.do)
    first, last = begin * lanes, end * lanes
    if moving.q or moving.k:
        for n in range(first, last):
            ts[n] *= shape.scale
    else:
        for n in range(first, last):
            ts[n] = zero
    if not (moving.do or moving.v):
        for n in range(first, last):
            ds[n] = zero
    # 3 score mod
    if changes.slope.code.shape[0]:
        ri, rf, made = scratch.slope_ri, scratch.slope_rf, scratch.slope
        apply_score(changes.pointers, changes.slope, symbols, ni, edges, lanes, p, made, ri, rf)
        for n in range(first, last):
            tp[n] = made[n] * ts[n]
    else:
        for n in range(first, last):
            tp[n] = ts[n]
    if moving.curve.code.shape[0]:
        ri, rf, made = scratch.curve_ri, scratch.curve_rf, scratch.curve
        apply_score(changes.pointers, moving.curve, symbols, ni, edges, lanes, p, made, ri, rf)
    if moving.bias.code.shape[0]:
        ri, rf = scratch.bias_ri, scratch.bias_rf
        apply_score(changes.pointers, moving.bias, symbols, ni, edges, lanes, tp, tp, ri, rf)
    if changes.score.code.shape[0]:
        ri, rf = scratch.score_ri, scratch.score_rf
        apply_score(changes.pointers, changes.score, symbols, ni, edges, lanes, p, p, ri, rf)
    # 4 mask
    apply_mask(changes, symbols, ni, edges, lanes, p, scratch.mask_ri, scratch.mask_rf)
    if careful:
        note_seen(p, scratch.seen, nj * lanes)
    # 5 probabilities and the gradient of the output's weights
    if shape.drop_below:
        dropout_factors(shape, changes, b, h, i0, ni, j0, nj, lanes, scratch.z, scratch.words)
    _weigh(shape, scratch, lanes)
