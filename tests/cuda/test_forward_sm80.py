"""The forward by tensor cores, on the CPU: what is particular to it, and when it is chosen."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, capability
from emulator import build
from emulator.blocks import Blocks, Chosen
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough
from harness import attend
from placement import same_bits

from cupyflash import ArgumentError, masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry, sm80
from cupyflash.gpu.kernels.spec import REGISTERS, Request
from cupyflash.problem import validate
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import philox
from cupyflash.testing import Precision, forward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
F32 = np.dtype(np.float32)  # by three products
NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
TYPES = [*NARROW, F32, np.dtype(np.float64)]
BLOCKS = Blocks(32, 16, 64)
EACH_TYPE = mostly_thorough(
    "dtype", TYPES, quick=TYPES[1:], why="float16 differs from bfloat16 in its conversions", ids=str
)


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def precision_of(dtype):
    return "tf32x3" if dtype == F32 else None


def run(q, k, v, blocks=BLOCKS, schedule=REVERSE, **options):
    """Compute out and lse on the emulator, into memory that holds NaN."""
    call = validate.call(q, k, v, Options(precision=precision_of(q.dtype), **options))
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    lse = np.full(q.shape[:-1], np.nan, call.problem.accumulator)
    visited = np.zeros(1, np.uint64)
    Emulator(blocks, schedule).forward(call, out, lse, visited)
    return out, lse, int(visited[0])


def within_the_bound(q, k, v, out, lse, block_kv=16, **options):
    precision = Precision.of(q.dtype, True, precision_of(q.dtype))
    bound = forward_bound(q, k, v, precision=precision, block_kv=block_kv, **options)
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1


# -- numbers --------------------------------------------------------------------------------------


@emulated
@EACH_TYPE
@mostly_thorough(
    "options",
    [{}, {"mask": masks.causal(40)}],
    quick=lambda options: not options,
    why="a mask hides nothing here",
    ids=["plain", "masked"],
)
def test_logits_of_any_size(dtype, options):
    # s c - m c with a rounded m c would be off by thousands: the maximum's own weight is not 1.
    size = 60000 if dtype == np.float16 else 133120
    q, k = np.full((1, 40, 64), size, dtype), np.full((1, 33, 64), size, dtype)
    (v,) = draw(dtype, (1, 33, 24))
    out, lse, _ = run(q, k, v, **options)
    mean = v.astype(np.float64).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out.astype(np.float64), np.broadcast_to(mean, out.shape), atol=0.01)
    exact = 64 / 8 * float(dtype.type(size)) ** 2 + np.log(33)
    np.testing.assert_allclose(lse, exact, rtol=1e-6)


@emulated
@EACH_TYPE
def test_a_large_row_changes_no_bit_of_its_neighbours(dtype):
    q, k, v = draw(dtype, (1, 32, 16), (1, 33, 16), (1, 33, 16))
    plain, lse, _ = run(q, k, v, scale=1e3)
    q[0, 5] *= 1000
    other, other_lse, _ = run(q, k, v, scale=1e3)
    rest = np.arange(32) != 5
    assert same_bits(plain[:, rest], other[:, rest])
    assert same_bits(lse[:, rest], other_lse[:, rest])


@emulated
@EACH_TYPE
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-300, -2.0, 3e38])
@mostly_thorough(
    "options",
    [{}, {"mask": masks.causal()}, {"score_mod": scores.softcap(2.0)}],
    quick=lambda options: not options,
    why="a mask leaves the scale where it is; a changed score is quick with the usual one",
)
def test_every_finite_scale(dtype, scale, options):
    q, k, v = draw(dtype, (2, 40, 24), (1, 53, 24), (1, 53, 16))
    if scale > 1e30:
        q[:] = 0
    sink = np.array([0.5, -np.inf], np.float32)
    out, lse, _ = run(q, k, v, scale=scale, sink=sink, **options)
    within_the_bound(q, k, v, out, lse, scale=scale, sink=sink, **options)


@emulated
@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}], ids=["plain", "masked"])
def test_numbers_that_are_too_large_to_be_split(options):
    # They would round to infinity, and their products are NaN.
    q, k, v = draw(F32, (1, 40, 24), (1, 40, 24), (1, 40, 24))
    largest = np.finfo(np.float32).max
    plain, _, _ = run(q, k, v, scale=1e-3, **options)
    v[0, 20, 3], k[0, 21], q[0, 22] = -largest, 0, 0
    k[0, 21, 5], q[0, 22, 6] = largest, 2.0**127
    other, other_lse, _ = run(q * np.float32(2.0**-30), k, v, scale=1e-30, **options)
    assert np.isfinite(other_lse).all()
    within_the_bound(q * np.float32(2.0**-30), k, v, other, other_lse, scale=1e-30, **options)
    if options:  # rows before see none of them
        assert np.abs(other[0, :20]).max() < 5
    assert np.isfinite(plain).all()


# -- keys that take no part -----------------------------------------------------------------------


@emulated
@EACH_TYPE
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@mostly_thorough(
    "options",
    [{}, {"score_mod": scores.softcap(9.0)}],
    quick=[{}],
    why="a score change has nothing to do with values",
    ids=["plain", "score"],
)
def test_a_value_reaches_only_the_rows_that_see_it(dtype, value, options):
    q, k, v = draw(dtype, (1, 40, 24), (1, 40, 24), (1, 40, 24))
    options = {"mask": masks.causal(), **options}
    plain, lse, _ = run(q, k, v, **options)
    v[0, 20, 3] = value
    other, other_lse, _ = run(q, k, v, **options)
    assert same_bits(lse, other_lse)
    elsewhere = np.ones(plain.shape, bool)
    elsewhere[0, 20:, 3] = False
    assert same_bits(plain[elsewhere], other[elsewhere])
    seen = other[0, 20:, 3].astype(np.float32)
    assert (np.isnan(seen) if np.isnan(value) else seen == value).all()


@emulated
@EACH_TYPE
def test_a_key_reaches_only_the_rows_that_see_it(dtype):
    q, k, v = draw(dtype, (1, 40, 24), (1, 40, 24), (1, 40, 24))
    plain, lse, _ = run(q, k, v, mask=masks.causal())
    k[0, 20, 3] = np.nan
    other, other_lse, _ = run(q, k, v, mask=masks.causal())
    assert same_bits(plain[:, :20], other[:, :20])
    assert same_bits(lse[:, :20], other_lse[:, :20])
    assert np.isnan(other[:, 20:].astype(np.float32)).all()


# -- tiles ----------------------------------------------------------------------------------------


@emulated
@mostly_thorough(
    "option",
    [
        {},
        {"mask": masks.causal()},
        {"mask": masks.window(9, 3)},
        {"mask": masks.lengths(np.array([20, 0]))},
    ],
    quick=lambda option: str(option) == str({"mask": masks.window(9, 3)}),
    why="a window has tiles of every class",
)
def test_as_many_tiles_are_visited_as_by_the_twin(option):
    arrays = draw(TYPES[0], (2, 1, 700, 8), (2, 1, 700, 8), (2, 1, 700, 8))
    *_, visited = run(*arrays, **option)
    assert visited == attend(*arrays, tiles=(32, 16), **option).visited


FAR = {
    "documents": masks.segments(np.arange(1700) // 450),
    "a window": masks.window(200, 0, 1660),
    "the last keys": masks.mask(lambda b, h, i, j: j >= 1690),
    "both ends": masks.mask(lambda b, h, i, j: (j < 3) | (j > 1040 + i)),
    "every key": masks.causal(1700),
    "no key": masks.mask(lambda b, h, i, j: j < 0),
}


@emulated
@mostly_thorough("name", FAR, quick=("both ends",), why="more masks of the same classes")
def test_more_tiles_than_are_classified_at_once(name):
    # One warp: 32 tiles of 16 keys at a time.
    (q,) = draw(TYPES[0], (1, 40, 8))
    k, v = draw(TYPES[0], (1, 1700, 8), (1, 1700, 8), seed=1)
    if name == "documents":
        q = np.resize(q, (1, 1700, 8))
    out, lse, visited = run(q, k, v, Blocks(16, 16, 32), mask=FAR[name])
    within_the_bound(q, k, v, out, lse, mask=FAR[name])
    assert visited == attend(q, k, v, tiles=(16, 16), mask=FAR[name]).visited


@emulated
@pytest.mark.thorough("equal words are quick in the tests of Philox")
@EACH_TYPE
def test_dropped_pairs_are_those_of_the_twin(dtype):
    size, seed, p = 40, 2**63 + 12345, 0.37
    q = np.zeros((2, 3, size, 8), dtype)
    v = np.broadcast_to(np.eye(size, dtype=dtype), (2, 3, size, size))
    kept = philox.keep(
        seed, p, np.arange(6).reshape(2, 3, 1, 1), np.arange(size)[:, None], np.arange(size)
    )
    for blocks in (Blocks(32, 16, 64), Blocks(64, 32, 64), Blocks(16, 48, 32)):
        out, *_ = run(q, q, v, blocks, randomly(1), dropout=p, seed=seed)
        np.testing.assert_array_equal(out != 0, kept)


@emulated
@mostly_thorough(
    "dtype", TYPES, quick=TYPES[1:2], why="other tiles of types with quick tests", ids=str
)
@mostly_thorough("arch", ["sm_80", "sm_86"], quick=("sm_86",), why="tiles of larger memory")
@mostly_thorough(
    "sizes",
    [(64, 64), (128, 128), (256, 256), (1, 200), (96, 40)],
    quick=[(128, 128)],
    why="heads that are used less",
    ids=str,
)
def test_the_tiles_that_gpus_get(dtype, arch, sizes):
    d, d_v = sizes
    most = sm80.FORWARD.heads[np.dtype(dtype).name]
    d, d_v = min(d, most), min(d_v, most)
    q, k, v = draw(dtype, (2, 135, d), (1, 150, d), (1, 150, d_v))
    chosen = Chosen(shared_memory=SHARED_MEMORY[arch])
    out, lse, _ = run(q, k, v, chosen, randomly(1), mask=masks.causal())
    within_the_bound(q, k, v, out, lse, 32, mask=masks.causal())


# -- when it is chosen ----------------------------------------------------------------------------


def call_of(dtype, d, d_v, **options):
    q, v = np.zeros((1, d), dtype), np.zeros((1, d_v), dtype)
    return validate.call(q, q, v, Options(**options))


def problem_of(dtype, d, d_v):
    return call_of(dtype, d, d_v).problem


def target_of(arch):
    return Target(0, arch, capability(arch), 1, SHARED_MEMORY[arch])


@pytest.mark.parametrize(
    ("arch", "dtype", "d", "d_v", "words"),
    [
        ("sm_80", np.float16, 256, 1, "tensor cores"),
        ("sm_120", ml_dtypes.bfloat16, 3, 256, "tensor cores"),
        (
            "sm_75",
            np.float16,
            64,
            64,
            "forward_sm80, because it needs compute capability 8.0",
        ),
        ("sm_90", np.float16, 64, 257, "tensor cores"),
        ("sm_90", np.float32, 64, 64, "portable kernel in float32"),
        ("sm_86", np.float64, 128, 1, "float64 by tensor cores, and sums in float64"),
        (
            "sm_75",
            np.float64,
            64,
            64,
            "forward_sm80, because it needs compute capability 8.0",
        ),
        (
            "sm_90",
            np.float64,
            64,
            129,
            "head sizes 64 and 129 are beyond its 128 in float64",
        ),
    ],
)
def test_the_plan_says_why(arch, dtype, d, d_v, words):
    plan = route.of(call_of(dtype, d, d_v), target_of(arch)).plan
    assert plan.kernel == ("forward_sm80" if "tensor cores" in words else "forward_simt")
    assert words in plan.reason


def test_a_precision_is_asked_for():
    call = call_of(F32, 256, 1, precision="tf32x3")
    plan = route.of(call, target_of("sm_80")).plan
    assert plan.kernel == "forward_sm80"
    assert "as three products each" in plan.reason
    # The gradients' kernels for tensor cores do not have it: they compute in float32.
    for part in ("dkdv", "dq"):
        choice = registry.select(part, Request(call.problem, target_of("sm_80")))
        assert choice.spec.name == f"backward_simt_{part}"


@pytest.mark.parametrize(
    ("arch", "d", "words"),
    [("sm_75", 64, "7.5; expected 8.0 or newer. Leave"), ("sm_90", 257, "at most 256. Leave")],
)
def test_a_precision_that_cannot_be_had_is_an_error(arch, d, words):
    split = dataclasses.replace(problem_of(F32, 64, d), precision="tf32x3")
    for part in ("forward", "dq"):
        with pytest.raises(ArgumentError, match=words):
            registry.select(part, Request(split, target_of(arch)))


def test_a_plan_of_ones_own_is_taken():
    request = Request(problem_of(np.float16, 64, 64), target_of("sm_90"), blocks=(32, 32))
    spec, tiles, _ = registry.select("forward", request)
    assert (spec.name, tiles.block_q, tiles.block_kv) == ("forward_simt", 32, 32)


@pytest.mark.parametrize("arch", [x for x in SHARED_MEMORY if x != "sm_75"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_tiles_fit(arch, dtype):
    itemsize = np.dtype(dtype).itemsize
    most = sm80.FORWARD.heads[np.dtype(dtype).name]
    for d in range(1, most + 1, 5):
        for d_v in (1, d, most):
            tiles = sm80.fit_forward(d, d_v, SHARED_MEMORY[arch], itemsize)
            assert tiles is not None
            assert tiles.resident_blocks * tiles.threads * 128 <= REGISTERS
            rows = tiles.block_q * tiles.row_sharers * 32 // tiles.threads
            assert rows in (16, 32)
            assert tiles.block_kv % 16 == 0


def test_too_little_shared_memory_leaves_the_portable_kernel():
    small = dataclasses.replace(target_of("sm_80"), shared_memory=40000)
    choice = registry.select("forward", Request(problem_of(np.float16, 256, 256), small))
    assert choice.spec.name == "forward_simt"
    other, why = choice.passed_over[-1]
    assert (other.name, "40000 bytes of shared memory" in why) == ("forward_sm80", True)
