"""The kernel of float32 by tensor cores of compute capability 9.0: its tiles, and its spec."""

from __future__ import annotations

from . import grid
from .sm80 import ENTRY_BYTES
from .sm90 import ARCHITECTURE, CAPABILITY
from .spec import KernelSpec, Tiles, at_head, row_bytes

# Largest head -> queries and keys of a tile of forward_sm90_tf32.cu. Its bound relies on sums over
# heads up to 128 and tiles of 64 keys.
TILES: dict[int, tuple[int, int]] = {128: (128, 64)}


def tiles_of(block_q: int, block_kv: int, d: int, d_v: int) -> Tiles:
    """Return tiles of forward_sm90_tf32.cu: a warpgroup for 64 queries each."""
    q, v, columns_v = row_bytes(d, 4), row_bytes(d_v, 4), -(-d_v // 64) * 64
    shared = block_q * max(q, v) + 2 * block_kv * (q + 4 * columns_v)
    shared += ENTRY_BYTES + 32 + 12 * (block_q // 16)
    return Tiles(block_q, block_kv, 2 * block_q, shared, stages=1)


def fit(d: int, d_v: int) -> Tiles:
    """Return the tiles of forward_sm90_tf32.cu."""
    return tiles_of(*at_head(TILES, d, d_v), d, d_v)


FORWARD = KernelSpec(
    source="sm90/forward_sm90_tf32.cu",
    part="forward",
    computes="out and log-sum-exp",
    method="multiplies {dtype} by the tensor cores of warpgroups{products}",
    heads={"float32": max(TILES)},
    precisions={"float32": "tf32x3"},
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    configure=lambda request: fit(request.problem.d, request.problem.d_v),
    grid=grid.by_queries,
    lists="queries",
)
