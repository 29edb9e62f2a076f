"""The backward of heads whose queries and keys are one tile each, on tensor cores: its spec.

It computes delta itself, so that the whole backward is one launch.
"""

from __future__ import annotations

from . import grid, sm80
from .spec import KernelSpec, Request, Tiles, at_head

ROWS, WARPS = 64, 8  # queries and keys of its tile, and the warps that share it
# Largest head -> blocks that share an SM.
RESIDENT = {64: 2, 128: 1}

_METHOD = "multiplies {dtype} by tensor cores{products}, and sums in {accumulator}"


def _configure(request: Request) -> Tiles | None:
    problem, limit = request.problem, request.device.shared_memory
    shared = sm80.dkdv_bytes(ROWS, ROWS, WARPS, 1, problem.d, problem.d_v)
    resident = at_head(RESIDENT, problem.d, problem.d_v)
    if shared > limit:
        return None
    return Tiles(ROWS, ROWS, 32 * WARPS, shared, resident, 1)


def _obstacle(request: Request) -> str | None:
    return None if request.whole_heads else "other blocks have a share of a head's sums"


DKDV = KernelSpec(
    source="sm80/backward_sm80_tile.cu",
    part="dkdv",
    computes="delta, dk and dv",
    method=_METHOD,
    heads=dict.fromkeys(sm80.HALVES, max(RESIDENT)),
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
