"""LLVM code for tiles of bfloat16: a matrix unit's instructions, and the same sums in vectors.

A tile is 16 rows of 64 bytes. Of a contraction over 32 numbers, the words of an operand hold two
each: number n in the low half and number n + 16 in the high one, so that nothing has to be
shuffled. A (rows x 32) has one row of words for each row, B (32 x columns) one row of words for
every two of its rows, and C (rows x columns) holds float32.

A float32 is the sum of three numbers of bfloat16, its parts, or nearly that of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .amx_memory import ROW, SIDE, TILE
from .jit import helper
from .vectors import INT, LANE, Emitter, emit_loop

_BYTE = ir.IntType(8)
_ROW = INT(ROW)
FLOAT = ir.FloatType()
WORDS = ir.VectorType(LANE, SIDE)
# C's tiles, and two of A and two of B beside them.
_OF_A, _OF_B, _TILES = 4, 6, 8
_CONFIGURATION = bytes([1] + 15 * [0] + 8 * [ROW, 0] + 16 * [0] + 8 * [SIDE] + 8 * [0])

_HIGH, _MAGNITUDE, _INFINITE, _NORMAL = 0xFFFF0000, 0x7FFFFFFF, 0x7F800000, 0x00800000
_HALF = 0x8000  # of the last bit that is kept


class TileEmitter(Emitter):
    """Emits code for vectors of 16 float32, whatever registers the CPU has."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder, FLOAT, ROW)

    def words(self, value: int) -> Any:
        """Return a constant in every lane."""
        return ir.Constant(WORDS, [value] * SIDE)

    def spread(self, word: Any) -> Any:
        """Return a word in every lane."""
        nothing = ir.Constant(WORDS, ir.Undefined)
        first = self.builder.insert_element(nothing, word, LANE(0))
        return self.builder.shuffle_vector(first, nothing, self.words(0))

    def normal(self, bits: Any) -> Any:
        """Return numbers, with 0 of the same sign for subnormal ones."""
        builder = self.builder
        exponent = builder.and_(bits, self.words(_INFINITE))
        is_normal = builder.icmp_unsigned("!=", exponent, self.words(0))
        sign = builder.and_(bits, self.words(0x80000000))
        return builder.bitcast(builder.select(is_normal, bits, sign), self.vector)

    def flushed(self, x: Any) -> Any:
        """Return numbers of float32, with 0 for subnormal ones."""
        return self.normal(self.builder.bitcast(x, WORDS))

    def both(self, words: Any) -> list[Any]:
        """Return the low and the high numbers of words, 0 for subnormal ones."""
        builder = self.builder
        halves = builder.shl(words, self.words(16)), builder.and_(words, self.words(_HIGH))
        return [self.normal(half) for half in halves]

    def parts(self, x: Any, count: int, finite: bool = False) -> list[Any]:
        """Return the bits of the parts of numbers, largest first: 8 bits of the numbers each.

        One part is for numbers of bfloat16. Infinity and NaN are the first part, and others 0;
        with `finite`, no number is infinity, and every part of NaN is NaN.
        """
        builder = self.builder
        found: list[Any] = []
        for n in range(count):
            bits = builder.bitcast(x, WORDS)
            if n == count - 1:
                return [*found, bits]
            part = builder.and_(bits, self.words(_HIGH))
            found.append(part)
            x = builder.fsub(x, builder.bitcast(part, self.vector))
            if n == 0 and not finite:
                x = builder.select(self.is_nonfinite(bits), self.zero, x)
        raise AssertionError(count)

    def packed(
        self, low: Any, high: Any, count: int, finite: bool = False, rounds: bool = False
    ) -> list[Any]:
        """Return the words of every part of two vectors.

        The last part is cut off, or with `rounds` rounded to the nearest number, away from 0 if
        there are two.
        """
        builder, sixteen = self.builder, self.words(16)
        both = [self.parts(x, count, finite) for x in (low, high)]
        if rounds:
            for parts in both:
                parts[-1] = builder.add(parts[-1], self.words(_HALF))
        return [
            builder.or_(builder.and_(b, self.words(_HIGH)), builder.lshr(a, sixteen))
            for a, b in zip(*both, strict=True)
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
        first, second = (kind(self, builder.bitcast(x, WORDS)) for x in vectors)
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


class MatrixUnit:
    """Emits instructions of AMX; tiles have numbers.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    """

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def begin(self) -> None:
        """Configure eight whole tiles."""
        builder, kind = self.builder, ir.ArrayType(_BYTE, len(_CONFIGURATION))
        value = ir.Constant(kind, bytearray(_CONFIGURATION))
        where = cgutils.global_constant(builder.module, "tile_configuration", value)
        self._emit("ldtilecfg", builder.bitcast(where, _BYTE.as_pointer()))

    def end(self) -> None:
        """Return the tiles, so that threads need not keep their state."""
        self._emit("tilerelease")

    def clear(self, tile: int) -> None:
        """Set a tile to 0."""
        self._emit("tilezero", _BYTE(tile))

    def load(self, tile: int, place: Any, row: Any) -> None:
        """Load a tile whose rows begin `row` bytes apart."""
        self._emit("tileloadd64", _BYTE(tile), self._address(place), row)

    def store(self, tile: int, place: Any, row: Any) -> None:
        """Write a tile to rows that begin `row` bytes apart."""
        self._emit("tilestored64", _BYTE(tile), self._address(place), row)

    def multiply(self, c: int, a: int, b: int) -> None:
        """Add the product of two tiles to a third one."""
        self._emit("tdpbf16ps", _BYTE(c), _BYTE(a), _BYTE(b))

    def _address(self, place: Any) -> Any:
        return self.builder.inttoptr(place, _BYTE.as_pointer())

    def _emit(self, name: str, *args: Any) -> None:
        name, module = f"llvm.x86.{name}", self.builder.module
        made = module.globals.get(name)
        if made is None:
            kind = ir.FunctionType(ir.VoidType(), [x.type for x in args])
            made = ir.Function(module, kind, name)
        self.builder.call(made, args)


class EmulatedUnit(MatrixUnit):
    """Emits what `MatrixUnit` does, with its order of sums, in vectors and memory.

    Of a product of tiles, the low and the high numbers have sums of their own, from number 0 on,
    which join each other and then C. Operands and sums that are subnormal are 0.
    """

    def begin(self) -> None:
        """Do nothing: tiles are memory of the function that multiplies."""

    def end(self) -> None:
        """Do nothing."""

    def clear(self, tile: int) -> None:
        """Set a tile to 0."""
        emit, place = TileEmitter(self.builder), self._tile(tile)
        for r in range(SIDE):
            emit.store(emit.zero, self.builder.add(place, INT(r * ROW)))

    def load(self, tile: int, place: Any, row: Any) -> None:
        """Load a tile."""
        self._call("load", self._copy, place, row, self._tile(tile), _ROW)

    def store(self, tile: int, place: Any, row: Any) -> None:
        """Write a tile."""
        self._call("store", self._copy, self._tile(tile), _ROW, place, row)

    def multiply(self, c: int, a: int, b: int) -> None:
        """Add the product of two tiles to a third one."""
        self._call("multiply", self._multiplied, *(self._tile(n) for n in (c, a, b)))

    def _tile(self, tile: int) -> Any:
        """Return the address of a tile in the memory of the function."""
        builder = self.builder
        with builder.goto_entry_block():
            first = builder.function.entry_basic_block.instructions
            known = [x for x in first if x.name.startswith("tiles_of_unit")]
            kind = ir.ArrayType(ir.ArrayType(_BYTE, TILE), _TILES)
            memory = known[0] if known else builder.alloca(kind, name="tiles_of_unit")
        return builder.add(builder.ptrtoint(memory, INT), INT(tile * TILE))

    def _call(self, name: str, body: Callable[..., None], *args: Any) -> None:
        """Call a function that is emitted once for a module."""
        name, module = f"tiles.{name}", self.builder.module
        made = module.globals.get(name)
        if made is None:
            made = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT] * len(args)), name)
            made.linkage = "internal"
            made.attributes.add("noinline")
            builder = ir.IRBuilder(made.append_basic_block())
            body(builder, *made.args)
            builder.ret_void()
        self.builder.call(made, args)

    @staticmethod
    def _copy(builder: Any, source: Any, size: Any, target: Any, target_size: Any) -> None:
        emit = TileEmitter(builder)

        def row(r: Any, _: list[Any]) -> list[Any]:
            value = emit.load(builder.add(source, builder.mul(r, size)), WORDS)
            emit.store(value, builder.add(target, builder.mul(r, target_size)))
            return []

        emit_loop(builder, INT(SIDE), [], row)

    @staticmethod
    def _multiplied(builder: Any, c: Any, a: Any, b: Any) -> None:
        emit = TileEmitter(builder)

        def row(r: Any, _: list[Any]) -> list[Any]:
            across = builder.mul(r, _ROW)
            a_row, place = builder.add(a, across), builder.add(c, across)

            def pair(k: Any, sums: list[Any]) -> list[Any]:
                word = emit.load(builder.add(a_row, builder.mul(k, INT(4))), LANE)
                words = emit.load(builder.add(b, builder.mul(k, _ROW)), WORDS)
                operands = zip(emit.both(emit.spread(word)), emit.both(words), sums, strict=True)
                return [emit.flushed(emit.fma(*each)) for each in operands]

            sums = emit_loop(builder, INT(SIDE), [emit.zero, emit.zero], pair)
            added, before = emit.flushed(builder.fadd(*sums)), emit.flushed(emit.load(place))
            emit.store(emit.flushed(builder.fadd(before, added)), place)
            return []

        emit_loop(builder, INT(SIDE), [], row)


