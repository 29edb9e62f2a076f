"""The online softmax for tiles: scores are (key, query), outputs (column, query).

Queries are lanes. Weights become operands of the next product while they are in registers.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .amx_code import TileEmitter
from .amx_memory import DEPTH, PARTS, ROW, SIDE, TILE
from .vectors import INT, ROUNDED, emit_exp2, emit_loop


@intrinsic
def find_maxima(typingctx, s, row_size, keys, scale, maxima):
    """Make 16 maxima those of themselves and of a positive scale times every key's scores."""

    def codegen(context, builder, sig, args):
        s, row_size, keys, scale, maxima = args
        emit = TileEmitter(builder)
        lowest = ir.Constant(emit.vector, [-math.inf] * SIDE)

        def step(j, largest):
            value = emit.load(builder.add(s, builder.mul(j, row_size)))
            return [emit.larger(value, largest[0])]

        (largest,) = emit_loop(builder, keys, [lowest], step)
        scaled = builder.fmul(largest, emit.splat(scale))
        emit.store(emit.larger(scaled, emit.load(maxima)), maxima)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.int64), codegen


@intrinsic
def scale_scores(typingctx, s, row_size, keys, scale, maxima):
    """Multiply the scores of 16 queries; maxima become those of themselves and of them."""

    def codegen(context, builder, sig, args):
        s, row_size, keys, scale, maxima = args
        emit = TileEmitter(builder)
        factor = emit.splat(scale)

        def step(j, largest):
            place = builder.add(s, builder.mul(j, row_size))
            value = builder.fmul(emit.load(place), factor)
            emit.store(value, place)
            return [emit.larger(value, largest[0])]

        (largest,) = emit_loop(builder, keys, [emit.load(maxima)], step)
        emit.store(largest, maxima)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.int64), codegen


@intrinsic
def rescale(typingctx, m, m_new, l, acc, row_size, columns, log2_e):
    """Bring the sums and outputs of 16 queries from old maxima to new ones, where they grew."""

    def codegen(context, builder, sig, args):
        m, m_new, l, acc, row_size, columns, log2_e = args
        emit = TileEmitter(builder)
        old, new = emit.load(m), emit.load(m_new)
        grew = builder.fcmp_ordered(">", new, old)
        some, end = builder.append_basic_block("some"), builder.append_basic_block("end")
        builder.cbranch(builder.icmp_signed("!=", emit.lanes_of(grew), INT(0)), some, end)
        builder.position_at_end(some)
        one = ir.Constant(emit.vector, [1.0] * SIDE)
        below = builder.fmul(builder.fsub(old, new), emit.splat(log2_e))
        alpha = builder.select(grew, emit_exp2(builder, below), one)
        emit.store(builder.select(grew, new, old), m)
        emit.store(builder.fmul(emit.load(l), alpha), l)

        def step(d, _):
            place = builder.add(acc, builder.mul(d, row_size))
            emit.store(builder.fmul(emit.load(place), alpha), place)
            return []

        emit_loop(builder, columns, [], step)
        builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32), codegen


