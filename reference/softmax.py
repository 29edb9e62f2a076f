"""The online softmax on one tile: row maximum m, row sum l, and the rescaling that joins tiles.

Tiles are kept transposed, ``s[j, i]`` with one query per lane, so that maxima and sums over keys
are lane by lane and a NaN in one query stays in its lane. Milakov & Gimelshein 2018, Algorithm 3;
FlashAttention-2 (Dao 2023), Algorithm 1, lines 8-10.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .jit import FASTMATH, helper

LOG2_E = math.log2(math.e)


# 2**f = sum of (f log 2)**k / k! on [-1/2, 1/2]. float32 takes the terms to k = 7, float64 all:
# the first term left out is below 2**-27 and 2**-57.
_TERMS = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(14))


@intrinsic
def _power_of_two(typingctx, shifted):
    """Return 2**n, where `shifted` is n + 1.5 * 2**(mantissa bits): n stands in its last bits."""

    def codegen(context, builder, sig, args):
        double = sig.args[0] == types.float64
        word = ir.IntType(64 if double else 32)
        bits = builder.bitcast(args[0], word)
        biased = builder.add(bits, word(1023 if double else 127))
        scaled = builder.shl(biased, word(52 if double else 23))
        return builder.bitcast(scaled, args[0].type)

    return shifted(shifted), codegen


def exp2(x: float) -> float:
    """Return 2**x for x <= 0; 0 where that is below the smallest normal number; NaN for NaN."""
    return float(np.exp2(x))


@overload(exp2, jit_options={"fastmath": FASTMATH})
def _exp2(x):
    if not isinstance(x, types.Float) or x.bitwidth not in (32, 64):
        return None
    number = np.float32 if x.bitwidth == 32 else np.float64
    lowest = number(-126.0 if x.bitwidth == 32 else -1022.0)
    shift = number(1.5 * 2.0 ** (23 if x.bitwidth == 32 else 52))
    zero = number(0.0)
    t = tuple(number(c) for c in _TERMS)

    if x.bitwidth == 32:

        def single(x):
            held = lowest if x < lowest else x
            shifted = held + shift
            f = held - (shifted - shift)
            p = t[6] + f * t[7]
            p = t[4] + f * (t[5] + f * p)
            p = t[2] + f * (t[3] + f * p)
            p = t[0] + f * (t[1] + f * p)
            return zero if x < lowest else p * _power_of_two(shifted)

        return single

    def double(x):
        held = lowest if x < lowest else x
        shifted = held + shift
        f = held - (shifted - shift)
        p = t[12] + f * t[13]
        p = t[10] + f * (t[11] + f * p)
        p = t[8] + f * (t[9] + f * p)
        p = t[6] + f * (t[7] + f * p)
        p = t[4] + f * (t[5] + f * p)
        p = t[2] + f * (t[3] + f * p)
        p = t[0] + f * (t[1] + f * p)
        return zero if x < lowest else p * _power_of_two(shifted)

    return double


@helper
def init_state(m, l, acc, lanes, columns, sink):
    """Begin with nothing seen, or with the sink: one key of that logit and value 0."""
    for i in range(lanes):
        m[i] = sink
        l[i] = 0 if sink == -math.inf else 1
    for n in range(lanes * columns):
        acc[n] = 0


@helper
def row_max(s, keys, lanes, m, m_new):
    """m_new = max(m, row maxima of the tile), lane by lane; whether any grew."""
    for i in range(lanes):
        m_new[i] = m[i]
    for j in range(keys):
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(lanes):
            m_new[i] = row[i] if row[i] > m_new[i] else m_new[i]
    grew = False
    for i in range(lanes):
        grew |= m_new[i] > m[i]
    return grew


@helper
def rescale(m, m_new, l, acc, lanes, columns, log2_e):
    """Bring l and the accumulated output from the old maxima to the new ones."""
    for i in range(lanes):
        if m_new[i] > m[i]:
            alpha = exp2((m[i] - m_new[i]) * log2_e)
            l[i] *= alpha
            row = acc[i * columns : (i + 1) * columns]
            for d in range(columns):
                row[d] *= alpha
            m[i] = m_new[i]


@helper
def exponentiate(s, keys, lanes, m, l, log2_e):
    """Make s into p = exp(s - m); l grows by its row sums; masked scores (-inf) become 0."""
    zero = m.dtype.type(0)
    for j in range(keys):
        row = s[j * lanes : (j + 1) * lanes]
        for i in range(lanes):
            safe = m[i] if m[i] != -math.inf else zero
            p = exp2((row[i] - safe) * log2_e)
            row[i] = p
            l[i] += p
