"""The kernels of reductions on the emulator: the bounds of all of them, and equal bits."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from emulator import build
from emulator.calls import Blocks, Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits
from reductions_of import EVERY, call_of, ratios
from strategies import BFLOAT16

import cupyflash
from cupyflash import masks, reductions, statistics
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
    with mock.patch.object(statistics, "dispatch", there):
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
    found = reduced(made, named, Emulator(Blocks(16, 16), randomly(3)))
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
        with mock.patch.object(statistics, "dispatch", there):
            found = cupyflash.reduce(q[:, :, :queries], k[:, :, :keys], named, lse=lse, mask=nobody)
        assert not any(found[name].any() for name in ("entropy", "mass", "distance"))
        assert np.isneginf(found["max_logit"]).all()
        assert (found["top"].indices == -1).all()
        assert found["mass"].shape == (1, 2, keys)
