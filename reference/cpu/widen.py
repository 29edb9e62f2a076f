"""Floats of 16 bits, which become numbers of the accumulator's type in registers."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import caller, helper, kernel, takes
from .memory import first_address, row_address, store
from .target import features
from .vectors import INT, LANE, emit_widened

NATIVE, FLOAT16, BFLOAT16 = 0, 1, 2  # how elements are stored: NATIVE is the accumulator's type
WIDENED = 16  # elements that are widened at a time
# Whether the CPU has an instruction that widens float16.
HAS_HALF = bool(features().get("f16c") or platform.machine() in ("aarch64", "arm64"))


@functools.cache
def kind_of(dtype: np.dtype[Any]) -> int:
    """Return how elements of a type are stored."""
    return {"float16": FLOAT16, "bfloat16": BFLOAT16}.get(dtype.name, NATIVE)


def emit_half(builder: Any, stored: Any, single: Any) -> Any:
    """Emit the numbers of float32, a type like `single`, of bits that are those of float16."""
    is_vector = isinstance(single, ir.VectorType)

    def of(scalar: Any) -> Any:
        return ir.VectorType(scalar, single.count) if is_vector else scalar

    def constant(value: float, scalar: Any = LANE) -> Any:
        return ir.Constant(of(scalar), [value] * single.count if is_vector else value)

    if HAS_HALF:
        return builder.fpext(builder.bitcast(stored, of(ir.HalfType())), single)
    # Exponents are 112 smaller, also those of subnormal numbers.
    bits = builder.zext(stored, of(LANE))
    magnitude = builder.and_(bits, constant(0x7FFF))
    moved = builder.shl(magnitude, constant(13))
    scaled = builder.fmul(builder.bitcast(moved, single), constant(2.0**112, ir.FloatType()))
    nonfinite = builder.or_(moved, constant(0x7F800000))
    is_finite = builder.icmp_unsigned("<", magnitude, constant(0x7C00))
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    chosen = builder.select(is_finite, builder.bitcast(scaled, of(LANE)), nonfinite)
    return builder.bitcast(builder.or_(chosen, sign), single)


def _widener(lanes: int) -> Callable[..., Any]:
    """Make the function that converts 16-bit floats at an address to the type of `like`."""

    @intrinsic
    def widen(typingctx, source, bfloat, target, like):
        def codegen(context, builder, sig, args):
            number = context.get_value_type(sig.args[3])
            half, wide = (
                x if lanes == 1 else ir.VectorType(x, lanes) for x in (ir.IntType(16), number)
            )
            stored = builder.load(builder.inttoptr(args[0], half.as_pointer()))
            stored.align = 1
            as_bfloat = emit_widened(builder, stored, True)
            as_half = emit_half(builder, stored, as_bfloat.type)
            is_bfloat = builder.icmp_signed("!=", args[1], INT(0))
            value = builder.select(is_bfloat, as_bfloat, as_half)
            if isinstance(number, ir.DoubleType):
                value = builder.fpext(value, wide)
            builder.store(value, builder.inttoptr(args[2], wide.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, like), codegen

    function: Callable[..., Any] = widen
    return function


widen_several, widen = _widener(WIDENED), _widener(1)


@takes(lambda number: (types.int64,) * 8 + (number,))
@kernel
def widen_rows(source, row_size, bfloat, rows, columns, width, itemsize, target, zero):
    """Widen rows to rows of `width` elements; those from `columns` on are 0.

    `source` and `target` are addresses, and `row_size` counts bytes.
    """
    whole = columns // WIDENED * WIDENED
    for j in range(rows):
        place, cell = source + j * row_size, target + j * width * itemsize
        for d in range(0, whole, WIDENED):
            widen_several(place + 2 * d, bfloat, cell + d * itemsize, zero)
        for d in range(whole, columns):
            widen(place + 2 * d, bfloat, cell + d * itemsize, zero)
        for d in range(columns, width):
            store(cell + d * itemsize, zero)


_widen_rows = caller(widen_rows)


@helper
def find_rows_at(pointer, rows, b, h, first, count, columns, width, tile):
    """Return the address of rows of the accumulator's type, and the elements from one to the next.

    Rows of 16-bit floats are widened to `tile`, in rows of `width` elements, by the kernel at
    `pointer`.
    """
    place = row_address(rows, b, h, first)
    if rows.kind == NATIVE:
        return place, rows.row
    target = first_address(tile)
    bfloat = np.int64(rows.kind == BFLOAT16)
    size, itemsize, zero = rows.row * rows.itemsize, tile.itemsize, tile.dtype.type(0)
    _widen_rows(pointer, (place, size, bfloat, count, columns, width, itemsize, target, zero))
    return target, width
