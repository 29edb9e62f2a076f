"""Sums of magnitudes with their errors: the steps of which a rounding-error bound is made."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .precision import Precision, Rounding

Floats = NDArray[np.float64]


class Terms(NamedTuple):
    """A sum whose terms carry errors, before or after it is reduced over shared axes.

    Parameters
    ----------
    exact : ndarray
        The exact sum.
    errors : ndarray
        Sum of the terms' error bounds.
    magnitude : ndarray
        Sum of the computed terms' magnitudes, at most.
    number : ndarray
        How many terms; broadcasts to the others.
    """

    exact: Any
    errors: Floats
    magnitude: Floats
    number: Floats


def magnitude(x: Any) -> Floats:
    """Return absolute values in float64."""
    return np.abs(np.asarray(x, np.float64))


def exponent(error: Any) -> Floats:
    """Turn a relative error into the exponent ``-log(1 - x)``; infinite from 1 on."""
    x = np.asarray(error, np.float64)
    return np.where(x < 1, -np.log1p(-np.minimum(x, 1)), np.inf)


def growth(probs: Floats, gap: Floats, a: Floats) -> Floats:
    """Return ``P (exp(a) - 1)``, at most, for ``P = exp(gap)`` that may have underflowed."""
    result = np.where(a < 1, probs * np.expm1(np.minimum(a, 1)), np.exp(gap + a))
    return np.where(gap == -np.inf, 0.0, result)


def matmul(a: Floats, b: Floats) -> Floats:
    """Multiply matrices of bounds with ``0 * inf = 0``; NaN counts as infinite."""
    finite_a, finite_b = np.isfinite(a), np.isfinite(b)
    result: Floats = np.where(finite_a, a, 0) @ np.where(finite_b, b, 0)
    if not (finite_a.all() and finite_b.all()):
        hits = (~finite_a).astype(float) @ (b != 0) + (a != 0).astype(float) @ ~finite_b
        result = np.where(hits > 0, np.inf, result)
    return result


def times(a: Floats, b: Floats | float) -> Floats:
    """Multiply bounds elementwise with ``0 * inf = 0``."""
    return np.where((a == 0) | (b == 0), 0.0, a * b)


def held(error: Floats, size: Floats, limit: float) -> Floats:
    """Return the error of a sum of magnitudes `size`; infinite from the limit on."""
    return np.where(size < limit, error, np.inf)


def stored(error: Floats, exact: Any, rounding: Rounding) -> Floats:
    """Add the rounding of the result; infinite where the stored number may overflow."""
    size = magnitude(exact)
    bound = (1 + rounding.unit) * error + rounding.unit * size + rounding.underflow
    return np.where(size + bound < rounding.largest, bound, np.inf)


def kept(error: Floats, size: Floats, rounding: Rounding) -> Floats:
    """Add the rounding of scores that are kept in a type; infinite where they may overflow."""
    error = error + rounding.unit * (size + error) + rounding.underflow
    return np.where(size + error < rounding.largest, error, np.inf)


def total(terms: Terms, extra: int, precision: Precision, rounding: Rounding) -> Floats:
    """Bound a stored sum: its terms' errors, `extra` + count roundings, the output's rounding."""
    summation = times(precision.gamma(terms.number + extra), terms.magnitude)
    return stored(terms.errors + summation, terms.exact, rounding)
