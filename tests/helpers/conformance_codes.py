"""Cases of conformance for codes of 8 bits: conversions, and products of warpgroups."""

from __future__ import annotations

from typing import Any

import conformance_warpgroups as warpgroups
import ml_dtypes
import numpy as np
from conformance import HOPPER, THREADS, Array, Case, equal

from cupyflash.testing.precision import CODE_TERMS, CODE_UNIT

TYPES: dict[str, Any] = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
E4M3 = TYPES["e4m3"]
ADA = (8, 9)
DEPTH = 32


def _around_codes() -> Array:
    """Numbers of every code, and halfway to the next one, and beside that."""
    codes = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    halves = (codes[1:] + codes[:-1]) / 2
    beside = [np.nextafter(halves, np.float32(to)) for to in (0, np.inf)]
    found = np.concatenate([codes, halves, *beside, [464, 480, 1e9, 1e-9, np.inf, np.nan]])
    found = np.concatenate([found, -found]).astype(np.float32)
    return np.stack([found, np.roll(found, 1)], 1)


def _codes_of(given: Array) -> Array:
    nearest = np.clip(given, -448, 448).astype(E4M3).view(np.uint8)
    nearest = np.where(np.isnan(given), np.uint8(0x7F), nearest).astype(np.uint16)
    return nearest[:, :1] | nearest[:, 1:] << 8


def _alike(given: Array, one: Array, other: Array) -> Array:
    """Bits are the same, but for the sign of NaN."""
    nan = np.isnan(given).astype(np.uint16)
    open_bits = nan[:, :1] * 0x80 + nan[:, 1:] * 0x8000
    return (one | open_bits) == (other | open_bits)


def _selected(given: Array) -> Array:
    pairs = np.ascontiguousarray(given[:, :2]).view(np.uint8)
    digits = [given[:, 2] >> 4 * n for n in range(4)]
    picked = np.stack([pairs[np.arange(len(pairs)), x & 7] for x in digits], 1)
    signs = np.where(picked >= 0x80, np.uint8(0xFF), np.uint8(0))
    picked = np.where(np.stack(digits, 1) & 8, signs, picked)
    return np.ascontiguousarray(picked).view(np.uint32)


def _any_selectors() -> Array:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2 * THREADS, 3), np.uint32)
    words[:, 2] &= 0xFFFF
    return words


