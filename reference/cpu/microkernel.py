"""Products of small matrices in registers: the CPU's matrix unit.

`product` works on addresses and element strides. A block of some rows and two vectors of the result
stays in registers while the contraction runs. The type of `alpha` is the element type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from .ahead import load_some
from .jit import caller, helper, kernel, takes
from .vectors import HOST, INT, Emitter, emit_loop

VECTOR_BYTES, ROWS = HOST
FEW = 4  # rows of the blocks for what `ROWS` leaves
# Queries whose scores lie side by side, where nothing wants a whole block's: blocks of 6 rows
# divide 48, and blocks of 12 and 8 divide 32.
PANEL = 48 if ROWS == 6 else 32


def vector_lanes(itemsize: int) -> int:
    """Elements to a multiple of which the last axis of every operand is padded: whole vectors."""
    return max(VECTOR_BYTES, 32) // itemsize


def round_up(count: int, lanes: int) -> int:
    """Return `count` rounded up to whole vectors."""
    return (count + lanes - 1) // lanes * lanes


padded = helper(round_up)  # the same in kernels


def emit_block(emit: Emitter, rows: int, vectors: int, args: Any) -> None:
    """Emit the whole contraction of `rows` x `vectors` vectors of C."""
    a, a_row, a_k, b, b_row, c, c_row, depth, alpha, adds, maxima = args
    builder, size = emit.builder, INT(emit.itemsize)
    cells = [(i, j) for i in range(rows) for j in range(vectors)]
    # An address of x86 adds one or two or four times a number, ARM's adds one.
    a_size = builder.mul(a_row, size)
    far = [emit.opaque(builder.mul(a_size, INT(i))) if i else INT(0) for i in range(rows)]
    c_cells = [emit.at(c, i, c_row, INT(j * emit.lanes)) for i, j in cells]
    a_step, b_step = builder.mul(a_k, size), builder.mul(b_row, size)

    before = builder.block
    given, start = builder.append_basic_block("given"), builder.append_basic_block("start")
    is_given = builder.icmp_signed("!=", adds, INT(0))
    builder.cbranch(is_given, given, start)
    builder.position_at_end(given)
    old = [emit.load(place) for place in c_cells]
    builder.branch(start)
    builder.position_at_end(start)
    initial = [builder.phi(emit.vector) for _ in cells]
    for phi, value in zip(initial, old, strict=True):
        phi.add_incoming(emit.zero, before)
        phi.add_incoming(value, given)

    def step(k: Any, values: list[Any]) -> list[Any]:
        column, row, *sums = values
        b_vectors = [
            emit.load(builder.add(row, INT(j * emit.lanes * emit.itemsize))) for j in range(vectors)
        ]
        updated = []
        for i in range(rows):
            element = emit.load(builder.add(column, far[i]), emit.scalar)
            spread = emit.splat(element)
            updated += [
                emit.multiply_add(spread, b_vectors[j], sums[i * vectors + j])
                for j in range(vectors)
            ]
        return [builder.add(column, a_step), builder.add(row, b_step), *updated]

    _, _, *sums = emit_loop(builder, depth, [a, b, *initial], step)
    added, fresh = builder.append_basic_block("added"), builder.append_basic_block("fresh")
    compared, end = builder.append_basic_block("compared"), builder.append_basic_block("done")
    builder.cbranch(is_given, added, fresh)
    builder.position_at_end(added)
    for value, place in zip(sums, c_cells, strict=True):
        emit.store(value, place)
    builder.branch(end)
    builder.position_at_end(fresh)
    factor = emit.splat(alpha)
    scaled = [builder.fmul(value, factor) for value in sums]
    for value, place in zip(scaled, c_cells, strict=True):
        emit.store(value, place)
    builder.cbranch(builder.icmp_signed("!=", maxima, INT(0)), compared, end)
    builder.position_at_end(compared)
    for j in range(vectors):
        place = emit.at(maxima, 0, INT(0), INT(j * emit.lanes))
        largest = emit.load(place)
        for i in range(rows):
            largest = emit.larger(scaled[i * vectors + j], largest)
        emit.store(largest, place)
    builder.branch(end)
    builder.position_at_end(end)


def _block(rows: int, vectors: int) -> Callable[..., Any]:
    """Make the function that computes `rows` x `vectors` vectors of C from a whole contraction."""

    @intrinsic
    def block(typingctx, a, a_row, a_k, b, b_row, c, c_row, depth, alpha, adds, maxima):
        signature = types.void(*[types.int64] * 8, alpha, types.int64, types.int64)

        def codegen(context, builder, sig, args):
            emit_block(Emitter(builder, context.get_value_type(sig.args[8])), rows, vectors, args)
            return context.get_dummy_value()

        return signature, codegen

    function: Callable[..., Any] = block
    return function


_wide, _few_wide, _row_wide = (_block(rows, 2) for rows in (ROWS, FEW, 1))
_narrow, _row_narrow = (_block(rows, 1) for rows in (ROWS, 1))


takes_product = takes(lambda number: (number, *(types.int64,) * 16))


@takes_product
@kernel
def product(
    alpha,
    a,
    a_row,
    a_k,
    b,
    b_row,
    b_pair,
    c,
    c_row,
    c_pair,
    rows,
    columns,
    depth,
    itemsize,
    adds,
    maxima,
    ahead,
):
    """C = alpha * A B; with `adds`, C += A B.

    A is (rows, depth), B (depth, columns), C (rows, columns). `a`, `b`, `c` are addresses and
    strides count elements: A's element (i, k) lies at ``i * a_row + k * a_k``; rows of B and C are
    contiguous, and `columns` is a multiple of the vector's lanes. Columns of B and C come in pairs
    of vectors, `b_pair` and `c_pair` elements apart, or side by side where that is 0. Where
    `maxima` is an address, the `columns` numbers there become the maxima of themselves and C's
    columns. Where `ahead` is one, every block begins to load some of what the list there has.
    """
    lanes = VECTOR_BYTES // itemsize
    b_next, c_next = (b_pair or 2 * lanes) * itemsize, (c_pair or 2 * lanes) * itemsize
    for j in range(0, columns, 2 * lanes):
        bj, cj = b + j // (2 * lanes) * b_next, c + j // (2 * lanes) * c_next
        largest = maxima + j * itemsize if maxima else 0
        wide = j + lanes < columns
        i = 0
        while i < rows:
            ai = a + i * a_row * itemsize
            ci = cj + i * c_row * itemsize
            left = rows - i
            if ahead:
                load_some(ahead)
            if wide:
                if left >= ROWS and left != 2 * FEW:
                    _wide(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds, largest)
                    i += ROWS
                elif left >= FEW:
                    _few_wide(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds, largest)
                    i += FEW
                else:
                    _row_wide(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds, largest)
                    i += 1
            elif left >= ROWS:
                _narrow(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds, largest)
                i += ROWS
            else:
                _row_narrow(ai, a_row, a_k, bj, b_row, ci, c_row, depth, alpha, adds, largest)
                i += 1


multiply = caller(product)
