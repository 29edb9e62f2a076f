"""The public functions that make 8- and 4-bit codes, and prepare rows for them."""

from __future__ import annotations

from typing import Any, Literal, SupportsIndex

import numpy as np

from . import execute
from .arrays.interop import DLPackArray
from .arrays.typed import FloatArray
from .problem.call import Array
from .problem.formats import name_of
from .problem.hadamard import Transform, transform
from .problem.keywords import explained
from .problem.quantize import Quantisation, quantisation
from .row_request import RowRequest
from .rowwise import HADAMARD, QUANTIZE


@explained
def quantize(
    x: DLPackArray,
    dtype: str | type[Any] | np.dtype[Any],
    *,
    group: SupportsIndex | None = None,
    per: Literal["row", "head", "tensor"] = "row",
) -> tuple[Array, FloatArray]:
    """Convert numbers to codes of 8 or 4 bits, with a scale for each row, head or group of columns.

    The codes mean ``scale * code``, which differs from x by at most half a step of the codes. The
    scale is the largest magnitude of its numbers, divided by the largest code: 127 for int8, 448
    for float8_e4m3fn, 57344 for float8_e5m2 and 7 for int4. A code is x times the inverse of the
    scale, rounded to nearest even. Inverse and product are rounded to float32, or to float64 for
    float64 arrays, and CPU and GPU give equal bits.

    Parameters
    ----------
    x : array, shape (..., D)
        Numbers. Dtypes, strides and kinds of arrays are those of `attention`.
    dtype : str or dtype_like
        "int8", "float8_e4m3fn", "float8_e5m2" or "int4", or such a type of NumPy or ml_dtypes.
    group : int, optional
        How many columns share a scale: D, all columns of a row, or for int4 also 32, its default.
        Other groups are refused, because no function takes them.
    per : {"row", "head", "tensor"}
        What has a scale of its own: each row (..., D), each head (..., L, D), or all of x. Fewer
        scales make attention over codes of float8 faster, and its error larger where rows have
        different sizes.

    Returns
    -------
    codes : array, shape (..., D), or (..., D / 2) for int4
        The codes, in the memory order of x. Those of int8 are int8. Those of float8 are arrays of
        ml_dtypes; if it is not installed, and on a GPU, they are the same bits as uint8. Those of
        int4 are uint8: the lower half of a byte is the code of the first of two columns, from -7 to
        7 in two's complement.
    scale : array of float32, shape (..., D / group)
        One for each group; without groups (..., 1). Axes whose rows share a scale have the length
        1: a head has (..., 1, 1), and all of x (1, ..., 1). It is at least 2**-126, also where all
        numbers are 0, or where there are none.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The type is none of these, or the columns cannot be divided so.

    Notes
    -----
    No finite number is beyond the largest code, so that it makes no difference what a library does
    with numbers that are too large: see `cupyflash.foreign.float8`.

    Nothing that is not finite is lost in silence. A NaN makes its scale NaN; the codes with this
    scale are NaN then, or 0 for integers. An infinity makes its scale infinite; its own code is the
    largest, with its sign, and finite numbers with this scale have the code 0. The same happens to
    float64 numbers whose scale float32 cannot hold.

    References
    ----------
    J. Shah and others, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
    Low-precision", 2024, section 3.3.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import quantize
    >>> x = np.array([[0.0, 0.5, -1.0, 2.0]], np.float32)
    >>> codes, scale = quantize(x, "int8")
    >>> codes
    array([[  0,  32, -64, 127]], dtype=int8)
    >>> bool((abs(x - scale * codes) <= 0.5 * scale).all())
    True
    >>> heads = np.ones((2, 8, 100, 64), np.float32)
    >>> quantize(heads, "float8_e4m3fn", per="head")[1].shape
    (2, 8, 1, 1)
    """

    def check() -> Quantisation:
        return quantisation(x, dtype, group, per)

    numbers = name_of(dtype), group, per
    results = execute.rows(RowRequest(QUANTIZE, check, {"x": x}, numbers=numbers))
    return results["codes"], results["scale"]


@explained
def hadamard(
    x: DLPackArray,
    seed: SupportsIndex,
    *,
    inverse: bool = False,
    out: Array | None = None,
) -> Array:
    """Spread every row over all of its columns by a random orthogonal transform.

    Columns get random signs, then rows are multiplied by a Hadamard matrix, whose entries are 1 and
    -1, and by 1 / sqrt(D). The transform keeps norms and products: attention with transformed
    queries and keys has the same scores. A few large columns become a part of all columns, so that
    integer codes lose less. Codes of float8 have the same relative error for large and for small
    numbers: they gain nothing, and may lose. The transform is computed in float32, or in float64
    for float64 arrays, and rounded once.

    Parameters
    ----------
    x : array, shape (..., D)
        Rows. D is a power of two, or 12, 20, 28 or 36 times one, and at most 4096. Dtypes, strides
        and kinds of arrays are those of `attention`.
    seed : int
        The seed of the signs, 0 to 2**64 - 1; they are the same on CPU and GPU. Arrays whose
        products matter need the same seed.
    inverse : bool
        Transform back. This is also the gradient: it turns dout into dx.
    out : array, shape of x, optional
        Where to write the result.

    Returns
    -------
    array
        The transformed rows, with the shape and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no transform of this size, or a shape, dtype or device is wrong.

    References
    ----------
    J. Shah and others, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
    Low-precision", 2024, section 3.3. S. Ashkboos and others, "QuaRot: Outlier-Free 4-Bit Inference
    in Rotated LLMs", 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import hadamard
    >>> x = np.zeros((1, 64), np.float32)
    >>> x[0, 7] = 8.0  # an outlier
    >>> spread = hadamard(x, 0)
    >>> float(abs(spread).max())
    1.0
    >>> bool((hadamard(spread, 0, inverse=True) == x).all())
    True
    """

    def check() -> Transform:
        return transform(x, seed, inverse, out)

    read, written = {"x": x}, {"out": out}
    results = execute.rows(
        RowRequest(HADAMARD, check, read, written, numbers=(inverse,), seed=seed)
    )
    return results["out"]
