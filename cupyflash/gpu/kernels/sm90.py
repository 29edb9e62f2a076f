"""The kernels for compute capability 9.0 only: tiles, the calls that they serve, specs.

Every kernel asserts that it agrees with this module about the bytes of shared memory.
"""

from __future__ import annotations

import numpy as np

from ...problem.call import Call, Problem
from .. import params, tma
from . import grid, tma_operands
from .sm80 import ENTRY_BYTES, HALVES, bias_storage_bytes
from .spec import WARP_ROWS, KernelSpec, Request, Tiles, TmaOperands, at_head, row_bytes

CAPABILITY, ARCHITECTURE = (9, 0), "sm_90a"
SHARED_MEMORY = 232448  # bytes, of a block
SHORTEST = 512  # queries, and keys: for fewer, the smaller tiles of sm80 are not slower
MOST_PADDING = 1.25  # times the products that sm80's kernel computes
KV_STAGES = 2  # of keys, and of values; in the backward of queries, and of do

# -- forward_sm90 ---------------------------------------------------------------------------------

_MASKED: dict[int, tuple[int, int]] = {
    64: (192, 128),
    128: (128, 128),
    192: (128, 112),
    256: (128, 80),
}
# What takes registers in addition to products, or how long rows are -> largest head -> queries and
# keys of a tile of forward_sm90.cu. A word has the bits of a row's masked pairs.
FORWARD_TILES: dict[str, dict[int, tuple[int, int]]] = {
    "plain": _MASKED | {128: (128, 176)},
    "plain, few keys": _MASKED,  # less of a tile is beyond the last query, and results have room
    "masks": _MASKED,
    "masks, few queries": _MASKED | {64: (128, 128)},  # less of a tile is beyond a diagonal
    "scores": _MASKED | {64: (192, 112)},
}
SMALL_HEAD = 64  # columns of q, k and v whose tiles leave room for more stages
FEW_QUERIES, FEW_KEYS = 1024, 4096
WORK_STAGES, CHECKER_WARPS = 3, 2  # work tiles at a time; warps of the finite check
TILE_GROUPS = 2048  # that have a class each
_WORK_TILE_BYTES = ENTRY_BYTES + 104 + 2 * TILE_GROUPS // 8
SCHEDULER_BYTES = (_WORK_TILE_BYTES + 16) * WORK_STAGES + 24  # work tiles, with barriers
STAGE_BYTES = 40 + 4 * CHECKER_WARPS  # barriers of a stage of k and v; as many of one of q


def register_class(call: Call) -> str:
    """Return what a call's tiles depend on besides its heads: a key of `FORWARD_TILES`."""
    if call.score_mod is not None or call.bias is not None:
        return "scores"
    # No sequence's result may depend on the lengths of others that are packed with it, nor on how
    # much a cache has room for.
    if call.mask is None:
        return "plain, few keys" if call.rows.known_k <= FEW_KEYS else "plain"
    return "masks, few queries" if call.rows.known_q <= FEW_QUERIES else "masks"


def forward_stages(d: int, d_v: int, room: bool) -> tuple[int, int]:
    """Return the stages of keys, and of values, and those of queries in forward_sm90.cu."""
    return (2 * KV_STAGES, 2) if room and max(d, d_v) <= SMALL_HEAD else (KV_STAGES, 1)


def _forward_bytes(block_q: int, block_kv: int, d: int, d_v: int, room: bool) -> int:
    q, v = row_bytes(d), row_bytes(d_v)
    stages, queries = forward_stages(d, d_v, room)
    held = queries * block_q * q + stages * block_kv * (q + v)
    return held + SCHEDULER_BYTES + STAGE_BYTES * (stages + queries)


def forward_tiles(block_q: int, block_kv: int, d: int, d_v: int, room: bool) -> Tiles:
    """Return tiles of forward_sm90.cu, with one consumer warpgroup per 64 queries, and a producer.

    With `room`, results get room in shared memory if there is enough, and small tiles have more
    stages.
    """
    least = _forward_bytes(block_q, block_kv, d, d_v, room)
    whole = least + block_q * row_bytes(d_v)
    shared = whole if room and whole <= SHARED_MEMORY else least
    stages, _ = forward_stages(d, d_v, room)
    return Tiles(block_q, block_kv, 2 * block_q + 128, shared, stages=stages)


def results_have_room(tiles: Tiles, d: int, d_v: int) -> bool:
    """Whether tiles of forward_sm90.cu have room for results."""
    return tiles.shared_memory > _forward_bytes(tiles.block_q, tiles.block_kv, d, d_v, True)


def fit_forward(d: int, d_v: int, registers: str = "plain") -> Tiles:
    """Return the tiles of forward_sm90.cu; `registers` is a key of `FORWARD_TILES`."""
    blocks = at_head(FORWARD_TILES[registers], d, d_v)
    # A bias is read through the L1 cache, which shares its memory with shared memory.
    return forward_tiles(*blocks, d, d_v, room=registers != "scores")


