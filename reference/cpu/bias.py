"""A bias, added to a tile of scores: a table's elements at equal strides, read as vectors.

Where a query's elements lie side by side, squares of one vector's length are read row by row and
turned, since tiles are kept as [key, query]. Other strides are followed element by element.

A bias that batch entries share is turned for each of them. Where it has few tiles, a thread keeps
them, turned, behind the registers of the program (`tile.make_registers`), as long as it is in one
call of a kernel: between two of these, the bias may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import INT, TABLE, caller, helper, kernel, takes, vector, whole_rows
from .memory import clear, first_address
from .microkernel import VECTOR_BYTES
from .program import PROGRAM
from .softmax import row_max_at
from .tables import KINDS, first_element, load_as_float
from .vectors import INT as WORD
from .vectors import ROUNDED, Emitter, emit_loop, emit_widened

_STORED = {
    "float16": ir.IntType(16), "bfloat16": ir.IntType(16), "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
}  # fmt: skip
_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def emit_square(emit: Emitter, name: str, args: Any) -> None:
    """Emit ``target[j, i] += source[i, j]`` of a square, for elements of the type `name`.

    Where the source is -inf, the target becomes -inf, also from NaN.
    """
    source, row_size, rows, keys, target, step = args
    builder, lanes, itemsize = emit.builder, emit.lanes, _ITEMSIZES[name]
    kind = ir.VectorType(_STORED[name], lanes)
    places = [builder.add(source, builder.mul(row_size, WORD(i))) for i in range(lanes)]
    # Adding -0 changes no number.
    zero = 0x8000 if itemsize == 2 else -0.0
    nothing = ir.Constant(kind, [zero] * lanes)
    values = emit.load_rows(places, rows, keys, nothing, itemsize)
    columns = emit.transposed([_converted(emit, name, value) for value in values])
    minus_infinity = ir.Constant(emit.vector, [-math.inf] * lanes)
    end = builder.append_basic_block("end")
    for j, column in enumerate(columns):
        place = builder.add(target, builder.mul(step, WORD(j)))
        total = builder.fadd(emit.load(place), column)
        is_hidden = builder.fcmp_ordered("==", column, minus_infinity)
        emit.store(builder.select(is_hidden, minus_infinity, total), place)
        following = builder.append_basic_block("column") if j + 1 < lanes else end
        builder.cbranch(builder.icmp_signed("<", WORD(j + 1), keys), following, end)
        builder.position_at_end(following)


def _converted(emit: Emitter, name: str, value: Any) -> Any:
    """Return a vector of stored elements in the accumulator's type."""
    builder, stored = emit.builder, _ITEMSIZES[name]
    if stored == 2:
        value, stored = emit_widened(builder, value, name == "bfloat16"), 4
    if stored < emit.itemsize:
        return builder.fpext(value, emit.vector)
    return builder.fptrunc(value, emit.vector) if stored > emit.itemsize else value


def _square_of(name: str) -> Callable[..., Any]:
    """Make the function that adds a square of elements of one type."""

    @intrinsic
    def square(typingctx, source, row_size, rows, keys, target, step, like):
        def codegen(context, builder, sig, args):
            emit_square(Emitter(builder, context.get_value_type(sig.args[6])), name, args[:6])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, like), codegen

    function: Callable[..., Any] = square
    return function


_FLOAT16, _BFLOAT16, _FLOAT32, _FLOAT64 = (KINDS.index(name) for name in _STORED)
_square16, _square_b16, _square32, _square64 = (_square_of(name) for name in _STORED)


@helper
def _add_squares(place, row, item, kind, ni, begin, end, lanes, itemsize, tile, like):
    """Add elements that lie side by side for a query to the tile at an address."""
    square, size = VECTOR_BYTES // itemsize, lanes * itemsize
    for i in range(0, ni, square):
        rows = ni - i
        for j in range(begin, end, square):
            keys = end - j
            source = place + i * row + j * item
            target = tile + (j * lanes + i) * itemsize
            if kind == _FLOAT32:
                _square32(source, row, rows, keys, target, size, like)
            elif kind == _BFLOAT16:
                _square_b16(source, row, rows, keys, target, size, like)
            elif kind == _FLOAT16:
                _square16(source, row, rows, keys, target, size, like)
            else:
                _square64(source, row, rows, keys, target, size, like)


@intrinsic
def _add_vectors(typingctx, source, keys, target, row_size, factor, maxima):
    """Add a vector of every key's row to a factor times one of the target's; -inf hides a pair.

    Where `maxima` is an address, the vector there becomes the maxima of itself and of the sums.
    """

    def codegen(context, builder, sig, args):
        source, keys, target, row_size, factor, maxima = args
        emit = Emitter(builder, context.get_value_type(sig.args[4]))
        minus_infinity = ir.Constant(emit.vector, [-math.inf] * emit.lanes)
        factors = emit.splat(factor)
        is_wanted = builder.icmp_signed("!=", maxima, WORD(0))

        def step(j, values):
            offset = builder.mul(j, row_size)
            value = emit.load(builder.add(source, offset))
            place = builder.add(target, offset)
            is_hidden = builder.fcmp_ordered("==", value, minus_infinity)
            scaled = builder.fmul(emit.load(place), factors, flags=ROUNDED)
            total = builder.select(is_hidden, minus_infinity, builder.fadd(scaled, value))
            emit.store(total, place)
            return [emit.larger(total, values[0])]

        before = emit.load(builder.select(is_wanted, maxima, target))
        (largest,) = emit_loop(builder, keys, [before], step)
        with builder.if_then(is_wanted):
            emit.store(largest, maxima)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, factor, types.int64), codegen


