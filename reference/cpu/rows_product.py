"""Products with rows at any addresses: queries times keys, weights times values of a leaf.

Rows of keys and values are given by their addresses, so that a page table costs nothing. They are
read where they lie, in any type in which they are stored, and become numbers of the accumulator's
type in registers; several rows of queries or weights share what was read. Every element of a result
is one sum in a fixed order, with explicit fused operations, so it depends neither on what else is
computed nor on how a row is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .codes import E4M3, E5M2, FIRST, INT4, INT8, emit_code
from .decode_tasks import LEAF
from .jit import INT as WORD
from .jit import Kernel, caller, kernel, takes
from .vectors import INT, LANE, Emitter, emit_exp2, emit_loop
from .widen import BFLOAT16, FLOAT16, NATIVE, emit_half

LINE = 64  # bytes of a cache line
# Bytes of a vector, and rows that share what is read: with as many sums as below, these stay in
# registers.
VECTOR_BYTES, ROWS = (64, 4) if binding.get_host_cpu_features().get("avx512f") else (32, 2)
KEYS = {rows: ROWS * 4 // rows for rows in (ROWS, ROWS // 2, 1)}  # of a block of scores
MOST_KEYS = KEYS[1]  # `places` are padded to a multiple of them


class _Emitter(Emitter):
    """Emits loads of stored numbers and sums over lanes, too."""

    def __init__(self, builder: Any, scalar: Any) -> None:
        super().__init__(builder, scalar, VECTOR_BYTES)

    def bytes_of(self, kind: int, columns: Any) -> Any:
        """Return how many bytes so many columns of a row take, as an integer."""
        if kind == INT4:
            return self.builder.lshr(columns, INT(1))
        size = {NATIVE: self.itemsize, FLOAT16: 2, BFLOAT16: 2}.get(kind, 1)
        return self.builder.mul(columns, INT(size))

    def stored(self, kind: int, place: Any, scale: Any) -> Any:
        """Return a vector of numbers that are stored at an address; codes have a scale."""
        builder = self.builder
        if kind == NATIVE:
            value = builder.load(builder.inttoptr(place, self.vector.as_pointer()))
            value.align = 1
            return value
        single = ir.VectorType(ir.FloatType(), self.lanes)
        bits = 16 if kind < FIRST else 8
        count = self.lanes // 2 if kind == INT4 else self.lanes
        kept = ir.VectorType(ir.IntType(bits), count)
        held = builder.load(builder.inttoptr(place, kept.as_pointer()))
        held.align = 1
        if kind == FLOAT16:
            value = emit_half(builder, held, single)
        elif kind == BFLOAT16:
            word = ir.VectorType(LANE, self.lanes)
            moved = builder.shl(builder.zext(held, word), ir.Constant(word, [16] * self.lanes))
            value = builder.bitcast(moved, single)
        else:
            value = builder.fmul(emit_code(builder, kind, held, self.lanes), scale)
        return value if self.vector == single else builder.fpext(value, self.vector)

    def scale(self, place: Any) -> Any:
        """Return the scale at an address in all lanes of a vector of float32."""
        single = ir.FloatType()
        value = self.builder.load(self.builder.inttoptr(place, single.as_pointer()))
        value.align = 4
        kind = ir.VectorType(single, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, value, LANE(0))
        zeros = ir.Constant(ir.VectorType(LANE, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def folded(self, join: Callable[[Any, Any], Any], vectors: Sequence[Any]) -> Any:
        """Return a vector with all lanes of each vector joined: neighbouring lanes hold the same.

        There are at most as many vectors as lanes, a power of two. Lanes are joined with those half
        a vector away, then a quarter, and so on, however many vectors there are.
        """
        found, apart, lanes = list(vectors), self.lanes // 2, range(self.lanes)
        while apart:
            away = [n ^ apart for n in lanes]
            half = len(found) // 2
            if half:
                # Where a lane's bit is set, the second vector goes on.
                keep = [n + self.lanes * bool(n & apart) for n in lanes]
                other = [n + self.lanes * (not n & apart) for n in away]
                pairs = zip(found[:half], found[half:], strict=True)
                found = [
                    join(self.shuffle(a, b, keep), self.shuffle(a, b, other)) for a, b in pairs
                ]
            else:
                found = [join(found[0], self.shuffle(found[0], found[0], away))]
            apart //= 2
        return found[0]

    def _prefetch(self, place: Any) -> None:
        """Begin to load the line at an address."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), (byte, LANE, LANE, LANE))
        name = "llvm.prefetch.p0"
        known = self.builder.module.globals.get(name)
        made = known or ir.Function(self.builder.module, kind, name)
        pointer = self.builder.inttoptr(place, byte)
        self.builder.call(made, (pointer, LANE(0), LANE(3), LANE(1)))

    def begin_loading(self, places: Any, count: int, lines: Any) -> None:
        """Begin to load the first lines of some rows."""

        def line(n: Any, values: list[Any]) -> list[Any]:
            # A loop whose steps LLVM could count would be unrolled, and rows spill.
            offset = self.opaque(self.builder.mul(n, INT(LINE)))
            for row in range(count):
                self.begin_loading_at(places, row, offset)
            return values

        emit_loop(self.builder, lines, [], line)

    def begin_loading_at(self, places: Any, row: int, offset: Any) -> None:
        """Begin to load the line of a row that is some bytes from its first element."""
        place = self.load(self.builder.add(places, INT(8 * row)), INT)
        self._prefetch(self.builder.add(place, offset))


