"""Results given back in the library that arrays came from, and arrays of little-known libraries."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupyflash import (
    ArgumentTypeError,
    Gradients,
    attention,
    attention_cached,
    attention_vjp,
    convert,
    quantize,
)

X = np.random.default_rng(0).standard_normal((2, 5, 8), np.float32)


class Marked(np.ndarray):
    """A subclass, as libraries of units and of metadata have them."""


def test_numpy_arrays_stay_as_they_are():
    out, vjp = attention_vjp(X, X, X)
    gradients = vjp(out)
    assert convert(out, like=X) is out
    found = convert(gradients, like=X)
    assert isinstance(found, Gradients)
    assert all(a is b for a, b in zip(found, gradients, strict=True))
    marked = X.view(Marked)
    result = attention(marked, marked, marked)
    assert type(result) is np.ndarray
    assert type(convert(result, like=marked)) is np.ndarray
    assert np.array_equal(result, out)


def test_what_is_no_array_is_refused():
    for wrong in (3, "numpy", [X], np):
        with pytest.raises(ArgumentTypeError, match=r"like: .*from_dlpack"):
            convert(X, like=wrong)


def test_a_strict_array_api():
    strict = pytest.importorskip("array_api_strict", reason="pip install array-api-strict")
    x = strict.asarray(X)
    out, lse = attention(x, x, x, return_lse=True)
    assert np.array_equal(out, attention(X, X, X))
    back = convert((out, lse), like=x)
    assert all(type(each) is type(x) for each in back)
    assert np.array_equal(np.from_dlpack(back[0]), out)
    with pytest.raises(ArgumentTypeError, match="does not take an array of bfloat16"):
        convert(out.astype(ml_dtypes.bfloat16), like=x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_tensors_share_the_memory(dtype):
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    array = X.astype(dtype)
    tensor = convert(array, like=torch.ones(1))
    assert str(tensor.dtype) == f"torch.{array.dtype.name}"
    tensor[0, 0, 0] = 42
    assert array[0, 0, 0] == 42
    assert np.array_equal(attention(tensor, tensor, tensor), attention(array, array, array))


FLOAT8 = "float8_e4m3fn", "float8_e5m2"


def check_codes(arrays, scales, like):
    """Codes of another library are those of NumPy, and go back in place."""
    options = {"q_scale": scales, "k_scale": scales, "v_scale": scales, "out_dtype": "float32"}
    taken = [convert(x, like=like) for x in arrays]
    assert [str(x.dtype).removeprefix("torch.") for x in taken] == [x.dtype.name for x in arrays]
    assert np.array_equal(attention(*taken, **options), attention(*arrays, **options))
    cached = attention_cached(X[:, :1, None], *(x[:, None] for x in taken[1:]), 5,
                              k_scale=scales[:, None], v_scale=scales[:, None])  # fmt: skip
    wanted = attention_cached(X[:, :1, None], *(x[:, None] for x in arrays[1:]), 5,
                              k_scale=scales[:, None], v_scale=scales[:, None])  # fmt: skip
    assert np.array_equal(cached, wanted)
    return taken


@pytest.mark.parametrize("dtype", FLOAT8)
def test_tensors_of_float8(dtype):
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    codes, scales = quantize(X, dtype)
    tensor, *_ = check_codes([codes.copy() for _ in range(3)], scales, torch.ones(1))
    assert torch.equal(tensor.float(), torch.from_numpy(codes.astype(np.float32)))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_arrays_of_jax_of_float8(dtype):
    jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')
    codes, scales = quantize(X, dtype)
    check_codes([codes, codes, codes], scales, jax.numpy.ones(1))


def test_arrays_of_jax():
    jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')
    x = jax.numpy.asarray(X)
    back = convert(attention(x, x, x), like=x)
    assert isinstance(back, jax.Array)
    assert np.array_equal(back, attention(X, X, X))
