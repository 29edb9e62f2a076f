"""The portable kernels: their tiles, the registers of these, and their specs.

`simt_memory` has the shared memory of tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ...arrays.dtypes import FLOATS
from . import decode, grid
from . import simt_memory as memory
from .simt_memory import NARROW, Shape, round_up
from .spec import REGISTERS, RESERVED, KernelSpec, Request, Tiles

LARGEST_HEAD = 512
ANY_HEAD = 2**31 - 1
LIST_THREADS, ORDER_THREADS, SINGLE_THREADS = 128, 1024, 32
ORDERED_AT_ONCE = 4096  # rows whose costs are in shared memory
ANY_TILE = 64, 64
STAGES = 2  # the two buffers of `Shape.stage`

# Kernel -> (its shared elements, whether its block's rows are keys, columns of its results).
KERNELS: dict[str, tuple[Callable[[Shape, int, int, int], int], bool, Callable[[Shape], int]]] = {
    "forward_simt": (memory.forward_simt, False, lambda x: x.padded_columns(x.d_v)),
    "backward_simt_dkdv": (
        memory.backward_simt_dkdv,
        True,
        lambda x: x.padded_columns(x.d) + x.padded_columns(x.d_v),
    ),
    "backward_simt_dq": (memory.backward_simt_dq, False, lambda x: x.padded_columns(x.d)),
    # A few registers for sums, without which the largest tile would get too few to hold its scores.
    "backward_bias": (memory.backward_bias, False, lambda x: 8),
    # Two results, and two tiles of scores, of which one has 64 keys at most.
    "forward_simt_tangent": (
        memory.forward_simt_tangent,
        False,
        lambda x: 2 * x.padded_columns(x.d_v) + 64,
    ),
    "backward_lookup": (memory.backward_bias, False, lambda x: 0),
    # Two tiles of scores, too.
    "backward_simt_tangent_dkdv": (
        memory.backward_simt_tangent_dkdv,
        True,
        lambda x: x.padded_columns(x.d) + x.padded_columns(x.d_v) + 64,
    ),
    "backward_simt_tangent_dq": (
        memory.backward_simt_tangent_dq,
        False,
        lambda x: x.padded_columns(x.d) + 64,
    ),
    # Three tiles; with rows of more than 32 keys, those of float64 would spill.
    "backward_tangent_bias": (memory.backward_tangent_bias, False, lambda x: 272),
    "reduce_keys": (memory.reduce_keys, False, lambda x: 0),
    "reduce_blocks": (memory.reduce_blocks, True, lambda x: 0),
    "reduce_distance": (memory.reduce_distance, False, lambda x: 0),
}

# Kernels with less memory, where there is no room for their best.
LEAN: dict[str, Callable[[Shape, int, int, int], int]] = {
    "backward_simt_tangent_dkdv": memory.lean_dkdv,
    "backward_simt_tangent_dq": memory.lean_dq,
}
# Kernel, bytes of the accumulator's type -> rows of a block's results, rows that are streamed at a
# time, threads, and the largest head for this; the best first.
BEST: dict[tuple[str, int], tuple[tuple[int, int, int, int], ...]] = {
    ("forward_simt", 4): ((128, 64, 128, NARROW), (64, 128, 128, 512), (64, 64, 128, 512)),
    ("forward_simt_tangent", 4): ((64, 64, 128, 512), (64, 48, 128, 512)),
    ("backward_simt_dkdv", 4): (
        (128, 64, 128, NARROW),
        (64, 128, 128, 512),
        (128, 64, 256, 512),
        (64, 64, 128, 512),
    ),
    ("backward_simt_dq", 4): (
        (128, 64, 128, NARROW),
        (64, 64, 128, 64),
        (128, 64, 256, 512),
        (64, 64, 128, 512),
    ),
    ("backward_bias", 4): ((128, 64, 128, NARROW), (64, 32, 128, NARROW), (64, 64, 256, 512)),
    ("backward_bias", 8): ((64, 64, 256, 512),),
    ("backward_lookup", 4): ((128, 64, 256, 512), (64, 64, 256, 512)),
    ("backward_lookup", 8): ((64, 64, 256, 512),),
    ("backward_simt_tangent_dkdv", 4): ((64, 64, 256, 512), (64, 64, 128, 512)),
    ("backward_simt_tangent_dq", 4): ((64, 64, 256, 512), (64, 64, 128, 512)),
    ("backward_tangent_bias", 4): ((64, 64, 256, 512),),
    ("reduce_keys", 4): ((64, 128, 128, 512), (64, 64, 128, 512)),
    ("reduce_blocks", 4): ((64, 128, 128, 512), (64, 64, 128, 512)),
}
# After these, for every kernel: smaller tiles, for larger heads and elements or less memory.
SMALLER: tuple[tuple[int, int, int, int], ...] = (
    (32, 64, 128, 512),
    (64, 64, 256, 512),
    (32, 32, 128, 512),
    (16, 64, 128, 512),
    (16, 32, 128, 512),
    (8, 32, 128, 512),
    (4, 32, 128, 512),
)
# Registers for a thread's part of the block's results and of a tile: with more, it would spill;
# with few, it needs at most FEW_REGISTERS in total, so that more blocks run at a time.
MOST_NUMBERS, FEW_NUMBERS = 160, 64
MOST_OF_KERNEL = {"forward_simt_tangent": 184}  # instead of the former
MOST_REGISTERS, FEW_REGISTERS = 255, 168
FEWEST_THREADS = 256  # threads that an SM needs, in one block or several, to be busy


@functools.lru_cache(maxsize=1024)
def fit(
    kernel: str,
    itemsize: int,
    stored: int,
    d: int,
    d_v: int,
    spare: int,
    limit: int,
    blocks: tuple[int, int] | None = None,
) -> Tiles | None:
    """Return the best tiles of a kernel that fit into `limit` bytes of shared memory, or None.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    itemsize, stored : int
        Bytes of the accumulator's and of the storage type.
    d, d_v : int
        Head sizes.
    spare : int
        Tiles in addition to the first: one for dropout, one for slopes.
    limit : int
        Bytes of shared memory that a block may have.
    blocks : tuple of int, optional
        Queries and keys of a tile, instead of the best ones.
    """
    elements, keys_are_rows, columns_of = KERNELS[kernel]
    candidates = BEST.get((kernel, itemsize), ()) + SMALLER
    if blocks is not None:
        rows, columns = reversed(blocks) if keys_are_rows else blocks
        candidates = tuple((rows, columns, threads, 512) for threads in (256, 128, 64))
    both = elements in memory.BOTH_STREAMED
    stages = None if both else STAGES
    tries = [(each, x) for each in (elements, LEAN.get(kernel)) if each for x in candidates]
    most = MOST_OF_KERNEL.get(kernel, MOST_NUMBERS)
    found: list[Tiles] = []
    for elements, (rows, columns, threads, largest) in tries:
        shape = Shape(itemsize, stored, d, d_v, threads)
        if max(d, d_v) > largest or rows % shape.row_threads or columns % shape.column_threads:
            continue
        numbers = rows // shape.row_threads * (columns + columns_of(shape)) // shape.column_threads
        numbers = numbers * itemsize // 4
        block_q, block_kv = (columns, rows) if keys_are_rows else (rows, columns)
        shared = elements(shape, block_q, block_kv, spare) * itemsize
        if numbers > most or block_kv % 4 or shared > limit:
            continue
        if found and elements is LEAN.get(kernel):
            break
        registers = FEW_REGISTERS if numbers <= FEW_NUMBERS else MOST_REGISTERS
        room = (limit + RESERVED) // (shared + RESERVED), REGISTERS // (threads * registers)
        found.append(Tiles(block_q, block_kv, threads, shared, min(room), stages))
    busy = (x for x in found if x.resident_blocks * x.threads >= FEWEST_THREADS)
    return next(busy, found[0] if found else None)


def _configure(kernel: str, slope: bool, request: Request) -> Tiles | None:
    """Return the tiles of a kernel; `slope` says whether it keeps derivatives of scores."""
    problem = request.problem
    spare = int(slope and request.slope) + int(problem.dropout > 0)
    sizes = (problem.accumulator.itemsize, problem.dtype.itemsize, problem.d, problem.d_v)
    return fit(kernel, *sizes, spare, request.device.shared_memory, request.blocks)


DECODE_ROWS = 4
LARGEST_HEAD_OF_CACHE = 576  # compressed keys, with their rotated columns


def decode_bytes(warps: int, d: int, itemsize: int) -> int:
    """Bytes of decode_simt.cu: each warp's tasks, queries and weights, and the schedule."""
    own = 2 * decode.TASK_BYTES + DECODE_ROWS * (d + decode.LEAF) * itemsize
    return round_up(warps * own + decode.schedule_bytes(warps), 8)


