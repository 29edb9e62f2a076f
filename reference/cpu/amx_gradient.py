"""One tile of the backward by a matrix unit's tiles: weights, and the gradient of the scores.

As `gradient_tile`, with S^T = K Q^T and dP^T = V dO^T: rows of K and V are multiplied where they
lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from .amx import NATIVE
from .amx_code import MatrixUnit
from .amx_memory import DEPTH, PARTS, ROW, SIDE, whole
from .amx_pack import Packing
from .amx_scores import score_mender, scores_filler
from .amx_softmax import scale_scores
from .amx_variants import variants
from .arguments import CHANGES, TileSizes, shape_of
from .gradient_tile import change_scores, weigh_scores
from .jit import INT, INTS, TABLE, Kernel, caller, kernel, takes, vector, whole_rows
from .memory import aligned, first_address
from .structs import Struct
from .tile import FIRST, LAST, SYMBOL_COUNT, WORDS, make_registers
from .widen import BFLOAT16

Array = np.ndarray[Any, Any]

_FLOAT = 4  # bytes of a float32


class TileGradientScratch(NamedTuple):
    """What one thread needs; all that tiles read or write is float32, whatever it holds.

    A step is one of a contraction, over 32 keys or queries.
    """

    q: Array  # queries as columns of B, in tiles (16 queries, step, part)
    do: Array
    k: Array  # the rows of keys that are not read in place
    v: Array
    k_turned: Array  # keys as columns of A, in tiles (16 columns, step, part)
    q_pairs: Array  # queries as rows of B, in tiles (16 columns, step, part)
    do_pairs: Array
    p_across: Array  # weights as rows of A, in tiles (16 keys, step, part)
    ds_across: Array  # gradients of scores, likewise
    ds_along: Array  # those of a panel as columns of B, in tiles (16 queries, step, part)
    p: Array  # scores, then probabilities after dropout, (key, query)
    ds: Array  # dP, then dS
    z: Array  # dropout factors
    slope: Array  # derivative of the score change
    dq: Array  # sums of a panel, or of a block of queries, (column, query)
    rows: Array  # of dq
    dk: Array  # sums, (key, column)
    dv: Array
    lse: Array  # of the tile's queries
    delta: Array
    words: Array  # of the generator, (4, lanes)
    seen: Array  # which pairs take part
    q_flags: Array  # whether rows have subnormal numbers
    do_flags: Array
    k_flags: Array
    v_flags: Array
    symbols: Array
    edges: Array  # of the tile's keys, see `tile.FIRST`
    score_ri: Array
    score_rf: Array
    slope_ri: Array
    slope_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def tile_gradient_scratch_of(number: types.Type) -> Struct:
    """Return the type of `TileGradientScratch`, given the accumulator's."""
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        TileGradientScratch,
        (*(tile,) * 20, WORDS, vector(types.boolean), *(INTS,) * 6)
        + (TABLE, whole_rows(number)) * 2
        + (TABLE, of_mask) * 2,
    )


