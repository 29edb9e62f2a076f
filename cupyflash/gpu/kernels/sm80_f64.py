"""The kernels that multiply float64 on tensor cores in the backward: their tiles and specs.

The formulas are those of kernels_cu/warp/fragment_rows.cuh; every kernel asserts that it agrees
with this module about the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from . import grid, sm80
from .spec import KernelSpec, Request, Tiles, at_head, row_bytes

LARGEST_HEAD = 128
STAGES = 1  # there is room for one tile of the streamed operand

# Largest head -> what fits, the best first: queries and keys of a tile, and warps. A warp's results
# take most of the registers that a thread may have, so a block has an SM for itself.
BACKWARD_TILES: dict[str, dict[int, tuple[tuple[int, int, int], ...]]] = {
    "backward_f64_dkdv": {
        64: ((32, 128, 8), (32, 64, 4), (32, 32, 4)),
        128: ((32, 64, 8), (32, 32, 4)),
    },
    "backward_f64_dq": {
        64: ((128, 32, 8), (64, 32, 4), (32, 32, 4)),
        128: ((64, 32, 8), (32, 32, 4)),
    },
}


def _operands(block_q: int, block_kv: int, d: int, d_v: int) -> int:
    """Bytes of queries, keys, values and do, and of lse and delta."""
    return (block_q + block_kv) * (row_bytes(d, 8) + row_bytes(d_v, 8)) + 16 * block_q


def dkdv_bytes(block_q: int, block_kv: int, warps: int, d: int, d_v: int) -> int:
    """Bytes of backward_f64_dkdv.cu: operands, P, dS, and what is known of the head."""
    tiles = 2 * block_kv * row_bytes(block_q, 8)
    return _operands(block_q, block_kv, d, d_v) + tiles + 8 * warps + HEAD_BYTES


def dq_bytes(block_q: int, block_kv: int, warps: int, d: int, d_v: int) -> int:
    """Bytes of backward_f64_dq.cu: operands, dS, and what is known of the entry."""
    tile = block_q * row_bytes(block_kv, 8)
    return _operands(block_q, block_kv, d, d_v) + tile + 8 * warps + STREAM_BYTES


HEAD_BYTES, STREAM_BYTES = 192, 136  # without 8 for each warp
BACKWARD_BYTES: dict[str, Callable[[int, int, int, int, int], int]] = {
    "backward_f64_dkdv": dkdv_bytes,
    "backward_f64_dq": dq_bytes,
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
    for block_q, block_kv, warps in at_head(BACKWARD_TILES[kernel], d, d_v):
        shared = BACKWARD_BYTES[kernel](block_q, block_kv, warps, d, d_v)
        if shared <= limit:
            return Tiles(block_q, block_kv, 32 * warps, shared, stages=STAGES)
    return None


def _configure(kernel: str, request: Request) -> Tiles | None:
    problem = request.problem
    return fit(kernel, problem.d, problem.d_v, request.device.shared_memory)


_HEADS = {"float64": LARGEST_HEAD}

DKDV = KernelSpec(
    source="sm80/backward_f64_dkdv.cu",
    part="dkdv",
    computes="dk and dv",
    method=sm80.METHOD,
    heads=_HEADS,
    capability=(8, 0),
    tensor_cores=True,
    configure=functools.partial(_configure, "backward_f64_dkdv"),
    grid=grid.by_keys,
    slope=True,
    atomic_dq=("float64",),
    lists="keys",
)
DQ = KernelSpec(
    source="sm80/backward_f64_dq.cu",
    part="dq",
    computes="dq",
    method=sm80.METHOD,
    heads=_HEADS,
    capability=(8, 0),
    tensor_cores=True,
    configure=functools.partial(_configure, "backward_f64_dq"),
    grid=grid.by_queries,
    slope=True,
    lists="queries",
)