def _configure_decode(request: Request) -> Tiles | None:
    problem = request.problem
    itemsize = problem.accumulator.itemsize
    # A leaf's results take the place of a warp's queries and weights.
    has_room = decode.row_bytes(problem.d_v, itemsize) <= (problem.d + decode.LEAF) * itemsize
    whole = has_room and decode.most_leaves(problem) <= decode.WHOLE_WARPS
    whole = whole and decode.are_whole(problem, DECODE_ROWS, request.device, 0)
    for warps in (8, 4, 2, 1):
        shared = decode_bytes(warps, problem.d, itemsize)
        if shared <= request.device.shared_memory:
            whole = whole and warps == decode.WHOLE_WARPS
            return Tiles(DECODE_ROWS, decode.LEAF, 32 * warps, shared, whole=whole)
    return None


_HEADS = dict.fromkeys(FLOATS, LARGEST_HEAD)
_METHOD = "runs the portable kernel in {accumulator}"


def _configure_lists(request: Request) -> Tiles | None:
    """Return the tiles of the kernel that reads the lists, if it is known."""
    return Tiles(*(request.blocks or ANY_TILE), threads=LIST_THREADS, shared_memory=0)


def _configure_singles(request: Request) -> Tiles | None:
    return Tiles(*(request.blocks or ANY_TILE), SINGLE_THREADS, shared_memory=0)


