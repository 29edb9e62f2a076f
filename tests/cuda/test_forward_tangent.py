"""The kernel of forward mode, on the emulator: bounds, and when it is chosen."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import build
from emulator.problems import emulator_of, run_tangent
from halves import mostly_thorough
from hypothesis import Phase, given, settings
from strategies import DTYPES, problems
from tangents import directions_of, jvp_ratios

# An example compiles its own kernel, so there are few, and none are shrunk.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


@mostly_thorough("dtype", DTYPES, quick=[np.dtype(np.float32)], why="the same kernel", ids=str)
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
