"""The arguments of kernels: sizes, mask and score changes, and function pointers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .jit import INT, INTS
from .microkernel import round_up
from .program import PROGRAM, Program
from .structs import Struct
from .tables import MAX_AXES
from .tile_lists import TILE_LISTS, TileLists


class Shape(NamedTuple):
    """Sizes and scalars of a problem; lengths are by batch entry b."""

    heads: int
    group: int  # query heads that share one key-value head
    len_q: np.ndarray[Any, Any]  # (B,) int64
    len_k: np.ndarray[Any, Any]
    start_q: np.ndarray[Any, Any]  # first packed row, (B,) int64
    start_k: np.ndarray[Any, Any]
    d: int
    d_v: int
    block_q: int
    block_kv: int
    itemsize: int  # bytes of the accumulator's type
    lanes_per_vector: int
    scale: Any  # of the accumulator's type
    log2_e: Any
    drop_below: int  # a pair is dropped if its random word is smaller; 0 without dropout
    keep_scale: Any  # 1 / (1 - dropout)
    seed: int  # uint64 as int64
    origin_q: int  # positions of the first query and key, as dropout counts them
    origin_k: int
    origin_b_h: int  # b Hq + h of the first head of the first entry, as dropout counts them
    heads_of_entry: int  # Hq there


class KeyRanges(NamedTuple):
    """The first and last key that each query sees, for masks that let it see one range of keys.

    Query i of batch entry b and head h has element ``batch[b] + h * head + i``. Without such a mask
    the arrays are empty.
    """

    low: np.ndarray[Any, Any]  # int64
    high: np.ndarray[Any, Any]
    batch: np.ndarray[Any, Any]  # (B,) int64
    head: int


class FunctionPointers(NamedTuple):
    """Addresses of the kernels that others call; 0 for those that a call does not need."""

    product: int
    accumulate: int
    columns: int  # adds products to columns of results
    load: int  # rows, to columns; see `packing`
    store: int
    prefetch: int
    widen: int  # rows of 16-bit floats
    narrow: int  # results, to rows of 16 bits; 0 where others round them
    run_float32: int  # programs with these registers: masks
    run_number: int  # programs with registers of the accumulator's type: score changes
    classify: int
    score: int
    bias: int
    mask: int
    dropout: int
    gradient: int


class Changes(NamedTuple):
    """The programs of a problem: score changes (with bias), their slope, mask and tile class."""

    score: Program
    slope: Program
    mask: Program
    tile: Program
    ranges: KeyRanges  # hide pairs, too, if the mask or a condition of it has ranges
    pointers: FunctionPointers
    may_mask: int  # 1 if pairs can be left out: these must not meet NaN or infinity
    panel: int  # queries of a block that are worked on at once, at most
    lists: TileLists  # classes of tiles that have been found


KEY_RANGES = Struct(KeyRanges, (INTS, INTS, INTS, INT))
FUNCTION_POINTERS = Struct(FunctionPointers, (INT,) * len(FunctionPointers._fields))
CHANGES = Struct(Changes, (PROGRAM,) * 4 + (KEY_RANGES, FUNCTION_POINTERS, INT, INT, TILE_LISTS))


def shape_of(number: types.Type) -> Struct:
    """Return the type of `Shape`, given the accumulator's."""
    numbers = {"scale": number, "log2_e": number, "keep_scale": number}
    arrays = dict.fromkeys(("len_q", "len_k", "start_q", "start_k"), INTS)
    return Struct(Shape, tuple((numbers | arrays).get(name, INT) for name in Shape._fields))


class Registers(NamedTuple):
    """How many registers a program has, and what lies behind them."""

    int_registers: int
    float_registers: int
    kept: int = 0  # tiles of a bias that a thread keeps, see `bias`
    cells: int = 0  # numbers of each of them


def registers_of(program: Program) -> Registers:
    """Return how many registers a program has."""
    return Registers(program.int_registers, program.float_registers)


_MOST_KEPT = 16  # tiles, of which every one is looked at for each tile of scores
_MOST_KEPT_BYTES = 2**20
_FEWEST_USES = 8  # of each tile, by all threads
_STEP = 32  # queries and keys of tiles, so that calls of many lengths share scratch


def _kept_tiles(shape: Shape, program: Program, panel: int) -> tuple[int, int]:
    """Return how many tiles a bias has, and their size, if they are few and entries share them."""
    if not len(program.strided) or not len(shape.len_q):
        return 0, 0
    table = program.tables[program.strided[0]]
    of_heads, strides = max(int(table[2]) - 2, 0), 5 + MAX_AXES
    pairs = zip(table[5 : 5 + of_heads], table[strides : strides + of_heads], strict=True)
    heads = math.prod(int(length) for length, step in pairs if step)
    queries, keys = int(shape.len_q.max()), int(shape.len_k.max())
    panels = -(-queries // shape.block_q) * -(-min(queries, shape.block_q) // panel)
    tiles = heads * panels * -(-keys // shape.block_kv)
    lanes = min(round_up(queries, _STEP), panel) + _STEP  # the last square may be a part
    cells = round_up(min(keys, shape.block_kv), _STEP) * lanes
    is_shared = len(shape.len_q) * shape.heads >= _FEWEST_USES * heads
    if not is_shared or tiles > _MOST_KEPT or tiles * cells * shape.itemsize > _MOST_KEPT_BYTES:
        return 0, 0
    return tiles, cells


class TileSizes(NamedTuple):
    """What the scratch of a tile depends on. Calls that have it in common share scratch."""

    block_q: int
    block_kv: int
    d: int
    d_v: int
    itemsize: int
    lanes_per_vector: int
    panel: int
    drops: bool
    may_mask: bool
    widens: bool
    changes_slope: bool
    score: Registers
    slope: Registers
    mask: Registers
    tile: Registers


def tile_sizes(shape: Shape, changes: Changes) -> TileSizes:
    """Return the sizes of a call's tiles."""
    programs = changes.slope, changes.mask, changes.tile
    kept, cells = _kept_tiles(shape, changes.score, changes.panel)
    return TileSizes(
        shape.block_q,
        shape.block_kv,
        shape.d,
        shape.d_v,
        shape.itemsize,
        shape.lanes_per_vector,
        changes.panel,
        shape.drop_below > 0,
        bool(changes.may_mask),
        bool(changes.pointers.widen),
        len(changes.slope.code) > 0,
        registers_of(changes.score)._replace(kept=kept, cells=cells),
        *map(registers_of, programs),
    )


_NONE = np.empty(0, np.int64)
NO_RANGES: KeyRanges = KEY_RANGES.keep(KeyRanges(_NONE, _NONE, _NONE, 0))  # no mask has ranges
