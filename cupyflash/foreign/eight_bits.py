"""Numbers of float8: rounded by one rule or another, and those of AMD's types."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..arrays.interop import array
from ..errors import ArgumentError, ArgumentTypeError
from ..hints.install import ML_DTYPES
from ..problem.formats import of_amd

Array = np.ndarray[Any, Any]
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# The types of AMD, and those here whose codes mean twice as much.
_FNUZ = {"float8_e4m3fnuz": "float8_e4m3fn", "float8_e5m2fnuz": "float8_e5m2"}
_BEYOND = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}  # codes from here on are no numbers
_NAN = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}
_NAN_FNUZ = 0x80  # where others have -0


def float8(
    x: Any,
    dtype: Literal["float8_e4m3fn", "float8_e5m2"],
    *,
    overflow: Literal["saturate", "nan"] = "saturate",
) -> Array:
    """Round numbers to float8, as some library does with what is too large.

    Parameters
    ----------
    x : array of floats
        Numbers, without a scale; `quantize` makes codes with one.
    dtype : str
        "float8_e4m3fn" or "float8_e5m2".
    overflow : str
        What numbers beyond the largest one become, infinities too: "saturate", that one, as
        float8_e4m3fn in PyTorch since 2.13; "nan", NaN in float8_e4m3fn and infinities in
        float8_e5m2, as in ml_dtypes and JAX, and float8_e5m2 in PyTorch.

    Returns
    -------
    array of ml_dtypes
        Rounded to nearest, ties to even. NaN stays NaN.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The type or the rule is none of these, or ml_dtypes is not installed.
    """
    if dtype not in _LARGEST:
        raise ArgumentError(
            f"dtype: got {dtype!r}; expected {' or '.join(_LARGEST)}.{of_amd(str(dtype))}"
        )
    if overflow not in ("saturate", "nan"):
        raise ArgumentError(f"overflow: got {overflow!r}; expected 'saturate' or 'nan'.")
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentTypeError(
            f"dtype: {dtype} needs the package ml_dtypes: {ML_DTYPES}."
        ) from None
    x = array(x, "x")
    if overflow == "saturate":
        largest = x.dtype.type(_LARGEST[dtype])
        x = np.clip(x, -largest, largest)  # NaN stays
    with np.errstate(over="ignore", invalid="ignore"):
        made: Array = x.astype(getattr(ml_dtypes, dtype))
    return made


def fnuz(codes: Any, scale: Any, *, inverse: bool = False) -> tuple[Array, Array]:
    """Make codes of the float8 types of AMD into codes that mean the same numbers here.

    float8_e4m3fnuz and float8_e5m2fnuz have another bias: a code means half of what the same bits
    mean in float8_e4m3fn and float8_e5m2. So the bits stay, and the scale is halved. There is no
    -0, whose bits are the only NaN, and there are more finite numbers.

    Parameters
    ----------
    codes : array of float8, of ml_dtypes or of a library that exports DLPack
        Of an fnuz type; with `inverse`, of one of the types here.
    scale : array of floats, or float
        What the codes are multiplied by.
    inverse : bool
        Make codes of the types here into those of AMD; -0 becomes 0.

    Returns
    -------
    codes : array of float8 of ml_dtypes
        Of the other type.
    scale : array of float32
        Half or twice of what it was.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The codes have another type, or numbers that the other type has not: the largest of AMD's
        types, or infinities.
    """
    import ml_dtypes

    codes = array(codes, "codes")
    names = {own: other for other, own in _FNUZ.items()} if inverse else _FNUZ
    if codes.dtype.name not in names:
        raise ArgumentTypeError(
            f"codes: got dtype {codes.dtype}; expected {' or '.join(names)} of ml_dtypes. Bytes "
            f"say their type by .view(ml_dtypes.{next(iter(names))})."
        )
    made = names[codes.dtype.name]
    own = codes.dtype.name if inverse else made
    bits = np.array(codes).view(np.uint8)
    magnitudes = bits & np.uint8(0x7F)
    if inverse:
        nan = np.isnan(codes)
        beyond = (magnitudes >= _BEYOND[own]) & ~nan
    else:
        nan = bits == _NAN_FNUZ
        beyond = magnitudes >= _BEYOND[own]
    if beyond.any():
        number = float(codes[beyond].flat[0])
        raise ArgumentError(
            f"codes: {number:g} of {codes.dtype} is none of {made}, whose scale is twice or half "
            "of it. Take quantize(codes.astype(np.float32) * scale, kind)."
        )
    if inverse:
        bits[magnitudes == 0] = 0
    bits[nan] = _NAN_FNUZ if inverse else _NAN[own]
    factor = np.asarray(scale, np.float32)
    with np.errstate(over="ignore"):
        scaled = factor * np.float32(2.0 if inverse else 0.5)
    if not np.array_equal(scaled / np.float32(2.0 if inverse else 0.5), factor, equal_nan=True):
        raise ArgumentError("scale: its half or double is no float32; expected other scales.")
    return bits.view(getattr(ml_dtypes, made)), scaled
