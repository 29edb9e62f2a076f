"""Statistics of weights and logits, tile by tile: an expression of each pair, summed or compared.

Weights, and their parts of an entropy, are made of logits in vectors; a program makes any other
values. `reduce_keys` takes them along the keys of each query: a
block of queries stays, and keys pass by, as in `forward`. `reduce_queries` takes them along the
other axis, as the gradients of keys are computed: some keys stay, and queries pass by. Each number
of a result belongs to one work item, which adds in a fixed order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .arguments import CHANGES, Registers, TileSizes, shape_of
from .jit import INT, INTS, TABLE, helper, kernel, takes, vector, whole_rows
from .memory import ROWS, aligned, first_address
from .microkernel import VECTOR_BYTES, multiply, padded, round_up
from .packing import load_panel, pair_lanes, size_of_pairs
from .program import PROGRAM
from .structs import Struct
from .tile import (
    EMPTY,
    FIRST,
    LAST,
    SYMBOL_COUNT,
    apply_mask,
    apply_score,
    class_of_tile,
    describe_tile,
    make_registers,
)
from .vectors import Emitter, emit_exp2, emit_loop
from .widen import find_rows_at

Array = np.ndarray[Any, Any]

LOGIT, WEIGHT, ENTROPY, PROGRAM_OF_LOGIT = range(4)  # what values are
SUM, MAX, TOP = range(3)  # what is taken of them
BLOCKS, DISTANCE = range(2)  # over which pairs `reduce_queries` takes it


class Values(NamedTuple):
    """What is made of logits, or with `raw` of scores before they are changed; what is taken."""

    kind: int
    program: Any  # of PROGRAM_OF_LOGIT
    raw: int
    by: int
    most: int  # of the largest values, with TOP; else 1


VALUES = Struct(Values, (INT, PROGRAM, INT, INT, INT))


class ReduceScratch(NamedTuple):
    """What one thread needs to work on tiles, which are kept as [key, query]."""

    qt: Array  # queries, as `load_columns` leaves them
    s: Array  # logits
    x: Array  # values
    wide: Array  # rows of 16-bit floats, widened
    sums: Array  # of each query, or of each key and lane
    part: Array  # of a tile
    lse: Array  # of the queries of a block; inf for those that see nothing
    symbols: Array
    edges: Array  # of the tile's keys, see `tile.FIRST`
    value_ri: Array
    value_rf: Array
    score_ri: Array
    score_rf: Array
    mask_ri: Array
    mask_rf: Array
    tile_ri: Array
    tile_rf: Array


def reduce_scratch_of(number: types.Type) -> Struct:
    """Return the type of `ReduceScratch`, given the accumulator's."""
    tile, of_mask = vector(number), whole_rows(types.float32)
    return Struct(
        ReduceScratch,
        (*(tile,) * 7, INTS, INTS) + (TABLE, whole_rows(number)) * 2 + (TABLE, of_mask) * 2,
    )


def reduce_scratch(sizes: TileSizes, value: Registers, number: np.dtype[Any]) -> ReduceScratch:
    """Allocate the scratch of one thread."""
    lanes = round_up(sizes.block_q, sizes.lanes_per_vector)
    panel = min(lanes, sizes.panel)
    cells = sizes.block_kv * panel
    queries = size_of_pairs(sizes.d, lanes, sizes.itemsize)
    width = round_up(sizes.d, sizes.lanes_per_vector)
    rows = max(sizes.block_kv, panel) if sizes.widens else 0
    # Keys are widened behind the queries, which are loaded anew for each tile of `reduce_queries`.
    counts = queries, cells, cells, 2 * rows * width, max(lanes, cells), panel, lanes
    arrays = aligned(counts, number)
    arrays[2][...] = 0  # lanes that no query has are not written
    made: list[Any] = [
        *arrays,
        np.empty(SYMBOL_COUNT, np.int64),
        np.empty(4, np.int64),
        *make_registers(value, lanes, number),
        *make_registers(sizes.score, lanes, number),
        *make_registers(sizes.mask, lanes, np.dtype(np.float32)),
        *make_registers(sizes.tile, 1, np.dtype(np.float32)),
    ]
    return ReduceScratch(*made)


