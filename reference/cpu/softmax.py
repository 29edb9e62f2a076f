"""The online softmax on one tile: row maximum m, row sum l, and the rescaling that joins tiles.

Tiles are kept transposed, ``s[j, i]`` with one query per lane, so that maxima and sums over keys
are lane by lane and a NaN in one query stays in its lane. Milakov & Gimelshein 2018, Algorithm 3;
FlashAttention-2 (Dao 2023), Algorithm 1, lines 8-10.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .elementary import emit_log
from .jit import helper
from .memory import first_address, load, row_address
from .microkernel import VECTOR_BYTES
from .vectors import Emitter, emit_exp2, emit_loop


@helper
def init_state(m, l, acc, lanes, depth, sink):
    """Begin with nothing seen, or with the sink: one key of that logit and value 0."""
    for i in range(lanes):
        m[i] = sink
        l[i] = 0 if sink == -math.inf else 1
    for n in range(lanes * depth):
        acc[n] = 0


@helper
def resume_state(m, l, acc, lanes, out, lse, b, h, i0, count, d_v, itemsize):
    """Begin with what `out` and `lse` say of other keys: as one key of that logit and value."""
    like = m.dtype.type(0)
    for i in range(count):
        m[i] = load(row_address(lse, b, h, i0 + i), like)
        l[i] = 0 if m[i] == -math.inf else 1
        row = row_address(out, b, h, i0 + i)
        for d in range(d_v):
            acc[d * lanes + i] = load(row + d * itemsize, like) if l[i] else like


@helper
def begin_maxima(m, lanes, m_new):
    """m_new = m: the maxima of a tile begin with those of the keys before it."""
    for i in range(lanes):
        m_new[i] = m[i]


@intrinsic
def _row_max(typingctx, s, row_size, keys, m_new, like):
    """Make a vector of maxima those of themselves and of every key's scores."""

    def codegen(context, builder, sig, args):
        s, row_size, keys, m_new, _ = args
        emit = Emitter(builder, context.get_value_type(sig.args[4]))

        def step(j, largest):
            place = builder.add(s, builder.mul(j, row_size))
            return [emit.larger(emit.load(place), largest[0])]

        (largest,) = emit_loop(builder, keys, [emit.load(m_new)], step)
        emit.store(largest, m_new)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, like), codegen


@helper
def row_max_at(tile, size, keys, maxima, like):
    """As `row_max`, of keys whose rows of `size` bytes are at an address, to another one."""
    for x in range(0, size, VECTOR_BYTES):
        _row_max(tile + x, size, keys, maxima + x, like)


@helper
def row_max(s, first, last, lanes, m_new):
    """m_new = max(m_new, maxima of the tile's keys from `first` to `last`), lane by lane."""
    size, like = lanes * s.itemsize, s.dtype.type(0)
    row_max_at(first_address(s) + first * size, size, last - first, first_address(m_new), like)


@intrinsic
def _rescale(typingctx, m, m_new, l, acc, row_size, depth, log2_e):
    """Bring a vector of maxima to the new ones, with l and the rows of acc, where one grew."""

    def codegen(context, builder, sig, args):
        m, m_new, l, acc, row_size, depth, log2_e = args
        emit = Emitter(builder, context.get_value_type(sig.args[6]))
        before, after = emit.load(m), emit.load(m_new)
        grew = builder.fcmp_ordered(">", after, before)
        lanes = builder.bitcast(grew, ir.IntType(emit.lanes))
        some, end = builder.append_basic_block("some"), builder.append_basic_block("end")
        builder.cbranch(builder.icmp_unsigned("!=", lanes, lanes.type(0)), some, end)
        builder.position_at_end(some)
        # Where a maximum stays, 0 stands for the difference, which may be that of infinities.
        less = builder.select(grew, builder.fsub(before, after), emit.zero)
        alpha = emit_exp2(builder, builder.fmul(less, emit.splat(log2_e)))
        emit.store(builder.select(grew, after, before), m)
        emit.store(builder.fmul(emit.load(l), alpha), l)

        def step(d, values):
            place = builder.add(acc, builder.mul(d, row_size))
            emit.store(builder.fmul(emit.load(place), alpha), place)
            return []

        emit_loop(builder, depth, [], step)
        builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, log2_e), codegen


@helper
def rescale(m, m_new, l, acc, lanes, depth, itemsize, log2_e):
    """Bring l and the output at `acc`, (depth, lanes), from the old maxima to the new ones."""
    size = lanes * itemsize
    old, new, sums = first_address(m), first_address(m_new), first_address(l)
    for x in range(0, size, VECTOR_BYTES):
        _rescale(old + x, new + x, sums + x, acc + x, size, depth, log2_e)


@intrinsic
def _finish(typingctx, m, l, inverse, lse, like):
    """Write 1 / l and m + log l of a vector; 0 and -inf where l is 0."""

    def codegen(context, builder, sig, args):
        m, l, inverse, lse, _ = args
        emit = Emitter(builder, context.get_value_type(sig.args[4]))
        largest, total = emit.load(m), emit.load(l)
        one = ir.Constant(emit.vector, [1.0] * emit.lanes)
        nothing = ir.Constant(emit.vector, [-math.inf] * emit.lanes)
        empty = builder.fcmp_ordered("==", total, emit.zero)
        emit.store(builder.select(empty, emit.zero, builder.fdiv(one, total)), inverse)
        natural = builder.fadd(largest, emit_log(builder, total))
        emit.store(builder.select(empty, nothing, natural), lse)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, like), codegen


@helper
def finish_state(m, l, lanes, inverse, lse):
    """Write 1 / l and m + log l, by lanes; 0 and -inf where nothing was seen."""
    itemsize, like = m.itemsize, m.dtype.type(0)
    largest, sums = first_address(m), first_address(l)
    factors, logs = first_address(inverse), first_address(lse)
    for x in range(0, lanes * itemsize, VECTOR_BYTES):
        _finish(largest + x, sums + x, factors + x, logs + x, like)


@intrinsic
def _exponentiate(typingctx, s, row_size, keys, m, l, log2_e):
    """Make a vector of every key's scores into p = exp(s - m); l grows by their sum."""

    def codegen(context, builder, sig, args):
        s, row_size, keys, m, l, log2_e = args
        emit = Emitter(builder, context.get_value_type(sig.args[5]))
        nothing = ir.Constant(emit.vector, [-math.inf] * emit.lanes)
        largest, factor = emit.load(m), emit.splat(log2_e)
        # Lanes that have seen nothing hold -inf only: 0 stands for their maximum.
        seen = builder.fcmp_unordered("!=", largest, nothing)
        largest = builder.select(seen, largest, emit.zero)

        def step(j, sums):
            place = builder.add(s, builder.mul(j, row_size))
            below = builder.fsub(emit.load(place), largest)
            p = emit_exp2(builder, builder.fmul(below, factor))
            emit.store(p, place)
            return [builder.fadd(sums[0], p)]

        (total,) = emit_loop(builder, keys, [emit.load(l)], step)
        emit.store(total, l)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, log2_e), codegen


@helper
def exponentiate(s, first, last, lanes, m, l, log2_e):
    """Make s into p = exp(s - m); l grows by its row sums; masked scores (-inf) become 0."""
    itemsize = s.itemsize
    size = lanes * itemsize
    tile, maxima, sums = first_address(s) + first * size, first_address(m), first_address(l)
    for x in range(0, size, VECTOR_BYTES):
        _exponentiate(tile + x, size, last - first, maxima + x, sums + x, log2_e)
