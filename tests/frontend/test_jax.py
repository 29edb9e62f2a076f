"""Attention on JAX's arrays under jit, grad and vmap: the bits of arrays, gradients, refusals."""

from __future__ import annotations

import inspect
import typing

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, masks, scores

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

import cupyflash.jax  # noqa: E402 (after the skip)
from cupyflash.jax import (  # noqa: E402 (after the skip)
    Appended,
    append,
    attention,
    attention_cached,
    attention_varlen,
    compute,
    rope,
)

if jax.default_backend() != "cpu":
    pytest.skip("cupyflash.jax is for JAX's CPU", allow_module_level=True)

CAUSAL = masks.causal()


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def qkv(dtype=np.float32):
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)
    return [draw(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_arrays_give_the_bits_of_numpy(dtype, jit):
    bias, sink = draw(4, 5, 7), draw(4, dtype=dtype)
    options = {"mask": CAUSAL, "score_mod": scores.softcap(3.0), "dropout": 0.25, "seed": 7}

    def loss(q, k, v, bias, sink):
        out, lse = attention(q, k, v, bias=bias, sink=sink, return_lse=True, **options)
        return (3 * out.astype(jnp.float32)).sum() + (2 * lse).sum(), (out, lse)

    arrays = [*qkv(dtype), bias, sink]
    function = jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)
    gradients, (out, lse) = (jax.jit(function) if jit else function)(*map(jnp.asarray, arrays))
    options |= {"bias": bias, "sink": sink}
    wanted, wanted_lse, vjp = cupyflash.attention_vjp(*arrays[:3], return_lse=True, **options)
    assert np.array_equal(out, wanted)
    assert np.array_equal(lse, wanted_lse)
    do = np.full(wanted.shape, 3, dtype)
    for found, wished in zip(gradients, vjp(do, np.full(lse.shape, 2, lse.dtype)), strict=True):
        assert found.dtype == wished.dtype
        assert np.array_equal(found, wished)


def test_float64(monkeypatch):
    with jax.enable_x64(True):
        q, k, v = map(jnp.asarray, qkv(np.float64))
        out, lse = attention(q, k, v, return_lse=True)
        assert out.dtype == lse.dtype == np.float64


BATCHED = {
    "causal": {"mask": CAUSAL},
    "lengths": {"mask": masks.lengths([3, 5])},
    "b": {"mask": masks.mask(lambda b, h, i, j: (j + b) % 2 == 0)},
    "dropout": {"dropout": 0.5, "seed": 3},
    "sink": {"sink": draw(4)},
    "bias": {"bias": draw(5, 6)},
}


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_is_a_loop(name):
    q, k, v = draw(3, 2, 4, 5, 8), draw(2, 3, 2, 6, 8), draw(2, 6, 8)

    def loss(q, k, v):
        out = attention(q, k, v, **BATCHED[name])
        return (out * out).sum(), out

    function = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    found, out = jax.jit(jax.vmap(function, in_axes=(0, 1, None)))(q, k, v)
    for n in range(3):
        gradients, wanted = function(q[n], k[:, n], v)
        assert np.array_equal(out[n], wanted)
        for a, b in zip(found, gradients, strict=True):
            np.testing.assert_allclose(a[n], b, rtol=1e-5, atol=1e-5)


def test_what_is_traced_beside_q_k_and_v():
    x = draw(1, 2, 4, 8)
    dense = np.arange(16).reshape(4, 4) % 3 != 1
    call = jax.jit(lambda seed, mask: attention(x, x, x, dropout=0.5, seed=seed, mask=mask))
    wanted = cupyflash.attention(x, x, x, dropout=0.5, seed=9, mask=dense)
    assert np.array_equal(call(9, dense), wanted)
    gradient = jax.grad(
        lambda x, seed, mask: attention(x, x, x, dropout=0.5, seed=seed, mask=mask).sum()
    )
    assert gradient(jnp.asarray(x), jnp.int32(9), jnp.asarray(dense)).shape == x.shape


def test_matrices():
    x = draw(5, 8)
    out, lse = attention(x, x, x, return_lse=True)
    assert (out.shape, lse.shape) == ((5, 8), (5,))
    found = jax.vmap(lambda x: attention(x, x, x))(draw(3, 5, 8))
    each = [cupyflash.attention(y, y, y) for y in draw(3, 5, 8)]
    assert np.array_equal(found, each)


@pytest.mark.thorough("large arrays, for which a callback could wait for itself")
def test_large_arrays_do_not_wait_for_themselves():
    x = jnp.asarray(draw(1, 8, 1024, 64))
    loss = jax.jit(jax.grad(lambda x: (attention(x * 2, x, x, mask=CAUSAL) * 3).sum()))
    assert loss(x).block_until_ready().shape == x.shape


X = draw(2, 4, 8)
REFUSED = {
    "another shape": (lambda: attention(X, X[..., :2], X), "k: .*2 is not 8"),
    "the same, traced": (lambda: jax.jit(attention)(X, X[..., :2], X), "k: .*2 is not 8"),
    "a number": (lambda: attention(3, X, X), r"q: got int.*jnp\.asarray"),
    "integers": (lambda: attention(X, X, X.astype(np.int32)), "v: got dtype int32"),
    "two dtypes": (lambda: attention(X, X, X.astype(np.float16)), "expected one dtype"),
    "a mask of floats": (lambda: attention(X, X, X, mask=jnp.ones(4)), "mask: .*bias="),
    "no seed": (lambda: attention(X, X, X, dropout=0.5), "dropout: .*seed=number"),
    "an unknown option": (lambda: attention(X, X, X, bais=1), "did you mean bias"),
    "a mask of another shape, traced": (
        lambda: jax.jit(lambda m: attention(X, X, X, mask=m))(np.ones((3, 4, 4), bool)),
        r"mask: got an array of shape \(3, 4, 4\); expected one that broadcasts to \(2, 4, 4\)",
    ),
    "other lengths": (
        lambda: jax.jit(lambda x: attention(x, x, x, mask=masks.lengths([1, 2, 3])))(X[None]),
        "k_lengths: got an array of shape",
    ),
    "traced lengths": (
        lambda: jax.jit(lambda n: attention(X, X, X, mask=masks.lengths(n)))(np.array([1])),
        "k_lengths: got .*traced.*outside of the function",
    ),
    "a masked array": (lambda: attention(np.ma.array(X), X, X), "q: got a masked array"),
    "a traced scale": (
        lambda: jax.jit(lambda s: attention(X, X, X, scale=s))(0.5),
        "scale: .*static_argnames",
    ),
    "a traced dropout": (
        lambda: jax.jit(lambda p: attention(X, X, X, dropout=p, seed=1))(0.5),
        "dropout: .*static",
    ),
    "return_lse": (lambda: attention(X, X, X, return_lse=1), "return_lse: got 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_remedy(name):
    call, words = REFUSED[name]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        call()


def test_numbers_of_jax_are_numbers():
    """The remedies for a traced scale work, and a constant needs none."""
    wanted = attention(X, X, X, scale=0.5)
    assert np.array_equal(attention(X, X, X, scale=jnp.float32(0.5)), wanted)
    static = jax.jit(lambda s: attention(X, X, X, scale=s), static_argnames="s")
    assert np.array_equal(static(0.5), wanted)
    moved = jax.jit(lambda s: attention(s * X, X, X, scale=1))(0.5)
    np.testing.assert_allclose(moved, wanted, rtol=1e-6)


def test_nothing_is_compiled_where_nothing_is_traced(caplog):
    x = jnp.asarray(X)
    attention(x, x, x)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        attention(x, x, x)
    assert not [r for r in caplog.records if "callback" in r.getMessage()]


def test_a_symbolic_length_is_refused_and_the_remedy_exports():
    import jax.export

    (length,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((1, 2, length, 8), np.float32)
    with pytest.raises(ArgumentError, match=r"q: .*symbolic.*jax\.nn\.dot_product_attention"):
        jax.export.export(jax.jit(lambda x: attention(x, x, x)))(shape)
    with pytest.raises(RuntimeError, match="host_callbacks"):  # with numbers: JAX's error
        jax.export.export(jax.jit(lambda x: attention(x, x, x)))(jnp.asarray(X))
    other = jax.ShapeDtypeStruct((1, length, 2, 8), np.float32)
    remedy = jax.export.export(jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x)))(other)
    x = jnp.asarray(draw(1, 5, 2, 8))
    wanted = attention(*[x.swapaxes(1, 2)] * 3).swapaxes(1, 2)
    np.testing.assert_allclose(remedy.call(x), wanted, rtol=1e-5, atol=1e-6)


def test_public_names():
    """They are functions of this package with documentation, and nothing else is shown."""
    named = {"Appended", "append", "attention", "attention_cached", "attention_varlen", "rope"}
    assert set(cupyflash.jax.__all__) == set(dir(cupyflash.jax)) == named
    for name in named:
        text = getattr(cupyflash.jax, name).__doc__
        for heading in (
            ("Attributes",) if name == "Appended" else ("Parameters", "Returns", "Raises")
        ):
            assert f"{heading}\n" in text, name
        if name not in ("Appended", "append"):
            options = inspect.signature(getattr(cupyflash.jax, name)).parameters
            core = inspect.signature(getattr(cupyflash, name)).parameters
            assert [n for n in core if n in options] == list(options), "the same order"
            assert all(options[n].default == core[n].default for n in options)


def test_results_have_types():
    """Type checkers read these; `return_lse` chooses among them."""
    for function in (attention, attention_varlen, attention_cached):
        of_calls = [
            typing.get_type_hints(each)["return"] for each in typing.get_overloads(function)
        ]
        assert of_calls[:2] == [jax.Array, tuple[jax.Array, jax.Array]]
    assert typing.get_type_hints(rope)["return"] is jax.Array
    assert set(typing.get_type_hints(Appended).values()) == {jax.Array, jax.Array | None}
    assert typing.get_type_hints(append)["return"] is Appended


@pytest.mark.parametrize("jit", [False, True])
def test_a_bias_whose_gradient_nobody_wants_costs_none(jit, monkeypatch):
    q, bias = draw(1, 2, 5, 8), draw(2, 5, 5)
    asked = []

    def backward(*args, **options):
        asked.append(options.get("bias_gradient", True))
        return cupyflash.attention_backward(*args, **options)

    monkeypatch.setattr(compute, "DENSE", compute.DENSE._replace(backward=backward))

    def loss(q, bias):
        return (attention(q, q, q, bias=bias) ** 2).sum()

    one, both = jax.grad(loss), jax.grad(loss, (0, 1))
    if jit:
        one, both = jax.jit(one), jax.jit(both)
    wanted, dbias = both(q, bias)
    assert jnp.abs(dbias).max() > 0
    assert (one(q, bias) == wanted).all()
    assert asked == [True, False]
    mapped = jax.vmap(jax.grad(loss), (None, 0))(q, jnp.stack([bias, bias]))
    assert jnp.allclose(mapped, wanted, atol=1e-5)
