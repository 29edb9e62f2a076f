"""The arguments of explanations: shapes, types and masks, without arrays' elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...arrays.device_arrays import is_device_array
from ...arrays.dtypes import FLOATS
from ...arrays.integers import integer
from ...errors import ArgumentError, ArgumentTypeError
from ...expr.bind import in_host_memory as copied
from ...expr.evaluate import host
from ...hints.install import ML_DTYPES
from ...masks import Mask
from ...problem import coded
from ...problem.formats import FORMATS, Format
from ...scores import Score

DENSE = "an array, or integers of 1 or more: (..., H, L, D), or (L, D) for one head"
CACHED = "four integers of 1 or more: (B, H, L, D)"


def shape_of(value: Any, name: str, axes: str = DENSE) -> tuple[int, ...]:
    """Return the lengths of axes, of which `axes` are expected."""
    wanted = f"expected {axes}."
    fewest, most = (4, 4) if axes is CACHED else (2, math.inf)
    if not isinstance(value, (tuple, list)) or not fewest <= len(value) <= most:
        raise ArgumentTypeError(f"{name}: got {value!r}; {wanted}")
    shape = tuple(integer(n) or 0 for n in value)
    if min(shape) < 1:
        raise ArgumentError(f"{name}: got {tuple(value)}; {wanted}")
    if math.prod(shape) >= 2**59:  # addresses of the widest type end at 2^63 bytes
        raise ArgumentError(f"{name}: got {tuple(value)}; expected fewer than 2^59 numbers.")
    return shape


def dtype_of(value: Any, arrays: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the dtype that is asked for; unless one is, that of the arrays."""
    found = {x.dtype.name: name for name, x in arrays.items()}
    if value is None:
        if len(found) > 1:
            came = ", ".join(f"{name} {dtype}" for dtype, name in found.items())
            raise ArgumentTypeError(f"got {came}; expected one dtype. Convert with .astype(...).")
        value = next(iter(found), FLOATS[0])
    name = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    if name not in FLOATS:
        name = str(np.dtype(value)) if not isinstance(value, str) else value
    if name not in FLOATS:
        raise ArgumentTypeError(f"dtype: got {value!r}; expected one of {', '.join(FLOATS)}.")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentTypeError(
            f"dtype: got bfloat16, which needs the package ml_dtypes: {ML_DTYPES}."
        ) from None
    made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return made


def form_of(value: Any, arrays: Mapping[str, Any]) -> Format | None:
    """Return the format of codes of float8, or None of numbers."""
    if value is None:
        names = {x.dtype.name for x in arrays.values()}
        if names == {"uint8"}:
            raise ArgumentTypeError(
                f"dtype: got None with {next(iter(arrays))} of uint8, whose bytes may be any "
                f"codes; expected what they are: {' or '.join(coded.FORMS)}. Say "
                f"dtype='{coded.FORMS[0]}', for example."
            )
        value = names.pop() if len(names) == 1 else None
    name = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    return FORMATS[name] if name in coded.FORMS else None


def in_host_memory(value: Any) -> Any:
    """Return a mask or scores whose arrays lie where the made-up q does."""
    if is_device_array(value):
        return host(value)
    if isinstance(value, (list, tuple)):
        return [in_host_memory(each) for each in value]
    return type(value)(copied(value.expr)) if isinstance(value, (Mask, Score)) else value
