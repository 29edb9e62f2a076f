"""Products of small matrices by tiles of bfloat16, in place of `microkernel.product`.

Operands are float32 that hold numbers of bfloat16, except weights and gradients of scores: these
are the sum of three parts, whose products are added up, so that nothing is rounded. What tiles do
not multiply as float32 would (subnormal numbers; parts by infinity and NaN) is computed by the
vector units. A product with a subnormal value may be 0 in a sum; the bound allows that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .accumulate import takes_accumulate
from .amx import EMULATED, NATIVE
from .amx_code import (
    Special,
    TileEmitter,
    block_of,
    column_packer,
    emit_amx,
    emit_begin,
    emit_emulated,
    emit_end,
    finisher,
    row_packer,
    square_packer,
    statement,
)
from .amx_memory import (
    DEPTH,
    FLAG,
    OPERANDS,
    PANEL,
    PARTS,
    REST,
    RESULT,
    ROW,
    SIDE,
    TILE,
    UNUSED,
    ZEROS,
    whole,
)
from .jit import Kernel, helper, kernel
from .memory import load, store
from .microkernel import multiply, takes_product
from .packing import pair_lanes

_SIZE = 4  # bytes of a float32

rounded = helper(whole)


@helper
def column_at(base, n, pair, width):
    """Return the address of column n, where columns lie in pairs of vectors or side by side."""
    return base + ((n // width * pair + n % width) if pair else n) * _SIZE


@helper
def is_nonfinite(x):
    """Return whether x is infinity or NaN."""
    return x - x != 0


class Unit(NamedTuple):
    """The kernels that multiply by tiles of some unit.

    Attributes
    ----------
    product, accumulate : Kernel
        They do what `microkernel.product` and `accumulate.accumulate_product` do.
    """

    product: Kernel
    accumulate: Kernel


def _named(function: Any, name: str) -> Any:
    """Give a function the name under which its code is kept."""
    function.__name__ = function.__qualname__ = name
    return function


def _block_product(emit: Any, parts: int) -> Any:
    """Make the function that multiplies up to two by two tiles."""
    a_size = parts * TILE
    one = block_of(emit, parts, 1, 1)
    if emit is emit_emulated:

        @helper
        def multiply_tiles(a, b, steps, rows, columns, memory):
            for m in range(1 + (rows > SIDE)):
                for n in range(1 + (columns > SIDE)):
                    result = memory + RESULT + (2 * m + n) * TILE
                    one(a + m * steps * a_size, b + n * steps * TILE, steps, result)

        return multiply_tiles
    tall, broad, square = (block_of(emit, parts, *n) for n in ((2, 1), (1, 2), (2, 2)))

    @helper
    def multiply_block(a, b, steps, rows, columns, memory):
        result = memory + RESULT
        if rows > SIDE and columns > SIDE:
            square(a, b, steps, result)
        elif rows > SIDE:
            tall(a, b, steps, result)
        elif columns > SIDE:
            broad(a, b, steps, result)
        else:
            one(a, b, steps, result)

    return multiply_block


def _product_steps(emit: Any, parts: int, special: Special) -> Any:
    """Make the functions that pack operands of products and multiply them."""
    pack_row, pack_square = row_packer(parts, special), square_packer(parts)
    pack_columns = column_packer(special)

    @helper
    def pack_rows(a, a_row, rows, depth, steps, target, flags, memory):
        """Pack A, whose rows are contiguous.

        Write for each row whether it is special, and return whether one is.
        """
        zero, any_special, complete = load(memory, np.float32(0)), 0, depth // DEPTH
        size = steps * parts * TILE
        for r in range(rounded(rows, SIDE)):
            # Beyond the last row, it is repeated; nobody reads these results.
            source = a + min(r, rows - 1) * a_row * _SIZE
            place = target + r // SIDE * size + r % SIDE * ROW
            found = pack_row(source, complete, place)
            if complete < steps:
                for k in range(DEPTH):
                    n = complete * DEPTH + k
                    value = load(source + n * _SIZE, zero) if n < depth else zero
                    store(memory + REST + k * _SIZE, value)
                found |= pack_row(memory + REST, 1, place + complete * parts * TILE)
            store(flags + r * FLAG, found)
            any_special |= found
        return any_special

    @helper
    def pack_squares(a, a_k, rows, depth, ahead, steps, target, memory):
        """Pack A, whose columns are contiguous."""
        for r in range(0, rows, SIDE):
            for s in range(steps):
                k = s * DEPTH - ahead
                source, first = a + (r + k * a_k) * _SIZE, ahead if s == 0 else 0
                pack_square(source, a_k * _SIZE, first, depth - k, memory + ZEROS, target)
                target += parts * TILE

    @helper
    def pack_b(b, b_row, b_pair, columns, depth, ahead, steps, target, flags, memory):
        """Pack B; write for each tile which columns are special, and return whether one is."""
        any_special, width = 0, pair_lanes(_SIZE)
        for n in range(0, columns, SIDE):
            place, found = column_at(b, n, b_pair, width), 0
            for s in range(steps):
                k = s * DEPTH - ahead
                source, first = place + k * b_row * _SIZE, ahead if s == 0 else 0
                found |= pack_columns(
                    source, b_row * _SIZE, first, depth - k, memory + ZEROS, target
                )
                target += TILE
            if columns - n < SIDE:
                found &= (1 << (columns - n)) - 1
            store(flags + n // SIDE * FLAG, found)
            any_special |= found
        return any_special

    return pack_rows, pack_squares, pack_b, _block_product(emit, parts)


_scale, _scale_half = finisher(SIDE, False), finisher(SIDE // 2, False)
_add, _add_half = finisher(SIDE, True), finisher(SIDE // 2, True)


@helper
def clear_zeros(memory, like):
    """Write the row of zeros."""
    for n in range(SIDE):
        store(memory + ZEROS + n * _SIZE, like - like)


def _make_product(name: str, emit: Any, begin: Any, end: Any) -> Kernel:
    """Make the kernel of products of which each result is one sum of products."""
    pack_rows, _, pack_b, multiply_block = _product_steps(emit, 1, TileEmitter.is_subnormal)
    start, stop = statement(begin), statement(end)

    @helper
    def mend(
        alpha, a, a_row, a_k, b, b_row, b_pair, c, c_row, c_pair, rows, columns, depth, a_flags,
        b_flags, spare, maxima, fallback,
    ):  # fmt: skip
        """Compute special rows and columns again, by the vector units; then all maxima."""
        width = pair_lanes(_SIZE)
        for n in range(0, columns, SIDE):
            found = load(b_flags + n // SIDE * FLAG, 0)
            if found:
                place, target = column_at(b, n, b_pair, width), column_at(c, n, c_pair, width)
                again = (
                    alpha, a, a_row, a_k, place, b_row, 0, spare, SIDE, 0, rows, SIDE, depth,
                    _SIZE, 0, 0, 0, 0,
                )  # fmt: skip
                multiply(fallback, again)
                for i in range(SIDE):
                    if found >> i & 1:
                        for r in range(rows):
                            value = load(spare + (r * SIDE + i) * _SIZE, alpha)
                            store(target + (r * c_row + i) * _SIZE, value)
        for r in range(rows):
            if load(a_flags + r * FLAG, 0):
                again = (
                    alpha, a + r * a_row * _SIZE, a_row, a_k, b, b_row, b_pair,
                    c + r * c_row * _SIZE, c_row, c_pair, 1, columns, depth, _SIZE, 0, 0, 0, 0,
                )  # fmt: skip
                multiply(fallback, again)
        if maxima:
            for n in range(columns):
                largest, place = load(maxima + n * _SIZE, alpha), column_at(c, n, c_pair, width)
                for r in range(rows):
                    value = load(place + r * c_row * _SIZE, alpha)
                    largest = value if value > largest else largest
                store(maxima + n * _SIZE, largest)

    def product(
        alpha, a, a_row, a_k, b, b_row, b_pair, c, c_row, c_pair, rows, columns, depth, itemsize,
        adds, maxima, memory, fallback,
    ):  # fmt: skip
        steps, width = (depth + DEPTH - 1) // DEPTH, pair_lanes(_SIZE)
        size = steps * TILE
        a_tiles = memory + OPERANDS
        b_tiles = a_tiles + 2 * size
        a_flags = b_tiles + rounded(columns, SIDE) // SIDE * size
        b_flags = a_flags + rounded(rows, SIDE) * FLAG
        spare = b_flags + rounded(columns, SIDE) * FLAG
        clear_zeros(memory, alpha)
        any_special = pack_b(b, b_row, b_pair, columns, depth, 0, steps, b_tiles, b_flags, memory)
        start()
        for m in range(0, rows, 2 * SIDE):
            count, source = min(rows - m, 2 * SIDE), a + m * a_row * _SIZE
            flags = a_flags + m * FLAG
            any_special |= pack_rows(source, a_row, count, depth, steps, a_tiles, flags, memory)
            for n in range(0, columns, 2 * SIDE):
                b_place = b_tiles + n // SIDE * size
                multiply_block(a_tiles, b_place, steps, rows - m, columns - n, memory)
                for y in range(n, min(columns, n + 2 * SIDE), SIDE):
                    target = column_at(c, y, c_pair, width)
                    largest = memory + UNUSED
                    if maxima and not any_special:
                        largest = maxima + y * _SIZE
                    for x in range(m, min(rows, m + 2 * SIDE), SIDE):
                        tile = memory + RESULT + ((x - m) // SIDE * 2 + (y - n) // SIDE) * TILE
                        place, count = target + x * c_row * _SIZE, min(rows - x, SIDE)
                        if columns - y >= SIDE:
                            _scale(tile, count, alpha, place, c_row * _SIZE, largest)
                        else:
                            _scale_half(tile, count, alpha, place, c_row * _SIZE, largest)
        stop()
        if any_special:
            mend(
                alpha, a, a_row, a_k, b, b_row, b_pair, c, c_row, c_pair, rows, columns, depth,
                a_flags, b_flags, spare, maxima, fallback,
            )  # fmt: skip

    product.__doc__ = "C = alpha * A B, as `microkernel.product` computes it."
    return takes_product(kernel(_named(product, f"product_{name}")))


def _make_accumulate(name: str, emit: Any, begin: Any, end: Any) -> Kernel:
    """Make the kernel that adds the product of a tile and of rows to results."""
    pack_rows, pack_squares, pack_b, multiply_block = _product_steps(
        emit, PARTS, TileEmitter.is_nonfinite
    )
    start, stop = statement(begin), statement(end)

    @helper
    def without_nonfinite(one, pairs, pair, nj, columns, target):
        """Copy rows, with 0 for infinity and NaN."""
        width = pair_lanes(_SIZE)
        for n in range(columns):
            source = column_at(pairs, n, pair, width)
            place = column_at(target, n, nj * width, width)
            for j in range(nj):
                value = load(source + j * width * _SIZE, one)
                store(place + j * width * _SIZE, one - one if is_nonfinite(value) else value)

    @helper
    def add_nonfinite(
        one, tile, across, along, ni, nj, pairs, pair, columns, target, target_row, target_pair,
        careful, seen,
    ):  # fmt: skip
        """Add what `without_nonfinite` left out, where pairs are seen."""
        width = pair_lanes(_SIZE)
        for n in range(columns):
            source = column_at(pairs, n, pair, width)
            place = column_at(target, n, target_pair, width)
            for j in range(nj):
                value = load(source + j * width * _SIZE, one)
                if is_nonfinite(value):
                    for i in range(ni):
                        cell = i * across + j * along
                        if not careful or seen[cell]:
                            result = place + i * target_row * _SIZE
                            weight = load(tile + cell * _SIZE, one)
                            store(result, load(result, one) + weight * value)

    @helper
    def add_product(
        one, tile, across, along, ni, nj, ahead, pairs, pair, columns, target, target_row,
        target_pair, careful, seen, memory,
    ):  # fmt: skip
        """Add the product of a part of a tile and of rows."""
        steps, width = (ahead + nj + DEPTH - 1) // DEPTH, pair_lanes(_SIZE)
        size = steps * TILE
        a_tiles = memory + OPERANDS
        b_tiles = a_tiles + 2 * PARTS * size
        a_flags = b_tiles + rounded(columns, SIDE) // SIDE * size
        b_flags = a_flags + 2 * SIDE * FLAG
        spare = b_flags + rounded(columns, SIDE) * FLAG
        clear_zeros(memory, one)
        special = pack_b(pairs, width, pair, columns, nj, ahead, steps, b_tiles, b_flags, memory)
        if special:
            without_nonfinite(one, pairs, pair, nj, columns, spare)
            pack_b(spare, width, nj * width, columns, nj, ahead, steps, b_tiles, b_flags, memory)
        start()
        for m in range(0, ni, 2 * SIDE):
            count, source = min(ni - m, 2 * SIDE), tile + m * across * _SIZE
            if along == 1:
                pack_rows(source, across, count, nj, steps, a_tiles, a_flags, memory)
            else:
                pack_squares(source, along, count, nj, ahead, steps, a_tiles, memory)
            for n in range(0, columns, 2 * SIDE):
                b_place = b_tiles + n // SIDE * size
                multiply_block(a_tiles, b_place, steps, ni - m, columns - n, memory)
                for y in range(n, min(columns, n + 2 * SIDE), SIDE):
                    result = column_at(target, y, target_pair, width)
                    for x in range(m, min(ni, m + 2 * SIDE), SIDE):
                        each = memory + RESULT + ((x - m) // SIDE * 2 + (y - n) // SIDE) * TILE
                        place, count = result + x * target_row * _SIZE, min(ni - x, SIDE)
                        if columns - y >= SIDE:
                            _add(each, count, one, place, target_row * _SIZE, 0)
                        else:
                            _add_half(each, count, one, place, target_row * _SIZE, 0)
        stop()
        if special:
            add_nonfinite(
                one, tile, across, along, ni, nj, pairs, pair, columns, target, target_row,
                target_pair, careful, seen,
            )  # fmt: skip

    def accumulate(
        one, product, tile, across, along, ni, nj, ahead, pairs, pair, columns, itemsize, target,
        target_row, target_pair, careful, seen, memory,
    ):  # fmt: skip
        # Sums over queries must not depend on how many of them are a panel.
        most = PANEL if along == 1 else nj
        width = pair_lanes(_SIZE)
        for j in range(0, nj, most):
            add_product(
                one, tile + j * along * _SIZE, across, along, ni, min(most, nj - j), ahead,
                pairs + j * width * _SIZE, pair, columns, target, target_row, target_pair, careful,
                seen[j * along :], memory,
            )  # fmt: skip

    accumulate.__doc__ = "target += tile * rows, as `accumulate.accumulate_product` computes it."
    return takes_accumulate(kernel(_named(accumulate, f"accumulate_{name}")))


def _unit(name: str, emit: Any, begin: Any, end: Any) -> Unit:
    return Unit(_make_product(name, emit, begin, end), _make_accumulate(name, emit, begin, end))


UNITS = {
    NATIVE: _unit("amx", emit_amx, emit_begin, emit_end),
    EMULATED: _unit("emulated", emit_emulated, None, None),
}
