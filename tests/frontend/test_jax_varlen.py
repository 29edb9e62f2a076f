"""Packed calls in JAX: NumPy's bits and gradients, offsets known and traced, and refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, masks, scores

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import attention_varlen  # noqa: E402 (after the skip)

if jax.default_backend() != "cpu":
    pytest.skip("cupyflash.jax is for JAX's CPU", allow_module_level=True)

OFFSETS = np.array([0, 3, 3, 9], np.int32), np.array([0, 4, 5, 12], np.int32)


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("how", ["known", "jit", "traced"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_arrays_give_the_bits_of_numpy(dtype, how):
    q, k, v = draw(4, 9, 8, dtype=dtype), draw(2, 12, 8, dtype=dtype), draw(2, 12, 6, dtype=dtype)
    bias, sink = draw(3, 1, 6, 7), draw(4)
    options = {"mask": masks.causal(), "score_mod": scores.softcap(3.0), "dropout": 0.3, "seed": 7}

    def loss(arrays, offsets):
        q, k, v, bias, sink = arrays
        out, lse = attention_varlen(
            q, k, v, *offsets, bias=bias, sink=sink, return_lse=True, **options
        )
        return (3 * out.astype(jnp.float32)).sum() + (2 * lse).sum(), (out, lse)

    arrays = [q, k, v, bias, sink]
    function = jax.grad(loss, has_aux=True)
    given = list(map(jnp.asarray, arrays))
    if how == "traced":
        gradients, (out, lse) = jax.jit(function)(given, OFFSETS)
    elif how == "jit":
        gradients, (out, lse) = jax.jit(lambda given: function(given, OFFSETS))(given)
    else:
        gradients, (out, lse) = function(given, [list(map(int, each)) for each in OFFSETS])
    wanted, wanted_lse, vjp = cupyflash.attention_varlen_vjp(
        q, k, v, *OFFSETS, bias=bias, sink=sink, return_lse=True, **options
    )
    assert np.array_equal(out, wanted)
    assert np.array_equal(lse, wanted_lse)
    do = np.full(wanted.shape, 3, dtype)
    for found, wished in zip(gradients, vjp(do, np.full(lse.shape, 2, lse.dtype)), strict=True):
        assert found.dtype == wished.dtype
        assert np.array_equal(found, wished)


def test_traced_masks_and_keys():
    x, keep = draw(2, 9, 8), draw(3, 1, 6, 6) > -1
    offsets = OFFSETS[0]
    options = {"dropout": 0.5}
    found = jax.jit(
        lambda offsets, mask, seed: attention_varlen(
            x, x, x, offsets, offsets, mask=mask, seed=seed, **options
        )
    )(offsets, keep, jax.random.key(5))
    wanted = cupyflash.attention_varlen(x, x, x, offsets, offsets, mask=keep, seed=5, **options)
    assert np.array_equal(found, wanted)


def test_one_compiled_program_serves_all_offsets():
    x, traced = jnp.asarray(draw(2, 9, 8)), []

    @jax.jit
    def call(offsets):
        traced.append(offsets)
        return attention_varlen(x, x, x, offsets, offsets)

    for ends in ([0, 1, 9], [0, 4, 9], [0, 9, 9]):
        wanted = cupyflash.attention_varlen(*[np.asarray(x)] * 3, ends, ends)
        assert np.array_equal(call(jnp.array(ends)), wanted)
    assert len(traced) == 1


X = draw(2, 9, 8)
ENDS = [0, 4, 9]
REFUSED = {
    "four axes": (lambda: attention_varlen(X[None], X[None], X[None], ENDS, ENDS), "q: got shape"),
    "offsets": (lambda: attention_varlen(X, X, X, [0, 10], ENDS), "offsets_q: runs from 0 to 10"),
    "offsets of JAX": (
        lambda: attention_varlen(X, X, X, jnp.array([0, 5, 4, 9]), ENDS), "entry 2 is 4",
    ),
    "offsets as floats": (
        lambda: jax.jit(lambda ends: attention_varlen(X, X, X, ends, ends))(jnp.ones(3)),
        "offsets_q: .*float32",
    ),
    "numbers of sequences": (
        lambda: jax.jit(lambda a, b: attention_varlen(X, X, X, a, b))(
            jnp.array(ENDS), jnp.array([0, 9])
        ),
        "offsets_k: got 1 sequences",
    ),
    "one offset": (
        lambda: jax.jit(lambda a: attention_varlen(X, X, X, a, a))(jnp.int32(0)), "offsets_q: got",
    ),
    "a bias that no offsets fit": (
        lambda: jax.jit(lambda a: attention_varlen(X, X, X, a, a, bias=X[:, :3, :3]))(
            jnp.array(ENDS)
        ),
        "bias: got shape",
    ),
    "a mask that does not fit": (
        lambda: attention_varlen(X, X, X, ENDS, ENDS, mask=jnp.ones((3, 3), bool)), "mask: got",
    ),
    "an unknown option": (lambda: attention_varlen(X, X, X, ENDS, ENDS, cu_seqlens=1), "offsets_q"),
    "no array": (lambda: attention_varlen(3, X, X, ENDS, ENDS), r"q: got int.*jnp\.asarray"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    call, words = REFUSED[name]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        call()


@pytest.mark.parametrize(
    ("ends", "words"), [([0, 5, 4, 9], "entry 2 is 4"), ([0, 1, 2, 8], "runs from 0 to 8")]
)
def test_what_traced_offsets_hold_is_checked_when_the_program_runs(ends, words):
    call = jax.jit(lambda ends: attention_varlen(X, X, X, ends, ends))
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(call(jnp.array(ends)))
