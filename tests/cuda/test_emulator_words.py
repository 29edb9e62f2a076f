"""What stands for CUDA's own words does what they do; test_conformance.py is about `ptx/`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import build
from emulator.machine import FORWARD, REVERSE, randomly
from emulator.probe import Probe

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

NUMBER = ("common/params.cuh", "common/number.cuh")
SIZES = "constexpr int NUM_INTS = 1, NUM_FLOATS = 1, NUM_TABLES = 1;\n"

# -- numbers --------------------------------------------------------------------------------------


def apply(expression, x, kind_in, kind_out, **more):
    """Evaluate an expression of x for every element, a thread each."""
    body = f"const long long n = 64LL * blockIdx.x + t;\nconst {kind_in} x = "
    body += f"static_cast<const {kind_in}*>(p.in)[n];\n"
    body += f"static_cast<{kind_out}*>(p.out)[n] = {expression};"
    size = -(-x.size // 64) * 64
    given = np.resize(x, size)
    kinds = {"unsigned short": np.uint16, "float": np.float32, "double": np.float64,
             "unsigned int": np.uint32, "long long": np.int64}  # fmt: skip
    out = np.zeros(size, kinds[kind_out])
    return Probe(body, **more).run(out, given, blocks=size // 64)[: x.size]


def floats(kind, seed=0, count=20_000):
    """Numbers around every edge of a 16-bit type: every one of them, halfway, and next to that."""
    rng = np.random.default_rng(seed)
    edges = np.arange(65536, dtype=np.uint16).view(kind).astype(np.float64)
    edges = np.sort(edges[np.isfinite(edges)])
    ties = (edges[1:] + edges[:-1]) / 2
    near = np.concatenate([edges, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
    special = [np.nan, np.inf, -np.inf, 65504, 65519.99, 65520, 65536, 1e300, 5e-324, 0, -0.0]
    return np.concatenate([special, rng.choice(near, count), rng.standard_normal(1000)])


def same(found, wanted):
    """Assert equal bits, but for the bits of a NaN."""
    nan = np.isnan(wanted.astype(np.float64))
    assert np.isnan(found[nan].astype(np.float64)).all()
    bits = f"u{wanted.itemsize}"
    np.testing.assert_array_equal(found[~nan].view(bits), wanted[~nan].view(bits))


def to_bfloat(x):
    """The nearest bfloat16, the even one of two, of float64 numbers: rounded once."""
    near = x.astype(np.float32).astype(ml_dtypes.bfloat16)  # perhaps the neighbour
    bits = near.view(np.uint16).astype(int)
    candidates = np.stack([bits - 1, bits, bits + 1]).astype(np.uint16)
    values = candidates.view(ml_dtypes.bfloat16).astype(np.float64)
    far = np.abs(values - x)
    even = candidates % 2 == 0
    best = np.where(np.isnan(far), np.inf, far)
    order = np.lexsort((~even, best), axis=0)[0]
    chosen = np.take_along_axis(candidates, order[None], 0)[0].view(ml_dtypes.bfloat16)
    return np.where(np.isfinite(near.astype(np.float64)) & (x != 0), chosen, near)


@pytest.mark.parametrize(("name", "kind"), [("float", np.float32), ("double", np.float64)])
def test_to_bfloat(name, kind):
    with np.errstate(over="ignore", invalid="ignore"):
        x = floats(ml_dtypes.bfloat16)
        x = x[~(np.abs(x) < 2.0**-120)].astype(kind)
        x = x[~(np.abs(x) > 3e38) | ~np.isfinite(x)]
        wanted = to_bfloat(x.astype(np.float64))
        expression = f"number::{name}_to_bfloat(x)"
        found = apply(
            expression, x, name, "unsigned short", headers=NUMBER, storage=3, before=SIZES
        )
        same(found.view(ml_dtypes.bfloat16), wanted)


def test_exp2_is_as_wrong_as_it_may_be():
    x = np.random.default_rng(0).uniform(-126, 127, 50_000).astype(np.float32)
    found = apply("ptx::exp2(x)", x, "float", "float", headers=("ptx/exp2.cuh",))
    error = np.abs(found / np.exp2(x.astype(np.float64)) - 1)
    assert 0.8 * 2.0**-22 < error.max() <= 2.0**-22


def test_reciprocal_is_as_wrong_as_it_may_be():
    x = np.random.default_rng(0).uniform(-4, 4, 50_000).astype(np.float32)
    found = apply("ptx::reciprocal(x)", x, "float", "float", headers=("ptx/reciprocal.cuh",))
    error = np.abs(found * x.astype(np.float64) - 1)
    assert 0.8 * 2.0**-23 < error.max() <= 2.0**-23


def test_tanh_is_within_what_bounds_admit():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-1, 1, 50_000), rng.uniform(-12, 12, 20_000)])
    edges = np.float32([0.65, np.nextafter(np.float32(0.65), np.float32(0)), 1e-20, 88, 1e38])
    x = np.concatenate([x, edges, -edges]).astype(np.float32)
    headers = ("common/params.cuh", "common/expression.cuh")
    found = apply("tanh_of(x)", x, "float", "float", headers=headers, storage=2, before=SIZES)
    true = np.tanh(x.astype(np.float64))
    error = np.abs(found - true) / np.abs(true) * 2.0**24
    assert 3 < error.max() <= 7  # units; FUNCTION_ULPS admit 8
    special = np.float32([0, np.inf, -np.inf, np.nan])
    found = apply("tanh_of(x)", special, "float", "float", headers=headers, storage=2, before=SIZES)
    np.testing.assert_array_equal(found, np.tanh(special))


def test_rounding_toward_zero():
    x = np.concatenate([floats(np.float16), [1e39, -1e39]])
    found = apply("__double2float_rz(x)", x, "double", "float", storage=3)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = x.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(x)
    same(found, np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest))


def test_upper_half_of_a_product():
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**63), 2**63 - 1, 1000)
    found = apply("__mul64hi(x, 0x7123456789abcdefLL)", x, "long long", "long long")
    assert [int(n) * 0x7123456789ABCDEF >> 64 for n in x] == found.tolist()


@pytest.mark.parametrize(("storage", "kept"), [(2, False), (3, True)])
def test_subnormal_numbers_are_flushed_as_the_gpu_does(storage, kept):
    x = np.array([2.0**-126, -(2.0**-126), 2.0**-120], np.float32)
    found = apply("x * 0.25f", x, "float", "float", storage=storage)
    np.testing.assert_array_equal(found, x * np.float32(0.25) if kept else [0, -0.0, 2.0**-122])
    assert np.signbit(found).tolist() == [False, True, False]


# -- threads --------------------------------------------------------------------------------------

EVERY_ORDER = pytest.mark.parametrize("schedule", [FORWARD, REVERSE, randomly(5)], ids=str)
LANES = np.arange(96)


def threads(body, schedule, **more):
    out = np.zeros(96, np.int32)
    return Probe(body, elements=96, threads=96, **more).run(out, schedule=schedule)


@EVERY_ORDER
def test_shuffles(schedule):
    to = "static_cast<int*>(p.out)[t] = "
    found = threads(f"{to} __shfl_xor_sync(0xffffffffu, t * t, 5);", schedule)
    np.testing.assert_array_equal(found, (LANES ^ 5) ** 2)
    found = threads(f"{to} __shfl_sync(0xffffffffu, t * t, t / 2);", schedule)
    np.testing.assert_array_equal(found, (LANES // 32 * 32 + LANES // 2 % 32) ** 2)
    # Two halves of a warp, each with a mask of its own; one after the other is no other matter.
    half = "const unsigned int mask = t % 32 < 16 ? 0xffffu : 0xffff0000u;\n"
    half += "int x = t;\nfor (int n = 1; n < 16; n *= 2) x += __shfl_xor_sync(mask, x, n);\n"
    half += f"{to} x;"
    np.testing.assert_array_equal(threads(half, schedule), LANES.reshape(6, 16).sum(1).repeat(16))


@EVERY_ORDER
def test_votes(schedule):
    body = """
      const unsigned int mask = t % 32 < 8 ? 0xffu : 0xffffff00u;
      const unsigned int some = __ballot_sync(mask, t % 3 == 0);
      const int any = __any_sync(mask, t == 70), all = __all_sync(mask, t % 32 < 8);
      static_cast<int*>(p.out)[t] = static_cast<int>(some) * 4 + any * 2 + all;
    """
    found = threads(body, schedule).astype(np.uint32)
    masks = np.where(LANES % 32 < 8, 0xFF, 0xFFFFFF00)
    ballots = [
        sum(1 << lane for lane in range(32) if mask >> lane & 1 and (t // 32 * 32 + lane) % 3 == 0)
        for t, mask in zip(LANES, masks, strict=True)
    ]
    all_of = LANES % 32 < 8
    any_of = (LANES // 32 == 70 // 32) & all_of
    np.testing.assert_array_equal(found, (np.array(ballots) * 4 + any_of * 2 + all_of) % 2**32)


@EVERY_ORDER
def test_barriers(schedule):
    body = """
      smem[t] = t;
      __syncthreads();
      const int next = smem[(t + 1) % 96];
      const bool some = __syncthreads_or(t == 95), none = __syncthreads_or(0);
      smem[t] = next;
      __syncwarp();
      static_cast<int*>(p.out)[t] = smem[t ^ 1] + 1000 * some + 2000 * none;
    """
    np.testing.assert_array_equal(threads(body, schedule), ((LANES ^ 1) + 1) % 96 + 1000)


def test_schedules_differ_and_seeds_repeat():
    # The order of atomic additions is the order of turns.
    body = """
      unsigned long long* const turn = static_cast<unsigned long long*>(p.in);
      static_cast<int*>(p.out)[96 * blockIdx.x + t] = static_cast<int>(atomicAdd(turn, 1));
    """
    probe = Probe(body, threads=96)

    def order(schedule):
        return probe.run(np.zeros(288, np.int32), np.zeros(1, np.uint64), 3, schedule).tolist()

    assert order(FORWARD) == list(range(288))
    assert order(REVERSE) == list(range(288))[::-1]
    assert order(randomly(1)) == order(randomly(1)) != order(randomly(2))
    assert sorted(order(randomly(1))) == order(FORWARD)


def test_shared_memory_starts_as_nan():
    before = """
      __attribute__((no_sanitize("thread"), noinline)) unsigned long long bits(const double* x) {
        return emulator::same_bits<unsigned long long>(*x);
      }
    """
    body = """
      static_cast<unsigned long long*>(p.out)[64 * blockIdx.x + t] = bits(smem + t);
      smem[t] = 0;  // the next block sees nothing of it
    """
    out = Probe(body, "double", before=before).run(np.zeros(128, np.uint64), blocks=2)
    assert (out == 2**64 - 1).all()
