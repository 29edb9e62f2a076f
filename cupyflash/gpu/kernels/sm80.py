"""The kernels for tensor cores since compute capability 8.0: tiles, shared memory, specs.

The formulas are those of kernels_cu/warp/fragment_rows.cuh; every kernel asserts that it agrees
with this module about the bytes. `sm80_f64` has the backward of float64,
`sm80_tangent` forward mode, and `sm80_reduce` sums of weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from . import bias_tiles, cost, decode, grid
from .cost import Cost, Rates
from .spec import RESERVED, WARP_ROWS, KernelSpec, Request, Tiles, at_head, row_bytes

CAPABILITY = (8, 0)  # the oldest with matrix instructions for these types
ADDS_FOUR = (9, 0)  # the oldest capability with an atomic addition of four numbers
LARGEST_OF_WARP = 256  # largest head for whose rows a warp has the registers
LATE_QUERIES = 64  # of a tile of wide heads whose dq is multiplied during the next one

# Bytes of an element -> largest head -> what fits, the best first: queries and keys of a tile,
# warps, stages for keys and values, and blocks that share an SM's registers.
FORWARD_TILES: dict[int, dict[int, tuple[tuple[int, int, int, int, int], ...]]] = {
    2: {
        64: ((128, 128, 4, 2, 2),),
        128: ((128, 64, 4, 2, 2),),
        256: ((64, 64, 4, 2, 2), (64, 32, 4, 2, 1)),
        512: ((64, 64, 8, 2, 1), (64, 32, 8, 2, 1), (32, 32, 4, 2, 1)),
    },
    4: {
        64: ((128, 32, 4, 2, 2),),
        128: ((128, 64, 8, 2, 1), (128, 32, 8, 2, 1)),
        256: ((128, 32, 8, 2, 1), (128, 16, 8, 2, 1), (64, 16, 4, 2, 1)),
    },
    8: {
        64: ((128, 64, 8, 2, 1), (128, 32, 8, 2, 1)),
        128: ((128, 32, 8, 2, 1), (128, 16, 8, 2, 1), (64, 16, 4, 2, 1)),
    },
}
# Kernel -> largest head -> the same; stages of the operand that is streamed.
BACKWARD_TILES: dict[str, dict[int, tuple[tuple[int, int, int, int, int], ...]]] = {
    "backward_sm80_dkdv": {
        64: (
            (64, 128, 4, 2, 2),
            (128, 128, 8, 2, 1),
            (64, 128, 8, 2, 1),
            (64, 64, 4, 2, 1),
        ),
        128: ((64, 128, 8, 2, 1), (32, 64, 4, 2, 1)),
        256: ((64, 64, 8, 2, 1), (64, 64, 8, 1, 1), (32, 32, 4, 1, 1)),
        512: ((64, 32, 8, 2, 1), (64, 32, 8, 1, 1), (32, 32, 8, 1, 1), (32, 16, 4, 1, 1)),
    },
    "backward_sm80_dq": {
        64: ((128, 64, 4, 2, 2),),
        128: ((128, 32, 4, 2, 2), (64, 32, 4, 2, 2)),
        256: ((128, 32, 8, 2, 1), (64, 32, 4, 2, 1), (64, 16, 4, 1, 1)),
        512: ((64, 32, 8, 2, 1), (64, 32, 8, 1, 1), (32, 32, 8, 1, 1), (32, 16, 4, 1, 1)),
    },
    "backward_sm80_bias": {
        128: ((128, 64, 4, 1, 2),),
        256: ((64, 64, 4, 1, 1), (64, 32, 4, 1, 1)),
        512: ((64, 64, 8, 1, 1), (64, 32, 4, 1, 1), (32, 32, 2, 1, 1), (16, 32, 2, 1, 1)),
    },
}
# Largest head -> the same of backward_sm80_dkdv.cu, for so few keys.
FEW_KEYS_DKDV: dict[int, tuple[int, int, int, int, int]] = {
    32: (64, 64, 4, 2, 3),
    64: (64, 64, 4, 2, 2),
}
# Of backward_sm80_bias.cu, for so few queries in heads up to 64: three blocks share an SM.
FEW_QUERIES_BIAS, SMALL_BIAS_HEAD = (64, 64, 4, 1, 3), 64
# What a block keeps of the batch entry and the head whose operand is streamed, and barriers.
ENTRY_BYTES, HEAD_BYTES, STREAM_BYTES, BIAS_BYTES = 72, 192, 136, 672


def forward_bytes(
    block_q: int, block_kv: int, warps: int, stages: int, d: int, d_v: int, itemsize: int
) -> int:
    """Bytes of forward_sm80.cu: queries or the output, the stages, and little."""
    rows = block_q + stages * block_kv
    sharers = row_sharers(block_q, block_kv, warps)
    exchanged = block_q * (weights_row(block_kv) + 4 * sharers) if sharers > 1 else 0
    return rows * row_bytes(max(d, d_v), itemsize) + exchanged + ENTRY_BYTES + 8 * warps


def row_sharers(block_q: int, block_kv: int, warps: int) -> int:
    """Return how many warps have the same rows where a block has fewer than 16 for each warp.

    These are 32 rows if each warp still has 16 keys of a tile, and else 16.
    """
    if block_q >= WARP_ROWS * warps:
        return 1
    least = WARP_ROWS * warps // block_q
    return 2 * least if block_kv >= 2 * WARP_ROWS * least else least


def weights_row(block_kv: int) -> int:
    """Bytes of a row of weights in shared memory, of rows that warps share."""
    return 64 if block_kv <= 32 else row_bytes(block_kv)


def dkdv_bytes(block_q: int, block_kv: int, warps: int, stages: int, d: int, d_v: int) -> int:
    """Bytes of backward_sm80_dkdv.cu: keys, values, P, dS, stages, lse and delta, and little."""
    columns = row_bytes(d) + row_bytes(d_v)
    wide = max(d, d_v) > LARGEST_OF_WARP
    weights = weights_row(block_q) if wide else row_bytes(block_q)
    tiles = 3 if wide and block_q >= LATE_QUERIES else 2  # P, dS and the dS of the tile before
    held = block_kv * (columns + tiles * weights) + 8 * block_q + 4 * warps + 8 * warps + HEAD_BYTES
    return held + stages * block_q * columns


def dq_bytes(block_q: int, block_kv: int, warps: int, stages: int, d: int, d_v: int) -> int:
    """Bytes of backward_sm80_dq.cu: queries, do, lse and delta, shared dS, stages."""
    columns = row_bytes(d) + row_bytes(d_v)
    sharers = row_sharers(block_q, block_kv, warps)
    exchanged = block_q * weights_row(block_kv) + 4 * warps if sharers > 1 else 0
    held = block_q * (columns + 8) + exchanged + 8 * warps + STREAM_BYTES
    return held + stages * block_kv * columns


def bias_bytes(block_q: int, block_kv: int, warps: int, stages: int, d: int, d_v: int) -> int:
    """Bytes of backward_sm80_bias.cu: operands of one tile, lse and delta of two, and little."""
    columns = row_bytes(d) + row_bytes(d_v)
    return stages * (block_q + block_kv) * columns + bias_storage_bytes(block_q, warps)


def bias_storage_bytes(block_q: int, warps: int) -> int:
    """Bytes of what a block of fragment_bias.cuh keeps beside operands."""
    return 16 * block_q + 8 * warps + BIAS_BYTES


BACKWARD_BYTES: dict[str, Callable[[int, int, int, int, int, int], int]] = {
    "backward_sm80_dkdv": dkdv_bytes,
    "backward_sm80_dq": dq_bytes,
    "backward_sm80_bias": bias_bytes,
}


def fit_forward(d: int, d_v: int, limit: int, itemsize: int = 2) -> Tiles | None:
    """Return the best tiles of forward_sm80.cu that fit into `limit` bytes, or None.

    Parameters
    ----------
    d, d_v : int
        Head sizes; there must be tiles for them.
    limit : int
        Bytes of shared memory that a block may have.
    itemsize : int
        Bytes of an element.
    """
    for block_q, block_kv, warps, stages, resident in at_head(FORWARD_TILES[itemsize], d, d_v):
        tiles = forward_tiles(block_q, block_kv, warps, stages, d, d_v, itemsize, resident)
        if tiles.shared_memory <= limit:
            return tiles
    return None


def forward_tiles(
    block_q: int,
    block_kv: int,
    warps: int,
    stages: int,
    d: int,
    d_v: int,
    itemsize: int,
    resident: int = 1,
) -> Tiles:
    """Return tiles of forward_sm80.cu."""
    shared = forward_bytes(block_q, block_kv, warps, stages, d, d_v, itemsize)
    sharers = row_sharers(block_q, block_kv, warps)
    return Tiles(block_q, block_kv, 32 * warps, shared, resident, stages, row_sharers=sharers)


def fit_backward(kernel: str, d: int, d_v: int, limit: int) -> Tiles | None:
    """Return the best tiles of a kernel of the backward, as `fit_forward` does.

    Tiles with which several blocks fit on an SM come first.
    """
    fitting = []
    for block_q, block_kv, warps, stages, resident in at_head(BACKWARD_TILES[kernel], d, d_v):
        tiles = backward_tiles(kernel, block_q, block_kv, warps, stages, d, d_v, resident)
        if tiles.share_memory(limit):
            return tiles
        if tiles.shared_memory <= limit:
            fitting.append(tiles)
    return fitting[0] if fitting else None


def backward_tiles(
    kernel: str,
    block_q: int,
    block_kv: int,
    warps: int,
    stages: int,
    d: int,
    d_v: int,
    resident: int = 1,
) -> Tiles:
    """Return tiles of a kernel of the backward."""
    shared = BACKWARD_BYTES[kernel](block_q, block_kv, warps, stages, d, d_v)
    # Warps of the others share rows of a tile, but not in the way of `row_sharers`.
    sharers = row_sharers(block_q, block_kv, warps) if kernel == "backward_sm80_dq" else 1
    return Tiles(block_q, block_kv, 32 * warps, shared, resident, stages, row_sharers=sharers)


# What forward_sm80 takes in 16-bit types, and with a bias, whose loads wait for the L1 cache; and
# what backward_sm80_dkdv takes.
FORWARD_RATES = {
    False: Rates(2000.0, 0.0, 0.036, 0.00054),
    True: Rates(0.0, 0.0, 0.351, 0.0),
}
DKDV_RATES = Rates(3500.0, 0.0, 0.0, 0.00095)


def forward_cost(tiles: Tiles, d: int, d_v: int, has_bias: bool, len_q: int, len_k: int) -> Cost:
    """Return what the rows of a head take with tiles of forward_sm80.cu."""
    # Columns of v that fragments have in registers.
    products = -(-d // 16) * 16 + -(-d_v // 64) * 64
    block, moved = (tiles.block_q, tiles.block_kv), 2 * (d + d_v)
    return cost.of(FORWARD_RATES[has_bias], (len_q, len_k), block, products, (moved, moved))


def dkdv_cost(tiles: Tiles, d: int, d_v: int, len_q: int, len_k: int) -> Cost:
    """Return what the rows of a head take with tiles of backward_sm80_dkdv.cu."""
    whole, whole_v = (-(-n // 16) * 16 for n in (d, d_v))
    wide, wide_v = (-(-n // 64) * 64 for n in (d, d_v))
    products = whole + whole_v + 2 * wide + wide_v
    block = tiles.block_kv, tiles.block_q
    moved = 4 * (d + d_v), 2 * (d + d_v) + 8 * d
    return cost.of(DKDV_RATES, (len_k, len_q), block, products, moved)


# The rates are those of a GPU of compute capability 9.0, and of heads whose rows a warp has alone.
def _has_rates(request: Request) -> bool:
    problem = request.problem
    alone = max(problem.d, problem.d_v) <= LARGEST_OF_WARP
    return alone and request.device.capability == (9, 0)


def _cost_of_forward(request: Request, tiles: Tiles) -> Cost | None:
    call, problem = request.call, request.problem
    if call is None or problem.dtype.name not in HALVES or not _has_rates(request):
        return None
    lengths = min(call.rows.known_q, cost.LONG), min(call.rows.known_k, cost.LONG)
    return forward_cost(tiles, problem.d, problem.d_v, call.bias is not None, *lengths)


def _cost_of_dkdv(request: Request, tiles: Tiles) -> Cost | None:
    problem = request.problem
    if not _has_rates(request):
        return None
    lengths = min(problem.rows.known_q, cost.LONG), min(problem.rows.known_k, cost.LONG)
    return dkdv_cost(tiles, problem.d, problem.d_v, *lengths)


def _configure_forward(request: Request) -> Tiles | None:
    problem = request.problem
    limit = request.device.shared_memory
    return fit_forward(problem.d, problem.d_v, limit, problem.dtype.itemsize)


def _configure_backward(kernel: str, request: Request) -> Tiles | None:
    problem = request.problem
    return fit_backward(kernel, problem.d, problem.d_v, request.device.shared_memory)


def _configure_dkdv(request: Request) -> Tiles | None:
    problem, limit = request.problem, request.device.shared_memory
    # No sequence's result may depend on the lengths of others that are packed with it.
    keys = int(np.max(problem.len_k, initial=0))
    if max(problem.d, problem.d_v) <= max(FEW_KEYS_DKDV) and not problem.rows.adjoin:
        block_q, block_kv, warps, stages, resident = at_head(FEW_KEYS_DKDV, problem.d, problem.d_v)
        shared = dkdv_bytes(block_q, block_kv, warps, stages, problem.d, problem.d_v)
        if keys <= block_kv and (shared + RESERVED) * resident <= limit + RESERVED:
            return Tiles(block_q, block_kv, 32 * warps, shared, resident, stages)
    return _configure_backward("backward_sm80_dkdv", request)


def _configure_bias(request: Request) -> Tiles | None:
    usual = _fit_bias(request)
    return usual and (bias_tiles.in_block(request, usual) or usual)


def _fit_bias(request: Request) -> Tiles | None:
    problem, limit = request.problem, request.device.shared_memory
    block_q, block_kv, warps, stages, resident = FEW_QUERIES_BIAS
    sizes = block_q, block_kv, warps, stages, problem.d, problem.d_v
    tiles = backward_tiles("backward_sm80_bias", *sizes, resident)
    # No sequence's result may depend on the lengths of others that are packed with it.
    few = not problem.rows.adjoin and int(np.max(problem.len_q, initial=0)) <= block_q
    if few and max(problem.d, problem.d_v) <= SMALL_BIAS_HEAD and tiles.share_memory(limit):
        return tiles
    return _configure_backward("backward_sm80_bias", request)


# Warps and stages of decode_sm80.cu, the most bytes in flight first, and those of a small block.
DECODE_WARPS, SMALL_DECODE = ((8, 3), (6, 3), (4, 3), (4, 2), (2, 2)), (decode.FEW_WARPS, 3)
DECODE_ROWS, DECODE_STAGE = 16, 8192
MOST_IN_REGISTERS = 128  # columns of values of which a warp has a node in registers


def decode_bytes(warps: int, stages: int, d: int, _: int) -> int:
    """Bytes of decode_sm80.cu: the tasks of all warps, and each warp's stages and queries."""
    tasks = 2 * decode.TASK_BYTES * warps
    queries = DECODE_ROWS * row_bytes(d)
    return -(-tasks // 128) * 128 + warps * (queries + stages * DECODE_STAGE)


def decode_tiles(request: Request, few: bool, codes: bool) -> Tiles | None:
    """Return the tiles of decode_sm80.cu, for a cache with `few` leaves or many, maybe of codes.

    Where grids overlap, an SM has two blocks of many leaves: they end at different times, and so
    does what its memory idles at their ends. Codes take more instructions, and are faster in one
    larger block. Beside a block of few leaves an SM has room for one of the grid that joins, but
    not for another one of these: two that copy so few keys at the same time are slower, by 1 us on
    an H100.
    """
    limit, sizes = request.device.shared_memory, (request.problem.d, request.problem.d_v)
    half = (limit + RESERVED) // 2 - RESERVED  # each of two blocks has no more
    warps, stages = SMALL_DECODE
    small = decode_bytes(warps, stages, *sizes)
    has_halves = request.device.capability >= decode.OVERLAPS and not few and not codes
    if has_halves and small <= half:
        return Tiles(DECODE_ROWS, decode.LEAF, 32 * warps, small, 2, stages, beside=True)
    if few and small <= limit:
        alone = max(small, half + 128)
        return Tiles(DECODE_ROWS, decode.LEAF, 32 * warps, alone, 1, stages, beside=True)
    for warps, stages in DECODE_WARPS:
        shared = decode_bytes(warps, stages, *sizes)
        if shared <= limit:
            return Tiles(DECODE_ROWS, decode.LEAF, 32 * warps, shared, 1, stages)
    return None


def whole_tiles(request: Request) -> Tiles | None:
    """Return the tiles of decode_sm80.cu for whole tasks, if a block has room for their leaves."""
    problem, device = request.problem, request.device
    warps, limit = decode.WHOLE_WARPS, device.shared_memory
    row = decode.row_bytes(problem.d_v, problem.accumulator.itemsize)
    leaves = decode.most_leaves(problem)
    group = problem.heads // problem.heads_kv if problem.heads_kv else 1
    held = leaves * row * decode.most_rows(group, DECODE_ROWS, problem.rows.known_q)
    for stages in (3, 2):
        own = DECODE_ROWS * row_bytes(problem.d) + stages * DECODE_STAGE
        shared = decode_bytes(warps, stages, problem.d, problem.d_v)
        if DECODE_ROWS * row > own or shared > limit:
            continue
        if leaves > warps:  # all of them lie behind the stages, in as much room as there may be
            shared = min(limit, shared + warps * DECODE_STAGE - 128)
            if held > shared - decode_bytes(warps, stages, problem.d, problem.d_v):
                continue
        return Tiles(
            DECODE_ROWS, decode.LEAF, 32 * warps, shared, 1, stages,
            beside=device.capability >= decode.OVERLAPS, whole=True,
        )  # fmt: skip
    return None


def nodes_tiles(request: Request, of_task: int) -> Tiles | None:
    """Return the tiles of decode_sm80.cu for tasks of so many warps, which have a node each."""
    problem = request.problem
    resident = 1 if of_task == decode.WHOLE_WARPS else 2
    warps = decode.WHOLE_WARPS // resident
    tiles = Tiles(
        DECODE_ROWS, decode.LEAF, 32 * warps, decode_bytes(warps, 3, problem.d, problem.d_v),
        resident, 3, beside=True, whole=True, whole_tasks=warps // of_task,
    )  # fmt: skip
    fits = problem.d_v <= MOST_IN_REGISTERS and tiles.share_memory(request.device.shared_memory)
    return tiles if fits else None


def _configure_decode(request: Request) -> Tiles | None:
    problem = request.problem
    of_task = decode.warps_of_tasks(problem, DECODE_ROWS, request.device)
    if of_task and not request.has_codes:
        tiles = nodes_tiles(request, of_task)
        if tiles is not None:
            return tiles
    row = (problem.d + problem.d_v) * problem.dtype.itemsize  # also of codes, which take more work
    if decode.are_whole(problem, DECODE_ROWS, request.device, row):
        tiles = whole_tiles(request)
        if tiles is not None:
            return tiles
    few = decode.has_few_leaves(request.problem, DECODE_ROWS, request.device)
    return decode_tiles(request, few, request.has_codes)


def shared_bytes(warps: int, stages: int, d: int) -> int:
    """Bytes of decode_sm80_shared.cu: each warp's stages and queries."""
    return warps * (DECODE_ROWS * row_bytes(d) + stages * DECODE_STAGE)


def _configure_shared(request: Request) -> Tiles | None:
    d, limit = request.problem.d, request.device.shared_memory
    for warps, stages in DECODE_WARPS:
        shared = shared_bytes(warps, stages, d)
        if shared <= limit:
            return Tiles(DECODE_ROWS, decode.LEAF, 32 * warps, shared, 1, stages)
    return None


METHOD = "multiplies {dtype} by tensor cores{products}, and sums in {accumulator}"
HALVES = ("float16", "bfloat16")
_HEADS = dict.fromkeys(HALVES, 512)
_OF_CACHE = dict.fromkeys(HALVES, 256)

FORWARD = KernelSpec(
    source="sm80/forward_sm80.cu",
    part="forward",
    computes="out and log-sum-exp",
    method=METHOD,
    heads=_HEADS | {"float32": 256, "float64": 128},
    precisions={"float32": "tf32x3"},
    capability=CAPABILITY,
    tensor_cores=True,
    configure=_configure_forward,
    grid=grid.by_queries,
    caches=True,
    cost=_cost_of_forward,
    lists="queries",
)
DKDV = KernelSpec(
    source="sm80/backward_sm80_dkdv.cu",
    part="dkdv",
    computes="dk and dv",
    method=METHOD,
    heads=_HEADS,
    capability=CAPABILITY,
    tensor_cores=True,
    configure=_configure_dkdv,
    grid=grid.by_keys,
    slope=True,
    atomic_dq=HALVES,
    whole_dq=True,
    parts=True,
    adjacent_dq=ADDS_FOUR,
    cost=_cost_of_dkdv,
    lists="keys",
    overlaps=True,
)
DQ = KernelSpec(
    source="sm80/backward_sm80_dq.cu",
    part="dq",
    computes="dq",
    method=METHOD,
    heads=_HEADS,
    capability=CAPABILITY,
    tensor_cores=True,
    configure=functools.partial(_configure_backward, "backward_sm80_dq"),
    grid=grid.by_queries,
    slope=True,
    lists="queries",
)
BIAS = KernelSpec(
    source="sm80/backward_sm80_bias.cu",
    part="bias",
    computes="dbias",
    method=METHOD,
    heads=_HEADS,
    capability=CAPABILITY,
    tensor_cores=True,
    configure=_configure_bias,
    grid=grid.by_tiles,
)
DECODE = KernelSpec(
    source="sm80/decode_sm80.cu",
    part="decode",
    computes="out and log-sum-exp of few queries and many keys",
    method=METHOD,
    heads=_OF_CACHE,
    capability=CAPABILITY,
    tensor_cores=True,
    configure=_configure_decode,
    grid=grid.by_units,
    caches=True,
    page_rows=16,
    codes=True,
    aligned=True,
    overlaps=True,
)
SHARED = KernelSpec(
    source="sm80/decode_sm80_shared.cu",
    part="shared",
    computes="sums over keys that the entries of a cache share",
    method=METHOD,
    heads=_OF_CACHE,
    capability=CAPABILITY,
    tensor_cores=True,
    condition="`shared=` is so large that it saves time; `decode_sm80` computes the other keys",
    configure=_configure_shared,
    grid=grid.by_units,
    caches=True,
    codes=True,
    aligned=True,
    overlaps=True,
    beside=DECODE.name,
)
