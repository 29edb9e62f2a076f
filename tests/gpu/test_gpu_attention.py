"""CuPy arrays: the CPU's property tests, on the GPU, within the same rounding-error bound."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gpu_calls import run_backward, run_forward, tensor_cores
from harness import backward_ratios, forward_ratios
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, problems

pytestmark = pytest.mark.gpu


# Types, and what is asked for of them.
KINDS = [*((dtype, None) for dtype in DTYPES), (np.dtype(np.float32), "tf32x3")]
EACH_KIND = pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)


def drawn(data, dtype, packed, precision):
    problem = data.draw(problems(dtype, packed=packed))
    if precision is None:
        return problem
    assume(max(problem.q.shape[-1], problem.v.shape[-1]) <= 256)
    return dataclasses.replace(problem, options=problem.options | {"precision": precision})


def for_bounds(problem):
    # The bound grows a little with the number of key tiles; no kernel has smaller ones.
    return dataclasses.replace(problem, tiles=(8, 8))


@EACH_KIND
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_forward_is_within_the_bound(gpu, dtype, precision, packed, data):
    problem = drawn(data, dtype, packed, precision)
    out, lse = run_forward(problem, gpu)
    ratios = forward_ratios(for_bounds(problem), out, lse, tensor_cores(dtype))
    for name, ratio in ratios.items():
        assert ratio <= 1, name


@EACH_KIND
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_gradients_are_within_the_bound(gpu, dtype, precision, packed, data):
    problem = drawn(data, dtype, packed, precision)
    out, lse = run_forward(problem, gpu)
    assume(np.isfinite(out).all())  # the backward reads what float16 made of O
    gradients = run_backward(problem, gpu, out, lse)
    ratios = backward_ratios(for_bounds(problem), gradients, tensor_cores(dtype))
    for name, ratio in ratios.items():
        assert ratio <= 1, name


@settings(suppress_health_check=list(HealthCheck), max_examples=10)
@given(data=st.data())
def test_two_runs_are_bitwise_equal(gpu, data):
    dtype, precision = data.draw(st.sampled_from(KINDS))
    problem = drawn(data, dtype, False, precision)
    first, second = (run_forward(problem, gpu) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.tobytes() == b.tobytes()
    one, two = (run_backward(problem, gpu, *first, deterministic=True) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a.tobytes() == b.tobytes()
