"""How the backward's work is divided: a head in one pass, or blocks in two; and a bias in parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .bias_gradient import BiasSums
from .layout import Array, Layout
from .microkernel import VECTOR_BYTES
from .thread_limits import num_threads


def is_one_pass_faster(items: int) -> bool:
    """Return whether five products by one thread for each item end before seven by all threads."""
    threads = num_threads()
    return -(-items // threads) * threads * 5 <= items * 7


# Products of two numbers after which Ctrl-C should be heard: about a tenth of a second.
_MOST_PRODUCTS = 3 * 10**9


class Runs(NamedTuple):
    """Rows of work, of which item n computes ``starts[n] : starts[n + 1]`` in their order.

    A row is the first member, the last one, the head of keys, the first block, and the block after
    the last one.
    """

    starts: Array  # (items + 1,) int64
    rows: Array  # (rows, 5) int64


def key_blocks(
    layout: Layout, starts: Array, counts: Array, parts: Array, one_pass: bool
) -> Iterator[Runs]:
    """Yield the work of `backward_dkdv`; all of what is yielded ends before the next begins.

    Group g of batch entries that share keys begins with member ``starts[g]`` and has ``counts[g]``
    blocks of keys. ``parts[g, h]`` is the part to which its head h of keys belongs. Heads of a part
    are worked on in their order; in one pass, so are the blocks of a head.
    """
    shape, heads = layout.shape, parts.shape[1]
    ends = np.append(starts[1:], layout.batch)
    queries = np.add.reduceat(layout.len_q, starts) if len(starts) else starts
    of_block = 5 * layout.block_kv * max(shape.d, shape.d_v, 1) * shape.group
    most = max(int(queries.max(initial=1)), 1)
    together = max(1, _MOST_PRODUCTS // (of_block * most)) if one_pass else 1
    # In one pass, a head without keys has a row, too, which sets its dq to 0.
    pieces = np.repeat(np.maximum(-(-counts // together), int(one_pass)), heads)
    unit = np.repeat(np.arange(len(pieces), dtype=np.int64), pieces)
    number = np.arange(len(unit)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    group, head = np.divmod(unit, max(heads, 1))
    first = number * together
    last = np.minimum(first + together, counts[group])
    run = parts.reshape(-1)[unit]
    if not one_pass:
        run = first * (int(run.max(initial=0)) + 1) + run
    order = np.argsort(run, kind="stable")
    rows = np.stack([starts[group], ends[group], head, first, last], axis=1)[order]
    run, cost = run[order], ((last - first) * of_block * queries[group])[order]
    before = np.cumsum(cost) - cost
    begins = np.diff(run, prepend=-1) != 0
    turn = (before - np.maximum.accumulate(np.where(begins, before, 0))) // _MOST_PRODUCTS
    for now in np.unique(turn):
        here = np.flatnonzero(turn == now)
        items = np.flatnonzero(np.diff(run[here], prepend=-1) != 0)
        yield Runs(np.append(items, len(here)), np.ascontiguousarray(rows[here], np.int64))


def whole_heads(layout: Layout, starts: Array) -> Runs:
    """Return one item for each head of keys, with all queries that see it; there are no blocks.

    Group g of batch entries that share keys begins with member ``starts[g]``.
    """
    heads = layout.problem.heads_kv
    group, head = np.divmod(np.arange(len(starts) * heads, dtype=np.int64), max(heads, 1))
    ends = np.append(starts[1:], layout.batch)
    none = np.zeros_like(head)
    rows = np.stack([starts[group], ends[group], head, none, none], axis=1)
    return Runs(np.arange(len(head) + 1), np.ascontiguousarray(rows, np.int64))


# More parts keep more threads busy, and take more memory.
_MOST_PARTS, _MOST_BYTES = 64, 2**26


class BiasParts(NamedTuple):
    """How the sums of a bias are divided.

    Attributes
    ----------
    parts : array
        The part of every group of batch entries that share keys, and head of keys, (groups, heads).
    sums : BiasSums
        The sums, all 0.
    starts, slots : array
        The sums of head ``m = entry * heads + head`` of the bias are at
        ``slots[starts[m] : starts[m + 1]]``, in the order of their parts.
    columns : int
        Vectors of queries in a slot.
    """

    parts: Array
    sums: BiasSums
    starts: Array
    slots: Array
    columns: int


def bias_parts(
    layout: Layout, kv_lead: tuple[int, ...], groups: tuple[Array, Array], shape: tuple[int, ...]
) -> BiasParts:
    """Divide the gradient of a bias whose axes are (*lead, heads or 1, queries or 1, keys or 1).

    `groups` has the members of the groups of batch entries that share keys, and where each group
    begins. The number of parts depends on these axes and on how many entries and heads share the
    bias, and not on the threads, nor on other entries of the bias.
    """
    members, begins = groups
    lead, (heads, queries, keys) = shape[:-3], shape[-3:]
    problem, batch = layout.problem, layout.batch
    # `family` has the groups that have an entry of the bias in common.
    if problem.packed:
        shared = not lead or lead == (1,)
        entry = np.zeros(batch, np.int64) if shared else np.arange(batch, dtype=np.int64)
        entries, family = (1 if shared else batch), entry
    else:
        axes = len(problem.lead)
        both = [(1,) * (axes - len(each)) + each for each in (lead, kv_lead)]
        entry, entries = layout.entries(lead), math.prod(lead)
        family = layout.entries(tuple(map(min, *both)))[members[begins]]
    families = int(family.max(initial=0)) + 1
    by_head = heads > 1
    units: Array = np.broadcast_to(family[:, None], (len(begins), problem.heads_kv))
    if by_head:
        units = units * problem.heads_kv + np.arange(problem.heads_kv)

    width = VECTOR_BYTES // layout.itemsize
    of_block = -(-min(layout.block_q, queries) // width)  # of the one block that there is, if so
    columns = 1 if queries == 1 else -(-queries // layout.block_q) * of_block
    blocks = -(-int(layout.len_k.max(initial=1)) // layout.block_kv)
    rows = blocks if keys == 1 else keys
    size = columns * rows * width
    each = units.size // (families * (problem.heads_kv if by_head else 1))
    bytes_of_part = entries // families * heads * size * layout.itemsize
    wanted = min(_MOST_PARTS // (problem.heads_kv if by_head else 1), each)
    count = max(1, min(wanted, _MOST_BYTES // max(bytes_of_part, 1)))
    order = np.argsort(units.reshape(-1), kind="stable")
    parts: Array = np.empty(units.size, np.int64)
    rank = np.arange(units.size)
    parts[order] = units.reshape(-1)[order] * count + rank % each * count // each
    parts = parts.reshape(units.shape)

    group_of = np.empty(batch, np.int64)
    group_of[members] = np.repeat(np.arange(len(begins)), np.diff(begins, append=batch))
    head = np.arange(problem.heads)
    head_of_bias = head if by_head else np.zeros_like(head)
    owner = entry[:, None] * heads + head_of_bias
    part = parts[group_of[:, None], head // layout.shape.group]
    known, slot = np.unique(owner * (int(parts.max(initial=0)) + 1) + part, return_inverse=True)
    slots = np.arange(len(known), dtype=np.int64) * size
    starts = np.searchsorted(
        known // (int(parts.max(initial=0)) + 1), np.arange(entries * heads + 1)
    ).astype(np.int64)
    sums = BiasSums(
        np.zeros(len(known) * size, layout.number),
        slots[slot.reshape(-1)],
        of_block,
        0 if queries == 1 else rows * width,
        width if keys == 1 else layout.block_kv * width,
        0 if keys == 1 else width,
    )
    return BiasParts(parts, sums, starts, slots, columns)
