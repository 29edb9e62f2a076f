"""Products of tiles of 4- and 8-byte elements, on the CPU: every element is where it should be."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import build
from emulator.machine import FORWARD, REVERSE
from emulator.probe import Probe

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

TYPES = {2: np.float32, 3: np.float64}
EACH_TYPE = pytest.mark.parametrize("storage", TYPES)
ROWS, KEYS = 64, 32  # of a tile: rows of 4 or 2 warps, and what passes by

BEFORE = """
constexpr int D = {d}, D_V = {d}, BLOCK_Q = 64, BLOCK_KV = 32, RESIDENT_BLOCKS = 1;
constexpr int NUM_INTS = 1, NUM_FLOATS = 1, NUM_TABLES = 1;
constexpr bool HAS_SCORE = false, HAS_SLOPE = false, HAS_MASK = true, HAS_DROPOUT = false;
constexpr bool PACKED = false, COUNT_TILES = false, ADDS_DQ = false;
"""
HEADERS = ("params.cuh", "primitives/fragment_wide_product.cuh")
# Rows of three arrays are copied to tiles: x of 64 rows and y of 32, D wide, and w of 32 rows, 64
# wide. A block has 4 warps: a warp has 32 rows, and every other one the other lines of a result.
TILES = """
  constexpr int BYTES = fragment::row_bytes(D), W_BYTES = fragment::row_bytes(64);
  char* const x_smem = reinterpret_cast<char*>(smem);
  char* const y_smem = x_smem + 64 * BYTES;
  char* const w_smem = y_smem + 32 * BYTES;
  char* const z_smem = w_smem + 32 * W_BYTES;
  const storage_t* const x = static_cast<const storage_t*>(p.in);
  const storage_t* const y = x + 64 * D;
  fragment::begin_rows<64, D, BYTES>(x_smem, memory::Rows{x, D, 1, false}, 0, 64);
  fragment::begin_rows<32, D, BYTES>(y_smem, memory::Rows{y, D, 1, false}, 0, 32);
  fragment::begin_rows<32, 64, W_BYTES>(w_smem, memory::Rows{y + 32 * D, 64, 1, false}, 0, 32);
  arch::finish_copies();
  __syncthreads();
  storage_t* const out = static_cast<storage_t*>(p.out);
  const int warp_row = t / 64 * 32;
  const fragment_wide_product::Share<D, 2> share(t / 32 % 2);
"""


def run(storage, d, body, x, y, w, out):
    """Run statements on tiles of three arrays."""
    kind = TYPES[storage]
    line = 128 // np.dtype(kind).itemsize
    wide = -(-d // line) * 128
    taken = 96 * wide + 64 * -(-64 // line) * 128
    probe = Probe(TILES + body, "Words", taken // 16, 128, HEADERS, storage, BEFORE.format(d=d))
    given = np.concatenate([np.asarray(each, kind).ravel() for each in (x, y, w)])
    probe.run(out, given, schedule=REVERSE)
    return out


def whole(shape, seed):
    return np.random.default_rng(seed).integers(-9, 10, shape)


SIZES = pytest.mark.parametrize("d", [3, 24, 40, 64])


@EACH_TYPE
@SIZES
def test_rows_times_rows_and_a_tile_of_them(storage, d):
    body = """
      accum_t s[4][4];
      const int warp_key = t / 32 % 2 * 16;
      fragment_wide_product::multiply<D, 2>(s, x_smem + warp_row * BYTES,
                                            y_smem + warp_key * BYTES);
      constexpr int Z_BYTES = fragment::row_bytes(32);
      fragment_wide_product::store_tile<Z_BYTES>(s, warp_row, warp_key / 8, accum_t(2),
                                                 z_smem);
      __syncthreads();
      for (int n = t; n < 64 * 32; n += 128) {
        out[n] = fragment::element_of(z_smem + fragment::place_of<Z_BYTES>(n / 32, n % 32));
      }
    """
    x, y = whole((ROWS, d), 0), whole((KEYS, d), 1)
    out = np.full((ROWS, KEYS), np.nan, TYPES[storage])
    run(storage, d, body, x, y, np.zeros((KEYS, 64)), out)
    np.testing.assert_array_equal(out, 2 * x @ y.T)


APART = """
      fragment_wide_product::add_nonfinite<%s, warp_row, y_smem, share);
      __syncthreads();
      fragment::clear_nonfinite<32, D, BYTES>(y_smem);
      __syncthreads();
