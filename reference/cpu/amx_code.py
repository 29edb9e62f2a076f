"""LLVM code for tiles of bfloat16: a matrix unit's instructions, and the same sums in vectors.

A tile is 16 rows of 64 bytes. Of a contraction over 32 numbers, the words of an operand hold two
each: number n in the low half and number n + 16 in the high one, so that nothing has to be
shuffled. A (rows x 32) has one row of words for each row, B (32 x columns) one row of words for
every two of its rows, and C (rows x columns) holds float32.

A float32 is the sum of three numbers of bfloat16, its parts: A can have them, B cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .amx_memory import DEPTH, ROW, SIDE, TILE
from .vectors import INT, LANE, Emitter, emit_loop

_BYTE = ir.IntType(8)
_FLOAT = ir.FloatType()
_WORDS = ir.VectorType(LANE, SIDE)
# C's tiles, and two of A and two of B beside them.
_OF_A, _OF_B = 4, 6
_CONFIGURATION = bytes([1] + 15 * [0] + 8 * [ROW, 0] + 16 * [0] + 8 * [SIDE] + 8 * [0])

_HIGH, _MAGNITUDE, _INFINITE, _NORMAL = 0xFFFF0000, 0x7FFFFFFF, 0x7F800000, 0x00800000


class TileEmitter(Emitter):
    """Emits code for vectors of 16 float32, whatever registers the CPU has."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder, _FLOAT, ROW)

    def words(self, value: int) -> Any:
        """Return a constant in every lane."""
        return ir.Constant(_WORDS, [value] * SIDE)

    def spread(self, word: Any) -> Any:
        """Return a word in every lane."""
        nothing = ir.Constant(_WORDS, ir.Undefined)
        first = self.builder.insert_element(nothing, word, LANE(0))
        return self.builder.shuffle_vector(first, nothing, self.words(0))

    def normal(self, words: Any) -> list[Any]:
        """Return the low and the high numbers of words, 0 for those that are not normal."""
        builder, found = self.builder, []
        for half in builder.shl(words, self.words(16)), builder.and_(words, self.words(_HIGH)):
            exponent = builder.and_(half, self.words(_INFINITE))
            is_normal = builder.icmp_unsigned("!=", exponent, self.words(0))
            number = builder.bitcast(half, self.vector)
            found.append(builder.select(is_normal, number, self.zero))
        return found

    def parts(self, x: Any, count: int) -> list[Any]:
        """Return the bits of the parts of numbers, largest first: 8 bits of the numbers each.

        One part is for numbers of bfloat16. Infinity and NaN are the first part, and others 0.
        """
        builder = self.builder
        found: list[Any] = []
        for n in range(count):
            bits = builder.bitcast(x, _WORDS)
            if n == count - 1:
                return [*found, bits]
            part = builder.and_(bits, self.words(_HIGH))
            found.append(part)
            x = builder.fsub(x, builder.bitcast(part, self.vector))
            if n == 0:
                x = builder.select(self.is_nonfinite(bits), self.zero, x)
        raise AssertionError(count)

    def packed(self, low: Any, high: Any, count: int) -> list[Any]:
        """Return the words of every part of two vectors."""
        builder, sixteen = self.builder, self.words(16)
        return [
            builder.or_(builder.and_(b, self.words(_HIGH)), builder.lshr(a, sixteen))
            for a, b in zip(self.parts(low, count), self.parts(high, count), strict=True)
        ]

    def is_nonfinite(self, bits: Any) -> Any:
        """Return which numbers are infinity or NaN."""
        exponent = self.builder.and_(bits, self.words(_INFINITE))
        return self.builder.icmp_unsigned("==", exponent, self.words(_INFINITE))

    def is_subnormal(self, bits: Any) -> Any:
        """Return which numbers are not 0 and smaller than normal ones."""
        magnitude = self.builder.and_(bits, self.words(_MAGNITUDE))
        before = self.builder.sub(magnitude, self.words(1))  # of 0 the largest word
        return self.builder.icmp_unsigned("<", before, self.words(_NORMAL - 1))

    def special(self, kind: Special, *vectors: Any) -> Any:
        """Return in which lanes a number of one of the vectors is special."""
        builder = self.builder
        first, second = (kind(self, builder.bitcast(x, _WORDS)) for x in vectors)
        return builder.or_(first, second)

    def chosen(self, n: Any, first: Any, last: Any, place: Any, other: Any) -> Any:
        """Return an address if n lies between two numbers, else the other one."""
        builder = self.builder
        is_late = builder.icmp_signed(">=", n, first)
        is_early = builder.icmp_signed("<", n, last)
        return builder.select(builder.and_(is_late, is_early), place, other)

    def lanes_of(self, flags: Any) -> Any:
        """Return a number whose bits are the lanes' flags."""
        return self.builder.zext(self.builder.bitcast(flags, ir.IntType(SIDE)), INT)


# Says which numbers a product by tiles does not multiply as float32 would.
Special = Callable[[TileEmitter, Any], Any]