def _configure_forward(request: Request) -> Tiles | None:
    assert request.call is not None
    problem = request.problem
    return fit_forward(problem.d, problem.d_v, register_class(request.call))


def _padding(d: int, d_v: int) -> float:
    """Return the factor by which padding columns to 64 increases the products of forward_sm80."""
    scores = -(-d // 16) * 16
    return (scores + -(-d_v // 64) * 64) / (scores + -(-d_v // 16) * 16)


def _forward_obstacle(request: Request) -> str | None:
    if request.call is None:
        return "its arrays are not known"
    problem, lengths = request.problem, request.call.rows
    # No sequence's result may depend on the lengths of others that are packed with it, nor on how
    # much a cache has room for.
    if min(lengths.known_q, lengths.known_k) < SHORTEST:
        return f"it is for {SHORTEST} queries and keys or more"
    if _padding(problem.d, problem.d_v) > MOST_PADDING:
        return f"it computes columns of v by 64, which {problem.d_v} are too far from"
    if request.is_paged("k"):
        block_kv = fit_forward(problem.d, problem.d_v, register_class(request.call)).block_kv
        if tma_operands.page_rows(request, block_kv) < tma_operands.FEWEST_PAGE_ROWS:
            return (
                f"pages of {request.call.k.shape[-2]} and its tiles of {block_kv} keys do not fit"
            )
    return tma_operands.obstacle(request, ("q", "k", "v"))


def _has_room(request: Request, tiles: Tiles) -> bool:
    return results_have_room(tiles, request.problem.d, request.problem.d_v)


FORWARD = KernelSpec(
    source="sm90/forward_sm90.cu",
    part="forward",
    computes="out and log-sum-exp",
    method="multiplies {dtype} by the tensor cores of warpgroups",
    heads=dict.fromkeys(HALVES, 256),
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    condition=f"{SHORTEST} queries and keys or more, or packed; columns of v are near a multiple "
    "of 64; TMA can load q, k and v",
    obstacle=_forward_obstacle,
    configure=_configure_forward,
    grid=grid.shared_by_queries,
    tma=TmaOperands(
        loads=("q", "k", "v"),
        stores=("out",),
        # a consumer's queries; a tile's keys; a warp's rows
        rows=lambda tiles: {
            "q": 64,
            "k": tiles.block_kv,
            "v": tiles.block_kv,
            "out": WARP_ROWS,
        },
        has_room=_has_room,
    ),
    caches=True,
    ends_with_queries=True,
)

# -- forward_sm90_tf32 ----------------------------------------------------------------------------

# Largest head -> queries and keys of a tile of forward_sm90_tf32.cu. Its bound relies on sums over
# heads up to 128 and tiles of 64 keys.
TF32_TILES: dict[int, tuple[int, int]] = {128: (128, 64)}


def tf32_tiles(block_q: int, block_kv: int, d: int, d_v: int) -> Tiles:
    """Return tiles of forward_sm90_tf32.cu: a warpgroup for 64 queries each."""
    q, v, columns_v = row_bytes(d, 4), row_bytes(d_v, 4), -(-d_v // 64) * 64
    shared = block_q * max(q, v) + 2 * block_kv * (q + 4 * columns_v)
    shared += ENTRY_BYTES + 32 + 12 * (block_q // 16)
    return Tiles(block_q, block_kv, 2 * block_q, shared, stages=1)


def fit_tf32(d: int, d_v: int) -> Tiles:
    """Return the tiles of forward_sm90_tf32.cu."""
    return tf32_tiles(*at_head(TF32_TILES, d, d_v), d, d_v)


TF32_FORWARD = KernelSpec(
    source="sm90/forward_sm90_tf32.cu",
    part="forward",
    computes="out and log-sum-exp",
    method="multiplies {dtype} by the tensor cores of warpgroups{products}",
    heads={"float32": max(TF32_TILES)},
    precisions={"float32": "tf32x3"},
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    configure=lambda request: fit_tf32(request.problem.d, request.problem.d_v),
    grid=grid.by_queries,
)

# -- backward_sm90_dkdv ---------------------------------------------------------------------------

# Largest head -> queries and keys of a tile of backward_sm90_dkdv.cu.
DKDV_TILES: dict[int, tuple[int, int]] = {128: (64, 128), 256: (64, 64)}
DKDV_STORAGE_BYTES = 816  # in addition to operands, lse and delta
_MAPS_BYTES = 7 * tma.BYTES  # of q, k, v, do, dk and dv, and what aligns them


def dkdv_tiles(block_q: int, block_kv: int, d: int, d_v: int) -> Tiles:
    """Return tiles of backward_sm90_dkdv.cu: two consumer warpgroups, and a producer."""
    columns = row_bytes(d) + row_bytes(d_v)
    shares = block_kv == 64  # keys, between warpgroups: then P goes through shared memory like dS
    stage = block_q * columns + (2 if shares else 1) * block_kv * row_bytes(block_q)
    copied = row_bytes(d) if not shares and d > 64 else 0  # of keys, made finite
    keys = block_kv * (columns + copied)
    shared = keys + KV_STAGES * stage + 16 * block_q + DKDV_STORAGE_BYTES
    return Tiles(block_q, block_kv, 384, shared, stages=KV_STAGES)


def fit_dkdv(d: int, d_v: int) -> Tiles:
    """Return the tiles of backward_sm90_dkdv.cu."""
    return dkdv_tiles(*at_head(DKDV_TILES, d, d_v), d, d_v)


def _line(d: int, d_v: int) -> int:
    """Columns that backward_sm90_dkdv computes at a time; of wide heads in two warpgroups."""
    return 64 if max(d, d_v) <= 128 else 128


def _dkdv_padding(d: int, d_v: int) -> float:
    """Return the factor by which padding increases the products of backward_sm80_dkdv.

    Scores and dP are computed unpadded, and dv, dk and dq in whole lines.
    """
    line = _line(d, d_v)
    wide, wide_v = (-(-n // line) * line for n in (d, d_v))
    whole, whole_v = (-(-n // 16) * 16 for n in (d, d_v))
    return (whole + whole_v + 2 * wide + wide_v) / (3 * whole + 2 * whole_v)


def _too_short(problem: Problem) -> str | None:
    longest = [int(np.max(x, initial=0)) for x in (problem.len_q, problem.len_k)]
    if min(longest) < SHORTEST:
        return f"it is for {SHORTEST} queries and keys or more"
    return None


def _dkdv_obstacle(request: Request) -> str | None:
    if request.call is None:
        return "its arrays are not known"
    problem = request.problem
    short = _too_short(problem)
    if short is not None:
        return short
    if request.params_bytes + _MAPS_BYTES > params.MAX_BYTES:
        return "its mask and scores read too many arrays or numbers"
    d, d_v = problem.d, problem.d_v
    if _dkdv_padding(d, d_v) > MOST_PADDING:
        return f"it computes columns by {_line(d, d_v)}, which {d} and {d_v} are too far from"
    return tma_operands.obstacle(request, ("q", "k", "v", "d_out"))


def _dkdv_rows(tiles: Tiles) -> dict[str, int]:
    # a tile's queries; a consumer's keys; a warp's rows
    return {"q": tiles.block_q, "k": 64, "v": 64, "d_out": tiles.block_q, "dk": 16, "dv": 16}


DKDV = KernelSpec(
    source="sm90/backward_sm90_dkdv.cu",
    part="dkdv",
    computes="dk and dv",
    method="multiplies {dtype} by the tensor cores of warpgroups",
    heads=dict.fromkeys(HALVES, max(DKDV_TILES)),
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    condition=f"{SHORTEST} queries and keys or more; columns are near a multiple of 64, in heads "
    "beyond 128 of 128; TMA can load q, k, v and do",
    obstacle=_dkdv_obstacle,
    configure=lambda request: fit_dkdv(request.problem.d, request.problem.d_v),
    grid=grid.by_keys,
    tma=TmaOperands(("q", "k", "v", "d_out"), ("dk", "dv"), _dkdv_rows),
    slope=True,
    atomic_dq=HALVES,
    whole_dq=True,
    parts=True,
)

# -- backward_sm90_bias ---------------------------------------------------------------------------

# Largest head -> queries and keys of a tile of backward_sm90_bias.cu, and blocks that share an SM:
# one multiplies while another computes weights.
BIAS_TILES: dict[int, tuple[int, int, int]] = {
    128: (64, 128, 2),
    192: (64, 64, 2),
    256: (128, 64, 1),
}


def bias_tiles(block_q: int, block_kv: int, resident: int, d: int, d_v: int) -> Tiles:
    """Return tiles of backward_sm90_bias.cu: a warpgroup for 64 queries each."""
    operands = (block_q + block_kv) * (row_bytes(d) + row_bytes(d_v))
    sums = block_q * (block_kv + 8) * 4
    shared = max(operands, sums) + bias_storage_bytes(block_q, block_q // 16)
    return Tiles(block_q, block_kv, 2 * block_q, shared, resident, stages=1)


def fit_bias(d: int, d_v: int) -> Tiles:
    """Return the tiles of backward_sm90_bias.cu."""
    return bias_tiles(*at_head(BIAS_TILES, d, d_v), d, d_v)


BIAS = KernelSpec(
    source="sm90/backward_sm90_bias.cu",
    part="bias",
    computes="dbias",
    method="multiplies {dtype} by the tensor cores of warpgroups",
    heads=dict.fromkeys(HALVES, max(BIAS_TILES)),
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    condition=f"{SHORTEST} queries and keys or more",
    obstacle=lambda request: _too_short(request.problem),
    configure=lambda request: fit_bias(request.problem.d, request.problem.d_v),
    grid=grid.by_tiles,
)
