"""Gradients in float64 by tensor cores, on the CPU: what is particular to them, and the choice."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, capability
from emulator import build
from emulator.blocks import Blocks, Chosen
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry, sm80_f64
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients, Plan
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["adds", "deterministic"])


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def run(q, k, v, do, deterministic, blocks, schedule=REVERSE, **options):
    """Compute dq, dk and dv on the emulator, into memory that holds NaN."""
    emulator = Emulator(blocks, schedule, deterministic=deterministic)
    call = validate.call(q, k, v, Options(**options))
    out, lse = np.empty((*q.shape[:-1], v.shape[-1])), np.empty(q.shape[:-1])
    emulator.forward(call, out, lse)
    made = Gradients(*(np.full(x.shape, np.nan) for x in (q, k, v)))
    emulator.backward(call, do, out, lse, None, made)
    return made[:3]


def worst(q, k, v, do, made, **options):
    precision = Precision.of(q.dtype, tensor_cores=False)
    bound = backward_bound(do, q, k, v, precision=precision, block_kv=16, **options)
    return max(rho(x, *b).value for x, b in zip(made, bound[:3], strict=True))


# Blocks, head sizes: warps with 16 and with 32 rows of each product, shares of one piece, of many,
# and such that the last warps have nothing to do.
SHAPES = [
    (Blocks(16, 16, 32), 8, 8),
    (Blocks(16, 16, 64), 40, 24),
    (Blocks(32, 64, 64), 72, 1),
    (Blocks(64, 64, 64), 16, 80),
    (Blocks(64, 64, 256), 128, 3),
    (Blocks(16, 32, 128), 7, 120),
    (Chosen(), 64, 64),
    (Chosen(), 128, 128),
    (Chosen(shared_memory=166912), 64, 33),
    (Chosen(shared_memory=166912), 128, 100),
    (Chosen(shared_memory=101376), 48, 64),
]


@emulated
@mostly_thorough(
    "deterministic",
    [False, True],
    quick=[False],
    why="masked queries and keys are quick with two kernels",
    ids=["adds", "deterministic"],
)
@mostly_thorough(
    ("blocks", "d", "d_v"),
    SHAPES,
    quick=[SHAPES[n] for n in (1,)],
    why="more shares of a product between those of one piece and of many",
    ids=str,
)
def test_every_share_of_a_product(deterministic, blocks, d, d_v):
    q, k, v, do = draw((2, 150, d), (1, 141, d), (1, 141, d_v), (2, 150, d_v))
    options = {"mask": masks.causal(), "score_mod": scores.softcap(3.0)}
    made = run(q, k, v, do, deterministic, blocks, randomly(1), **options)
    assert worst(q, k, v, do, made, **options) <= 1


@emulated
@mostly_thorough(
    ("deterministic", "value"),
    [(mode, value) for mode in (False, True) for value in (np.nan, np.inf)],
    quick=[(True, np.inf)],
    why="the other sum, and infinities make NaN, too",
)
def test_masked_queries_and_keys_change_no_bit(deterministic, value):
    q, k, v, do = draw(*[(2, 70, 24)] * 4)
    mask = masks.mask(lambda b, h, i, j: (j <= i) & (i != 50) & (j != 3))
    results = []
    for bad in (0, value):
        q[:, 50], do[:, 50], k[:, 3], v[:, 3] = bad, bad, bad, bad
        results.append(run(q, k, v, do, deterministic, Blocks(32, 32, 64), mask=mask))
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)
        assert np.isfinite(a).all()


@pytest.mark.thorough("masked queries and keys are quick, which are not finite")
@emulated
@MODES
def test_a_query_that_is_not_finite_spoils_what_it_sees(deterministic):
    q, k, v, do = draw(*[(1, 70, 24)] * 4)
    do[0, 40, 5] = np.nan
    dq, dk, dv = run(q, k, v, do, deterministic, Blocks(32, 32, 64), mask=masks.causal())
    assert np.isnan(dq[0, 40]).all()
    assert np.isfinite(np.delete(dq, 40, axis=1)).all()
    assert np.isnan(dk[0, :41]).all()
    assert np.isfinite(dk[0, 41:]).all()
    assert np.isnan(dv[0, :41, 5]).all()
    assert np.isfinite(np.delete(dv, 5, axis=2)).all()


@emulated
@mostly_thorough(
    "deterministic", [False, True], quick=[False], why="the other sum of the same product"
)
def test_far_probabilities_vanish(deterministic):
    # Scores up to some thousands: of the powers of 2 most are 0, and some are not normal numbers.
    q, k, v, do = draw(*[(1, 40, 16)] * 4)
    made = run(40 * q, 40 * k, v, do, deterministic, Blocks(32, 32, 64))
    assert worst(40 * q, 40 * k, v, do, made) <= 1


# -- the choice -----------------------------------------------------------------------------------


def kernels(q, arch, deterministic, plan=None):
    """Return the names of the kernels of a backward on a GPU."""
    call = validate.call(q, q, q)
    lse = np.zeros(q.shape[:-1], call.problem.accumulator)
    target = Target(0, arch, capability(arch), 1, SHARED_MEMORY[arch])
    made = route.backward(
        call, target, q, q, lse, None, Gradients(q, q, q), plan, deterministic=deterministic
    ).recipe
    return [x.special.kernel.removeprefix("backward_") for x in made.launches], made.atomic_dq


def test_which_kernels_are_launched():
    q = np.zeros((2, 24, 64))
    assert kernels(q, "sm_80", False) == (["delta", "f64_dkdv"], True)
    assert kernels(q, "sm_80", True) == (["delta", "f64_dkdv", "f64_dq"], False)
    portable = ["delta", "simt_dkdv", "simt_dq"], False
    assert kernels(q, "sm_75", True) == portable
    assert kernels(np.zeros((2, 24, 129)), "sm_90", True) == portable
    assert kernels(np.zeros((2, 24, 128)), "sm_120", True) == portable  # too little memory
    assert kernels(q, "sm_80", True, Plan("backward_simt", 32, 32, "for a test")) == portable


@pytest.mark.parametrize("arch", [arch for arch in SHARED_MEMORY if arch != "sm_75"])
@pytest.mark.parametrize("part", ["dkdv", "dq"])
def test_tiles_fit(arch, part):
    target = Target(0, arch, capability(arch), 1, SHARED_MEMORY[arch])
    largest = sm80_f64.LARGEST_HEAD if target.shared_memory > 101376 else 64
    for d in (1, 17, 64, 65, 128, 129):
        for d_v in (1, d, 128):
            problem = validate.call(*(np.zeros((1, n)) for n in (d, d, d_v))).problem
            spec, tiles, _ = registry.select(part, Request(problem, target))
            assert tiles.shared_memory <= target.shared_memory
            served = max(d, d_v) <= largest
            assert spec.name in (f"backward_f64_{part}", f"backward_simt_{part}")
            assert spec.name == f"backward_f64_{part}" or not served
