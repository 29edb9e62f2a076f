"""Sums of weights on tensor cores since compute capability 8.0, in 16-bit types: tiles and spec.

`reduce_sm80_weights.cu` asserts that it agrees with this module about the bytes.
"""

from __future__ import annotations

from . import grid, sm80
from .spec import KernelSpec, Request, Tiles, at_head, row_bytes

NAME = "reduce_sm80_weights"
# Largest head -> what fits, the best first: queries and keys of a tile, warps, and blocks that
# share an SM. There are always two stages.
TILES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((64, 128, 4, 4), (64, 128, 4, 2)),
    128: ((64, 128, 4, 3), (64, 128, 4, 2), (64, 128, 4, 1)),
    256: ((64, 128, 8, 1), (32, 64, 4, 1)),
    512: ((32, 128, 8, 1), (16, 64, 4, 1)),
}
OWNER_BYTES = 168  # what a block keeps of what it owns


def shared_bytes(block_q: int, block_kv: int, warps: int, d: int) -> int:
    """Bytes of shared memory of a block: keys, two stages, what rows and keys have, and little."""
    held = (block_kv + 2 * block_q) * row_bytes(d) + 8 * block_q + 4 * block_kv
    return held + OWNER_BYTES + 8 * warps


def tiles_of(block_q: int, block_kv: int, warps: int, d: int, resident: int = 1) -> Tiles:
    """Return tiles of these sizes."""
    shared = shared_bytes(block_q, block_kv, warps, d)
    return Tiles(block_q, block_kv, 32 * warps, shared, resident, 2)


def fit(d: int, limit: int) -> Tiles | None:
    """Return the best tiles for a head size with which so many blocks fit on an SM, or None.

    `limit` is the shared memory that a block may have.
    """
    for block_q, block_kv, warps, resident in at_head(TILES, d, d):
        tiles = tiles_of(block_q, block_kv, warps, d, resident)
        if tiles.share_memory(limit):
            return tiles
    return None


def _configure(request: Request) -> Tiles | None:
    return fit(request.problem.d, request.device.shared_memory)


WEIGHTS = KernelSpec(
    source=f"sm80/{NAME}.cu",
    part="reduce_weights",
    computes="sums of each key's weights, or of those of blocks",
    method=sm80.METHOD,
    heads=dict.fromkeys(sm80.HALVES, max(TILES)),
    capability=sm80.CAPABILITY,
    tensor_cores=True,
    configure=_configure,
    grid=grid.by_owners,
    sizes=("d",),
)