def _instruction(builder: Any, name: str, *args: Any) -> None:
    """Emit one of the matrix unit's instructions; numbers of tiles are constants."""
    name = f"llvm.x86.{name}"
    made = builder.module.globals.get(name)
    if made is None:
        kind = ir.FunctionType(ir.VoidType(), [x.type for x in args])
        made = ir.Function(builder.module, kind, name)
    builder.call(made, args)


def _address(builder: Any, place: Any) -> Any:
    return builder.inttoptr(place, _BYTE.as_pointer())


def emit_begin(builder: Any) -> None:
    """Emit the configuration of eight whole tiles."""
    kind = ir.ArrayType(_BYTE, len(_CONFIGURATION))
    value = ir.Constant(kind, bytearray(_CONFIGURATION))
    where = cgutils.global_constant(builder.module, "tile_configuration", value)
    _instruction(builder, "ldtilecfg", builder.bitcast(where, _BYTE.as_pointer()))


def emit_end(builder: Any) -> None:
    """Emit the return of the tiles, so that threads need not keep their state."""
    _instruction(builder, "tilerelease")


def emit_amx(
    builder: Any, parts: int, high: int, wide: int, a: Any, b: Any, steps: Any, c: Any
) -> None:
    """Emit ``C = A B`` of `high` times `wide` tiles by the matrix unit."""

    def load(tile: int, place: Any) -> None:
        _instruction(builder, "tileloadd64", _BYTE(tile), _address(builder, place), INT(ROW))

    cells = [(m, n) for m in range(high) for n in range(wide)]
    for m, n in cells:
        _instruction(builder, "tilezero", _BYTE(2 * m + n))
    a_tile, b_tile = (builder.mul(steps, INT(count * TILE)) for count in (parts, 1))

    def step(_: Any, places: list[Any]) -> list[Any]:
        a_place, b_place = places
        for n in range(wide):
            load(_OF_B + n, builder.add(b_place, b_tile) if n else b_place)
        for part in reversed(range(parts)):
            for m in range(high):
                place = builder.add(a_place, INT(part * TILE))
                load(_OF_A + m, builder.add(place, a_tile) if m else place)
            for m, n in cells:
                _instruction(
                    builder, "tdpbf16ps", _BYTE(2 * m + n), _BYTE(_OF_A + m), _BYTE(_OF_B + n)
                )
        return [builder.add(a_place, INT(parts * TILE)), builder.add(b_place, INT(TILE))]

    emit_loop(builder, steps, [a, b], step)
    for m, n in cells:
        place = _address(builder, builder.add(c, INT((2 * m + n) * TILE)))
        _instruction(builder, "tilestored64", _BYTE(2 * m + n), place, INT(ROW))


def emit_emulated(
    builder: Any, parts: int, high: int, wide: int, a: Any, b: Any, steps: Any, c: Any
) -> None:
    """Emit what `emit_amx` does for one tile, with its order of sums, in vectors.

    The low and the high numbers have sums of their own, which join the result after each step.
    Operands that are no normal numbers are 0.
    """
    assert (high, wide) == (1, 1)
    emit = TileEmitter(builder)

    def row(r: Any, _: list[Any]) -> list[Any]:
        across = builder.mul(r, INT(ROW))

        def step(s: Any, sums: list[Any]) -> list[Any]:
            total = sums[0]
            b_step = builder.add(b, builder.mul(s, INT(TILE)))
            a_step = builder.add(builder.add(a, across), builder.mul(s, INT(parts * TILE)))
            for part in reversed(range(parts)):
                a_row = builder.add(a_step, INT(part * TILE))
                total = builder.fadd(total, _emulate_step(emit, a_row, b_step))
            return [total]

        (total,) = emit_loop(builder, steps, [emit.zero], step)
        emit.store(total, builder.add(c, across))
        return []

    emit_loop(builder, INT(SIDE), [], row)


def _emulate_step(emit: TileEmitter, a_row: Any, b: Any) -> Any:
    builder = emit.builder

    def pair(k: Any, sums: list[Any]) -> list[Any]:
        word = emit.load(builder.add(a_row, builder.mul(k, INT(4))), LANE)
        words = emit.load(builder.add(b, builder.mul(k, INT(ROW))), _WORDS)
        operands = zip(emit.normal(emit.spread(word)), emit.normal(words), sums, strict=True)
        return [emit.fma(*each) for each in operands]

    return builder.fadd(*emit_loop(builder, INT(SIDE), [emit.zero, emit.zero], pair))


