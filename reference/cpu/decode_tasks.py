"""How few queries and many keys are divided among threads.

The keys of an entry are leaves of 64 keys at absolute positions, and 8 neighbouring nodes are one
node of the next level; this tree does not depend on anything else in the call. A task is a block of
rows, the queries of heads that share a key head, and its units are the nodes of one level that
contain visible leaves. The level depends on the amount of work: its nodes have 512 keys, or more if
that still occupies all threads, so that fewer results are kept. No bit of a result depends on the
level.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from .arguments import KeyRanges, Shape

Array = np.ndarray[Any, Any]

LEAF, LOG_LEAF, LOG_CHILDREN = 64, 6, 3
MOST_ROWS = 32
MOST_UNITS = 64  # units for each thread, if tasks have several


class Schedule(NamedTuple):
    """Tasks and their units of one level, as tables for the kernel.

    Attributes
    ----------
    tasks : array
        (T, 9): batch entry, key head, first head, heads, first query, queries, first unit, units,
        and the first element of its units' kept results.
    units : array
        (U, 4): task, node, first leaf, and the leaf after the last one.
    level, top : int
        The level of units, and a level whose first node has all keys.
    kept : int
        Number of elements that are kept for units of tasks with several units.
    leaves : int
        Number of leaves of all units, one at least for each.
    """

    tasks: Array
    units: Array
    level: int
    top: int
    kept: int
    leaves: int


def schedule(
    shape: Shape, heads_kv: int, ranges: KeyRanges, columns: int, threads: int
) -> Schedule:
    """Divide a call; a row has `columns` columns of o."""
    sizes = shape.group, heads_kv, columns, MOST_UNITS * threads
    if not ranges.low.size:
        return _of_lengths(shape.len_q.tobytes(), shape.len_k.tobytes(), *sizes)
    rows = _tasks(shape.len_q, shape.group, heads_kv)
    return _divided(rows, *_leaves(shape, rows, ranges), *sizes[2:])


@functools.lru_cache(maxsize=4)  # all layers of a model have the same lengths in a step
def _of_lengths(
    len_q: bytes, len_k: bytes, group: int, heads_kv: int, columns: int, most_units: int
) -> Schedule:
    """Divide a call whose queries see all keys."""
    rows = _tasks(np.frombuffer(len_q, np.int64), group, heads_kv)
    last = (np.frombuffer(len_k, np.int64)[rows[:, 0]] + LEAF - 1) >> LOG_LEAF
    return _divided(rows, np.zeros_like(last), last, columns, most_units)


def _divided(rows: Array, first: Array, last: Array, columns: int, most_units: int) -> Schedule:
    """Choose the units' level, and list them."""
    top = max(-(-((int(last.max(initial=1)) - 1).bit_length()) // LOG_CHILDREN), 1)
    for level in range(1, top + 1):
        # A task without a visible leaf has a unit, too.
        counts = np.maximum((last - 1 >> LOG_CHILDREN * level) - (first >> LOG_CHILDREN * level), 0)
        counts += 1
        several = np.where(counts > 1, counts, 0)
        if several.sum() <= most_units:
            break
    shift = LOG_CHILDREN * level
    first_unit = np.cumsum(counts) - counts
    units = np.empty((int(counts.sum()), 4), np.int64)
    units[:, 0] = task = np.repeat(np.arange(len(rows)), counts)
    begin = first[task]
    units[:, 1] = node = np.arange(len(task)) + ((first >> shift) - first_unit)[task]
    units[:, 2] = np.maximum(node << shift, begin)
    units[:, 3] = np.minimum((node + 1) << shift, last[task])
    sizes = several * rows[:, 3] * rows[:, 5] * (2 + columns)
    tasks = np.empty((len(rows), 9), np.int64)
    tasks[:, :6] = rows
    tasks[:, 6], tasks[:, 7], tasks[:, 8] = first_unit, counts, np.cumsum(sizes) - sizes
    leaves = np.maximum(units[:, 3] - units[:, 2], 1)
    return Schedule(tasks, units, level, top, int(sizes.sum()), int(leaves.sum()))


def _tasks(len_q: Array, group: int, heads_kv: int) -> Array:
    """Return (T, 6): batch entry, key head, first head, heads, first query and queries of tasks."""
    most_heads = min(group, MOST_ROWS)
    most = MOST_ROWS // most_heads
    blocks = -(-len_q // most)
    entry = np.repeat(np.arange(len(blocks)), blocks)
    block = np.arange(len(entry)) - (np.cumsum(blocks) - blocks)[entry]
    inner = np.arange(0, group, most_heads)
    made = np.empty((len(entry), heads_kv, len(inner), 6), np.int64)
    made[..., 0] = entry[:, None, None]
    made[..., 1] = np.arange(heads_kv)[:, None]
    made[..., 2] = np.arange(heads_kv)[:, None] * group + inner
    made[..., 3] = np.minimum(most_heads, group - inner)
    made[..., 4] = (block * most)[:, None, None]
    made[..., 5] = np.minimum(most, len_q[entry] - block * most)[:, None, None]
    return made.reshape(-1, 6)


def _leaves(shape: Shape, rows: Array, ranges: KeyRanges) -> tuple[Array, Array]:
    """Return the first visible leaf of every task, and the one behind the last."""
    b, _, head, heads, i0, queries = rows.T
    sees = ranges.low <= ranges.high
    # One more element, because the last row ends there.
    lows = np.append(np.where(sees, ranges.low, np.iinfo(np.int64).max), 0)
    highs = np.append(np.where(sees, ranges.high, -1), 0)
    begin, end = np.full(len(rows), np.iinfo(np.int64).max), np.full(len(rows), -1)
    for x in range(int(heads.max(initial=0)) if ranges.head else 1):
        at = ranges.batch[b] + (head + np.minimum(x, heads - 1)) * ranges.head + i0
        pairs = np.stack([at, at + queries], axis=1).reshape(-1)
        begin = np.minimum(begin, np.minimum.reduceat(lows, pairs)[::2])
        end = np.maximum(end, np.maximum.reduceat(highs, pairs)[::2])
    begin, end = np.maximum(begin, 0), np.minimum(end + 1, shape.len_k[b])
    empty = begin >= end
    first, last = begin >> LOG_LEAF, (end + LEAF - 1) >> LOG_LEAF
    return np.where(empty, 0, first), np.where(empty, 0, last)