def _weigher(drops: bool) -> Any:
    """Make the function that turns scores of 16 queries into weights, in parts as columns of B."""

    @intrinsic
    def weigh(typingctx, s, row_size, z, whole, pairs, singles, scale, log2_e, m, l, words):
        def codegen(context, builder, sig, args):
            s, row_size, z, whole, pairs, singles, scale, log2_e, m, l, words = args
            emit = TileEmitter(builder)
            nothing = ir.Constant(emit.vector, [-math.inf] * SIDE)
            factor, exponent, largest = emit.splat(scale), emit.splat(log2_e), emit.load(m)
            # Lanes that have seen nothing hold -inf only: 0 stands for their maximum.
            seen = builder.fcmp_unordered("!=", largest, nothing)
            largest = builder.select(seen, largest, emit.zero)
            half, step_size = builder.mul(row_size, INT(SIDE)), builder.mul(row_size, INT(DEPTH))

            def weight(offset: Any, total: Any) -> tuple[Any, Any]:
                raw = emit.load(builder.add(s, offset))
                score = builder.fmul(raw, factor, flags=ROUNDED)
                below = builder.fmul(builder.fsub(score, largest), exponent)
                p = emit_exp2(builder, below)
                total = builder.fadd(total, p)
                if drops:
                    p = builder.fmul(p, emit.load(builder.add(z, offset)), flags=ROUNDED)
                return p, total

            def put(low: Any, high: Any, place: Any) -> None:
                parts = emit.packed(low, high, PARTS, finite=True, rounds=True)
                for n, packed in enumerate(parts):
                    emit.store(packed, builder.add(place, INT(n * TILE)))

            def step(
                count: Any, single: Any, offset: Any, place: Any, sums: list[Any]
            ) -> list[Any]:
                """Emit one step of `count` pairs of keys and then `single` keys of no pair."""

                def pair(j: Any, sums: list[Any]) -> list[Any]:
                    at = builder.add(offset, builder.mul(j, row_size))
                    low, first = weight(at, sums[0])
                    high, second = weight(builder.add(at, half), sums[1])
                    put(low, high, builder.add(place, builder.mul(j, INT(ROW))))
                    return [first, second]

                sums = emit_loop(builder, count, sums, pair)
                if single is None:
                    return sums

                def alone(n: Any, sums: list[Any]) -> list[Any]:
                    j = builder.add(count, n)
                    low, first = weight(builder.add(offset, builder.mul(j, row_size)), sums[0])
                    put(low, emit.zero, builder.add(place, builder.mul(j, INT(ROW))))
                    return [first, sums[1]]

                sums = emit_loop(builder, single, sums, alone)
                begin = builder.add(count, single)

                def clear(n: Any, _: list[Any]) -> list[Any]:
                    at = builder.mul(builder.add(begin, n), INT(ROW))
                    put(emit.zero, emit.zero, builder.add(place, at))
                    return []

                emit_loop(builder, builder.sub(INT(SIDE), begin), [], clear)
                return sums

            def at_step(n: Any) -> tuple[Any, Any]:
                place = builder.add(words, builder.mul(n, INT(PARTS * TILE)))
                return builder.mul(n, step_size), place

            sums = emit_loop(
                builder,
                whole,
                [emit.zero, emit.zero],
                lambda n, sums: step(INT(SIDE), None, *at_step(n), sums),
            )
            begin, some = builder.block, builder.append_basic_block("some")
            end = builder.append_basic_block("end")
            left = builder.icmp_signed(">", builder.add(pairs, singles), INT(0))
            builder.cbranch(left, some, end)
            builder.position_at_end(some)
            last = step(pairs, singles, *at_step(whole), sums)
            last_block = builder.block
            builder.branch(end)
            builder.position_at_end(end)
            totals = []
            for before, after in zip(sums, last, strict=True):
                total = builder.phi(emit.vector)
                total.add_incoming(before, begin)
                total.add_incoming(after, last_block)
                totals.append(total)
            emit.store(builder.fadd(emit.load(l), builder.fadd(*totals)), l)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, *[types.float32] * 2, *[types.int64] * 3), codegen

    return weigh


weigh, weigh_and_drop = _weigher(False), _weigher(True)


@intrinsic
def turn_columns(typingctx, acc, row_size, columns, factors, target):
    """Write columns of 16 queries as rows, `columns` numbers each, times the queries' factors."""

    def codegen(context, builder, sig, args):
        acc, row_size, columns, factors, target = args
        emit = TileEmitter(builder)
        factor = emit.load(factors)
        size = builder.mul(columns, INT(4))

        def square(n, _):
            place = builder.add(acc, builder.mul(builder.mul(n, INT(SIDE)), row_size))
            rows = [
                builder.fmul(emit.load(builder.add(place, builder.mul(INT(d), row_size))), factor)
                for d in range(SIDE)
            ]
            to = builder.add(target, builder.mul(n, INT(ROW)))
            for i, row in enumerate(emit.transposed(rows)):
                emit.store(row, builder.add(to, builder.mul(INT(i), size)))
            return []

        emit_loop(builder, builder.sdiv(columns, INT(SIDE)), [], square)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen
