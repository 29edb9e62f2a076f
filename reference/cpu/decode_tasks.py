"""How few queries and many keys are divided among threads.

The keys of an entry are leaves of 64 keys at absolute positions, and 8 neighbouring nodes are one
node of the next level; this tree is the same whatever is computed beside it. A task is a block of
rows, the queries of heads that share a key head, and its units are the nodes of one level that hold
visible leaves. Which level that is hangs on how much there is to do: nodes of 512 keys, or larger
ones where that still occupies all threads, so that fewer results are kept. No bit of a result
depends on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arguments import KeyRanges, Shape

Array = np.ndarray[Any, Any]

LEAF, LOG_LEAF, LOG_CHILDREN = 64, 6, 3
MOST_ROWS = 32
MOST_UNITS = 64  # for each thread, of tasks that have several


class Schedule(NamedTuple):
    """Tasks, and their units at one level, as tables for the kernel.

    Attributes
    ----------
    tasks : array
        (T, 9): batch entry, key head, first head, heads, first query, queries, first unit, units,
        and the element of its first unit's place among those kept.
    units : array
        (U, 4): task, node, first leaf, and the leaf behind the last one.
    level, top : int
        The level of units, and one whose first node has all keys.
    kept : int
        Elements that are kept of units of tasks that have several.
    """

    tasks: Array
    units: Array
    level: int
    top: int
    kept: int


def schedule(
    shape: Shape, heads_kv: int, ranges: KeyRanges, columns: int, threads: int
) -> Schedule:
    """Divide a call; a row has `columns` columns of o."""
    rows = _tasks(shape, heads_kv)
    first, last = _leaves(shape, rows, ranges)
    top = max(-(-((int(last.max(initial=1)) - 1).bit_length()) // LOG_CHILDREN), 1)
    for level in range(1, top + 1):
        # A task without a visible leaf has a unit, too.
        counts = np.maximum((last - 1 >> LOG_CHILDREN * level) - (first >> LOG_CHILDREN * level), 0)
        counts += 1
        several = np.where(counts > 1, counts, 0)
        if several.sum() <= MOST_UNITS * threads:
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
    return Schedule(tasks, units, level, top, int(sizes.sum()))


def _tasks(shape: Shape, heads_kv: int) -> Array:
    """Return (T, 6): batch entry, key head, first head, heads, first query and queries of tasks."""
    most_heads = min(shape.group, MOST_ROWS)
    most = MOST_ROWS // most_heads
    blocks = -(-shape.len_q // most)
    entry = np.repeat(np.arange(len(blocks)), blocks)
    block = np.arange(len(entry)) - (np.cumsum(blocks) - blocks)[entry]
    inner = np.arange(0, shape.group, most_heads)
    made = np.empty((len(entry), heads_kv, len(inner), 6), np.int64)
    made[..., 0] = entry[:, None, None]
    made[..., 1] = np.arange(heads_kv)[:, None]
    made[..., 2] = np.arange(heads_kv)[:, None] * shape.group + inner
    made[..., 3] = np.minimum(most_heads, shape.group - inner)
    made[..., 4] = (block * most)[:, None, None]
    made[..., 5] = np.minimum(most, shape.len_q[entry] - block * most)[:, None, None]
    return made.reshape(-1, 6)


def _leaves(shape: Shape, rows: Array, ranges: KeyRanges) -> tuple[Array, Array]:
    """Return the first visible leaf of every task, and the one behind the last."""
    b, _, head, heads, i0, queries = rows.T
    begin, end = np.zeros(len(rows), np.int64), shape.len_k[b]
    if ranges.low.size:
        for n, (entry, h) in enumerate(zip(b, head, strict=True)):
            low, high = end[n], -1
            for x in range(heads[n] if ranges.head else 1):
                at = ranges.batch[entry] + (h + x) * ranges.head + i0[n]
                lows, highs = (x[at : at + queries[n]] for x in (ranges.low, ranges.high))
                sees = lows <= highs
                low = min(low, lows[sees].min(initial=low))
                high = max(high, highs[sees].max(initial=high))
            begin[n], end[n] = max(low, 0), min(high + 1, end[n])
    empty = begin >= end
    first, last = begin >> LOG_LEAF, (end + LEAF - 1) >> LOG_LEAF
    return np.where(empty, 0, first), np.where(empty, 0, last)
