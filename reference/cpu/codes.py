"""8- and 4-bit codes, which become numbers of the accumulator's type in registers.

Every code is a number of float32 exactly; its product with a scale is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import helper
from .memory import load
from .widen import HAS_HALF, WIDENED

# How elements are stored: numbers of a format, as in `quantize`, after the kinds of `widen`.
FIRST = 3
INT8, E4M3, E5M2, INT4 = range(FIRST, FIRST + 4)
_FRACTION = {E4M3: 3, E5M2: 2}
_BIAS = {E4M3: 7, E5M2: 15}
_SPECIAL = {E4M3: 0x7F, E5M2: 0x7C}  # from this magnitude on, codes are not finite


def emit_code(builder: Any, kind: int, stored: Any, lanes: int) -> Any:
    """Emit the numbers of float32 that stored codes mean, whose scale is 1.

    `stored` is a byte, or a vector of bytes; `lanes` numbers are returned. A single code of two in
    a byte is that of the lower half.
    """
    bits, single = ir.IntType(32), ir.FloatType()

    def of(scalar: Any) -> Any:
        return scalar if lanes == 1 else ir.VectorType(scalar, lanes)

    def constant(value: float, scalar: Any = bits) -> Any:
        return ir.Constant(of(scalar), value if lanes == 1 else [value] * lanes)

    if kind == INT4:
        count = 1 if lanes == 1 else lanes // 2
        four = ir.Constant(stored.type, 4 if lanes == 1 else [4] * count)
        low = builder.ashr(builder.shl(stored, four), four)
        if lanes > 1:
            order = [n // 2 + n % 2 * count for n in range(lanes)]
            mask = ir.Constant(ir.VectorType(bits, lanes), order)
            low = builder.shuffle_vector(low, builder.ashr(stored, four), mask)
        stored = low
    if kind in (INT8, INT4):
        return builder.sitofp(stored, of(single))
    if not HAS_HALF:
        code = builder.zext(stored, of(bits))
        magnitude = builder.and_(code, constant(0x7F))
        moved = builder.shl(magnitude, constant(23 - _FRACTION[kind]))
        power = constant(2.0 ** (127 - _BIAS[kind]), single)
        finite = builder.fmul(builder.bitcast(moved, of(single)), power)
        special = builder.or_(moved, constant(0x7F800000))
        is_finite = builder.icmp_unsigned("<", magnitude, constant(_SPECIAL[kind]))
        word = builder.select(is_finite, builder.bitcast(finite, of(bits)), special)
        sign = builder.shl(builder.and_(code, constant(0x80)), constant(24))
        return builder.bitcast(builder.or_(word, sign), of(single))
    # A number of float16 has its exponent in 5 bits: that of E5M2, and that of E4M3 and a 0 before
    # it. The latter is smaller by a power of two then, and its NaN a number.
    half = ir.IntType(16)
    moved = builder.shl(builder.zext(stored, of(half)), constant(8, half))
    if kind == E5M2:
        return builder.fpext(builder.bitcast(moved, of(ir.HalfType())), of(single))
    moved = builder.and_(builder.ashr(moved, constant(1, half)), constant(0xBFFF - 2**16, half))
    magnitude = builder.and_(moved, constant(0x7FFF, half))
    is_nan = builder.icmp_unsigned("==", magnitude, constant(_SPECIAL[kind] << 7, half))
    moved = builder.or_(moved, builder.sext(is_nan, of(half)))
    value = builder.fpext(builder.bitcast(moved, of(ir.HalfType())), of(single))
    return builder.fmul(value, constant(2.0 ** (15 - _BIAS[kind]), single))


def _widener(kind: int, lanes: int) -> Callable[..., Any]:
    """Make the function that multiplies `lanes` codes at an address by a scale.

    One code of two in a byte is that of the lower half, or with `high` of the upper one.
    """

    @intrinsic
    def widen(typingctx, source, high, scale, target, like):
        def codegen(context, builder, sig, args):
            source, high, scale, target, _ = args
            number = context.get_value_type(sig.args[4])
            single, byte = ir.FloatType(), ir.IntType(8)

            def of(scalar, count=lanes):
                return scalar if count == 1 else ir.VectorType(scalar, count)

            kept = of(byte, lanes // 2 if kind == INT4 and lanes > 1 else lanes)
            stored = builder.load(builder.inttoptr(source, kept.as_pointer()))
            stored.align = 1
            if kind == INT4 and lanes == 1:
                is_high = builder.icmp_signed("!=", high, ir.Constant(high.type, 0))
                stored = builder.select(is_high, builder.lshr(stored, byte(4)), stored)
            value = emit_code(builder, kind, stored, lanes)
            if lanes > 1:
                empty = ir.Constant(of(single), ir.Undefined)
                first = builder.insert_element(empty, scale, ir.IntType(32)(0))
                zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                scale = builder.shuffle_vector(first, empty, zeros)
            value = builder.fmul(value, scale)
            if isinstance(number, ir.DoubleType):
                value = builder.fpext(value, of(number))
            place = builder.inttoptr(target, of(number).as_pointer())
            builder.store(value, place).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32, types.int64, like), codegen

    function: Callable[..., Any] = widen
    return function


_int8, _int8_one = _widener(INT8, WIDENED), _widener(INT8, 1)
_e4m3, _e4m3_one = _widener(E4M3, WIDENED), _widener(E4M3, 1)
_e5m2, _e5m2_one = _widener(E5M2, WIDENED), _widener(E5M2, 1)
_int4, _int4_one = _widener(INT4, 2 * WIDENED), _widener(INT4, 1)


@helper
def _load_whole(kind, place, columns, itemsize, scale, target, like):
    """Multiply neighbouring codes, a multiple of `WIDENED`, by a scale."""
    none = 0
    if kind == INT8:
        for d in range(0, columns, WIDENED):
            _int8(place + d, none, scale, target + d * itemsize, like)
    elif kind == E4M3:
        for d in range(0, columns, WIDENED):
            _e4m3(place + d, none, scale, target + d * itemsize, like)
    elif kind == E5M2:
        for d in range(0, columns, WIDENED):
            _e5m2(place + d, none, scale, target + d * itemsize, like)
    else:
        for d in range(0, columns, 2 * WIDENED):
            _int4(place + d // 2, none, scale, target + d * itemsize, like)


@helper
def _load_one(kind, row, d, step, scale, target, like):
    """Multiply the code of column d by a scale; bytes of a row are `step` apart."""
    none = 0
    if kind == INT8:
        _int8_one(row + d * step, none, scale, target, like)
    elif kind == E4M3:
        _e4m3_one(row + d * step, none, scale, target, like)
    elif kind == E5M2:
        _e5m2_one(row + d * step, none, scale, target, like)
    else:
        _int4_one(row + d // 2 * step, d % 2, scale, target, like)


@helper
def load_codes(source, row, scales, itemsize, target, like):
    """Write a row of codes, each multiplied by the scale of its group, to an address."""
    begin = 0
    while begin < source.columns:
        end = min(begin + source.group, source.columns)
        scale = load(scales + begin // source.group * source.scale_group, np.float32(0))
        several = 2 * WIDENED if source.kind == INT4 else WIDENED
        whole = (end - begin) // several * several if source.column == 1 else 0
        first = row + (begin // 2 if source.kind == INT4 else begin)
        _load_whole(source.kind, first, whole, itemsize, scale, target + begin * itemsize, like)
        for d in range(begin + whole, end):
            _load_one(source.kind, row, d, source.column, scale, target + d * itemsize, like)
        begin = end
