"""Statistics of the weights of CuPy arrays, and their gradients: bounds, bits, memory."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_arrays import Copies
from placement import same_bits
from reductions_of import OTHERS, SUMS, call_of, given_of, ratios, ratios_of_gradients
from strategies import DTYPES

import cupyflash
from cupyflash import ArgumentError, masks, reductions, scores
from cupyflash.testing import problem

pytestmark = pytest.mark.gpu
FEW = {name: SUMS[name] for name in ("entropy", "mass", "own")}


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def in_host(found):
    """Return a result, or several, in host memory."""
    if isinstance(found, tuple):
        return type(found)(*map(in_host, found))
    return None if found is None else found.get()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients_are_within_the_bound(gpu, dtype):
    made = problem(
        dtype, (2, 6, 150, 40), (1, 3, 170, 40), (1, 3, 170, 8), mask="window", seed=3,
        scores=("softcap",), bias="float16", sink="float32",
    )  # fmt: skip
    q, k, options = call_of(made)
    copies = Copies(gpu)
    arrays, how = [copies.array(x) for x in (q, k)], copies.options(options)
    tensor_cores = dtype.itemsize == 2
    others = OTHERS if dtype == np.float32 else {}
    found = cupyflash.reduce(*arrays, others, **how) if others else {}
    found = {name: in_host(x) for name, x in found.items()}
    told, vjp = cupyflash.reduce_vjp(*arrays, SUMS, **how)
    found |= {name: x.get() for name, x in told.items()}
    worst = ratios(made, found, SUMS | others, tensor_cores)
    assert max(worst.values()) <= 1, worst
    told = given_of(made, {name: found[name] for name in SUMS})
    gradients = in_host(vjp({name: copies.array(x) for name, x in told.items()}))
    copies.check()
    worst = ratios_of_gradients(made, told, gradients, tensor_cores)
    assert set(worst) == {"dq", "dk", "dbias", "dsink"}
    assert 0 < min(worst.values()) <= max(worst.values()) <= 1, worst


def drawn(cupy, dtype, shape=(2, 4, 300, 64)):
    rng = np.random.default_rng(1)
    q, k = (cupy.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    how = {"mask": masks.causal(), "score_mod": scores.softcap(3.0)}
    how["bias"] = cupy.asarray(rng.standard_normal((shape[1], 1, shape[2])), dtype)
    how["sink"] = cupy.asarray(rng.standard_normal(shape[1]), np.float32)
    return q, k, how


def gradients_of(q, k, how, named=FEW):
    found, vjp = cupyflash.reduce_vjp(q, k, named, **how)
    return vjp({name: x * 0 + 0.5 for name, x in found.items()})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda x: x.__name__)
def test_gradients_have_the_same_bits_in_every_run_and_batch(cupy, dtype):
    q, k, how = drawn(cupy, dtype)
    first = gradients_of(q, k, how)
    for _ in range(3):
        for ours, other in zip(gradients_of(q, k, how), first, strict=True):
            assert same_bits(ours.get(), other.get())
    alone = gradients_of(q[1:], k[1:], how)
    for name in ("dq", "dk"):
        assert same_bits(getattr(alone, name).get(), getattr(first, name)[1:].get())
    # Keys that no query sees change no bit.
    how["mask"] = masks.causal() & masks.mask(lambda b, h, i, j: (j % 9 != 4) & (j < 250))
    first = gradients_of(q, k, how)
    hidden = k.copy()
    hidden[..., 4::9, :] = np.nan
    hidden[..., 250:, :] = np.inf
    for ours, other in zip(gradients_of(q, hidden, how), first, strict=True):
        assert same_bits(ours.get(), other.get())


def test_gradients_are_those_of_numpy_arrays(cupy):
    q, k, how = drawn(cupy, np.float64)
    ours = gradients_of(q, k, how, SUMS)
    there = how | {name: how[name].get() for name in ("bias", "sink")}
    for made, other in zip(ours, gradients_of(q.get(), k.get(), there, SUMS), strict=True):
        assert np.allclose(made.get(), other, rtol=1e-9, atol=1e-11)
    shared = how | {"bias": cupy.zeros((300, 300))}  # which heads and entries share
    full = how | {"bias": cupy.zeros((2, 4, 300, 300))}
    one, other = (gradients_of(q, k, x).dbias for x in (shared, full))
    assert np.allclose(one.get(), other.sum(axis=(0, 1)).get(), rtol=1e-9, atol=1e-11)


def test_memory_grows_with_the_length(cupy):
    most = []
    for length in (4096, 8192):
        q, k, how = drawn(cupy, np.float16, (1, 4, length, 64))
        gradients_of(q, k, how)  # kernels are loaded
        pool = cupy.get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.total_bytes()
        made = gradients_of(q, k, how)
        most.append(pool.total_bytes() - before)
        del made
    assert most[1] < 3 * most[0]
    assert most[1] < 4 * 8192 * 8192 / 4


def test_gradients_are_not_captured(cupy):
    q, k, how = drawn(cupy, np.float32)
    found, vjp = cupyflash.reduce_vjp(q, k, FEW, **how)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(ArgumentError, match="memory that the graph would not keep"):
            vjp(found)
        stream.end_capture()


def test_training_towards_more_even_weights(cupy):
    """Steps against the gradient of minus the entropy raise the entropy."""
    q, k, _ = drawn(cupy, np.float32, (1, 2, 128, 32))
    entropies = []
    for _ in range(5):
        found, vjp = cupyflash.reduce_vjp(q, k, {"h": reductions.entropy()})
        entropies.append(float(found["h"].sum()))
        dq, dk, _, _ = vjp({"h": cupy.ones_like(found["h"])})
        q, k = q + 0.5 * dq, k + 0.5 * dk
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 1
