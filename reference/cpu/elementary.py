"""Powers of 2 and e, tanh and sigmoid without branches: compilers work on several at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .jit import FASTMATH
from .vectors import emit_exp2

LOG2_E = math.log2(math.e)

# e**r = sum of r**k / k! where |r| is at most half of log 2. float32 uses the terms to k = 7, and
# float64 all of them: the first omitted term is below 2**-27 and 2**-57.
_EXP_TERMS = tuple(1.0 / math.factorial(k) for k in range(14))
# log 2 in two parts. The first has so few bits that its product with a number below 2**8 and 2**11
# is exact (Cody and Waite 1980).
_LOG_2 = {
    32: (float.fromhex("0x1.62e4p-1"), float.fromhex("0x1.7f7d1cp-20")),
    64: (float.fromhex("0x1.62e42fefa3p-1"), float.fromhex("0x1.3de6af278ece6p-42")),
}
# The arguments at which exp has become 0 and infinity.
_EXP_RANGE = {32: (-104.0, 89.0), 64: (-746.0, 710.0)}
_EXP2_RANGE = {32: (-151.0, 128.0), 64: (-1076.0, 1024.0)}
_TANH_IS_1 = 20.0


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


@intrinsic
def _emitted_exp2(typingctx, x):
    return x(x), lambda context, builder, sig, args: emit_exp2(builder, args[0])


def exp2(x: float) -> float:
    """Return 2**x for x <= 0; 0 where `emit_exp2` says so; NaN for NaN."""
    return float(np.exp2(x))


def is_float(x: Any) -> bool:
    """Whether a type of Numba is one for which there is compiled code."""
    return isinstance(x, types.Float) and x.bitwidth in (32, 64)


def number_of(x: Any) -> Any:
    """Return NumPy's type of such numbers."""
    return np.float32 if x.bitwidth == 32 else np.float64


@overload(exp2, jit_options={"fastmath": FASTMATH})
def _exp2(x):
    if not is_float(x):
        return None

    def compiled(x):
        return _emitted_exp2(x)

    return compiled


def _near_1(r: Any) -> Any:
    """Return e**r - 1, where |r| is at most half of log 2."""
    raise RuntimeError("compiled code only")


@overload(_near_1, jit_options={"fastmath": FASTMATH})
def _compiled_near_1(r):
    if not is_float(r):
        return None
    t = tuple(number_of(r)(c) for c in _EXP_TERMS)

    if r.bitwidth == 32:

        def single(r):
            p = t[6] + r * t[7]
            p = t[4] + r * (t[5] + r * p)
            p = t[2] + r * (t[3] + r * p)
            return r + (r * r) * p

        return single

    def double(r):
        p = t[12] + r * t[13]
        p = t[10] + r * (t[11] + r * p)
        p = t[8] + r * (t[9] + r * p)
        p = t[6] + r * (t[7] + r * p)
        p = t[4] + r * (t[5] + r * p)
        p = t[2] + r * (t[3] + r * p)
        return r + (r * r) * p

    return double


def _power_of_e(x: Any) -> tuple[Any, Any]:
    """Return n + 1.5 * 2**(mantissa bits) and e**r - 1, where x = n log 2 + r and |r| is small."""
    raise RuntimeError("compiled code only")


@overload(_power_of_e, jit_options={"fastmath": FASTMATH})
def _compiled_power_of_e(x):
    if not is_float(x):
        return None
    number = number_of(x)
    shift = number(1.5 * 2.0 ** (23 if x.bitwidth == 32 else 52))
    log2_e = number(LOG2_E)
    high, low = (number(part) for part in _LOG_2[x.bitwidth])

    def compiled(x):
        shifted = x * log2_e + shift
        n = shifted - shift
        r = (x - n * high) - n * low
        return shifted, _near_1(r)

    return compiled


def _scaled(x: Any, n: Any) -> Any:
    """Return x * 2**n, in two steps, because 2**-150 and 2**128 are not normal numbers."""
    raise RuntimeError("compiled code only")


@overload(_scaled, jit_options={"fastmath": FASTMATH})
def _compiled_scaled(x, n):
    if not is_float(x):
        return None
    number = number_of(x)
    shift, half = number(1.5 * 2.0 ** (23 if x.bitwidth == 32 else 52)), number(0.5)

    def compiled(x, n):
        first = n * half + shift
        rest = n - (first - shift) + shift
        return x * _power_of_two(first) * _power_of_two(rest)

    return compiled


