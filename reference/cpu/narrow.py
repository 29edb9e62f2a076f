"""Rounds float32 to 16 bits as it is written: to nearest, ties to even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import caller, kernel, takes

_ROUNDED = 16  # elements that are rounded at a time
_Constant = Callable[[int], Any]


def _emit_bfloat(builder: Any, bits: Any, constant: _Constant) -> Any:
    """Emit the bits of bfloat16, in words of 32, of those of float32."""
    high = builder.lshr(bits, constant(16))
    odd = builder.and_(high, constant(1))
    rounded = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    magnitude = builder.and_(bits, constant(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(0x7F800000))
    nan = builder.or_(builder.and_(high, constant(0x8000)), constant(0x7FC0))
    return builder.select(is_nan, nan, builder.lshr(rounded, constant(16)))


def _emit_half(builder: Any, bits: Any, constant: _Constant) -> Any:
    """Emit the bits of float16, in words of 32, of those of float32."""
    sign = builder.and_(builder.lshr(bits, constant(16)), constant(0x8000))
    magnitude = builder.and_(bits, constant(0x7FFFFFFF))
    high = builder.lshr(magnitude, constant(13))
    # Exponents are 112 smaller.
    moved = builder.add(magnitude, constant(0xFFF - (112 << 23) & 0xFFFFFFFF))
    normal = builder.lshr(builder.add(moved, builder.and_(high, constant(1))), constant(13))
    # The last place of 0.5 is that of subnormal numbers.
    half = constant(0x3F000000)
    number = bits.type.count if isinstance(bits.type, ir.VectorType) else 1
    single = ir.FloatType() if number == 1 else ir.VectorType(ir.FloatType(), number)
    sums = builder.fadd(builder.bitcast(magnitude, single), builder.bitcast(half, single))
    subnormal = builder.sub(builder.bitcast(sums, bits.type), half)
    is_small = builder.icmp_unsigned("<", magnitude, constant(0x38800000))
    finite = builder.select(is_small, subnormal, normal)
    is_large = builder.icmp_unsigned(">=", magnitude, constant(0x47800000))
    chosen = builder.select(is_large, constant(0x7C00), finite)
    nan = builder.or_(builder.and_(high, constant(0x1FF)), constant(0x7E00))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(0x7F800000))
    return builder.or_(builder.select(is_nan, nan, chosen), sign)


def _narrower(lanes: int, emit: Callable[[Any, Any, _Constant], Any]) -> Callable[..., Any]:
    """Make the function that rounds float32 at an address to 16 bits at another one."""

    @intrinsic
    def narrow(typingctx, source, target):
        def codegen(context, builder, sig, args):
            scalars = ir.IntType(32), ir.IntType(16)
            word, half = (x if lanes == 1 else ir.VectorType(x, lanes) for x in scalars)

            def constant(value):
                return ir.Constant(word, value if lanes == 1 else [value] * lanes)

            bits = builder.load(builder.inttoptr(args[0], word.as_pointer()))
            bits.align = 4
            value = builder.trunc(emit(builder, bits, constant), half)
            builder.store(value, builder.inttoptr(args[1], half.as_pointer())).align = 2
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    function: Callable[..., Any] = narrow
    return function


_bfloat_several, _bfloat = _narrower(_ROUNDED, _emit_bfloat), _narrower(1, _emit_bfloat)
_half_several, _half = _narrower(_ROUNDED, _emit_half), _narrower(1, _emit_half)


@takes(lambda number: (types.int64,) * 6)
@kernel
def narrow_rows(source, source_row, rows, columns, target, target_row):
    """Write rows of float32 as bfloat16. They begin `source_row` and `target_row` bytes apart."""
    whole = columns // _ROUNDED * _ROUNDED
    for j in range(rows):
        place, cell = source + j * source_row, target + j * target_row
        for d in range(0, whole, _ROUNDED):
            _bfloat_several(place + 4 * d, cell + 2 * d)
        for d in range(whole, columns):
            _bfloat(place + 4 * d, cell + 2 * d)


@takes(lambda number: (types.int64,) * 6)
@kernel
def halve_rows(source, source_row, rows, columns, target, target_row):
    """Write rows of float32 as float16. They begin `source_row` and `target_row` bytes apart."""
    whole = columns // _ROUNDED * _ROUNDED
    for j in range(rows):
        place, cell = source + j * source_row, target + j * target_row
        for d in range(0, whole, _ROUNDED):
            _half_several(place + 4 * d, cell + 2 * d)
        for d in range(whole, columns):
            _half(place + 4 * d, cell + 2 * d)


write_narrow = caller(narrow_rows)
