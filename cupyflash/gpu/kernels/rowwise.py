"""The kernels that work on rows, the same for all hardware: their specs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...arrays.dtypes import FLOATS
from . import decode, grid
from .simt import ANY_HEAD, LARGEST_HEAD, LARGEST_HEAD_OF_CACHE
from .sm80 import CAPABILITY, DECODE_ROWS, HALVES
from .spec import KernelSpec, Request, Tiles

ROWS = Tiles(block_q=0, block_kv=0, threads=256, shared_memory=0)  # a warp works on one row
TRANSFORMED = 4096  # elements that a block of hadamard transforms, and columns of a row at most
RESULTS = Tiles(block_q=128, block_kv=0, threads=256, shared_memory=0)  # block_q rows of results
ENTRIES = Tiles(block_q=256, block_kv=0, threads=256, shared_memory=0)  # block_q offsets
ALL_ENTRIES = Tiles(block_q=1024, block_kv=0, threads=1024, shared_memory=0)  # of one block
LISTED = Tiles(block_q=1024, block_kv=0, threads=1024, shared_memory=2 * 1024 * 12)  # sequences
# Threads of a block of backward_delta.cu. Each warp finds its arrays first, by some 500
# instructions, where two rows of a lane take 150: so few warps are best, if an SM has enough that
# wait for memory.
DELTA_THREADS, WAITING_THREADS = (64, 128), 512
# Rows of a block where blocks of as many rows as results have are few; there, sums of dq are small,
# and no tile of queries is marked whose dq needs none (`tile_lists.with_singles`).
FEW_ROWS = 32
SINK_THREADS = 512
COMBINE_ROWS = 4  # neighbouring rows of a warp of combine.cu
# Nodes of a row that decode_combine keeps at most, and their bytes; its blocks that share an SM.
NODES, SHARED_MEMORY, FEW_NODES, ROWS_OF_SM = 64, 48 << 10, 8, 6
BESIDE = 256  # threads of it that share an SM with a block of decode_sm80.cu of few warps
WIDE_THREADS = 1024, 512, 256  # of a block that has 8 rows in pieces, and no shared memory
SHARED_BY_MANY = 17 << 10  # bytes for a row of tasks with many rows, each of which has a block
SUMMED_BYTES = 16  # of neighbouring columns of parts that a thread sums
WARP_ROW = 512  # bytes of o that a warp folds at once
_METHOD = "sums in {accumulator}"
_HEADS = dict.fromkeys(FLOATS, LARGEST_HEAD)
_HEADS_OF_CACHE = dict.fromkeys(FLOATS, LARGEST_HEAD_OF_CACHE)


def _configure_delta(request: Request) -> Tiles:
    """Return tiles with few threads, if there are blocks enough. No bit depends on them.

    If there are too few, tiles have few rows: all that a block's threads load at a time, or a half.
    """
    problem = request.problem
    if problem.rows.adjoin:
        return RESULTS
    if _are_few(request):
        lanes = next((x for x in (4, 8, 16) if problem.d_v * problem.dtype.itemsize <= 16 * x), 32)
        return replace(RESULTS, block_q=max(FEW_ROWS, 2 * RESULTS.threads // lanes))
    blocks = -(-int(np.max(problem.len_q, initial=0)) // RESULTS.block_q)
    blocks *= problem.batch * problem.heads
    wanted = WAITING_THREADS * request.device.multiprocessors
    threads = (x for x in DELTA_THREADS if blocks * x >= wanted)
    return replace(RESULTS, threads=next(threads, RESULTS.threads))


def _are_few(request: Request) -> bool:
    """Return whether blocks of `RESULTS` have too few threads to wait for memory."""
    problem = request.problem
    blocks = -(-int(np.max(problem.len_q, initial=0)) // RESULTS.block_q)
    threads = blocks * problem.batch * problem.heads * RESULTS.threads
    return threads < WAITING_THREADS * request.device.multiprocessors


def _configure_dq_rows(request: Request) -> Tiles:
    """Return tiles of few rows if blocks are few. No bit depends on them."""
    if request.problem.rows.adjoin or not _are_few(request):
        return RESULTS
    return replace(RESULTS, block_q=FEW_ROWS)


def _configure_sink(request: Request) -> Tiles | None:
    shared = SINK_THREADS * request.problem.accumulator.itemsize
    return Tiles(block_q=0, block_kv=0, threads=SINK_THREADS, shared_memory=shared)


def _configure_decode_combine(request: Request) -> Tiles | None:
    """Return a large block for each of few rows, so that its warps fold all nodes at once.

    Blocks are as large as all rows may be and still be computed at the same time; of more rows than
    that, each has a warp, which is fast if a row is as wide as a warp. Rows in pieces are wide:
    then a block has some of these, and as many threads as an SM holds. No bit depends on it.
    """
    problem = request.problem
    assert request.blocks is not None  # the rows of a task are those of the decode kernel
    rows = problem.batch * problem.heads * int(np.max(problem.len_q, initial=0))
    row = decode.row_bytes(problem.d_v, problem.accumulator.itemsize, request.blocks[0])
    at_once = request.device.multiprocessors
    if rows > ROWS_OF_SM * at_once and problem.d_v * problem.accumulator.itemsize <= WARP_ROW:
        return Tiles(request.blocks[0], 0, 64, 2 * FEW_NODES * row)
    many = request.blocks[0] >= decode.ROWS_OF_BLOCK
    if many and rows > at_once:
        blocks = -(-rows // (grid.ROWS_OF_PIECES * at_once))  # of an SM
        threads = next((n for n in WIDE_THREADS if n * blocks <= 1024), WIDE_THREADS[-1])
        return Tiles(request.blocks[0], 0, threads, 0, 1024 // threads)
    nodes = min(NODES, (SHARED_BY_MANY if many else SHARED_MEMORY) // row)
    threads = 512 if rows <= at_once else 128
    small = request.blocks[0] == DECODE_ROWS
    beside = small and decode.has_few_leaves(problem, DECODE_ROWS, request.device)
    if beside:
        threads = min(threads, BESIDE)
    return Tiles(request.blocks[0], 0, threads, nodes * row, beside=beside)


def hadamard_tiles(columns: int, itemsize: int) -> Tiles:
    """Return a block of as many rows as have room.

    Their layout is in kernels_cu/rowwise/hadamard.cu: after every 64 elements are 8 that are
    unused, and after all of them words with the signs of 4 columns. `itemsize` is the
    accumulator's.
    """
    rows = max(1, TRANSFORMED // columns)
    last = rows * columns - 1
    elements = last + last // 64 * 8 + 1
    shared = elements * itemsize + (columns + 3) // 4 * 4
    return Tiles(block_q=rows, block_kv=0, threads=256, shared_memory=shared)


DELTA = KernelSpec(
    source="rowwise/backward_delta.cu",
    part="delta",
    computes="delta = rowsum(do * out)",
    method=_METHOD,
    heads=_HEADS,
    configure=_configure_delta,
    grid=grid.by_results,
    scores=False,
    sizes=("d_v",),
    operands=("d_out", "out", "dlse", "delta", "dq_accum"),
    overlaps=True,
)
SINK = KernelSpec(
    source="rowwise/backward_sink.cu",
    part="sink",
    computes="dsink",
    method=_METHOD,
    heads=_HEADS,
    configure=_configure_sink,
    grid=grid.by_heads,
    scores=False,
    sizes=("d_v",),
)
TANGENT_DELTA = KernelSpec(
    source="rowwise/backward_tangent_delta.cu",
    part="tangent_delta",
    computes="delta = rowsum(do * out) and its tangent",
    method=_METHOD,
    heads=_HEADS,
    configure=lambda request: RESULTS,
    grid=grid.by_results,
    scores=False,
    sizes=("d_v",),
)
TANGENT_SINK = KernelSpec(
    source="rowwise/backward_tangent_sink.cu",
    part="tangent_sink",
    computes="tangent of dsink",
    method=_METHOD,
    heads=_HEADS,
    configure=_configure_sink,
    grid=grid.by_heads,
    scores=False,
    sizes=("d_v",),
)
DQ_ROWS = KernelSpec(
    source="rowwise/backward_dq_rows.cu",
    part="dq_rows",
    computes="dq out of its sums",
    method=_METHOD,
    heads=dict.fromkeys(HALVES, LARGEST_HEAD),
    capability=CAPABILITY,
    condition="sums of dq were added to memory",
    configure=_configure_dq_rows,
    grid=grid.by_queries,
    scores=False,
    sizes=("d",),
    operands=("dq_accum", "dq"),
    overlaps=True,
)
SUMS = KernelSpec(
    source="rowwise/backward_sums.cu",
    part="sums",
    computes="gradients out of their parts",
    method=_METHOD,
    heads=dict.fromkeys(FLOATS, ANY_HEAD),
    condition="blocks computed parts of a gradient, or entries share k or v",
    configure=lambda request: ROWS,
    grid=grid.by_blocks,
    scores=False,
    sizes=(),
)
COMBINE = KernelSpec(
    source="rowwise/combine.cu",
    part="combine",
    computes="out and log-sum-exp of several",
    method=_METHOD,
    heads=_HEADS,
    configure=lambda request: ROWS,
    grid=grid.by_warps,
    scores=False,
    sizes=(),
)
DECODE_COMBINE = KernelSpec(
    source="rowwise/decode_combine.cu",
    part="join",
    computes="out and log-sum-exp of few queries out of pieces",
    method=_METHOD,
    heads=_HEADS_OF_CACHE,
    configure=_configure_decode_combine,
    grid=grid.by_rows_of_tasks,
    caches=True,
    codes=True,
    scores=False,
    sizes=("d_v",),
    overlaps=True,
)
APPEND = KernelSpec(
    source="rowwise/append.cu",
    part="append",
    computes="new keys and values in a cache",
    method="rotates in {accumulator}",
    heads=_HEADS_OF_CACHE,
    configure=lambda request: ROWS,
    grid=grid.by_warps,
    scores=False,
    sizes=(),
    overlaps=True,
)
ROPE = KernelSpec(
    source="rowwise/rope.cu",
    part="rope",
    computes="rows, rotated by their positions",
    method="rotates in {accumulator}",
    heads=_HEADS_OF_CACHE,
    configure=lambda request: ROWS,
    grid=grid.by_warps,
    scores=False,
    sizes=(),
)
QUANTIZE = KernelSpec(
    source="rowwise/quantize.cu",
    part="quantize",
    computes="codes of 8 and 4 bits, with their scales",
    method="rounds in {accumulator}",
    heads=dict.fromkeys(FLOATS, ANY_HEAD),
    configure=lambda request: ROWS,
    grid=grid.by_warps,
    scores=False,
    sizes=(),
)
DEQUANTIZE = KernelSpec(
    source="rowwise/dequantize.cu",
    part="dequantize",
    computes="numbers, from codes of float8 and their scales",
    method="multiplies in float32",
    heads=dict.fromkeys(FLOATS, ANY_HEAD),
    configure=lambda request: ROWS,
    grid=grid.by_warps,
    scores=False,
    sizes=(),
)
HADAMARD = KernelSpec(
    source="rowwise/hadamard.cu",
    part="hadamard",
    computes="rows, spread over their columns",
    method="sums in {accumulator}",
    heads=dict.fromkeys(FLOATS, TRANSFORMED),
    configure=lambda request: hadamard_tiles(
        request.problem.d, request.problem.accumulator.itemsize
    ),
    grid=grid.by_queries,
    scores=False,
    sizes=("d",),
)
CHECKSUM = KernelSpec(
    source="rowwise/checksum.cu",
    part="checksum",
    computes="sums that tell whether arrays have changed",
    method="sums in integers",
    heads=dict.fromkeys(FLOATS, ANY_HEAD),  # it is compiled for one of them
    configure=lambda request: ROWS,
    grid=grid.by_warps,
    scores=False,
    sizes=(),
)
OFFSETS = KernelSpec(
    source="rowwise/offsets.cu",
    part="offsets",
    computes="offsets as int64, and a report on wrong ones",
    method="compares integers",
    heads=dict.fromkeys(FLOATS, ANY_HEAD),  # it is compiled for one of them
    configure=lambda request: ENTRIES,
    grid=grid.by_results,
    scores=False,
    sizes=(),
)
LIST_LONG = KernelSpec(
    source="rowwise/list_long.cu",
    part="long",
    computes="which packed sequences are not short",
    method="compares integers",
    heads=dict.fromkeys(FLOATS, ANY_HEAD),
    condition="the device alone knows the lengths of packed sequences, which are short on average",
    configure=lambda request: LISTED,
    grid=grid.by_blocks,
    scores=False,
    sizes=(),
    operands=(),
    overlaps=True,
)
OPERATIONS = (  # no part of attention
    COMBINE, APPEND, ROPE, QUANTIZE, DEQUANTIZE, HADAMARD, CHECKSUM, OFFSETS,
)  # fmt: skip
