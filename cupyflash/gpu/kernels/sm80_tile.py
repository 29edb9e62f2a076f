"""The backward of small heads whose queries and keys are one tile, on tensor cores: its spec.

It computes delta itself, so that the whole backward is one launch.
"""

from __future__ import annotations

from . import grid, sm80
from .spec import KernelSpec, Request, Tiles

ROWS = 64  # queries and keys of its tile
LARGEST = 64  # head; larger ones take longer than with a launch for delta
NARROW = 32  # heads, of which many take longer, too
# A block waits for one instruction after the other, which more warps than these do not shorten.
WARPS, RESIDENT = 8, 2


def _configure(request: Request) -> Tiles:
    shared = sm80.dkdv_bytes(ROWS, ROWS, WARPS, 1, request.problem.d, request.problem.d_v)
    return Tiles(ROWS, ROWS, 32 * WARPS, shared, RESIDENT, 1)


def _obstacle(request: Request) -> str | None:
    problem, call = request.problem, request.call
    if problem.heads != problem.heads_kv:
        return "heads of queries share keys"
    if request.changes_scores:
        return "scores are changed, or have a bias"
    if problem.dropout > 0:
        return "it has no dropout"
    blocks, at_once = problem.batch * problem.heads, RESIDENT * request.device.multiprocessors
    is_masked = call is not None and call.mask is not None
    if blocks > at_once and (is_masked or max(problem.d, problem.d_v) <= NARROW):
        return (
            f"under a mask, or with heads of at most {NARROW} columns, it is for at most {at_once} "
            "heads of all entries together, which the device computes at once, and here are "
            f"{blocks}"
        )
    return None if request.whole_heads else "no block has all of a head to itself"


DKDV = KernelSpec(
    source="sm80/backward_sm80_dkdv_tile.cu",
    part="dkdv",
    computes="delta, dk and dv",
    method=sm80.METHOD,
    heads=dict.fromkeys(sm80.HALVES, LARGEST),
    capability=sm80.CAPABILITY,
    tensor_cores=True,
    condition=f"a head has at most {ROWS} queries and keys, and nothing is shared by heads or "
    "entries; no score change, bias or dropout; under a mask, or with heads of at most "
    f"{NARROW} columns, a device computes all heads at once",
    longest=ROWS,
    obstacle=_obstacle,
    configure=_configure,
    grid=grid.by_keys,
    whole_dq=True,
    own_delta=True,
    overlaps=True,
)
