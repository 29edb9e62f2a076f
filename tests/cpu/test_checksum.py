"""Sums over the bits of arrays: against plain integers, and what they tell apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash.reference.cpu.checksum import PIECE, PLACE, checksums

MOST = 2**64


def model(array: np.ndarray) -> int:
    """The sum that the module's first lines describe, of contiguous bytes."""
    data = array.tobytes()
    data += bytes(-len(data) % 8)
    total = 0
    for n, word in enumerate(np.frombuffer(data, "<u8").tolist()):
        x = word ^ n * PLACE % MOST
        total += x + (x % 2**32) * (x >> 32)
    total %= MOST
    return total - MOST if total >= MOST // 2 else total


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 255, 256, 257, 4096, PIECE + 3, 3 * PIECE + 11])
def test_it_is_the_sum_that_it_says(count):
    array = np.random.default_rng(count).integers(0, 256, count, np.uint8)
    for start in (0, 1, 4):
        held = np.zeros(count + start, np.uint8)[start:]
        held[...] = array
        assert checksums([held]) == [model(array)]


@given(st.data())
def test_it_sees_the_elements_of_an_array_and_nothing_else(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = np.dtype(data.draw(st.sampled_from(["f2", "f4", "f8", "c16", "i4", "u1", "?"])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    memory = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize + 16, np.uint8)
    array = memory[data.draw(st.sampled_from([0, 1, 4, 8])) :][: memory.size - 16].view(dtype)
    array = array.reshape(shape).transpose(data.draw(st.permutations(range(len(shape)))))
    steps = [slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in shape]
    array = array[(*steps, ...)]
    if data.draw(st.booleans()):
        array = np.broadcast_to(array, (3, *array.shape))
    before, held = checksums([array]), array.tobytes()
    assert checksums([array, array]) == 2 * before
    for _ in range(4):
        place = data.draw(st.integers(0, memory.size - 1))
        memory[place] ^= 1 << data.draw(st.integers(0, 7))
        assert (checksums([array]) == before) == (array.tobytes() == held)


@pytest.mark.parametrize("shape", [(3, 5000, 16), (2, 33, 129)])
def test_it_sees_what_plain_sums_do_not(shape):
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    (before,) = checksums([x])
    swapped = x.copy()
    swapped[:, [3, 4]] = swapped[:, [4, 3]]
    zeros = np.zeros(shape, np.float32)
    for changed in (-x, x[::-1], swapped, np.abs(x)):
        assert checksums([np.ascontiguousarray(changed)]) != [before]
    assert checksums([zeros]) != checksums([-zeros])
    nan = np.full(shape, np.nan, np.float32)
    other = nan.copy()
    other.view(np.uint32)[1, 7] ^= 1  # another payload
    assert checksums([nan]) != checksums([other])
