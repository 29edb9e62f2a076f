"""Which tiles of a score matrix are empty, partial and full, counted block by block.

The search examines rectangles of tiles, beginning with the whole matrix, and splits each PARTIAL
rectangle into quarters: a bound for a rectangle holds for every tile in it. So time and memory grow
with the edges of a mask, not with the square of the length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import ArgumentError
from ...expr.bind import Sizes
from ...expr.evaluate import evaluate
from ...expr.interval import EMPTY, FULL, PARTIAL, tile_class
from ...expr.nodes import Expr, walk
from ...expr.tile_classes import tile_classes
from ..analysis.tiles import TileCount

Array = np.ndarray[Any, Any]

AT_A_TIME = 2**16  # rectangles
MOST_LOOKS = 2**25  # rectangles that are examined: a few seconds, or a minute in small steps
OF_A_STEP = 2**8  # that a step counts for, at least
PAIRS_AT_A_TIME = 2**21
MOST_PAIRS = 2**27  # that are asked one by one: a few seconds


@dataclass(frozen=True, eq=False)
class Grid:
    """The tiles of one batch entry and head as a picture's cells.

    Attributes
    ----------
    len_q, len_k : int
        Numbers of queries, from top to bottom, and of keys, from left to right.
    block_q, block_kv : int
        Queries and keys of a tile.
    missing : int
        Queries that the first tiles lack.
    down, across : int
        Number of tiles along each side of a cell; cells at the ends may have fewer.
    tiles : numpy.ndarray of int, shape (rows, columns, 3)
        Tiles in a cell that are EMPTY, PARTIAL and FULL, in this order.
    """

    len_q: int
    len_k: int
    block_q: int
    block_kv: int
    missing: int
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
        return _edges(self.len_q, self.block_q * self.down, self.missing)

    @property
    def edges_k(self) -> Array:
        """First key of every column of cells, and the number of keys."""
        return _edges(self.len_k, self.block_kv * self.across)


@dataclass(frozen=True, eq=False)
class Survey:
    """What a mask leaves of a problem's tiles, over all its batch entries and heads.

    Attributes
    ----------
    tiles : TileCount
        How many are EMPTY, PARTIAL and FULL.
    pairs : int or None
        Number of pairs of a query and a key that attend; None if too many would have to be
        examined.
    visited_pairs : int
        Pairs in tiles that are not skipped.
    visited_keys, visited_queries : int
        Keys and queries of those tiles, summed over the tiles.
    touched_keys : int
        Keys in at least one of those tiles, of every batch entry and query head.
    by_head : bool
        Whether the mask may differ between heads.
    grids : tuple of Grid
        The tiles of one batch entry and head, one grid for each picture, as coarse as it needs.
    """

    tiles: TileCount
    pairs: int | None
    visited_pairs: int
    visited_keys: int
    visited_queries: int
    touched_keys: int
    by_head: bool
    grids: tuple[Grid, ...]


def _edges(length: int, step: int, missing: int = 0) -> Array:
    return np.append(np.maximum(np.arange(-missing, length, step), 0), length)


class _Blocks(NamedTuple):
    """Queries and keys of a tile, and how many queries the first tiles lack."""

    q: int
    kv: int
    missing: int

    def rows(self, tile: Any, sizes: Sizes) -> Any:
        """Return the first query of a tile, or the number of queries behind the last one."""
        return np.clip(tile * self.q - self.missing, 0, sizes.len_q)

    def columns(self, tile: Any, sizes: Sizes) -> Any:
        """Return the first key of a tile, or the number of keys behind the last one."""
        return np.minimum(tile * self.kv, sizes.len_k)


class _Rectangles(NamedTuple):
    """Rectangles of tiles: rows from `top` to `bottom`, and columns from `left` to `right`.

    Each is an array of int64 with one entry for every rectangle.
    """

    top: Array
    bottom: Array
    left: Array
    right: Array

    def chosen(self, which: Array | slice) -> _Rectangles:
        """Return some of them."""
        return _Rectangles(*(side[which] for side in self))

    @property
    def tiles(self) -> Array:
        """Tiles of each."""
        number: Array = (self.bottom - self.top) * (self.right - self.left)
        return number

    def extents(self, sizes: Sizes, blocks: _Blocks) -> tuple[Array, Array]:
        """Return queries and keys of each; the first and the last tiles may have fewer."""
        return (
            blocks.rows(self.bottom, sizes) - blocks.rows(self.top, sizes),
            blocks.columns(self.right, sizes) - blocks.columns(self.left, sizes),
        )

    def quarters(self) -> _Rectangles:
        """Return the parts, two or four, of rectangles of more than a tile."""
        down, across = (
            low + (high - low + 1) // 2
            for low, high in ((self.top, self.bottom), (self.left, self.right))
        )
        parts = [
            (self.top, down, self.left, across),
            (self.top, down, across, self.right),
            (down, self.bottom, self.left, across),
            (down, self.bottom, across, self.right),
        ]
        made = _Rectangles(*(np.concatenate(sides) for sides in zip(*parts, strict=True)))
        return made.chosen(made.tiles > 0)


def survey(
    allowed: Expr | None,
    sizes: Sizes,
    block_q: int,
    block_kv: int,
    *,
    missing: int = 0,
    machine: str = "gpu",
    most_cells: Sequence[tuple[int, int]] = (),
    at: tuple[int, int] = (0, 0),
    count_pairs: bool = True,
    only_grids: bool = False,
    entries: Sequence[int] | None = None,
) -> Survey:
    """Count the tiles of a problem.

    Parameters
    ----------
    allowed : Expr or None
        The bound mask; if None, every pair attends.
    sizes : Sizes
        Sizes of the problem; no axis is empty.
    block_q, block_kv : int
        Queries and keys of a tile.
    missing : int
        Queries that the first tiles lack.
    machine : {"gpu", "cpu", "exact"}
        Which kernels' classes to return; "exact" examines every element of the arrays that a mask
        reads.
    most_cells : sequence of tuple of int
        The most rows and columns of cells for each grid.
    at : tuple of int
        The batch entry and the head that the grids show.
    count_pairs : bool
        Whether pairs are counted, too.
    only_grids : bool
        Whether only the grids are needed; the counts are then those of their batch entry and head.
    entries : sequence of int, optional
        The batch entries that are counted; by default all.

    Returns
    -------
    Survey
        Exact counts for any size, except that `pairs` may be None.

    Raises
    ------
    ArgumentError
        If a head has 2^62 pairs or more, or the mask has so many edges that it would take minutes.
    """
    if sizes.len_q * sizes.len_k >= 2**62:
        raise ArgumentError(
            f"len_q, len_k: got {sizes.len_q:,} queries and {sizes.len_k:,} keys; expected fewer "
            "than 2^62 pairs."
        )
    counted = range(int(np.prod(sizes.lead))) if entries is None else entries
    classes = None if allowed is None else tile_class(allowed)
    nodes = () if allowed is None else walk(allowed)
    names = {node.value for node in nodes if node.op == "symbol"}
    looked_at = counted if "b" in names and not only_grids else (at[0],)
    heads = range(sizes.heads) if "h" in names and not only_grids else (at[1],)
    times = 1 if only_grids else len(counted) * sizes.heads // (len(looked_at) * len(heads))
    count_pairs = count_pairs and not only_grids

    blocks = _Blocks(block_q, block_kv, missing)
    shape = -(-(sizes.len_q + missing) // block_q), -(-sizes.len_k // block_kv)
    grids = [_empty_grid(sizes, shape, blocks, most) for most in most_cells]
    counts = np.zeros(3, np.int64)
    visited = np.zeros(3, np.int64)  # pairs, keys, queries
    pairs, asked, touched, looks = 0, 0, 0, 0
    for b, h in itertools.product(looked_at, heads):
        entered = np.zeros(0 if only_grids else shape[1] + 1, np.int64)  # less those that were left
        partial: list[_Rectangles] = []
        for found, kinds, looked in _classes(classes, sizes, shape, blocks, machine, b, h):
            looks += max(looked, OF_A_STEP)
            if looks > MOST_LOOKS:
                raise ArgumentError(
                    f"mask: got one with more than {MOST_LOOKS:,} tiles of {block_q} queries x "
                    f"{block_kv} keys to examine one by one; expected fewer queries, keys, heads "
                    "or batch entries, or a mask with large parts that are EMPTY or FULL."
                )
            np.add.at(counts, kinds, found.tiles)
            if (b, h) == at:
                for grid in grids:
                    _add_to(grid, found, kinds)
            if only_grids:
                continue
            seen = found.chosen(kinds != EMPTY)
            queries, keys = seen.extents(sizes, blocks)
            visited += [
                (queries * keys).sum(),
                (keys * (seen.bottom - seen.top)).sum(),
                (queries * (seen.right - seen.left)).sum(),
            ]
            np.add.at(entered, seen.left, 1)
            np.add.at(entered, seen.right, -1)
            if count_pairs:
                masked = kinds[kinds != EMPTY] == PARTIAL
                pairs += int((queries * keys)[~masked].sum())
                asked += int((queries * keys)[masked].sum())
                count_pairs = asked <= MOST_PAIRS
                if masked.any():
                    partial.append(seen.chosen(masked))
        if only_grids:
            continue
        if count_pairs and allowed is not None:
            pairs += sum(_partial_pairs(allowed, sizes, blocks, each, b, h) for each in partial)
        columns = np.cumsum(entered[:-1]) > 0
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


def together(parts: Sequence[Survey]) -> Survey:
    """Return the survey of the entries of several, with the grids of the first."""
    first = parts[0]
    if len(parts) == 1:
        return first
    pairs = [part.pairs for part in parts]
    return Survey(
        TileCount(*map(sum, zip(*(part.tiles for part in parts), strict=True))),
        None if None in pairs else sum(n for n in pairs if n is not None),
        sum(part.visited_pairs for part in parts),
        sum(part.visited_keys for part in parts),
        sum(part.visited_queries for part in parts),
        sum(part.touched_keys for part in parts),
        first.by_head,
        first.grids,
    )


def _empty_grid(
    sizes: Sizes, shape: tuple[int, int], blocks: _Blocks, most: tuple[int, int]
) -> Grid:
    down, across = (-(-n // cells) for n, cells in zip(shape, most, strict=True))
    cells = np.zeros((-(-shape[0] // down), -(-shape[1] // across), 3), np.int64)
    return Grid(sizes.len_q, sizes.len_k, *blocks, down, across, cells)


def symbols_of(sizes: Sizes, b: int, h: int, **positions: Any) -> dict[str, Any]:
    """Return the values of the symbols of one batch entry and head."""
    numbers = {"b": b, "h": h, "len_q": sizes.len_q, "len_k": sizes.len_k}
    numbers |= {"start_q": sizes.start_q, "start_k": sizes.start_k}
    return {name: np.asarray(n, np.int64) for name, n in (numbers | positions).items()}


def _classes(
    classes: Expr | None,
    sizes: Sizes,
    shape: tuple[int, int],
    blocks: _Blocks,
    machine: str,
    b: int,
    h: int,
) -> Iterator[tuple[_Rectangles, Array, int]]:
    """Go through the tiles of one batch entry and head.

    Yields
    ------
    found : _Rectangles
        Rectangles whose tiles are all alike; PARTIAL ones are single tiles.
    kinds : numpy.ndarray of int64
        Their classes.
    looked : int
        How many rectangles were examined.
    """
    waiting = [_Rectangles(*(np.array([n], np.int64) for n in (0, shape[0], 0, shape[1])))]
    while waiting:
        found = waiting.pop()
        kinds = np.full(found.top.shape, FULL, np.int64)
        if classes is not None:
            corners = {
                "i_low": blocks.rows(found.top, sizes),
                "i_high": blocks.rows(found.bottom, sizes) - 1,
                "j_low": blocks.columns(found.left, sizes),
                "j_high": blocks.columns(found.right, sizes) - 1,
            }
            kinds[:] = tile_classes(classes, symbols_of(sizes, b, h, **corners), machine)
        again = (kinds == PARTIAL) & (found.tiles > 1)
        yield found.chosen(~again), kinds[~again], len(kinds)
        rest = found.chosen(again).quarters()
        starts = range(0, len(rest.top), AT_A_TIME)
        waiting += [rest.chosen(slice(first, first + AT_A_TIME)) for first in starts]


def _add_to(grid: Grid, found: _Rectangles, kinds: Array) -> None:
    """Add tiles to the cells that they belong to."""
    rows, columns, _ = grid.tiles.shape
    row, column = found.top // grid.down, found.left // grid.across
    inside = (found.bottom <= (row + 1) * grid.down) & (found.right <= (column + 1) * grid.across)
    place = row[inside], column[inside], kinds[inside]
    np.add.at(grid.tiles, place, found.tiles[inside])
    for kind in (EMPTY, PARTIAL, FULL):
        wide = found.chosen(~inside & (kinds == kind))
        down = _overlaps(wide.top, wide.bottom, grid.down, rows)
        across = _overlaps(wide.left, wide.right, grid.across, columns)
        grid.tiles[..., kind] += (down @ across.T).astype(np.int64)


def _overlaps(first: Array, last: Array, step: int, cells: int) -> Array:
    """Return how many rows or columns of rectangles lie in cells of `step`: (cells, rectangles)."""
    start = step * np.arange(cells)[:, None]
    common = np.minimum(last, start + step) - np.maximum(first, start)
    numbers: Array = np.maximum(common, 0).astype(np.float64)  # their products are exact to 2^53
    return numbers


def _partial_pairs(
    allowed: Expr, sizes: Sizes, blocks: _Blocks, tiles: _Rectangles, b: int, h: int
) -> int:
    """Count the pairs that attend in single tiles."""
    total = 0
    order = np.lexsort((tiles.left, tiles.top))
    rows, begins = np.unique(tiles.top[order], return_index=True)
    for row, columns in zip(rows, np.split(tiles.left[order], begins[1:]), strict=True):
        i = np.arange(blocks.rows(row, sizes), blocks.rows(row + 1, sizes))[:, None]
        keys = (columns[:, None] * blocks.kv + np.arange(blocks.kv)).reshape(-1)
        keys = keys[keys < sizes.len_k]
        step = max(1, PAIRS_AT_A_TIME // len(i))
        for first in range(0, len(keys), step):
            j = keys[None, first : first + step]
            value = evaluate(allowed, symbols_of(sizes, b, h, i=i, j=j))
            total += int(np.broadcast_to(value, (len(i), j.shape[1])).sum())
    return total
