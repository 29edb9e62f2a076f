"""Seeds of dropout in JAX: numbers, arrays and keys of jax.random, traced, mapped and refused."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentTypeError

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import attention  # noqa: E402 (after the skip)

if jax.default_backend() != "cpu":
    pytest.skip("cupyflash.jax is for JAX's CPU", allow_module_level=True)

X = np.random.default_rng(0).standard_normal((2, 2, 9, 8)).astype(np.float32)


def dropped(seed):
    return attention(X, X, X, dropout=0.4, seed=seed)


def of_number(seed):
    return cupyflash.attention(X, X, X, dropout=0.4, seed=seed)


SEEDS = {
    "a key": (lambda: jax.random.key(7), 7),
    "an old key": (lambda: jax.random.PRNGKey(7), 7),
    "an old key of NumPy": (lambda: np.array([3, 7], np.uint32), 3 << 32 | 7),
    "a number": (lambda: 2**64 - 1, 2**64 - 1),
    "a number of NumPy": (lambda: np.uint64(2**63), 2**63),
    "an array": (lambda: jnp.uint32(2**32 - 1), 2**32 - 1),
    "a negative array": (lambda: jnp.int8(-3), 2**64 - 3),
}


@pytest.mark.parametrize("name", SEEDS)
def test_what_number_a_seed_is(name):
    make, number = SEEDS[name]
    wanted = of_number(number)
    assert np.array_equal(dropped(make()), wanted)
    assert np.array_equal(jax.jit(lambda: dropped(make()))(), wanted)
    if not isinstance(make(), (int, np.integer)):
        assert np.array_equal(jax.jit(dropped)(make()), wanted)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_differ(kind):
    """Keys of all generators, and those split from them, drop pairs of their own."""
    key = jax.random.key(3, impl=kind)
    keys = [
        key,
        *jax.random.split(key, 3),
        jax.random.fold_in(key, 99),
        jax.random.key(4, impl=kind),
    ]
    results = [np.asarray(dropped(each)) for each in keys]
    for n, one in enumerate(results):
        assert np.array_equal(jax.jit(dropped)(keys[n]), one)
        assert np.array_equal(dropped(jax.random.key_data(keys[n])), one)
        assert not any(np.array_equal(one, other) for other in results[:n])


@pytest.mark.parametrize("new", [False, True])
def test_each_call_of_vmap_has_its_own_key(new):
    key = jax.random.key(0) if new else jax.random.PRNGKey(0)
    keys = jax.random.split(key, 3)
    function = jax.grad(lambda x, key: (attention(x, x, x, dropout=0.4, seed=key) * x).sum())
    x = jnp.asarray(X)
    found = jax.jit(jax.vmap(function, in_axes=(None, 0)))(x, keys)
    for n in range(3):
        np.testing.assert_allclose(found[n], function(x, keys[n]), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(found[0], found[1])


def test_a_seed_that_is_mapped_without_dropout():
    x = jnp.asarray(X)
    found = jax.vmap(lambda seed: attention(x, x, x, seed=seed))(jnp.arange(3))
    assert np.array_equal(found, [attention(x, x, x)] * 3)


REFUSED = {  # with the code of the remedy
    "a float": (3.7, "int(seed)"),
    "a Boolean": (True, "int(seed)"),
    "a float array": (jnp.float32(3.7), "seed.astype('uint32')"),
    "a Boolean array": (jnp.bool_(True), "seed.astype('uint32')"),
    "a float of NumPy": (np.float64(2.5), "int(seed)"),
    "an array of NumPy": (np.array(2.5), "seed.astype('uint32')"),
    "several keys": (jax.random.split(jax.random.key(0), 3), "seed[0]"),
    "several old keys": (jax.random.split(jax.random.PRNGKey(0), 3), "seed[0]"),
    "several numbers": (jnp.arange(3), "seed[0]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_traced_with_a_remedy_that_works(name):
    seed, words = REFUSED[name]
    with pytest.raises(ArgumentTypeError, match=r"seed: got .*jax\.random\.key") as caught:
        dropped(seed)
    assert words in str(caught.value)
    dropped(eval(words, {}, {"seed": seed}))
    if isinstance(seed, (jax.Array, float, bool)):
        with pytest.raises(ArgumentTypeError, match="seed: got"):
            jax.eval_shape(dropped, seed)


def test_other_seeds():
    with pytest.raises(ArgumentTypeError, match="seed: got str"):
        dropped("7")
    with pytest.raises(cupyflash.ArgumentError, match="seed: got -1"):
        dropped(-1)
