"""Sizes of the kernels for few queries and many keys: tasks, slots, workspace.

The twin of kernels_cu/decode/tasks.cuh and workspace.cuh, as far as the host has to
know. Everything here follows from shapes: lengths may lie on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...problem.call import Problem
from .spec import Grid, Tiles

LEAF, CHILDREN = 64, 8  # keys of a leaf, children of a node
LARGEST_UNIT = LEAF * CHILDREN**3  # keys of a unit of the last level
MOST_UNITS = 64  # for each block, unless there are more of the largest
HELD = 2  # slots of a warp for nodes below its unit
COLUMNS = 16  # rows of o in slots are multiples of it
MOST_ROWS = 16  # queries of the heads that share a key head, and
FEWEST_KEYS = 512  # keys, for which other kernels leave most of a GPU idle


def wanted(problem: Problem) -> bool:
    """Whether a call on dense arrays is one of few queries and many keys.

    It never depends on the batch size, so that no result does.
    """
    if problem.packed or problem.dropout > 0 or not problem.heads_kv:
        return False
    rows = problem.heads // problem.heads_kv * int(problem.len_q)
    return 0 < rows <= MOST_ROWS and int(problem.len_k) >= FEWEST_KEYS


def rows_of_task(group: int, block_q: int) -> tuple[int, int]:
    """Return the heads and the queries of a task's rows."""
    heads = min(group, block_q)
    return heads, block_q // heads


def slots(tasks: int, capacity: int, blocks: int) -> int:
    """Return how many units there can be."""
    return max(MOST_UNITS * blocks, tasks * -(-capacity // LARGEST_UNIT))


def nbytes(grid: Grid, tiles: Tiles, group: int, d_v: int, itemsize: int, capacity: int) -> int:
    """Return the bytes of a launch's workspace.

    Parameters
    ----------
    grid : Grid
        With as many pieces of work as tasks.
    tiles : Tiles
        The kernel's.
    group : int
        Query heads that share a key head.
    d_v : int
        Head size of the values.
    itemsize : int
        Bytes of the accumulator's type.
    capacity : int
        The longest entry that there may be.
    """
    heads, queries = rows_of_task(group, tiles.block_q)
    units = slots(grid.work_tiles, capacity, grid.size)
    rows = (units + grid.size * tiles.threads // 32 * HELD) * heads * queries
    row = -(-d_v // COLUMNS) * COLUMNS + 2  # o, m and l
    return 16 * units + rows * row * itemsize + 8 * grid.work_tiles


def fields(grid: Grid, capacity: int) -> Mapping[str, Any]:
    """Return what the kernels are told of their tasks."""
    tasks = grid.work_tiles
    return {"tasks": tasks, "slots": slots(tasks, capacity, grid.size)}
