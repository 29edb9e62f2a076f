"""Tiles of the CPU kernels: a pure function of sizes and types.

It never reads the batch size, so that a result does not depend on the batch in which it is
computed.
"""

from __future__ import annotations

from ..problem.call import Plan, Problem

# Largest head size -> (block_q, block_kv). A tile of scores, the block of queries and the
# accumulated output share the L2 cache of a core.
TILES = ((128, (192, 128)), (512, (64, 64)))


def choose(problem: Problem) -> Plan:
    """Return the tiles for a problem on NumPy arrays."""
    widest = max(problem.d, problem.d_v)
    block_q, block_kv = next(tiles for most, tiles in TILES if widest <= most)
    return Plan(
        kernel="reference.forward",
        block_q=block_q,
        block_kv=block_kv,
        reason=f"NumPy arrays run the tiled Numba kernels in {problem.accumulator}; "
        f"{block_q} x {block_kv} tiles are the table's for head sizes up to {widest}",
    )
