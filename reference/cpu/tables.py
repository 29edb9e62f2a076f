"""How programs and kernels read the arrays that expressions look up: tables, by addresses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .addresses import address
from .jit import helper
from .vectors import emit_widened

# A table: address, element kind, axes, smallest and largest element, lengths, byte strides.
MAX_AXES = 8
TABLE_WORDS = 5 + 2 * MAX_AXES
# Rows are searched for at most as many neighbouring numbers as a word has bits.
MOST_CONTAINED = 64
# For a range of more elements than this, the bounds are the whole array's extremes.
RANGE_LIMIT = 16384

KINDS = tuple(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 float16 bfloat16 float32 float64".split()
)


def describe_table(array: np.ndarray[Any, Any]) -> list[int]:
    """Return the table row by which a program reads `array`, in place."""
    if array.ndim > MAX_AXES:
        raise ValueError(
            f"lookup: got an array with {array.ndim} axes; expected at most {MAX_AXES}."
        )
    low, high = 0, 0
    if array.size > RANGE_LIMIT and array.dtype.kind in "iub":
        low, high = int(array.min()), int(array.max())
    padding = [0] * (MAX_AXES - array.ndim)
    kind = KINDS.index(array.dtype.name)
    shape, strides = list(array.shape), list(array.strides)
    return [address(array), kind, array.ndim, low, high, *shape, *padding, *strides, *padding]


def _loader(bits: int, kind: str) -> Callable[..., Any]:
    """Make a function that reads a value of `kind` at an address, aligned or not."""

    @intrinsic
    def load(typingctx, place):
        result = types.float64 if "float" in kind else types.int64

        def codegen(context, builder, sig, args):
            floats = {32: ir.FloatType(), 64: ir.DoubleType()}
            memory = floats.get(bits) if "float" in kind else None
            memory = memory or ir.IntType(bits)
            value = builder.load(builder.inttoptr(args[0], memory.as_pointer()))
            value.align = 1
            if bits == 16 and "float" in kind:
                value = emit_widened(builder, value, kind == "bfloat")
            if "float" in kind:
                return value if bits == 64 else builder.fpext(value, ir.DoubleType())
            wide = ir.IntType(64)
            if bits == 64:
                return value
            return builder.sext(value, wide) if kind == "signed" else builder.zext(value, wide)

        return result(types.int64), codegen

    function: Callable[..., Any] = load
    return function


_load_int8, _load_int16, _load_int32, _load_int64 = (_loader(n, "signed") for n in (8, 16, 32, 64))
_load_uint8, _load_uint16, _load_uint32 = (_loader(n, "unsigned") for n in (8, 16, 32))
_load_float16, load_float32, _load_float64 = (_loader(n, "float") for n in (16, 32, 64))
_load_bfloat16 = _loader(16, "bfloat")


@helper
def is_true(place):
    """Return whether the Boolean at an address is true."""
    return _load_uint8(place) != 0  # a bool view of other bytes may hold more than 1


@helper
def load_as_int(place, kind):
    """Return the int64 value of an element at an address."""
    if kind == 0:
        return np.int64(is_true(place))
    if kind == 5:
        return _load_uint8(place)
    if kind == 1:
        return _load_int8(place)
    if kind == 2:
        return _load_int16(place)
    if kind == 3:
        return _load_int32(place)
    if kind == 6:
        return _load_uint16(place)
    if kind == 7:
        return _load_uint32(place)
    return _load_int64(place)


@helper
def load_as_float(place, kind):
    """Return the float64 value of an element at an address."""
    if kind == 10:
        return load_float32(place)
    if kind == 11:
        return _load_float64(place)
    if kind == 8:
        return _load_float16(place)
    return _load_bfloat16(place)


@helper
def first_element(program, ri):
    """Return the address of a program's element at equal strides for a tile's first pair.

    The registers `ri` hold the indices of that pair.
    """
    table, first = program.tables[program.strided[0]], program.strided[1]
    place = table[0]
    for axis in range(table[2]):
        place += ri[program.operands[first + axis], 0] * table[5 + MAX_AXES + axis]
    return place


@helper
def find_places(table, operands, start, axes, ri, n, places):
    """Write the addresses of the elements that `n` lanes look up, by the first axes' indices."""
    for l in range(n):
        places[l] = table[0]
    for axis in range(axes):
        index, stride = ri[operands[start + axis]], table[5 + MAX_AXES + axis]
        for l in range(n):
            places[l] += index[l] * stride


@helper
def _index_range(table, operands, start, ri, axis):
    """Return the first index and the number of indices that a range reads along an axis."""
    # Indices are proven in range. Their bounds may be wider, if floats were rounded outward, or
    # cross, if elements that they depend on change in between.
    first = max(ri[operands[start + axis], 0], 0)
    last = min(ri[operands[start + table[2] + axis], 0], table[5 + axis] - 1)
    return first, max(last - first + 1, 0)


