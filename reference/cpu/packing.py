"""How operands lie in memory while they are multiplied: in pairs of vectors.

`microkernel.product` takes a pair of vectors of every row, one row after the other. In long rows,
such a column is spread over memory: the first cache holds few rows of it, and no prefetcher
follows. Here the pairs of all rows lie side by side, and those of the next columns begin behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import caller, helper, kernel, takes
from .memory import first_address
from .microkernel import VECTOR_BYTES, round_up
from .vectors import INT, Emitter, emit_loop


def lanes_of_pair(itemsize: int) -> int:
    """Return the elements of a pair of vectors."""
    return 2 * VECTOR_BYTES // itemsize


pair_lanes = helper(lanes_of_pair)  # the same in kernels


def size_of_pairs(rows: int, columns: int, itemsize: int) -> int:
    """Return the elements of some rows as pairs of vectors."""
    return rows * round_up(columns, lanes_of_pair(itemsize))


class _Search:
    """Emits the search for NaN and infinity: numbers whose bits are those of infinity or more."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        word = ir.IntType(8 * emit.itemsize)
        self.kind = ir.VectorType(word, emit.lanes)
        self.largest, self.infinite = (
            ir.Constant(self.kind, [bits] * emit.lanes)
            for bits in (
                (0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000) if emit.itemsize == 8
                else (0x7FFFFFFF, 0x7F800000)
            )
        )  # fmt: skip
        self.begin = ir.Constant(self.kind, [0] * emit.lanes)

    def join(self, found: Any, value: Any) -> Any:
        """Return the larger bits of those before and of a vector's magnitudes."""
        builder = self.emit.builder
        bits = builder.and_(builder.bitcast(value, self.kind), self.largest)
        return builder.select(builder.icmp_unsigned(">", bits, found), bits, found)

    def end(self, found: Any) -> Any:
        """Return 1 if a lane is not finite, else 0."""
        builder = self.emit.builder
        flags = builder.icmp_unsigned(">=", found, self.infinite)
        lanes = builder.bitcast(flags, ir.IntType(self.emit.lanes))
        return builder.zext(builder.icmp_unsigned("!=", lanes, lanes.type(0)), INT)


def _pair_copier(vectors: int) -> Callable[..., Any]:
    """Make the function that copies some vectors of every row to where its pair lies."""

    @intrinsic
    def copy(typingctx, source, row_size, rows, target, like):
        """Return 1 if an element is NaN or infinite, else 0."""

        def codegen(context, builder, sig, args):
            source, row_size, rows, target, _ = args
            emit = Emitter(builder, context.get_value_type(sig.args[4]))

            search = _Search(emit)

            def step(j, values):
                row = builder.add(source, builder.mul(row_size, j))
                place = builder.add(target, builder.mul(INT(2 * VECTOR_BYTES), j))
                (found,) = values
                for n in range(vectors):
                    offset = INT(n * VECTOR_BYTES)
                    value = emit.load(builder.add(row, offset))
                    emit.store(value, builder.add(place, offset))
                    found = search.join(found, value)
                return [found]

            return search.end(*emit_loop(builder, rows, [search.begin], step))

        return types.int64(*[types.int64] * 4, like), codegen

    function: Callable[..., Any] = copy
    return function


_copy_pair, _copy_vector = _pair_copier(2), _pair_copier(1)


@helper
def load_pairs(source, row_size, rows, columns, itemsize, target):
    """Load rows as pairs of vectors, which begin ``rows * pair_lanes(itemsize)`` elements apart.

    Returns whether any element is NaN or infinite, as 1 or 0.
    """
    like = target.dtype.type(0)
    size, place = columns * itemsize, first_address(target)
    nonfinite = 0
    for x in range(0, size - VECTOR_BYTES, 2 * VECTOR_BYTES):
        nonfinite |= _copy_pair(source + x, row_size, rows, place, like)
        place += rows * 2 * VECTOR_BYTES
    if size % (2 * VECTOR_BYTES):
        nonfinite |= _copy_vector(source + size - VECTOR_BYTES, row_size, rows, place, like)
    return nonfinite


