"""The random orthogonal transform as a matrix, and how far kernels may be from its products."""

from __future__ import annotations

from typing import Any

import numpy as np
from rows import DTYPES, Wanted

from cupyflash.arrays.dtypes import accumulator
from cupyflash.problem.hadamard import factor_of, matrix_of
from cupyflash.reference.cpu.philox import philox4x32, split_seed
from cupyflash.testing.precision import Rounding

__all__ = ["DTYPES", "SIZES", "matrix", "transformed"]

Array = np.ndarray[Any, Any]
SIZES = [n for n in range(1, 641) if factor_of(n)]


def matrix(columns: int, seed: int) -> Array:
    """Return the matrix H of out = H x for a row x, times sqrt(D): entries are 1 and -1."""
    factor = factor_of(columns)
    assert factor is not None
    made = matrix_of(factor)
    while len(made) < columns:  # Sylvester's construction, beside the small matrix
        made = np.kron(made, [[1, 1], [1, -1]])
    key, every = split_seed(seed), range(columns)
    drawn = [philox4x32((n // 4, 0, 2**32 - 1, 2**32 - 1), key)[n % 4] for n in every]
    return made * np.where(np.array(drawn) >= 2**31, -1, 1)


def transformed(x: Array, seed: int, inverse: bool) -> Wanted:
    """Return what rows (..., D) become.

    An element is a sum of D terms in as many steps as there are factors of two, and as the small
    matrix has columns, and the product with a rounded 1 / sqrt(D).
    """
    columns = x.shape[-1]
    factor = factor_of(columns)
    assert factor is not None
    held = matrix(columns, seed)
    held = held if inverse else held.T
    unit, output = (Rounding.to(kind) for kind in (accumulator(x.dtype), x.dtype))
    wide, root = x.astype(np.longdouble), np.sqrt(np.longdouble(columns))
    exact = wide @ held.astype(np.longdouble) / root
    magnitude = np.abs(wide).sum(axis=-1, keepdims=True) / root
    steps = np.log2(columns // factor) + factor + 2
    computed = steps * unit.unit * 1.01 * magnitude + (columns + 2) * unit.underflow
    bound = computed + output.unit * (np.abs(exact) + computed) + output.underflow
    bound = np.broadcast_to(bound, x.shape).astype(np.float64)
    return Wanted(x.copy(), exact.astype(np.float64), bound)
