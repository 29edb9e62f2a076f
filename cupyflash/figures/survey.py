"""Which tiles of a score matrix are empty, partial and full: counted by blocks, never as a whole.

Tiles are looked at some hundred thousand at a time, and pairs in tiles that are partial, so that
memory does not grow with the square of the length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..analysis.tiles import TileCount
from ..expr.bind import Sizes
from ..expr.evaluate import evaluate
from ..expr.interval import EMPTY, FULL, PARTIAL, tile_class
from ..expr.nodes import Expr, walk
from ..expr.tile_classes import tile_classes

Array = np.ndarray[Any, Any]

TILES_AT_A_TIME = 2**18
PAIRS_AT_A_TIME = 2**21
MOST_PAIRS = 2**27  # that are asked one by one: some seconds


@dataclass(frozen=True, eq=False)
class Grid:
    """The tiles of one batch entry and head as a picture's cells.

    Attributes
    ----------
    len_q, len_k : int
        Queries, from top to bottom, and keys, from left to right.
    block_q, block_kv : int
        Queries and keys of a tile.
    down, across : int
        Tiles that a cell stands for, along each side; at the ends fewer.
    tiles : numpy.ndarray of int, shape (rows, columns, 3)
        Tiles in a cell that are EMPTY, PARTIAL and FULL, in this order.
    """

    len_q: int
    len_k: int
    block_q: int
    block_kv: int
    down: int
    across: int
    tiles: Array

    @property
    def classes(self) -> Array:
        """A class for each cell: EMPTY or FULL where all of its tiles are, else PARTIAL."""
        total = self.tiles.sum(axis=-1)
        full, empty = self.tiles[..., FULL] == total, self.tiles[..., EMPTY] == total
        return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL))

    @property
    def edges_q(self) -> Array:
        """First query of every row of cells, and the number of queries."""
        return _edges(self.len_q, self.block_q * self.down)

    @property
    def edges_k(self) -> Array:
        """First key of every column of cells, and the number of keys."""
        return _edges(self.len_k, self.block_kv * self.across)


@dataclass(frozen=True, eq=False)
class Survey:
    """What a mask leaves of the tiles of a problem, over all its batch entries and heads.

    Attributes
    ----------
    tiles : TileCount
        How many are EMPTY, PARTIAL and FULL.
    pairs : int or None
        Pairs of a query and a key that attend; None where too many would have to be asked.
    visited_pairs : int
        Pairs in tiles that are not skipped.
    visited_keys, visited_queries : int
        Keys, and queries, of those tiles, summed over the tiles.
    touched_keys : int
        Keys in at least one of those tiles, of every batch entry and query head.
    by_head : bool
        Whether the mask may differ between heads.
    grids : tuple of Grid
        The tiles of one batch entry and head, as coarse as each picture wants them.
    """

    tiles: TileCount
    pairs: int | None
    visited_pairs: int
    visited_keys: int
    visited_queries: int
    touched_keys: int
    by_head: bool
    grids: tuple[Grid, ...]


def _edges(length: int, step: int) -> Array:
    return np.append(np.arange(0, length, step), length)


def _corners(length: int, block: int) -> tuple[Array, Array]:
    """Return the first and the last position of every tile."""
    first = np.arange(0, length, block, dtype=np.int64)
    return first, np.minimum(first + block, length) - 1


def survey(
    allowed: Expr | None,
    sizes: Sizes,
    block_q: int,
    block_kv: int,
    *,
    machine: str = "gpu",
    most_cells: Sequence[tuple[int, int]] = (),
    at: tuple[int, int] = (0, 0),
    count_pairs: bool = True,
    only_grids: bool = False,
) -> Survey:
    """Count the tiles of a problem.

    Parameters
    ----------
    allowed : Expr or None
        The bound mask; None: every pair attends.
    sizes : Sizes
        Of the problem; no axis is empty.
    block_q, block_kv : int
        Queries and keys of a tile.
    machine : {"gpu", "cpu", "exact"}
        Whose kernels' classes; "exact" looks at every element of the arrays that a mask reads.
    most_cells : sequence of tuple of int
        The most rows and columns of cells that each grid has.
    at : tuple of int
        The batch entry and the head that the grids show.
    count_pairs : bool
        Whether pairs are counted, too.
    only_grids : bool
        Whether they are all that is wanted: the counts are those of their batch entry and head.

    Returns
    -------
    Survey
        Exact, whatever the size; but for `pairs`, which may be None.
    """
    batch = int(np.prod(sizes.lead))
    classes = None if allowed is None else tile_class(allowed)
    nodes = () if allowed is None else walk(allowed)
    names = {node.value for node in nodes if node.op == "symbol"}
    entries = range(batch) if "b" in names and not only_grids else (at[0],)
    heads = range(sizes.heads) if "h" in names and not only_grids else (at[1],)
    times = 1 if only_grids else batch * sizes.heads // (len(entries) * len(heads))
    count_pairs = count_pairs and not only_grids

    shape = -(-sizes.len_q // block_q), -(-sizes.len_k // block_kv)
    grids = [_empty_grid(sizes, shape, (block_q, block_kv), most) for most in most_cells]
    counts = np.zeros(3, np.int64)
    visited = np.zeros(3, np.int64)  # pairs, keys, queries
    pairs, asked, touched = 0, 0, 0
    for b, h in itertools.product(entries, heads):
        columns = np.zeros(shape[1], bool)
        for rows, found in _classes(classes, sizes, block_q, block_kv, machine, b, h):
            counts += [np.count_nonzero(found == kind) for kind in (EMPTY, PARTIAL, FULL)]
            beyond = rows.stop * block_q - sizes.len_q, shape[1] * block_kv - sizes.len_k
            visited += _sizes_of(found != EMPTY, block_q, block_kv, beyond)
            columns |= (found != EMPTY).any(axis=0)
            if (b, h) == at:
                for grid in grids:
                    _add_to(grid, found, rows.start)
            if not count_pairs:
                continue
            pairs += int(_sizes_of(found == FULL, block_q, block_kv, beyond)[0])
            asked += int(_sizes_of(found == PARTIAL, block_q, block_kv, beyond)[0])
            count_pairs = asked <= MOST_PAIRS
            if count_pairs and allowed is not None:
                pairs += _partial_pairs(allowed, sizes, block_q, block_kv, rows, found, b, h)
        rest = shape[1] * block_kv - sizes.len_k
        touched += block_kv * int(np.count_nonzero(columns)) - rest * int(columns[-1])
    return Survey(
        TileCount(*(times * int(n) for n in counts)),
        times * pairs if count_pairs else None,
        times * int(visited[0]),
        times * int(visited[1]),
        times * int(visited[2]),
        times * touched,
        "h" in names,
        tuple(grids),
    )


def _empty_grid(
    sizes: Sizes, shape: tuple[int, int], blocks: tuple[int, int], most: tuple[int, int]
) -> Grid:
    down, across = (-(-n // cells) for n, cells in zip(shape, most, strict=True))
    cells = np.zeros((-(-shape[0] // down), -(-shape[1] // across), 3), np.int64)
    return Grid(sizes.len_q, sizes.len_k, *blocks, down, across, cells)


def _sizes_of(chosen: Array, block_q: int, block_kv: int, beyond: tuple[int, int]) -> Array:
    """Return pairs, keys and queries of chosen tiles, of rows of whose last some do not exist."""
    tiles = int(np.count_nonzero(chosen))
    of_row, of_column = (
        (int(np.count_nonzero(line)), max(rest, 0))
        for line, rest in ((chosen[-1], beyond[0]), (chosen[:, -1], beyond[1]))
    )
    queries = tiles * block_q - of_row[0] * of_row[1]
    keys = tiles * block_kv - of_column[0] * of_column[1]
    pairs = tiles * block_q * block_kv
    pairs -= of_row[0] * of_row[1] * block_kv + of_column[0] * of_column[1] * block_q
    pairs += int(chosen[-1, -1]) * of_row[1] * of_column[1]
    return np.array([pairs, keys, queries], np.int64)


def symbols_of(sizes: Sizes, b: int, h: int, **positions: Any) -> dict[str, Any]:
    """Return the values of the symbols of one batch entry and head."""
    numbers = {"b": b, "h": h, "len_q": sizes.len_q, "len_k": sizes.len_k}
    numbers |= {"start_q": sizes.start_q, "start_k": sizes.start_k}
    return {name: np.asarray(n, np.int64) for name, n in (numbers | positions).items()}


def _classes(
    classes: Expr | None,
    sizes: Sizes,
    block_q: int,
    block_kv: int,
    machine: str,
    b: int,
    h: int,
) -> Iterator[tuple[slice, Array]]:
    """Go through the tiles of a batch entry and head: some rows of tiles, and their classes."""
    (i_low, i_high), (j_low, j_high) = (
        _corners(sizes.len_q, block_q),
        _corners(sizes.len_k, block_kv),
    )
    step = max(1, TILES_AT_A_TIME // len(j_low))
    for first in range(0, len(i_low), step):
        rows = slice(first, min(first + step, len(i_low)))
        shape = rows.stop - first, len(j_low)
        if classes is None:
            yield rows, np.full(shape, FULL)
            continue
        corners = {"i_low": i_low[rows, None], "i_high": i_high[rows, None]}
        corners |= {"j_low": j_low[None], "j_high": j_high[None]}
        values = tile_classes(classes, symbols_of(sizes, b, h, **corners), machine)
        yield rows, np.broadcast_to(values, shape)


def _add_to(grid: Grid, found: Array, first: int) -> None:
    """Add the tiles of some rows to the cells that they belong to."""
    columns = np.arange(0, found.shape[1], grid.across)
    place = (first + np.arange(found.shape[0])) // grid.down
    for kind in (EMPTY, PARTIAL, FULL):
        by_column = np.add.reduceat((found == kind).astype(np.int64), columns, axis=1)
        np.add.at(grid.tiles[..., kind], place, by_column)


def _partial_pairs(
    allowed: Expr,
    sizes: Sizes,
    block_q: int,
    block_kv: int,
    rows: slice,
    found: Array,
    b: int,
    h: int,
) -> int:
    """Count the pairs that attend in the partial tiles of some rows."""
    total = 0
    for row, classes in enumerate(found, rows.start):
        tiles = np.flatnonzero(classes == PARTIAL)
        if not tiles.size:
            continue
        i = np.arange(row * block_q, min((row + 1) * block_q, sizes.len_q))[:, None]
        keys = (tiles[:, None] * block_kv + np.arange(block_kv)).reshape(-1)
        keys = keys[keys < sizes.len_k]
        step = max(1, PAIRS_AT_A_TIME // len(i))
        for first in range(0, len(keys), step):
            j = keys[None, first : first + step]
            value = evaluate(allowed, symbols_of(sizes, b, h, i=i, j=j))
            total += int(np.broadcast_to(value, (len(i), j.shape[1])).sum())
    return total
