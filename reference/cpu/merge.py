"""Two sets of keys become one: their row maximum m, row sum l and output o, not yet divided by l.

A set without keys has l = 0 and changes no bit of another set; a set that is merged into an empty
one is copied. Every product and every sum is written as one instruction, and all merges run the
same compiled kernel, by its address: so two sets always give the same bits, whenever they are
merged.
"""

from __future__ import annotations

import math

from numba.extending import intrinsic

from .elementary import exp2
from .jit import INT, caller, helper, kernel, takes, vector


@intrinsic
def fma(typingctx, x, y, z):
    """Return x * y + z, rounded once."""

    def codegen(context, builder, sig, args):
        return builder.fma(*args)

    return x(x, x, x), codegen


@intrinsic
def product(typingctx, x, y):
    """Return x * y, rounded: nothing is added to it before."""

    def codegen(context, builder, sig, args):
        return builder.fmul(*args)

    return x(x, x), codegen


def size_of_state(rows: int, columns: int) -> int:
    """Return the elements of a state: m and l of every row, then the rows of o."""
    return rows * (2 + columns)


state_size = helper(size_of_state)  # the same in kernels


@helper
def clear(states, at, rows):
    """Make the state at an element of `states` one without keys; its o may hold anything."""
    for r in range(rows):
        states[at + r] = -math.inf
        states[at + rows + r] = 0


@helper
def factor(m, top, c):
    """Return 2**((m - top) c), exactly 1 for the larger maximum."""
    return type(m)(1) if m == top else exp2(product(m - top, c))


@takes(lambda number: (vector(number), INT, vector(number), INT, INT, INT, number))
@kernel
def merge(states, at, others, other_at, rows, columns, c):
    """Merge a state of `others` into one of `states`; `c` is logits to the base 2 per score."""
    for r in range(rows):
        m, l = states[at + r], states[at + rows + r]
        other_m, other_l = others[other_at + r], others[other_at + rows + r]
        if other_l == 0:
            continue
        first, other_first = at + 2 * rows + r * columns, other_at + 2 * rows + r * columns
        o = states[first : first + columns]
        other_o = others[other_first : other_first + columns]
        if l == 0:
            states[at + r], states[at + rows + r] = other_m, other_l
            for d in range(columns):
                o[d] = other_o[d]
            continue
        top = other_m if other_m > m else m
        own, other = factor(m, top, c), factor(other_m, top, c)
        states[at + r], states[at + rows + r] = top, fma(other_l, other, product(l, own))
        for d in range(columns):
            o[d] = fma(other_o[d], other, product(o[d], own))


call_merge = caller(merge)
