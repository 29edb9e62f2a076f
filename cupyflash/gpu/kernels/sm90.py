"""The kernels for compute capability 9.0 only: tiles, the calls that they serve, specs.

Every kernel asserts that it agrees with this module about the bytes of shared memory.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from ...expr.evaluate import evaluate
from ...expr.key_range import KeyRange, key_range
from ...expr.nodes import walk
from ...problem.bound_exprs import bound
from ...problem.call import Call, Problem
from ...problem.rows import UNKNOWN
from .. import params, tma
from . import bias_tiles, cost, grid, sm80, sm90_wide, tma_operands
from .cost import Cost
from .sm80 import ENTRY_BYTES, HALVES, LARGEST_OF_WARP
from .sm90_cost import dkdv_cost, forward_cost
from .sm90_dkdv import DKDV_TILES, choose_dkdv, fit_rows
from .spec import RESERVED, WARP_ROWS, KernelSpec, Request, Tiles, TmaOperands, at_head, row_bytes

CAPABILITY, ARCHITECTURE = (9, 0), "sm_90a"
SHARED_MEMORY = 232448  # bytes, of a block
KV_STAGES = 2  # of keys, and of values

# -- forward_sm90 ---------------------------------------------------------------------------------

_MASKED: dict[int, tuple[int, int]] = {
    64: (192, 128),
    128: (128, 128),
    192: (128, 112),
    256: (128, 80),
    320: (128, 48),
}
# What takes registers in addition to products, or how long rows are -> largest head -> queries and
# keys of a tile of forward_sm90.cu. A word has the bits of a row's masked pairs.
FORWARD_TILES: dict[str, dict[int, tuple[int, int]]] = {
    "plain": _MASKED | {128: (128, 176)},
    "plain, few keys": _MASKED,  # less of a tile is beyond the last query, and results have room
    "masks": _MASKED,
    # Less of a tile is beyond a diagonal, or the edges of what few keys a query sees.
    "masks, smaller": _MASKED | {64: (128, 128)},
    "bias": _MASKED | {64: (192, 112), 320: (128, 32)},
    "scores": _MASKED | {64: (192, 112), 320: (128, 32)},
}
# Largest head -> queries and keys of a tile with tiles of a bias in shared memory, and blocks that
# share an SM: while small heads wait, another block computes.
FORWARD_BIAS_TILES = {64: (64, 64, 3), 128: (128, 128, 1), 256: (128, 64, 1)}
# Of small heads, others: fewer tiles, of which more is beyond an edge of a mask.
SMALL_BIAS_TILES = (64, 128, 2), (128, 128, 1)
# Largest head -> keys of a tile in addition to these, for rows that are one tile, or few that have
# less padding. Masked pairs are bits of a word.
WIDTHS: dict[int, tuple[int, ...]] = {
    64: (64, 80, 112, 128, 144, 176, 208),
    128: (64, 80, 112, 128, 144, 176),
    192: (64, 80, 112),
    256: (64, 80),
    320: (48,),
}
MOST_MASKED = 128
# Of so few queries most rows of a tile are empty, and a generation has a key more in each call, of
# which a map of tensors would have to be encoded anew.
STEP_QUERIES = 16
# Of the usual tiles' time: others must take less, since the model is not more exact. Those
# with tiles of a bias were measured, all of them.
EXACT, EXACT_BIAS = 0.95, 0.96
# Largest head -> largest tile of keys -> blocks that share an SM's registers, with 64 queries each.
SMALL_BLOCKS: dict[int, dict[int, int]] = {64: {80: 3, 144: 2}, 128: {80: 2}}
SMALL_HEAD = 64  # columns of q, k and v whose tiles leave room for more stages
FEW_QUERIES, FEW_KEYS = 1024, 4096
# A query sees fewer keys than NARROW, if it does at these places of rows that are long.
NARROW = 512
PLACES = {"i": np.array([0, 2**12, 2**20])} | dict.fromkeys(("len_q", "len_k"), 2**21)
PLACES |= dict.fromkeys(("b", "h", "start_q", "start_k"), 0)
CHANGED = "bias", "scores"  # classes with code for scores
# Work tiles at a time; warps of the finite check; groups of tiles that have a class each.
WORK_STAGES, CHECKER_WARPS, TILE_GROUPS = 3, 2, 2048
_WORK_TILE_BYTES = ENTRY_BYTES + 104 + 2 * TILE_GROUPS // 8
SCHEDULER_BYTES = (_WORK_TILE_BYTES + 16) * WORK_STAGES + 24  # work tiles, with barriers
STAGE_BYTES = 40 + 4 * CHECKER_WARPS  # barriers of a stage of k and v; as many of one of q


def register_class(call: Call) -> str:
    """Return what a call's tiles depend on besides its heads: a key of `FORWARD_TILES`."""
    if call.score_mod is not None or (call.bias is not None and call.problem.dropout > 0):
        return "scores"
    if call.bias is not None:
        return "bias"
    # No sequence's result may depend on the lengths of others that are packed with it, nor on how
    # much a cache has room for.
    if call.mask is None:
        return "plain, few keys" if call.rows.known_k <= FEW_KEYS else "plain"
    if call.rows.known_q <= FEW_QUERIES:
        return "masks, smaller"
    ranges = key_range(bound(call.mask.expr, call.problem), call.problem)
    return "masks, smaller" if ranges is None or _is_narrow(ranges) else "masks"


