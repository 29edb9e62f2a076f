"""Tiles of the CPU kernels: a pure function of sizes and types.

It never reads the batch size, so that a result does not depend on the batch in which it is
computed.
"""

from __future__ import annotations

from ..problem.call import Call, Plan, Problem

# Largest head size -> (block_q, block_kv). A tile of scores, the block of queries and the
# accumulated output share the L2 cache of a core.
TILES = ((128, (192, 128)), (512, (64, 64)))


# Up to these, the kernel of a cache is faster on dense arrays: it reads a key once for all heads of
# its group, where the tiled kernel computes whole vectors of queries of one head.
MOST_QUERIES, MOST_ROWS = 8, 32
LEAF = 64  # keys, of that kernel


def choose(problem: Problem) -> Plan:
    """Return the kernel and the tiles of a forward on NumPy arrays."""
    if not has_few_queries(problem):
        return tiled(problem)
    return Plan(
        kernel="reference.decode",
        block_q=MOST_ROWS,
        block_kv=LEAF,
        reason=f"there are at most {MOST_QUERIES} queries and a key head has at most {MOST_ROWS} "
        f"rows of them, so the Numba kernel for few queries reads keys in leaves of {LEAF} in "
        f"{problem.accumulator}",
    )


def cached(call: Call) -> Plan:
    """Return the kernel and the tiles of a call over a cache in NumPy arrays."""
    why = (
        f"a cache in NumPy arrays is read by the Numba kernel for few queries, in leaves of {LEAF} "
        f"keys, which serve up to {MOST_ROWS} queries of the heads that share them, in "
        f"{call.problem.accumulator}"
    )
    assert call.cache is not None
    if call.cache.shared:
        why += f"; the first {call.cache.shared} positions serve the queries of several entries"
    return Plan(kernel="reference.decode", block_q=MOST_ROWS, block_kv=LEAF, reason=why)


def has_few_queries(problem: Problem) -> bool:
    """Return whether few queries read each key. It does not depend on the batch size."""
    if problem.packed or problem.dropout > 0 or problem.whole:
        return False
    queries, heads = int(problem.len_q), problem.heads_kv
    few = heads > 0 and queries <= MOST_QUERIES and problem.heads // heads * queries <= MOST_ROWS
    return few and queries > 0 and int(problem.len_k) > 0


def tiled(problem: Problem) -> Plan:
    """Return the tiles of the kernels for any problem."""
    widest = max(problem.d, problem.d_v)
    block_q, block_kv = next(tiles for most, tiles in TILES if widest <= most)
    return Plan(
        kernel="reference.forward",
        block_q=block_q,
        block_kv=block_kv,
        reason=f"NumPy arrays run the tiled Numba kernels in {problem.accumulator}; "
        f"{block_q} x {block_kv} tiles are the table's for head sizes up to {widest}",
    )
