"""Which kernel and tiles serve a problem: a pure function of sizes and types.

It never reads the batch size, so that a result does not depend on the batch it is computed in.
"""

from __future__ import annotations

from .problem import Plan, Problem

# Largest head size -> (block_q, block_kv) of the CPU kernels. A tile of scores, the block of
# queries and the accumulated output share the second-level cache of a core.
CPU_TILES = ((128, (128, 128)), (512, (64, 64)))


def choose(problem: Problem) -> Plan:
    """Return the kernel and tiles for a problem on the CPU."""
    widest = max(problem.d, problem.d_v)
    block_q, block_kv = next(tiles for most, tiles in CPU_TILES if widest <= most)
    return Plan(
        kernel="reference.forward",
        block_q=block_q,
        block_kv=block_kv,
        reason=f"NumPy arrays run the tiled Numba kernels in {problem.accumulator}; "
        f"{block_q} x {block_kv} tiles are the table's for head sizes up to {widest}",
    )