def _is_narrow(ranges: KeyRange) -> bool:
    """Whether a query sees few keys, as far as a mask's numbers tell: no array is read."""
    low, high = ranges
    if low is None or high is None or any(node.op == "lookup" for node in walk(low, high)):
        return False
    return int(np.max(evaluate(high - low, PLACES))) + 1 < NARROW


def forward_stages(d: int, d_v: int, room: bool, one_tile: bool = False) -> tuple[int, int]:
    """Return the stages of keys, and of values, and least those of queries in forward_sm90.cu."""
    if not room or max(d, d_v) > SMALL_HEAD:
        return KV_STAGES, 1
    return (KV_STAGES if one_tile else 2 * KV_STAGES), 2


def _forward_bytes(
    block_q: int, block_kv: int, d: int, d_v: int, room: bool, one_tile: bool = False
) -> int:
    q, v = row_bytes(d), row_bytes(d_v)
    stages, queries = forward_stages(d, d_v, room, one_tile)
    least, of_queries = stages * (block_kv * (q + v) + STAGE_BYTES), block_q * q + STAGE_BYTES
    least += SCHEDULER_BYTES
    # Where work tiles have one tile of scores, there are two stages of queries if they have room.
    room = room and least + 2 * of_queries + block_q * v <= SHARED_MEMORY
    return least + (2 if room and one_tile and block_q >= 128 else queries) * of_queries


def forward_bias_tiles(
    block_q: int,
    block_kv: int,
    d: int,
    d_v: int,
    itemsize: int,
    resident: int = 1,
    one_tile: bool = False,
) -> Tiles | None:
    """Return tiles of forward_sm90.cu with tiles of a bias, or None if they do not fit.

    A tile of the bias has two stages if there is room, and results have what is left.
    """
    tiles = forward_tiles(block_q, block_kv, d, d_v, False, resident, one_tile)
    most = (SHARED_MEMORY + RESERVED) // resident - RESERVED
    stage = block_q * row_bytes(block_kv, itemsize) + 16  # with barriers
    out = block_q * row_bytes(d_v)
    for stages, results in ((2, out), (2, 0), (1, out), (1, 0)):
        shared = tiles.shared_memory + stages * stage + results
        if shared <= most:
            return replace(tiles, shared_memory=shared, bias_stages=stages, bias_bytes=stage)
    return None


def forward_tiles(
    block_q: int,
    block_kv: int,
    d: int,
    d_v: int,
    room: bool,
    resident: int = 1,
    one_tile: bool = False,
) -> Tiles:
    """Return tiles of forward_sm90.cu, with one consumer warpgroup per 64 queries, and a producer.

    With `room`, results get room in shared memory if there is enough, and small tiles have more
    stages. With `one_tile`, the keys of a row are one tile.
    """
    least = _forward_bytes(block_q, block_kv, d, d_v, room, one_tile)
    whole = least + block_q * row_bytes(d_v)
    shared = whole if room and whole <= SHARED_MEMORY else least
    stages, _ = forward_stages(d, d_v, room, one_tile)
    return Tiles(block_q, block_kv, 2 * block_q + 128, shared, resident, stages, one_tile=one_tile)


