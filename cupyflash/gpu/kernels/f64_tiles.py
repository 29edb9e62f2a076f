"""Tiles of the kernels that multiply float64 by tensor cores in the backward.

The formulas are those of kernels_cu/sm80/fragment_rows.cuh; every kernel asserts that it and
this module agree on the bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from ...problem.call import Problem
from .tensor_tiles import OLDEST_CAPABILITY
from .tiles import Tiles

LARGEST_HEAD = 128

# Largest head -> what fits, the best first: queries and keys of a tile, and warps. A warp's results
# take most of the registers that a thread may have, so a block has a multiprocessor for itself.
BACKWARD: dict[str, dict[int, tuple[tuple[int, int, int], ...]]] = {
    "backward_f64_dkdv": {
        64: ((32, 128, 8), (32, 64, 4), (32, 32, 4)),
        128: ((32, 64, 8), (32, 32, 4)),
    },
    "backward_f64_dq": {
        64: ((128, 32, 8), (64, 32, 4), (32, 32, 4)),
        128: ((64, 32, 8), (32, 32, 4)),
    },
}


def serves(problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether these kernels can compute a problem on such a device, if its memory is enough."""
    fits = max(problem.d, problem.d_v) <= LARGEST_HEAD
    return fits and problem.dtype.itemsize == 8 and capability >= OLDEST_CAPABILITY


def row_bytes(width: int) -> int:
    """Bytes of a row in shared memory: whole lines."""
    return -(-width // 16) * 128


def _operands(block_q: int, block_kv: int, d: int, d_v: int) -> int:
    """Bytes of queries, keys, values and do, and of lse and delta."""
    return (block_q + block_kv) * (row_bytes(d) + row_bytes(d_v)) + 16 * block_q


def backward_f64_dkdv(block_q: int, block_kv: int, warps: int, d: int, d_v: int) -> int:
    """Bytes of backward_f64_dkdv.cu: operands, P, dS, and what is known of the head."""
    tiles = 2 * block_kv * row_bytes(block_q)
    return _operands(block_q, block_kv, d, d_v) + tiles + 8 * warps + HEAD_BYTES


def backward_f64_dq(block_q: int, block_kv: int, warps: int, d: int, d_v: int) -> int:
    """Bytes of backward_f64_dq.cu: operands, dS, and what is known of the entry."""
    tile = block_q * row_bytes(block_kv)
    return _operands(block_q, block_kv, d, d_v) + tile + 8 * warps + PASSING_BYTES


HEAD_BYTES, PASSING_BYTES = 192, 136  # without 8 for each warp
_BYTES: dict[str, Callable[[int, int, int, int, int], int]] = {
    "backward_f64_dkdv": backward_f64_dkdv,
    "backward_f64_dq": backward_f64_dq,
}


def fit(kernel: str, d: int, d_v: int, limit: int) -> Tiles | None:
    """Return the best tiles of a kernel that fit into `limit` bytes of shared memory, or None.

    Parameters
    ----------
    kernel : str
        Its name.
    d, d_v : int
        Head sizes, at most `LARGEST_HEAD`.
    limit : int
        Bytes of shared memory that a block may have.
    """
    table = BACKWARD[kernel]
    largest = next(most for most in table if max(d, d_v) <= most)
    for block_q, block_kv, warps in table[largest]:
        shared = _BYTES[kernel](block_q, block_kv, warps, d, d_v)
        if shared <= limit:
            return Tiles(block_q, block_kv, 32 * warps, shared)
    return None