def block_of(emit: Callable[..., None], parts: int, high: int, wide: int) -> Any:
    """Make the function that multiplies `high` tiles of A, in parts, by `wide` tiles of B.

    It takes the addresses of A and B, as `row_packer` and its siblings leave them, the steps of the
    contraction, and where C's tiles go: that of row m and column n ``2 * m + n`` tiles further.
    """

    @intrinsic
    def block(typingctx, a, b, steps, c):
        def codegen(context, builder, sig, args):
            emit(builder, parts, high, wide, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return block


def statement(emit: Callable[[Any], None] | None) -> Any:
    """Make the function without arguments that does what `emit` emits."""

    @intrinsic
    def run(typingctx):
        def codegen(context, builder, sig, args):
            if emit is not None:
                emit(builder)
            return context.get_dummy_value()

        return types.void(), codegen

    return run


def row_packer(count: int, kind: Special) -> Any:
    """Make the function that packs a row of A whose numbers lie side by side.

    It returns whether one of them is special.
    """

    @intrinsic
    def pack(typingctx, source, steps, target):
        def codegen(context, builder, sig, args):
            source, steps, target = args
            emit = TileEmitter(builder)

            def step(s, values):
                low, high, found = values
                place = builder.add(source, builder.mul(s, INT(4 * DEPTH)))
                low, high = emit.load(place), emit.load(builder.add(place, INT(ROW)))
                to = builder.add(target, builder.mul(s, INT(count * TILE)))
                for n, words in enumerate(emit.packed(low, high, count)):
                    emit.store(words, builder.add(to, INT(n * TILE)))
                here = emit.special(kind, low, high)
                return [low, high, builder.or_(found, here)]

            none = ir.Constant(ir.VectorType(ir.IntType(1), SIDE), [0] * SIDE)
            *_, found = emit_loop(builder, steps, [emit.zero, emit.zero, none], step)
            return emit.lanes_of(found)

        return types.int64(*[types.int64] * 3), codegen

    return pack


def _transposed(emit: TileEmitter, rows: list[Any]) -> list[Any]:
    """Return the columns of a square."""
    half = SIDE // 2
    low = [n // 2 + n % 2 * SIDE for n in range(SIDE)]
    high = [n + half for n in low]
    for _ in range(SIDE.bit_length() - 1):
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [emit.shuffle(a, b, part) for a, b in pairs for part in (low, high)]
    return rows


def square_packer(count: int) -> Any:
    """Make the function that packs one step of 16 rows of A, of which every column is one vector.

    Columns before `first` and from `left` on are taken to be 0, which `zeros` is the address of.
    """

    @intrinsic
    def pack(typingctx, source, step, first, left, zeros, target):
        def codegen(context, builder, sig, args):
            source, step, first, left, zeros, target = args
            emit = TileEmitter(builder)

            def column(k):
                place = builder.add(source, builder.mul(step, INT(k)))
                return emit.load(emit.chosen(INT(k), first, left, place, zeros))

            low, high = (
                _transposed(emit, [column(k + begin) for k in range(SIDE)]) for begin in (0, SIDE)
            )
            for r in range(SIDE):
                for n, words in enumerate(emit.packed(low[r], high[r], count)):
                    emit.store(words, builder.add(target, INT(n * TILE + r * ROW)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return pack


def column_packer(kind: Special) -> Any:
    """Make the function that packs one step of 16 columns of B.

    Rows before `first` and from `left` on are taken to be 0, which `zeros` is the address of. It
    returns which columns have special numbers, as bits.
    """

    @intrinsic
    def pack(typingctx, source, row_size, first, left, zeros, target):
        def codegen(context, builder, sig, args):
            source, row_size, first, left, zeros, target = args
            emit = TileEmitter(builder)

            def row(k):
                place = builder.add(source, builder.mul(row_size, k))
                return emit.load(emit.chosen(k, first, left, place, zeros))

            def pair(k, values):
                low, high = row(k), row(builder.add(k, INT(SIDE)))
                to = builder.add(target, builder.mul(k, INT(ROW)))
                (words,) = emit.packed(low, high, 1)
                emit.store(words, to)
                here = emit.special(kind, low, high)
                return [builder.or_(values[0], here)]

            none = ir.Constant(ir.VectorType(ir.IntType(1), SIDE), [0] * SIDE)
            (found,) = emit_loop(builder, INT(SIDE), [none], pair)
            return emit.lanes_of(found)

        return types.int64(*[types.int64] * 6), codegen

    return pack


def finisher(lanes: int, adds: bool) -> Any:
    """Make the function that brings rows of a tile of C to where they belong.

    They are multiplied by `alpha`, and the numbers at `maxima` become the maxima of themselves and
    of them; or with `adds`, they are added to what is there.
    """

    @intrinsic
    def finish(typingctx, tile, rows, alpha, c, row_size, maxima):
        def codegen(context, builder, sig, args):
            tile, rows, alpha, c, row_size, maxima = args
            emit = Emitter(builder, _FLOAT, 4 * lanes)
            factor = emit.splat(alpha)

            def row(r, largest):
                value = emit.load(builder.add(tile, builder.mul(r, INT(ROW))))
                place = builder.add(c, builder.mul(r, row_size))
                if adds:
                    emit.store(builder.fadd(emit.load(place), value), place)
                    return []
                value = builder.fmul(value, factor)
                emit.store(value, place)
                return [emit.larger(value, largest[0])]

            largest = emit_loop(builder, rows, [] if adds else [emit.load(maxima)], row)
            if not adds:
                emit.store(largest[0], maxima)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, alpha, *[types.int64] * 3), codegen

    return finish
