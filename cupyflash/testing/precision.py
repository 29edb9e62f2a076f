"""The arithmetic of a kernel, as far as a rounding-error bound needs to know it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupyflash.arrays import dtypes
from cupyflash.arrays.dtypes import DTYPES

# float32 in three products on tensor cores. A number is split into a large part of 11 bits, rounded
# to nearest, and the remainder, which tensor cores cut off after 11 bits: this loses at most 2**-23
# of the number, twice in a product. The product of the two small parts, at most 2**-22, is left
# out. Tensor cores add 8 large products to the sum so far, 9 terms, which are cut off at 2**-23 of
# the largest of them. The sums of small products are separate, and lose 2**-11 of that. The kernel
# for 8.0 and newer adds up to 16 products in this way, two times 9 terms, and rounds longer sums to
# nearest. Hopper's kernel adds all products of a score in this way, at most 128 numbers, and those
# of 64 keys. `truncates` counts 8 of 9 terms, one for each product; there are at most 16 others,
# one for each 8 of 128 products. So beyond that, a product errs by (1 + 1 + 2 + 16 + less than 2) *
# 2**-23 of the sum of magnitudes.
SPLIT = 22 * 2.0**-23
# Parts below the normal range are lost: of either operand's small part, or of a tiny operand.
SPLIT_UNDERFLOW = 2.0**-125
# Of a weight that is rounded to two numbers of bfloat16, the first of which is cut off: of a weight
# from 2**e on, that leaves less than 2**(e - 7), and to round this errs by 2**(e - 16) at most.
WEIGHT_UNIT = 2.0**-16

# Before dS is rounded to float16, it is multiplied by a power of two that brings the largest dS
# that shares this power to this number at least.
LEAST_LARGEST = 2.0**7

# Hopper's tensor cores add 32 products of codes of 8 bits to a sum at a time. These 33 terms are
# cut off at 2**-13 of the largest of them, and so is their sum. Weights are multiplied by 2**8 and
# rounded to float8_e4m3fn, whose spacing is 2**-9 below its normal range. The sums over the keys of
# a tile, at most 128, are taken up in float32 after at most 4 such steps.
CODE_UNIT, CODE_TERMS = 2.0**-13, 33
E4M3_UNIT, E4M3_UNDERFLOW = 2.0**-4, 2.0**-10 / 2**8
CODE_STEPS = 4

# Kernels for tensor cores of 16-bit types keep an old maximum as long as no weight exceeds 2^8.
LAG = 8 * math.log(2)


@dataclass(frozen=True)
class Rounding:
    """Conversion to a stored type: ``|round(x) - x| <= unit * |x| + underflow``.

    Parameters
    ----------
    unit : float
        Unit roundoff; 0 for no conversion.
    underflow : float
        Largest absolute error of a number below the normal range.
    largest : float
        Largest finite number.
    """

    unit: float
    underflow: float
    largest: float

    @classmethod
    def to(cls, dtype: DTypeLike) -> Rounding:
        """Return the rounding to one of float16, bfloat16, float32 and float64.

        Parameters
        ----------
        dtype : dtype_like
            The stored type.

        Returns
        -------
        Rounding
            Its constants.
        """
        name = np.dtype(dtype).name
        if name not in DTYPES:
            raise TypeError(f"dtype: got {name}; expected one of {', '.join(DTYPES)}")
        known = DTYPES[name]
        return cls(known.unit_roundoff, known.underflow, known.largest)


NOT_ROUNDED = Rounding(0.0, 0.0, math.inf)


@dataclass(frozen=True)
class Precision:
    """Constants of a kernel's arithmetic.

    Parameters
    ----------
    unit : float
        Unit roundoff u_a of the accumulator.
    exp2_error : float
        Largest relative error u_e of the kernel's exp2 (and absolute error of its log).
    underflow : float
        Largest absolute error of an accumulator operation whose result is not a normal number.
    largest : float
        Largest finite accumulator.
    product : Rounding
        Rounding u_p of P and dS to an operand of the second matrix product, and of a scale's
        product; unit 0 for none.
    output : Rounding
        Rounding u_o of O, dQ, dK and dV when they are stored. The LSE and delta keep the
        accumulator's type.
    truncates : bool
        Whether the accumulator rounds toward zero, as tensor cores do, which doubles the bound of
        every rounding.
    scaled_underflow : float
        Largest absolute error of a dS below the normal range of `product`, relative to the largest
        ``|dS|``, if dS is multiplied by a power of two before it is rounded; 0 if it is not.
    split : float
        Largest relative error of a product of two numbers that are split for tensor cores, or of
        which one has a scale, apart from the errors of its sum; otherwise 0.
    lag : float
        How far below a row's largest logit the number used in its place may be. Weights are then up
        to ``exp(lag)`` before they are divided by their sum.
    code_unit : float
        Where scores are sums of products of codes of 8 bits on tensor cores: the share of the
        largest term at which the terms of a step, and their sum, are cut off; otherwise 0.
    operand_underflow : float
        Largest absolute error of a number below the normal range when it is rounded to the type in
        which it is multiplied; 0 if it is not rounded.
    scores : Rounding
        Rounding of scores where they are kept in a narrower type: of the product, after the scale,
        after each score change and after the bias.
    scale : Rounding
        Rounding of the scale.
    lse : Rounding
        Rounding of the log-sum-exp when it is stored.
    """

    unit: float
    exp2_error: float
    underflow: float
    largest: float
    product: Rounding
    output: Rounding
    truncates: bool = False
    scaled_underflow: float = 0.0
    split: float = 0.0
    lag: float = 0.0
    code_unit: float = 0.0
    operand_underflow: float = 0.0
    scores: Rounding = NOT_ROUNDED
    scale: Rounding = NOT_ROUNDED
    lse: Rounding = NOT_ROUNDED

    @classmethod
    def of(
        cls, dtype: DTypeLike, tensor_cores: bool = False, precision: str | None = None
    ) -> Precision:
        """Return the arithmetic of the package's kernels for inputs of a type.

        Parameters
        ----------
        dtype : dtype_like
            float16, bfloat16, float32 or float64: the type of q, k, v and of the output.
        tensor_cores : bool
            For a 16-bit type: whether P and dS are rounded to it for a tensor core, whose
            accumulator truncates; otherwise they may be rounded to two numbers of bfloat16, as CPUs
            with AMX do. Tensor cores multiply float64 like other units.
        precision : {None, "tf32x3"}
            As given to `cupyflash.attention`.

        Returns
        -------
        Precision
            The arithmetic. Accumulation is in float64 for float64, and in float32 otherwise.
        """
        output = Rounding.to(dtype)
        computed = dtypes.accumulator(np.dtype(dtype))
        sums = Rounding.to(computed)
        is_half = np.dtype(dtype).itemsize == 2
        exact = Rounding(0.0, 0.0, sums.largest)
        if is_half:
            exact = Rounding(WEIGHT_UNIT, sums.underflow, sums.largest)
        if precision is not None:
            exact = Rounding(SPLIT, SPLIT_UNDERFLOW, sums.largest)
        narrow = tensor_cores and is_half
        scaled = narrow and np.dtype(dtype).name == "float16"
        return cls(
            unit=sums.unit,
            exp2_error=2.0**-50 if computed == np.float64 else 2.0**-22,
            underflow=sums.underflow,
            largest=sums.largest,
            product=output if narrow else exact,
            output=output,
            truncates=narrow or precision is not None,
            scaled_underflow=output.underflow / LEAST_LARGEST if scaled else 0.0,
            split=0.0 if precision is None else SPLIT,
            lag=LAG if narrow else 0.0,
        )

    @classmethod
    def stated(
        cls,
        accumulator: DTypeLike = "float32",
        p: DTypeLike | None = None,
        exp2_error: float | None = None,
        truncates: bool = False,
        output: DTypeLike | None = None,
        lag: float = 0.0,
        scores: DTypeLike | None = None,
        scale: DTypeLike | None = None,
        lse: DTypeLike | None = None,
    ) -> Precision:
        """Return the arithmetic of a kernel that you describe in words.

        Parameters
        ----------
        accumulator : dtype_like
            Type of scores, sums and everything between input and output.
        p : dtype_like or None
            Type that P and dS are rounded to before the second product; None for none.
        exp2_error : float, optional
            Largest relative error of the kernel's exponential. Default: 2**-50 for float64, and
            2**-22 for others.
        truncates : bool
            Whether the accumulator rounds toward zero.
        output : dtype_like, optional
            Type of O and the gradients; by default the accumulator's. `verify` replaces it by the
            type of each problem.
        lag : float
            How far below a row's largest logit the number used in its place may be: ``8 * log(2)``
            for a kernel that rescales its sums only if the maximum grows by a factor of 2^8.
        scores : dtype_like or None
            Type in which the matrix of scores is kept, as in code that calls matmul and softmax;
            None for the accumulator's.
        scale : dtype_like or None
            Type that the scale is rounded to; None for the accumulator's.
        lse : dtype_like or None
            Type of the log-sum-exp that is returned; None for the accumulator's.

        Returns
        -------
        Precision
            Its constants.

        Examples
        --------
        >>> from cupyflash.testing import Precision
        >>> Precision.stated("float32", p="float16", truncates=True).product.unit
        0.00048828125
        """
        held = Rounding.to(accumulator)
        usual = 2.0**-50 if held.unit < 2.0**-40 else 2.0**-22
        return cls(
            unit=held.unit,
            exp2_error=max(usual, 4 * held.unit) if exp2_error is None else exp2_error,
            underflow=held.underflow,
            largest=held.largest,
            product=Rounding(0.0, 0.0, held.largest) if p is None else Rounding.to(p),
            output=held if output is None else Rounding.to(output),
            truncates=truncates,
            lag=lag,
            scores=NOT_ROUNDED if scores is None else Rounding.to(scores),
            scale=NOT_ROUNDED if scale is None else Rounding.to(scale),
            lse=NOT_ROUNDED if lse is None else Rounding.to(lse),
        )

    def with_codes(self) -> Precision:
        """Return the arithmetic over a cache of codes of 8 or 4 bits, which are exact.

        A scale is a factor of every product, of the score's and of the output's, or of sums of
        them; this is one more rounding. What ``scale * code`` loses below the normal range is a
        part of the output.
        """
        product, output = self.product, self.output
        return replace(
            self,
            split=self.split + self.unit,
            product=replace(product, unit=product.unit + 2 * self.unit),
            output=replace(output, underflow=output.underflow + 2 * self.underflow),
        )

    @classmethod
    def of_codes(
        cls, out_dtype: DTypeLike, how: Literal["float32", "out_dtype", "codes"] = "float32"
    ) -> Precision:
        """Return the arithmetic of calls whose queries, keys and values are codes of float8.

        The exact numbers are ``scale * code``.

        Parameters
        ----------
        out_dtype : dtype_like
            The type of the output: float16, bfloat16 or float32.
        how : {"float32", "out_dtype", "codes"}
            What is multiplied: numbers that are rounded to float32, on a CPU; to the output's type,
            on GPUs without a kernel for codes; or the codes themselves, on Hopper.

        Returns
        -------
        Precision
            Its constants.
        """
        output = Rounding.to(out_dtype)
        if how == "codes":
            made = cls.of("float32")
            # Of the tile's sum, and of the product with the scales of values.
            sums = CODE_STEPS * (CODE_TERMS + 1) * CODE_UNIT + 4 * made.unit
            product = Rounding(
                (1 + E4M3_UNIT) * (1 + sums) - 1, E4M3_UNDERFLOW, made.product.largest
            )
            return replace(
                made, product=product, output=output, split=4 * made.unit, code_unit=CODE_UNIT
            )
        numbers = Rounding.to("float32") if how == "float32" else output
        made = cls.of("float32") if how == "float32" else cls.of(out_dtype, tensor_cores=True)
        product = made.product
        return replace(
            made,
            split=made.split + 2 * numbers.unit + numbers.unit**2,
            product=replace(product, unit=(1 + product.unit) * (1 + numbers.unit) - 1),
            output=replace(output, underflow=output.underflow + numbers.underflow),
            operand_underflow=numbers.underflow,
        )

    @property
    def reference_dtype(self) -> Any:
        """Type of the exact values: float64, or long double where float64 is what is bounded."""
        return np.float64 if self.unit > 2.0**-40 else np.longdouble

    def gamma(self, count: Any) -> NDArray[np.float64]:
        """Bound the relative error of `count` roundings in a row or in any tree.

        Parameters
        ----------
        count : array_like
            Number of roundings n.

        Returns
        -------
        ndarray of float64
            Higham's ``gamma_n = c n u / (1 - c n u)``, with c = 2 for accumulators that truncate;
            infinite where ``c n u >= 1``.
        """
        total = np.asarray(count, np.float64) * ((2 if self.truncates else 1) * self.unit)
        with np.errstate(divide="ignore"):
            return np.where(total < 1, total / np.maximum(1 - total, 0.0), np.inf)
