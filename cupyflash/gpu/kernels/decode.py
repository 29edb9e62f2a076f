"""Sizes of the kernels for few queries and many keys: tasks, slots, workspace.

This is the twin of kernels_cu/decode/tasks.cuh and workspace.cuh, as far as the host needs it. All
of it follows from shapes, because lengths may be on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...arrays import device_arrays
from ...arrays.cuda_device import Target
from ...problem.call import Call, Problem
from .grid import ROWS_OF_PIECES
from .spec import Grid, Tiles

LEAF = 64  # keys of a leaf; 8 nodes are one of the next level
MOST_UNITS = 64  # for each block, unless there are more of the largest
FILL = 3  # units of an SM's blocks from which on they may be larger nodes
HELD = 2  # slots of a warp for nodes below its unit
ROWS_OF_BLOCK = 64  # rows of tasks from which on all of a block works on one unit: most of them
MOST_OF_BLOCK = 16
TASK_BYTES, LEVELS = 96, 4  # of a task that a warp has; levels of units
NODE = 512  # keys of a node of level 1
# Measured on an H100, a kernel for shared keys saves time where others would read as many bytes of
# these again, from the L2 cache. More warps than MOST_TEAM wait too long for each other.
FEWEST_SHARED_BYTES = 256 << 20
MOST_TEAM = 4
# Rows of o in slots are multiples of COLUMNS, and their m and l have as many bytes. Where all of a
# block works on one unit, the rows are pieces of as many elements, one of these for m and l, those
# of ROWS_OF_PIECES rows side by side, and begin at a multiple of LINE bytes.
COLUMNS, STATISTICS_BYTES, LINE = 16, 16, 128
MOST_ROWS = 16  # queries of the heads that share a key head, and
FEWEST_KEYS = 512  # keys, for which other kernels leave most of a GPU idle
COMPRESSED = 576, 512  # columns of keys, the first of which are the values
MOST_CACHED_ROWS = 64  # of a cache: as many drafts have the bits of single steps
# Warps of a block if an SM has as many leaves at most: beside it, the SM has room for a block of
# the grid that joins, where grids overlap.
FEW_WARPS, OVERLAPS = 4, (9, 0)
# Of a block that has all leaves of a task: its warps, and the most bytes of keys and values. Beyond
# these, an H200 takes longer for one kernel than for two.
WHOLE_WARPS, WHOLE_BYTES = 8, 256 << 10


def values_in_keys(call: Call) -> bool:
    """Return whether the values are the first columns of the keys, in the same memory."""
    k, v = call.k, call.v
    return bool(k.strides == v.strides and device_arrays.address(k) == device_arrays.address(v))


def wanted(problem: Problem) -> bool:
    """Return whether a call on dense arrays has few queries and many keys.

    It never depends on the batch size, and so results do not, either.
    """
    if problem.dropout > 0 or not problem.heads_kv:
        return False
    rows = problem.heads // problem.heads_kv * problem.rows.known_q
    return 0 < rows <= MOST_ROWS and problem.rows.known_k >= FEWEST_KEYS


def has_few_leaves(problem: Problem, block_q: int, device: Target) -> bool:
    """Return whether there are never more than `FEW_WARPS` for each SM, and grids overlap.

    Lengths are not known, and so it is about the capacity. No bit depends on it.
    """
    if not problem.heads_kv or device.capability < OVERLAPS:
        return False
    leaves = _tasks(problem, block_q) * most_leaves(problem)
    return leaves <= FEW_WARPS * device.multiprocessors


def are_whole(problem: Problem, block_q: int, device: Target, row: int) -> bool:
    """Return whether each task is to have a block, of `WHOLE_WARPS`, which take leaves in turn.

    `row` is the bytes of a position's keys and values, or 0 if they are not what takes the time.
    One SM is slower than several for as many keys, and saves a launch. So a warp has no more turns
    than if all leaves were dealt out to all SMs; and where tasks leave half of the SMs idle, a task
    has half of the most bytes. This is about capacities, and no bit depends on it.
    """
    if not problem.heads_kv:
        return False
    tasks, leaves, count = _tasks(problem, block_q), most_leaves(problem), device.multiprocessors
    if tasks > count:
        return False
    if -(-leaves // WHOLE_WARPS) > max(1, -(-tasks * leaves // (WHOLE_WARPS * count))):
        return False
    return LEAF * leaves * row <= (WHOLE_BYTES if 2 * tasks > count else WHOLE_BYTES // 2)


def warps_of_tasks(problem: Problem, block_q: int, device: Target, codes: bool) -> int:
    """Return how many warps each task is to have, a node of `NODE` keys for each; 0 if none.

    So it is where tasks, each with a warp for every node that there may be, are about as many as
    fill all SMs at a time: no other kernel joins results then. It was not measured for a cache of
    codes. This is about capacities, and no bit depends on it.
    """
    if codes or not problem.heads_kv or device.capability < OVERLAPS or problem.rows.shared:
        return 0
    tasks, leaves = _tasks(problem, block_q), most_leaves(problem)
    nodes, room = -(-leaves * LEAF // NODE), WHOLE_WARPS * device.multiprocessors
    warps = next((n for n in (1, 2, 4, WHOLE_WARPS) if n >= nodes), 0)
    return warps if tasks * warps <= room and 10 * tasks * nodes >= 9 * room else 0


def most_leaves(problem: Problem) -> int:
    """Return the leaves of the longest entry that there may be."""
    return -(-int(np.max(problem.len_k, initial=0)) // LEAF)


def most_nodes(problem: Problem, block_q: int) -> int:
    """Return the most nodes of level 1 that there may be; 0 if tasks are unknown."""
    if not problem.heads_kv:
        return 0
    return _tasks(problem, block_q) * max(-(-most_leaves(problem) * LEAF // NODE), 1)


def _tasks(problem: Problem, block_q: int) -> int:
    """Return the number of tasks; of packed queries it is unknown, and more than any other."""
    group = problem.heads // problem.heads_kv
    heads, queries = rows_of_task(group, block_q)
    tasks = -(-group // heads) * -(-problem.rows.known_q // queries)
    return problem.batch * problem.heads_kv * tasks


def schedule_bytes(warps: int) -> int:
    """Bytes of shared memory in which a block's warps tell each other of units."""
    return 4 * (32 + LEVELS) * warps


