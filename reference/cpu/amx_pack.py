"""Packing of rows of bfloat16 and float16 for products by tiles.

A number of float16 is the sum of two of bfloat16, exactly: its parts. Of a contraction over keys or
queries, a word of an operand holds numbers n and n + 16 of a step. So it does of one over d, except
of bfloat16: there, it holds two that are neighbours, so that rows of K are rows of A as they lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .amx_code import WORDS, TileEmitter, helper_for
from .amx_memory import DEPTH, ROW, SIDE, TILE
from .vectors import INT, LANE, emit_loop
from .widen import BFLOAT16, FLOAT16, emit_half

_HALF = ir.IntType(16)
_HALVES, _FEW = ir.VectorType(_HALF, DEPTH), ir.VectorType(_HALF, SIDE)
_FLAG = ir.IntType(1)
_EXPONENT, _MAGNITUDE = 0x7F80, 0x7FFF
SIZE = 2  # bytes of a number


class _BfloatEmitter(TileEmitter):
    """Emits code for vectors of numbers of bfloat16."""

    count, exponent = 1, _EXPONENT  # parts of a number

    def halves(self, value: int, kind: Any = _HALVES) -> Any:
        """Return a constant in every number."""
        return ir.Constant(kind, [value] * kind.count)

    def first_halves(self, count: Any, kind: Any) -> Any:
        """Return a mask of the first `count` numbers, or of all."""
        builder = self.builder
        most = INT(kind.count)
        count = builder.select(builder.icmp_signed("<", count, most), count, most)
        nothing = ir.Constant(kind, ir.Undefined)
        first = builder.insert_element(nothing, builder.trunc(count, _HALF), LANE(0))
        zeros = ir.Constant(ir.VectorType(LANE, kind.count), [0] * kind.count)
        every = builder.shuffle_vector(first, nothing, zeros)
        return builder.icmp_signed("<", ir.Constant(kind, list(range(kind.count))), every)

    def row(self, source: Any, row_size: Any, n: int, last: Any, mask: Any, kind: Any) -> Any:
        """Return numbers of row n, or of the last one where that is before; 0 without `mask`."""
        builder = self.builder
        is_early = builder.icmp_signed("<", INT(n), last)
        row = builder.select(is_early, INT(n), last)
        place = builder.add(source, builder.mul(row, row_size))
        return self.load_some(place, mask, self.halves(0, kind), SIZE)

    def nonfinite(self, halves: Any, exponent: int) -> Any:
        """Return which numbers are infinity or NaN."""
        mask = self.halves(exponent, halves.type)
        return self.builder.icmp_unsigned("==", self.builder.and_(halves, mask), mask)

    def finite(self, halves: Any) -> tuple[Any, Any]:
        """Return numbers, with 0 for those that are infinity or NaN, and which these are."""
        found = self.nonfinite(halves, self.exponent)
        return self.builder.select(found, self.halves(0, halves.type), halves), found

    def special(self, words: Any) -> Any:
        """Return which numbers tiles do not multiply as float32 would: subnormal ones."""
        builder = self.builder
        halves = builder.bitcast(words, _HALVES)
        magnitude = builder.and_(halves, self.halves(_MAGNITUDE))
        before = builder.sub(magnitude, self.halves(1))  # of 0 the largest
        return builder.icmp_unsigned("<", before, self.halves(0x7F))

    def row_words(self, halves: Any) -> list[Any]:
        """Return the words of every part of a step of a row."""
        return [self.builder.bitcast(halves, WORDS)]

    def pair_words(self, low: Any, high: Any) -> tuple[list[Any], Any]:
        """Return the words of every part of two rows, and which numbers were not finite."""
        builder = self.builder
        low, high = (builder.zext(x, WORDS) for x in (low, high))
        words = builder.or_(low, builder.shl(high, self.words(16)))
        halves, found = self.finite(builder.bitcast(words, _HALVES))
        return [builder.bitcast(halves, WORDS)], found

    def as_number(self, flags: Any) -> Any:
        """Return a number of 64 bits, one for each flag."""
        return self.builder.zext(self.builder.bitcast(flags, ir.IntType(flags.type.count)), INT)

    @staticmethod
    def widened(builder: Any, stored: Any) -> Any:
        """Return a number as float32."""
        bits = builder.shl(builder.zext(stored, LANE), LANE(16))
        return builder.bitcast(bits, ir.FloatType())


class _HalfEmitter(_BfloatEmitter):
    """Emits code for vectors of numbers of float16."""

    count, exponent = 2, 0x7C00

    def special(self, words: Any) -> Any:
        """Return which numbers are infinity or NaN: another number's part may be 0."""
        return self.nonfinite(self.builder.bitcast(words, _HALVES), _EXPONENT)

    def row_words(self, halves: Any) -> list[Any]:
        """Return the words of every part of a step of a row."""
        low, high = (
            self.shuffle(halves, halves, list(range(first, first + SIDE))) for first in (0, SIDE)
        )
        low, high = (self.widened(self.builder, x) for x in (low, high))
        return self.packed(low, high, self.count)

    def pair_words(self, low: Any, high: Any) -> tuple[list[Any], Any]:
        """Return the words of every part of two rows, and which numbers were not finite."""
        (low, of_low), (high, of_high) = self.finite(low), self.finite(high)
        found = self.builder.or_(of_low, of_high)
        low, high = (self.widened(self.builder, x) for x in (low, high))
        return self.packed(low, high, self.count, finite=True), found

    @staticmethod
    def widened(builder: Any, stored: Any) -> Any:
        """Return numbers as float32."""
        is_vector = isinstance(stored.type, ir.VectorType)
        kind = ir.VectorType(ir.FloatType(), stored.type.count) if is_vector else ir.FloatType()
        return emit_half(builder, stored, kind)