@helper
def row_contains(table, place, number):
    """Return whether the row of a table's last axis at an address has a number."""
    stride = table[4 + MAX_AXES + table[2]]
    for n in range(table[4 + table[2]]):
        if load_as_int(place + n * stride, table[1]) == number:
            return 1
    return 0


@helper
def rows_contain(table, operands, start, ri, is_any):
    """Return whether rows all have all numbers of a range, and whether any has any.

    One is right: the one that `is_any` says. The numbers are between the bounds of the last index.
    """
    axes = table[2]
    low, high = ri[operands[start + axes - 1], 0], ri[operands[start + 2 * axes - 1], 0]
    count, inner, stride = 1, table[4 + axes], table[4 + MAX_AXES + axes]
    for axis in range(axes - 1):
        count *= _index_range(table, operands, start, ri, axis)[1]
    if count * inner > RANGE_LIMIT:
        return 0, 1
    every, wanted = 1, high - low + 1
    if wanted > MOST_CONTAINED:
        every = 0
        if not is_any:
            return 0, 1
    for row in range(count):
        place, rest = table[0], row
        for axis in range(axes - 2, -1, -1):
            first, length = _index_range(table, operands, start, ri, axis)
            place += (first + rest % length) * table[5 + MAX_AXES + axis]
            rest //= length
        bits, left = np.uint64(0), wanted
        for n in range(inner):
            number = load_as_int(place + n * stride, table[1])
            if number < low or number > high:
                continue
            if is_any:
                return every, 1
            bit = np.uint64(1) << np.uint64(number - low)
            left -= (bits & bit) == np.uint64(0)
            bits |= bit
        if left and not is_any:
            return 0, 1
    return every, 0


_TRUTHS = 16  # Booleans that are looked at together


@intrinsic
def _truths_at(typingctx, place):
    """Return a bit for each of some Booleans that lie side by side."""

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(ir.IntType(8), _TRUTHS)
        value = builder.load(builder.inttoptr(args[0], kind.as_pointer()))
        value.align = 1
        is_true = builder.icmp_unsigned("!=", value, ir.Constant(kind, [0] * _TRUTHS))
        return builder.zext(builder.bitcast(is_true, ir.IntType(_TRUTHS)), ir.IntType(64))

    return types.int64(types.int64), codegen


@helper
def _truths(place, stride, count):
    """Return whether all Booleans of a row are true, and whether any is, as integers."""
    every, some = 1, 0
    if stride == 1 and count >= _TRUTHS:
        all_true = (1 << _TRUTHS) - 1
        for n in range(0, count, _TRUTHS):
            found = _truths_at(place + min(n, count - _TRUTHS))
            every &= found == all_true
            some |= found != 0
    else:
        for n in range(count):
            found = is_true(place + n * stride)
            every &= found
            some |= found
    return every, some


@helper
def range_extremes(table, operands, start, ri, as_float, is_minimum):
    """Return the extremes of a table between index bounds: (ints..., floats...); NaN if one is.

    Of Booleans, one is right: the one that `is_minimum` says.
    """
    axes = table[2]
    count = 1
    for axis in range(axes):
        count *= _index_range(table, operands, start, ri, axis)[1]
    if count > RANGE_LIMIT:
        return table[3], table[4], math.nan, math.nan
    low_int, high_int = np.int64(2**63 - 1), np.int64(-(2**63))
    low, high = math.inf, -math.inf
    inner, stride = 1, 0
    if axes:
        inner = _index_range(table, operands, start, ri, axes - 1)[1]
        stride = table[4 + MAX_AXES + axes]
    for row in range(count // max(inner, 1)):
        place = table[0]
        rest = row
        for axis in range(axes - 1, -1, -1):
            first, length = _index_range(table, operands, start, ri, axis)
            if axis == axes - 1:
                place += first * stride
            else:
                place += (first + rest % length) * table[5 + MAX_AXES + axis]
                rest //= length
        if as_float:
            for n in range(inner):
                value = load_as_float(place + n * stride, table[1])
                if math.isnan(value):
                    return low_int, high_int, math.nan, math.nan
                low, high = min(low, value), max(high, value)
        elif table[1] == 0:
            every, some = _truths(place, stride, inner)
            low_int, high_int = min(low_int, every), max(high_int, some)
            if low_int == 0 if is_minimum else high_int == 1:
                break  # whatever follows
        else:
            for n in range(inner):
                whole = load_as_int(place + n * stride, table[1])
                low_int, high_int = min(low_int, whole), max(high_int, whole)
    return low_int, high_int, low, high
