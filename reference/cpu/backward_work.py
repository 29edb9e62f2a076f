"""How the backward's work is divided: a head in one pass, or blocks in two."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .layout import Array, Layout
from .thread_limits import num_threads


def is_one_pass_faster(heads: int) -> bool:
    """Return whether five products by one thread for each head end before seven by all threads."""
    threads = num_threads()
    return -(-heads // threads) * threads * 5 <= heads * 7


# Products of two numbers after which Ctrl-C should be heard: about a tenth of a second.
_MOST_PRODUCTS = 3 * 10**9


def key_blocks(layout: Layout, starts: Array, counts: Array, one_pass: bool) -> Iterator[Array]:
    """Yield work of (first member, last member, first block, one behind the last block).

    In one pass, work of one head is done in the order of its blocks: each list ends before the next
    one begins.
    """
    ends = np.append(starts[1:], layout.batch)
    if not one_pass:
        group = np.repeat(np.arange(len(starts)), counts)
        block = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
        order = np.argsort(block, kind="stable")
        group, block = group[order], block[order]
        yield np.stack([starts[group], ends[group], block, block + 1], axis=1).astype(np.int64)
        return
    shape = layout.shape
    of_block = 5 * layout.block_kv * max(shape.d, shape.d_v, 1) * shape.group
    most = int(np.add.reduceat(layout.len_q, starts).max(initial=1)) if len(starts) else 1
    together = max(1, _MOST_PRODUCTS // (of_block * max(most, 1)))
    for first in range(0, max(int(counts.max(initial=0)), 1), together):
        group = np.flatnonzero((counts > first) | (first == 0))
        last = np.minimum(counts[group], first + together)
        begin = np.full(len(group), first)
        yield np.stack([starts[group], ends[group], begin, last], axis=1).astype(np.int64)