class Form(NamedTuple):
    """The tiles of C that are computed at once, and how many parts numbers of A and B have.

    Attributes
    ----------
    high, wide : int
        Tiles of A and of B, 1 or 2 of each.
    parts_a, parts_b : int
        Their parts, which lie one tile after the other.
    adds : bool
        Whether the product is added to what C holds.
    """

    high: int
    wide: int
    parts_a: int
    parts_b: int
    adds: bool = False

    def products(self) -> list[tuple[int, int]]:
        """Return the parts of A and B that are multiplied, in the order of their sum."""
        return [
            (x, y) for x in reversed(range(self.parts_a)) for y in reversed(range(self.parts_b))
        ]


class Places(NamedTuple):
    """Where the operands of a block lie: addresses and bytes.

    Attributes
    ----------
    a, a_row : Any
        The first tile of A and the distance of its rows.
    a_below, a_below_row : Any
        Those of the tile under it.
    a_step : Any
        From one step of the contraction to the next.
    b, b_beside : Any
        The first tile of B and the one beside it, each contiguous.
    b_step : Any
        As `a_step`.
    steps : Any
        Steps of the contraction.
    c, c_row : Any
        The first row of C and the distance of its rows; tiles of C lie side by side.
    """

    a: Any
    a_row: Any
    a_below: Any
    a_below_row: Any
    a_step: Any
    b: Any
    b_beside: Any
    b_step: Any
    steps: Any
    c: Any
    c_row: Any


