"""CUDA C++ of masks and scores, compiled for the CPU: one thread stands for a whole warp."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash.arrays.device_arrays import address
from cupyflash.arrays.dtypes import DTYPES
from cupyflash.expr.cuda_functions import Generated
from cupyflash.gpu import params, source, strides

# What the compiler knows by itself on a GPU, and twins of the functions of ptx/.
SHIM = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __noinline__
using std::copysign; using std::exp; using std::fabs; using std::floor; using std::fma;
using std::log; using std::tanh; using std::exp2; using std::erf; using std::sqrt; using std::sin;
using std::cos; using std::pow;
template <typename To, typename From> To same_bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from), "");
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline long long __mul64hi(long long x, long long y) {
  return static_cast<long long>((static_cast<__int128>(x) * y) >> 64);
}
inline float __uint_as_float(unsigned int x) { return same_bits<float>(x); }
inline unsigned int __float_as_uint(float x) { return same_bits<unsigned int>(x); }
inline float __double2float_rz(double x) { return static_cast<float>(x); }
namespace ptx {
constexpr int WARP_SIZE = 1;
inline int lane_index() { return 0; }
template <typename T> T shuffle_xor(T value, int) { return value; }
template <typename T> T shuffle(T value, int) { return value; }
inline bool any_lane(bool condition) { return condition; }
inline long long multiply_wide(int x, int y) { return static_cast<long long>(x) * y; }
inline float half_to_float(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                : exponent     ? std::ldexp(1024.f + fraction, exponent - 25)
                               : std::ldexp(static_cast<float>(fraction), -24);
  return bits >> 15 ? -value : value;
}
inline float exp2(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }
// Nothing is written here.
inline unsigned short float_to_half(float) { return 0; }
inline unsigned short double_to_half(double) { return 0; }
inline unsigned int floats_to_halves(float, float) { return 0; }
inline unsigned int floats_to_bfloats(float, float) { return 0; }
}
"""

# Reads a value per pair of a tile: of the mask as 0 or 1, of scores as numbers.
CALLS = """
extern "C" void mask_{n}(const void* p, const Site* at, long long count, unsigned char* out) {{
  for (long long x = 0; x < count; ++x)
    out[x] = n{n}::mask_allows(*static_cast<const Params*>(p), at[x]);
}}
extern "C" int class_{n}(const void* p, const TileBox* at) {{
  return n{n}::tile_class(*static_cast<const Params*>(p), *at);
}}
"""
SCORE_CALLS = """
extern "C" void score_{n}(const void* p, const Site* at, long long count, const accum_t* in,
                          accum_t* changed, accum_t* slope) {{
  for (long long x = 0; x < count; ++x) {{
    changed[x] = n{n}::score_mod(
        *static_cast<const Params*>(p),
        n{n}::score_head_constants(*static_cast<const Params*>(p), at[x]),
        in[x], at[x]);
    slope[x] = {slope};
  }}
}}
"""
POSITIONS = ("b", "h", "i", "j", "len_q", "len_k", "start_q", "start_k")
CORNERS = ("b", "h", "i_low", "i_high", "j_low", "j_high", "len_q", "len_k", "start_q", "start_k")


def _structs() -> str:
    """The declarations of Site, TileBox and BlockKeys, as the kernels have them."""
    text = source.flatten(("common/tile.cuh",))
    return "".join(
        match[0] for name in ("Site", "TileBox", "BlockKeys", "HeadConstants")
        for match in re.finditer(rf"^struct {name} \{{.*?^\}};\n", text, re.MULTILINE | re.DOTALL)
    )  # fmt: skip


def _read_for_cpu(path: str) -> str:
    return "" if path.startswith("ptx/") else source.read(path)