@intrinsic
def _weigh_vector(typingctx, s, x, row_size, keys, lse, of_entropy, log2_e):
    """Write weights of a vector of every key's logits, or their parts of an entropy, to x."""

    def codegen(context, builder, sig, args):
        s, x, row_size, keys, lse, of_entropy, log2_e = args
        emit = Emitter(builder, context.get_value_type(sig.args[6]))
        nothing = ir.Constant(emit.vector, [-math.inf] * emit.lanes)
        lse, factor, zero = emit.load(lse), emit.splat(log2_e), emit.zero
        of_entropy = builder.icmp_signed("!=", of_entropy, of_entropy.type(0))

        def step(j, values):
            offset = builder.mul(j, row_size)
            logit = emit.load(builder.add(s, offset))
            # A weight is at most 1; NaN stays.
            below = builder.fsub(logit, lse)
            is_above = builder.fcmp_ordered(">", below, zero)
            below = builder.select(is_above, builder.fsub(below, below), below)
            weight = emit_exp2(builder, builder.fmul(below, factor))
            # A weight of 0 has no part, also where its logarithm is infinite.
            part = builder.fmul(weight, builder.fsub(zero, below))
            part = builder.select(builder.fcmp_ordered("==", weight, zero), zero, part)
            value = builder.select(of_entropy, part, weight)
            masked = builder.fcmp_ordered("==", logit, nothing)
            emit.store(builder.select(masked, zero, value), builder.add(x, offset))
            return []

        emit_loop(builder, keys, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, log2_e), codegen


@helper
def weigh(s, x, begin, end, lanes, lse, of_entropy, log2_e):
    """Write weights of a tile's logits, or their parts of an entropy, to x; 0 where -inf."""
    size = lanes * s.itemsize
    source, target = first_address(s) + begin * size, first_address(x) + begin * size
    for at in range(0, size, VECTOR_BYTES):
        _weigh_vector(
            source + at, target + at, size, end - begin, first_address(lse) + at, of_entropy, log2_e
        )


@helper
def load_lse(lse, place, n, lanes, target):
    """Load the log-sum-exps of some queries; a row that sees nothing has inf, so that p is 0."""
    if lse.shape[0]:
        for i in range(n):
            target[i] = math.inf if lse[place + i] == -math.inf else lse[place + i]
        for i in range(n, lanes):
            target[i] = math.inf


@helper
def fill_values(shape, changes, values, scratch, n, lanes, qt, k_place, k_row, lse):
    """Fill s with logits, -inf where a pair does not attend, and x with values that are others.

    They are filled for the keys between the ends of `scratch.edges`. `lse` has the queries'.
    """
    s, x, symbols, edges = scratch.s, scratch.x, scratch.symbols, scratch.edges
    itemsize, pair = shape.itemsize, pair_lanes(shape.itemsize)
    begin, end = edges[FIRST], edges[LAST]
    # 2 scores
    scores = (
        shape.scale, k_place + begin * k_row * itemsize, k_row, 1, qt, pair, pair * shape.d,
        first_address(s) + begin * lanes * itemsize, lanes, 0, end - begin, lanes, shape.d,
        itemsize, 0, 0, 0,
    )  # fmt: skip
    multiply(changes.pointers.product, scores)
    source = s
    if values.raw:
        source = x
        for m in range(begin * lanes, end * lanes):
            x[m] = s[m]
    # 3 score mod
    if changes.score.code.shape[0]:
        ri, rf, program = scratch.score_ri, scratch.score_rf, changes.score
        apply_score(changes.pointers, program, symbols, n, edges, lanes, s, s, ri, rf)
    # 4 mask
    apply_mask(changes, symbols, n, edges, lanes, s, scratch.mask_ri, scratch.mask_rf)
    # 5 values
    if values.kind == PROGRAM_OF_LOGIT:
        ri, rf, program = scratch.value_ri, scratch.value_rf, values.program
        apply_score(changes.pointers, program, symbols, n, edges, lanes, source, x, ri, rf)
    elif values.kind != LOGIT:
        of_entropy = np.int64(values.kind == ENTROPY)
        weigh(s, x, begin, end, lanes, lse, of_entropy, shape.log2_e)