def exp(x: float) -> float:
    """Return e**x, to two units in the last place; NaN for NaN."""
    return float(np.exp(x))


@overload(exp, jit_options={"fastmath": FASTMATH})
def _exp(x):
    if not is_float(x):
        return None
    number = number_of(x)
    lowest, highest = (number(end) for end in _EXP_RANGE[x.bitwidth])
    shift = number(1.5 * 2.0 ** (23 if x.bitwidth == 32 else 52))
    one = number(1.0)

    def compiled(x):
        held = lowest if x < lowest else x
        held = highest if held > highest else held
        shifted, grown = _power_of_e(held)
        return _scaled(one + grown, shifted - shift)

    return compiled


def power_of_2(x: float) -> float:
    """Return 2**x, to one unit in the last place; NaN for NaN."""
    return float(np.exp2(x))


@overload(power_of_2, jit_options={"fastmath": FASTMATH})
def _power_of_2(x):
    if not is_float(x):
        return None
    number = number_of(x)
    lowest, highest = (number(end) for end in _EXP2_RANGE[x.bitwidth])
    shift = number(1.5 * 2.0 ** (23 if x.bitwidth == 32 else 52))
    log_2, one = number(math.log(2.0)), number(1.0)

    def compiled(x):
        held = lowest if x < lowest else x
        held = highest if held > highest else held
        n = (held + shift) - shift
        return _scaled(one + _near_1((held - n) * log_2), n)

    return compiled


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e**-x), to three units in the last place; NaN for NaN."""
    grown = math.exp(-abs(x))
    return (grown if x < 0 else 1.0) / (1.0 + grown)


@overload(sigmoid, jit_options={"fastmath": FASTMATH})
def _sigmoid(x):
    if not is_float(x):
        return None
    one, zero = number_of(x)(1.0), number_of(x)(0.0)

    def compiled(x):
        grown = exp(-abs(x))  # at most 1
        return (grown if x < zero else one) / (one + grown)

    return compiled


def tanh(x: float) -> float:
    """Return the hyperbolic tangent, to three units in the last place; NaN for NaN."""
    return float(np.tanh(x))


@overload(tanh, jit_options={"fastmath": FASTMATH})
def _tanh(x):
    if not is_float(x):
        return None
    number = number_of(x)
    lowest, two, one, zero = number(-2 * _TANH_IS_1), number(2.0), number(1.0), number(0.0)

    def compiled(x):
        y = -two * abs(x)
        held = lowest if y < lowest else y
        shifted, grown = _power_of_e(held)
        power = _power_of_two(shifted)
        t = (power - one) + power * grown  # e**y - 1 without cancellation if y is small
        value = -t / (two + t)
        value = -value if x < zero else value
        return x if x == zero else value

    return compiled


def emit_log(builder: Any, x: Any) -> Any:
    """Emit the natural logarithm of each lane of a vector of normal numbers; NaN for NaN.

    x = 2**n m, where m is between 1 / sqrt(2) and sqrt(2), and log m = 2 artanh s with
    s = (m - 1) / (m + 1), a series in s**2 < 0.03. The first omitted term is below 2**-31 and
    2**-60 of the sum.
    """
    kind, flags = x.type, ("contract",)
    bits = 64 if isinstance(kind.element, ir.DoubleType) else 32
    word, mantissa = ir.VectorType(ir.IntType(bits), kind.count), 52 if bits == 64 else 23
    root = 0x3FE6A09E667F3BCD if bits == 64 else 0x3F3504F3  # bits of 1 / sqrt(2)

    def words(value: int) -> Any:
        return ir.Constant(word, [value] * kind.count)

    def like(value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=flags), c, flags=flags)

    stored = builder.bitcast(x, word)
    power = builder.ashr(builder.sub(stored, words(root)), words(mantissa))
    m = builder.bitcast(builder.sub(stored, builder.shl(power, words(mantissa))), kind)
    n, one = builder.sitofp(power, kind), like(1.0)
    s = builder.fdiv(builder.fsub(m, one), builder.fadd(m, one))
    z, (high, low) = builder.fmul(s, s), map(like, _LOG_2[bits])
    terms = [2.0 / k for k in range(3, 23 if bits == 64 else 11, 2)]
    series = like(terms[-1])
    for term in terms[-2::-1]:
        series = multiply_add(series, z, like(term))
    small = multiply_add(builder.fmul(s, z), series, builder.fmul(n, low))
    value = multiply_add(n, high, builder.fadd(builder.fadd(s, s), small))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, x, value)