def _score_block(kind: int, rows: int) -> Callable[..., Any]:
    """Make the function that multiplies `rows` queries by some keys."""
    count = KEYS[rows]

    @intrinsic
    def block(typingctx, same, q, places, scales, s, ahead, lines, scale):
        def codegen(context, builder, sig, args):
            same, q, places, scales, s, ahead, lines, scale = args
            q_row, s_row, groups, vectors, step = cgutils.unpack_tuple(builder, same)
            emit = _Emitter(builder, context.get_value_type(sig.args[7]))
            if kind != NATIVE:
                emit.begin_loading(ahead, count, lines)
            keys = [emit.load(builder.add(places, INT(8 * n)), INT) for n in range(count)]
            cells = [(r, j) for j in range(count) for r in range(rows)]

            def products(first, factors):
                def body(n, sums):
                    column = builder.mul(builder.add(first, n), INT(emit.lanes))
                    at = emit.bytes_of(kind, column)
                    x = [emit.load(emit.at(q, r, q_row, column)) for r in range(rows)]
                    k = []
                    for j, (key, factor) in enumerate(zip(keys, factors, strict=True)):
                        k.append(emit.stored(kind, builder.add(key, at), factor))
                        if kind == NATIVE:  # a vector is a line
                            emit.begin_loading_at(ahead, j, at)
                    return [emit.fma(x[r], k[j], sums[j * rows + r]) for r, j in cells]

                return body

            def group(n, sums):
                offset = builder.mul(n, step)
                factors = []
                for j in range(count):
                    place = emit.load(builder.add(scales, INT(8 * j)), INT)
                    factors.append(emit.scale(builder.add(place, offset)))
                first = builder.mul(n, vectors)
                return emit_loop(builder, vectors, sums, products(first, factors))

            sums = [emit.zero] * len(cells)
            if kind < FIRST:
                sums = emit_loop(builder, vectors, sums, products(INT(0), [None] * count))
            else:
                sums = emit_loop(builder, groups, sums, group)
            at_once = min(count, emit.lanes)
            for r in range(rows):
                for j in range(0, count, at_once):
                    part = sums[j * rows + r : (j + at_once) * rows : rows]
                    total = emit.folded(builder.fadd, part)
                    one_each = list(range(0, emit.lanes, emit.lanes // at_once))
                    total = emit.shuffle(total, total, one_each)
                    scaled = builder.fmul(total, emit.splat(scale, at_once))
                    emit.store(scaled, emit.at(s, r, s_row, INT(j)))
            return context.get_dummy_value()

        return types.void(same, *[types.int64] * 6, scale), codegen

    function: Callable[..., Any] = block
    return function


def _value_block(kind: int, rows: int, vectors: int) -> Callable[..., Any]:
    """Make the function that multiplies `rows` rows of weights by `vectors` vectors of values."""

    @intrinsic
    def block(typingctx, same, p, first, o, lines, like):
        def codegen(context, builder, sig, args):
            same, p, first, o, lines, _ = args
            p_row, places, scales, group, step, o_row, keys, ahead = cgutils.unpack_tuple(
                builder, same
            )
            emit = _Emitter(builder, context.get_value_type(sig.args[5]))
            columns = [builder.add(first, INT(n * emit.lanes)) for n in range(vectors)]
            offsets = [emit.bytes_of(kind, column) for column in columns]
            of_groups = []
            if kind >= FIRST:
                of_groups = [builder.mul(builder.sdiv(column, group), step) for column in columns]

            def body(j, sums):
                row = builder.mul(j, INT(8))
                if kind != NATIVE:
                    emit.begin_loading(builder.add(ahead, row), 1, lines)
                place = emit.load(builder.add(places, row), INT)
                factors = [None] * vectors
                if kind >= FIRST:
                    factor = emit.load(builder.add(scales, row), INT)
                    factors = [emit.scale(builder.add(factor, offset)) for offset in of_groups]
                v = [
                    emit.stored(kind, builder.add(place, offset), factor)
                    for offset, factor in zip(offsets, factors, strict=True)
                ]
                for offset in offsets if kind == NATIVE else ():
                    emit.begin_loading_at(builder.add(ahead, row), 0, offset)
                made = []
                for r in range(rows):
                    weight = emit.load(emit.at(p, r, p_row, j), emit.scalar)
                    weight = emit.splat(weight, emit.lanes)
                    made += [emit.fma(weight, v[n], sums[r * vectors + n]) for n in range(vectors)]
                return made

            sums = emit_loop(builder, keys, [emit.zero] * (rows * vectors), body)
            for r in range(rows):
                for n in range(vectors):
                    emit.store(sums[r * vectors + n], emit.at(o, r, o_row, columns[n]))
            return context.get_dummy_value()

        return types.void(same, *[types.int64] * 4, like), codegen

    function: Callable[..., Any] = block
    return function


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give a function its name, which tells its machine code from that of its siblings."""
    function.__name__ = function.__qualname__ = name
    return function


_takes_keys = takes(lambda number: (number, *(WORD,) * 14))
_takes_values = takes(lambda number: (number, *(WORD,) * 14))


def _make_keys(kind: int, name: str) -> Kernel:
    """Make the kernel that multiplies queries by keys that are stored in some way."""
    several, pair, row = (_score_block(kind, rows) for rows in (ROWS, ROWS // 2, 1))
    most, half, at_once = ROWS, ROWS // 2, MOST_KEYS

    def multiply_keys(
        scale, q, q_row, places, scales, s, s_row, rows, keys, groups, vectors, step, itemsize,
        ahead, lines,
    ):  # fmt: skip
        same = q_row, s_row, groups, vectors, step
        for j in range(0, keys, at_once):
            last, r = min(keys, j + at_once), 0
            while r < rows:
                x, y, left = q + r * q_row * itemsize, s + r * s_row * itemsize, rows - r
                load = lines if r == 0 else 0
                follow = ahead if load else places  # those of this leaf are there
                count = most if left >= most else (half if left >= half else 1)
                for n in range(j, last, most * 4 // count):
                    place, factor, z = places + 8 * n, scales + 8 * n, y + n * itemsize
                    if count == most:
                        several(same, x, place, factor, z, follow + 8 * n, load, scale)
                    elif count == half:
                        pair(same, x, place, factor, z, follow + 8 * n, load, scale)
                    else:
                        row(same, x, place, factor, z, follow + 8 * n, load, scale)
                r += count

    return _takes_keys(kernel(_named(multiply_keys, f"multiply_keys_{name}")))


def _make_values(kind: int, name: str) -> Kernel:
    """Make the kernel that multiplies weights by values that are stored in some way."""
    wide, middle, narrow = (_value_block(kind, ROWS, vectors) for vectors in (4, 2, 1))
    row_of_8, row_of_4, row_of_3, row_of_2, row_of_1 = (
        _value_block(kind, 1, vectors) for vectors in (8, 4, 3, 2, 1)
    )
    most, vector_bytes = ROWS, VECTOR_BYTES

    def multiply_values(
        like, p, p_row, places, scales, group, step, o, o_row, rows, keys, columns, itemsize, ahead,
        lines,
    ):  # fmt: skip
        lanes = vector_bytes // itemsize
        vectors = columns // lanes
        load, r = lines, 0
        while r < rows:
            x, y = p + r * p_row * itemsize, o + r * o_row * itemsize
            several, n = rows - r >= most, 0
            follow = ahead if load else places
            same = p_row, places, scales, group, step, o_row, keys, follow
            while n < vectors:
                left, first = vectors - n, n * lanes
                if several:
                    if left >= 4:
                        wide(same, x, first, y, load, like)
                        n += 4
                    elif left >= 2:
                        middle(same, x, first, y, load, like)
                        n += 2
                    else:
                        narrow(same, x, first, y, load, like)
                        n += 1
                elif left >= 8:
                    row_of_8(same, x, first, y, load, like)
                    n += 8
                elif left >= 4:
                    row_of_4(same, x, first, y, load, like)
                    n += 4
                elif left == 3:
                    row_of_3(same, x, first, y, load, like)
                    n += 3
                elif left == 2:
                    row_of_2(same, x, first, y, load, like)
                    n += 2
                else:
                    row_of_1(same, x, first, y, load, like)
                    n += 1
                load = 0
            r += most if several else 1

    return _takes_values(kernel(_named(multiply_values, f"multiply_values_{name}")))


class RowProducts(NamedTuple):
    """The kernels that read rows of a kind.

    Attributes
    ----------
    keys : Kernel
        s[r, j] = scale * sum over d of q[r, d] * key j's element d. Takes the scale, the addresses
        of `q`, `places`, `scales` and `s`, as below, where `places`, `scales` and the rows of `s`
        are padded to a multiple of `MOST_KEYS`. A row has `groups` groups of `vectors` vectors; a
        group of codes has a scale, and these are `step` bytes apart.
    values : Kernel
        o[r, d] = sum over j < keys of p[r, j] * value j's element d. A scale is that of `group`
        columns.

    Both begin to load `lines` lines of each row of `ahead` meanwhile.
    """

    keys: Kernel
    values: Kernel


# By how elements are stored.
PRODUCTS = {
    kind: RowProducts(_make_keys(kind, name), _make_values(kind, name))
    for kind, name in (
        (NATIVE, "native"), (FLOAT16, "float16"), (BFLOAT16, "bfloat16"), (INT8, "int8"),
        (E4M3, "e4m3"), (E5M2, "e5m2"), (INT4, "int4"),
    )
}  # fmt: skip

# All of a kind take the same.
call_keys, call_values = caller(PRODUCTS[NATIVE].keys), caller(PRODUCTS[NATIVE].values)


@intrinsic
def softmax_of_leaf(typingctx, place, keys, m, l, log2_e):
    """Make a row of `LEAF` scores at an address into weights; write its maximum and its sum.

    Scores from `keys` on are those of no key.
    """

    def codegen(context, builder, sig, args):
        place, keys, m, l, log2_e = args
        emit = _Emitter(builder, context.get_value_type(sig.args[4]))
        kind, count = ir.VectorType(INT, emit.lanes), LEAF // emit.lanes
        lowest = ir.Constant(emit.vector, [-math.inf] * emit.lanes)
        empty = ir.Constant(kind, ir.Undefined)
        held = builder.insert_element(empty, keys, LANE(0))
        zeros = ir.Constant(ir.VectorType(LANE, emit.lanes), [0] * emit.lanes)
        held = builder.shuffle_vector(held, empty, zeros)
        at = [builder.add(place, INT(n * emit.lanes * emit.itemsize)) for n in range(count)]
        s, largest = [], lowest
        for n in range(count):
            numbers = ir.Constant(kind, list(range(n * emit.lanes, (n + 1) * emit.lanes)))
            is_key = builder.icmp_signed("<", numbers, held)
            s.append(builder.select(is_key, emit.load(at[n]), lowest))
            largest = emit.larger(s[n], largest)
        largest = emit.folded(emit.larger, [largest])
        factor = emit.splat(log2_e)
        # A row that sees nothing holds -inf only: 0 stands for its maximum.
        sees = builder.fcmp_unordered("!=", largest, lowest)
        shift = builder.select(sees, largest, emit.zero)
        p = []
        for n in range(count):
            p.append(emit_exp2(builder, builder.fmul(builder.fsub(s[n], shift), factor)))
            emit.store(p[n], at[n])
        while len(p) > 1:
            p = [builder.fadd(a, b) for a, b in zip(p[::2], p[1::2], strict=True)]
        total = emit.folded(builder.fadd, p)
        emit.store(builder.extract_element(largest, LANE(0)), m)
        emit.store(builder.extract_element(total, LANE(0)), l)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, log2_e), codegen


@intrinsic
def is_finite(typingctx, place, count, like):
    """Whether all of some whole vectors of numbers at an address are finite."""

    def codegen(context, builder, sig, args):
        emit = _Emitter(builder, context.get_value_type(sig.args[2]))
        vectors = builder.sdiv(args[1], INT(emit.lanes))

        def body(n, sums):
            offset = builder.mul(n, INT(emit.lanes * emit.itemsize))
            value = emit.load(builder.add(args[0], offset))
            # The difference of a number and itself is 0, or NaN.
            return [builder.fadd(sums[0], builder.fsub(value, value))]

        (total,) = emit_loop(builder, vectors, [emit.zero], body)
        total = builder.extract_element(emit.folded(builder.fadd, [total]), LANE(0))
        return builder.fcmp_ordered("==", total, ir.Constant(total.type, 0.0))

    return types.boolean(types.int64, types.int64, like), codegen
