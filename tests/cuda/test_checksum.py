"""Sums that tell whether arrays have changed, on the emulator: the numbers of the CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import build
from emulator.calls import Emulator
from emulator.machine import randomly
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.gpu import checksum_launches, launch
from cupyflash.gpu.params import MAX_SUMMED, MAX_SUMS
from cupyflash.gpu.writer import Recipe
from cupyflash.reference.cpu.checksum import checksums

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.float64, np.bool_, np.int32, np.uint8]
GUARD = 16  # bytes around an array


def run(launches, addresses, seed=0):
    def work():
        launch.compiled_recipe(Recipe(tuple(launches)), 0).forward(dict(addresses))

    Emulator(schedule=randomly(seed))._run(work)


def there(arrays, seed=0):
    """Return the sums of arrays, by the emulator."""
    named = {f"x{n}": x for n, x in enumerate(arrays)}
    words = np.zeros(min(len(arrays), MAX_SUMS), np.uint64)
    places = {name: x.ctypes.data for name, x in named.items()} | {"sums": words.ctypes.data}
    run(checksum_launches.sums(named), places, seed)
    return [int(x) for x in words]


def here(arrays):
    return [x % 2**64 for x in checksums(arrays)]


@st.composite
def placed(draw):
    """Draw an array with any strides, which begins anywhere."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    if shape and draw(st.booleans()):
        shape[-1] *= 16
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gaps = [n + draw(st.sampled_from([0, 0, 1, 5])) for n in shape]
    size = int(np.prod(gaps)) * dtype.itemsize
    begin = draw(st.integers(0, 2)) * draw(st.sampled_from([1, 4, 16]))
    memory = np.frombuffer(rng.bytes(size + begin + GUARD), np.uint8)
    array = memory[begin : begin + size].view(dtype).reshape(gaps)
    for axis, n in enumerate(shape):
        array = array[(slice(None),) * axis + (slice(n),)]
        if draw(st.integers(0, 3)) == 0:
            array = np.flip(array, axis)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.integers(0, 3)) == 0:
        array = np.broadcast_to(array, (3, *array.shape))
    return array


@settings(max_examples=30)
@given(st.lists(placed(), min_size=1, max_size=4), st.integers(0, 99))
def test_sums_are_those_of_the_cpu(arrays, seed):
    assert there(arrays, seed) == here(arrays)


def test_sums_of_many_blocks_are_those_of_the_cpu():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 300, 3, 64), dtype=np.float32)
    arrays = [x, x.transpose(0, 2, 1, 3)[:, 1], x[..., :37], x[..., 1:17], x[::-1, ::2], x[..., :1]]
    assert there(arrays) == here(arrays)


def test_more_arrays_than_a_launch_has_share_the_last_sum():
    arrays = [np.arange(n, n + 9, dtype=np.float32) for n in range(MAX_SUMS + MAX_SUMMED)]
    found, wanted = there(arrays), here(arrays)
    assert found[:-1] == wanted[: MAX_SUMS - 1]
    assert found[-1] == sum(wanted[MAX_SUMS - 1 :]) % 2**64


def compared(before, after, gradients):
    """Compare sums, and return the report."""
    named = {f"g{n}": x for n, x in enumerate(gradients)}
    report = np.zeros(1, np.uint64)
    held = {"sums": np.array(after, np.uint64), "before": np.array(before, np.uint64)}
    places = {name: x.ctypes.data for name, x in (named | held | {"report": report}).items()}
    bits = [1 << 2 * n for n in range(len(before))]
    run([checksum_launches.comparison(named, bits)], places)
    return int(report[0])


def gradients():
    """Return gradients of all types, between bytes that nobody may write to."""
    made = []
    for n, dtype in enumerate([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]):
        size = 4099 * (n + 1)
        memory = np.full(size * np.dtype(dtype).itemsize + 2 * GUARD, 0x11, np.uint8)
        made.append((memory, memory[GUARD:-GUARD].view(dtype)))
    return made


def test_equal_sums_change_nothing():
    made = gradients()
    assert compared([1, 2, 3], [1, 2, 3], [x for _, x in made]) == 0
    assert all((memory == 0x11).all() for memory, _ in made)


@pytest.mark.parametrize("place", [0, 2, MAX_SUMS - 17])
def test_sums_that_differ_make_every_gradient_nan_and_are_reported(place):
    made = gradients()
    before = list(range(MAX_SUMS - 16))
    after = [*before]
    after[place] += 2**40
    assert compared(before, after, [x for _, x in made]) == 1 << 2 * place
    for memory, x in made:
        assert np.isnan(x.astype(np.float64)).all()
        assert (memory[:GUARD] == 0x11).all()
        assert (memory[-GUARD:] == 0x11).all()


def test_a_change_of_any_bit_of_a_few_arrays_is_seen():
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, 4097, np.uint8)
    before = there([x])
    for place in (0, 7, 8, 4088, 4095, 4096):
        y = x.copy()
        y[place] ^= 1 << place % 8
        assert there([y]) != before