def _configure_order(request: Request) -> Tiles | None:
    return Tiles(*(request.blocks or ANY_TILE), ORDER_THREADS, 4 * ORDERED_AT_ONCE)


FORWARD = KernelSpec(
    source="simt/forward_simt.cu",
    part="forward",
    computes="out and log-sum-exp",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "forward_simt", False),
    grid=grid.by_queries,
    lists="queries",
)
TANGENTS = KernelSpec(
    source="simt/forward_simt_tangent.cu",
    part="tangents",
    computes="out, log-sum-exp and their tangents",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "forward_simt_tangent", False),
    grid=grid.by_queries,
    slope=True,
)
DKDV = KernelSpec(
    source="simt/backward_simt_dkdv.cu",
    part="dkdv",
    computes="dk and dv",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "backward_simt_dkdv", True),
    grid=grid.by_keys,
    slope=True,
    atomic_dq=("float32",),
    lists="keys",
)
DQ = KernelSpec(
    source="simt/backward_simt_dq.cu",
    part="dq",
    computes="dq",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "backward_simt_dq", True),
    grid=grid.by_queries,
    slope=True,
    lists="queries",
)
BIAS = KernelSpec(
    source="simt/backward_bias.cu",
    part="bias",
    computes="dbias",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "backward_bias", False),
    grid=grid.by_tiles,
)
LOOKUP = KernelSpec(
    source="simt/backward_lookup.cu",
    part="lookup",
    computes="the gradient of a learned look-up",
    method=_METHOD,
    heads=_HEADS,
    chooses_tiles=True,
    configure=functools.partial(_configure, "backward_lookup", True),
    grid=grid.by_tiles,
    slope=True,
)
LIST_TILES = KernelSpec(
    source="simt/list_tiles.cu",
    part="lists",
    computes="which tiles the mask leaves",
    method="compares in integers and float32",
    heads=dict.fromkeys(FLOATS, ANY_HEAD),  # it is compiled for one of them
    condition="tiles of a mask are listed once for the heads that share it",
    chooses_tiles=True,
    configure=_configure_lists,
    grid=grid.by_warps,
    sizes=(),
    operands=(),
    overlaps=True,
)
ORDER_TILES = KernelSpec(
    source="simt/order_tiles.cu",
    part="order",
    computes="which blocks of queries or keys take longest",
    method="counts tiles in integers",
    heads=dict.fromkeys(FLOATS, ANY_HEAD),
    condition="work tiles are dealt by their cost, and tiles of a mask are listed",
    chooses_tiles=True,
    configure=_configure_order,
    grid=grid.by_blocks,
    sizes=(),
    operands=(),
    overlaps=True,
)
SINGLE_TILES = KernelSpec(
    source="simt/single_tiles.cu",
    part="singles",
    computes="which tiles of queries one block of keys alone sees",
    method="reads the lists",
    heads=dict.fromkeys(FLOATS, ANY_HEAD),
    condition="dq of such tiles is stored, and the others' is summed in memory",
    chooses_tiles=True,
    configure=_configure_singles,
    grid=grid.by_blocks,
    scores=False,
    sizes=(),
    operands=(),
    overlaps=True,
)
DECODE = KernelSpec(
    source="simt/decode_simt.cu",
    part="decode",
    computes="out and log-sum-exp of few queries and many keys",
    method=_METHOD,
    heads=dict.fromkeys(FLOATS, LARGEST_HEAD_OF_CACHE),
    configure=_configure_decode,
    grid=grid.by_units,
    caches=True,
    codes=True,
    overlaps=True,
)