@helper
def load_queries(shape, changes, q, b, h, i, n, place, wide):
    """Load some queries as columns, and return the lanes that they take."""
    lanes, itemsize = padded(n, shape.lanes_per_vector), shape.itemsize
    width = padded(shape.d, shape.lanes_per_vector)
    row, size = find_rows_at(changes.pointers.widen, q, b, h, i, n, shape.d, width, wide)
    zero = wide.dtype.type(0)
    rows = (row, size * itemsize, n, lanes, shape.d, itemsize, place, 0, zero)
    load_panel(changes.pointers.load, rows)
    return lanes


@helper
def take_along_keys(s, x, by, begin, end, lanes, part, sums):
    """Add a tile's values to those of its queries, or take the larger ones; NaN stays."""
    zero, nothing = s.dtype.type(0), s.dtype.type(-math.inf)
    if by == SUM:
        for i in range(lanes):
            part[i] = zero
        for j in range(begin, end):
            row, logit = x[j * lanes : (j + 1) * lanes], s[j * lanes : (j + 1) * lanes]
            for i in range(lanes):
                part[i] += zero if logit[i] == nothing else row[i]
        for i in range(lanes):
            sums[i] += part[i]
    else:
        for j in range(begin, end):
            row, logit = x[j * lanes : (j + 1) * lanes], s[j * lanes : (j + 1) * lanes]
            for i in range(lanes):
                value = nothing if logit[i] == nothing else row[i]
                sums[i] = value if value > sums[i] or value != value else sums[i]


@helper
def is_before(value, other):
    """Return whether a value comes before another one in falling order: NaN is the largest."""
    return value > other or (value != value and other == other)


@helper
def insert_keys(s, x, begin, end, n, lanes, j0, count, place, values, indices, least):
    """Insert a tile's keys into the lists of its queries, which begin at `place`.

    `least` has the last value of each list, -inf while a place is free.
    """
    for j in range(begin, end):
        row, logit = x[j * lanes : (j + 1) * lanes], s[j * lanes : (j + 1) * lanes]
        some = 0
        for i in range(n):
            some |= not (row[i] < least[i])
        if not some:
            continue
        for i in range(n):
            if row[i] < least[i] or logit[i] == -math.inf:
                continue
            first = place + i * count
            at = first + count - 1
            # A value may be -inf, and comes after no place that is taken.
            if indices[at] >= 0 and not is_before(row[i], values[at]):
                continue
            while at > first and (indices[at - 1] < 0 or is_before(row[i], values[at - 1])):
                values[at], indices[at] = values[at - 1], indices[at - 1]
                at -= 1
            values[at], indices[at] = row[i], j0 + j
            least[i] = values[first + count - 1]


