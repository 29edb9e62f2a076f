"""CuPy arrays: forward mode, within the bounds of the CPU's property tests."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from gpu_calls import precision_of, run_jvp, tensor_cores
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, problems
from tangents import NAMES, directions_of, jvp_ratios

import cupyflash
from cupyflash import masks
from cupyflash.testing import Directions, jvp_bound, rho

pytestmark = pytest.mark.gpu

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_results_and_tangents_are_within_the_bound(gpu, dtype, packed, data):
    problem = data.draw(problems(dtype, packed=packed))
    directions = directions_of(problem)
    results = run_jvp(problem, gpu, directions)
    # The bound grows a little with the number of key tiles; no kernel has smaller ones.
    problem = dataclasses.replace(problem, tiles=(8, 8))
    ratios = jvp_ratios(problem, directions, results, tensor_cores(dtype))
    assert max(ratios.values()) <= 1, ratios


# Each way in which warps have rows, and tiles that are not whole.
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (136, 72), (40, 104)], ids=str)
def test_long_rows_on_tensor_cores(gpu, dtype, sizes):
    d, d_v = sizes
    rng = np.random.default_rng(0)
    shapes = (4, 530, d), (2, 700, d), (2, 700, d_v)
    host = [rng.standard_normal(shape).astype(dtype) for shape in shapes * 2]
    import cupy

    arrays = [cupy.asarray(x) for x in host]
    cores = tensor_cores(dtype)
    kernel = "forward_sm80_tangent" if cores else "forward_simt_tangent"
    if cupy.cuda.Device().compute_capability == "90" and max(sizes) <= 128:
        kernel = "forward_sm90_tangent"
    for options in ({}, {"mask": masks.causal()}, {"dropout": 0.2, "seed": 1}):
        assert cupyflash.plan(*arrays[:3], tangents=True, **options).kernel == kernel
        runs = [cupyflash.attention_jvp(*arrays, return_lse=True, **options) for _ in range(3)]
        bound = jvp_bound(
            *host[:3], Directions(*host[3:], None, None), block_kv=16,
            precision=precision_of(dtype), **options,
        )  # fmt: skip
        for name, x, *again in zip(NAMES, *runs, strict=True):
            assert rho(x.get(), *getattr(bound, name)).value <= 1, name
            for other in again:  # recognised calls
                assert other.get().tobytes() == x.get().tobytes(), name