"""
WRITE = """
      fragment_wide_product::store_rows<64>(c, share, warp_row, to, 0, 0, 61, accum_t(3), x_smem);
"""
RESULT = """
      Operand to{};
      to.data = static_cast<char*>(p.out);
      to.row = D + 1;
      to.col = 1;
      accum_t c[4][fragment_wide_product::Share<D, 2>::COLUMNS];
      matmul::clear(c);
"""


@EACH_TYPE
@SIZES
@pytest.mark.parametrize("apart", [False, True])
def test_weights_times_rows(storage, d, apart):
    # The tile x is 64 rows of weights where D is 32; otherwise the transposed of w is.
    product = """
      fragment_wide_product::multiply_add_transposed<D, 32, W_BYTES, 2>(c, w_smem, warp_row, y_smem,
                                                                        share);
    """
    if apart:
        product = APART % "D, 32, W_BYTES, true>(c, w_smem, w_smem" + product
    y, w = whole((KEYS, d), 1), whole((KEYS, 64), 2).astype(TYPES[storage])
    if apart:
        w[3] = -0.0
    out = np.full((ROWS, d + 1), -1, TYPES[storage])
    wanted = np.concatenate([3 * w.T @ y, np.full((64, 1), -1)], axis=1)
    wanted[61:] = -1
    given = y.astype(TYPES[storage])
    if apart:
        given[3] = np.inf
    run(
        storage,
        d,
        RESULT + product + "\n__syncthreads();" + WRITE,
        np.zeros((ROWS, d)),
        given,
        w,
        out,
    )
    np.testing.assert_array_equal(out, wanted)


@EACH_TYPE
@pytest.mark.parametrize("apart", [False, True])
def test_rows_of_weights_times_rows(storage, apart):
    product = """
      fragment_wide_product::multiply_add<D, 32, BYTES, 2>(c, x_smem + warp_row * BYTES, y_smem,
                                                           share);
    """
    if apart:
        product = APART % "D, 32, BYTES, false>(c, x_smem, x_smem" + product
    x, y = whole((ROWS, 32), 0), whole((KEYS, 32), 1)
    out = np.full((ROWS, 33), -1, TYPES[storage])
    body = RESULT + product + "\n__syncthreads();" + WRITE
    run(storage, 32, body, x, y, np.zeros((KEYS, 64)), out)
    np.testing.assert_array_equal(out[:61, :32], 3 * (x @ y)[:61])


def test_a_float_is_a_sum_of_two():
    body = """
      const fragment::Split parts = fragment::part(static_cast<const float*>(p.in)[t]);
      static_cast<unsigned int*>(p.out)[2 * t] = parts.large;
      static_cast<unsigned int*>(p.out)[2 * t + 1] = parts.small & 0xffffe000u;
    """
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(128) * 2.0 ** rng.integers(-90, 126, 128)).astype(np.float32)
    x[:4] = 0, -0.0, 2.0**126 * (2 - 2.0**-23), 1 + 2.0**-11
    probe = Probe(body, "Words", 1, 128, HEADERS, 2, BEFORE.format(d=8))
    parts = probe.run(np.zeros((128, 2), np.float32), x, schedule=FORWARD).astype(np.float64)
    assert (np.abs(parts.sum(1) - x) <= 2.0**-23 * np.abs(x)).all()
    assert (np.abs(parts[:, 1]) <= 2.0**-11 * np.abs(x)).all()


def test_powers_of_two_in_float64():
    body = """
      for (int n = t; n < 8192; n += 128) {
        static_cast<double*>(p.out)[n] = power::exp2(static_cast<const double*>(p.in)[n]);
      }
    """
    rng = np.random.default_rng(0)
    near, far = rng.uniform(-2, 2.0**-20, 4096), rng.uniform(-1022, 0, 4000)
    ends = [0.0, -0.0, -0.5, 0.5, -1022.0, -1023.0, -1e9, -np.inf, np.nan, 2.0**-40]
    x = np.concatenate([near, far, ends, np.arange(-86, 0.0)])
    probe = Probe(body, "Words", 1, 128, ("primitives/power.cuh",), 3)
    out = probe.run(np.zeros(8192), x)
    exact = np.exp2(x.astype(np.longdouble))
    normal = x >= -1022
    assert (np.abs(out[normal] / exact[normal] - 1) <= 2.0**-50).all()
    whole = normal & (x == np.round(x))
    np.testing.assert_array_equal(out[whole], exact[whole])
    assert (out[x < -1022] == 0).all()
    assert np.isnan(out[np.isnan(x)]).all()
