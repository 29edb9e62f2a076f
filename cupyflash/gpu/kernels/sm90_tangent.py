"""Forward mode on tensor cores of compute capability 9.0, in 16-bit types: its tiles and spec.

`forward_sm90_tangent.cu` asserts that it agrees with this module about the bytes.
"""

from __future__ import annotations

from .. import params, tma
from . import grid, tma_operands
from .sm80 import HALVES
from .sm90 import ARCHITECTURE, CAPABILITY, KV_STAGES, SCHEDULER_BYTES
from .spec import KernelSpec, Request, Tiles, TmaOperands, at_head, row_bytes

# Largest head -> queries and keys of a tile.
TILES: dict[int, tuple[int, int]] = {64: (128, 112), 128: (128, 64)}
# The same where scores are changed, whose code takes registers.
CHANGED_TILES: dict[int, tuple[int, int]] = {64: (128, 64), 128: (128, 48)}
# Of so few queries, half of a tile is empty.
FEW_QUERIES = 64
LOADS = "q", "k", "v", "tq", "tk", "tv"
_MAPS_BYTES = (len(LOADS) + 1) * tma.BYTES  # with what aligns them
_STORAGE_BYTES = SCHEDULER_BYTES + 232  # with the heads of tangents, and barriers


def tiles_of(block_q: int, block_kv: int, d: int, d_v: int) -> Tiles:
    """Return tiles of forward_sm90_tangent.cu: two consumer warpgroups, and a producer."""
    keys = KV_STAGES * block_kv * (row_bytes(d) + row_bytes(d_v))
    shared = 2 * (block_q * row_bytes(d) + keys) + _STORAGE_BYTES
    return Tiles(block_q, block_kv, 2 * block_q + 128, shared, stages=KV_STAGES)


def fit(d: int, d_v: int, changed: bool) -> Tiles:
    """Return the tiles of heads; `changed` says whether scores are changed."""
    return tiles_of(*at_head(CHANGED_TILES if changed else TILES, d, d_v), d, d_v)


def _configure(request: Request) -> Tiles:
    return fit(request.problem.d, request.problem.d_v, request.changes_scores)


def _obstacle(request: Request) -> str | None:
    if request.call is None:
        return "its arrays are not known"
    if request.problem.rows.known_q <= FEW_QUERIES:
        return f"it is for more than {FEW_QUERIES} queries"
    if request.params_bytes + _MAPS_BYTES > params.MAX_BYTES:
        return "its mask and scores read too many arrays or numbers"
    return tma_operands.obstacle(request, tma_operands.of_call(request, LOADS))


TANGENTS = KernelSpec(
    source="sm90/forward_sm90_tangent.cu",
    part="tangents",
    computes="out, log-sum-exp and their tangents",
    method="multiplies {dtype} by the tensor cores of warpgroups",
    heads=dict.fromkeys(HALVES, max(TILES)),
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    condition=f"a row has more than {FEW_QUERIES} queries, or rows are packed; TMA can load q, k, "
    "v and their tangents",
    obstacle=_obstacle,
    configure=_configure,
    grid=grid.shared_by_queries,
    tma=TmaOperands(
        loads=LOADS,
        stores=(),
        # a consumer's queries; a tile's keys
        rows=lambda tiles: dict.fromkeys(LOADS, tiles.block_kv) | {"q": 64, "tq": 64},
        has_room=lambda _, __: False,
    ),
    ends_with_queries=True,
    slope=True,
)
