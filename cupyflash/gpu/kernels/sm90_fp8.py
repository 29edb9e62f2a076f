"""The kernel for codes of float8 on compute capability 9.0: tiles, calls that it serves, spec."""

from __future__ import annotations

from ...problem import codes
from ...problem.call import Problem
from . import grid, sm90, tma_operands
from .sm80 import HALVES
from .spec import WARP_ROWS, KernelSpec, Request, Tiles, TmaOperands, at_head, row_bytes

SHORTEST = 512  # queries, and keys: fewer become numbers, whose kernels have smaller tiles
LINE = 128  # codes in a row of a slab
# Largest head -> queries and keys of a tile of forward_sm90_fp8.cu. A word has the bits of a row's
# masked pairs, and a line the keys of a transposed column: tiles have at most 128 keys.
TILES = {64: (192, 128), 128: (192, 128), 256: (128, 128)}
# For score changes and dropout, which take registers, of which two consumers have more; and for few
# queries, so that less of a tile is beyond the last one and more blocks share them.
SMALL_TILES = TILES | {128: (128, 128)}
# In addition to work tiles: barriers, what is found of a stage's values, and factors of results.
_STORAGE_BYTES = 64 + 48 + 16
# Barriers of a consumer, and its queries' factors of each work tile; scales of a key's stages.
_CONSUMER_BYTES, _SCALE_BYTES = 16 + 4 * 64 * sm90.WORK_STAGES, 24


def _lines(columns: int) -> int:
    return -(-columns // LINE) * LINE


def _bytes(block_q: int, block_kv: int, d: int, d_v: int) -> int:
    q, v, transposed = _lines(d), _lines(d_v), -(-d_v // 64) * 64 * LINE
    v_stages = sm90.KV_STAGES if d_v <= LINE else 1
    held = block_q * q + sm90.KV_STAGES * (block_kv * q + transposed) + v_stages * block_kv * v
    storage = sm90.SCHEDULER_BYTES + _STORAGE_BYTES + 16 * v_stages
    storage += _CONSUMER_BYTES * (block_q // 64) + _SCALE_BYTES * block_kv
    return held + -(-storage // 16) * 16  # scales are loaded by 16 bytes


def tiles(block_q: int, block_kv: int, d: int, d_v: int) -> Tiles:
    """Return tiles of forward_sm90_fp8.cu, with room for results if there is enough."""
    least = _bytes(block_q, block_kv, d, d_v)
    whole = least + block_q * row_bytes(d_v)
    shared = whole if whole <= sm90.SHARED_MEMORY else least
    return Tiles(block_q, block_kv, 2 * block_q + 128, shared, stages=sm90.KV_STAGES)


def fit(d: int, d_v: int, small: bool = False) -> Tiles:
    """Return the tiles of forward_sm90_fp8.cu that are chosen; `small` ones are `SMALL_TILES`."""
    return tiles(*at_head(SMALL_TILES if small else TILES, d, d_v), d, d_v)


def _configure(request: Request) -> Tiles:
    assert request.call is not None
    problem = request.problem
    changes = sm90.register_class(request.call) in sm90.CHANGED or problem.dropout > 0
    # No sequence's result may depend on the lengths of others that are packed with it.
    few = problem.rows.known_q <= sm90.FEW_QUERIES
    return fit(problem.d, problem.d_v, small=changes or few)


def results_have_room(made: Tiles, problem: Problem) -> bool:
    """Whether tiles have room for results from where TMA can store them."""
    least = _bytes(made.block_q, made.block_kv, problem.d, problem.d_v)
    return made.shared_memory > least and problem.dtype.name in HALVES


def _obstacle(request: Request) -> str | None:
    problem = request.problem
    if min(problem.rows.known_q, problem.rows.known_k) < SHORTEST:
        return f"it is for {SHORTEST} queries and keys or more"
    return tma_operands.obstacle(request, ("q", "k", "v"))


FORWARD = KernelSpec(
    source="sm90/forward_sm90_fp8.cu",
    part="forward_codes",
    computes="out and log-sum-exp of codes",
    method="multiplies codes by the tensor cores of warpgroups",
    heads=dict.fromkeys(codes.QUERIES, 256),
    capability=sm90.CAPABILITY,
    architecture=sm90.ARCHITECTURE,
    tensor_cores=True,
    condition=f"codes of float8; {SHORTEST} queries and keys or more, or packed; TMA can load "
    "q, k and v",
    obstacle=_obstacle,
    configure=_configure,
    grid=grid.shared_by_queries,
    tma=TmaOperands(
        loads=("q", "k", "v"),
        stores=("out",),
        # a consumer's queries; a tile's keys; a warp's rows
        rows=lambda made: {"q": 64, "k": made.block_kv, "v": made.block_kv, "out": WARP_ROWS},
        has_room=lambda request, made: results_have_room(made, request.problem),
    ),
    codes=True,
    ends_with_queries=True,
    lists="queries",
    deals=True,
    most_listed=2048,  # warpgroup_tile::GROUPS
)
