"""Cases of conformance for products of matrices by warps: tests/helpers/conformance.py says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from conformance import TENSOR_CORES, THREADS, Array, Case, blocks_of, equal


def _rows_to_load() -> Array:
    """Any 16 bytes, and whose of the block a lane's row is."""
    given = blocks_of(5, 4)
    rng = np.random.default_rng(1)
    given[:, 4] = np.concatenate([rng.permutation(THREADS) for _ in range(4)])
    return given


def _loaded(transposed: bool) -> Callable[[Array], Array]:
    def load(given: Array) -> Array:
        lanes = np.arange(32)
        made = []
        for block in given.reshape(-1, THREADS, 5):
            rows = block[block[:, 4], :4].reshape(-1, 4, 8, 4)  # warp, matrix, row, word
            halves = np.ascontiguousarray(rows).view(np.uint16)
            if transposed:
                halves = halves.swapaxes(-1, -2)
            words = np.ascontiguousarray(halves).view(np.uint32)
            made.append(words[:, :, lanes // 4, lanes % 4].swapaxes(1, 2).reshape(-1, 4))
        return np.concatenate(made)

    return load


def _load(name: str, transposed: bool, others: str = "") -> Case:
    body = f"""
      for (int k = 0; k < 4; ++k) smem[t].x[k] = in[k];
      __syncthreads();  // the rows, which other threads read
      unsigned int to[4];
      ptx::{name}(to, ptx::shared_address(smem) + 16 * in[4]);
      for (int k = 0; k < 4; ++k) out[k] = to[k];
    """
    return Case(
        f"{name} {others}".strip(), body, _rows_to_load, _loaded(transposed), equal, TENSOR_CORES
    )


def _stored(given: Array) -> Array:
    """Return the rows that lanes stored, where the lane that is given by each thread left them."""
    lanes = np.arange(32)
    made = []
    for block in given.reshape(-1, THREADS, 5):
        words = block[:, :4].reshape(-1, 32, 4)  # warp, lane, matrix
        rows = np.stack([words[:, lanes % 8 * 4 + n, lanes // 8] for n in range(4)], -1)
        placed = np.zeros((THREADS, 4), given.dtype)
        placed[block[:, 4]] = rows.reshape(-1, 4)
        made.append(placed)
    return np.concatenate(made)


_STORE = Case(
    "stmatrix_x4",
    """
      const unsigned int from[4] = {in[0], in[1], in[2], in[3]};
      ptx::stmatrix_x4(ptx::shared_address(smem) + 16 * in[4], from);
      __syncthreads();  // the rows, which other threads wrote
      for (int k = 0; k < 4; ++k) out[k] = smem[t].x[k];
    """,
    _rows_to_load,
    _stored,
    equal,
    (9, 0),
)


def _matrices(given: Array, kind: Any) -> tuple[Array, Array, Array]:
    """Return a, b and c of every warp, in float64, of what its lanes hold."""
    lanes = np.arange(32)
    row, column = lanes // 4, 2 * (lanes % 4)
    words = np.ascontiguousarray(given).reshape(-1, 32, 10)
    pairs = np.ascontiguousarray(words[..., :6]).view(kind).astype(np.float64)
    sums = np.ascontiguousarray(words[..., 6:]).view(np.float32).astype(np.float64)
    a, b, c = (np.zeros((len(words), *shape)) for shape in ((16, 16), (16, 8), (16, 8)))
    for x in range(2):
        for n in range(4):
            a[:, row + 8 * (n % 2), column + 8 * (n // 2) + x] = pairs[..., 2 * n + x]
        for n in range(2):
            b[:, column + 8 * n + x, row] = pairs[..., 8 + 2 * n + x]
            c[:, row + 8 * n, column + x] = sums[..., 2 * n + x]
    return a, b, c


def _of_lanes(c: Array) -> Array:
    """Return what the lanes hold of 16 x 8 results."""
    lanes = np.arange(32)
    row, column = lanes // 4, 2 * (lanes % 4)
    held = [c[:, row + 8 * (n // 2), column + n % 2] for n in range(4)]
    return np.stack(held, -1).reshape(-1, 4)


def _product(name: str, kind: Any, whole: bool) -> Case:
    """Of whole numbers every sum is exact; of others it is rounded in an order that is open."""
    body = f"""
      const unsigned int a[4] = {{in[0], in[1], in[2], in[3]}};
      for (int k = 0; k < 4; ++k) out[k] = __uint_as_float(in[6 + k]);
      ptx::{name}(out[0], out[1], out[2], out[3], a, in[4], in[5]);
    """

    def given() -> Array:
        rng = np.random.default_rng(0)
        lanes = 4 * THREADS
        pairs, sums = rng.standard_normal((lanes, 12)), rng.standard_normal((lanes, 4))
        if whole:
            pairs, sums = np.round(4 * pairs), np.round(100 * sums)
        operands = np.ascontiguousarray(pairs.astype(kind)).view(np.uint32)
        return np.concatenate([operands, sums.astype(np.float32).view(np.uint32)], 1)

    def wanted(given: Array) -> Array:
        a, b, c = _matrices(given, kind)
        return _of_lanes(c + a @ b).astype(np.float32)

    def near(given: Array, one: Array, other: Array) -> Array:
        a, b, c = _matrices(given, kind)
        exact, terms = (_of_lanes(f(c) + f(a) @ f(b)) for f in (np.positive, np.abs))
        # 17 terms, each sum rounded or cut off at the last place of the largest.
        right = [np.abs(x - exact) <= 17 * 2.0**-23 * terms for x in (one, other)]
        return np.logical_and(*right)

    title = f"{name}: {'whole numbers' if whole else 'rounded'}"
    return Case(title, body, given, wanted, equal if whole else near, TENSOR_CORES)


def _lanes_matrices(given: Array, depth: int) -> tuple[Array, Array, Array]:
    """Return a, b and c of every warp, of what its lanes hold of pieces of `depth` of a sum."""
    lanes = np.arange(32)
    row, k, column = lanes // 4, lanes % 4, 2 * (lanes % 4)
    rows = 16 if depth == 8 else 8
    held = np.ascontiguousarray(given).reshape(len(given) // 32, 32, -1).astype(np.float64)
    a, b, c = (np.zeros((len(held), *x)) for x in ((rows, depth), (depth, 8), (rows, 8)))
    of_a, of_b = rows * depth // 32, depth * 8 // 32
    for n in range(of_a):
        a[:, row + 8 * (n % 2), k + 4 * (n // 2)] = held[..., n]
    for n in range(of_b):
        b[:, k + 4 * n, row] = held[..., of_a + n]
    for n in range(rows * 8 // 32):
        c[:, row + 8 * (n // 2), column + n % 2] = held[..., of_a + of_b + n]
    return a, b, c


def _wide_product(name: str, depth: int, kind: Any, whole: bool) -> Case:
    """The same of 4- and 8-byte elements."""
    of_a, of_b, of_c = (4, 2, 4) if depth == 8 else (1, 1, 2)
    narrow = kind == np.float32
    word = "__float_as_uint(in[%d])" if narrow else "in[%d]"
    a = [word % n for n in range(of_a)]
    b = [word % n for n in range(of_a, of_a + of_b)]
    element = "unsigned int" if narrow else "double"
    left = f"const {element} a[{of_a}] = {{{', '.join(a)}}};" if of_a > 1 else ""
    sums = ", ".join(f"out[{n}]" for n in range(of_c))
    body = f"""
      {left}
      for (int k = 0; k < {of_c}; ++k) out[k] = in[{of_a + of_b} + k];
      ptx::{name}({sums}, {"a" if of_a > 1 else a[0]}, {", ".join(b)});
    """

    def given() -> Array:
        drawn = np.random.default_rng(0).standard_normal((4 * THREADS, of_a + of_b + of_c))
        return (np.round(4 * drawn) if whole else drawn).astype(kind)

    def matrices(given: Array) -> tuple[Array, Array, Array]:
        given = given.copy()
        if narrow:  # the last 13 bits of operands are passed over
            given[:, : of_a + of_b] = (
                np.ascontiguousarray(given[:, : of_a + of_b]).view(np.uint32)
                & np.uint32(0xFFFFE000)
            ).view(np.float32)
        return _lanes_matrices(given, depth)

    def held(c: Array) -> Array:
        lanes = np.arange(32)
        row, column = lanes // 4, 2 * (lanes % 4)
        parts = [c[:, row + 8 * (n // 2), column + n % 2] for n in range(of_c)]
        return np.stack(parts, -1).reshape(-1, of_c)

    def wanted(given: Array) -> Array:
        a, b, c = matrices(given)
        return np.asarray(held(c + a @ b).astype(kind))

    def near(given: Array, one: Array, other: Array) -> Array:
        a, b, c = matrices(given)
        exact, terms = (held(f(c) + f(a) @ f(b)) for f in (np.positive, np.abs))
        # float32: each sum cut off at the last place of the largest; float64: rounded.
        unit = 2.0**-23 if narrow else 2.0**-53
        # The exact value is rounded, too.
        right = [np.abs(x - exact) <= 2 * (depth + 1) * unit * terms for x in (one, other)]
        return np.logical_and(*right)

    title = f"{name}: {'whole numbers' if whole else 'rounded'}"
    return Case(title, body, given, wanted, equal if whole else near, TENSOR_CORES)


CASES = [
    _load("ldmatrix_x4", False, "shared_address"),
    _load("ldmatrix_x4_trans", True),
    _STORE,
    _product("mma_m16n8k16_f16", np.float16, True),
    _product("mma_m16n8k16_f16", np.float16, False),
    _product("mma_m16n8k16_bf16", ml_dtypes.bfloat16, True),
    _product("mma_m16n8k16_bf16", ml_dtypes.bfloat16, False),
    *(
        _wide_product(name, depth, kind, whole)
        for name, depth, kind in (
            ("mma_m16n8k8_tf32", 8, np.float32),
            ("mma_m8n8k4_f64", 4, np.float64),
            ("mma_m16n8k8_f64", 8, np.float64),
        )
        for whole in (True, False)
    ),
]
