"""Codes of 8 and 4 bits, which become numbers of the accumulator's type in registers.

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
from .widen import WIDENED

# How elements are stored: numbers of a format, as in `quantize`, after the kinds of `widen`.
FIRST = 3
INT8, E4M3, E5M2, INT4 = range(FIRST, FIRST + 4)
_FRACTION = {E4M3: 3, E5M2: 2}
_BIAS = {E4M3: 7, E5M2: 15}
_SPECIAL = {E4M3: 0x7F, E5M2: 0x7C}  # from this magnitude on, codes are not finite


def _widener(kind: int, lanes: int) -> Callable[..., Any]:
    """Make the function that multiplies `lanes` codes at an address by a scale.

    One code of two in a byte is that of the lower half, or with `high` of the upper one.
    """

    @intrinsic
    def widen(typingctx, source, high, scale, target, like):
        def codegen(context, builder, sig, args):
            source, high, scale, target, _ = args
            number = context.get_value_type(sig.args[4])
            bits, single = ir.IntType(32), ir.FloatType()

            def of(scalar, count=lanes):
                return scalar if count == 1 else ir.VectorType(scalar, count)

            def constant(value, scalar=bits):
                return ir.Constant(of(scalar), value if lanes == 1 else [value] * lanes)

            count = lanes // 2 if kind == INT4 and lanes > 1 else lanes
            byte = of(ir.IntType(8), count)
            stored = builder.load(builder.inttoptr(source, byte.as_pointer()))
            stored.align = 1
            if kind == INT4:
                four = ir.Constant(byte, 4 if count == 1 else [4] * count)
                low = builder.ashr(builder.shl(stored, four), four)
                upper = builder.ashr(stored, four)
                if lanes == 1:
                    is_high = builder.icmp_signed("!=", high, ir.Constant(high.type, 0))
                    stored = builder.select(is_high, upper, low)
                else:
                    order = [n // 2 + n % 2 * count for n in range(lanes)]
                    mask = ir.Constant(ir.VectorType(bits, lanes), order)
                    stored = builder.shuffle_vector(low, upper, mask)
            if kind in (INT8, INT4):
                value = builder.sitofp(stored, of(single))
            else:
                code = builder.zext(stored, of(bits))
                magnitude = builder.and_(code, constant(0x7F))
                moved = builder.shl(magnitude, constant(23 - _FRACTION[kind]))
                power = constant(2.0 ** (127 - _BIAS[kind]), single)
                finite = builder.fmul(builder.bitcast(moved, of(single)), power)
                special = builder.or_(moved, constant(0x7F800000))
                is_finite = builder.icmp_unsigned("<", magnitude, constant(_SPECIAL[kind]))
                word = builder.select(is_finite, builder.bitcast(finite, of(bits)), special)
                sign = builder.shl(builder.and_(code, constant(0x80)), constant(24))
                value = builder.bitcast(builder.or_(word, sign), of(single))
            if lanes > 1:
                empty = ir.Constant(of(single), ir.Undefined)
                first = builder.insert_element(empty, scale, bits(0))
                zeros = ir.Constant(ir.VectorType(bits, lanes), [0] * lanes)
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
