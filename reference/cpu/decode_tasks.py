"""How few queries and many keys are divided among threads.

The keys of an entry are leaves of 64 keys at absolute positions, and 8 neighbouring nodes are one
node of the next level; this tree does not depend on anything else in the call. A task is a block of
rows, the queries of heads that share a key head, and its parts are nodes that contain its visible
leaves. Their level depends on the amount of work: nodes of 512 keys, or more if that still occupies
all threads, so that fewer results are kept.

A unit is what a thread takes: a part of a task, or of several tasks that have the same keys there,
because their entries share the first leaves. Where a node has shared leaves and others, its parts
are smaller nodes. No bit of a result depends on parts and units.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from .arguments import KeyRanges, Shape

Array = np.ndarray[Any, Any]

LEAF, LOG_LEAF, LOG_CHILDREN = 64, 6, 3
MOST_ROWS = 32
MOST_UNITS = 64  # units for each thread, if tasks have several parts


class Schedule(NamedTuple):
    """Tasks, their parts, and units, as tables for the kernel.

    Attributes
    ----------
    tasks : array
        (T, 9): batch entry, key head, first head, heads, first query, queries, first part, parts,
        and the first element of its parts' kept results.
    parts : array
        (P,): the first leaf of each part's node. Those of a task follow each other.
    units : array
        (U, 5): first member, members, first leaf, the leaf after the last one, and the level at
        which the kernel has the result.
    members : array
        (P, 2): the task and the part of each member. Those of a unit follow each other.
    top : int
        A level whose first node has all keys.
    kept : int
        Number of elements that are kept for all parts.
    leaves : int
        Number of leaves of all parts, one at least for each.
    """

    tasks: Array
    parts: Array
    units: Array
    members: Array
    top: int
    kept: int
    leaves: int


class _Parts(NamedTuple):
    """Parts of tasks, in the order of tasks and keys."""

    task: Array
    level: Array
    node: Array  # its first leaf, visible or not
    begin: Array  # visible leaves
    end: Array


def schedule(
    shape: Shape, heads_kv: int, ranges: KeyRanges, columns: int, threads: int, shared: int = 0
) -> Schedule:
    """Divide a call; a row has `columns` columns of o. Entries share `shared` positions."""
    if len(shape.len_k) == 1:
        shared = 0
    rows = _tasks(shape.len_q.tobytes(), shape.group, heads_kv)
    if not ranges.low.size:
        last = (shape.len_k[rows[:, 0]] + LEAF - 1) >> LOG_LEAF
        first = b""
    elif ranges.low.size == 1:  # one query, whose heads see the same keys
        # As `visible_leaves` says, for numbers of Python, which take a tenth of the time.
        begin = max(int(ranges.low[0]), 0)
        end = min(int(ranges.high[0]) + 1, int(shape.len_k[0]))
        last = np.full(len(rows), (end + LEAF - 1) >> LOG_LEAF if begin < end else 0)
        first = np.full(len(rows), begin >> LOG_LEAF if begin < end else 0).tobytes()
    else:
        low, last = _leaves(shape, rows, ranges)
        first = low.tobytes()
    edge = _shared_leaves(rows, shape.len_k, shared).tobytes() if shared else b""
    which = shape.len_q.tobytes(), shape.group, heads_kv
    return _of_leaves(which, first, last.tobytes(), edge, columns, MOST_UNITS * threads)


def visible_leaves(low: Array, high: Array, len_k: Array) -> tuple[Array, Array]:
    """Return the first leaf that queries with these first and last keys see, and where leaves end.

    Both are 0 for a query that sees no key.
    """
    begin, end = np.maximum(low, 0), np.minimum(high + 1, len_k)
    sees = begin < end
    return np.where(sees, begin >> LOG_LEAF, 0), np.where(sees, (end + LEAF - 1) >> LOG_LEAF, 0)


# All layers of a model have the same lengths in a step, and mostly the same leaves in the next one.
@functools.lru_cache(maxsize=16)
def _of_leaves(
    which: tuple[bytes, int, int],
    first: bytes,
    last: bytes,
    edge: bytes,
    columns: int,
    most_units: int,
) -> Schedule:
    """Divide a call, given the first visible leaf of each task, the one after the last, and edges.

    Empty bytes are zeros.
    """
    rows = _tasks(*which)
    begins, ends, edges = (
        np.frombuffer(each, np.int64) if each else np.zeros(len(rows), np.int64)
        for each in (first, last, edge)
    )
    return _divided(rows, begins, ends, edges, columns, most_units)


def _shared_leaves(rows: Array, len_k: Array, shared: int) -> Array:
    """Return how many leaves of each task others may have, too: none, if it has too many rows."""
    fits = 2 * rows[:, 3] * rows[:, 5] <= MOST_ROWS
    return np.where(fits, np.minimum(len_k[rows[:, 0]], shared) >> LOG_LEAF, 0)


def _divided(
    rows: Array, first: Array, last: Array, edge: Array, columns: int, most_units: int
) -> Schedule:
    """Choose the parts' level, and list parts and units; leaves before `edge` are shared."""
    top = max(-(-((int(last.max(initial=1)) - 1).bit_length()) // LOG_CHILDREN), 1)
    own = rows[:, 3] * rows[:, 5]
    most_members = MOST_ROWS // np.maximum(own, 1)
    for level in range(1, top + 1):
        parts = _parts(first, last, edge, level)
        counts = np.bincount(parts.task, minlength=len(rows))
        is_shared = parts.end <= edge[parts.task]
        is_shared &= parts.begin < parts.end
        several = counts[parts.task] > 1
        units = np.where(is_shared, 1 / most_members[parts.task], 1.0)
        if units[several].sum() <= most_units:
            break
    sizes = counts * own * (2 + columns)
    tasks = np.empty((len(rows), 9), np.int64)
    tasks[:, :6] = rows
    tasks[:, 6], tasks[:, 7] = np.cumsum(counts) - counts, counts
    tasks[:, 8] = np.cumsum(sizes) - sizes
    order, first_members = _members(rows, parts, is_shared, most_members)
    members = np.stack([parts.task[order], order], axis=1)
    units = np.empty((len(first_members), 5), np.int64)
    leader = order[first_members]
    units[:, 0] = first_members
    units[:, 1] = np.diff(np.append(first_members, len(order)))
    units[:, 2], units[:, 3] = parts.begin[leader], parts.end[leader]
    units[:, 4] = np.maximum(parts.level[leader], 1)
    leaves = np.maximum(parts.end - parts.begin, 1)
    return Schedule(tasks, parts.node, units, members, top, int(sizes.sum()), int(leaves.sum()))


def _parts(first: Array, last: Array, edge: Array, level: int) -> _Parts:
    """Cut visible leaves into nodes of a level, and smaller ones where shared leaves end."""
    task, low, high = np.arange(len(first)), first, last
    made = []
    for size in range(level, -1, -1):
        shift = LOG_CHILDREN * size
        counts = (np.maximum(high - 1, low) >> shift) - (low >> shift) + 1
        owner = np.repeat(np.arange(len(task)), counts)
        node = np.arange(len(owner)) + ((low >> shift) - (np.cumsum(counts) - counts))[owner]
        begin = np.maximum(node << shift, low[owner])
        end = np.minimum((node + 1) << shift, high[owner])
        of_task = task[owner]
        is_cut = (begin < edge[of_task]) & (edge[of_task] < end)
        found = _Parts(of_task, np.full(len(node), size), node << shift, begin, end)
        if not is_cut.any():
            made.append(found)
            break
        made.append(_Parts(*(x[~is_cut] for x in found)))
        task, low, high = of_task[is_cut], begin[is_cut], end[is_cut]
    if len(made) == 1:
        return made[0]
    joined = _Parts(*(np.concatenate(each) for each in zip(*made, strict=True)))
    order = np.lexsort((joined.begin, joined.task))
    return _Parts(*(x[order] for x in joined))


def _members(
    rows: Array, parts: _Parts, is_shared: Array, most_members: Array
) -> tuple[Array, Array]:
    """Return the order of parts in which those of a unit follow each other, and where units begin.

    Parts of several tasks are one unit if they have the same leaves, the same heads and as many
    queries.
    """
    count = len(parts.task)
    if not is_shared.any():
        return np.arange(count), np.arange(count)
    shared, rest = np.flatnonzero(is_shared), np.flatnonzero(~is_shared)
    task = parts.task[shared]
    alike = (*rows[task][:, [1, 2, 3, 5]].T, parts.level[shared], parts.begin[shared])
    alike += (parts.end[shared],)
    order = np.lexsort((task, *alike[::-1]))
    keys = np.stack(alike)[:, order]
    is_new = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
    place = np.arange(len(order))
    rank = place - np.maximum.accumulate(np.where(is_new, place, 0))
    begins = np.flatnonzero(rank % most_members[task[order]] == 0)
    behind = len(shared) + np.arange(len(rest))
    return np.concatenate([shared[order], rest]), np.concatenate([begins, behind])


@functools.lru_cache(maxsize=16)
def _tasks(lengths: bytes, group: int, heads_kv: int) -> Array:
    """Return (T, 6): batch entry, key head, first head, heads, first query and queries of tasks.

    `lengths` are the queries of each entry. Nobody writes to the result.
    """
    len_q = np.frombuffer(lengths, np.int64)
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
    return visible_leaves(begin, end, shape.len_k[b])
