"""Second derivatives on tensor cores since compute capability 8.0, in 16-bit types: tiles, specs.

`backward_sm80_tangent_dkdv.cu` and `backward_sm80_tangent_dq.cu` assert that they agree with this
module about the bytes.
"""

from __future__ import annotations

import functools

from . import grid, sm80
from .spec import KernelSpec, Request, Tiles, at_head, row_bytes

LARGEST_HEAD = 128  # for which a warp has the registers
DKDV_NAME, DQ_NAME = "backward_sm80_tangent_dkdv", "backward_sm80_tangent_dq"
# Kernel -> largest head -> what fits, the best first: queries and keys of a tile, warps, stages of
# what is streamed, and blocks that share an SM. A warp has 16 rows of the block's results.
TILES: dict[str, dict[int, tuple[tuple[int, int, int, int, int], ...]]] = {
    DKDV_NAME: {
        64: ((32, 64, 4, 2, 2), (32, 64, 4, 2, 1)),
        128: ((32, 128, 8, 2, 1), (32, 128, 8, 1, 1), (32, 64, 4, 1, 1)),
    },
    DQ_NAME: {
        64: ((64, 32, 4, 2, 3), (64, 32, 4, 2, 1)),
        128: ((128, 32, 8, 2, 1), (64, 32, 4, 2, 1), (64, 32, 4, 1, 1)),
    },
}
HEAD_BYTES, STREAM_BYTES = 280, 200  # of what is known of the rows that are streamed
NUMBERS_BYTES = 16  # of what a query has one number of


def shared_bytes(
    kernel: str, block_q: int, block_kv: int, warps: int, stages: int, d: int, d_v: int
) -> int:
    """Bytes of shared memory of a block: two operands and their tangents, resident and streamed."""
    columns = 2 * (row_bytes(d) + row_bytes(d_v))
    of_query = columns + NUMBERS_BYTES
    if kernel == DKDV_NAME:
        return block_kv * columns + stages * block_q * of_query + HEAD_BYTES + 8 * warps
    return block_q * of_query + stages * block_kv * columns + STREAM_BYTES + 8 * warps


def tiles_of(
    kernel: str,
    block_q: int,
    block_kv: int,
    warps: int,
    stages: int,
    d: int,
    d_v: int,
    resident: int = 1,
) -> Tiles:
    """Return tiles of a kernel."""
    shared = shared_bytes(kernel, block_q, block_kv, warps, stages, d, d_v)
    return Tiles(block_q, block_kv, 32 * warps, shared, resident, stages)


def fit(kernel: str, d: int, d_v: int, limit: int, changed: bool = False) -> Tiles | None:
    """Return the best tiles with which so many blocks fit on an SM, or None.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    d, d_v : int
        Head sizes; there must be tiles for them.
    limit : int
        Bytes of shared memory that a block may have.
    changed : bool
        Whether scores are changed: their derivatives take registers, so fewer blocks share an SM's.
    """
    for block_q, block_kv, warps, stages, most in at_head(TILES[kernel], d, d_v):
        resident = min(most, 2) if changed else most
        tiles = tiles_of(kernel, block_q, block_kv, warps, stages, d, d_v, resident)
        if tiles.share_memory(limit):
            return tiles
    return None


def _configure(kernel: str, request: Request) -> Tiles | None:
    problem, limit = request.problem, request.device.shared_memory
    return fit(kernel, problem.d, problem.d_v, limit, request.changes_scores)


_HEADS = dict.fromkeys(sm80.HALVES, LARGEST_HEAD)

DKDV = KernelSpec(
    source=f"sm80/{DKDV_NAME}.cu",
    part="tangent_dkdv",
    computes="tangents of dk and dv",
    method=sm80.METHOD,
    heads=_HEADS,
    capability=sm80.CAPABILITY,
    tensor_cores=True,
    configure=functools.partial(_configure, DKDV_NAME),
    grid=grid.by_keys,
    slope=True,
)
DQ = KernelSpec(
    source=f"sm80/{DQ_NAME}.cu",
    part="tangent_dq",
    computes="tangent of dq",
    method=sm80.METHOD,
    heads=_HEADS,
    capability=sm80.CAPABILITY,
    tensor_cores=True,
    configure=functools.partial(_configure, DQ_NAME),
    grid=grid.by_queries,
    slope=True,
)