def tile_gradient_scratch(
    sizes: TileSizes, number: np.dtype[Any], parts: int, keeps_dq: bool
) -> TileGradientScratch:
    """Allocate the scratch of one thread, with `keeps_dq` for dq of a block of queries.

    Numbers of the arrays have so many parts.
    """
    lanes = min(whole(sizes.block_q, DEPTH), whole(sizes.panel, DEPTH))
    keys, queries = whole(sizes.block_kv, DEPTH), whole(sizes.block_q, DEPTH)
    # A panel that ends within a step begins another one.
    queries += DEPTH * (sizes.block_q // sizes.panel) if sizes.panel % DEPTH else 0
    depth, depth_v = whole(sizes.d, DEPTH), whole(sizes.d_v, DEPTH)
    columns, columns_v = whole(sizes.d, SIDE), whole(sizes.d_v, SIDE)
    cells = keys * lanes
    arrays = aligned(
        (*(parts * count // 2 for count in (
             lanes * depth, lanes * depth_v, keys * depth, keys * depth_v, columns * keys,
             queries * columns, queries * columns_v)),
         PARTS * keys * queries // 2, PARTS * keys * queries // 2, PARTS * cells // 2,
         cells + SIDE, cells + SIDE, sizes.drops * cells, sizes.changes_slope * cells,
         columns * (whole(sizes.block_q, SIDE) if keeps_dq else lanes), SIDE * columns,
         keys * columns, keys * columns_v, lanes, lanes),
        number,
    )  # fmt: skip
    flags = [np.empty(count, np.int64) for count in (lanes, lanes, keys, keys)]
    fields = [
        *arrays,
        np.empty((4, lanes if sizes.drops else 0), np.uint32),
        np.empty(cells if sizes.may_mask else 0, np.bool_),
        *flags,
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        *make_registers(sizes.score, lanes, number, keeps=True),
        *make_registers(sizes.slope, lanes, number),
        *make_registers(sizes.mask, lanes, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    ]
    return TileGradientScratch._make(fields)


def _make_gradient(name: str, unit: type[MatrixUnit], packing: Packing) -> Kernel:
    """Make the kernel that multiplies by the tiles of some unit."""
    fill_scores, mend_scores = scores_filler(unit, packing), score_mender(packing)

    def gradient(
        shape, changes, scratch, b, h, i0, ni, j0, nj, lanes, q, q_size, q_special, do, do_size,
        do_special, k, k_size, k_in_place, k_special, v, v_size, v_in_place, v_special, careful,
    ):  # fmt: skip
        """Fill scratch.p and scratch.ds as `gradient_tile.fill_gradient_tile` does.

        `q`, `do`, `k` and `v` are addresses of rows, which begin so many bytes apart; of keys and
        values, the first ones are read in place. They may be special: have subnormal numbers.
        The caller has begun the use of the unit.
        """
        p, ds, edges = scratch.p, scratch.ds, scratch.edges
        begin, end, row = edges[FIRST], edges[LAST], lanes * _FLOAT
        first, one = begin // DEPTH * DEPTH, p.dtype.type(1)
        p_place, ds_place = first_address(p), first_address(ds)
        ignored = first_address(scratch.rows)
        steps, steps_v = (shape.d + DEPTH - 1) // DEPTH, (shape.d_v + DEPTH - 1) // DEPTH
        # Scores, step 2 of gradient_tile.py.
        fill_scores(
            k, k_size, k_in_place, first_address(scratch.k), first_address(scratch.q), first, end,
            lanes, steps, p_place,
        )  # fmt: skip
        for x in range(0, row, ROW):
            scale_scores(p_place + begin * row + x, row, end - begin, shape.scale, ignored)
        # The gradient of the weights of the output, step 5 there.
        fill_scores(
            v, v_size, v_in_place, first_address(scratch.v), first_address(scratch.do), first, end,
            lanes, steps_v, ds_place,
        )  # fmt: skip
        if q_special | k_special:
            mend_scores(
                k, k_size, q, q_size, shape.d, shape.scale, begin, end, ni, lanes,
                scratch.q_flags, scratch.k_flags, p,
            )  # fmt: skip
        if do_special | v_special:
            mend_scores(
                v, v_size, do, do_size, shape.d_v, one, begin, end, ni, lanes, scratch.do_flags,
                scratch.v_flags, ds,
            )  # fmt: skip
        change_scores(shape, changes, scratch, ni, nj, lanes, careful)
        weigh_scores(shape, changes, scratch, b, h, i0, ni, j0, nj, lanes)

    gradient.__name__ = gradient.__qualname__ = f"gradient_{name}"
    declare = takes(
        lambda number: (shape_of(number), CHANGES, tile_gradient_scratch_of(number), *(INT,) * 22)
    )
    return declare(kernel(gradient))


GRADIENTS = variants(_make_gradient)
tile_gradient = caller(GRADIENTS[NATIVE, BFLOAT16])