def _column_packer(emitter: type[_BfloatEmitter]) -> Any:
    """Make the function that packs one step of 16 columns of B, which are rows of numbers."""

    @intrinsic
    def pack(typingctx, source, row_size, rows, count, target):
        """Pack 32 numbers of each row or fewer; the last of `rows` is repeated.

        Returns two flags for each row: it is special if one of them is set.
        """

        def codegen(context, builder, sig, args):
            source, row_size, rows, count, target = args
            emit = emitter(builder)
            mask, last = emit.first_halves(count, _HALVES), builder.sub(rows, INT(1))
            words = [
                emit.row_words(emit.row(source, row_size, n, last, mask, _HALVES))
                for n in range(SIDE)
            ]
            found = ir.Constant(ir.VectorType(_FLAG, DEPTH), [0] * DEPTH)
            for part in range(emit.count):
                for n, column in enumerate(emit.transposed([row[part] for row in words])):
                    emit.store(column, builder.add(target, INT(part * TILE + n * ROW)))
                    if part == 0:
                        found = builder.or_(found, emit.special(column))
            return emit.as_number(found)

        return types.int64(*[types.int64] * 5), codegen

    return pack


def _pair_packer(emitter: type[_BfloatEmitter], turns: bool) -> Any:
    """Make the function that packs 16 numbers of 32 rows: as rows of B, or as columns of A."""

    @intrinsic
    def pack(typingctx, source, row_size, rows, count, target):
        """Pack one step of a contraction over rows: numbers of rows n and n + 16 are a word.

        There may be fewer than 16 numbers; the last of `rows` is repeated. Infinity and NaN become
        0; returns whether there were any.
        """

        def codegen(context, builder, sig, args):
            source, row_size, rows, count, target = args
            emit = emitter(builder)
            mask, last = emit.first_halves(count, _FEW), builder.sub(rows, INT(1))
            packed, found = [], None
            for n in range(SIDE):
                low, high = (
                    emit.row(source, row_size, row, last, mask, _FEW) for row in (n, n + SIDE)
                )
                words, here = emit.pair_words(low, high)
                packed.append(words)
                found = here if found is None else builder.or_(found, here)
            for part in range(emit.count):
                rows = [words[part] for words in packed]
                for n, row in enumerate(emit.transposed(rows) if turns else rows):
                    emit.store(row, builder.add(target, INT(part * TILE + n * ROW)))
            return emit.as_number(found)

        return types.int64(*[types.int64] * 5), codegen

    return pack


def _row_reader(emitter: type[_BfloatEmitter], copies: bool) -> Any:
    """Make the function that looks for special numbers in a row, and may copy it."""

    @intrinsic
    def read(typingctx, source, count, steps, target):
        """Return flags, of which one is set if there are any.

        Words are copied to a row if they are those of the numbers, or to tiles (step, part).
        """

        def codegen(context, builder, sig, args):
            source, count, steps, target = args
            emit = emitter(builder)
            step_size = INT(ROW if emit.count == 1 else emit.count * TILE)

            def step(s, values):
                mask = emit.first_halves(builder.sub(count, builder.mul(s, INT(DEPTH))), _HALVES)
                place = builder.add(source, builder.mul(s, INT(ROW)))
                words = emit.row_words(emit.load_some(place, mask, emit.halves(0), SIZE))
                if copies:
                    to = builder.add(target, builder.mul(s, step_size))
                    for part, each in enumerate(words):
                        emit.store(each, builder.add(to, INT(part * TILE)))
                return [builder.or_(values[0], emit.special(words[0]))]

            none = ir.Constant(ir.VectorType(_FLAG, DEPTH), [0] * DEPTH)
            return emit.as_number(*emit_loop(builder, steps, [none], step))

        return types.int64(*[types.int64] * 4), codegen

    return read


