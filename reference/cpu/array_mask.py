"""A mask that is an array of Booleans, at equal strides: its bytes are read as vectors.

Where a query's bytes lie side by side, squares are read row by row and turned, since tiles are kept
as [key, query]; where a key's do, they are read as they are. Other strides are followed byte by
byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import helper, kernel, takes
from .memory import first_address
from .microkernel import VECTOR_BYTES
from .program import NO_RESULT
from .tables import first_element, is_true
from .tile import begin_mask, hide_by_program, hide_by_ranges, mask_arguments
from .vectors import INT as WORD
from .vectors import Emitter

_BYTE = ir.IntType(8)


def _emit_square(emit: Emitter, is_turned: bool, args: Any) -> None:
    """Emit ``target[j, i] = -inf`` where ``source[i, j]`` is false, of a square.

    `size` is the distance of the source's rows: of its queries if they are to be turned, otherwise
    of its keys.
    """
    source, size, rows, keys, target, step = args
    builder, lanes = emit.builder, emit.lanes
    kind = ir.VectorType(_BYTE, lanes)
    places = [builder.add(source, builder.mul(size, WORD(n))) for n in range(lanes)]
    counts = (rows, keys) if is_turned else (keys, rows)
    columns = emit.load_rows(places, *counts, ir.Constant(kind, [1] * lanes), 1)
    if is_turned:
        columns = emit.transposed(columns)
    none = ir.Constant(kind, [0] * lanes)
    minus_infinity = ir.Constant(emit.vector, [-math.inf] * lanes)
    end = builder.append_basic_block("end")
    for j, column in enumerate(columns):
        place = builder.add(target, builder.mul(step, WORD(j)))
        is_hidden = builder.icmp_unsigned("==", column, none)
        emit.store(builder.select(is_hidden, minus_infinity, emit.load(place)), place)
        following = builder.append_basic_block("column") if j + 1 < lanes else end
        builder.cbranch(builder.icmp_signed("<", WORD(j + 1), keys), following, end)
        builder.position_at_end(following)


def _square_of(is_turned: bool) -> Callable[..., Any]:
    """Make the function that hides pairs of a square."""

    @intrinsic
    def square(typingctx, source, size, rows, keys, target, step, like):
        def codegen(context, builder, sig, args):
            emit = Emitter(builder, context.get_value_type(sig.args[6]))
            _emit_square(emit, is_turned, args[:6])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, like), codegen

    function: Callable[..., Any] = square
    return function


_turned_square, _square = _square_of(True), _square_of(False)


@helper
def _hide_squares(place, row, item, ni, begin, end, lanes, s):
    """Hide pairs by bytes that lie side by side for a query or for a key."""
    like, itemsize = s.dtype.type(0), s.itemsize
    square, size = VECTOR_BYTES // itemsize, lanes * itemsize
    for i in range(0, ni, square):
        for j in range(begin, end, square):
            source = place + i * row + j * item
            target = first_address(s) + (j * lanes + i) * itemsize
            if item == 1:
                _turned_square(source, row, ni - i, end - j, target, size, like)
            else:
                _square(source, item, ni - i, end - j, target, size, like)


@helper
def _hide_elements(place, row, item, ni, begin, end, lanes, s):
    """Hide pairs by bytes at any strides."""
    hidden = s.dtype.type(-math.inf)
    for j in range(begin, end):
        scores = s[j * lanes : j * lanes + ni]
        if row == 0:
            if not is_true(place + j * item):
                scores[:] = hidden
        else:
            for i in range(ni):
                scores[i] = scores[i] if is_true(place + i * row + j * item) else hidden


@takes(mask_arguments)
@kernel
def mask_by_array(changes, symbols, ni, begin, end, lanes, s, ri, rf):
    """Set the scores of pairs that Booleans, the program or ranges hide to -inf."""
    program = changes.mask
    if changes.ranges.low.shape[0]:
        hide_by_ranges(changes, symbols, ni, begin, end, lanes, s)
    begin_mask(changes, symbols, ni, ri, rf)
    if program.result != NO_RESULT:
        hide_by_program(changes, symbols, ni, begin, end, lanes, s, ri, rf)
    row, item, place = program.strided[2], program.strided[3], first_element(program, ri)
    # Squares write whole vectors.
    if row and 1 in (row, item) and lanes % (VECTOR_BYTES // s.itemsize) == 0:
        _hide_squares(place, row, item, ni, begin, end, lanes, s)
    else:
        _hide_elements(place, row, item, ni, begin, end, lanes, s)
