"""The kernels of forward mode: which one serves, and on the emulator their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import randomly
from emulator.problems import emulator_of, run_tangent
from hypothesis import Phase, given, settings
from placement import same_bits
from strategies import DTYPES, problems
from tangents import directions_of, jvp_ratios

from cupyflash import masks
from cupyflash.gpu import route
from cupyflash.problem import validate
from cupyflash.problem.options import Options
from cupyflash.problem.tangents import Tangents
from cupyflash.testing import Directions, problem

# An example compiles its own kernel, so there are few, and none are shrunk.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


@pytest.mark.thorough("a search; one problem with all options is quick")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_results_and_tangents_are_within_the_bound(dtype, packed):
    @settings(max_examples=max(2, settings().max_examples // 5), phases=PHASES)
    @given(problems(dtype, packed=packed))
    def check(problem):
        directions = directions_of(problem)
        emulator = emulator_of(problem)
        results = run_tangent(problem, emulator, directions)
        ratios = jvp_ratios(problem, directions, results, emulator.blocks.tensor)
        assert max(ratios.values()) <= 1, ratios

    check()


@pytest.mark.parametrize(
    ("arch", "dtype", "d", "kernel", "block"),
    [
        ("sm_80", "float16", 128, "forward_sm80_tangent", (64, 48)),
        ("sm_90", "bfloat16", 64, "forward_sm80_tangent", (128, 32)),
        ("sm_120", "float16", 256, "forward_sm80_tangent", (16, 32)),
        ("sm_90", "float16", 264, "forward_simt_tangent", None),
        ("sm_90", "float32", 64, "forward_simt_tangent", None),
        ("sm_75", "float16", 64, "forward_simt_tangent", None),
    ],
)
def test_which_kernel_serves(arch, dtype, d, kernel, block):
    q = np.zeros((2, 64, d), dtype)
    found = route.of_tangents(validate.call(q, q, q, Options()), target_of(arch)).plan
    assert found.kernel == kernel
    if block is not None:
        assert (found.block_q, found.block_kv) == block
    passed_over = "forward_sm80_tangent" in found.reason
    assert passed_over == (kernel == "forward_simt_tangent" and dtype == "float16")


def worst(made, direction, blocks):
    """Return the largest rho of the results on the emulator."""
    results = run_tangent(made, Emulator(blocks, randomly(3)), direction)
    ratios = jvp_ratios(made, direction, results, made.dtype.itemsize == 2)
    assert min(ratios.values()) >= 0
    return max(ratios.values())


def with_every_option(dtype, d, d_v):
    return problem(
        dtype, (2, 4, 37, d), (2, 2, 45, d), (2, 2, 45, d_v), mask="window", seed=3,
        scores=("softcap",), bias="float16", sink="float32", dropout=0.2, tiles=(16, 16),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_call_with_every_option_is_within_the_bound(dtype):
    made = with_every_option(dtype, 24, 17)
    direction = directions_of(made, missing=0)
    assert all(x is not None for x in direction)
    assert 0 < worst(made, direction, Blocks(16, 16)) <= 1


# Queries and keys of a tile, threads, head sizes: 32 rows a warp; keys of 48; two warps that share
# 16 rows, and four that share 32.
SHARED = [
    (32, 32, 32, 24, 40),
    (16, 48, 64, 72, 72),
    (16, 32, 64, 136, 200),
    (16, 64, 128, 200, 136),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("block_q", "block_kv", "threads", "d", "d_v"), SHARED)
@pytest.mark.thorough("kernels of their own; one of them is quick")
def test_warps_that_share_rows_or_have_more(dtype, block_q, block_kv, threads, d, d_v):
    made = with_every_option(dtype, d, d_v)
    direction = directions_of(made, missing=0)
    assert 0 < worst(made, direction, Blocks(block_q, block_kv, threads)) <= 1


def plain(dtype, d, keys=40):
    return problem(dtype, (1, 1, 20, d), (1, 1, keys, d), (1, 1, keys, d), tiles=(16, 16))


def test_what_tangents_of_a_row_have_in_common_costs_no_digits():
    made = plain("bfloat16", 24)
    rng = np.random.default_rng(0)
    tk = np.broadcast_to(100 * rng.standard_normal(24), made.k.shape).astype(made.dtype)
    tk = tk + rng.standard_normal(made.k.shape).astype(made.dtype)
    assert worst(made, Directions(None, tk, None, None, None), Blocks(16, 16)) <= 1


@pytest.mark.parametrize("d", [24, 136])
@pytest.mark.thorough("kernels of their own, for what is rare")
def test_large_tangents_of_scores_fit_float16(d):
    made = plain("float16", d, keys=150)
    rng = np.random.default_rng(0)
    made.v[...] *= np.float16(0.01)  # so that tangents of the output fit, too
    tq, tk, tv = rng.uniform(-1, 1, (3, *made.k.shape))
    tq = tq[..., :20, :]
    tq[..., ::2, :] *= 60000  # every other row
    direction = Directions(*(x.astype(made.dtype) for x in (tq, 300 * tk, tv)), None, None)
    assert worst(made, direction, Blocks(16, 32)) <= 1


@pytest.mark.parametrize("names", ["q", "k", "v", "qv", "kv"])
@pytest.mark.thorough("a kernel for each")
def test_directions_that_lack_tangents(names):
    made = plain("bfloat16", 24)
    own = (
        x if name in names else None for name, x in zip("qkv", directions_of(made, 0), strict=False)
    )
    assert worst(made, Directions(*own, None, None), Blocks(16, 16)) <= 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_keys_that_nobody_sees_change_no_bit(dtype):
    rng = np.random.default_rng(0)
    q, k, v, tq, tk, tv = rng.standard_normal((6, 1, 2, 40, 16)).astype(dtype)
    mask, emulator = masks.lengths([24]), Emulator(Blocks(16, 16))

    def run():
        call = validate.call(q, k, v, Options(mask=mask))
        out, tout = np.full((2, *q.shape), np.nan, dtype)
        lse, tlse = np.full((2, *q.shape[:-1]), np.nan, np.float32)
        emulator.forward_tangent(call, Tangents(tq, tk, tv), (out, tout, lse, tlse))
        return out, tout, lse, tlse

    expected = run()
    for hidden in (k, v, tk, tv):
        hidden[:, :, 24:] = np.nan
    for ours, right in zip(run(), expected, strict=True):
        assert same_bits(ours, right)
