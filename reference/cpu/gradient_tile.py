"""One tile of the backward: scores recomputed, probabilities, and the gradient of the scores.

Every backward kernel goes through here, so that dq, dk, dv and dbias see the same dS.
FlashAttention-2 (Dao 2023), Algorithm 2, lines 11-15, with score changes, masks and dropout.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .arguments import CHANGES, Changes, Shape, shape_of
from .elementary import exp2
from .jit import INT, INTS, TABLE, caller, helper, kernel, takes, vector, whole_rows
from .memory import ROWS, first_address, load, row_address
from .microkernel import multiply, round_up
from .structs import Struct
from .tile import (
    PARTIAL,
    SYMBOL_COUNT,
    WORDS,
    apply_mask,
    apply_score,
    dropout_factors,
    make_registers,
    note_seen,
)

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
    symbols: Array
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
        (tile, tile, tile, WORDS, tile, vector(types.boolean), tile, tile, INTS)
        + (TABLE, whole_rows(number)) * 2
        + (TABLE, of_mask) * 2,
    )


def gradient_scratch(shape: Shape, changes: Changes, number: np.dtype[Any]) -> GradientScratch:
    """Allocate the scratch of a problem."""
    lanes = round_up(shape.block_q, shape.lanes_per_vector)
    cells = shape.block_kv * lanes
    return GradientScratch(
        np.empty(cells, number),
        np.empty(cells, number),
        np.empty(cells if shape.drop_below else 0, number),
        np.empty((4, lanes if shape.drop_below else 0), np.uint32),
        np.empty(cells if len(changes.slope.code) else 0, number),
        np.empty(cells if changes.careful else 0, np.bool_),
        np.empty(lanes, number),
        np.empty(lanes, number),
        np.empty(SYMBOL_COUNT, np.int64),
        *make_registers(changes.score, lanes, number),
        *make_registers(changes.slope, lanes, number),
        *make_registers(changes.mask, lanes, np.dtype(np.float32)),
        *make_registers(changes.tile, 1, np.dtype(np.float32)),
    )


@helper
def load_row_statistics(shape, lse, delta, b, h, i0, ni, lanes, scratch):
    """Load lse and delta of the tile's queries. An empty row gets lse = inf, so that its p is 0."""
    one = scratch.lse.dtype.type(1)
    for i in range(ni):
        value = load(row_address(lse, b, h, i0 + i, shape.itemsize), one)
        scratch.lse[i] = math.inf if value == -math.inf else value
        scratch.delta[i] = load(row_address(delta, b, h, i0 + i, shape.itemsize), one)
    for i in range(ni, lanes):
        scratch.lse[i] = math.inf
        scratch.delta[i] = 0


@takes(
    lambda number: (
        shape_of(number), CHANGES, gradient_scratch_of(number), *(INT,) * 10, ROWS, ROWS
    )
)  # fmt: skip
@kernel
def fill_gradient_tile(
    shape, changes, scratch, tile_class, b, h, i0, ni, j0, nj, lanes, qt, dot, k, v
):
    """Fill scratch.p with p (after dropout) and scratch.ds with the gradient of the changed scores.

    `qt` and `dot` are addresses of the tile's queries and output gradients as (D, lanes) and
    (Dv, lanes). Where scores are changed, scratch.slope is their derivative: the gradient of the
    scores themselves is ds * slope.
    """
    itemsize = shape.itemsize
    h_kv = h // shape.group
    p, ds, symbols = scratch.p, scratch.ds, scratch.symbols
    zero, one = p.dtype.type(0), p.dtype.type(1)
    k_tile = row_address(k, b, h_kv, j0, itemsize)
    v_tile = row_address(v, b, h_kv, j0, itemsize)
    p_place, ds_place = first_address(p), first_address(ds)
    # 2 scores
    scores = (
        shape.scale, k_tile, k.row, 1, qt, lanes, p_place, lanes, nj, lanes, shape.d, itemsize, 0
    )  # fmt: skip
    multiply(changes.pointers.product, scores)
    # 3 score mod
    if changes.slope.code.shape[0]:
        ri, rf = scratch.slope_ri, scratch.slope_rf
        slope = scratch.slope
        apply_score(changes.pointers, changes.slope, symbols, i0, ni, nj, lanes, p, slope, ri, rf)
    if changes.score.code.shape[0]:
        ri, rf = scratch.score_ri, scratch.score_rf
        apply_score(changes.pointers, changes.score, symbols, i0, ni, nj, lanes, p, p, ri, rf)
    # 4 mask
    if tile_class == PARTIAL:
        ri, rf = scratch.mask_ri, scratch.mask_rf
        apply_mask(changes, symbols, ni, nj, lanes, p, ri, rf)
    if changes.careful:
        note_seen(p, scratch.seen, nj * lanes)
    # 5 probabilities and the gradient of the output's weights
    dp = one, v_tile, v.row, 1, dot, lanes, ds_place, lanes, nj, lanes, shape.d_v, itemsize, 0
    multiply(changes.pointers.product, dp)
    if shape.drop_below:
        z, words = scratch.z, scratch.words
        dropout_factors(shape, changes, b, h, i0, ni, j0, nj, lanes, z, words)
    lse, delta = scratch.lse, scratch.delta
    for j in range(nj):
        p_row = p[j * lanes : (j + 1) * lanes]
        ds_row = ds[j * lanes : (j + 1) * lanes]
        if shape.drop_below:
            z_row = scratch.z[j * lanes : (j + 1) * lanes]
            for i in range(ni):
                masked = p_row[i] == -math.inf
                below = p_row[i] - lse[i]
                weight = exp2(at_most_zero(below) * shape.log2_e)
                ds_row[i] = zero if masked else weight * (ds_row[i] * z_row[i] - delta[i])
                p_row[i] = zero if masked else weight * z_row[i]
        else:
            for i in range(ni):
                masked = p_row[i] == -math.inf
                below = p_row[i] - lse[i]
                weight = exp2(at_most_zero(below) * shape.log2_e)
                ds_row[i] = zero if masked else weight * (ds_row[i] - delta[i])
                p_row[i] = zero if masked else weight


gradient_tile = caller(fill_gradient_tile)


@helper
def at_most_zero(x):
    """Return x held at 0: a probability is at most 1. NaN stays, which `min` does not promise."""
    return x - x if x > 0 else x


@helper
def apply_dscore(scratch, ni, nj, lanes):
    """Make ds the gradient of the scores before they were changed; masked pairs stay 0."""
    zero = scratch.ds.dtype.type(0)
    for j in range(nj):
        for i in range(ni):
            n = j * lanes + i
            ds = scratch.ds[n]
            scratch.ds[n] = zero if ds == zero else ds * scratch.slope[n]