@takes(
    lambda number: (
        INT, INT, TABLE, shape_of(number), CHANGES, VALUES, ROWS, ROWS, vector(number),
        vector(number), INTS, reduce_scratch_of(number),
    )
)  # fmt: skip
@kernel
def reduce_keys(first, last, work, shape, changes, values, q, k, lse, found, indices, scratch):
    """Take values along keys for the work items from `first` to `last`.

    Items are as in `forward.forward`. `lse` is contiguous, (B, H, L), or empty if values do not
    depend on it; `found` is (B, H, L, count), and so is `indices`, which is written with TOP.
    """
    itemsize, vector = shape.itemsize, shape.lanes_per_vector
    width, nothing = padded(shape.d, vector), found.dtype.type(-math.inf)
    start = found.dtype.type(0) if values.by == SUM else nothing
    widen, wide = changes.pointers.widen, scratch.wide
    symbols, edges = scratch.symbols, scratch.edges
    keys = wide[wide.shape[0] // 2 :]
    x = scratch.s if values.kind == LOGIT and not values.raw else scratch.x
    for item in range(first, last):
        b, h = work[item // shape.heads, 0], item % shape.heads
        h_kv, length = h // shape.group, shape.len_q[b]
        i0 = work[item // shape.heads, 1] * shape.block_q
        ni = min(shape.block_q, length - i0)
        place = ((b * shape.heads + h) * length + i0) * values.most
        # 1 load q and lse
        for p0 in range(0, ni, changes.panel):
            n, qt = min(changes.panel, ni - p0), first_address(scratch.qt) + p0 * shape.d * itemsize
            lanes = load_queries(shape, changes, q, b, h, i0 + p0, n, qt, wide)
            load_lse(lse, place // values.most + p0, n, lanes, scratch.lse[p0:])
            for i in range(p0, p0 + lanes):
                scratch.sums[i] = start
        if values.by == TOP:
            for m in range(place, place + ni * values.most):
                found[m], indices[m] = nothing, -1
        for j0 in range(0, shape.len_k[b], shape.block_kv):
            nj = min(shape.block_kv, shape.len_k[b] - j0)
            is_visited = k_place = k_row = 0
            for p0 in range(0, ni, changes.panel):
                n = min(changes.panel, ni - p0)
                lanes = padded(n, vector)
                describe_tile(symbols, shape, b, h, i0 + p0, n, j0, nj)
                ri, rf = scratch.tile_ri, scratch.tile_rf
                if class_of_tile(changes, symbols, n, nj, edges, ri, rf) == EMPTY:
                    continue
                if not is_visited:
                    k_place, k_row = find_rows_at(widen, k, b, h_kv, j0, nj, shape.d, width, keys)
                is_visited = 1
                qt = first_address(scratch.qt) + p0 * shape.d * itemsize
                own = scratch.lse[p0:]
                fill_values(shape, changes, values, scratch, n, lanes, qt, k_place, k_row, own)
                # 6 take values
                begin, end = edges[FIRST], edges[LAST]
                s, sums = scratch.s, scratch.sums[p0 : p0 + lanes]
                if values.by == TOP:
                    lists = place + p0 * values.most
                    insert_keys(
                        s, x, begin, end, n, lanes, j0, values.most, lists, found, indices, sums
                    )
                else:
                    take_along_keys(s, x, values.by, begin, end, lanes, scratch.part, sums)
        # 7 store
        if values.by != TOP:
            for i in range(ni):
                found[place + i] = scratch.sums[i]


@helper
def take_along_queries(s, x, by, begin, end, n, lanes, panel, sums):
    """Add values to those of keys, a number for each lane, or take the larger ones; NaN stays."""
    zero, nothing = s.dtype.type(0), s.dtype.type(-math.inf)
    for j in range(begin, end):
        row, logit = x[j * lanes : (j + 1) * lanes], s[j * lanes : (j + 1) * lanes]
        target = sums[j * panel : j * panel + n]
        if by == SUM:
            for i in range(n):
                target[i] += zero if logit[i] == nothing else row[i]
        else:
            for i in range(n):
                value = nothing if logit[i] == nothing else row[i]
                target[i] = value if value > target[i] or value != value else target[i]


@helper
def take_along_diagonals(s, x, by, begin, end, n, lanes, found, place):
    """Do it for pairs of one distance; that of the tile's first query and key is at `place`."""
    zero, nothing = s.dtype.type(0), s.dtype.type(-math.inf)
    for j in range(begin, end):
        row, logit = x[j * lanes : (j + 1) * lanes], s[j * lanes : (j + 1) * lanes]
        target = found[place - j : place - j + n]
        if by == SUM:
            for i in range(n):
                target[i] += zero if logit[i] == nothing else row[i]
        else:
            for i in range(n):
                value = nothing if logit[i] == nothing else row[i]
                target[i] = value if value > target[i] or value != value else target[i]


@helper
def fold_lanes(sums, by, panel, n, nj, j0, block_q, block, columns, found, place):
    """Take what lanes have of each key, in order, into the numbers of blocks.

    Of the first `n` lanes, `block_q` each are of one row of blocks.
    """
    for j in range(nj):
        at = place + (j0 + j) // block
        for i0 in range(0, n, block_q):
            value = sums[j * panel + i0]
            for i in range(i0 + 1, min(i0 + block_q, n)):
                other = sums[j * panel + i]
                if by == SUM:
                    value += other
                elif other > value or other != other:
                    value = other
            if by == SUM:
                found[at] += value
            elif value > found[at] or value != value:
                found[at] = value
            at += columns


@takes(
    lambda number: (
        INT, INT, TABLE, *(INT,) * 4, shape_of(number), CHANGES, VALUES, ROWS, ROWS,
        vector(number), vector(number), reduce_scratch_of(number),
    )
)  # fmt: skip
@kernel
def reduce_queries(
    first, last, work, along, block, columns, size, shape, changes, values, q, k, lse, found,
    scratch,
):  # fmt: skip
    """Take values along queries, blocks or diagonals, for the work items from `first` to `last`.

    Item n is row ``work[n // pairs]``, of entry and head ``n % pairs`` among all pairs of these:
    its first query and the one after the last, the same of keys, where its first number is among
    the `size` numbers of an entry and head, and how many queries have one number: all of the item,
    or fewer if a panel has them all. So have `block` keys; a row of blocks has `columns` numbers.
    Along diagonals, each of these has one. `lse` is as in `reduce_keys`; `found` is contiguous and
    begins with sums of 0, or with -inf.
    """
    panel = changes.panel
    width = padded(shape.d, shape.lanes_per_vector)
    start = found.dtype.type(0) if values.by == SUM else found.dtype.type(-math.inf)
    widen, wide = changes.pointers.widen, scratch.wide
    symbols, edges = scratch.symbols, scratch.edges
    keys, qt = wide[wide.shape[0] // 2 :], first_address(scratch.qt)
    pairs = shape.len_q.shape[0] * shape.heads
    x = scratch.s if values.kind == LOGIT and not values.raw else scratch.x
    for item in range(first, last):
        row, b_h = item // pairs, item % pairs
        b, h = b_h // shape.heads, b_h % shape.heads
        h_kv, place = h // shape.group, b_h * size + work[row, 4]
        for j0 in range(work[row, 2], work[row, 3], shape.block_kv):
            nj = min(shape.block_kv, work[row, 3] - j0)
            is_visited = k_place = k_row = 0
            for i0 in range(work[row, 0], work[row, 1], panel):
                n = min(panel, work[row, 1] - i0)
                describe_tile(symbols, shape, b, h, i0, n, j0, nj)
                ri, rf = scratch.tile_ri, scratch.tile_rf
                if class_of_tile(changes, symbols, n, nj, edges, ri, rf) == EMPTY:
                    continue
                if not is_visited:
                    k_place, k_row = find_rows_at(widen, k, b, h_kv, j0, nj, shape.d, width, keys)
                    for m in range(nj * panel if along == BLOCKS else 0):
                        scratch.sums[m] = start
                is_visited = 1
                # 1 load q and lse
                lanes = load_queries(shape, changes, q, b, h, i0, n, qt, wide)
                load_lse(lse, b_h * shape.len_q[b] + i0, n, lanes, scratch.lse)
                own = scratch.lse
                fill_values(shape, changes, values, scratch, n, lanes, qt, k_place, k_row, own)
                # 6 take values
                begin, end, by, s = edges[FIRST], edges[LAST], values.by, scratch.s
                if along == BLOCKS:
                    take_along_queries(s, x, by, begin, end, n, lanes, panel, scratch.sums)
                else:
                    at = place + shape.len_k[b] - 1 + i0 - j0
                    take_along_diagonals(s, x, by, begin, end, n, lanes, found, at)
            # 7 store
            if is_visited and along == BLOCKS:
                fold_lanes(
                    scratch.sums, values.by, panel, min(panel, work[row, 1] - work[row, 0]), nj, j0,
                    min(work[row, 5], panel), block, columns, found, place,
                )  # fmt: skip