def results_have_room(tiles: Tiles, d: int, d_v: int) -> bool:
    """Whether tiles of forward_sm90.cu have room for results."""
    blocks = tiles.block_q, tiles.block_kv
    least = _forward_bytes(*blocks, d, d_v, not tiles.bias_stages, tiles.one_tile)
    return tiles.shared_memory > least + tiles.bias_stages * tiles.bias_bytes


def fit_forward(d: int, d_v: int, registers: str = "plain") -> Tiles:
    """Return the tiles of forward_sm90.cu; `registers` is a key of `FORWARD_TILES`."""
    if max(d, d_v) > max(_MASKED):
        return sm90_wide.fit(d, d_v, SHARED_MEMORY, forward_tiles)
    blocks = at_head(FORWARD_TILES[registers], d, d_v)
    # A bias is read through the L1 cache, which shares its memory with shared memory.
    return forward_tiles(*blocks, d, d_v, room=registers not in CHANGED)


def fit_forward_bias(d: int, d_v: int, itemsize: int, registers: str = "bias") -> Tiles:
    """Return the tiles of forward_sm90.cu with tiles of a bias of `itemsize` bytes."""
    # The code of other score changes takes registers that small blocks lack.
    head = max(d, d_v, 128 if registers == "scores" else 0)
    block_q, block_kv, resident = at_head(FORWARD_BIAS_TILES, head, head)
    tiles = forward_bias_tiles(block_q, block_kv, d, d_v, itemsize, resident)
    assert tiles is not None
    return tiles


def _tiles_by_length(d: int, d_v: int, registers: str, len_k: int) -> list[Tiles]:
    """Return tiles of forward_sm90.cu for rows of so many keys, in addition to the usual ones."""
    found = []
    has_bias, wide = registers == "bias", registers.startswith("plain")
    widths = [x for x in at_head(WIDTHS, d, d_v) if wide or x <= MOST_MASKED]
    small = next((x for head, x in SMALL_BLOCKS.items() if max(d, d_v) <= head), {})
    for width in widths:
        one_tile = len_k <= width
        more = [(128, 1)]
        if one_tile or has_bias:
            more += [(64, n) for most, n in small.items() if width <= most][:1]
        if one_tile and wide and width <= at_head(_MASKED, d, d_v)[1]:
            more.append((at_head(_MASKED, d, d_v)[0], 1))
        for block_q, resident in more:
            tiles = forward_tiles(block_q, width, d, d_v, not has_bias, resident, one_tile)
            if tiles.share_memory(SHARED_MEMORY):
                found.append(tiles)
        if one_tile:
            break
    return found[::-1]  # of equal ones, those with fewer tiles


@functools.lru_cache(maxsize=256)
def choose_forward(
    d: int, d_v: int, registers: str, has_bias: bool, len_q: int, len_k: int
) -> Tiles:
    """Return the tiles of forward_sm90.cu that take the least time; lengths may be `UNKNOWN`."""
    usual = fit_forward(d, d_v, registers)
    if registers == "scores" or len_k >= UNKNOWN or max(d, d_v) > max(WIDTHS):
        return usual
    others = _tiles_by_length(d, d_v, registers, len_k)
    return _fastest(usual, others, (d, d_v, has_bias, len_q, len_k))


def _fastest(
    usual: Tiles,
    others: list[Tiles],
    sizes: tuple[int, int, bool, int, int],
    masked: bool = False,
    exact: float = EXACT,
) -> Tiles:
    """Return the tiles that take the least time; others only if the model is sure of them."""
    times = {x: forward_cost(x, *sizes, masked).time for x in (*others, usual)}
    best = min(times, key=times.__getitem__)
    exact = exact if sizes[-1] > usual.block_kv else 1.0  # one tile is the same, and takes less
    return best if times[best] <= exact * times[usual] else usual