def _loader(emitter: type[_BfloatEmitter]) -> Any:
    @intrinsic
    def load_number(typingctx, place):
        """Return the number at an address as float32."""

        def codegen(context, builder, sig, args):
            stored = builder.load(builder.inttoptr(args[0], _HALF.as_pointer()))
            stored.align = SIZE
            return emitter.widened(builder, stored)

        return types.float32(types.int64), codegen

    return load_number


class Packing(NamedTuple):
    """How numbers of a type become operands; the functions are helpers.

    `size` is the distance of rows in bytes, and `flags` has a number for each row: whether it has
    a special number, one that tiles do not multiply as float32 would.

    Attributes
    ----------
    name : str
        Of the type.
    parts : int
        Of each number.
    load : Any
        Returns the number at an address.
    queries : Any
        ``(source, size, rows, depth, steps, target, flags)``: packs rows as columns of B, in tiles
        (16 rows, step, part). Returns whether any is special.
    keys : Any
        Likewise as rows of A. Those that are not read in place are copied, as rows if there is one
        part, else in tiles (16 rows, step, part). Returns how many are read in place, too.
    turned : Any
        ``(source, size, rows, columns, target)``: packs rows as columns of A, in tiles (16 columns,
        step, part), without what is not finite. Returns whether there was any.
    pairs : Any
        ``(source, size, rows, columns, target, steps)``: packs up to 32 rows as rows of B, in tiles
        (16 columns, step, part) of which there are `steps`; as `turned`.
    """

    name: str
    parts: int
    load: Any
    queries: Any
    keys: Any
    turned: Any
    pairs: Any


def _packing(name: str, emitter: type[_BfloatEmitter]) -> Packing:
    parts = emitter.count
    pack_columns = _column_packer(emitter)
    read_row, copy_row = _row_reader(emitter, False), _row_reader(emitter, True)
    turn, pair = _pair_packer(emitter, True), _pair_packer(emitter, False)

    @helper_for(name)
    def queries(source, size, rows, depth, steps, target, flags):
        any_special = 0
        for i in range(0, rows, SIDE):
            found, left = 0, rows - i
            for s in range(steps):
                place = source + i * size + s * ROW
                found |= pack_columns(place, size, left, depth - s * DEPTH, target)
                target += parts * TILE
            for n in range(min(SIDE, left)):
                flags[i + n] = found >> 2 * n & 3
            any_special |= found
        return any_special

    @helper_for(name)
    def keys(source, size, rows, depth, steps, target, flags):
        in_place = 0 if parts > 1 or depth % DEPTH else rows // SIDE * SIDE
        any_special = 0
        for j in range(in_place):
            flags[j] = read_row(source + j * size, depth, steps, 0)
            any_special |= flags[j]
        for j in range(in_place, (rows + DEPTH - 1) // DEPTH * DEPTH):
            place = target + j * steps * ROW
            if parts > 1:
                place = target + j // SIDE * steps * parts * TILE + j % SIDE * ROW
            flags[j] = copy_row(source + min(j, rows - 1) * size, depth, steps, place)
            any_special |= flags[j]
        return in_place, any_special

    @helper_for(name)
    def turned(source, size, rows, columns, target):
        any_special = 0
        for d in range(0, columns, SIDE):
            for j in range(0, rows, DEPTH):
                place = source + j * size + d * SIZE
                any_special |= turn(place, size, rows - j, columns - d, target)
                target += parts * TILE
        return any_special

    @helper_for(name)
    def pairs(source, size, rows, columns, target, steps):
        any_special = 0
        for d in range(0, columns, SIDE):
            any_special |= pair(source + d * SIZE, size, rows, columns - d, target)
            target += steps * parts * TILE
        return any_special

    return Packing(name, parts, _loader(emitter), queries, keys, turned, pairs)


BFLOAT = _packing("bfloat16", _BfloatEmitter)
PACKINGS = {BFLOAT16: BFLOAT, FLOAT16: _packing("float16", _HalfEmitter)}
