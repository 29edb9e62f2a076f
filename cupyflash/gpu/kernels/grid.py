"""Grids: how many blocks a launch has, by what a block owns."""

from __future__ import annotations

from .spec import Extent, Grid, Tiles

# Packed: blocks that an SM is to have in turn, so that a long one does not end last; and the most
# work tiles of a block, which loads the next one while it computes. Measured on an H200.
TURNS, MOST_TILES = 8, 4
ROWS_OF_PIECES = 8  # side by side in the workspace of decode.py


def by_queries(extent: Extent, tiles: Tiles) -> Grid:
    """A block for each tile of queries of a head."""
    return _by_rows(extent.queries, tiles.block_q, extent)


def by_keys(extent: Extent, tiles: Tiles) -> Grid:
    """A block for each tile of keys of a head."""
    return _by_rows(extent.keys, tiles.block_kv, extent)


def counted_by_keys(extent: Extent, tiles: Tiles) -> Grid:
    """A block for each tile of keys of a head, or fewer: see COUNTS in common/layout.cuh."""
    return _by_rows(extent.keys, tiles.block_kv, extent, extent.longest[1])


def by_tiles(extent: Extent, tiles: Tiles) -> Grid:
    """A block for each tile of scores of a head."""
    of_head = -(-extent.queries // tiles.block_q) * -(-extent.keys // tiles.block_kv)
    return _plain(of_head * extent.heads * extent.entries, 0)


def by_results(extent: Extent, tiles: Tiles) -> Grid:
    """A block for `block_q` rows, whichever sequences they belong to."""
    blocks = -(-extent.queries // tiles.block_q)
    return _plain(blocks * extent.heads * extent.entries, blocks)


def by_heads(extent: Extent, _: Tiles) -> Grid:
    """A block for each head."""
    return _plain(extent.heads, 0)


def by_owners(extent: Extent, _: Tiles) -> Grid:
    """As many blocks for each head as are asked for."""
    return _plain(extent.queries * extent.heads * extent.entries, extent.queries)


def by_blocks(extent: Extent, _: Tiles) -> Grid:
    """As many blocks as are asked for."""
    return _plain(extent.queries, 0)


def by_warps(extent: Extent, tiles: Tiles) -> Grid:
    """A warp for each row."""
    return _plain(-(-extent.queries // (tiles.threads // 32)), 0)


def shared_by_queries(extent: Extent, tiles: Tiles) -> Grid:
    """Return a grid of tiles of queries that are shared among as many blocks as the SMs hold.

    Tiles are dealt out in advance, and a block prepares its next one. Blocks that wait until
    another kernel leaves their SM may take very different times: then each tile has its own block,
    which goes to any free SM. Tiles of packed sequences may do so, too: a block has a few of them,
    which lie far apart. Of these there may be fewer, see COUNTS in common/layout.cuh.
    """
    parts = extent.heads * tiles.v_parts  # of wide values have the same queries
    of_parts = extent._replace(heads=parts)
    grid = _by_rows(extent.queries, tiles.block_q, of_parts, extent.longest[0])
    if extent.differ:
        return grid
    most = extent.multiprocessors * tiles.resident_blocks
    if extent.sequences:
        each = min(MOST_TILES, grid.size // (TURNS * most)) if most else 1
        return grid._replace(size=-(-grid.size // max(each, 1)))
    return grid._replace(size=min(grid.size, most))


def by_units(extent: Extent, tiles: Tiles) -> Grid:
    """Tasks of heads that share keys, whose units as many blocks share as the device holds.

    Where tasks are whole, each has a block.
    """
    heads = min(extent.group, tiles.block_q)
    tasks = _by_rows(extent.queries, tiles.block_q // heads, extent)
    tasks = tasks._replace(work_tiles=tasks.work_tiles * -(-extent.group // heads))
    if tiles.whole:
        return tasks._replace(size=-(-tasks.work_tiles // max(tiles.whole_tasks, 1)))
    return tasks._replace(size=extent.multiprocessors * tiles.resident_blocks * (tasks.size > 0))


def by_rows_of_tasks(extent: Extent, tiles: Tiles) -> Grid:
    """A block for each row of each of the tasks of `by_units`; of two warps, one for two rows.

    Without shared memory, it has `ROWS_OF_PIECES` rows of a task.
    """
    heads = min(extent.group, tiles.block_q)
    tasks = by_units(extent, tiles)
    rows = heads * min(max(extent.queries, 1), tiles.block_q // heads)
    if tiles.shared_memory == 0:
        return tasks._replace(size=tasks.work_tiles * -(-rows // ROWS_OF_PIECES))
    rows *= tasks.work_tiles
    return tasks._replace(size=rows if tiles.threads > 64 else -(-rows // 2))


def _by_rows(rows: int, block: int, extent: Extent, longest: int = 0) -> Grid:
    if extent.sequences:  # each may end within a block
        blocks = rows // block + extent.sequences if rows else 0
        if longest:  # each may have as many as the longest one
            blocks = min(blocks, extent.sequences * -(-longest // block))
    else:
        blocks = -(-rows // block)
    return _plain(blocks * extent.heads * extent.entries, blocks)


def _plain(work_tiles: int, blocks: int) -> Grid:
    return Grid(work_tiles, blocks, work_tiles)