@functools.lru_cache(maxsize=256)
def choose_forward_bias(
    d: int, d_v: int, registers: str, itemsize: int, masked: bool, len_q: int, len_k: int
) -> Tiles:
    """Return the tiles of forward_sm90.cu, with tiles of a bias, that take the least time."""
    usual = fit_forward_bias(d, d_v, itemsize, registers)
    if registers == "scores":
        return usual
    sizes = d, d_v, True, min(len_q, cost.LONG), min(len_k, cost.LONG)
    blocks = [
        (x.block_q, x.block_kv, x.resident_blocks, x.one_tile)
        for x in _tiles_by_length(d, d_v, registers, sizes[-1])
    ]
    exact = EXACT
    if usual.resident_blocks > 1 and sizes[-1] > MOST_MASKED:
        blocks, exact = [(*x, False) for x in SMALL_BIAS_TILES], EXACT_BIAS
    made = (forward_bias_tiles(q, k, d, d_v, itemsize, n, one) for q, k, n, one in blocks)
    others = [x for x in made if x is not None and x.bias_stages >= usual.bias_stages]
    return _fastest(usual, others, sizes, masked, exact)


def choose_packed(problem: Problem, registers: str) -> Tiles:
    """Return the tiles of forward_sm90.cu for packed sequences.

    Where all keys of a sequence are one tile, its bits do not depend on the width of this tile. So
    only where that holds for all sequences in the usual tiles, their lengths choose others. Where
    nobody has looked at lengths, all are as probable as the longest one.
    """
    d, d_v, longest = problem.d, problem.d_v, int(np.max(problem.len_k, initial=0))
    usual = fit_forward(d, d_v, registers)
    is_wide = max(d, d_v) > max(WIDTHS)
    if registers in CHANGED or is_wide or not 0 < longest <= usual.block_kv:
        return usual
    others = [x for x in _tiles_by_length(d, d_v, registers, longest) if x.one_tile]
    some = np.asarray(problem.len_q)[np.asarray(problem.len_q) > 0]
    queries = int(np.ceil(np.mean(some))) if some.size else 1
    if problem.rows.unread:  # of the lengths, the longest one alone is known
        queries = -(-queries // 2)
    return _fastest(usual, others, (d, d_v, False, queries, longest))


def _configure_forward(request: Request) -> Tiles:
    call, problem = request.call, request.problem
    assert call is not None
    # No sequence's result may depend on the lengths of others that are packed with it, nor on how
    # much a cache has room for.
    lengths = call.rows.known_q, call.rows.known_k
    registers = register_class(call)
    has_tiles = max(problem.d, problem.d_v) <= max(FORWARD_BIAS_TILES)
    if call.bias is not None and has_tiles and bias_tiles.obstacle(request) is None:
        kind = bias_tiles.itemsize(request), call.mask is not None
        return choose_forward_bias(problem.d, problem.d_v, registers, *kind, *lengths)
    if call.rows.adjoin and not request.has_cache:
        return choose_packed(problem, registers)
    return choose_forward(problem.d, problem.d_v, registers, call.bias is not None, *lengths)


def _cost_of_forward(request: Request, tiles: Tiles) -> Cost | None:
    call, problem = request.call, request.problem
    if call is None or max(problem.d, problem.d_v) > LARGEST_OF_WARP:  # rates are of others
        return None
    lengths = min(call.rows.known_q, cost.LONG), min(call.rows.known_k, cost.LONG)
    if tiles.one_tile and lengths[1] > tiles.block_kv:  # packed; longer ones have the same kernel
        tiles = fit_forward(problem.d, problem.d_v, register_class(call))
    sizes = problem.d, problem.d_v, call.bias is not None, *lengths
    return forward_cost(tiles, *sizes, masked=call.mask is not None)


def _slower(request: Request, own: tuple[KernelSpec, Tiles], other: KernelSpec) -> str | None:
    """Return None, or in words that another kernel takes less time."""
    others_tiles = other.configure(request)
    if others_tiles is None:
        return None
    takes, others = own[0].cost(request, own[1]), other.cost(request, others_tiles)
    if takes is None or others is None or takes.time <= others.time:
        return None
    return f"a head would take {takes}, and {others} by {other.name}"


def _forward_obstacle(request: Request) -> str | None:
    if request.call is None:
        return "its arrays are not known"
    if request.call.rows.known_q <= STEP_QUERIES:
        return f"a row has at most {STEP_QUERIES} queries, and may have a key more in the next call"
    own = FORWARD, _configure_forward(request)
    refused = sm90_wide.obstacle(request) or _slower(request, own, sm80.FORWARD)
    if refused is not None:
        return refused
    if request.is_paged("k"):
        page, block_kv = request.call.k.shape[-2], own[1].block_kv
        if tma_operands.page_rows(request, block_kv) < tma_operands.FEWEST_PAGE_ROWS:
            return f"pages of {page} and its tiles of {block_kv} keys do not fit"
    return tma_operands.obstacle(request, ("q", "k", "v"))


def _has_room(request: Request, tiles: Tiles) -> bool:
    return results_have_room(tiles, request.problem.d, request.problem.d_v)


FORWARD = KernelSpec(
    source="sm90/forward_sm90.cu",
    part="forward",
    computes="out and log-sum-exp",
    method="multiplies {dtype} by the tensor cores of warpgroups",
    heads=dict.fromkeys(HALVES, sm90_wide.LARGEST),
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    condition="by the model of cost it takes less time than `forward_sm80`, or rows are packed; "
    f"a row has more than {STEP_QUERIES} queries; TMA can load q, k and v",
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
            "bias": 64,
        },
        has_room=_has_room,
        bias=True,
    ),
    caches=True,
    ends_with_queries=True,
    lists="queries",
    deals=True,
    most_listed=2048,  # warpgroup_tile::GROUPS
    cost=_cost_of_forward,
)

