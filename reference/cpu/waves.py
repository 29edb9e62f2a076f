"""sin, cos and erf without branches, so that compilers work on several numbers at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .elementary import exp, is_float, number_of
from .jit import FASTMATH

# No call may be left in a loop, or the compiler would not work on several numbers at once.
_OPTIONS = {"fastmath": FASTMATH, "forceinline": True}
# Up to here `sin` and `cos` are accurate: the nearest multiple n of pi / 2 has at most 20 bits.
FAR = 2.0**20

_SHIFT = 1.5 * 2.0**52  # a sum with it has the nearest integer in its last bits
# pi / 2 in parts of 33 bits, whose products with n are exact, and the rest (Cody and Waite 1980).
_HALF_PI = tuple(
    float.fromhex(part)
    for part in (
        "0x1.921fb54400000p+0",
        "0x1.0b4611a600000p-34",
        "0x1.3198a2e000000p-69",
        "0x1.b839a252049c1p-104",
    )
)
# sin r = r + r**3 (s_0 + s_1 r**2 + ...) and cos r = 1 + r**2 (c_0 + c_1 r**2 + ...), where |r| is
# at most pi / 4. float32 uses the first 4 and 5 terms, float64 all: what is left out is below
# 2**-29 and 2**-57.
_SIN_TERMS = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(1, 9))
_COS_TERMS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(1, 9))

# erf x = x + x * (sum of near_k x**(2 k)) where |x| is at most 1. Beyond that, with t = 1 / (1 +
# |x| / c) and u = a t - b between -1 and 1, erfc |x| = exp(-x**2) * (sum of far_k u**k).
# Interpolations at Chebyshev's points; the largest errors are 2**-34 and 2**-62 near, 2**-38 and
# 2**-63 beyond.
_NEAR_TERMS = {
    32: (
        0.12837916612625122, -0.37612637877464294, 0.11283782124519348, -0.026865430176258087,
        0.005221031606197357, -0.0008484080317430198, 0.00011265958892181516,
        -9.667044650996104e-06,
    ),
    64: (
        0.1283791670955126, -0.3761263890318375, 0.11283791670954879, -0.026866170645076792,
        0.0052239776248180145, -0.000854832698083379, 0.0001205533111164271,
        -1.4925595266831182e-05, 1.6461000484121368e-06, -1.6350312701054695e-07,
        1.4659775274047436e-08, -1.1372848856791674e-09, 5.957176147748911e-11,
    ),
}  # fmt: skip
_FAR_TERMS = {
    32: (
        0.25539568066596985, 0.1423952877521515, 0.02685091271996498, 0.0029251305386424065,
        4.607582013704814e-05, -2.8785412723664194e-05, -1.1475857490950148e-06,
        4.3171451125090243e-07,
    ),
    64: (
        0.20798329133342885, 0.15436117429436919, 0.0496984454033948, 0.012713147695691995,
        0.0024793146970724187, 0.00033160296057845436, 1.956358330834969e-05,
        -2.4255574811020284e-06, -5.541277438329464e-07, 4.526722197970927e-09,
        1.1340261055840323e-08, 2.6378817019432074e-10, -2.5809703293704675e-10,
        -6.030100178315267e-12, 6.716060821011204e-12, -4.468786282795809e-15,
        -1.6799777159311457e-13,
    ),
}  # fmt: skip
# 1 / c, a, b, and from where on erf is 1.
_FAR_PLACES = {32: (0.5, 6.0, 3.0, 4.0), 64: (1.0 / 3.0, 4.8, 2.6, 6.0)}


def _polynomial(terms: dict[int, tuple[float, ...]]) -> Any:
    """Make a function of x that returns the sum of terms_k * x**k."""

    @intrinsic
    def total(typingctx, x):
        def codegen(context, builder, sig, args):
            (value,), flags = args, ("contract",)
            first, *others = reversed(terms[sig.args[0].bitwidth])
            result = ir.Constant(value.type, first)
            for term in others:
                product = builder.fmul(result, value, flags=flags)
                result = builder.fadd(product, ir.Constant(value.type, term), flags=flags)
            return result

        return x(x), codegen

    return total


_near, _beyond = _polynomial(_NEAR_TERMS), _polynomial(_FAR_TERMS)
_sin_single, _sin_double = (_polynomial({64: _SIN_TERMS[:n]}) for n in (4, 8))
_cos_single, _cos_double = (_polynomial({64: _COS_TERMS[:n]}) for n in (5, 8))


@intrinsic
def _bits(typingctx, shifted):
    """Return the bits of a float64."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(shifted), codegen


def _wave(x: Any, quarters: Any) -> Any:
    """Return sin(x + quarters * pi / 2), where |x| is at most `FAR`."""
    raise RuntimeError("compiled code only")


@overload(_wave, jit_options=_OPTIONS)
def _compiled_wave(x, quarters):
    if not is_float(x):
        return None
    two_over_pi, (a, b, c, d) = 2.0 / math.pi, _HALF_PI
    rest = b + (c + d)

    def single(x, quarters):  # in float64, which leaves one rounding
        wide = np.float64(x)
        shifted = wide * two_over_pi + _SHIFT
        n = shifted - _SHIFT
        r = (wide - n * a) - n * rest
        square = r * r
        odd = r + (r * square) * _sin_single(square) if r != 0.0 else r  # keeps the sign of 0
        even = 1.0 + square * _cos_single(square)
        quadrant = _bits(shifted) + quarters
        value = even if quadrant & 1 else odd
        return np.float32(-value if quadrant & 2 else value)

    def double(x, quarters):
        shifted = x * two_over_pi + _SHIFT
        n = shifted - _SHIFT
        r = (((x - n * a) - n * b) - n * c) - n * d
        square = r * r
        odd = r + (r * square) * _sin_double(square) if r != 0.0 else r
        even = 1.0 + square * _cos_double(square)
        quadrant = _bits(shifted) + quarters
        value = even if quadrant & 1 else odd
        return -value if quadrant & 2 else value

    return single if x.bitwidth == 32 else double


def sin(x: float) -> float:
    """Return the sine, to 3 units in the last place where |x| is at most `FAR`; NaN for NaN."""
    return math.sin(x)


@overload(sin, jit_options=_OPTIONS)
def _sin(x):
    return (lambda x: _wave(x, 0)) if is_float(x) else None


def cos(x: float) -> float:
    """Return the cosine, to 3 units in the last place where |x| is at most `FAR`; NaN for NaN."""
    return math.cos(x)


@overload(cos, jit_options=_OPTIONS)
def _cos(x):
    return (lambda x: _wave(x, 1)) if is_float(x) else None


def erf(x: float) -> float:
    """Return the error function, to two units in the last place; NaN for NaN."""
    return math.erf(x)


@overload(erf, jit_options=_OPTIONS)
def _erf(x):
    if not is_float(x):
        return None
    number = number_of(x)
    inverse, a, b, most = (number(place) for place in _FAR_PLACES[x.bitwidth])
    zero, one = number(0.0), number(1.0)

    def compiled(x):
        size = abs(x)
        size = most if size > most else size
        square = size * size
        near = size + size * _near(square)
        u = a / (one + size * inverse) - b
        beyond = one - exp(-square) * _beyond(u)
        value = near if size < one else beyond
        value = -value if x < zero else value
        return x if x == zero else value

    return compiled
