"""Second derivatives of calls that have none are errors that name a remedy."""

import numpy as np
import pytest
from host_cupy import HostCupy, in_host

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, streamed


@pytest.fixture
def arrays():
    q = np.ones((2, 5, 4), np.float32)
    return q, *cupyflash.attention(q, q, q, return_lse=True)


def test_a_tangent_of_another_shape(arrays):
    q, out, lse = arrays
    with pytest.raises(ArgumentError, match=r"tdo: got shape .*those of do"):
        cupyflash.attention_backward_jvp(q, q, q, q, out, lse, tdo=q[:1])


def test_streamed_calls(arrays):
    q, *_ = arrays
    _, vjp = streamed.attention_vjp(q, q, q, chunk=4)
    with pytest.raises(ArgumentTypeError, match=r"by chunks or over ranks.*attention_vjp"):
        vjp.jvp(q, q)


def test_arrays_of_a_gpu(arrays, install):
    cupy = install(HostCupy())
    q, out, lse = map(cupy.asarray, arrays)
    with pytest.raises(ArgumentTypeError, match=r"Pass cupy\.asnumpy\(q\), and the other"):
        cupyflash.attention_backward_jvp(q, q, q, q, out, lse, q)
    q, out, lse = map(in_host, (q, out, lse))  # as cupy.asnumpy does
    assert cupyflash.attention_backward_jvp(q, q, q, q, out, lse, q).tout.shape == out.shape