def _searcher(is_whole: bool) -> Callable[..., Any]:
    """Make the function that searches some columns of rows: a whole vector, or a part of one."""

    @intrinsic
    def search(typingctx, source, row_size, rows, columns, like):
        """Return 1 if one of the first columns, at most a vector, has NaN or infinity, else 0."""

        def codegen(context, builder, sig, args):
            source, row_size, rows, columns, _ = args
            emit = Emitter(builder, context.get_value_type(sig.args[4]))
            mask, search = emit.first_lanes(columns), _Search(emit)

            def step(j, values):
                place = builder.add(source, builder.mul(row_size, j))
                if is_whole:
                    value = emit.load(place)
                else:
                    value = emit.load_some(place, mask, emit.zero, emit.itemsize)
                return [search.join(values[0], value)]

            return search.end(*emit_loop(builder, rows, [search.begin], step))

        return types.int64(*[types.int64] * 4, like), codegen

    function: Callable[..., Any] = search
    return function


_search_whole, _search_part = _searcher(True), _searcher(False)


@helper
def has_nonfinite(source, row_size, rows, columns, itemsize, like):
    """Return whether any element of some rows is NaN or infinite, as 1 or 0."""
    found, lanes = 0, VECTOR_BYTES // itemsize
    for d in range(0, columns, lanes):
        place = source + d * itemsize
        if d + lanes <= columns:
            found |= _search_whole(place, row_size, rows, lanes, like)
        else:
            found |= _search_part(place, row_size, rows, columns - d, like)
    return found


@intrinsic
def _turn(typingctx, source, row_size, rows, columns, target, step, pairs, like):
    """Write the columns of a square, as many as there are, as rows `step` bytes apart.

    Rows that are not there are 0. Where `pairs` is an address, the rows are copied there, each as a
    vector of a pair. Return 1 if one has NaN or infinity.
    """

    def codegen(context, builder, sig, args):
        source, row_size, rows, columns, target, step, pairs, _ = args
        emit = Emitter(builder, context.get_value_type(sig.args[7]))
        places = [builder.add(source, builder.mul(row_size, INT(i))) for i in range(emit.lanes)]
        values = emit.load_rows(places, rows, columns, emit.zero, emit.itemsize)
        search = _Search(emit)
        found = search.begin
        for value in values:
            found = search.join(found, value)
        copy, go_on = (builder.append_basic_block(name) for name in ("copy", "go_on"))
        builder.cbranch(builder.icmp_signed("!=", pairs, INT(0)), copy, go_on)
        builder.position_at_end(copy)
        emit.store_rows(values, rows, pairs, INT(2 * VECTOR_BYTES))
        builder.branch(go_on)
        builder.position_at_end(go_on)
        turned = emit.transposed(values)
        emit.store_rows(turned, columns, target, step)
        return search.end(found)

    return types.int64(*[types.int64] * 7, like), codegen


@intrinsic
def _turn_back(typingctx, source, step, rows, columns, factor, target, row_size, like):
    """Write the columns of a square, of which the first are there, as rows; multiplied by factors.

    There are as many vectors at `source`, `step` bytes apart, as `columns` of the result, and a
    vector of factors, one for each of its rows.
    """

    def codegen(context, builder, sig, args):
        source, step, rows, columns, factor, target, row_size, _ = args
        emit = Emitter(builder, context.get_value_type(sig.args[7]))
        factors, last = emit.load(factor), builder.sub(columns, INT(1))
        values = []
        for n in range(emit.lanes):
            is_there = builder.icmp_signed("<", INT(n), columns)
            place = builder.mul(step, builder.select(is_there, INT(n), last))
            values.append(builder.fmul(emit.load(builder.add(source, place)), factors))
        turned = emit.transposed(values)
        whole, part = builder.append_basic_block("whole"), builder.append_basic_block("part")
        end = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">=", columns, INT(emit.lanes)), whole, part)
        builder.position_at_end(whole)
        emit.store_rows(turned, rows, target, row_size)
        builder.branch(end)
        builder.position_at_end(part)
        mask = emit.first_lanes(columns)
        emit.store_rows(turned, rows, target, row_size, mask)
        builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, like), codegen


