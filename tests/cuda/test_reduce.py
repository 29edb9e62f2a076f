"""The kernels of reductions on the emulator: the bounds of all of them, and equal bits."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits
from reductions_of import EVERY, call_of, ratios
from strategies import BFLOAT16

import cupyflash
from cupyflash import masks, reduced_call, reductions
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import reduction_route
from cupyflash.gpu.kernels import registry, sm80_reduce
from cupyflash.gpu.workspace import ArraySpec
from cupyflash.problem import validate
from cupyflash.problem.options import Options
from cupyflash.problem.reduction_form import Form
from cupyflash.testing import problem

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

MORE = {
    "weighted": reductions.mass(np.linspace(-1, 1, 37)),
    "tiny": reductions.blocks((3, 2)),
    "wide": reductions.blocks((20, 30)),
    "number": reductions.reduction(lambda p, t, b, h, i, j: 1.0),
    "heaviest": reductions.reduction(lambda p, t, b, h, i, j: p, by="top", n=2),
}


def drawn(dtype, d=24):
    return problem(
        dtype, (2, 4, 37, d), (2, 2, 45, d), (2, 2, 45, 8), mask="window", seed=3,
        scores=("softcap",), bias="float16", sink="float32",
    )  # fmt: skip


def reduced(made, named, emulator):
    """Compute reductions on the emulator, with the log-sum-exp of the CPU."""
    q, k, options = call_of(made)
    lse = cupyflash.attention(q, k, k, return_lse=True, **options)[1]
    there = SimpleNamespace(backend_of=lambda _: emulator)
    with mock.patch.object(reduced_call, "dispatch", there):
        return cupyflash.reduce(q, k, named, lse=lse, **options)


@mostly_thorough(
    "dtype",
    [np.dtype("float32"), BFLOAT16, np.dtype("float16"), np.dtype("float64")],
    quick=[np.dtype("float32")],
    why="the same kernels for other types",
    ids=str,
)
def test_results_are_within_the_bound(dtype):
    made, named = drawn(dtype), EVERY | MORE
    found = reduced(made, named, Emulator(Blocks(16, 16, tensor=False), randomly(3)))
    worst = ratios(made, found, named)
    assert max(worst.values()) <= 1, worst
    q, k, options = call_of(made)
    ours = cupyflash.reduce(q, k, named, **options)
    assert np.array_equal(found["argmax"], ours["argmax"])
    for name in ("top", "heaviest"):
        assert np.array_equal(found[name].indices, ours[name].indices), name


@pytest.mark.parametrize(
    ("block_q", "block_kv", "threads", "d"), [(16, 32, 32, 40), (32, 32, 64, 264)]
)
@pytest.mark.thorough("kernels of their own for other tiles and heads")
def test_other_tiles_and_wide_heads(block_q, block_kv, threads, d):
    made = drawn("float32", d)
    found = reduced(made, EVERY | MORE, Emulator(Blocks(block_q, block_kv, threads), randomly(1)))
    worst = ratios(made, found, EVERY | MORE)
    assert max(worst.values()) <= 1, worst


@pytest.mark.thorough("the same kernels again")
def test_bits_depend_on_no_schedule_and_no_batch():
    made = drawn("float32")
    one, other = (
        reduced(made, EVERY, Emulator(Blocks(16, 16), x)) for x in (REVERSE, Emulator().schedule)
    )
    for name in EVERY:
        pairs = (
            zip(one[name], other[name], strict=True)
            if name == "top"
            else [(one[name], other[name])]
        )
        assert all(same_bits(x, y) for x, y in pairs), name


def test_rows_without_keys_and_empty_axes():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 2, 20, 8)).astype(np.float32)
    emulator = Emulator(Blocks(16, 16))
    there = SimpleNamespace(
        backend_of=lambda _: SimpleNamespace(
            reduce=emulator.reduce, empty_like=lambda x, shape, in_c_order: np.empty(shape, x.dtype)
        )
    )
    nobody = masks.mask(lambda b, h, i, j: (i != 3) & (j < 0))
    named = {name: EVERY[name] for name in ("entropy", "mass", "max_logit", "top", "distance")}
    for queries, keys in ((20, 20), (0, 20), (20, 0)):
        lse = np.full((1, 2, queries), -np.inf, np.float32)
        with mock.patch.object(reduced_call, "dispatch", there):
            found = cupyflash.reduce(q[:, :, :queries], k[:, :, :keys], named, lse=lse, mask=nobody)
        assert not any(found[name].any() for name in ("entropy", "mass", "distance"))
        assert np.isneginf(found["max_logit"]).all()
        assert (found["top"].indices == -1).all()
        assert found["mass"].shape == (1, 2, keys)


# -- sums of weights by tensor cores --------------------------------------------------------------

OF_WEIGHTS = {
    "mass": reductions.mass(),
    "last": reductions.mass(queries=slice(-5, None)),
    "some": reductions.mass(queries=slice(3, 30)),
    "nobody": reductions.mass(queries=slice(30, 30)),
    "blocks": reductions.blocks((7, 20)),
    "tiny": reductions.blocks((3, 2)),
    "wide": reductions.blocks((20, 40)),
}


def by_tensor_cores(made, blocks, schedule=REVERSE):
    """Return sums of weights, of which each is computed on tensor cores."""
    with mock.patch.object(registry, "KERNELS", {"reduce_weights": (sm80_reduce.WEIGHTS,)}):
        return reduced(made, OF_WEIGHTS, Emulator(blocks, schedule))


@mostly_thorough(
    ("dtype", "block_q", "block_kv", "threads", "d"),
    [
        (BFLOAT16, 16, 16, 32, 24), (np.dtype("float16"), 32, 64, 64, 128),
        (BFLOAT16, 16, 32, 64, 72), (np.dtype("float16"), 16, 32, 64, 200),
        (BFLOAT16, 16, 64, 64, 320),
    ],
    quick=[(BFLOAT16, 16, 16, 32, 24)],
    why="other tiles, and keys of wide heads, which are in shared memory",
    ids=str,
)  # fmt: skip
def test_sums_of_weights_are_within_the_bound(dtype, block_q, block_kv, threads, d):
    made = drawn(dtype, d)
    found = by_tensor_cores(made, Blocks(block_q, block_kv, threads), randomly(3))
    worst = ratios(made, found, OF_WEIGHTS, tensor_cores=True)
    assert 0 < max(worst.values()) <= 1, worst
    assert not found["nobody"].any()


@pytest.mark.thorough("other code for masks, and for scores as they are")
@pytest.mark.parametrize("mask", [None, "causal", "segments", "window"])
def test_sums_of_weights_under_masks(mask):
    more = {} if mask is None else {"mask": mask}
    made = problem(np.float16, (2, 4, 70, 40), (2, 2, 45, 40), (2, 2, 45, 8), seed=5, **more)
    one = by_tensor_cores(made, Blocks(16, 32, 64), randomly(2))
    worst = ratios(made, one, OF_WEIGHTS, tensor_cores=True)
    assert 0 < max(worst.values()) <= 1, worst
    other = by_tensor_cores(made, Blocks(16, 32, 64), Emulator().schedule)
    assert all(same_bits(one[name], other[name]) for name in OF_WEIGHTS)


def test_a_nan_reaches_what_sees_it():
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 2, n, 16)).astype(np.float16) for n in (40, 40))
    q[0, 0, 30], k[0, 1, 5] = np.nan, np.nan
    lse = np.zeros((1, 2, 40), np.float32)
    emulator = Emulator(Blocks(16, 16, 32))
    there = SimpleNamespace(backend_of=lambda _: emulator)
    with mock.patch.object(reduced_call, "dispatch", there):
        named = {"m": reductions.mass()}
        mass = cupyflash.reduce(q, k, named, lse=lse, mask=masks.causal())["m"][0]
    seen = np.zeros((2, 40), bool)
    seen[0, :31] = True  # by query 30
    seen[1, 5] = True
    assert (np.isnan(mass) == seen).all()


@pytest.mark.parametrize(
    ("memory", "d", "tiles"),
    [
        (232448, 128, (64, 128, 3)), (166912, 128, (64, 128, 2)), (101376, 128, (64, 128, 1)),
        (232448, 256, (64, 128, 1)), (101376, 256, (32, 64, 1)), (101376, 512, (16, 64, 1)),
    ],
)  # fmt: skip
def test_tiles(memory, d, tiles):
    found = sm80_reduce.fit(d, memory)
    assert (found.block_q, found.block_kv, found.resident_blocks) == tiles
    assert found.shared_memory <= memory


@pytest.mark.parametrize(
    ("dtype", "capability", "form", "kernel"),
    [
        (np.float16, (9, 0), Form("weight", "blocks", "sum"), "reduce_sm80_weights"),
        (np.float16, (7, 5), Form("weight", "blocks", "sum"), "reduce_blocks"),
        (np.float32, (9, 0), Form("weight", "blocks", "sum"), "reduce_blocks"),
        (np.float16, (9, 0), Form("weight", "blocks", "max"), "reduce_blocks"),
        (np.float16, (9, 0), Form("logit", "blocks", "sum"), "reduce_blocks"),
        (np.float16, (9, 0), Form("weight", "distance", "sum"), "reduce_distance"),
    ],
)
def test_which_kernel_serves(dtype, capability, form, kernel):
    x = np.zeros((2, 4, 64, 64), dtype)
    call = validate.call(x, x, x, Options())
    form = form._replace(rows=(0, 64), block=(64, 1))
    found = ArraySpec(reduction_route.shape_of(call, form), np.dtype(np.float32))
    target = Target(0, "a GPU", capability, 108, 101376)
    made = reduction_route.of(call, target, form, x[..., 0], None, found)
    assert [step.kernel for step in made.steps] == [kernel]
