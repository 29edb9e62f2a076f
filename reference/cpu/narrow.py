"""Numbers of the accumulator's type, which are rounded to bfloat16 as they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import caller, kernel, takes

_ROUNDED = 16  # elements that are rounded at a time


def _narrower(lanes: int) -> Callable[..., Any]:
    """Make the function that rounds float32 at an address to bfloat16: to nearest, ties to even."""

    @intrinsic
    def narrow(typingctx, source, target):
        def codegen(context, builder, sig, args):
            scalars = ir.IntType(32), ir.IntType(16)
            word, half = (x if lanes == 1 else ir.VectorType(x, lanes) for x in scalars)

            def constant(value):
                return ir.Constant(word, value if lanes == 1 else [value] * lanes)

            bits = builder.load(builder.inttoptr(args[0], word.as_pointer()))
            bits.align = 4
            high = builder.lshr(bits, constant(16))
            odd = builder.and_(high, constant(1))
            rounded = builder.add(builder.add(bits, constant(0x7FFF)), odd)
            magnitude = builder.and_(bits, constant(0x7FFFFFFF))
            is_nan = builder.icmp_unsigned(">", magnitude, constant(0x7F800000))
            nan = builder.or_(builder.and_(high, constant(0x8000)), constant(0x7FC0))
            chosen = builder.select(is_nan, nan, builder.lshr(rounded, constant(16)))
            value = builder.trunc(chosen, half)
            builder.store(value, builder.inttoptr(args[1], half.as_pointer())).align = 2
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    function: Callable[..., Any] = narrow
    return function


_narrow_several, _narrow = _narrower(_ROUNDED), _narrower(1)


@takes(lambda number: (types.int64,) * 6)
@kernel
def narrow_rows(source, source_row, rows, columns, target, target_row):
    """Write rows of float32 as bfloat16. They begin `source_row` and `target_row` bytes apart."""
    whole = columns // _ROUNDED * _ROUNDED
    for j in range(rows):
        place, cell = source + j * source_row, target + j * target_row
        for d in range(0, whole, _ROUNDED):
            _narrow_several(place + 4 * d, cell + 2 * d)
        for d in range(whole, columns):
            _narrow(place + 4 * d, cell + 2 * d)


write_narrow = caller(narrow_rows)