def emit_block(unit: MatrixUnit, form: Form, places: Places) -> None:
    """Emit ``C = A B``, or ``C += A B``."""
    builder = unit.builder
    cells = [(m, n) for m in range(form.high) for n in range(form.wide)]
    c_down = builder.mul(places.c_row, INT(SIDE))

    def of_c(m: int, n: int) -> Any:
        place = builder.add(places.c, INT(n * ROW))
        return builder.add(place, c_down) if m else place

    for m, n in cells:
        if form.adds:
            unit.load(2 * m + n, of_c(m, n), places.c_row)
        else:
            unit.clear(2 * m + n)
    a_rows = places.a_row, places.a_below_row

    def step(_: Any, values: list[Any]) -> list[Any]:
        loaded_a = loaded_b = -1
        for x, y in form.products():
            if x != loaded_a:
                for m in range(form.high):
                    place = builder.add(values[m], INT(x * TILE))
                    unit.load(_OF_A + m, place, a_rows[m])
            if y != loaded_b:
                for n in range(form.wide):
                    unit.load(_OF_B + n, builder.add(values[2 + n], INT(y * TILE)), _ROW)
            loaded_a, loaded_b = x, y
            for m, n in cells:
                unit.multiply(2 * m + n, _OF_A + m, _OF_B + n)
        steps = 2 * [places.a_step] + 2 * [places.b_step]
        return [builder.add(x, y) for x, y in zip(values, steps, strict=True)]

    operands = [places.a, places.a_below, places.b, places.b_beside]
    emit_loop(builder, places.steps, operands, step)
    for m, n in cells:
        unit.store(2 * m + n, of_c(m, n), places.c_row)


def _block_of(unit: type[MatrixUnit], form: Form) -> Any:
    """Make the function that multiplies tiles of A by tiles of B; it takes `Places`."""

    @intrinsic
    def block(
        typingctx, a, a_row, a_below, a_below_row, a_step, b, b_beside, b_step, steps, c, c_row
    ):
        def codegen(context, builder, sig, args):
            emit_block(unit(builder), form, Places(*args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * len(Places._fields)), codegen

    return block


def helper_for(*variant: object) -> Callable[[Any], Any]:
    """Return `helper` for a function that is defined for several variants.

    They become part of its name: kernels from disk are linked by the names of their helpers.
    """

    def named(function: Any) -> Any:
        function.__qualname__ += "_" + "_".join(map(str, variant))
        return helper(function)

    return named


def multiplier(unit: type[MatrixUnit], parts_a: int, parts_b: int, adds: bool) -> Any:
    """Make the helper that multiplies up to two by two tiles.

    It takes `Places`, and how many rows and columns of C anybody wants.
    """
    one, broad, tall, square = (
        _block_of(unit, Form(high, wide, parts_a, parts_b, adds))
        for high in (1, 2)
        for wide in (1, 2)
    )

    @helper_for(unit.__name__, parts_a, parts_b, adds)
    def multiply_block(
        a, a_row, a_below, a_below_row, a_step, b, b_beside, b_step, steps, c, c_row, rows,
        columns,
    ):  # fmt: skip
        places = a, a_row, a_below, a_below_row, a_step, b, b_beside, b_step, steps, c, c_row
        if rows > SIDE and columns > SIDE:
            square(*places)
        elif rows > SIDE:
            tall(*places)
        elif columns > SIDE:
            broad(*places)
        else:
            one(*places)

    return multiply_block


def session(unit: type[MatrixUnit]) -> Any:
    """Make the functions that begin and end the use of a unit."""

    def statement(emit: Callable[[Any], None]) -> Any:
        @intrinsic
        def run(typingctx):
            def codegen(context, builder, sig, args):
                emit(unit(builder))
                return context.get_dummy_value()

            return types.void(), codegen

        return run

    return statement(unit.begin), statement(unit.end)
