"""Second derivatives of calls that have none are errors that name a remedy."""

import numpy as np
import pytest
from host_cupy import HostCupy

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, streamed
from cupyflash.arrays import cuda_device
from cupyflash.gpu import second_route
from cupyflash.problem import validate


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


def test_arrays_of_two_places(arrays, install):
    cupy = install(HostCupy())
    q, out, lse = map(cupy.asarray, arrays)
    with pytest.raises(
        ArgumentTypeError, match=r"tq: got an array in host memory, but q is in the memory"
    ):
        cupyflash.attention_backward_jvp(q, q, q, q, out, lse, arrays[0])


def test_a_workspace_that_is_too_small(arrays, install):
    cupy = install(HostCupy())
    q, out, lse = map(cupy.asarray, arrays)
    size = cupyflash.workspace_size(q, q, q, second=True)
    assert size > 0
    given = q, q, q, q, out, lse, q
    for n in range(2):  # checked, and recognised
        workspace = cupy.asarray(np.zeros(size, np.uint8))
        made = cupyflash.attention_backward_jvp(*given, workspace=workspace)
        assert made.tout.shape == out.shape, n
    with pytest.raises(ArgumentError, match=rf"got {size - 1} bytes; expected .* second=True"):
        cupyflash.attention_backward_jvp(*given, workspace=workspace[1:])
    assert cupyflash.workspace_size(*arrays[:1] * 3, second=True) == 0
    with pytest.raises(ArgumentTypeError, match="second: got 1; expected True or False"):
        cupyflash.workspace_size(q, q, q, second=1)


def test_memory_of_second_derivatives_grows_with_the_length(install):
    cupy = install(HostCupy())
    sizes = []
    for length in (1000, 2000, 4000):
        q = cupy.asarray(np.zeros((1, 2, length, 8), np.float16))
        sizes.append(cupyflash.workspace_size(q, q, q, second=True))
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def test_the_route_says_what_runs(arrays, install):
    cupy = install(HostCupy())
    q, out, lse = map(cupy.asarray, arrays)
    cupyflash.attention_backward_jvp(q, q, q, q, out, lse, q, q, q, tdo=q)
    made = second_route.of_second(validate.call(q, q, q), cuda_device.of(0))
    assert [x.kernel for x in cupy.launches] == [x.special.name for x in made.steps]
    assert made.scratch <= cupyflash.workspace_size(q, q, q, second=True)
