"""Lists of tiles: the classes of a mask's tiles, found once for all heads that share them.

The thread that first asks about a tile writes its class for the others. No bit of a result depends
on who that is, and no thread waits: all of them would write the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types

from .jit import INT, vector
from .program import SYMBOLS, Op, Program
from .structs import Struct

FEWEST_TILES = 32  # of a call for which lists pay
MOST_BYTES = 1 << 24  # of a call; one whose lists would take more asks for each head


class TileLists(NamedTuple):
    """The classes of tiles that have been found.

    That of the tile from query i and key j on of entry b has place
    ``b * entry + i // queries * row + j // keys``. Without lists there are no classes.
    """

    classes: np.ndarray[tuple[int], np.dtype[np.uint8]]  # 0: not yet found; else 1 more
    entry: int  # 0 if all entries share them
    row: int  # tiles
    queries: int
    keys: int
    by_head: int  # whether classes differ between heads


TILE_LISTS = Struct(TileLists, (vector(types.uint8), *(INT,) * 5))
_NONE = np.empty(0, np.uint8)


def no_lists(tile: Program, head: int) -> TileLists:
    """Return no lists; `tile` is the program of classes, and `head` as in `KeyRanges`."""
    return TileLists(_NONE, 0, 0, 1, 1, int("h" in _symbols(tile) or head != 0))


def lists_of(
    tile: Program, head: int, heads: int, len_q: np.ndarray, len_k: np.ndarray,
    block_q: int, block_kv: int, panel: int,
) -> TileLists:  # fmt: skip
    """Return lists, of which nothing is found, or none where they do not pay."""
    none = no_lists(tile, head)
    if not len(tile.code) or "h" in _symbols(tile) or heads < 2 or not len(len_q):
        return none
    queries = math.gcd(block_q, panel)
    rows, row = (
        -(-int(lengths.max()) // size) for lengths, size in ((len_q, queries), (len_k, block_kv))
    )
    differ = len(len_q) > 1 and (
        not {"b", "start_q", "start_k"}.isdisjoint(_symbols(tile))
        or any((lengths != lengths[0]).any() for lengths in (len_q, len_k))
    )
    entry = rows * row if differ else 0
    size = rows * row * (len(len_q) if differ else 1)
    if not FEWEST_TILES <= size <= MOST_BYTES:
        return none
    classes = np.zeros(size, np.uint8)
    return TileLists(classes, entry, row, queries, block_kv, none.by_head)


def _symbols(program: Program) -> set[str]:
    """Return the symbols that a program reads."""
    read = program.code[program.code[:, 0] == Op.SYMBOL]
    return {SYMBOLS[number] for number in read[:, 3]}
