"""Blocks of several arrays, copied by one launch; the kernel itself runs on a CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda_on_cpu import library
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placement import same_bits
from stream_cupy import StreamCupy

from cupyflash.arrays import copies, device_arrays
from cupyflash.arrays import tape as tapes
from cupyflash.gpu import launch_cache

SHIM = """
struct uint4 { unsigned x, y, z, w; };
struct Place { unsigned x; };
static thread_local Place blockIdx, threadIdx;
#define __global__
#define __launch_bounds__(n)
"""
CALL = """
extern "C" void copy_blocks(unsigned grid, const Table* table) {
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < %d; ++threadIdx.x) cupyflash_copy_blocks(*table);
  }
}
"""


@pytest.fixture(scope="session")
def kernel(tmp_path_factory):
    """Return the kernel as a function of the host."""
    text = SHIM + copies.SOURCE + CALL % copies.THREADS
    return library(text, tmp_path_factory.mktemp("copies")).copy_blocks


class Device(StreamCupy):
    """It counts what is launched, and runs the kernel."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel, self.launches, self.others = kernel, 0, 0

    def copy_blocks(self, threads, told):
        self.launches += 1
        copied = told.copy()
        place = ctypes.c_void_p(copied.ctypes.data)
        self.enqueue(lambda: self.kernel(threads // copies.THREADS, place) and copied)

    def _convert(self, *arrays):
        self.others += 1
        super()._convert(*arrays)

    def _convert_rows(self, *arrays, size):
        self.others += 1
        super()._convert_rows(*arrays, size=size)

    def _copy_rows(self, *x):
        self.others += 1
        super()._copy_rows(*x)


@pytest.fixture
def device(install, kernel):
    return lambda: install(Device(kernel))


def pairs_of(cupy, shapes, dtype=np.float32):
    """Return rows of arrays, and rows of others to which they are copied; and the others whole."""
    rng = np.random.default_rng(0)
    made, whole = [], []
    for lead, first, rows, more, columns in shapes:
        source = rng.standard_normal((*lead, first + rows + more, columns)).astype(dtype)
        to = np.full((*lead, more + rows + first, columns), 7, dtype)
        arrays = cupy.asarray(source), cupy.asarray(to)
        made.append(
            (arrays[0][..., first : first + rows, :], arrays[1][..., more : more + rows, :])
        )
        to[..., more : more + rows, :] = source[..., first : first + rows, :]
        whole.append((arrays[1], to))
    return made, whole


SIZES = st.tuples(
    st.lists(st.integers(1, 4), max_size=3).map(tuple), st.integers(0, 3), st.integers(0, 40),
    st.integers(0, 3), st.sampled_from([1, 4, 8, 12, 300]),
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(SIZES, max_size=5), st.sampled_from([np.float16, np.float32, np.float64]))
def test_rows_arrive_and_nothing_else_changes(device, shapes, dtype):
    cupy = device()
    pairs, whole = pairs_of(cupy, shapes, dtype)
    copies.copy_all(pairs)
    cupy.run_all()
    for (_, to), (array, expected) in zip(pairs, whole, strict=True):
        assert same_bits(array.host, expected), to.shape


def test_all_blocks_are_one_launch_and_many_blocks_several(device):
    cupy = device()
    pairs, whole = pairs_of(cupy, [((2, 3), 4, 8, 4, 4), ((5,), 0, 16, 4, 1), ((), 0, 0, 0, 4)])
    copies.copy_all(pairs)
    assert (cupy.launches, cupy.others) == (1, 0)
    copies.copy_all(pairs * copies.MOST)  # three kinds of blocks of each
    cupy.run_all()
    assert (cupy.launches, cupy.others) == (1 + 3, 0)
    assert all(same_bits(array.host, expected) for array, expected in whole)
    copies.copy_all([])
    assert cupy.launches == 4


@pytest.mark.parametrize(
    ("shape", "dtype", "to"),
    [
        (((2,), 1, 8, 0, 3), np.float32, np.float32),  # rows that are not aligned
        (((2,), 0, 8, 0, 4), np.float16, np.float32),
        (((2,), 0, 3, 0, 1), np.float32, np.float32),
    ],
)
def test_other_rows_are_copied_as_ever(shape, dtype, to, device):
    cupy = device()
    pairs, _ = pairs_of(cupy, [shape], dtype)
    source, target = pairs[0]
    if to != dtype:
        target = cupy.asarray(np.zeros(source.shape, to))
    copies.copy_all([(source, target)])
    cupy.run_all()
    assert (cupy.launches, cupy.others) == (0, 1)
    assert same_bits(target.host, source.host.astype(to))


def test_transposed_rows_are_no_blocks(device):
    cupy = device()
    source = cupy.asarray(np.arange(64, dtype=np.float32).reshape(2, 4, 8))
    to = cupy.asarray(np.zeros((2, 8, 4), np.float32))
    copies.copy_all([(source.transpose(0, 2, 1), to)])
    cupy.run_all()
    assert cupy.launches == 0
    assert same_bits(to.host, np.ascontiguousarray(source.host.transpose(0, 2, 1)))


def test_a_tape_copies_from_and_to_other_memory(device):
    cupy = device()
    hosts = [np.arange(96, dtype=np.float32).reshape(2, 12, 4) + 1000 * n for n in range(2)]
    arrays, results = [cupy.asarray(x) for x in hosts], []
    for n, x in enumerate(arrays):
        to = cupy.asarray(np.zeros((2, 20, 4), np.float32))
        results.append(to)
        if n == 0:
            tape = tapes.Tape({"x": x, "to": to}, {}, launch_cache.reach)
            with tape.recording():
                copies.copy_all([(x[:, :4], to[:, 8:12]), (x[:, 4:], to[:, 12:])])
            tape.finish()
        else:
            tape.play(device_arrays, {"x": x, "to": to}, {}, None, 1)
    cupy.run_all()
    for host, to in zip(hosts, results, strict=True):
        assert same_bits(to.host[:, 8:], host)
        assert not to.host[:, :8].any()