@intrinsic
def transpose_square(typingctx, source, row_size, target, step, like):
    """Write the columns of a square of one vector's length as rows, `step` bytes apart."""

    def codegen(context, builder, sig, args):
        source, row_size, target, step, _ = args
        emit = Emitter(builder, context.get_value_type(sig.args[4]))
        places = [builder.add(source, builder.mul(row_size, INT(i))) for i in range(emit.lanes)]
        for d, column in enumerate(emit.transposed([emit.load(place) for place in places])):
            emit.store(column, builder.add(target, builder.mul(step, INT(d))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, like), codegen


_takes_panel = takes(lambda number: (*(types.int64,) * 8, number))


@_takes_panel
@kernel
def load_columns(source, row_size, count, lanes, depth, itemsize, target, pairs, like):
    """Load `count` rows as pairs of columns (depth, pair); the columns up to `lanes` are 0.

    Where `pairs` is an address, the rows are written there as `load_pairs` does, and filled with 0
    up to whole vectors. Returns whether any element is NaN or infinite, as 1 or 0.
    """
    pair, square = pair_lanes(itemsize), VECTOR_BYTES // itemsize
    step, nonfinite = pair * itemsize, 0
    for i in range(0, lanes, square):
        begin = target + (i // pair * pair * depth + i % pair) * itemsize
        for d in range(0, depth, square):
            row = 0
            if pairs and i < count:
                row = pairs + (d // pair * pair * count + i * pair + d % pair) * itemsize
            place = source + i * row_size + d * itemsize
            nonfinite |= _turn(
                place, row_size, count - i, depth - d, begin + d * step, step, row, like
            )
    return nonfinite


@_takes_panel
@kernel
def store_columns(source, count, lanes, depth, itemsize, factors, target, row_size, like):
    """Write `count` columns of `depth` rows of so many lanes as rows, `row_size` bytes apart.

    They are multiplied by the factors at an address, one for each lane.
    """
    square = VECTOR_BYTES // itemsize
    for i in range(0, count, square):
        for d in range(0, depth, square):
            _turn_back(
                source + (d * lanes + i) * itemsize, lanes * itemsize, count - i, depth - d,
                factors + i * itemsize, target + i * row_size + d * itemsize, row_size, like,
            )  # fmt: skip


load_panel, store_panel = caller(load_columns, types.int64), caller(store_columns)


def _row_writer(is_whole: bool) -> Callable[..., Any]:
    """Make the function that writes some columns of rows: a whole vector, or a part of one."""

    @intrinsic
    def write(typingctx, source, rows, columns, factor, target, row_size):
        """Write vectors, a pair's size apart, as the first columns of rows, times a factor."""

        def codegen(context, builder, sig, args):
            source, rows, columns, factor, target, row_size = args
            emit = Emitter(builder, context.get_value_type(sig.args[3]))
            factors, mask = emit.splat(factor), emit.first_lanes(columns)

            def step(j, values):
                value = emit.load(builder.add(source, builder.mul(INT(2 * VECTOR_BYTES), j)))
                place = builder.add(target, builder.mul(row_size, j))
                value = builder.fmul(value, factors)
                if is_whole:
                    emit.store(value, place)
                else:
                    emit.store_some(value, place, mask)
                return []

            emit_loop(builder, rows, [], step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3, factor, *[types.int64] * 2), codegen

    function: Callable[..., Any] = write
    return function


_write_whole, _write_part = _row_writer(True), _row_writer(False)


@helper
def store_pairs(source, rows, columns, itemsize, factor, target, row_size):
    """Write rows that lie as pairs of vectors, multiplied by a factor, `row_size` bytes apart."""
    pair, lanes = pair_lanes(itemsize), VECTOR_BYTES // itemsize
    for d in range(0, columns, lanes):
        pairs = source + (d // pair * pair * rows + d % pair) * itemsize
        place = target + d * itemsize
        if d + lanes <= columns:
            _write_whole(pairs, rows, lanes, factor, place, row_size)
        else:
            _write_part(pairs, rows, columns - d, factor, place, row_size)
