"""What stands for copies in groups and for matrix instructions does what they do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import build
from emulator.machine import FORWARD, REVERSE, randomly
from emulator.probe import Probe

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

EVERY_ORDER = pytest.mark.parametrize("schedule", [FORWARD, REVERSE, randomly(1)])
LANES = np.arange(64)
TYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@EVERY_ORDER
def test_groups_of_copies(schedule):
    body = """
      const int* const from = static_cast<const int*>(p.in);
      const unsigned int place = 16 * (t / 4);
      if (t % 4 == 0) ptx::cp_async_partial(place, from + t, 2 * (t / 4) % 18);
      ptx::cp_async_commit();
      if (t % 4 == 0) ptx::cp_async_partial(256 + place, from + t, 16);
      ptx::cp_async_commit();
      ptx::cp_async_wait<1>();
      __syncthreads();
      const int first = smem[t ^ 5];
      ptx::cp_async_wait<0>();
      __syncthreads();
      static_cast<int*>(p.out)[t] = first;
      static_cast<int*>(p.out)[64 + t] = smem[64 + (t ^ 5)];
    """
    given = np.random.default_rng(0).integers(1, 2**31, 64).astype(np.int32)
    out = np.zeros(128, np.int32)
    probe = Probe(body, elements=128, headers=("ptx/cp_async.cuh",))
    probe.run(out, given, schedule=schedule)
    parts = given.view(np.uint8).reshape(16, 16).copy()
    for row, part in enumerate(parts):
        part[2 * row % 18 :] = 0
    np.testing.assert_array_equal(out[:64], parts.view(np.int32).reshape(64)[LANES ^ 5])
    np.testing.assert_array_equal(out[64:], given[LANES ^ 5])


@EVERY_ORDER
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_from_shared_memory(schedule, transposed):
    # Lane 8 m + r names row r of matrix m: here row (5 lane + 3) % 32 of 32 rows of 8 elements.
    body = """
      for (int n = t; n < 128; n += 64) smem[n] = static_cast<const int*>(p.in)[n];
      __syncthreads();
      unsigned int to[4];
      ptx::%s(to, ptx::shared_address(smem) + (5 * (t %% 32) + 3) %% 32 * 16);
      for (int m = 0; m < 4; ++m) static_cast<unsigned int*>(p.out)[4 * t + m] = to[m];
    """
    name = "ldmatrix_x4_trans" if transposed else "ldmatrix_x4"
    rows = np.random.default_rng(0).integers(0, 2**16, (32, 8)).astype(np.uint16)
    probe = Probe(body % name, elements=128, headers=("ptx/mma.cuh",))
    out = probe.run(np.zeros((64, 4), np.uint32), rows, schedule=schedule)
    matrices = rows[(5 * np.arange(32) + 3) % 32].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    pairs = matrices.reshape(4, 32, 2).astype(np.uint32)
    wanted = (pairs[..., 0] | pairs[..., 1] << 16).T
    np.testing.assert_array_equal(out, np.concatenate([wanted, wanted]))


@EVERY_ORDER
def test_matrices_to_shared_memory(schedule):
    # Lane 8 m + r stores row r of matrix m: here as row (5 lane + 3) % 32 of 32.
    body = """
      const unsigned int* const in = static_cast<const unsigned int*>(p.in) + 4 * t;
      const unsigned int from[4] = {in[0], in[1], in[2], in[3]};
      ptx::stmatrix_x4(ptx::shared_address(smem) + (5 * t + 3) % 32 * 16, from);
      __syncthreads();
      for (int n = t; n < 128; n += 32) static_cast<int*>(p.out)[n] = smem[n];
    """
    given = np.random.default_rng(0).integers(0, 2**32, (32, 4)).astype(np.uint32)
    probe = Probe(body, threads=32, elements=128, headers=("ptx/mma.cuh",))
    out = probe.run(np.zeros((32, 4), np.uint32), given, schedule=schedule)
    rows = given.reshape(8, 4, 4).transpose(2, 0, 1).reshape(32, 4)
    np.testing.assert_array_equal(out[(5 * np.arange(32) + 3) % 32], rows)


def product(a, b, c, name, schedule=FORWARD):
    """Multiply 16 x 16 by 16 x 8 and add 16 x 8, by the lanes of a warp."""
    body = f"""
      const unsigned int* const in = static_cast<const unsigned int*>(p.in) + 10 * t;
      const unsigned int a[4] = {{in[0], in[1], in[2], in[3]}};
      float c[4];
      for (int n = 0; n < 4; ++n) c[n] = __uint_as_float(in[6 + n]);
      ptx::mma_m16n8k16_{name}(c[0], c[1], c[2], c[3], a, in[4], in[5]);
      for (int n = 0; n < 4; ++n) static_cast<float*>(p.out)[4 * t + n] = c[n];
    """
    a, b = (np.asarray(x, TYPES[name]).view(np.uint16) for x in (a, b))
    c = np.asarray(c, np.float32)
    given = np.zeros((32, 10), np.uint32)
    row, column = np.arange(32) // 4, np.arange(32) % 4 * 2
    for n in range(4):
        r, k = row + 8 * (n % 2), column + 8 * (n // 2)
        given[:, n] = a[r, k] | a[r, k + 1].astype(np.uint32) << 16
        given[:, 6 + n] = c[row + 8 * (n // 2), column + n % 2].view(np.uint32)
    for n in range(2):
        k = column + 8 * n
        given[:, 4 + n] = b[k, row] | b[k + 1, row].astype(np.uint32) << 16
    probe = Probe(body, threads=32, headers=("ptx/mma.cuh",))
    found = probe.run(np.zeros((32, 4), np.float32), given, schedule=schedule)
    out = np.zeros((16, 8), np.float32)
    for n in range(4):
        out[row + 8 * (n // 2), column + n % 2] = found[:, n]
    return out


@EVERY_ORDER
@pytest.mark.parametrize("name", TYPES)
def test_products(name, schedule):
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-8, 9, shape) for shape in ((16, 16), (16, 8), (16, 8)))
    np.testing.assert_array_equal(product(a, b, c, name, schedule), a @ b + c)


@pytest.mark.parametrize("name", TYPES)
def test_products_of_any_numbers(name):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(TYPES[name]) for shape in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    found = product(a, b, c, name)
    a, b = a.astype(np.float64), b.astype(np.float64)
    exact, size = a @ b + c, np.abs(a) @ np.abs(b) + np.abs(c)
    assert (np.abs(found - exact) <= 2.0**-22 * size).all()
    # Sums are cut off, not rounded to nearest.
    one = np.zeros((16, 16)), np.zeros((16, 8)), np.full((16, 8), np.float32(1))
    one[0][:, 3], one[1][3] = 2.0**-13, -(2.0**-12)
    assert (product(*one, name) == 1 - 2.0**-24).all()
    one[1][3] = -(2.0**-13)
    assert (product(*one, name) == 1 - 2.0**-24).all()
    one[1][3] = 2.0**-11
    assert (product(*one, name) == 1).all()


@pytest.mark.parametrize("name", TYPES)
def test_products_that_are_not_finite(name):
    a, b, c = np.ones((16, 16)), np.ones((16, 8)), np.zeros((16, 8))
    a[2, 5], b[7, 1], a[9, 7] = np.inf, np.inf, 0
    found = product(a, b, c, name)
    wanted = np.full((16, 8), 16.0)
    wanted[9], wanted[2], wanted[:, 1] = 15, np.inf, np.inf
    wanted[9, 1] = np.nan
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", TYPES)
def test_two_floats_become_a_word(name):
    conversion = {"f16": "floats_to_halves", "bf16": "floats_to_bfloats"}[name]
    body = f"""
      const float* const in = static_cast<const float*>(p.in) + 2 * (64 * blockIdx.x + t);
      static_cast<unsigned int*>(p.out)[64 * blockIdx.x + t] = ptx::{conversion}(in[0], in[1]);
    """
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        x = rng.standard_normal(4096) * 2.0 ** rng.integers(-30, 30, 4096)
        x[:4] = 0, -0.0, np.inf, -np.inf
        x[4:8] = 65519, 65520, 3.4e38, -1e39
        x = x.astype(np.float32)
    found = Probe(body, headers=("ptx/convert.cuh",)).run(np.zeros(2048, np.uint32), x, 32)
    with np.errstate(over="ignore"):
        wanted = x.astype(TYPES[name])
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))
    nan = Probe(body, headers=("ptx/convert.cuh",)).run(
        np.zeros(64, np.uint32), np.full(128, np.nan, np.float32)
    )
    assert np.isnan(nan.view(TYPES[name]).astype(np.float32)).all()


@EVERY_ORDER
def test_lanes_tell_each_other(schedule):
    body = """
      const int other = ptx::shuffle(t * t, (t + 3) % 32);
      const unsigned int bits = ptx::ballot(t % 3 == 0);
      const bool some = ptx::any_lane(t == 40), none = ptx::any_lane(false);
      static_cast<long long*>(p.out)[t] = other + 10000LL * bits * (1 + some) + none;
    """
    found = Probe(body, headers=("ptx/warp.cuh",)).run(np.zeros(64, np.int64), schedule=schedule)
    warps = LANES // 32
    bits = np.array([sum(1 << n for n in range(32) if (32 * w + n) % 3 == 0) for w in warps])
    wanted = (32 * warps + (LANES + 3) % 32) ** 2 + 10000 * bits * (1 + warps)
    np.testing.assert_array_equal(found, wanted)
