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

from .elementary import exp2
from .jit import helper
from .memory import first_address, load, row_address
from .microkernel import VECTOR_BYTES
from .vectors import Emitter, emit_exp2, emit_loop


@helper
def init_state(m, l, acc, lanes, columns, sink):
    """Begin with nothing seen, or with the sink: one key of that logit and value 0."""
    for i in range(lanes):
        m[i] = sink
        l[i] = 0 if sink == -math.inf else 1
    for n in range(lanes * columns):
        acc[n] = 0


@helper
def resume_state(m, l, acc, columns, out, lse, b, h, i0, count, d_v, itemsize):
    """Begin with what `out` and `lse` say of other keys: as one key of that logit and value."""
    like = m.dtype.type(0)
    for i in range(count):
        m[i] = load(row_address(lse, b, h, i0 + i), like)
        l[i] = 0 if m[i] == -math.inf else 1
        row = row_address(out, b, h, i0 + i)
        for d in range(d_v):
            acc[i * columns + d] = load(row + d * itemsize, like) if l[i] else like


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
def row_max(s, first, last, lanes, m_new):
    """m_new = max(m_new, maxima of the tile's keys from `first` to `last`), lane by lane."""
    like = s.dtype.type(0)
    size = lanes * s.itemsize
    tile, maxima = first_address(s) + first * size, first_address(m_new)
    for x in range(0, size, VECTOR_BYTES):
        _row_max(tile + x, size, last - first, maxima + x, like)


@helper
def rescale(m, m_new, l, acc, lanes, columns, log2_e):
    """Bring l and the accumulated output from the old maxima to the new ones, where they grew."""
    for i in range(lanes):
        if m_new[i] > m[i]:
            alpha = exp2((m[i] - m_new[i]) * log2_e)
            l[i] *= alpha
            row = acc[i * columns : (i + 1) * columns]
            for d in range(columns):
                row[d] *= alpha
            m[i] = m_new[i]


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
