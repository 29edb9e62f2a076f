"""The rowwise operations: every row of their table, on a CPU and on a CuPy in host memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from recognised import fields

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, Rotary, dispatch
from cupyflash.arrays import cuda_device, device_arrays
from cupyflash.gpu import params
from cupyflash.problem import cached
from cupyflash.rowwise import OPERATIONS

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def rotary(place):
    return Rotary(place(floats(20, 4)), place(floats(20, 4)))


def append(place):
    arrays = [place(floats(2, 3, rows, 16)) for rows in (1, 1, 20, 20)]
    more = {"q": place(floats(2, 6, 1, 16)), "rotary": rotary(place)}
    return cupyflash.append(*arrays, place(np.array([5, 9])), **more)


def combine(place, count=3):
    parts = [(place(floats(2, 4, 5, 16)), place(floats(2, 4, 5))) for _ in range(count)]
    return cupyflash.combine(parts)


# Operation -> a call of it, with new arrays each time.
CALLS = {
    "append": append,
    "rope": lambda place: cupyflash.rope(
        place(floats(2, 3, 5, 16)), place(np.arange(5)), rotary(place), inverse=True
    ),
    "quantize": lambda place: cupyflash.quantize(place(floats(2, 5, 64)), "int4", group=64),
    "hadamard": lambda place: cupyflash.hadamard(place(floats(2, 5, 96)), int(RNG.integers(99))),
    "combine": combine,
}
NAMES = [operation.name for operation in OPERATIONS]


def as_list(results):
    return list(results) if isinstance(results, tuple) else [results]


def test_every_row_is_a_public_function_and_has_a_call_here():
    assert len(set(NAMES)) == len(NAMES)
    assert set(NAMES) == set(CALLS)
    assert set(NAMES) <= set(cupyflash.__all__)
    assert set(NAMES) <= set(params.ROWWISE)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_alike_on_both_back_ends(cupy, name):
    ours, theirs = as_list(CALLS[name](np.asarray)), as_list(CALLS[name](cupy.asarray))
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        assert (x.shape, x.dtype, x.strides) == (y.shape, y.dtype, y.strides)
        assert np.isfinite(np.asarray(x, np.float32)).all()
    assert [launch.kernel.partition("__")[0] for launch in cupy.launches] == [name]


@pytest.fixture
def checked(monkeypatch):
    """Whatever calls that are not recognised ask for."""
    asked, real = [], dispatch.backend_of
    monkeypatch.setattr(dispatch, "backend_of", lambda x: asked.append(x) or real(x))
    return asked


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_look_alike_are_recognised(cupy, name, checked):
    CALLS[name](cupy.asarray)
    held = as_list(CALLS[name](cupy.asarray))
    assert len(checked) == 1
    first, second = cupy.launches
    assert first[:1] + first[2:6] == second[:1] + second[2:6]
    words = set(second.words.tolist())
    assert {x.data.ptr for x in held} <= words
    layout = params.rowwise(name)
    before, after = (fields(x, layout) for x in (first, second))
    # Only addresses differ, and a seed.
    for field in layout.dtype.names:
        if field != "seed":
            assert without_addresses(before[field]) == without_addresses(after[field]), field


def without_addresses(value):
    """Return the numbers of a field, of which those named data are addresses."""
    if value.dtype.names is None:
        return value.tolist()
    return [value[name].tolist() for name in value.dtype.names if name != "data"]


@pytest.mark.parametrize("name", NAMES)
def test_debugging_checks_every_call(cupy, name, monkeypatch, checked):
    monkeypatch.setattr(cached, "CHECKS_ALL", True)
    monkeypatch.setattr(device_arrays, "read_back", lambda x: x.get())
    for _ in range(2):
        CALLS[name](cupy.asarray)
    assert len(checked) == 2


def test_numbers_of_other_types_are_checked(cupy):
    x, positions, angles = cupy.asarray(floats(2, 3, 5, 16)), np.arange(5), rotary(cupy.asarray)
    positions = cupy.asarray(positions)
    cupyflash.rope(x, positions, angles, inverse=True)
    for wrong in (1, 1.0, "True"):
        with pytest.raises(ArgumentTypeError, match="inverse: got"):
            cupyflash.rope(x, positions, angles, inverse=wrong)
    cupyflash.quantize(x, "int4", group=16)
    with pytest.raises(ArgumentTypeError, match="group: got"):
        cupyflash.quantize(x, "int4", group=16.0)
    with pytest.raises(ArgumentError, match="group: got None"):
        cupyflash.quantize(x, "int4")
    for wrong in (None, [], [(x,)], [x.host], iter(())):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="combine: "):
            cupyflash.combine(wrong)


def test_many_parts_are_joined_by_several_launches(cupy, monkeypatch, checked):
    """What one of them leaves in scratch is the first part of the next one."""
    for _ in range(2):
        out, lse = combine(cupy.asarray, 40)
    assert len(checked) == 1
    launches = [fields(x, params.rowwise("combine")) for x in cupy.launches]
    assert [x["parts"] for x in launches] == [16, 16, 10] * 2
    for before, after in itertools.pairwise(launches[3:]):
        assert after["outs"][0]["data"] == before["out"]["data"] != 0
        assert after["lses"][0]["data"] == before["lse"]["data"] != 0
    addresses = launches[-1]["out"]["data"], launches[-1]["lse"]["data"]
    assert addresses == (out.data.ptr, lse.data.ptr)

    monkeypatch.setattr(cuda_device, "is_capturing", lambda: True)
    combine(cupy.asarray, 16)
    with pytest.raises(ArgumentError, match="combine: got arrays for 2 launches while"):
        combine(cupy.asarray, 17)


def test_values_in_the_keys_are_checked_again(cupy, checked):
    """Whether they lie there decides which columns are written."""
    k = cupy.asarray(np.zeros((2, 1, 20, 16), np.float32))
    k_new, lengths = cupy.asarray(floats(2, 1, 1, 16)), cupy.asarray(np.array([5, 9]))
    for _ in range(2):
        cupyflash.append(k_new, k_new[..., :8], k, k[..., :8], lengths)
    v, v_new = cupy.asarray(np.zeros((2, 1, 20, 16), np.float32))[..., :8], floats(2, 1, 1, 16)
    cupyflash.append(k_new, cupy.asarray(v_new)[..., :8], k, v, lengths)
    assert len(checked) == 3
    columns = [fields(x, params.rowwise("append"))["columns_v"] for x in cupy.launches]
    assert columns == [0, 0, 8]


def test_arrays_that_had_to_be_copied_are_copied_each_time(cupy, checked, monkeypatch):
    """Kernels read offsets as int64."""
    monkeypatch.setattr(
        device_arrays, "to_device", lambda x, dtype: cupy.asarray(x.host.astype(dtype))
    )
    arrays = [cupy.asarray(x) for x in (floats(3, 4, 16), floats(3, 4, 16))]
    arrays += [cupy.asarray(floats(2, 3, 20, 16)) for _ in range(2)]
    lengths = cupy.asarray(np.array([5, 9]))
    for dtype in (np.int32, np.int32, np.int64, np.int64):
        offsets = cupy.asarray(np.array([0, 1, 4], dtype))
        cupyflash.append(*arrays, lengths, offsets=offsets)
    assert len(checked) == 3
    places = [fields(x, params.rowwise("append"))["offsets"] for x in cupy.launches]
    assert places[3] == offsets.data.ptr
