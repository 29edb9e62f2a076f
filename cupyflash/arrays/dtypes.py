"""The element types of q, k and v: one table of all that is known about them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes
    ----------
    name : str
        Its name in NumPy; bfloat16 is that of ml_dtypes.
    code : int
        Its number in CUDA: the value of STORAGE, and its specialisation of `Element`.
    suffix : str
        Its part in the name of a kernel.
    kind : int
        Its number among all types that kernels read: see KINDS in reference/cpu/tables.py.
    itemsize : int
        Bytes of an element.
    accumulator : str
        The type of scores, sums, LSE and every intermediate result.
    mma : str
        The type in which tensor cores multiply it.
    unit_roundoff : float
        Largest relative error of rounding to it.
    underflow : float
        Largest absolute error below its normal range. Subnormal results may be flushed to zero
        (CuPy compiles with -ftz=true), hence the smallest normal number; conversions to float16
        keep subnormals, whose spacing is 2**-24.
    largest : float
        Its largest finite number.
    """

    name: str
    code: int
    suffix: str
    kind: int
    itemsize: int
    accumulator: str
    mma: str
    unit_roundoff: float
    underflow: float
    largest: float


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType(
            name="float16", code=0, suffix="f16", kind=8, itemsize=2, accumulator="float32",
            mma="float16", unit_roundoff=2.0**-11, underflow=2.0**-25, largest=65504.0,
        ),
        DType(
            name="bfloat16", code=1, suffix="bf16", kind=9, itemsize=2, accumulator="float32",
            mma="bfloat16", unit_roundoff=2.0**-8, underflow=2.0**-126,
            largest=(2.0 - 2.0**-7) * 2.0**127,
        ),
        DType(
            name="float32", code=2, suffix="f32", kind=10, itemsize=4, accumulator="float32",
            mma="tf32", unit_roundoff=2.0**-24, underflow=2.0**-126,
            largest=(2.0 - 2.0**-23) * 2.0**127,
        ),
        DType(
            name="float64", code=3, suffix="f64", kind=11, itemsize=8, accumulator="float64",
            mma="float64", unit_roundoff=2.0**-53, underflow=2.0**-1022,
            largest=(2.0 - 2.0**-52) * 2.0**1023,
        ),
    )
}  # fmt: skip
FLOATS = tuple(DTYPES)  # their names
WORDS = f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]}"  # for messages


@functools.cache  # a dtype makes its name again each time
def accumulator(dtype: Any) -> np.dtype[Any]:
    """Return the type in which arrays of a type are computed."""
    held: np.dtype[Any] = np.dtype(DTYPES[np.dtype(dtype).name].accumulator)
    return held
