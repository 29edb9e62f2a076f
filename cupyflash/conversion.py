"""The public function that gives results back to other libraries."""

from __future__ import annotations

from typing import Any

from .arrays import interop
from .arrays.interop import DLPackArray


def convert(results: Any, *, like: DLPackArray) -> Any:
    """Return results as arrays of the library that another array comes from.

    All functions take arrays of other libraries, and return arrays of NumPy or CuPy. This gives
    them back in the same memory, without a copy.

    Parameters
    ----------
    results : array, Gradients or tuple
        What a function returned.
    like : array
        One of NumPy, CuPy, PyTorch, JAX or another library that takes arrays by DLPack, living
        where the results live.

    Returns
    -------
    array, Gradients or tuple
        Of the library of `like`; arrays of a subclass of NumPy's stand for NumPy.

    Raises
    ------
    ArgumentTypeError
        `like` is no array, or its library does not take such arrays there.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, convert
    >>> x = np.ones((1, 8, 4), np.float32)  # or an array of another library
    >>> type(convert(attention(x, x, x), like=x)).__name__
    'ndarray'
    """
    return interop.to_library_of(results, like)
