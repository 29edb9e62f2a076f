"""The backward of small heads whose queries and keys are one tile, on tensor cores: its specs.

The kernels compute delta themselves, so that the whole backward is one launch, or with parts of the
gradient of a bias that entries share, two.
"""

from __future__ import annotations

import numpy as np

from . import bias_tiles, grid, sm80
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

# -- with a bias that entries may share ------------------------------------------------------------

# Queries of its tile, the fewest that a row allows: 7 x 7 positions of a window have the first.
BIAS_QUERIES = 56, ROWS
BIAS_WARPS, MOST_BIAS_RESIDENT = 4, 3  # with more, registers spill
ROW_BYTES, DS_ROW_BYTES, BIAS_STORAGE_BYTES = 64, 128, 992


def bias_bytes() -> int:
    """Bytes of backward_sm80_dkdv_dbias.cu: two stages of q, k, v, do and out, dS, and little."""
    return ROWS * (2 * 5 * ROW_BYTES + DS_ROW_BYTES) + BIAS_STORAGE_BYTES


def _configure_bias(request: Request) -> Tiles | None:
    longest, limit = int(np.max(request.problem.len_q, initial=0)), request.device.shared_memory
    block_q = next(n for n in BIAS_QUERIES if longest <= n)
    for resident in range(MOST_BIAS_RESIDENT, 0, -1):
        tiles = Tiles(
            block_q, ROWS, 32 * BIAS_WARPS, bias_bytes(), resident, stages=2, bias_stages=1
        )
        if tiles.share_memory(limit):
            return tiles
    return None


def _bias_obstacle(request: Request) -> str | None:
    problem, call = request.problem, request.call
    if call is None or call.bias is None or not request.wants_dbias:
        return "no gradient of a bias is wanted"
    if not call.q.shape[-2] or not call.k.shape[-2]:
        return "there are no queries or no keys"
    if problem.heads != problem.heads_kv:
        return "heads of queries share keys"
    if call.score_mod is not None or call.mask is not None or problem.dropout > 0:
        return "there is a score change, a mask or dropout"
    if call.sink is not None:
        return "there is a sink"
    if bias_tiles.kind(request) not in sm80.HALVES:
        return f"the bias is {call.bias.dtype}"
    if (1, 1, *call.bias.shape)[-2:] != (problem.len_q, problem.len_k):
        return "queries or keys share a bias"
    why = bias_tiles.has_other_rows(request)
    if why is not None:
        return why
    return None if request.whole_heads else "no block has all of a head to itself"


DKDV_BIAS = KernelSpec(
    source="sm80/backward_sm80_dkdv_dbias.cu",
    part="dkdv",
    computes="delta, dk, dv and parts of dbias",
    method=sm80.METHOD,
    heads=dict.fromkeys(sm80.HALVES, NARROW),
    capability=sm80.CAPABILITY,
    tensor_cores=True,
    condition=f"a head has at most {ROWS} queries and keys, and nothing is shared by heads or "
    "entries but a bias of 16 bits, whose gradient is wanted, and gradients of rows have their "
    "type; no mask, score change, sink or dropout",
    longest=ROWS,
    obstacle=_bias_obstacle,
    configure=_configure_bias,
    grid=grid.by_tiles,
    whole_dq=True,
    own_delta=True,
    own_dbias=True,
    overlaps=True,
)
