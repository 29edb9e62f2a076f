"""Products with rows at any addresses: queries times keys, weights times values of a leaf.

Rows of keys and values are given by their addresses, so that a page table costs nothing. Every
element of a result is one sum in a fixed order, with explicit fused operations, so it does not
depend on what else is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from .jit import helper
from .vectors import INT, LANE, Emitter, emit_loop

KEYS = 4
LINE = 64  # bytes of a cache line
# Bytes of a vector; queries of a block of scores; rows and vectors of a block of values: the sums
# stay in registers.
VECTOR_BYTES, QUERIES, ROWS, VECTORS = (
    (64, 4, 4, 4) if binding.get_host_cpu_features().get("avx512f") else (32, 2, 2, 4)
)


class _Emitter(Emitter):
    """Emits sums over lanes too."""

    def __init__(self, builder: Any, scalar: Any) -> None:
        super().__init__(builder, scalar, VECTOR_BYTES)

    def sums(self, vectors: list[Any]) -> Any:
        """Return the sums over the lanes of four vectors, as a vector of four."""
        groups, lanes, builder = range(0, self.lanes, 4), self.lanes, self.builder

        def paired(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
            halves = (
                self.shuffle(a, b, [g + n for g in groups for n in part]) for part in (low, high)
            )
            return builder.fadd(*halves)

        mixed = [0, lanes, 1, lanes + 1], [2, lanes + 2, 3, lanes + 3]
        joined = [0, 1, lanes, lanes + 1], [2, 3, lanes + 2, lanes + 3]
        a, b, c, d = vectors
        total = paired(paired(a, b, *mixed), paired(c, d, *mixed), *joined)
        while lanes > 4:
            lanes //= 2
            halves = (self.shuffle(total, total, list(range(n, n + lanes))) for n in (0, lanes))
            total = builder.fadd(*halves)
        return total


def _score_block(rows: int) -> Callable[..., Any]:
    """Make the function that multiplies `rows` queries by four keys."""

    @intrinsic
    def block(typingctx, q, q_row, places, s, s_row, vectors, scale):
        signature = types.void(*[types.int64] * 6, scale)

        def codegen(context, builder, sig, args):
            q, q_row, places, s, s_row, vectors, scale = args
            emit = _Emitter(builder, context.get_value_type(sig.args[6]))
            keys = [emit.load(builder.add(places, INT(8 * n)), INT) for n in range(KEYS)]

            def body(n, sums):
                column = builder.mul(n, INT(emit.lanes))
                k = [emit.load(emit.at(place, 0, INT(0), column)) for place in keys]
                x = [emit.load(emit.at(q, r, q_row, column)) for r in range(rows)]
                cells = [(r, j) for r in range(rows) for j in range(KEYS)]
                return [emit.fma(x[r], k[j], sums[r * KEYS + j]) for r, j in cells]

            sums = emit_loop(builder, vectors, [emit.zero] * (rows * KEYS), body)
            for r in range(rows):
                total = emit.sums(sums[r * KEYS : (r + 1) * KEYS])
                scaled = builder.fmul(total, emit.splat(scale, KEYS))
                emit.store(scaled, emit.at(s, r, s_row, INT(0)))
            return context.get_dummy_value()

        return signature, codegen

    function: Callable[..., Any] = block
    return function


def _value_block(rows: int, vectors: int) -> Callable[..., Any]:
    """Make the function that multiplies `rows` rows of weights by `vectors` vectors of values."""

    @intrinsic
    def block(typingctx, p, p_row, places, first, o, o_row, keys, like):
        signature = types.void(*[types.int64] * 7, like)

        def codegen(context, builder, sig, args):
            p, p_row, places, first, o, o_row, keys, _ = args
            emit = _Emitter(builder, context.get_value_type(sig.args[7]))
            columns = [builder.add(first, INT(n * emit.lanes)) for n in range(vectors)]

            def body(j, sums):
                place = emit.load(builder.add(places, builder.mul(j, INT(8))), INT)
                v = [emit.load(emit.at(place, 0, INT(0), column)) for column in columns]
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

        return signature, codegen

    function: Callable[..., Any] = block
    return function


_scores_of_rows, _scores_of_row = _score_block(QUERIES), _score_block(1)
_wide, _narrow = _value_block(ROWS, VECTORS), _value_block(ROWS, 1)
_row_wide, _row_narrow = _value_block(1, VECTORS), _value_block(1, 1)


@intrinsic
def _prefetch(typingctx, place):
    """Begin to load the cache line at an address."""

    def codegen(context, builder, sig, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), (byte, LANE, LANE, LANE))
        name = "llvm.prefetch.p0"
        known = builder.module.globals.get(name)
        made = known or ir.Function(builder.module, kind, name)
        builder.call(made, (builder.inttoptr(args[0], byte), LANE(0), LANE(3), LANE(1)))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _row_at(typingctx, places, n):
    """Return the address of a row."""

    def codegen(context, builder, sig, args):
        place = builder.add(args[0], builder.mul(args[1], INT(8)))
        return builder.load(builder.inttoptr(place, INT.as_pointer()))

    return types.int64(types.int64, types.int64), codegen


@helper
def _begin_loading(places, first, last, size):
    """Begin to load rows of `size` bytes, from one to before another."""
    for n in range(first, last):
        row = _row_at(places, n)
        for x in range(0, size, LINE):
            _prefetch(row + x)


@helper
def multiply_keys(
    scale, q, q_row, places, s, s_row, rows, keys, columns, itemsize, values, value_size
):
    """s[r, j] = scale * sum over d of q[r, d] * key j's element d.

    `q`, `places` and `s` are addresses. Keys are processed four at a time: `places` and the rows of
    `s` are padded to a multiple of four. Meanwhile, rows of the values, of `value_size` bytes, are
    prefetched.
    """
    vectors = columns * itemsize // VECTOR_BYTES
    for j in range(0, keys, KEYS):
        place, target = places + 8 * j, s + j * itemsize
        _begin_loading(values, j, min(j + KEYS, keys), value_size)
        for r in range(0, rows - QUERIES + 1, QUERIES):
            x, y = q + r * q_row * itemsize, target + r * s_row * itemsize
            _scores_of_rows(x, q_row, place, y, s_row, vectors, scale)
        for r in range(rows - rows % QUERIES, rows):
            x, y = q + r * q_row * itemsize, target + r * s_row * itemsize
            _scores_of_row(x, q_row, place, y, s_row, vectors, scale)


@helper
def multiply_values(
    like, p, p_row, places, o, o_row, rows, keys, columns, itemsize, ahead, ahead_rows, ahead_size
):
    """o[r, d] = sum over j < keys of p[r, j] * value j's element d; all are addresses.

    Meanwhile, `ahead_rows` rows of `ahead_size` bytes are prefetched.
    """
    lanes = VECTOR_BYTES // itemsize
    vectors = columns // lanes
    passes = (rows + ROWS - 1) // ROWS * ((vectors + VECTORS - 1) // VECTORS)
    begun, each = 0, (ahead_rows + passes - 1) // passes
    for r in range(0, rows - ROWS + 1, ROWS):
        x, y = p + r * p_row * itemsize, o + r * o_row * itemsize
        for n in range(0, vectors - VECTORS + 1, VECTORS):
            _begin_loading(ahead, begun, min(begun + each, ahead_rows), ahead_size)
            begun += each
            _wide(x, p_row, places, n * lanes, y, o_row, keys, like)
        for n in range(vectors - vectors % VECTORS, vectors):
            _narrow(x, p_row, places, n * lanes, y, o_row, keys, like)
    for r in range(rows - rows % ROWS, rows):
        x, y = p + r * p_row * itemsize, o + r * o_row * itemsize
        for n in range(0, vectors - VECTORS + 1, VECTORS):
            _begin_loading(ahead, begun, min(begun + each, ahead_rows), ahead_size)
            begun += each
            _row_wide(x, p_row, places, n * lanes, y, o_row, keys, like)
        for n in range(vectors - vectors % VECTORS, vectors):
            _row_narrow(x, p_row, places, n * lanes, y, o_row, keys, like)
