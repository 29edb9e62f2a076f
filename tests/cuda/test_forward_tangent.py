"""The kernel of forward mode, on the emulator: bounds, and when it is chosen."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import build
from emulator.calls import Blocks, Emulator
from emulator.machine import randomly
from emulator.problems import emulator_of, run_tangent
from hypothesis import Phase, given, settings
from placement import same_bits
from strategies import DTYPES, problems
from tangents import directions_of, jvp_ratios

from cupyflash import masks
from cupyflash.problem import validate
from cupyflash.problem.options import Options
from cupyflash.problem.tangents import Tangents
from cupyflash.testing import problem

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
        results = run_tangent(problem, emulator_of(problem), directions)
        ratios = jvp_ratios(problem, directions, results)
        assert max(ratios.values()) <= 1, ratios

    check()


def test_a_call_with_every_option_is_within_the_bound():
    made = problem(
        "float32", (2, 4, 37, 24), (2, 2, 45, 24), (2, 2, 45, 17), mask="window", seed=3,
        scores=("softcap",), bias="float16", sink="float32", dropout=0.2, tiles=(16, 16),
    )  # fmt: skip
    direction = directions_of(made, missing=0)
    assert all(x is not None for x in direction)
    results = run_tangent(made, Emulator(Blocks(16, 16), randomly(3)), direction)
    ratios = jvp_ratios(made, direction, results)
    assert 0 < max(ratios.values()) <= 1, ratios


def test_keys_that_nobody_sees_change_no_bit():
    rng = np.random.default_rng(0)
    q, k, v, tq, tk, tv = rng.standard_normal((6, 1, 2, 40, 16)).astype(np.float32)
    mask, emulator = masks.lengths([24]), Emulator(Blocks(16, 16))

    def run():
        call = validate.call(q, k, v, Options(mask=mask))
        out, tout = np.full((2, *q.shape), np.nan, np.float32)
        lse, tlse = np.full((2, *q.shape[:-1]), np.nan, np.float32)
        emulator.forward_tangent(call, Tangents(tq, tk, tv), (out, tout, lse, tlse))
        return out, tout, lse, tlse

    expected = run()
    for hidden in (k, v, tk, tv):
        hidden[:, :, 24:] = np.nan
    for ours, right in zip(run(), expected, strict=True):
        assert same_bits(ours, right)
