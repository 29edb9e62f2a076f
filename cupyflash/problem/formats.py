"""The formats of 8- and 4-bit codes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError

INT4_GROUP = 32  # columns that share a scale, unless a call says otherwise


@dataclass(frozen=True)
class Format:
    """How codes represent numbers.

    Attributes
    ----------
    name : str
        The name of the type in ml_dtypes or NumPy.
    code : int
        Its number in kernels: see kernels_cu/common/code.cuh and reference/cpu/quantize.py.
    packed : int
        Codes in a byte.
    """

    name: str
    code: int
    packed: int


FORMATS = {
    form.name: form
    for form in (
        Format("int8", 0, 1),
        Format("float8_e4m3fn", 1, 1),
        Format("float8_e5m2", 2, 1),
        Format("int4", 3, 2),
    )
}
# float8 format -> bits of the fraction, bias of the exponent, the least magnitude not finite.
_FLOAT8 = {"float8_e4m3fn": (3, 7, 0x7F), "float8_e5m2": (2, 15, 0x7C)}


def format_of(dtype: Any, name: str) -> Format:
    """Return the format that an argument `name` says."""
    came = name_of(dtype)
    if came not in FORMATS:
        raise ArgumentTypeError(
            f"{name}: got {came}; expected {', '.join(FORMATS)}, by name or as the type of NumPy "
            f"or ml_dtypes.{of_amd(came)}"
        )
    return FORMATS[came]


def of_amd(name: str) -> str:
    """Return a remedy for types of AMD, and nothing for others."""
    if not name.endswith("fnuz"):
        return ""
    return " Codes of fnuz types mean half as much: cupyflash.foreign.fnuz converts them."


def name_of(dtype: Any) -> str:
    """Return the name of a type, or whatever else came in words."""
    if isinstance(dtype, str):
        return dtype
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return repr(dtype)


def dtype_of(form: Format) -> np.dtype[Any]:
    """Return the type of codes on a CPU: uint8 if NumPy has no better one."""
    if form.name.startswith("float8"):
        try:
            import ml_dtypes
        except ImportError:
            return np.dtype(np.uint8)
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, form.name))
        return found
    return np.dtype(np.int8 if form.packed == 1 else np.uint8)


def numbers(codes: Any, form: Format, xp: Any = np) -> Any:
    """Return the numbers in float32 that codes, arrays of the module `xp`, mean without scales."""
    raw = codes.view(np.uint8)
    if form.name == "int8":
        return raw.view(np.int8).astype(np.float32)
    if form.packed == 1:
        return xp.asarray(values(form))[raw.astype(np.int32)]
    # The lower half of a byte comes first; each half keeps its sign.
    halves = (raw << np.uint8(4)).view(np.int8), raw.view(np.int8)
    both = xp.stack([x >> np.int8(4) for x in halves], axis=-1)
    return both.reshape(*raw.shape[:-1], 2 * raw.shape[-1]).astype(np.float32)


@functools.cache
def values(form: Format) -> np.ndarray[Any, Any]:
    """Return the numbers in float32 that the 256 codes of a float8 format mean."""
    fraction_bits, bias, special = _FLOAT8[form.name]
    code = np.arange(256)
    magnitude, sign = code & 0x7F, np.where(code & 0x80, -1.0, 1.0)
    exponent, fraction = magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1)
    significand = fraction + np.where(exponent > 0, 1 << fraction_bits, 0)
    number = np.ldexp(significand.astype(float), np.maximum(exponent, 1) - bias - fraction_bits)
    number[magnitude >= special] = np.nan
    if form.name == "float8_e5m2":
        number[magnitude == special] = np.inf
    result: np.ndarray[Any, Any] = (sign * number).astype(np.float32)
    result.flags.writeable = False
    return result
