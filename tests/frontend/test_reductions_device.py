"""Reductions of CuPy arrays: which kernels are launched, and what is refused."""

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, masks, reductions
from cupyflash.arrays import cuda_device

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


def test_gradients_are_those_of_a_backward_and_of_a_bias(cupy):
    q, k = drawn(cupy)
    bias = cupy.asarray(np.zeros((40, 40), np.float32))
    named, given = {"m": LAST}, {"m": cupy.asarray(np.ones((2, 4, 40), np.float32))}
    vjp = cupyflash.reduce_vjp(q, k, named, bias=bias, mask=masks.causal())[1]
    both = ["backward_delta", "backward_simt_dkdv", "backward_simt_dq"]
    for of_bias, more in ((True, ["backward_lookup"]), (False, [])):
        cupy.launches.clear()
        made = vjp(given, bias_gradient=of_bias)
        kernels = [x.kernel.split("__")[0] for x in cupy.launches]
        assert kernels == ["reduce_keys", *both, *more]
        assert isinstance(made.dq, cupy.ndarray)
        assert (made.dq.shape, made.dk.shape, made.dsink) == (q.shape, k.shape, None)
        assert (made.dbias is None) != of_bias
    assert cupyflash.reduce_vjp(q, k, named)[1](given).dbias is None
    with pytest.raises(ArgumentTypeError, match=r"gradients: 'm': .*cupy\.asarray"):
        vjp({"m": np.ones((2, 4, 40), np.float32)})
    lse = np.zeros((2, 4, 40), np.float32)
    with pytest.raises(ArgumentTypeError, match=r"lse: .*cupy\.asarray"):
        cupyflash.reduce(q, k, named, lse=lse)
    with pytest.raises(ArgumentTypeError, match=r"k: got an array in host memory.*cupy\.asarray"):
        cupyflash.reduce_vjp(q, k.get(), named)


def test_gradients_are_not_captured(cupy, monkeypatch):
    q, k = drawn(cupy)
    vjp = cupyflash.reduce_vjp(q, k, {"m": LAST})[1]
    monkeypatch.setattr(cuda_device, "is_capturing", lambda: True)
    cupy.launches.clear()
    with pytest.raises(ArgumentError, match="memory that the graph would not keep"):
        vjp({"m": cupy.asarray(np.ones((2, 4, 40), np.float32))})
    assert not cupy.launches
