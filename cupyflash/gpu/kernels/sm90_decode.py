"""The kernel of many heads that share compressed keys, on compute capability 9.0: its spec."""

from __future__ import annotations

import dataclasses

from . import decode, grid
from .sm80 import HALVES
from .sm90 import ARCHITECTURE, CAPABILITY
from .spec import KernelSpec, Request, Tiles, TmaOperands, row_bytes

D, D_V = decode.COMPRESSED
ROWS, THREADS = 64, 384  # of a block: two consumer warpgroups, and producers
STAGES, PRODUCER_WARPS = 2, 4
PARTS = 4, 2  # of the columns of o, which blocks have that all compute the same scores
# With fewer heads of a key head, most rows of its products would be unused. Their number must not
# depend on the queries: as many drafts have the bits of single steps.
FEWEST_HEADS = 16
_ROW_BYTES = 24  # of a thread: what consumers tell each other of its rows
_TILE_BYTES = 2 * 144 + 48  # what consumers are told of a stage's tile, and barriers


def _shared_memory() -> int:
    storage = _ROW_BYTES * 128 + _TILE_BYTES * STAGES + 2 * decode.TASK_BYTES * PRODUCER_WARPS
    storage += decode.schedule_bytes(THREADS // 32)
    return (ROWS + STAGES * decode.LEAF) * row_bytes(D) + -(-storage // 8) * 8


def _configure(request: Request) -> Tiles:
    """Let several blocks have the columns of a node, each a part, where nodes are few.

    This is about capacities, and no bit depends on it.
    """
    nodes = decode.most_nodes(request.problem, ROWS)
    parts = next((n for n in PARTS if n * nodes <= request.device.multiprocessors), 1)
    tiles = Tiles(ROWS, decode.LEAF, THREADS, _shared_memory(), stages=STAGES)
    return dataclasses.replace(tiles, v_parts=parts)


def _obstacle(request: Request) -> str | None:
    problem, call = request.problem, request.call
    if call is None:
        return "its arrays are not known"
    if not problem.heads_kv or problem.heads // problem.heads_kv < FEWEST_HEADS:
        return f"it is for {FEWEST_HEADS} heads or more that share keys"
    if not decode.values_in_keys(call):
        return f"v is not k[..., :{D_V}], a view of the keys"
    return None


DECODE = KernelSpec(
    source="sm90/decode_sm90.cu",
    part="decode",
    computes="out and log-sum-exp of many heads that share compressed keys",
    method="multiplies {dtype} by the tensor cores of warpgroups",
    heads=dict.fromkeys(HALVES, D),
    only=decode.COMPRESSED,
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    condition=f"D = {D}, and v = k[..., :{D_V}] of the same memory; {FEWEST_HEADS} heads or more "
    "share keys",
    obstacle=_obstacle,
    configure=_configure,
    grid=grid.by_units,
    tma=TmaOperands(("k",), (), lambda tiles: {"k": tiles.block_kv}, optional=True),
    caches=True,
    overlaps=True,
)
