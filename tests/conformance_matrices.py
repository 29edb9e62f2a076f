"""What the matrix instructions of kernels_cu/arch/ do: cases as those of conformance.py.

Sums of whole numbers and of infinities are compared bit by bit. Of other numbers nobody tells in
which order a GPU adds them, nor where it cuts off.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from conformance import THREADS, Array, Case, blocks_of, equal_but_for_nan

_ROW, _COLUMN = np.arange(32) // 4, np.arange(32) % 4 * 2
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _loaded(given: Array, transposed: bool) -> Array:
    """Of matrices that rows of 16 bytes make, two neighbours; lane l names row (5 l + 3) % 32."""
    rows = given.view(np.uint16).reshape(-1, 32, 8)[:, (5 * np.arange(32) + 3) % 32]
    matrices = rows.reshape(-1, 4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 4, 32)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, 4)


def _load(name: str, transposed: bool) -> Case:
    body = f"""
      for (int k = 0; k < 4; ++k) smem[t].x[k] = in[k];
      __syncthreads();  // the warp's rows
      const int row = t / 32 * 32 + (5 * (t % 32) + 3) % 32;
      unsigned int to[4];
      arch::{name}(to, arch::shared_address(smem + row));
      for (int k = 0; k < 4; ++k) out[k] = to[k];
    """
    names = name if transposed else f"{name} shared_address"
    return Case(
        names, body, lambda: blocks_of(4, 3), lambda x: _loaded(x, transposed), since=(8, 0)
    )


def _factors(kind: np.dtype[Any], numbers: str) -> Array:
    """Lanes' parts of a and b, each of 16-bit elements, and of c."""
    rng = np.random.default_rng(0)
    shape = (2 * THREADS, 16)
    drawn = {
        "whole": lambda: rng.integers(-8, 9, shape),
        "any": lambda: rng.standard_normal(shape),
        "infinite": lambda: rng.choice(
            [0, 1, -1, np.inf, np.nan], shape, p=[0.2, 0.4, 0.37, 0.02, 0.01]
        ),
    }[numbers]()
    given = np.empty((len(drawn), 10), np.uint32)
    given[:, :6] = np.ascontiguousarray(drawn[:, :12].astype(kind)).view(np.uint32)
    given[:, 6:] = drawn[:, 12:].astype(np.float32).view(np.uint32)
    return given


def _products(given: Array, kind: np.dtype[Any]) -> tuple[Array, Array]:
    """a b + c of every warp, and the sum of its terms' sizes, as lanes hold them."""
    lanes = given.reshape(-1, 32, 10)
    halves = np.ascontiguousarray(lanes[..., :6]).view(kind).astype(np.float64)
    c = np.ascontiguousarray(lanes[..., 6:]).view(np.float32).astype(np.float64)
    a, b = np.empty((len(lanes), 16, 16)), np.empty((len(lanes), 16, 8))
    for n in range(12):
        half, word = n % 2, n // 2
        if word < 4:
            a[:, _ROW + word % 2 * 8, _COLUMN + word // 2 * 8 + half] = halves[..., n]
        else:
            b[:, _COLUMN + word % 4 * 8 + half, _ROW] = halves[..., n]
    with np.errstate(invalid="ignore"):  # of infinities
        exact, size = a @ b, np.abs(a) @ np.abs(b)
        places = [(_ROW + n // 2 * 8, _COLUMN + n % 2) for n in range(4)]
        exact, size = (np.stack([x[:, i, j] for i, j in places], -1) for x in (exact, size))
        return (exact + c).reshape(-1, 4), (size + np.abs(c)).reshape(-1, 4)


def _product(name: str, kind: np.dtype[Any], numbers: str) -> Case:
    body = f"""
      const unsigned int a[4] = {{in[0], in[1], in[2], in[3]}};
      for (int n = 0; n < 4; ++n) out[n] = __uint_as_float(in[6 + n]);
      arch::{name}(out[0], out[1], out[2], out[3], a, in[4], in[5]);
    """

    def near(given: Array, one: Array, other: Array) -> Array:
        exact, size = _products(given, kind)
        return (np.abs(one - exact) <= 2.0**-20 * size) & (np.abs(other - exact) <= 2.0**-20 * size)

    return Case(
        f"{name}: {numbers} numbers",
        body,
        lambda: _factors(kind, numbers),
        lambda x: _products(x, kind)[0].astype(np.float32),
        near if numbers == "any" else equal_but_for_nan(np.float32),
        since=(8, 0),
    )


MATRICES = [
    _load("ldmatrix_x4", False),
    _load("ldmatrix_x4_trans", True),
    *(
        _product(name, kind, numbers)
        for name, kind in (
            ("mma_m16n8k16_f16", np.dtype(np.float16)),
            ("mma_m16n8k16_bf16", _BFLOAT16),
        )
        for numbers in ("whole", "any", "infinite")
    ),
]
