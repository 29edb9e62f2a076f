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

from .jit import helper
from .memory import first_address, load, store
from .microkernel import VECTOR_BYTES, round_up
from .vectors import INT, Emitter, emit_loop


def lanes_of_pair(itemsize: int) -> int:
    """Return the elements of a pair of vectors."""
    return 2 * VECTOR_BYTES // itemsize


pair_lanes = helper(lanes_of_pair)  # the same in kernels


def size_of_pairs(rows: int, columns: int, itemsize: int) -> int:
    """Return the elements of some rows as pairs of vectors."""
    return rows * round_up(columns, lanes_of_pair(itemsize))


def _pair_copier(vectors: int) -> Callable[..., Any]:
    """Make the function that copies some vectors of every row to where its pair lies."""

    @intrinsic
    def copy(typingctx, source, row_size, rows, target, like):
        """Return 1 if an element is NaN or infinite, else 0."""

        def codegen(context, builder, sig, args):
            source, row_size, rows, target, _ = args
            emit = Emitter(builder, context.get_value_type(sig.args[4]))

            def step(j, sums):
                row = builder.add(source, builder.mul(row_size, j))
                place = builder.add(target, builder.mul(INT(2 * VECTOR_BYTES), j))
                updated = []
                for n, total in enumerate(sums):
                    offset = INT(n * VECTOR_BYTES)
                    value = emit.load(builder.add(row, offset))
                    emit.store(value, builder.add(place, offset))
                    updated.append(emit.multiply_add(value, emit.zero, total))
                return updated

            # Finite numbers times 0 add up to 0, and others to NaN.
            total, *more = emit_loop(builder, rows, [emit.zero] * vectors, step)
            for other in more:
                total = builder.fadd(total, other)
            is_nan = builder.fcmp_unordered("uno", total, total)
            lanes = builder.bitcast(is_nan, ir.IntType(emit.lanes))
            return builder.zext(builder.icmp_unsigned("!=", lanes, lanes.type(0)), INT)

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


@helper
def load_transposed(source, row_size, count, lanes, depth, itemsize, target, zero):
    """Load `count` rows as pairs of columns (depth, pair); the columns up to `lanes` are 0."""
    pair, vector = pair_lanes(itemsize), VECTOR_BYTES // itemsize
    whole = depth // vector * vector
    step = pair * itemsize
    for i in range(0, lanes, vector):
        begin = target + (i // pair * pair * depth + i % pair) * itemsize
        first = 0
        if i + vector <= count:
            for d in range(0, whole, vector):
                place = source + i * row_size + d * itemsize
                transpose_square(place, row_size, begin + d * step, step, zero)
            first = whole
        for d in range(first, depth):
            for n in range(min(vector, lanes - i)):
                value = zero
                if i + n < count:
                    value = load(source + (i + n) * row_size + d * itemsize, zero)
                store(begin + d * step + n * itemsize, value)


@helper
def store_pairs(source, rows, columns, itemsize, factor, target, row_size):
    """Write rows that lie as pairs of vectors, multiplied by a factor, `row_size` bytes apart."""
    width = pair_lanes(itemsize)
    for d in range(0, columns, width):
        for j in range(rows):
            begin = d * rows + j * width
            place = target + j * row_size + d * itemsize
            for n in range(min(width, columns - d)):
                store(place + n * itemsize, source[begin + n] * factor)
