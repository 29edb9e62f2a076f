"""Reductions of CuPy arrays: which kernels are launched, and what is refused."""

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentTypeError, masks, reductions

LAST = reductions.mass(queries=slice(-8, None))


def drawn(cupy):
    arrays = np.random.default_rng(0).standard_normal((2, 2, 4, 40, 16), dtype=np.float32)
    return map(cupy.asarray, arrays)


def test_a_forward_comes_first_where_the_log_sum_exp_is_not_given(cupy):
    q, k = drawn(cupy)
    lse = cupyflash.attention(q, k, k, return_lse=True)[1]
    for given, forwards in ((lse, 0), (None, 1)):
        cupy.launches.clear()
        mass = cupyflash.reduce(q, k, {"m": LAST}, lse=given, mask=masks.causal())["m"]
        assert mass.shape == (2, 4, 40)
        kernels = [x.kernel.split("__")[0] for x in cupy.launches]
        assert kernels == ["forward_simt"] * forwards + ["reduce_blocks"]
    cupy.launches.clear()
    cupyflash.reduce(q, k, {"m": reductions.max_logit()})  # which needs none
    assert [x.kernel.split("__")[0] for x in cupy.launches] == ["reduce_keys"]


def test_arrays_of_expressions_are_where_the_call_is(cupy):
    q, k = drawn(cupy)
    weights = np.ones((4, 40), np.float32)
    with pytest.raises(ArgumentTypeError, match=r"reductions: 'm': .*cupy\.asarray"):
        cupyflash.reduce(q, k, {"m": reductions.mass(weights)})
    made = {"m": reductions.mass(cupy.asarray(weights))}
    assert cupyflash.reduce(q, k, made)["m"].shape == (2, 4, 40)


def test_statistics_beside_the_output_read_its_log_sum_exp(cupy):
    q, k = drawn(cupy)
    named = {"m": LAST, "e": reductions.entropy()}
    options = {"mask": masks.causal()}
    out, found = cupyflash.attention(q, k, k, reductions=named, **options)
    kernels = [x.kernel.split("__")[0] for x in cupy.launches]
    assert kernels == ["forward_simt", "reduce_blocks", "reduce_keys"]
    assert out.shape == q.shape
    assert {name: x.shape for name, x in found.items()} == {"m": (2, 4, 40), "e": (2, 4, 40)}
