"""8- and 4-bit codes with a scale for each group of columns: the CPU twin of quantize.

A group's scale is its largest magnitude, divided by the largest code, and at least 2**-126; a code
is x times the inverse of the scale, rounded to nearest even. Every step is one operation that IEEE
754 defines, so that a GPU has the same bits. A NaN makes the scale NaN and all codes 0, or NaN
where there is such a code. An infinity makes the scale infinite, and gets the largest code.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import INT, helper, kernel, takes, vector, whole_rows
from .merge import product

# By the number of a format, as in kernels_cu/common/code.cuh: int8, float8_e4m3fn, float8_e5m2 and
# int4.
LARGEST = 127, 448, 57344, 7
FRACTION = 0, 3, 2, 0  # bits behind the leading one; integers have no such bits
BIAS = 0, 7, 15, 0  # of the exponent
BITS = 8, 8, 8, 4
NAN_CODE = 0x7F  # of the formats with a fraction
LEAST = -126  # the smallest scale is 2**LEAST


@intrinsic
def word_of(typingctx, x):
    """Return the bits of a number."""

    def codegen(context, builder, sig, args):
        bits = ir.IntType(64 if sig.args[0] == types.float64 else 32)
        return builder.zext(builder.bitcast(args[0], bits), ir.IntType(64))

    return types.int64(x), codegen


@intrinsic
def number_of(typingctx, word, like):
    """Return the number of the type of `like` with these bits."""

    def codegen(context, builder, sig, args):
        bits = ir.IntType(64 if sig.args[1] == types.float64 else 32)
        word = args[0] if bits.width == 64 else builder.trunc(args[0], bits)
        return builder.bitcast(word, args[1].type)

    return like(types.int64, like), codegen


@intrinsic
def is_double(typingctx, like):
    """Return whether a number is float64."""

    def codegen(context, builder, sig, args):
        return context.get_constant(types.boolean, sig.args[0] == types.float64)

    return types.boolean(like), codegen


@helper
def shape_of(like):
    """Return the bits of a fraction, the bias of exponents, and all bits but the sign."""
    if is_double(like):
        return 52, 1023, 0x7FFFFFFFFFFFFFFF
    return 23, 127, 0x7FFFFFFF


@helper
def power_of_two(exponent, like):
    """Return 2**exponent in the type of `like`."""
    fraction, bias, _ = shape_of(like)
    return number_of((bias + exponent) << fraction, like)


@helper
def encode(x, inverse, form, like):
    """Return the code of x, rounded to nearest even."""
    fraction, bias, magnitude = shape_of(like)
    own_fraction, own_bias, bits = FRACTION[form], BIAS[form], BITS[form]
    if inverse != inverse:
        return NAN_CODE if own_fraction else 0
    word = word_of(x)
    size = word & magnitude
    sign = word ^ size
    if size == (2 * bias + 1) << fraction:
        multiple = number_of(word_of(type(like)(LARGEST[form])) | sign, like)
    else:
        multiple = product(x, inverse)
    if own_fraction == 0:
        # A number this large has units in its last bit, so the sum has the integer in its last
        # bits.
        units = number_of((bias + fraction) << fraction | 1 << (fraction - 1), like)
        return word_of(multiple + units) & ((1 << bits) - 1)
    size = word_of(multiple) & magnitude
    negative = 0x80 if sign else 0
    shift = fraction - own_fraction
    if size < (bias + 1 - own_bias) << fraction:  # in units of the smallest code
        units = power_of_two(shift + 1 - own_bias, like)
        return negative | (word_of(number_of(size, like) + units) & 0x7F)
    half = (1 << (shift - 1)) - 1 + (size >> shift & 1)
    return negative | (((size + half) >> shift) - ((bias - own_bias) << own_fraction))


@takes(
    lambda number: (
        INT,
        INT,
        whole_rows(number),
        INT,
        whole_rows(types.uint8),
        vector(types.float32),
    )
)
@kernel
def quantize(first, last, x, form, codes, scales):
    """Convert the groups from `first` to `last`, rows of `x`; `form` is the number of a format."""
    like = x.dtype.type(0)
    fraction, bias, magnitude = shape_of(like)
    infinite = (2 * bias + 1) << fraction
    columns = x.shape[1]
    one = x.dtype.type(1)
    for row in range(first, last):
        largest = 0
        for d in range(columns):
            size = word_of(x[row, d]) & magnitude
            largest = size if size > largest else largest
        if largest > infinite:
            scales[row] = number_of(0x7FC00000, scales.dtype.type(0))
            inverse = like / like
        else:
            ratio = number_of(largest, like) / x.dtype.type(LARGEST[form])
            least = power_of_two(LEAST, like)
            scales[row] = ratio if ratio > least else least
            inverse = one / x.dtype.type(scales[row])
        if BITS[form] == 8:
            for d in range(columns):
                codes[row, d] = encode(x[row, d], inverse, form, like)
        else:
            for d in range(columns // 2):
                low = encode(x[row, 2 * d], inverse, form, like)
                high = encode(x[row, 2 * d + 1], inverse, form, like)
                codes[row, d] = low | high << 4
