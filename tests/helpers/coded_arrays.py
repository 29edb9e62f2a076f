"""Queries, keys and values that are codes of float8, for tests, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import codes
import ml_dtypes
import numpy as np
from coded_caches import meaning

FORMATS = ("float8_e4m3fn", "float8_e5m2")
NAN_CODE = 0x7F
# Along which of the last three axes (H, L, D) a scale is shared.
SHARED = {"all": (-3, -2, -1), "head": (-2, -1), "row": (-1,)}


@dataclass(frozen=True)
class Coded:
    """The bytes of q, k and v, and their scales."""

    form: str
    arrays: tuple[Any, ...]
    scales: tuple[Any, ...]

    @classmethod
    def of(cls, form, *numbers, by="row"):
        """Quantise q, k and v; `by` says what shares a scale, of each or of all three."""
        by = (by,) * 3 if isinstance(by, str) else by
        made, scales = [], []
        for x, own in zip(numbers, by, strict=True):
            axes = tuple(axis for axis in SHARED[own] if -axis <= x.ndim)
            scale = np.abs(x).max(axis=axes, keepdims=True) / codes.LARGEST[form]
            scales.append(scale.astype(np.float32))
            made.append(encoded(x / scales[-1], form))
        return cls(form, tuple(made), tuple(scales))

    @property
    def options(self):
        """The keywords of a call."""
        names = ("q_scale", "k_scale", "v_scale")
        return dict(zip(names, self.scales, strict=True)) | {"qkv_dtype": self.form}

    @property
    def numbers(self):
        """Queries, keys and values in float64, exactly."""
        return [meaning(*pair, self.form) for pair in zip(self.arrays, self.scales, strict=True)]

    def with_arrays(self, *arrays):
        return Coded(self.form, arrays, self.scales)


def encoded(x, form):
    """Return the bytes of the codes that are nearest to numbers."""
    largest = codes.LARGEST[form]
    return np.clip(x, -largest, largest).astype(getattr(ml_dtypes, form)).view(np.uint8)


def draw(*shapes, seed=0):
    """Draw rows of different sizes."""
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1)) / 2)).astype(
            np.float32
        )
        for shape in shapes
    ]