def rows_of_task(group: int, block_q: int) -> tuple[int, int]:
    """Return the heads and the most queries of a task's rows."""
    heads = min(group, block_q)
    return heads, block_q // heads


def most_rows(group: int, block_q: int, len_q: int) -> int:
    """Return the most rows that a task has; no entry has more than `len_q` queries."""
    heads, queries = rows_of_task(group, block_q)
    return heads * min(queries, len_q)


class Shared(NamedTuple):
    """Keys that a kernel of its own reads for all entries.

    Attributes
    ----------
    kernel : str
        The kernel.
    nodes : int
        Their nodes of `NODE` keys.
    team : int
        Warps of a block that read the same keys, each with other rows.
    teams : int
        Teams that read them, for each key head.
    pairs : int
        Pairs of a query and a key that its products have.
    """

    kernel: str
    nodes: int
    team: int
    teams: int
    pairs: int


NOT_SHARED = Shared("", 0, 0, 0, 0)


class Slots(NamedTuple):
    """Places for results that a launch keeps.

    Attributes
    ----------
    units : int
        The most units that there can be.
    held : int
        Additional places for each warp; none if no unit can have kept nodes below it.
    """

    units: int
    held: int


def team_of(tiles: Tiles, warps: int) -> int:
    """Return how many warps of a block read the same keys, if `warps` have rows for them."""
    in_block = tiles.threads // 32
    sizes = [n for n in range(1, MOST_TEAM + 1) if in_block % n == 0]
    return next((n for n in sizes if n >= warps), sizes[-1])


def slots(grid: Grid, tiles: Tiles, capacity: int) -> Slots:
    """Return the slots of a launch with a task for each of its pieces of work.

    `capacity` is the number of keys of the longest possible entry.
    """
    tasks, blocks = grid.work_tiles, grid.size

    def units(level: int) -> int:
        keys = LEAF << 3 * level
        return tasks * max(-(-capacity // keys), 1)

    if tiles.block_q >= ROWS_OF_BLOCK:
        return Slots(min(units(1), max(MOST_OF_BLOCK * blocks, units(2))), 0)
    most = MOST_UNITS * blocks
    large = units(2) * tiles.resident_blocks >= FILL * blocks or units(1) > most
    return Slots(min(units(0), max(most, units(3))), HELD if large else 0)


def nbytes(
    grid: Grid, tiles: Tiles, rows: int, d_v: int, itemsize: int, capacity: int, shared: int
) -> int:
    """Return the bytes of a launch's workspace.

    Parameters
    ----------
    grid : Grid
        The grid, with one piece of work for each task.
    tiles : Tiles
        The kernel's.
    rows : int
        The most rows of a task.
    d_v : int
        Head size of the values.
    itemsize : int
        Bytes of the accumulator's type.
    capacity : int
        The longest possible entry.
    shared : int
        Nodes of level 1 that entries share.
    """
    made, records = slots(grid, tiles, capacity), 16 * grid.work_tiles
    rows *= _slots_of_tasks(grid, tiles, made) + grid.work_tiles * shared
    if tiles.block_q >= ROWS_OF_BLOCK:
        records = -(-records // LINE) * LINE
        rows = -(-rows // ROWS_OF_PIECES) * ROWS_OF_PIECES
    return records + rows * row_bytes(d_v, itemsize, tiles.block_q)


def row_bytes(d_v: int, itemsize: int, block_q: int = 0) -> int:
    """Bytes of a row in a slot: m and l, and o; `block_q` rows are the most of a task."""
    statistics = COLUMNS * itemsize if block_q >= ROWS_OF_BLOCK else STATISTICS_BYTES
    return -(-d_v // COLUMNS) * COLUMNS * itemsize + statistics


def fields(grid: Grid, tiles: Tiles, capacity: int, shared: int) -> Mapping[str, Any]:
    """Return what the kernels are told of their tasks."""
    made = slots(grid, tiles, capacity)
    return {
        "tasks": grid.work_tiles,
        "slots": made.units,
        "held": made.held,
        "shared": shared,
        "shared_slots": _slots_of_tasks(grid, tiles, made),
    }


def _slots_of_tasks(grid: Grid, tiles: Tiles, made: Slots) -> int:
    """Return how many slots there are for what tasks have alone."""
    return made.units + grid.size * tiles.threads // 32 * made.held
