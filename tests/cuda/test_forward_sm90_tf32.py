"""The forward in float32 by Hopper's warpgroups, on the CPU: products of split numbers."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from harness import attend
from placement import same_bits
from warpgroup_calls import draw, emulated, run, within_the_bound

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.problem import validate
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import philox

F32 = np.dtype(np.float32)
ALIBI = scores.alibi(np.array([0.5, 0.03], np.float32))
# Queries, keys, D, Dv: registers that hold the queries and not, one line and several, odd sizes.
CALLS = {
    "plain": ((130, 190, 64, 64), {}),
    "wide": ((40, 150, 128, 128), {"scale": -0.3}),
    "odd": ((5, 70, 97, 3), {"dropout": 0.2, "seed": 5}),
    "causal": ((135, 150, 24, 100), {"mask": masks.causal()}),
    "no range": ((40, 200, 40, 72), {"mask": masks.mask(lambda b, h, i, j: (i + j) % 3 < 2)}),
    "scores": ((40, 130, 64, 128), {"mask": masks.window(90, 3), "score_mod": ALIBI}),
    "tiny": ((1, 1, 1, 1), {"sink": np.array([0.5, -np.inf], np.float32)}),
}


@emulated
@mostly_thorough("name", CALLS, quick=list(CALLS)[:1], why="more options of the same kernel")
def test_every_result_is_within_the_bound(name):
    (len_q, len_k, d, d_v), options = CALLS[name]
    q, k, v = draw(F32, (2, 2, len_q, d), (2, 1, len_k, d), (2, 1, len_k, d_v))
    out, lse, _ = run(q, k, v, **options)
    within_the_bound(q, k, v, out, lse, **options)


@pytest.mark.thorough("the 16-bit kernels have quick cases")
@emulated
@pytest.mark.parametrize("option", [{}, {"mask": masks.window(70, 3)}], ids=["plain", "window"])
def test_rows_of_any_strides_have_the_same_bits(option):
    q, k, v = draw(F32, (1, 70, 40), (1, 200, 40), (1, 200, 24))
    plain, lse, visited = run(q, k, v, **option)
    assert visited == attend(q, k, v, tiles=(128, 64), **option).visited
    across = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    shifted = [np.pad(x, [(0, 0), (0, 0), (1, 2)])[..., 1:-2] for x in (q, k, v)]
    backwards = [np.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in (q, k, v)]
    for arrays in (across, shifted, backwards):
        other, other_lse, _ = run(*arrays, **option)
        assert same_bits(plain, other)
        assert same_bits(lse, other_lse)


@pytest.mark.thorough("the 16-bit kernels have quick cases")
@emulated
def test_packed_sequences():
    ends_q, ends_k = np.array([0, 1, 1, 140, 160]), np.array([0, 129, 130, 130, 220])
    q, k, v = draw(F32, (2, 160, 72), (1, 220, 72), (1, 220, 64))
    offsets = ends_q, ends_k
    for options in ({}, {"mask": masks.causal(), "dropout": 0.2, "seed": 5}):
        out, lse, _ = run(q, k, v, offsets=offsets, **options)
        within_the_bound(q, k, v, out, lse, offsets, **options)
    assert (out[:, 1:140] == 0).all()  # without keys
    k[:, 129:], v[:, 129:] = np.nan, np.nan  # of neighbours
    other, *_ = run(q, k, v, offsets=offsets, **options)
    assert same_bits(out[:, :140], other[:, :140])


@emulated
@mostly_thorough(
    "value",
    [np.nan, np.inf, -np.inf],
    quick=[np.inf],
    why="other values of the same kernel",
    ids=str,
)
def test_a_value_reaches_only_the_rows_that_see_it(value):
    q, k, v = draw(F32, *[(1, 150, 64)] * 3)
    options = {"mask": masks.causal()}
    plain, lse, _ = run(q, k, v, **options)
    v[0, 70, 3] = value
    other, other_lse, _ = run(q, k, v, **options)
    assert same_bits(lse, other_lse)
    elsewhere = np.ones(plain.shape, bool)
    elsewhere[0, 70:, 3] = False
    assert same_bits(plain[elsewhere], other[elsewhere])
    seen = other[0, 70:, 3]
    assert (np.isnan(seen) if np.isnan(value) else seen == value).all()


@emulated
def test_a_key_or_a_query_reaches_only_its_rows():
    q, k, v = draw(F32, *[(1, 150, 64)] * 3)
    plain, lse, _ = run(q, k, v, mask=masks.causal())
    k[0, 70, 3], q[0, 7, 2] = np.nan, np.inf
    other, other_lse, _ = run(q, k, v, mask=masks.causal())
    rest = np.arange(70) != 7
    assert same_bits(plain[:, :70][:, rest], other[:, :70][:, rest])
    assert same_bits(lse[:, :70][:, rest], other_lse[:, :70][:, rest])
    assert np.isnan(other[:, 70:]).all()


@emulated
@mostly_thorough(
    "options",
    [{}, {"mask": masks.causal()}],
    quick=lambda options: bool(options),
    why="the mask alone tells rows apart",
    ids=["plain", "masked"],
)
def test_numbers_that_are_too_large_to_be_split(options):
    q, k, v = draw(F32, (1, 40, 24), (1, 40, 24), (1, 40, 24))
    largest = np.finfo(np.float32).max
    v[0, 20, 3], k[0, 21], q[0, 22] = -largest, 0, 0
    k[0, 21, 5], q[0, 22, 6] = largest, 2.0**127
    q *= np.float32(2.0**-30)
    out, lse, _ = run(q, k, v, scale=1e-30, **options)
    assert np.isfinite(lse).all()
    within_the_bound(q, k, v, out, lse, scale=1e-30, **options)
    if options:  # rows before see none of them
        assert np.abs(out[0, :20]).max() < 5


@pytest.mark.thorough("equal words are quick in the tests of Philox")
@emulated
def test_dropped_pairs_are_those_of_the_twin_in_any_schedule():
    size, seed, p = 70, 2**63 + 12345, 0.37
    q = np.zeros((1, 2, size, 8), F32)
    v = np.broadcast_to(np.eye(size, dtype=F32), (1, 2, size, size))
    kept = philox.keep(
        seed, p, np.arange(2).reshape(1, 2, 1, 1), np.arange(size)[:, None], np.arange(size)
    )
    for schedule in (FORWARD, REVERSE, randomly(1)):
        out, *_ = run(q, q, v, schedule, dropout=p, seed=seed)
        np.testing.assert_array_equal(out != 0, kept)


# -- when it is chosen ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "lacks", "kernel", "words"),
    [
        (128, "", "forward_sm90_tf32", "warpgroups, as three products each"),
        (129, "", "forward_sm80", "not by forward_sm90_tf32, because head sizes 129 and 129"),
        (64, "it is old", "forward_sm80", "not by forward_sm90_tf32, because it is old"),
    ],
)
def test_the_plan_says_why(d, lacks, kernel, words):
    q = np.zeros((1, d), F32)
    call = validate.call(q, q, q, Options(precision="tf32x3"))
    target = Target(0, "a GPU", (9, 0), 1, SHARED_MEMORY["sm_90"], lacks=lacks)
    plan = route.of(call, target).plan
    assert plan.kernel == kernel
    assert words in plan.reason
