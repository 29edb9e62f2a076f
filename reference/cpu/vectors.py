"""The vectors of this machine's CPU, and LLVM code that works on them.

No loop that Numba compiles keeps a block of sums in registers, and LLVM's own vectoriser takes
narrower vectors than some CPUs have. What needs either is emitted here as vector code.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llvmlite import binding, ir

INT = ir.IntType(64)
LANE = ir.IntType(32)


class Registers(NamedTuple):
    """What a CPU's vector registers hold.

    Attributes
    ----------
    vector_bytes : int
        Bytes of a register.
    rows : int
        Rows of two vectors of sums that stay in registers beside two vectors of one operand and
        the other operand's element.
    """

    vector_bytes: int
    rows: int


def registers_of(features: Mapping[str, bool], machine: str) -> Registers:
    """Return the registers of a CPU with these features, as LLVM names them."""
    if features.get("avx512f"):
        return Registers(64, 12)
    if features.get("avx"):
        return Registers(32, 6)
    return Registers(16, 12 if machine in ("aarch64", "arm64") else 6)


HOST = registers_of(binding.get_host_cpu_features(), platform.machine())

# 2**f = 1 + sum of c_k f**k on [-1/2, 1/2]. In float32 these c_k have the smallest largest relative
# error, 2**-28.9. In float64 they are (log 2)**k / k!; the first term left out is below 2**-57.
_POWER_TERMS = {
    32: (
        0.693147202855046, 0.24022647913631734, 0.05550332471155678, 0.009618437357477753,
        0.0013398874404651935, 0.00015353361938034125,
    ),
    64: tuple(math.log(2.0) ** k / math.factorial(k) for k in range(1, 14)),
}  # fmt: skip
_MANTISSA, _BIAS = {32: 23, 64: 52}, {32: 127, 64: 1023}


def _like(kind: Any, value: float) -> Any:
    """Return a constant of a number's type, or one for every lane of a vector's."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [_like(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def emit_exp2(builder: Any, x: Any) -> Any:
    """Emit 2**x for x at most 0, of a number or of each lane of a vector.

    It is 0 below 2**-126.5 (float64: 2**-1022.5), and NaN for NaN.
    """
    kind, flags = x.type, ("contract",)
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    bits = 64 if isinstance(scalar, ir.DoubleType) else 32
    word: Any = ir.IntType(bits)
    if isinstance(kind, ir.VectorType):
        word = ir.VectorType(word, kind.count)
    # A sum with `shift` has no bits below 1, and those of n + bias at its end, where x is nearest
    # to n. Shifted to the exponent they are 2**n, and 0 where n + bias is 0.
    shift = _like(kind, 1.5 * 2.0 ** _MANTISSA[bits] + _BIAS[bits])
    lowest = _like(kind, -float(_BIAS[bits]))
    held = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    shifted = builder.fadd(held, shift)
    f = builder.fsub(held, builder.fsub(shifted, shift))
    terms = (1.0, *_POWER_TERMS[bits])
    value = _like(kind, terms[-1])
    for term in terms[-2::-1]:
        value = builder.fadd(builder.fmul(value, f, flags=flags), _like(kind, term), flags=flags)
    exponent = builder.shl(builder.bitcast(shifted, word), _like(word, _MANTISSA[bits]))
    return builder.fmul(value, builder.bitcast(exponent, kind))


def emit_widened(builder: Any, stored: Any, bfloat: bool) -> Any:
    """Emit the conversion to float32 of the bits of a 16-bit float, or of each lane of a vector."""
    lanes = stored.type.count if isinstance(stored.type, ir.VectorType) else 0
    word, single = (ir.VectorType(x, lanes) if lanes else x for x in (LANE, ir.FloatType()))
    bits = builder.zext(stored, word)
    if bfloat:
        return builder.bitcast(builder.shl(bits, _like(word, 16)), single)
    # Exponents of float16 are 112 smaller, also those of subnormal numbers.
    magnitude = builder.and_(bits, _like(word, 0x7FFF))
    shifted = builder.shl(magnitude, _like(word, 13))
    scaled = builder.fmul(builder.bitcast(shifted, single), _like(single, 2.0**112))
    nonfinite = builder.or_(shifted, _like(word, 0x7F800000))
    is_finite = builder.icmp_unsigned("<", magnitude, _like(word, 0x7C00))
    sign = builder.shl(builder.and_(bits, _like(word, 0x8000)), _like(word, 16))
    value = builder.select(is_finite, builder.bitcast(scaled, word), nonfinite)
    return builder.bitcast(builder.or_(value, sign), single)


