"""The kernels of second derivatives, on the emulator: bounds, and what they may not read."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from cuda_specialisations import target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from emulator.problems import emulator_of, lean_kernels, run_forward, run_second
from halves import mostly_thorough
from hypothesis import Phase, given, settings
from placement import same_bits
from strategies import DTYPES, problems
from tangents import bound_second, cotangents_of, directions_of, ratios_of_second

from cupyflash import masks, scores
from cupyflash.gpu import second_route
from cupyflash.gpu.kernels import simt
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.problem.tangents import SecondTangents, Tangents
from cupyflash.testing import Directions, problem

# An example compiles its own kernels, so there are few, and none are shrunk.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def ratios(problem, emulator, directions, cotangents):
    out, lse = run_forward(problem, emulator)
    if not np.isfinite(out.astype(np.float32)).all():
        return {}
    ours = run_second(problem, emulator, directions, cotangents, (out, lse))
    bound = bound_second(problem, directions, cotangents, emulator.blocks.tensor)
    return ratios_of_second(bound, ours)


@pytest.mark.thorough("a search; one problem with all options is quick")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_derivatives_are_within_the_bound(dtype):
    @settings(max_examples=max(2, settings().max_examples // 5), phases=PHASES)
    @given(problems(dtype, packed=False))
    def check(problem):
        along = directions_of(problem), cotangents_of(problem)
        found = ratios(problem, emulator_of(problem), *along)
        assert max(found.values(), default=0) <= 1, found

    check()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_call_with_every_option_is_within_the_bound(dtype):
    made, directions, cotangents = every_option(dtype)
    assert all(x is not None for x in directions)
    found = ratios(made, Emulator(Blocks(16, 16), randomly(3)), directions, cotangents)
    assert len(found) == 7
    assert 0 < max(found.values()) <= 1, found


def every_option(dtype="float32"):
    made = problem(
        dtype, (2, 4, 37, 24), (2, 2, 45, 24), (1, 2, 45, 17), mask="window", seed=3,
        scores=("softcap",), bias="float16", sink="float32", dropout=0.2, tiles=(16, 16),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tdo = rng.standard_normal(made.do.shape).astype(made.dtype)
    tdlse = rng.standard_normal(made.do.shape[:-1]).astype(made.accumulator)
    return made, directions_of(made, missing=0), (tdo, tdlse)


@pytest.mark.parametrize(
    ("arch", "dtype", "d", "options", "kernels"),
    [
        ("sm_80", "float16", 128, {}, "sm80"),
        ("sm_90", "bfloat16", 40, {"mask": masks.causal(), "sink": np.ones(2, np.float32)}, "sm80"),
        ("sm_120", "float16", 128, {"dropout": 0.1, "seed": 1}, "sm80"),
        ("sm_90", "float16", 136, {}, "simt"),
        ("sm_90", "bfloat16", 64, {"score_mod": scores.softcap(2.0)}, "sm80"),
        ("sm_90", "float32", 64, {}, "simt"),
        ("sm_75", "float16", 64, {}, "simt"),
    ],
)
def test_which_kernels_serve(arch, dtype, d, options, kernels):
    q = np.zeros((2, 64, d), dtype)
    call = validate.call(q, q, q, Options(**options))
    steps = second_route.of_second(call, target_of(arch), deterministic=True).steps
    parts = "tangents", "tangent_dkdv", "tangent_dq"
    names = {step.part: step.kernel for step in steps if step.part in parts}
    stems = "forward_{}_tangent", "backward_{}_tangent_dkdv", "backward_{}_tangent_dq"
    assert list(names.values()) == [stem.format(kernels) for stem in stems]
    # In any order, the kernel of keys adds the tangent of dq in float32.
    steps = second_route.of_second(call, target_of(arch)).steps
    adds = [step.special.atomic_dq for step in steps if step.part in parts]
    assert adds == ([False, True] if dtype == "float32" else [False] * 3)


TENSOR = [
    (Blocks(16, 16), 24, 17), (Blocks(16, 32, 128), 40, 72), (Blocks(48, 16, 32), 128, 64),
]  # fmt: skip


@mostly_thorough(
    ("dtype", "blocks", "d", "d_v"),
    [(dtype, *more) for dtype in ("bfloat16", "float16") for more in TENSOR],
    quick=[("bfloat16", *TENSOR[0]), ("float16", *TENSOR[1])],
    why="kernels of their own",
)
def test_tensor_cores_are_within_the_bound(dtype, blocks, d, d_v):
    made = problem(
        dtype, (2, 4, 77, d), (2, 2, 85, d), (1, 2, 85, d_v), mask="window", seed=3,
        sink="float32", dropout=0.2, tiles=(16, 16),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tdo = rng.standard_normal(made.do.shape).astype(made.dtype)
    directions, emulator = directions_of(made, missing=0), Emulator(blocks, randomly(3))
    for cotangents in ((tdo, None), (None, None)):
        found = ratios(made, emulator, directions, cotangents)
        assert len(found) == 6
        assert 0 < max(found.values()) <= 1, found


@pytest.mark.thorough("kernels of their own, for what is rare")
def test_large_and_small_tangents_fit_float16():
    made = problem("float16", (1, 2, 40, 16), (1, 2, 50, 16), (1, 2, 50, 16), mask="causal", seed=1)
    emulator = Emulator(Blocks(16, 16))
    for factor in (2.0**-12, 2.0**9):
        tq, tk, tv = (x * factor if x is not None else x for x in directions_of(made, 0)[:3])
        tq, tk, tv = (x.astype(np.float16) for x in (tq, tk, tv))
        along = Directions(tq, tk, tv, None, None)
        found = ratios(made, emulator, along, (None, None))
        assert len(found) == 5
        assert 0 < max(found.values()) <= 1, (factor, found)


@pytest.mark.thorough("kernels of two forms; one problem with all options is quick")
def test_no_bit_depends_on_what_is_resident_or_on_the_order_of_blocks():
    made, *along = every_option()
    results = run_forward(made, Emulator(Blocks(16, 16)))

    def run(schedule):
        emulator = Emulator(Blocks(16, 16), schedule)
        return run_second(made, emulator, *along, results, deterministic=True)

    expected = run(FORWARD)
    again = run(REVERSE)
    with mock.patch.dict(simt.KERNELS, lean_kernels()):
        lean = run(FORWARD)
        # Keys that pass through the stage have their share of dq, too.
        found = ratios(made, Emulator(Blocks(16, 16), randomly(3)), *along)
    assert 0 < max(found.values()) <= 1, found
    for name, right in expected.items():
        assert same_bits(again[name], right), name
        assert same_bits(lean[name], right), name


def second(call, x, tangents, emulator):
    """Compute second derivatives of a call into NaN."""
    owners = (call.q, call.k, call.v, call.bias, call.sink)
    made = Gradients(*(None if y is None else np.full_like(y, np.nan) for y in owners))
    results = np.full_like(x["out"], np.nan), np.full_like(x["lse"], np.nan)
    emulator.backward_tangent(call, x, tangents, made, results)
    return *made, *results


@pytest.mark.thorough("kernels of two forms; one problem with all options is quick")
def test_packed_sequences_are_each_alone():
    rng = np.random.default_rng(9)
    ends_q, ends_k = [0, 7, 7, 40], [0, 9, 12, 55]
    q, tq, do, tdo = (rng.standard_normal((2, 40, 8)).astype(np.float32) for _ in range(4))
    k, v, tk, tv = (rng.standard_normal((1, 55, 8)).astype(np.float32) for _ in range(4))
    sink, tsink = rng.standard_normal((2, 2)).astype(np.float32)
    bias, tbias = rng.standard_normal((2, 3, 2, 33, 43)).astype(np.float32)
    how = {"mask": masks.causal(), "score_mod": scores.softcap(2.0), "sink": sink}
    emulator = Emulator(Blocks(16, 16))

    def of(rows, keys, call, bias):
        out, lse = np.zeros_like(do[:, rows]), np.zeros(do[:, rows].shape[:2], np.float32)
        emulator.forward(call, out, lse)
        x = {"do": do[:, rows], "out": out, "lse": lse, "dlse": lse + 1}
        along = Tangents(tq[:, rows], tk[:, keys], tv[:, keys], bias, tsink)
        return second(call, x, SecondTangents(along, tdo[:, rows], lse + 2), emulator)

    options = Options(**how, bias=bias)
    call = validate.varlen_call(q, k, v, ends_q, ends_k, check=True, options=options)
    dq, dk, dv, dbias, dsink, tout, tlse = of(slice(None), slice(None), call, tbias)
    total = np.zeros(2)
    for n in range(3):
        rows, keys = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
        own = slice(0, ends_q[n + 1] - ends_q[n]), slice(0, ends_k[n + 1] - ends_k[n])
        options = Options(**how, bias=bias[n][:, *own])
        call = validate.call(q[:, rows], k[:, keys], v[:, keys], options)
        one = of(rows, keys, call, tbias[n][:, *own])
        assert same_bits(dbias[n][:, *own], one[3])
        for ours, at, right in (
            (dq, rows, one[0]), (dk, keys, one[1]), (dv, keys, one[2]), (tout, rows, one[5]),
            (tlse, rows, one[6]),
        ):  # fmt: skip
            assert same_bits(ours[:, at], right)
        total += one[4]
    assert np.abs(dsink - total).max() < 4 * np.finfo(np.float32).eps * np.abs(total).max() * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.thorough("kernels of their own; of the forward, it is quick")
def test_keys_that_nobody_sees_change_no_bit(dtype):
    rng = np.random.default_rng(0)
    q, k, v, do, tq, tk, tv = rng.standard_normal((7, 1, 2, 40, 16)).astype(dtype)
    lse = rng.standard_normal((1, 2, 40)).astype(np.float32) + 3
    mask, emulator = masks.lengths([24]), Emulator(Blocks(16, 16))

    def run():
        call = validate.call(q, k, v, Options(mask=mask))
        x = {"do": do, "out": do, "lse": lse}
        return second(call, x, SecondTangents(Tangents(tq, tk, tv), do), emulator)

    expected = run()
    for hidden in (k, v, tk, tv):
        hidden[:, :, 24:] = np.nan
    for ours, right in zip(run(), expected, strict=True):
        assert ours is right is None or same_bits(ours, right)
    for zero in expected[1:3]:
        assert same_bits(zero[:, :, 24:], np.zeros_like(zero[:, :, 24:]))


@pytest.mark.thorough("kernels of their own; on a CPU, it is quick")
def test_rows_that_see_nothing_and_calls_without_entries_give_zeros():
    q = np.ones((2, 40, 16), np.float32)
    bad = np.full_like(q, np.nan)  # of rows without keys, it does not matter
    emulator = Emulator(Blocks(16, 16))
    call = validate.call(q, q, q, Options(mask=masks.lengths(0)))
    x = {"do": bad, "out": np.zeros_like(q), "lse": np.full((2, 40), -np.inf, np.float32)}
    moved = SecondTangents(Tangents(q, q, q), bad)
    for made in second(call, x, moved, emulator):
        assert made is None or same_bits(made, np.zeros_like(made))
    empty = np.ones((0, 2, 40, 16), np.float32)
    call = validate.call(empty, q, q, Options())
    x = {"do": empty, "out": empty, "lse": empty[..., 0]}
    moved = SecondTangents(Tangents(empty, q, q), None)
    for made in second(call, x, moved, emulator):
        assert made is None or same_bits(made, np.zeros_like(made))