# -- backward_sm90_dkdv ---------------------------------------------------------------------------

_MAPS_BYTES = 7 * tma.BYTES  # of q, k, v, do, dk and dv, and what aligns them


def _cost_of_dkdv(request: Request, tiles: Tiles) -> Cost | None:
    problem, rows = request.problem, request.problem.rows
    # No sequence's kernel may depend on the lengths of others that are packed with it.
    lengths = min(rows.known_q, cost.LONG), min(rows.known_k, cost.LONG)
    if lengths[1] > tiles.block_kv:  # packed; longer ones have the same kernel
        tiles = fit_rows(request, lengths[1])
    return dkdv_cost(tiles, problem.d, problem.d_v, *lengths)


def dkdv_slower(request: Request) -> str | None:
    """Return None, or in words that backward_sm80_dkdv takes less time."""
    tiles = fit_rows(request, request.problem.rows.known_k)
    return _slower(request, (DKDV, tiles), sm80.DKDV)


def _dkdv_obstacle(request: Request) -> str | None:
    if request.call is None:
        return "its arrays are not known"
    slower = dkdv_slower(request)
    if slower is not None:
        return slower
    if request.params_bytes + _MAPS_BYTES > params.MAX_BYTES:
        return "its mask and scores read too many arrays or numbers"
    return tma_operands.obstacle(request, ("q", "k", "v", "d_out"))


def _configure_dkdv(request: Request) -> Tiles:
    problem = request.problem
    len_q, len_k = (int(np.max(x, initial=0)) for x in (problem.len_q, problem.len_k))
    usual = fit_rows(request, len_k)
    with_bias = bias_tiles.beside_queries(request, usual)
    return with_bias or choose_dkdv(usual, problem.d, problem.d_v, len_q, len_k)


def _dkdv_rows(tiles: Tiles) -> dict[str, int]:
    # a tile's queries; a consumer's keys; a warp's rows
    rows = {"q": tiles.block_q, "k": 64, "v": 64, "d_out": tiles.block_q, "dk": 16, "dv": 16}
    return {**rows, "bias": tiles.block_q}


DKDV = KernelSpec(
    source="sm90/backward_sm90_dkdv.cu",
    part="dkdv",
    computes="dk and dv",
    method="multiplies {dtype} by the tensor cores of warpgroups",
    heads=dict.fromkeys(HALVES, max(DKDV_TILES)),
    capability=CAPABILITY,
    architecture=ARCHITECTURE,
    tensor_cores=True,
    condition="by the model of cost it takes less time than `backward_sm80_dkdv`; TMA can load q, "
    "k, v and do",
    obstacle=_dkdv_obstacle,
    configure=_configure_dkdv,
    grid=grid.counted_by_keys,
    tma=TmaOperands(("q", "k", "v", "d_out"), ("dk", "dv"), _dkdv_rows, bias=True),
    slope=True,
    atomic_dq=HALVES,
    whole_dq=True,
    packed_dq=True,
    parts=True,
    lists="keys",
    stores_single=True,
    deals=True,
    overlaps=True,
    cost=_cost_of_dkdv,
)
