"""The code that errors about JAX arrays tell users to write works as it is written."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cupyflash

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402

from cupyflash.jax import attention  # noqa: E402

X = jnp.linspace(-1, 1, 64).reshape(1, 2, 4, 8)


def dropped(seed):
    return attention(X, X, X, dropout=0.5, seed=seed)


def keywords(code, **names):
    return eval(f"dict({code})", names)


CASES = {
    "additive mask": (
        lambda: attention(X, X, X, mask=jnp.zeros((4, 4))),
        r"bias=",
        lambda code: attention(X, X, X, **{code[:-1]: jnp.zeros((4, 4))}),
    ),
    "traced scale": (
        lambda: jax.jit(lambda scale: attention(X, X, X, scale=scale))(0.5),
        r"jax\.jit\(function, static_argnames=.*?\)",
        lambda code: eval(
            code, {"jax": jax, "function": lambda scale: attention(X, X, X, scale=scale)}
        )(0.5),
    ),
    "no array": (
        lambda: attention([[1.0] * 8], X[0, 0], X[0, 0]),
        r"jnp\.asarray",
        lambda code: attention(eval(code, {"jnp": jnp})([[1.0] * 8]), X[0, 0], X[0, 0]),
    ),
    "seed that is a float": (
        lambda: dropped(3.0),
        r"seed=int\(seed\)",
        lambda code: dropped(**keywords(code, seed=3.0)),
    ),
    "seed that is an array of floats": (
        lambda: dropped(jnp.float32(3)),
        r"seed=seed\.astype\('uint32'\)",
        lambda code: dropped(**keywords(code, seed=jnp.float32(3))),
    ),
    "several seeds": (
        lambda: dropped(jnp.arange(2)),
        r"seed=seed\[0\]",
        lambda code: dropped(**keywords(code, seed=jnp.arange(2))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_remedy_of_an_error_works_as_it_is_written(case):
    fails, words, remedy = CASES[case]
    with pytest.raises((cupyflash.ArgumentError, cupyflash.ArgumentTypeError)) as failure:
        fails()
    code = re.search(words, str(failure.value))
    assert code, f"the message does not say {words}: {failure.value}"
    assert np.isfinite(remedy(code[0])).all()
