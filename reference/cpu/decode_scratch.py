"""The scratch of a thread that works on a cache's leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from .addresses import address
from .arguments import Changes, Registers, Shape, registers_of
from .cache import Cache
from .decode_tasks import LEAF
from .jit import INTS, TABLE, vector, whole_rows
from .memory import aligned
from .merge import size_of_state
from .microkernel import round_up
from .structs import Struct
from .tile import SYMBOL_COUNT, make_registers

Array = np.ndarray[Any, Any]


class DecodeSizes(NamedTuple):
    """What a thread's scratch depends on. Calls that have it in common share scratch."""

    rows: int
    d: int
    d_v: int
    lanes_per_vector: int
    top: int  # levels above the leaves
    k_in_place: int
    v_in_place: int
    changes: bool  # whether scores are changed or masked
    score: Registers
    mask: Registers
    tile: Registers


def decode_sizes(shape: Shape, changes: Changes, cache: Cache, top: int) -> DecodeSizes:
    """Return the sizes of a call whose tree has `top` levels above the leaves."""
    return DecodeSizes(
        shape.block_q,
        shape.d,
        shape.d_v,
        shape.lanes_per_vector,
        top,
        cache.k.in_place,
        cache.v.in_place,
        len(changes.score.code) > 0 or changes.pointers.classify != 0,
        registers_of(changes.score),
        registers_of(changes.mask),
        registers_of(changes.tile),
    )


class DecodeScratch(NamedTuple):
    """What one thread needs to work on units; rows are those of a task's heads and queries."""

    panel: Array  # queries, (rows, width); rows are those of all tasks of a unit
    s: Array  # scores of a leaf, then weights, (rows, LEAF)
    leaf: Array  # the state of a leaf
    nodes: Array  # a state for each level
    filled: Array  # whether a level's state has keys
    k_rows: Array  # addresses of keys and values: of leaves of even numbers, and of odd ones
    v_rows: Array
    k_scales: Array  # addresses of their scales, if they are codes
    v_scales: Array
    k_tile: Array  # keys and values of a leaf that products cannot read where they lie
    v_tile: Array
    k_tile_rows: Array  # addresses of their rows
    v_tile_rows: Array
    seen: Array  # which pairs take part, (rows, LEAF)
    turned: Array  # scores of a head as [key, query]
    symbols: Array
    edges: Array  # of a leaf's keys, see `tile.FIRST`
    classes: Array  # of a leaf, for each task of a unit
    score_ri: Array
    score_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def decode_scratch_of(number: types.Type) -> Struct:
    """Return the type of `DecodeScratch`, given the accumulator's."""
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        DecodeScratch,
        (
            *(tile,) * 4,
            *(INTS,) * 5,
            tile,
            tile,
            INTS,
            INTS,
            vector(types.boolean),
            tile,
            INTS,
            INTS,
            INTS,
        )
        + (TABLE, whole_rows(number))
        + (TABLE, of_mask) * 2,
    )


def decode_scratch(sizes: DecodeSizes, number: np.dtype[Any]) -> DecodeScratch:
    """Allocate a thread's scratch."""
    rows, lanes = sizes.rows, sizes.lanes_per_vector
    width, columns = round_up(sizes.d, lanes), round_up(sizes.d_v, lanes)
    across, state = round_up(rows, lanes), size_of_state(rows, columns)
    changed = sizes.changes
    # Values are copied also to see whether hidden ones are finite.
    k_tile, v_tile = aligned(
        (
            0 if sizes.k_in_place else LEAF * width,
            0 if sizes.v_in_place and not changed else LEAF * columns,
        ),
        number,
    )
    panel, s, leaf, nodes = aligned(
        (rows * width, rows * LEAF, state, state * (sizes.top + 1)), number
    )
    place = np.arange(LEAF, dtype=np.int64) * number.itemsize
    return DecodeScratch(
        panel,
        s,
        leaf,
        nodes,
        np.empty(sizes.top + 2, np.int64),
        np.empty(2 * LEAF, np.int64),
        np.empty(2 * LEAF, np.int64),
        np.empty(2 * LEAF, np.int64),
        np.empty(2 * LEAF, np.int64),
        k_tile,
        v_tile,
        address(k_tile) + place * width,
        address(v_tile) + place * columns,
        np.empty(rows * LEAF if changed else 0, np.bool_),
        np.empty(across * LEAF if changed else 0, number),
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        np.empty(rows, np.int64),
        *make_registers(sizes.score, across, number),
        *make_registers(sizes.mask, across, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    )
