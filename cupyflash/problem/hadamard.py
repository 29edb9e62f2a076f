"""Calls of `hadamard`: the sizes that there are, their small matrices, and the checks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.device_arrays import is_device_array
from ..arrays.interop import floats, one_home, outputs
from ..errors import ArgumentError, ArgumentTypeError
from . import scalars
from .call import Array

LARGEST = 4096  # columns
# Order of a small matrix -> the prime of its construction.
FACTORS = {12: 11, 20: 19, 28: 13, 36: 17}


@dataclass(frozen=True, eq=False)
class Transform:
    """A checked call of `hadamard`.

    Attributes
    ----------
    x : array
        (..., D).
    seed : int
        The seed of the signs.
    inverse : bool
        Whether the transform is undone.
    power : int
        The power of two in D: the transform is the product of a small matrix and one of this order.
    rows : tuple of int
        The rows of the small matrix: bit n of a word is set if its column n is -1.
    out : array or None
        Where to write the result, or None for a new array.
    device : int or None
        The device of the arrays.
    """

    x: Array
    seed: int
    inverse: bool
    power: int
    rows: tuple[int, ...]
    out: Array | None
    device: int | None


def transform(x: Any, seed: Any, inverse: Any, out: Any) -> Transform:
    """Validate a call of `hadamard`."""
    x = floats(x, "x")
    if not x.ndim:
        raise ArgumentError("x: got shape (); expected (..., D), rows to transform.")
    factor = factor_of(x.shape[-1])
    if factor is None:
        raise ArgumentError(
            f"x: its last axis has length {x.shape[-1]}; expected a power of two, or 12, 20, 28 or "
            f"36 times one, up to {LARGEST}: {_neighbours(x.shape[-1])} Pad rows with zeros."
        )
    if seed is None or is_device_array(seed):
        raise ArgumentTypeError(
            f"seed: got {type(seed).__name__}; expected an integer, 0 to 2**64 - 1. The inverse "
            "needs the same one."
        )
    number = scalars.seed(seed)
    if not isinstance(inverse, (bool, np.bool_)):
        raise ArgumentTypeError(f"inverse: got {inverse!r}; expected True or False.")
    device = one_home({"x": x})
    if out is not None:
        outputs({"out": (out, x.shape, x.dtype)}, {"x": x})
    rows = rows_of(factor, bool(inverse))
    return Transform(x, number, bool(inverse), x.shape[-1] // factor, rows, out, device)


def factor_of(size: int) -> int | None:
    """Return the order of the small matrix for rows of a size; None if the size has none."""
    if not 1 <= size <= LARGEST:
        return None
    odd = size // (size & -size)
    if odd == 1:
        return 1
    return 4 * odd if 4 * odd in FACTORS and size % (4 * odd) == 0 else None


def _neighbours(size: int) -> str:
    """Say in words which sizes are nearest."""
    below = next((n for n in range(min(size, LARGEST), 0, -1) if factor_of(n)), None)
    above = next((n for n in range(max(size, 1), LARGEST + 1) if factor_of(n)), None)
    near = [str(n) for n in (below, above) if n is not None]
    return f"{' and '.join(near)} {'are' if len(near) > 1 else 'is'} nearest."


@functools.cache
def rows_of(order: int, transposed: bool) -> tuple[int, ...]:
    """Return the rows of a small matrix, or of its transpose, as in `Transform`."""
    matrix = matrix_of(order).T if transposed else matrix_of(order)
    return tuple(sum(1 << int(n) for n in np.flatnonzero(row < 0)) for row in matrix)


def matrix_of(order: int) -> Array:
    """Return a Hadamard matrix H by Paley's constructions: H Hᵀ = order I, with entries 1 and -1.

    Both begin with Q, whose entry (i, j) is 1 if i - j is a square modulo the prime q, 0 on the
    diagonal and else -1. With a border it becomes S, which is skew for q = 3 modulo 4, and
    symmetric for q = 1. (R. E. A. C. Paley, "On orthogonal matrices", 1933.)
    """
    if order == 1:
        return np.ones((1, 1), np.int64)
    q = FACTORS[order]
    of = np.full(q, -1)
    of[np.arange(1, q) ** 2 % q] = 1
    of[0] = 0
    s = np.ones((q + 1, q + 1), np.int64)
    s[0, 0] = 0
    s[1:, 1:] = of[(np.arange(q)[:, None] - np.arange(q)) % q]
    identity = np.eye(q + 1, dtype=np.int64)
    if q % 4 == 3:
        s[1:, 0] = -1
        return identity + s
    return np.kron(s, [[1, 1], [1, -1]]) + np.kron(identity, [[1, -1], [-1, -1]])