class Emitter:
    """Emits loads, stores and arithmetic of vectors of one element type."""

    def __init__(self, builder: Any, scalar: Any, vector_bytes: int = HOST.vector_bytes) -> None:
        self.builder, self.scalar = builder, scalar
        self.itemsize = 8 if isinstance(scalar, ir.DoubleType) else 4
        self.lanes = vector_bytes // self.itemsize
        self.vector = ir.VectorType(scalar, self.lanes)
        self.zero = ir.Constant(self.vector, [0.0] * self.lanes)

    def at(self, base: Any, row: int, row_stride: Any, column: Any) -> Any:
        """Return the address of an element, `column` elements into a row."""
        builder = self.builder
        element = builder.add(builder.mul(INT(row), row_stride), column)
        return builder.add(base, builder.mul(element, INT(self.itemsize)))

    def opaque(self, value: Any) -> Any:
        """Return an integer of which LLVM does not know how it was computed.

        It would otherwise compute the addresses of a loop from one another, step by step.
        """
        same = ir.InlineAsm(ir.FunctionType(INT, (INT,)), "", "=r,0")
        return self.builder.call(same, (value,))

    def load(self, place: Any, kind: Any = None) -> Any:
        """Return a vector at an address, or a value of another kind."""
        kind = kind or self.vector
        value = self.builder.load(self.builder.inttoptr(place, kind.as_pointer()))
        value.align = 8 if kind is INT else self.itemsize
        return value

    def load_some(self, place: Any, mask: Any, default: Any, itemsize: int) -> Any:
        """Return a vector of what is at an address, and of `default` in lanes without `mask`.

        Nothing is read for these lanes. `itemsize` is that of its elements.
        """
        kind, pointer = default.type, default.type.as_pointer()
        function = self._masked("load", kind, itemsize, (pointer, LANE, mask.type, kind), kind)
        where = self.builder.inttoptr(place, pointer)
        return self.builder.call(function, (where, LANE(itemsize), mask, default))

    def store_some(self, value: Any, place: Any, mask: Any) -> None:
        """Write a vector's lanes with `mask` at an address."""
        kind, pointer = value.type, value.type.as_pointer()
        takes = kind, pointer, LANE, mask.type
        function = self._masked("store", kind, self.itemsize, takes, ir.VoidType())
        where = self.builder.inttoptr(place, pointer)
        self.builder.call(function, (value, where, LANE(self.itemsize), mask))

    def _masked(self, what: str, kind: Any, itemsize: int, takes: Any, returns: Any) -> Any:
        """Return LLVM's function that loads or stores some lanes of a vector."""
        code = {1: "i8", 2: "i16", 4: "f32", 8: "f64"}[itemsize]
        name, module = f"llvm.masked.{what}.v{kind.count}{code}.p0", self.builder.module
        return module.globals.get(name) or ir.Function(
            module, ir.FunctionType(returns, takes), name
        )

    def load_rows(self, places: list[Any], rows: Any, columns: Any, zero: Any, size: int) -> Any:
        """Return the vectors at some addresses: of the first `rows`, and their first `columns`.

        The others are `zero`, and nothing is read for them. `size` is that of an element.
        """
        builder, kind, lanes = self.builder, zero.type, self.lanes
        whole, part = builder.append_basic_block("whole"), builder.append_basic_block("part")
        read = builder.append_basic_block("read")
        all_rows = builder.icmp_signed(">=", rows, INT(len(places)))
        all_columns = builder.icmp_signed(">=", columns, INT(lanes))
        builder.cbranch(builder.and_(all_rows, all_columns), whole, part)
        builder.position_at_end(whole)
        found = []
        for place in places:
            value = builder.load(builder.inttoptr(place, kind.as_pointer()))
            value.align = size
            found.append(value)
        builder.branch(read)
        builder.position_at_end(part)
        mask = self.first_lanes(columns)
        none, others = ir.Constant(mask.type, [0] * lanes), []
        for n, place in enumerate(places):
            seen = builder.select(builder.icmp_signed("<", INT(n), rows), mask, none)
            others.append(self.load_some(place, seen, zero, size))
        builder.branch(read)
        builder.position_at_end(read)
        values = []
        for value, other in zip(found, others, strict=True):
            joined = builder.phi(kind)
            joined.add_incoming(value, whole)
            joined.add_incoming(other, part)
            values.append(joined)
        return values

    def store_rows(
        self, values: list[Any], count: Any, place: Any, step: Any, mask: Any = None
    ) -> None:
        """Write the first `count` vectors, at least one, `step` bytes apart; lanes with `mask`."""
        builder, end = self.builder, self.builder.append_basic_block("end")
        for n, value in enumerate(values):
            target = builder.add(place, builder.mul(step, INT(n)))
            if mask is None:
                self.store(value, target)
            else:
                self.store_some(value, target, mask)
            following = builder.append_basic_block("row") if n + 1 < len(values) else end
            builder.cbranch(builder.icmp_signed("<", INT(n + 1), count), following, end)
            builder.position_at_end(following)

    def first_lanes(self, count: Any) -> Any:
        """Return a mask of the first lanes, `count` of them or all."""
        lanes = ir.Constant(ir.VectorType(INT, self.lanes), list(range(self.lanes)))
        undefined = ir.Constant(lanes.type, ir.Undefined)
        first = self.builder.insert_element(undefined, count, LANE(0))
        zeros = ir.Constant(ir.VectorType(LANE, self.lanes), [0] * self.lanes)
        every = self.builder.shuffle_vector(first, undefined, zeros)
        return self.builder.icmp_signed("<", lanes, every)

    def transposed(self, rows: list[Any]) -> list[Any]:
        """Return the columns of a square of as many vectors as each of them has lanes."""
        lanes, half = self.lanes, self.lanes // 2
        low = [n // 2 + n % 2 * lanes for n in range(lanes)]
        high = [n + half for n in low]
        # Each round merges rows from both halves. After log2(lanes) of them the square is turned.
        for _ in range(lanes.bit_length() - 1):
            pairs = zip(rows[:half], rows[half:], strict=True)
            rows = [self.shuffle(a, b, part) for a, b in pairs for part in (low, high)]
        return rows

    def store(self, value: Any, place: Any) -> None:
        """Write a value at an address."""
        pointer = self.builder.inttoptr(place, value.type.as_pointer())
        self.builder.store(value, pointer).align = self.itemsize

    def splat(self, value: Any, lanes: int | None = None) -> Any:
        """Return a vector that holds a value in every lane."""
        lanes = lanes or self.lanes
        undefined = ir.Constant(ir.VectorType(self.scalar, lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, value, LANE(0))
        zeros = ir.Constant(ir.VectorType(LANE, lanes), [0] * lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def every(self, flag: Any) -> Any:
        """Return a mask of all lanes or of none."""
        some = ir.Constant(ir.VectorType(ir.IntType(1), self.lanes), [1] * self.lanes)
        return self.builder.select(flag, some, ir.Constant(some.type, [0] * self.lanes))

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """Return some lanes of a and, beyond a's, of b."""
        indices = ir.Constant(ir.VectorType(LANE, len(lanes)), lanes)
        return self.builder.shuffle_vector(a, b, indices)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """Return x * y + z of vectors, rounded once."""
        kind = self.vector
        name = f"llvm.fma.v{self.lanes}f{8 * self.itemsize}"
        known = self.builder.module.globals.get(name)
        made = known or ir.Function(
            self.builder.module, ir.FunctionType(kind, (kind, kind, kind)), name
        )
        return self.builder.call(made, (x, y, z))

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """Return x * y + z of vectors, rounded once where the CPU can."""
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(x, y, flags=flags), z, flags=flags)

    def larger(self, x: Any, y: Any) -> Any:
        """Return the larger of x and y, lane by lane; y where x is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)


# Flags of a product that is rounded before it is added to: any flag keeps Numba from adding its
# own, which would let LLVM fuse both.
ROUNDED = ("arcp",)


def emit_loop(
    builder: Any, count: Any, initial: list[Any], body: Callable[..., list[Any]]
) -> list[Any]:
    """Emit ``for n in range(count)`` over values that `body(n, values)` makes anew."""
    start = builder.block
    loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.cbranch(builder.icmp_signed(">", count, INT(0)), loop, end)
    builder.position_at_end(loop)
    n = builder.phi(INT)
    n.add_incoming(INT(0), start)
    running = [builder.phi(value.type) for value in initial]
    updated = body(n, running)
    following = builder.add(n, INT(1))
    n.add_incoming(following, builder.block)
    for phi, before, after in zip(running, initial, updated, strict=True):
        phi.add_incoming(before, start)
        phi.add_incoming(after, builder.block)
    last = builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
    builder.position_at_end(end)
    results = [builder.phi(value.type) for value in initial]
    for result, before, after in zip(results, initial, updated, strict=True):
        result.add_incoming(before, start)
        result.add_incoming(after, last)
    return results
