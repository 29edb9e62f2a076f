"""kernels_cu/common/philox.cuh, compiled for the CPU, against published values and its twin."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash.kernels_cu
from cupyflash.reference.cpu import philox

HEADER = Path(cupyflash.kernels_cu.__file__).parent / "common" / "philox.cuh"

SHIM = """
#define __device__
#define __forceinline__ inline
#include "{header}"

extern "C" void words(const unsigned int* counter, const unsigned int* key, unsigned int* out) {{
  const philox::Words words = philox::philox4x32(
      philox::Words{{{{counter[0], counter[1], counter[2], counter[3]}}}},
      philox::Key{{{{key[0], key[1]}}}});
  for (int n = 0; n < 4; ++n) out[n] = words.word[n];
}}

extern "C" void keep(unsigned long long seed, unsigned long long threshold, long long size,
                     const unsigned long long* b_h, const unsigned int* i,
                     const unsigned long long* j, unsigned char* out) {{
  const philox::Key key = philox::split_seed(seed);
  for (long long n = 0; n < size; ++n) out[n] = philox::keep(key, threshold, b_h[n], i[n], j[n]);
}}

extern "C" void draw(unsigned long long seed, unsigned long long threshold, unsigned long long j,
                     unsigned int i, unsigned long long b_h, unsigned int* out) {{
  const philox::Words words = philox::draw(philox::split_seed(seed), philox::group_of_key(j),
                                           philox::group_of_query(i), b_h);
  const unsigned int addend = philox::addend(threshold);
  for (int n = 0; n < 4; ++n) {{
    const unsigned int bits = philox::keep_bits(words.word[n], addend);
    out[2 * n] = bits >> 15 & 1;
    out[2 * n + 1] = bits >> 31;
  }}
}}
"""

# The published known answers of philox4x32-10 (Random123): counter, key, words.
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        # Not a dependency of the package: only this comparison needs a C++ compiler.
        pytest.skip("g++ is not installed, and this test compiles a CUDA header with it")
    folder = tmp_path_factory.mktemp("philox")
    source, library = folder / "philox.cpp", folder / "philox.so"
    source.write_text(SHIM.format(header=HEADER))
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    subprocess.run(
        [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


def cuda_keep(
    compiled: ctypes.CDLL, seed: int, dropout: float, b_h: object, i: object, j: object
) -> np.ndarray:
    arrays = np.broadcast_arrays(b_h, i, j)
    kinds = (np.uint64, np.uint32, np.uint64)
    packed = [np.ascontiguousarray(a, dtype=k) for a, k in zip(arrays, kinds, strict=True)]
    out = np.full(packed[0].shape, 255, dtype=np.uint8)
    compiled.keep(
        ctypes.c_ulonglong(seed),
        ctypes.c_ulonglong(philox.threshold(dropout)),
        ctypes.c_longlong(out.size),
        *(ctypes.c_void_p(a.ctypes.data) for a in (*packed, out)),
    )
    assert out.max(initial=0) <= 1
    return out.astype(bool)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(compiled, counter, key, answer):
    out = (ctypes.c_uint * 4)()
    compiled.words((ctypes.c_uint * 4)(*counter), (ctypes.c_uint * 2)(*key), out)
    assert tuple(out) == answer


@given(
    seed=st.integers(0, 2**64 - 1),
    dropout=st.floats(0, 1, exclude_max=True),
    b_h=st.integers(0, 2**40) | st.integers(0, 8),
    i=st.integers(0, 2**32 - 16),
    j=st.integers(0, 2**34 - 16) | st.integers(0, 64),
)
def test_keeps_what_the_twin_keeps(compiled, seed, dropout, b_h, i, j):
    heads = b_h + np.arange(3)[:, None, None]
    rows = i + np.arange(5)[:, None]
    columns = j + np.arange(9)
    expected = philox.keep(seed, dropout, heads, rows, columns)
    assert expected.shape == (3, 5, 9)
    np.testing.assert_array_equal(
        cuda_keep(compiled, seed, dropout, heads, rows, columns), expected
    )


@given(
    seed=st.integers(0, 2**64 - 1),
    dropout=st.floats(0, 1, exclude_max=True),
    b_h=st.integers(0, 2**40),
    i=st.integers(0, 2**32 - 16),
    j=st.integers(0, 2**34 - 16) | st.integers(0, 8),
)
def test_a_draw_serves_eight_pairs(compiled, seed, dropout, b_h, i, j):
    out = (ctypes.c_uint * 8)()
    i, j = i - i % 16 + i % 8, j - j % 16 + j % 8 // 2 * 2
    threshold = ctypes.c_ulonglong(philox.threshold(dropout))
    numbers = ctypes.c_ulonglong(seed), threshold, ctypes.c_ulonglong(j), ctypes.c_uint(i)
    compiled.draw(*numbers, ctypes.c_ulonglong(b_h), out)
    x, y, z = np.ogrid[:2, :2, :2]
    expected = philox.keep(seed, dropout, b_h, i + 8 * x, j + 8 * y + z)
    assert list(out) == expected.reshape(-1).astype(int).tolist()


def test_the_largest_probability_drops_all(compiled):
    # Within 2**-16 of 1 the threshold is 2**15, one more than the largest number.
    dropout = float(np.nextafter(1.0, 0.0))
    assert philox.threshold(dropout) == 2**15
    assert not cuda_keep(compiled, 7, dropout, 0, np.arange(50)[:, None], np.arange(50)).any()


def test_a_number_that_is_the_threshold_is_kept(compiled):
    # At probability number / 2**15 the pair is kept, at the next probability it is not.
    drawn = philox.philox4x32((0, 0, 0, 0), philox.split_seed(7), philox.DROPOUT_ROUNDS)
    for j, shift in ((0, 0), (1, 16)):
        number = int(drawn[0]) >> shift & 0x7FFF
        for more, kept in ((0, True), (1, False)):
            p = (number + more) / 2.0**15
            assert philox.threshold(p) == number + more
            assert cuda_keep(compiled, 7, p, 0, 0, j).item() == kept


def test_the_rate_is_the_threshold(compiled):
    # 2**18 pairs: the standard deviation of the rate is 0.0009.
    kept = cuda_keep(compiled, 2026, 0.3, 5, np.arange(512)[:, None], np.arange(512))
    assert abs(kept.mean() - 0.7) < 0.005