def _operands(given: Array, columns: int, left: Any, right: Any, form: str) -> tuple[Array, ...]:
    """Return a (64 x 32), b (32 x columns) and d of every block, in float64."""
    blocks = given.reshape(-1, THREADS, given.shape[1])
    n, depth = len(blocks), 4 + columns // 16
    codes = np.ascontiguousarray(blocks[..., :4]).view(left).astype(np.float64)
    a = np.zeros((n, 64, DEPTH))
    if form == "rs":
        for x in range(16):
            column = warpgroups.LANES % 4 * 4 + x // 8 * 16 + x % 4
            a[:, warpgroups.LANE_ROWS + x // 4 % 2 * 8, column] = codes[..., x]
    else:
        a = codes.reshape(n, 64, DEPTH)
    b = np.ascontiguousarray(blocks[..., 4:depth]).view(right).astype(np.float64)
    sums = np.ascontiguousarray(blocks[..., depth:]).view(np.float32).astype(np.float64)
    d = np.zeros((n, 64, columns))
    for x in range(columns // 2):
        r, column = x // (columns // 4), x % (columns // 4)
        place = column // 2 * 8 + warpgroups.LANE_COLUMNS + column % 2
        d[:, warpgroups.LANE_ROWS + 8 * r, place] = sums[..., x]
    return a, b.reshape(n, columns, DEPTH).swapaxes(1, 2), d


def product(form: str, name: str, columns: int, whole: bool) -> Case:
    """Return the case of one width: of small whole numbers every sum is exact."""
    right = TYPES[name]
    left = E4M3 if form == "rs" else right
    operands = (
        "const unsigned int a[4] = {in[0], in[1], in[2], in[3]};\n"
        "const unsigned long long b = 1ull << 62 | 64ull << 32 | (begin + 8192 + 64) / 16;\n"
        if form == "rs"
        else warpgroups.DESCRIBED["ss"]
    )
    body = (
        warpgroups.ALIGNED
        + f"constexpr int COLUMNS = {columns};  // {'whole' if whole else 'any'} numbers\n"
        + ("" if form == "rs" else warpgroups.LEFT["ss"])
        + f"""
      for (int k = 0; k < COLUMNS / 16; ++k) {{
        const int n = t * (COLUMNS / 16) + k;
        {warpgroups.RIGHT[False]}
        words[2048 + at / 4] = in[4 + k];
      }}
      float d[2][COLUMNS / 4];
      for (int x = 0; x < COLUMNS / 2; ++x) {{
        d[x / (COLUMNS / 4)][x % (COLUMNS / 4)] = __uint_as_float(in[4 + COLUMNS / 16 + x]);
      }}
      ptx::fence_proxy_async();
      __syncthreads();  // the operands
      ptx::wgmma_fence();
      {operands}
      ptx::wgmma_{form}_{name}(d, a, b, blockIdx.x % 2 == 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(d);
      for (int x = 0; x < COLUMNS / 2; ++x) out[x] = d[x / (COLUMNS / 4)][x % (COLUMNS / 4)];
    """
    )

    def given() -> Array:
        rng = np.random.default_rng(columns)
        lanes, codes = 4 * THREADS, 4 * (4 + columns // 16)
        numbers = rng.standard_normal((lanes, codes))
        sums = rng.standard_normal((lanes, columns // 2))
        if whole:
            numbers, sums = np.clip(np.round(2 * numbers), -4, 4), np.round(100 * sums)
            # Two products only, in the first block.
            numbers[:THREADS], sums[:THREADS] = 0, 0
            numbers[13, 1], numbers[21, 17], numbers[40, 6], numbers[99, 18] = 3, 2, 4, 1
        words = [
            np.ascontiguousarray(part.astype(kind)).view(np.uint32)
            for part, kind in ((numbers[:, :16], left), (numbers[:, 16:], right))
        ]
        return np.concatenate([*words, sums.astype(np.float32).view(np.uint32)], 1)

    def exact(given: Array, of: Any) -> Array:
        a, b, d = (of(x) for x in _operands(given, columns, left, right, form))
        d[1::2] = 0  # not added
        return warpgroups.of_lanes(d + a @ b)

    def wanted(given: Array) -> Array:
        return exact(given, np.positive).astype(np.float32)

    def near(given: Array, one: Array, other: Array) -> Array:
        true, terms = exact(given, np.positive), exact(given, np.abs)
        with np.errstate(invalid="ignore"):  # infinities differ
            right = [np.abs(x - true) <= (CODE_TERMS + 1) * CODE_UNIT * terms for x in (one, other)]
        return np.logical_and(*right)

    return Case(
        f"wgmma_{form}_{name}: {columns} columns, {'whole numbers' if whole else 'rounded'}",
        body,
        given,
        wanted,
        equal if whole else near,
        since=HOPPER,
        only=HOPPER,
        shared=(1024 + 8192 + 256 * 128) // 16,
    )


WIDTHS = {"ss": (128,), "rs": (64, 128)}
PRODUCTS = [
    product(form, name, columns, whole)
    for form, widths in WIDTHS.items()
    for name in TYPES
    for columns in widths
    for whole in (True, False)
]
CASES = [
    Case(
        "floats_to_e4m3",
        "out[0] = ptx::floats_to_e4m3(in[0], in[1]);",
        _around_codes,
        _codes_of,
        _alike,
        since=ADA,
    ),
    Case(
        "select_bytes",
        "out[0] = ptx::select_bytes(in[0], in[1], in[2]);",
        _any_selectors,
        _selected,
    ),
    *PRODUCTS,
]
