"""Addresses: how a kernel reads and writes arrays of any strides through one compiled signature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .addresses import address
from .jit import INT, INTS, caller, helper, kernel, takes
from .structs import Struct
from .vectors import emit_loop


class Rows(NamedTuple):
    """Rows of contiguous elements, by batch entry, head and position.

    Element (b, h, i, d) is ``batch[b] + h * head + i * row + d`` elements after `address`. A
    quantity with one number per row (lse, delta) has rows of one element.
    """

    address: int
    batch: np.ndarray[Any, Any]  # (B,) int64: a broadcast axis repeats an offset
    head: int
    row: int
    itemsize: int
    kind: int  # see `widen`


LINE = 64  # bytes of a cache line, and of the longest vector


def aligned(counts: Iterable[int], dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
    """Return uninitialised arrays that begin at cache lines, so that vectors cross none."""
    each = LINE // dtype.itemsize
    sizes = [(count, -(-count // each) * each) for count in counts]
    memory = np.empty(sum(size for _, size in sizes) + each, dtype)
    begin = -address(memory) % LINE // dtype.itemsize
    arrays = []
    for count, size in sizes:
        arrays.append(memory[begin : begin + count])
        begin += size
    return arrays


# The type for kernels.
ROWS = Struct(Rows, (INT, INTS, INT, INT, INT, INT))


@intrinsic
def load(typingctx, place, like):
    """Return the value of the type of `like` at an address."""

    def codegen(context, builder, sig, args):
        kind = context.get_value_type(sig.args[1])
        return builder.load(builder.inttoptr(args[0], kind.as_pointer()))

    return like(types.int64, like), codegen


@intrinsic
def store(typingctx, place, value):
    """Write `value` at an address."""

    def codegen(context, builder, sig, args):
        kind = context.get_value_type(sig.args[1])
        builder.store(args[1], builder.inttoptr(args[0], kind.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@intrinsic
def first_address(typingctx, array):
    """Return the address of an array's first element."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), codegen


@helper
def row_address(rows, b, h, i):
    """Return the address of row i of head h of batch entry b."""
    return rows.address + (rows.batch[b] + h * rows.head + i * rows.row) * rows.itemsize


@intrinsic
def ask_for(typingctx, place, row_size, rows, size):
    """Ask for the lines of some rows of `size` bytes."""

    def codegen(context, builder, sig, args):
        place, row_size, rows, size = args
        word, lane, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), (byte, lane, lane, lane))
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        lines = builder.udiv(builder.add(size, word(LINE - 1)), word(LINE))
        same = ir.InlineAsm(ir.FunctionType(word, (word,)), "", "=r,0")

        def row(j, values):
            begin = builder.add(place, builder.mul(row_size, j))

            def line(n, values):
                # LLVM would unroll loops whose steps it can count.
                offset = builder.call(same, (builder.mul(n, word(LINE)),))
                pointer = builder.inttoptr(builder.add(begin, offset), byte)
                builder.call(function, (pointer, lane(0), lane(3), lane(1)))
                return values

            emit_loop(builder, lines, [], line)
            return values

        emit_loop(builder, rows, [], row)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@takes(lambda number: (INT,) * 4)
@kernel
def load_ahead(place, row_size, rows, size):
    """Begin to load some rows of `size` bytes, before anybody reads or writes them."""
    ask_for(place, row_size, rows, size)


_load_ahead = caller(load_ahead)


@helper
def prefetch_rows(pointer, rows, b, h, i, count, columns):
    """Begin to load some rows of a head by `load_ahead`, whose address is `pointer`."""
    size = rows.itemsize
    _load_ahead(pointer, (row_address(rows, b, h, i), rows.row * size, count, columns * size))


@intrinsic
def clear(typingctx, place, size):
    """Set so many bytes to 0."""

    def codegen(context, builder, sig, args):
        word, byte = ir.IntType(64), ir.IntType(8)
        takes = byte.as_pointer(), byte, word, ir.IntType(1)
        name, kind = "llvm.memset.p0.i64", ir.FunctionType(ir.VoidType(), takes)
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        pointer = builder.inttoptr(args[0], byte.as_pointer())
        builder.call(function, (pointer, byte(0), args[1], takes[3](0)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
