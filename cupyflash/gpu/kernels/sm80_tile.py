"""The backward of heads whose queries and keys are one tile each, on tensor cores: its spec.

It computes delta itself, so that the whole backward is one launch.
"""

from __future__ import annotations

from typing import NamedTuple

from . import grid, sm80
from .spec import KernelSpec, Request, Tiles, at_head

ROWS = 64  # queries and keys of its tile


class Share(NamedTuple):
    """How a tile is shared: warps of a block, and blocks of an SM."""

    warps: int
    resident: int


# Largest head -> how, of many blocks. Few blocks, of which each has an SM, have more warps: one
# waits for one instruction after the other. Scores that are changed, or dropped, take registers.
# No bit depends on it.
MANY = {64: Share(8, 2), 128: Share(8, 1)}
FEW, CHANGED = Share(16, 1), Share(8, 1)
_METHOD = "multiplies {dtype} by tensor cores{products}, and sums in {accumulator}"


def tiles(request: Request, few: bool) -> Tiles:
    """Return its tiles, for `few` blocks or many."""
    call, d, d_v = request.call, request.problem.d, request.problem.d_v
    changed = call is not None and (call.bias is not None or call.score_mod is not None)
    if changed or request.problem.dropout > 0:
        warps, resident = CHANGED
    else:
        warps, resident = FEW if few else at_head(MANY, d, d_v)
    shared = sm80.dkdv_bytes(ROWS, ROWS, warps, 1, d, d_v)
    return Tiles(ROWS, ROWS, 32 * warps, shared, resident, 1)


def _configure(request: Request) -> Tiles | None:
    problem, device = request.problem, request.device
    few = problem.batch * problem.heads_kv <= device.multiprocessors
    made = tiles(request, few)
    return made if made.shared_memory <= device.shared_memory else None


def _obstacle(request: Request) -> str | None:
    return None if request.whole_heads else "other blocks have a share of a head's sums"


DKDV = KernelSpec(
    source="sm80/backward_sm80_dkdv_tile.cu",
    part="dkdv",
    computes="delta, dk and dv",
    method=_METHOD,
    heads=dict.fromkeys(sm80.HALVES, max(MANY)),
    capability=sm80.CAPABILITY,
    tensor_cores=True,
    condition=f"a head has at most {ROWS} queries and keys, of which no other block has a share",
    longest=ROWS,
    obstacle=_obstacle,
    configure=_configure,
    grid=grid.by_keys,
    slope=True,
    whole_dq=True,
    own_delta=True,
    overlaps=True,
)
