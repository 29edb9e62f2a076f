"""Tiles of the CPU kernels: a pure function of sizes and types.

It never reads the batch size, so that a result does not depend on the batch in which it is
computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..expr.edges import block_size, has_edges
from ..masks import Mask
from ..problem.call import Call, Plan, Problem
from .cpu_runs import may_be_range

NUMBERS = np.dtype(np.float32)  # what codes of float8 become before they are multiplied

# Largest head size -> (block_q, block_kv). A tile of scores, the block of queries and the
# accumulated output share the L2 cache of a core. Rows of up to 288 tokens, 256 patches and a few
# tokens of a class among them, are one block: their keys are read from memory once.
TILES = ((128, (288, 288)), (512, (64, 64)))
# The most of a mask that is no range of keys but has edges. Where one crosses a tile, a program is
# asked about each pair, which takes longer than the products, so that small tiles pay, and those
# of a mask of blocks should not lie across many of them.
WITH_EDGES, OF_BLOCKS = 128, 64


# Up to these, the kernel of a cache is faster on dense arrays: it reads a key once for all heads of
# its group, where the tiled kernel computes whole vectors of queries of one head.
MOST_QUERIES, MOST_ROWS = 8, 32
LEAF = 64  # keys, of that kernel
FEWEST_KEYS = 7 * LEAF + 1  # so that all calls of as many leaves are of one kernel


class Choice(NamedTuple):
    """The kernel of a forward.

    Attributes
    ----------
    plan : Plan
        Its name, its tiles and the reason.
    for_few : bool
        Whether it is the kernel for few queries.
    widens : bool
        Whether codes become numbers first.
    keeps_mask : bool
        Whether the mask stays even if it hides nothing, since keys may come.
    """

    plan: Plan
    for_few: bool
    widens: bool = False
    keeps_mask: bool = False


def forward(call: Call) -> Choice:
    """Return the kernel and the tiles of a forward on NumPy arrays."""
    if call.rows.cache is not None:
        return _cached(call)
    if not call.encoding.operands:
        return choose(call.problem, call.mask)
    plan, for_few, *_ = choose(replace(call.problem, dtype=NUMBERS), call.mask)
    why = f"codes of {call.encoding.form.name} become {NUMBERS} with their scales first; "
    return Choice(replace(plan, reason=why + plan.reason), for_few, widens=True)


def choose(problem: Problem, mask: Mask | None = None) -> Choice:
    """Return the kernel and the tiles of a forward of numbers that is not over a cache."""
    if not has_few_queries(problem):
        return Choice(tiled(problem, mask), for_few=False)
    return _few(
        f"a key head has at most {MOST_ROWS} rows of queries and there are {FEWEST_KEYS} "
        f"keys or more, so the Numba kernel for few queries reads them in leaves of {LEAF} in "
        f"{problem.accumulator}"
    )


def _cached(call: Call) -> Choice:
    """Return the kernel and the tiles of a call over a cache in NumPy arrays."""
    why = (
        f"a cache in NumPy arrays is read by the Numba kernel for few queries, in leaves of {LEAF} "
        f"keys, which serve up to {MOST_ROWS} queries of the heads that share them, in "
        f"{call.problem.accumulator}"
    )
    if call.rows.shared:
        why += f"; the first {call.rows.shared} positions serve the queries of several entries"
    return _few(why)._replace(keeps_mask=True)


def _few(why: str) -> Choice:
    return Choice(Plan("reference.decode", MOST_ROWS, LEAF, why), for_few=True)


def has_few_queries(problem: Problem) -> bool:
    """Return whether few queries read many keys. It does not depend on the batch size."""
    if problem.dropout > 0 or problem.whole:
        return False
    queries, heads = problem.rows.known_q, problem.heads_kv
    few = heads > 0 and queries <= MOST_QUERIES and problem.heads // heads * queries <= MOST_ROWS
    return few and queries > 0 and problem.rows.known_k >= FEWEST_KEYS


def with_tangents(problem: Problem, mask: Mask | None) -> Plan:
    """Return the kernel and the tiles of a forward with tangents."""
    return replace(tiled(problem, mask), kernel="reference.forward_tangent")


def tiled(problem: Problem, mask: Mask | None = None) -> Plan:
    """Return the tiles of the kernels for any problem."""
    widest = max(problem.d, problem.d_v)
    block_q, block_kv = next(tiles for most, tiles in TILES if widest <= most)
    of_mask, why = _most_of_mask(mask)
    if of_mask >= max(block_q, block_kv):
        of_mask, why = max(block_q, block_kv), ""
    block_q, block_kv = min(block_q, of_mask), min(block_kv, of_mask)
    return Plan(
        kernel="reference.forward",
        block_q=block_q,
        block_kv=block_kv,
        reason=f"NumPy arrays run the tiled Numba kernels in {problem.accumulator}; "
        f"{block_q} x {block_kv} tiles are the table's for head sizes up to {widest}{why}",
    )


def _most_of_mask(mask: Mask | None) -> tuple[int, str]:
    """Return the most queries and keys of a tile under a mask, judged by its form, and why."""
    if mask is None or may_be_range(mask.expr) or not has_edges(mask.expr):
        return _ANY
    size = block_size(mask.expr)
    if size % WITH_EDGES:
        return OF_BLOCKS, f" under a mask of blocks of {size}"
    return WITH_EDGES, " under a mask that is no range of keys"


_ANY = 1 << 62, ""
