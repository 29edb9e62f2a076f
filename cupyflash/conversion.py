"""The public function that converts results to arrays of other libraries."""

from __future__ import annotations

from typing import Any

from .arrays import interop
from .arrays.interop import DLPackArray


def convert(results: Any, *, like: DLPackArray) -> Any:
    """Return results as arrays of the library that another array comes from.

    All functions take arrays of other libraries, and return arrays of NumPy or CuPy. This function
    converts such arrays without a copy.

    Parameters
    ----------
    results : array, Gradients or tuple
        What a function returned.
    like : array
        An array of NumPy, CuPy, PyTorch, JAX or another library that takes arrays by DLPack, on the
        device of the results.

    Returns
    -------
    array, Gradients or tuple
        Arrays of the library of `like`. If `like` is of a subclass of NumPy's array, they are
        NumPy arrays.

    Raises
    ------
    ArgumentTypeError
        `like` is not an array, or its library cannot take an array of this dtype on this device.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, convert
    >>> x = np.ones((1, 8, 4), np.float32)  # or an array of another library
    >>> type(convert(attention(x, x, x), like=x)).__name__
    'ndarray'
    """
    return interop.to_library_of(results, like)
