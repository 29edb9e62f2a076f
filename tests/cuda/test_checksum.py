"""Sums that tell whether arrays have changed, on the emulator: the numbers of the CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import build
from emulator.calls import Emulator
from emulator.machine import Fault, randomly
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.gpu import checksum_launches, launch
from cupyflash.gpu.params import MAX_SUMMED, REPORTS
from cupyflash.gpu.writer import Recipe
from cupyflash.reference.cpu.checksum import checksums

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.float64, np.bool_, np.int32, np.uint8]
GUARD = 16  # bytes around an array, or words behind others
FILLED = 0x1111111111111111


def run(launches, addresses, seed=0, read=build.read):
    def work():
        launch.compiled_recipe(Recipe(tuple(launches)), 0).forward(dict(addresses))

    Emulator(schedule=randomly(seed), read=read)._run(work)


class Kept:
    """The sums of arrays, by the emulator."""

    def __init__(self, arrays, seed=0):
        self.arrays = {f"x{n}": x for n, x in enumerate(arrays)}
        self.rows = checksum_launches._rows(self.arrays, range(len(arrays)))
        warps = checksum_launches.WARPS * self.rows[-1][1].end if self.rows else 0
        self.words = np.full(1 + warps + GUARD, FILLED, np.uint64)
        self.places = {name: x.ctypes.data for name, x in self.arrays.items()}
        self.places["kept"] = self.words.ctypes.data
        self.turn = 0
        run(checksum_launches.launches(self.rows), self.places, seed)
        assert (self.words[1 + warps :] == FILLED).all()

    @property
    def sums(self):
        """The sum of each array."""
        found, begin = dict.fromkeys(self.arrays, 0), 0
        for name, row in self.rows:
            end = checksum_launches.WARPS * row.end
            found[name] = sum(map(int, self.words[1 + begin : 1 + end])) % 2**64
            begin = end
        return list(found.values())

    def compare(self, gradients, seed=0, read=build.read):
        """Compare the sums with those of now, and return which arrays are reported."""
        named = {f"g{n}": x for n, x in enumerate(gradients)}
        report = np.zeros(REPORTS, np.uint64)
        places = {name: x.ctypes.data for name, x in (named | {"report": report}).items()}
        self.turn += 1
        places |= self.places | {"turn": self.turn}
        run(checksum_launches.launches(self.rows, named), places, seed, read)
        found = np.flatnonzero(report).tolist()
        assert (found[-1:] == [REPORTS - 1]) == bool(found)
        return found[:-1]


def there(arrays, seed=0):
    return Kept(arrays, seed).sums


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


def test_sums_of_more_arrays_than_a_launch_has():
    arrays = [np.arange(n, n + 9, dtype=np.float32) for n in range(2 * MAX_SUMMED + 3)]
    kept = Kept(arrays)
    assert kept.sums == here(arrays)
    made = gradients()
    assert kept.compare([x for _, x in made]) == []
    arrays[MAX_SUMMED + 2][4] = 0
    assert kept.compare([x for _, x in made]) == [MAX_SUMMED + 2]
    assert all(np.isnan(x.astype(np.float64)).all() for _, x in made)


def gradients():
    """Return gradients of all types, between bytes that nobody may write to."""
    made = []
    for n, dtype in enumerate([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]):
        size = 4099 * (n + 1)
        memory = np.full(size * np.dtype(dtype).itemsize + 2 * GUARD, 0x11, np.uint8)
        made.append((memory, memory[GUARD:-GUARD].view(dtype)))
    return made


def large():
    return [np.random.default_rng(n).integers(0, 255, 40_000 * n + 3, np.uint8) for n in range(3)]


def test_equal_sums_change_nothing():
    kept, made = Kept(large()), gradients()
    assert kept.compare([x for _, x in made]) == []
    assert all((memory == 0x11).all() for memory, _ in made)


@pytest.mark.parametrize("changed", [[0], [2], [0, 1, 2]], ids=str)
def test_arrays_that_differ_make_every_gradient_nan_and_are_reported(changed):
    arrays = large()
    kept = Kept(arrays)
    for n in changed:
        arrays[n] += 1  # all blocks see it
    for seed in range(2):  # again, with gradients that were computed anew
        made = gradients()
        assert kept.compare([x for _, x in made], seed) == changed
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


def without(number):
    """Return what reads sources, and leaves one of the kernel's barriers out."""

    def read(name):
        text = build.read(name)
        if name != "rowwise/checksum.cu":
            return text
        parts = text.split("ptx::barrier_or")
        first, second, third = parts
        kept = [first + second, third] if number == 0 else [first, second + third]
        return "ptx::barrier_or".join(kept)

    return read


@pytest.mark.thorough("mutants; what the kernel writes is quick")
def test_no_barrier_may_be_missing():
    (array,) = arrays = [np.zeros(40_000, np.uint8)]
    kept = Kept(arrays)
    array[3] = 1  # one warp sees it
    made = [x for _, x in gradients()]
    with pytest.raises(Fault, match="which has ended"):
        kept.compare(made, read=without(0))
    kept.compare(made, read=without(1))
    assert not all(np.isnan(x.astype(np.float64)).all() for x in made)
