"""Forward mode on tensor cores since compute capability 8.0, in 16-bit types: tiles and spec.

`forward_sm80_tangent.cu` asserts that it agrees with this module about the bytes.
"""

from __future__ import annotations

from . import grid, sm80
from .spec import KernelSpec, Request, Tiles, at_head

NAME = "forward_sm80_tangent"
# Largest head -> what fits, the best first: queries and keys of a tile, warps, and blocks that
# share an SM. There are always two stages.
TILES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((128, 32, 4, 2),),
    128: ((64, 64, 4, 2), (64, 48, 4, 2), (128, 32, 8, 1)),
    256: ((64, 64, 8, 1), (64, 32, 8, 1), (16, 32, 2, 1)),
}
# The same where scores are changed: code for that and 32 rows do not fit a warp's registers.
CHANGED_TILES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    **TILES,
    64: ((64, 64, 4, 2),),
    128: TILES[128][1:],
}
STREAM_BYTES = 224  # what a block keeps of the batch entry whose operands are streamed


def shared_bytes(block_q: int, block_kv: int, warps: int, d: int, d_v: int) -> int:
    """Bytes of shared memory of a block: twice the rows and stages of forward_sm80.cu."""
    held = sm80.forward_bytes(block_q, block_kv, warps, 2, d, d_v, 2)
    return 2 * (held - sm80.ENTRY_BYTES - 8 * warps) + STREAM_BYTES + 8 * warps


def tiles_of(block_q: int, block_kv: int, warps: int, d: int, d_v: int, resident: int = 1) -> Tiles:
    """Return tiles of these sizes."""
    shared = shared_bytes(block_q, block_kv, warps, d, d_v)
    sharers = sm80.row_sharers(block_q, block_kv, warps)
    return Tiles(block_q, block_kv, 32 * warps, shared, resident, 2, row_sharers=sharers)


def fit(d: int, d_v: int, limit: int, changed: bool) -> Tiles | None:
    """Return the best tiles with which so many blocks fit on an SM, or None.

    Parameters
    ----------
    d, d_v : int
        Head sizes; there must be tiles for them.
    limit : int
        Bytes of shared memory that a block may have.
    changed : bool
        Whether scores are changed.
    """
    table = CHANGED_TILES if changed else TILES
    for block_q, block_kv, warps, resident in at_head(table, d, d_v):
        tiles = tiles_of(block_q, block_kv, warps, d, d_v, resident)
        if tiles.share_memory(limit):
            return tiles
    return None


def _configure(request: Request) -> Tiles | None:
    problem, limit = request.problem, request.device.shared_memory
    return fit(problem.d, problem.d_v, limit, request.changes_scores)


TANGENTS = KernelSpec(
    source=f"sm80/{NAME}.cu",
    part="tangents",
    computes="out, log-sum-exp and their tangents",
    method=sm80.METHOD,
    heads=dict.fromkeys(sm80.HALVES, sm80.LARGEST_OF_WARP),
    capability=sm80.CAPABILITY,
    tensor_cores=True,
    configure=_configure,
    grid=grid.by_queries,
    slope=True,
)
