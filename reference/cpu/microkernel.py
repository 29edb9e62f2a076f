"""Products of small matrices in registers: the CPU's matrix unit.

`product` works on addresses and element strides. A block of `ROWS` x 2 vectors of the result stays
in registers while the contraction runs; it is emitted as LLVM vector code, because no loop that
Numba compiles keeps so many accumulators. The type of `alpha` is the element type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import caller, helper, kernel, takes

VECTOR_BYTES = 64
ROWS = 8
INT = ir.IntType(64)


def vector_lanes(itemsize: int) -> int:
    """Elements in one vector; the last axis of every operand is padded to a multiple of it."""
    return VECTOR_BYTES // itemsize


def round_up(count: int, lanes: int) -> int:
    """Return `count` rounded up to whole vectors."""
    return (count + lanes - 1) // lanes * lanes


padded = helper(round_up)  # the same in kernels


def _block(rows: int, vectors: int) -> Callable[..., Any]:
    """Make the function that computes `rows` x `vectors` vectors of C from a whole contraction."""

    @intrinsic
    def block(typingctx, a, a_row, a_k, b, b_row, c, c_row, depth, alpha, adds):
        signature = types.void(*[types.int64] * 8, alpha, types.int64)

        def codegen(context, builder, sig, args):
            a_base, a_row, a_k, b_base, b_row, c_base, c_row, depth, alpha, adds = args
            scalar = context.get_value_type(sig.args[8])
            itemsize = 8 if isinstance(scalar, ir.DoubleType) else 4
            lanes = vector_lanes(itemsize)
            vector = ir.VectorType(scalar, lanes)

            def pointer(base, row, row_stride, element, kind):
                offset = builder.add(builder.mul(row, row_stride), element)
                byte = builder.add(base, builder.mul(offset, INT(itemsize)))
                return builder.inttoptr(byte, kind.as_pointer())

            def load(base, row, row_stride, element, kind):
                place = pointer(base, row, row_stride, element, kind)
                value = builder.load(place)
                value.align = itemsize
                return value

            def splat(value):
                undefined = ir.Constant(vector, ir.Undefined)
                first = builder.insert_element(undefined, value, ir.IntType(32)(0))
                lane_zero = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                return builder.shuffle_vector(first, undefined, lane_zero)

            cells = [(i, j) for i in range(rows) for j in range(vectors)]
            zero = ir.Constant(vector, [0.0] * lanes)
            before = builder.block
            given = builder.append_basic_block("given")
            start = builder.append_basic_block("start")
            loop = builder.append_basic_block("contraction")
            end = builder.append_basic_block("store")
            builder.cbranch(builder.icmp_signed("!=", adds, INT(0)), given, start)

            builder.position_at_end(given)
            old = {(i, j): load(c_base, INT(i), c_row, INT(j * lanes), vector) for i, j in cells}
            builder.branch(start)

            builder.position_at_end(start)
            initial = {}
            for cell in cells:
                initial[cell] = builder.phi(vector)
                initial[cell].add_incoming(zero, before)
                initial[cell].add_incoming(old[cell], given)
            builder.cbranch(builder.icmp_signed(">", depth, INT(0)), loop, end)

            builder.position_at_end(loop)
            k = builder.phi(INT)
            k.add_incoming(INT(0), start)
            running = {}
            for cell in cells:
                running[cell] = builder.phi(vector)
                running[cell].add_incoming(initial[cell], start)
            b_vectors = [load(b_base, k, b_row, INT(j * lanes), vector) for j in range(vectors)]
            updated = {}
            for i in range(rows):
                a_value = splat(load(a_base, INT(i), a_row, builder.mul(k, a_k), scalar))
                for j in range(vectors):
                    product = builder.fmul(a_value, b_vectors[j], flags=("contract",))
                    updated[i, j] = builder.fadd(product, running[i, j], flags=("contract",))
            k_next = builder.add(k, INT(1))
            k.add_incoming(k_next, loop)
            for cell in cells:
                running[cell].add_incoming(updated[cell], loop)
            builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, end)

            builder.position_at_end(end)
            results = {}
            for cell in cells:
                results[cell] = builder.phi(vector)
                results[cell].add_incoming(initial[cell], start)
                results[cell].add_incoming(updated[cell], loop)
            for i, j in cells:
                value = builder.fmul(results[i, j], splat(alpha))
                place = pointer(c_base, INT(i), c_row, INT(j * lanes), vector)
                builder.store(value, place).align = itemsize
            return context.get_dummy_value()

        return signature, codegen

    function: Callable[..., Any] = block
    return function


_wide = _block(ROWS, 2)
_narrow = _block(ROWS, 1)
_row_wide = _block(1, 2)
_row_narrow = _block(1, 1)


@takes(lambda number: (number, *(types.int64,) * 12))
@kernel
def product(alpha, a, a_row, a_k, b, b_row, c, c_row, rows, columns, depth, itemsize, adds):
    """C = alpha * A B, or alpha * (C + A B) with `adds`.

    A is (rows, depth), B (depth, columns), C (rows, columns). `a`, `b`, `c` are addresses and
    strides count elements: A's element (i, k) lies at ``i * a_row + k * a_k``; rows of B and C are
    contiguous, and `columns` is a multiple of the vector's lanes.
    """
    lanes = VECTOR_BYTES // itemsize
    for j in range(0, columns, 2 * lanes):
        bj = b + j * itemsize
        for i in range(0, rows - ROWS + 1, ROWS):
            ai = a + i * a_row * itemsize
            ci = c + (i * c_row + j) * itemsize
            if j + lanes < columns:
                _wide(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds)
            else:
                _narrow(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds)
        for i in range(rows - rows % ROWS, rows):
            ai = a + i * a_row * itemsize
            ci = c + (i * c_row + j) * itemsize
            if j + lanes < columns:
                _row_wide(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds)
            else:
                _row_narrow(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds)


multiply = caller(product)
