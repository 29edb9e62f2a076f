"""Codes of 8 and 4 bits by NumPy and ml_dtypes, and what codes mean."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyflash.arrays.dtypes import accumulator

Array = np.ndarray[Any, Any]
DTYPES = [np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344, "int4": 7}
LEAST = 2.0**-126
NAN = 0x7F


def grouped(x: Array, form: str, group: int | None) -> Array:
    """Return rows (..., D) as (..., groups, columns), in the accumulator's type."""
    columns = 32 if form == "int4" and group is None else group
    wide = np.array(x, accumulator(x.dtype))
    if columns is None:
        return wide[..., None, :]
    return wide.reshape(*x.shape[:-1], x.shape[-1] // columns, columns)


PER = "row", "head", "tensor"


def sharing_axes(axes: int, per: str) -> tuple[int, ...]:
    """Return the axes of an array along which codes have one scale, besides its last one."""
    return {"row": (), "head": (axes - 2,) if axes > 1 else (), "tensor": (*range(axes - 1),)}[per]


@np.errstate(all="ignore")
def quantized(
    x: Array, form: str, group: int | None = None, per: str = "row"
) -> tuple[Array, Array]:
    """Return the bytes of codes (..., D), or (..., D / 2), and the scales."""
    if per == "row":
        wide = grouped(x, form, group)
    else:
        wide = np.array(x, accumulator(x.dtype))[..., None, :]
    number = wide.dtype.type
    largest = np.max(np.abs(wide), axis=-1, initial=0)
    largest = np.max(largest, axis=sharing_axes(x.ndim, per), initial=0, keepdims=True)
    scale = np.maximum(largest / number(LARGEST[form]), number(LEAST))
    scale = np.asarray(scale, np.float32)
    scale[np.isnan(scale)] = np.nan  # with the bits that NumPy gives it
    multiple = wide * (number(1) / scale.astype(number))[..., None]
    infinite = np.isinf(wide) & ~np.isnan(scale)[..., None]
    multiple = np.where(infinite, np.copysign(number(LARGEST[form]), wide), multiple)
    if form.startswith("float8"):
        codes = multiple.astype(getattr(ml_dtypes, form)).view(np.uint8)
        codes = np.where(np.isnan(multiple), np.uint8(NAN), codes)
    else:
        codes = np.rint(np.where(np.isnan(multiple), 0, multiple)).astype(np.int8).view(np.uint8)
    codes = codes.reshape(x.shape)
    if form == "int4":
        codes = (codes[..., ::2] & 15) | (codes[..., 1::2] << 4)
    return codes, scale


def meaning(codes: Array, form: str) -> Array:
    """Return the numbers (..., D) that codes stand for, without their scale, in float64."""
    held = codes.view(np.uint8)
    if form == "int8":
        return held.view(np.int8).astype(np.float64)
    if form == "int4":
        halves = np.stack([held & 15, held >> 4], axis=-1).reshape(*held.shape[:-1], -1)
        return (halves.astype(np.float64) + 8) % 16 - 8
    return held.view(getattr(ml_dtypes, form)).astype(np.float64)


def half_step(multiple: Array, form: str) -> Array:
    """Return half the distance of the codes on either side of numbers."""
    if not form.startswith("float8"):
        return np.full(multiple.shape, 0.5)
    fraction, least = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}[form]
    exponent = np.frexp(np.abs(multiple))[1] - 1
    return 2.0 ** (np.maximum(exponent, least) - fraction - 1)


@np.errstate(all="ignore")
def any_numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw numbers of one kind: common ones, of all magnitudes, tiny ones, or any bits."""
    dtype = np.dtype(dtype)
    kind = rng.integers(5)
    if kind == 0:
        return rng.standard_normal(shape).astype(dtype)
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape, np.uint64)
    values = bits.astype(f"u{dtype.itemsize}").view(dtype)
    if kind == 1:
        return np.where(np.isfinite(values), values, 0).astype(dtype)
    if kind == 2:  # float32's and bfloat16's subnormal numbers, and somewhat larger ones
        return (rng.standard_normal(shape) * 2.0 ** rng.integers(-150, -100)).astype(dtype)
    if kind == 3:
        return np.zeros(shape, dtype)
    return values
