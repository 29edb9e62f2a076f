"""Which kernel and tiles serve a problem: a pure function of sizes and types.

It never reads the batch size, so that a result does not depend on the batch it is computed in.
"""

from __future__ import annotations

import functools

from .errors import ArgumentError
from .problem import Plan, Problem
from .target import OLDEST_CAPABILITY, Target
from .tiles import Tiles, fit

# Largest head size -> (block_q, block_kv) of the CPU kernels. A tile of scores, the block of
# queries and the accumulated output share the second-level cache of a core.
CPU_TILES = ((128, (128, 128)), (512, (64, 64)))


def choose(problem: Problem, target: Target | None = None) -> Plan:
    """Return the kernel and tiles for a problem on a GPU, or without one on the CPU."""
    if target is not None:
        tiles = simt("forward_simt", problem, target)
        return Plan(
            kernel="forward_simt",
            block_q=tiles.block_q,
            block_kv=tiles.block_kv,
            reason=f"{target.name} (compute capability {target.capability[0]}."
            f"{target.capability[1]}) runs the portable kernel in {problem.accumulator}; "
            f"{tiles.block_q} x {tiles.block_kv} tiles take {tiles.shared_memory} bytes of its "
            f"{target.shared_memory} of shared memory",
        )
    widest = max(problem.d, problem.d_v)
    block_q, block_kv = next(tiles for most, tiles in CPU_TILES if widest <= most)
    return Plan(
        kernel="reference.forward",
        block_q=block_q,
        block_kv=block_kv,
        reason=f"NumPy arrays run the tiled Numba kernels in {problem.accumulator}; "
        f"{block_q} x {block_kv} tiles are the table's for head sizes up to {widest}",
    )


def simt(
    kernel: str,
    problem: Problem,
    target: Target,
    slope: bool = False,
    blocks: tuple[int, int] | None = None,
) -> Tiles:
    """Return the tiles of a portable kernel.

    Parameters
    ----------
    kernel : str
        Its name.
    problem : Problem
        Types and sizes.
    target : Target
        The device.
    slope : bool
        Whether scores are changed, so that a backward kernel keeps their derivatives.
    blocks : tuple of int, optional
        Queries and keys of a tile, instead of the best ones.

    Raises
    ------
    ArgumentError
        If the device is too old, or has too little shared memory for these head sizes.
    """
    if target.capability < OLDEST_CAPABILITY:
        wanted, came = (".".join(map(str, x)) for x in (OLDEST_CAPABILITY, target.capability))
        raise ArgumentError(
            f"q: an array on {target.name} came, of compute capability {came}; wanted a GPU of "
            f"{wanted} (Turing) or newer. NumPy arrays, as cupy.asnumpy makes, run on the CPU."
        )
    spare = int(slope) + int(problem.dropout > 0)
    sizes = (problem.accumulator.itemsize, problem.dtype.itemsize, problem.d, problem.d_v)
    tiles = _fit(kernel, *sizes, spare, target.shared_memory, blocks)
    if tiles is None:
        raise ArgumentError(
            f"q, v: head sizes {problem.d} and {problem.d_v} of {problem.dtype} came; "
            f"{kernel} needs more than the {target.shared_memory} bytes of shared memory of "
            f"{target.name} for them. Wanted smaller heads or elements."
        )
    return tiles


_fit = functools.lru_cache(maxsize=1024)(fit)
