"""One tile of the backward: scores recomputed, probabilities, and the gradient of the scores.

Every backward kernel goes through here, so that dq, dk, dv and dbias see the same dS.
FlashAttention-2 (Dao 2023), Algorithm 2, lines 11-15, with score changes, masks and dropout.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .accumulate import padded
from .arguments import CHANGES, shape_of
from .elementary import exp2
from .jit import INT, INTS, TABLE, caller, helper, kernel, takes, vector, whole_rows
from .memory import ROWS, load, row_address
from .microkernel import multiply
from .tile import (
    PARTIAL,
    apply_mask,
    apply_score,
    dropout_factors,
    make_registers,
    note_seen,
)


class Scratch(NamedTuple):
    """What one thread needs to work on tiles; tiles are kept as [key, query]."""

    p: np.ndarray[Any, Any]  # scores, then probabilities after dropout
    ds: np.ndarray[Any, Any]  # dP, then dS
    z: np.ndarray[Any, Any]  # dropout factors
    slope: np.ndarray[Any, Any]  # derivative of the score change
    seen: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]  # of the tile's queries
    delta: np.ndarray[Any, Any]
    symbols: np.ndarray[Any, Any]
    score_ri: np.ndarray[Any, Any]
    score_rf: np.ndarray[Any, Any]
    slope_ri: np.ndarray[Any, Any]
    slope_rf: np.ndarray[Any, Any]
    mask_ri: np.ndarray[Any, Any]
    mask_rf: np.ndarray[Any, Any]
    tile_ri: np.ndarray[Any, Any]
    tile_rf: np.ndarray[Any, Any]


def scratch_of(number: types.Type) -> types.Type:
    """Return the type of `Scratch`, given the accumulator's."""
    numbers, of_mask = whole_rows(number), whole_rows(types.float32)
    return types.BaseTuple.from_types(
        (vector(number),) * 4
        + (vector(types.boolean), vector(number), vector(number), INTS)
        + (TABLE, numbers) * 2
        + (TABLE, of_mask) * 2,
        Scratch,
    )


@helper
def make_scratch(shape, changes, like):
    """Return the scratch of a problem; `like` is an array of the accumulator's type."""
    lanes = padded(shape.block_q, shape.lanes_per_vector)
    cells = shape.block_kv * lanes
    float_32 = np.empty(0, np.float32)
    score_ri, score_rf = make_registers(changes.score, lanes, like)
    slope_ri, slope_rf = make_registers(changes.slope, lanes, like)
    mask_ri, mask_rf = make_registers(changes.mask, lanes, float_32)
    tile_ri, tile_rf = make_registers(changes.tile, 1, float_32)
    return Scratch(
        np.empty(cells, like.dtype),
        np.empty(cells, like.dtype),
        np.empty(cells if shape.drop_below else 0, like.dtype),
        np.empty(cells if changes.slope.code.shape[0] else 0, like.dtype),
        np.empty(cells if changes.careful else 0, np.bool_),
        np.empty(lanes, like.dtype),
        np.empty(lanes, like.dtype),
        np.empty(11, np.int64),
        score_ri,
        score_rf,
        slope_ri,
        slope_rf,
        mask_ri,
        mask_rf,
        tile_ri,
        tile_rf,
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
        shape_of(number), CHANGES, scratch_of(number), INT, INT, INT, INT, INT, INT, INT, INT, INT,
        INT, ROWS, ROWS,
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
    p_place, ds_place = p.ctypes.data, ds.ctypes.data
    # 2 scores
    multiply(shape.scale, k_tile, k.row, 1, qt, lanes, p_place, lanes, nj, lanes, shape.d, itemsize)
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
    multiply(one, v_tile, v.row, 1, dot, lanes, ds_place, lanes, nj, lanes, shape.d_v, itemsize)
    if shape.drop_below:
        dropout_factors(shape, changes, b, h, i0, ni, j0, nj, lanes, scratch.z)
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
