"""Turns arguments of mask and score constructors (numbers, arrays, functions) into expressions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..arrays import interop
from ..arrays.device_arrays import is_device_array
from ..arrays.integers import integer
from ..arrays.interop import DLPackArray
from ..errors import ArgumentError, ArgumentTypeError, TraceError
from .bind import Alignment, aligned
from .nodes import Expr, LookupTable, array_type, as_expr
from .sharded import check_whole

# What constructors take: an array, and an integer or one for every batch entry. And positions.
ArrayLike: TypeAlias = interop.DLPackArray | Sequence[Any] | LookupTable
PerBatch: TypeAlias = SupportsIndex | interop.DLPackArray | Sequence[int] | LookupTable | Expr
Indices: TypeAlias = npt.ArrayLike
Bound: TypeAlias = SupportsIndex | None

_Make = TypeVar("_Make", bound=Callable[..., Any])


def _call(make: Callable[..., Any], args: Any, keywords: Any) -> Any:
    return make(*args, **keywords)


# Calls a function that makes a mask or a score of arrays or functions. A compiler of functions that
# cannot trace it puts a call that it does not trace here.
call: Callable[..., Any] = _call


def _same(value: Any) -> Any:
    return value


# Returns the mask or score that a compiler's constant stands for, and anything else as it is.
meant: Callable[[Any], Any] = _same


def untraced(make: _Make) -> _Make:
    """Let a function that reads arrays run outside of the graphs of a compiler."""

    @functools.wraps(make)
    def made(*args: Any, **keywords: Any) -> Any:
        return call(make, args, keywords)

    return cast(_Make, made)


def remembered(make: _Make) -> _Make:
    """Let a function remember what it made of plain numbers, and be untraced with other values."""
    recent = functools.lru_cache(maxsize=256, typed=True)(make)

    @functools.wraps(make)
    def made(*args: Any, **keywords: Any) -> Any:
        for value in (*args, *keywords.values()):
            if value is not None and type(value) not in (int, float):
                return call(make, args, keywords)
        return recent(*args, **keywords)

    return cast(_Make, made)


def number_or_per_batch(value: Any, argument: str) -> Expr:
    """Return an integer, or a look-up of one integer per batch entry."""
    if isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{argument}: got a bool; expected an integer.")
    if isinstance(value, (int, np.integer)):
        return as_expr(int(value))
    if isinstance(value, Expr):
        return value
    if isinstance(value, LookupTable):
        value = value.array
        check_whole(value, argument)  # it has no axis of positions
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    if hasattr(value, "dtype") or hasattr(value, "__dlpack__"):
        value = interop.array(value, argument)
    elif (number := integer(value)) is not None:
        return as_expr(number)
    if not hasattr(value, "dtype") or np.dtype(value.dtype).kind not in "iu":
        kind = getattr(value, "dtype", type(value).__name__)
        raise ArgumentTypeError(
            f"{argument}: got {kind}; expected an integer, or an integer array with one entry per "
            "batch entry."
        )
    return aligned(Alignment(value, argument, ()))


def traced(function: Callable[..., Any], symbols: Sequence[Expr], what: str) -> Expr:
    """Call a user's function once, on symbols, and return what it computed."""
    if not callable(function):
        raise ArgumentTypeError(
            f"{what}: got {type(function).__name__}; expected a function of "
            f"({', '.join(str(s)[0] for s in symbols)})."
        )
    try:
        inspect.signature(function).bind(*symbols)
    except TypeError as error:
        names = ", ".join("s" if str(s) == "score" else str(s) for s in symbols)
        raise ArgumentTypeError(f"{what}: its function must take ({names}): {error}.") from None
    except ValueError:
        pass  # a built-in without a signature: the call will show whether it fits
    result = function(*symbols)
    if result is None:
        raise TraceError(f"{what}: its function returned None; expected an expression.")
    return as_expr(result)


def length_or_per_batch(value: Any, argument: str) -> Expr:
    """Return the same of numbers of 0 or more; of arrays in device memory that is not checked."""
    expr = number_or_per_batch(value, argument)
    if expr.op in ("aligned", "constant"):
        held = expr.value.array if expr.op == "aligned" else expr.value
        least = 0 if is_device_array(held) else np.min(held, initial=0)
        if least < 0:
            raise ArgumentError(f"{argument}: got {least}; expected integers of 0 or more.")
    return expr


def as_array(value: Any, argument: str) -> Any:
    """Return `value` if it is an array, a nested list as an array, else raise."""
    if isinstance(value, LookupTable):
        return value.array
    if isinstance(value, (list, tuple)):
        return np.asarray(value)
    return interop.array(value, argument)


@untraced
def lookup(array: DLPackArray | Sequence[Any], learned: bool = False) -> LookupTable:
    """Make an array readable inside a mask or score.

    Parameters
    ----------
    array : array
        Booleans, integers or floats, on the device on which q will be. It is read in place at every
        call. If it changes while a call runs, the result is undefined, but no index leaves an
        array.
    learned : bool
        Whether the backward computes the gradient of the array, of floats, as far as score changes
        read it: ``Gradients.dlookups`` has it under the object that this function returns. Masks,
        conditions and indices that depend on the array add nothing to it. It is the derivative of
        the expression as it is written, which may be NaN where the score is infinite, as that of
        ``c * tanh(s / c)`` by c is. ``cupyflash.torch`` gives a tensor its own gradient.

    Returns
    -------
    LookupTable
        Index it with one integer expression per axis. Every index must be provably in range; if it
        is not, limit it with `cupyflash.expr.clip`.

    Raises
    ------
    ArgumentTypeError
        If it is not an array, or has a dtype that expressions do not support; or if it is to be
        learned, and does not have floats.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import lookup, masks
    >>> document = lookup(np.array([0, 0, 1, 1]))
    >>> masks.mask(lambda b, h, i, j: document[i] == document[j])
    <mask (lookup(<(4,)>)[i] == lookup(<(4,)>)[j])>
    """
    if not isinstance(learned, (bool, np.bool_)):
        raise ArgumentTypeError(f"lookup: learned is {learned!r}; expected True or False.")
    owner: Any = None
    if learned and hasattr(array, "__torch_function__"):
        owner = array
        array = owner.detach()
    held = np.asarray(array) if isinstance(array, (list, tuple)) else interop.array(array, "lookup")
    kind = array_type(held)
    if learned and kind != "float":
        raise ArgumentTypeError(
            f"lookup: got an array of dtype {held.dtype} with learned=True; expected floats, which "
            "have gradients. Convert it with .astype()."
        )
    return LookupTable(held, bool(learned), owner)


def positive(value: Any, name: str) -> int:
    """Return an integer of 1 or more, or raise."""
    number = integer(value)
    if number is None or number < 1:
        raise ArgumentError(f"{name} is {value!r}; expected an integer of 1 or more.")
    return number


def boolean_array(array: Any, argument: str) -> Any:
    """Return an array of bool, or raise."""
    array = as_array(array, argument)
    if np.dtype(array.dtype) != np.bool_:
        raise ArgumentTypeError(
            f"{argument}: got an array of dtype {array.dtype}; expected bool, where True means "
            "attend. Pass an additive mask as bias=."
        )
    return array
