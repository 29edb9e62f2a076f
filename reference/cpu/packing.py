"""How operands lie in memory while they are multiplied: in pairs of vectors.

`microkernel.product` takes a pair of vectors of every row, one row after the other. In long rows,
such a column is spread over memory: the first cache holds few rows of it, and no prefetcher
follows. Here the pairs of all rows lie side by side, and those of the next columns begin behind.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from .jit import helper
from .memory import first_address, load, store
from .microkernel import VECTOR_BYTES, round_up
from .vectors import INT, Emitter


def lanes_of_pair(itemsize: int) -> int:
    """Return the elements of a pair of vectors."""
    return 2 * VECTOR_BYTES // itemsize


pair_lanes = helper(lanes_of_pair)  # the same in kernels


def size_of_pairs(rows: int, columns: int, itemsize: int) -> int:
    """Return the elements of some rows as pairs of vectors."""
    return rows * round_up(columns, lanes_of_pair(itemsize))


@intrinsic
def _copy_vector(typingctx, source, target, like):
    def codegen(context, builder, sig, args):
        emit = Emitter(builder, context.get_value_type(sig.args[2]))
        emit.store(emit.load(args[0]), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), codegen


@helper
def load_pairs(source, row_size, rows, columns, itemsize, target):
    """Load rows as pairs of vectors, which begin ``rows * pair_lanes(itemsize)`` elements apart."""
    like = target.dtype.type(0)
    size, pair = columns * itemsize, rows * 2 * VECTOR_BYTES
    for j in range(rows):
        row, place = source + j * row_size, first_address(target) + j * 2 * VECTOR_BYTES
        for x in range(0, size - VECTOR_BYTES, 2 * VECTOR_BYTES):
            _copy_vector(row + x, place, like)
            _copy_vector(row + x + VECTOR_BYTES, place + VECTOR_BYTES, like)
            place += pair
        if size % (2 * VECTOR_BYTES):
            _copy_vector(row + size - VECTOR_BYTES, place, like)


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