# What says which tile a row of integers stands for: the address of its first element, its queries
# and lanes, and its keys. The first row also has the row that the next tile takes.
_PLACE, _QUERIES, _BEGIN, _END, _NEXT = range(5)
TAG_WORDS = 5


@helper
def forget_tiles(program, ri):
    """Begin a call of a kernel without tiles of the bias."""
    first = program.int_registers + 1
    for n in range(first, ri.shape[0]):
        ri[n, _PLACE] = 0
    if first < ri.shape[0]:
        ri[first, _NEXT] = 0


@helper
def _kept_tile(program, ri, rf, place, row, item, kind, ni, begin, end, lanes):
    """Return the address of a tile of the bias that is turned, from one of its keys to another.

    Where entries see other keys of it, it has all that one of them has seen.
    """
    like, first = rf.dtype.type(0), program.int_registers + 1
    count, begins = ri.shape[0] - first, max(program.float_registers, 1)
    size = (rf.shape[0] - begins) * rf.shape[1] // count * rf.itemsize
    tiles = first_address(rf) + begins * rf.shape[1] * rf.itemsize
    queries = (ni << 32) + lanes
    n = 0
    while n < count and (ri[first + n, _PLACE] != place or ri[first + n, _QUERIES] != queries):
        n += 1
    if n < count:
        known_begin, known_end = ri[first + n, _BEGIN], ri[first + n, _END]
        if known_begin <= begin and end <= known_end:
            return tiles + n * size
        begin, end = min(begin, known_begin), max(end, known_end)
    else:
        n = ri[first, _NEXT]
        ri[first, _NEXT] = (n + 1) % count
    ri[first + n, _PLACE], ri[first + n, _QUERIES] = place, queries
    ri[first + n, _BEGIN], ri[first + n, _END] = begin, end
    tile = tiles + n * size
    clear(tile + begin * lanes * rf.itemsize, (end - begin) * lanes * rf.itemsize)
    _add_squares(place, row, item, kind, ni, begin, end, lanes, rf.itemsize, tile, like)
    return tile


@helper
def _add_elements(place, row, item, kind, ni, begin, end, lanes, s):
    """Add elements at any strides."""
    number = s.dtype.type
    hidden = number(-math.inf)
    for j in range(begin, end):
        scores = s[j * lanes : j * lanes + ni]
        if row == 0:
            bias = number(load_as_float(place + j * item, kind))
            for i in range(ni):
                scores[i] = hidden if bias == hidden else scores[i] + bias
        else:
            for i in range(ni):
                bias = number(load_as_float(place + i * row + j * item, kind))
                scores[i] = hidden if bias == hidden else scores[i] + bias


@takes(
    lambda number: (
        PROGRAM, TABLE, whole_rows(number), INT, INT, INT, INT, vector(number), number, INT
    )
)  # fmt: skip
@kernel
def add_bias(program, ri, rf, ni, begin, end, lanes, s, factor, maxima):
    """Add a program's bias to a factor times the scores of some keys of a tile; -inf hides a pair.

    The registers `ri` are as in `first_element`. Where `maxima` is an address, the `lanes` numbers
    there become the maxima of themselves and of the keys' sums.
    """
    row, item, place = program.strided[2], program.strided[3], first_element(program, ri)
    kind = program.tables[program.strided[0], 1]
    size = 4 if kind == _FLOAT32 else 8 if kind == _FLOAT64 else 2
    target, like, row_size = first_address(s), s.dtype.type(0), lanes * s.itemsize
    first = begin * row_size
    # Squares write whole vectors.
    in_squares = item == size and row != 0 and lanes % (VECTOR_BYTES // s.itemsize) == 0
    if in_squares and ri.shape[0] > program.int_registers + 1:
        kept = _kept_tile(program, ri, rf, place, row, item, kind, ni, begin, end, lanes) + first
        for x in range(0, row_size, VECTOR_BYTES):
            largest = maxima + x if maxima else 0
            _add_vectors(kept + x, end - begin, target + first + x, row_size, factor, largest)
        return
    if factor != 1:
        for n in range(begin * lanes, end * lanes):
            s[n] *= factor
    if in_squares:
        _add_squares(place, row, item, kind, ni, begin, end, lanes, s.itemsize, target, like)
    else:
        _add_elements(place, row, item, kind, ni, begin, end, lanes, s)
    if maxima:
        row_max_at(target + first, row_size, end - begin, maxima, like)


run_bias = caller(add_bias)
