"""The public function that converts results to arrays of other libraries."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from .arrays import interop
from .arrays.interop import DLPackArray
from .problem.call import Gradients

L = TypeVar("L", bound=DLPackArray)


@overload
def convert(results: Gradients, *, like: L) -> Gradients[L, L | None]: ...


@overload
def convert(results: tuple[DLPackArray, DLPackArray], *, like: L) -> tuple[L, L]: ...


@overload
def convert(results: DLPackArray, *, like: L) -> L: ...


def convert(
    results: DLPackArray | Gradients | tuple[DLPackArray, ...], *, like: L
) -> L | Gradients[L, L | None] | tuple[L, ...]:
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
    made: Any = interop.to_library_of(results, like)
    return made  # type: ignore[no-any-return]