def library(text: str, folder: Path) -> ctypes.CDLL:
    """Compile a text for the CPU, and load it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed, and this test compiles CUDA C++ with it")
    file, made = folder / "compiled.cpp", folder / "compiled.so"
    file.write_text(text)
    flags = "-std=c++17 -O1 -ffp-contract=off -Werror=return-type".split()
    subprocess.run([compiler, *flags, "-shared", "-fPIC", file, "-o", made], check=True)
    return ctypes.CDLL(str(made))


class Compiled:
    """Several calls' generated functions in one library."""

    def __init__(self, made: Sequence[Generated], double: bool, folder: Path, scores: bool) -> None:
        self.made, self.double = list(made), double
        self.sizes = tuple(
            max(1, *(len(getattr(each, name)) for each in made))
            for name in ("ints", "floats", "arrays")
        )
        names = ("NUM_INTS", "NUM_FLOATS", "NUM_TABLES")
        storage = DTYPES["float64" if double else "float32"].code
        text = SHIM + f"constexpr int STORAGE = {storage};\nconstexpr bool WIDE_RESULT = false;\n"
        text += "".join(
            f"constexpr int {name} = {size};\n"
            for name, size in zip(names, self.sizes, strict=True)
        )
        given = max(1, *(each.functions.num_given for each in made))
        text += f"constexpr int NUM_HEAD_CONSTANTS = {given};\n"
        headers = ("common/params.cuh", "common/expression.cuh")
        text += source.flatten_with(headers, _read_for_cpu) + _structs()
        read = (
            "n{n}::score_mod_derivative(*static_cast<const Params*>(p), "
            "n{n}::score_head_constants(*static_cast<const Params*>(p), at[x]), in[x], at[x])"
        )
        for n, each in enumerate(made):
            slope = read.format(n=n) if each.functions.has_dscore else "1"
            text += f"namespace n{n} {{\n{each.functions.source}}}\n" + (
                SCORE_CALLS if scores else CALLS
            ).format(n=n, slope=slope)
        self.library = library(text, folder)

    def _params(self, n: int) -> Any:
        each = self.made[n]
        return params.params(*self.sizes).pack({
            "ints": each.ints,
            "floats": each.floats,
            "tables": [strides.table(x)._replace(data=address(x)) for x in each.arrays],
        })  # fmt: skip

    @staticmethod
    def _sites(symbols: dict[str, Any], shape: tuple[int, ...]) -> Any:
        columns = [
            np.broadcast_to(np.asarray(symbols[name], np.int64), shape) for name in POSITIONS
        ]
        i, j = columns[2], columns[3]
        columns.append((i % 3) | (j % 5) << 32)  # step_i, step_j: any part of the place will do
        return np.ascontiguousarray(np.stack(columns, axis=-1))

    def mask(self, n: int, symbols: dict[str, Any], shape: tuple[int, ...]) -> Any:
        out = np.zeros(shape, np.uint8)
        sites = self._sites(symbols, shape)
        place = [ctypes.c_void_p(x.ctypes.data) for x in (sites, out)]
        count = ctypes.c_longlong(out.size)
        getattr(self.library, f"mask_{n}")(self._params(n), place[0], count, place[1])
        return out.astype(bool)

    def tile_class(self, n: int, symbols: dict[str, int]) -> int:
        box = np.array([symbols[name] for name in CORNERS], np.int64)
        place = ctypes.c_void_p(box.ctypes.data)
        return int(getattr(self.library, f"class_{n}")(self._params(n), place))

    def score(self, n: int, symbols: dict[str, Any], score: Any) -> tuple[Any, Any]:
        kind = np.float64 if self.double else np.float32
        given = np.ascontiguousarray(score, kind)
        changed, slope = np.empty_like(given), np.empty_like(given)
        sites = self._sites(symbols, given.shape)
        places = [ctypes.c_void_p(x.ctypes.data) for x in (sites, given, changed, slope)]
        count = ctypes.c_longlong(given.size)
        getattr(self.library, f"score_{n}")(self._params(n), places[0], count, *places[1:])
        return changed, slope
