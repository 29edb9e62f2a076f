"""Gradients of reductions by the kernels of the backward, on the emulator."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from emulator.memory import poisoned_like
from halves import mostly_thorough
from placement import same_bits
from reductions_of import SUMS, call_of, given_of, ratios_of_gradients
from strategies import BFLOAT16

import cupyflash
from cupyflash import masks, reduced_call, reductions
from cupyflash.testing import problem

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def on(emulator):
    """Compute reductions and their gradients on the emulator, in memory that holds NaN."""
    backend = SimpleNamespace(
        reduce=emulator.reduce,
        reduction_gradients=emulator.reduction_gradients,
        empty_like=lambda x, shape=None, in_c_order=False: poisoned_like(x, shape or x.shape),
    )
    there = SimpleNamespace(backend_of=lambda _: backend)
    return mock.patch.object(reduced_call, "dispatch", there)


FEW = {name: SUMS[name] for name in ("entropy", "mass", "own")}


def gradients_of(made, emulator, named=SUMS):
    """Return gradients of results, and those of arrays on the emulator."""
    q, k, options = call_of(made)
    lse = cupyflash.attention(q, k, k, return_lse=True, **options)[1]
    given = given_of(made, cupyflash.reduce(q, k, named, lse=lse, **options))
    with on(emulator):
        return given, cupyflash.reduce_vjp(q, k, named, lse=lse, **options)[1](given)


def drawn(dtype, bias="float16", d=24, **more):
    """Return a problem with everything that has a gradient, and other lengths than tiles."""
    return problem(
        dtype, (2, 4, 37, d), (1, 2, 45, d), (1, 2, 45, 8), mask="window", seed=3,
        scores=("softcap",), bias=bias, sink="float32", **more,
    )  # fmt: skip


@mostly_thorough(
    "dtype",
    [np.dtype("float32"), BFLOAT16, np.dtype("float16"), np.dtype("float64")],
    quick=[np.dtype("float32"), BFLOAT16],
    why="the same kernels for other types",
    ids=str,
)
def test_gradients_are_within_the_bound(dtype):
    made = drawn(dtype)
    given, gradients = gradients_of(made, Emulator(Blocks(16, 16), randomly(3)))
    tensor_cores = dtype.itemsize == 2
    worst = ratios_of_gradients(made, given, gradients, tensor_cores)
    assert set(worst) == {"dq", "dk", "dbias", "dsink"}
    assert 0 < min(worst.values()) <= max(worst.values()) <= 1, worst


@pytest.mark.thorough("the same kernels with other masks, heads and tiles")
@pytest.mark.parametrize("mask", [None, "causal", "segments"])
@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("float16")], ids=str)
def test_other_masks_heads_and_tiles(mask, dtype):
    options = {} if mask is None else {"mask": mask}
    made = problem(dtype, (3, 1, 6, 20, 40), (2, 3, 70, 40), (2, 3, 70, 8), seed=5, **options)
    given, gradients = gradients_of(made, Emulator(Blocks(16, 32), randomly(2)))
    worst = ratios_of_gradients(made, given, gradients, dtype.itemsize == 2)
    assert set(worst) == {"dq", "dk"}
    assert 0 < min(worst.values()) <= max(worst.values()) <= 1, worst


@mostly_thorough(
    "shape",
    [(37, 45), (4, 37, 45), (2, 1, 37, 1), (1, 1), (2, 4, 37, 45)],
    quick=[(37, 45)],
    why="other axes along which the same kernel sums",
)
def test_a_bias_of_any_axes_has_a_gradient(shape):
    made = drawn(np.dtype("float32"))
    made.options["bias"] = np.random.default_rng(1).standard_normal(shape).astype(np.float16)
    given, gradients = gradients_of(made, Emulator(Blocks(16, 16)), FEW)
    assert gradients.dbias.shape == shape
    assert gradients.dbias.dtype == np.float16
    worst = ratios_of_gradients(made, given, gradients)
    assert 0 < worst["dbias"] <= 1, worst
    assert max(worst.values()) <= 1, worst


@mostly_thorough(
    "dtype",
    [np.dtype("float32"), np.dtype("float16"), np.dtype("float64")],
    quick=[np.dtype("float32")],
    why="the kernels of other types",
    ids=str,
)
def test_bits_depend_on_no_schedule_no_batch_and_no_hidden_key(dtype):
    made = drawn(dtype)
    made.options["mask"] = masks.mask(lambda b, h, i, j: (j % 9 != 4) & (j <= i + 3))
    made.options["bias"] = None
    (given, one), (_, other) = (
        gradients_of(made, Emulator(Blocks(16, 16), x), FEW) for x in (REVERSE, randomly(4))
    )
    assert all(same_bits(x, y) for x, y in zip(one, other, strict=True) if x is not None)
    q, k, options = call_of(made)
    lse = cupyflash.attention(q, k, k, return_lse=True, **options)[1]
    hidden = k.copy()
    hidden[..., 4::9, :] = np.nan
    hidden[..., 40:, :] = np.inf
    with on(Emulator(Blocks(16, 16))):
        vjp = cupyflash.reduce_vjp(q, hidden, FEW, lse=lse, **options)[1]
        ours = vjp(given)
        first = {name: x[1:] for name, x in given.items()}
        vjp = cupyflash.reduce_vjp(q[1:], k, FEW, lse=lse[1:], **options)[1]
        alone = vjp(first)
    assert all(same_bits(x, y) for x, y in zip(one, ours, strict=True) if x is not None)
    assert same_bits(alone.dq, one.dq[1:])


@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (0, 20), (20, 0)])
def test_rows_without_keys_and_empty_axes(queries, keys):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (queries, keys))
    nobody = masks.mask(lambda b, h, i, j: (i != 3) & (j < 0))
    lse = np.full((1, 2, queries), -np.inf, np.float32)
    bias = np.zeros((2, 1, keys), np.float32)
    named = {"e": reductions.entropy(), "m": reductions.mass()}
    given = {"e": np.ones_like(lse), "m": np.ones((1, 2, keys), np.float32)}
    with on(Emulator(Blocks(16, 16))):
        vjp = cupyflash.reduce_vjp(q, k, named, lse=lse, mask=nobody, bias=bias)[1]
        for told in (given, {}):
            gradients = vjp(told)
            for x, y in zip(gradients, (q, k, bias), strict=False):
                assert same_bits(x, np.zeros_like(y))


def test_matrices_are_one_head():
    q, k = np.random.default_rng(9).standard_normal((2, 20, 8))
    lse = cupyflash.attention(q, k, k, return_lse=True)[1]
    named, given = {"m": reductions.mass()}, np.random.default_rng(1).standard_normal(20)
    wanted = cupyflash.reduce_vjp(q, k, named)[1]({"m": given})
    with on(Emulator(Blocks(16, 16))):
        made = cupyflash.reduce_vjp(q, k, named, lse=lse)[1]({"m": given})
    for ours, other in zip(made[:2], wanted[:2], strict=True):
        assert ours.shape == (20, 8)
        assert np.allclose(ours, other, rtol=1e-12, atol=1e-14)


def test_the_sums_of_a_row_are_not_rounded():
    """A weight times the same number for all keys has no gradient, in 16 bits, too."""
    q, k = np.random.default_rng(2).standard_normal((2, 1, 2, 40, 16)).astype(np.float16)
    lse = cupyflash.attention(q, k, k, return_lse=True)[1]
    own = {"one": reductions.reduction(lambda p, t, b, h, i, j: 1000.0 * p)}
    with on(Emulator(Blocks(16, 16))):
        made = cupyflash.reduce_vjp(q, k, own, lse=lse)[1]({"one": np.ones_like(lse)})
    assert max(abs(x).max() for x in made[:2]) < 1000 * 40 * 1e-6
