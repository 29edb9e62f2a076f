"""What kernels and generated code call, at the ends of the types: against Python and NumPy."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import ml_dtypes
import numpy as np
from emulator.machine import Machine

from cupyflash.reference.cpu import philox

from .expressions import Check, Read, _text

Array = np.ndarray[Any, Any]

LOW, HIGH = -(2**63), 2**63 - 1
_INTS = [0, 1, -1, 2, -2, 3, -3, 7, -7, 2**31, 2**32 - 1, 2**32, -(2**32), 2**32 + 5, 3 * 2**40,
         -(2**33) - 1, 2**62, -(2**62), 2**62 + 1, HIGH, HIGH - 1, LOW, LOW + 1,
         3037000500]  # fmt: skip
_EDGE = 9223372036854775808.0
_FLOATS = [0.0, -0.0, 0.1, -0.1, 1.5, -1.5, 2.0, -3.0, 1e10, -1e10, 1e30, -1e30, np.inf, -np.inf,
           np.nan, _EDGE, -_EDGE, float(np.nextafter(np.float32(_EDGE), np.float32(0))),
           -1.5 * _EDGE, 1024.0, 0.25]  # fmt: skip
KINDS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)

_BODY = """
struct Functions {{
  const long long* pairs;
  const double* reals;
  const double* rounded;
  long long* whole;
  double* real;
  char* stored;
}};
extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Functions c) {{
  const int t = threadIdx.x;
  for (int n = t; n < {pairs}; n += THREADS) {{
    const long long x = c.pairs[2 * n], y = c.pairs[2 * n + 1];
    long long* const to = c.whole + 5 * n;
    to[0] = saturating_add(x, y);
    to[1] = saturating_subtract(x, y);
    to[2] = saturating_multiply(x, y);
    const bool divides = y != 0 && (y != -1 || x != SMALLEST_INT);
    to[3] = divides ? floor_divide(x, y) : 0;
    to[4] = divides ? remainder(x, y) : 0;
  }}
  for (int n = t; n < {reals}; n += THREADS) {{
    const double x = c.reals[2 * n], y = c.reals[2 * n + 1];
    const float u = static_cast<float>(x), v = static_cast<float>(y);
    double* const to = c.real + 12 * n;
    to[0] = minimum(x, y);
    to[1] = maximum(x, y);
    to[2] = minimum(u, v);
    to[3] = maximum(u, v);
    to[4] = multiply_rounded(x, y);
    to[5] = multiply_rounded(u, v);
    to[6] = infinity<double>() + infinity<float>();
    to[7] = not_a_number<double>();
    to[8] = not_a_number<float>();
    to[9] = number::is_finite(static_cast<accum_t>(x));
    to[10] = matmul::is_unmasked(u) + 2 * matmul::is_unmasked(x);
    to[11] = matmul::is_unmasked(-u) + 2 * matmul::is_unmasked(-x);
    c.whole[5 * {pairs} + 2 * n] = floor_to_int(x);
    c.whole[5 * {pairs} + 2 * n + 1] = floor_to_int(u);
  }}
  for (int n = t; n < {rounded}; n += THREADS) {{
    const accum_t x = static_cast<accum_t>(c.rounded[n]);
    char* const halves = c.stored;
    char* const bfloats = halves + 2 * {rounded};
    char* const floats = bfloats + 2 * {rounded};
    char* const doubles = floats + 4 * {rounded};
    number::store(halves, KIND_FLOAT16, n, x);
    number::store(bfloats, KIND_BFLOAT16, n, x);
    number::store(floats, KIND_FLOAT32, n, x);
    number::store(doubles, KIND_FLOAT64, n, x);
    double* const to = c.real + 12 * {reals} + 8 * n;
    to[0] = number::load<float>(halves, KIND_FLOAT16, n);
    to[1] = number::load<double>(bfloats, KIND_BFLOAT16, n);
    to[2] = number::load<double>(floats, KIND_FLOAT32, n);
    to[3] = number::load<float>(doubles, KIND_FLOAT64, n);
    to[4] = number::load<double>(doubles, KIND_FLOAT64, n);
    const unsigned long long seed = 0x123456789abcdef0ULL + n;
    const philox::Key key = philox::split_seed(seed);
    to[5] = philox::keep(key, 0x4000, 0x300000007ULL * n, n * 977u, n);
    to[6] = philox::keep(key, 0x2000, n, n, 0x200000000ULL + 3 * n);
    const unsigned int keys = philox::group_of_key(n), queries = philox::group_of_query(n);
    const philox::Words drawn = philox::draw(key, keys, queries, n);
    const unsigned int word = philox::words_of_query(drawn, n).word[n >> 3 & 1];
    const unsigned int number = word >> 16 * (n & 1) & 0x7fff;
    to[7] = philox::keep(key, n % 3 == 0 ? 0x8000 : number + n % 3 - 1, n, n, n);
  }}
}}
"""


def _held(x: int) -> int:
    return max(LOW, min(HIGH, x))


def _floor(x: float) -> int:
    if np.isnan(x):
        return LOW
    return _held(int(np.floor(x))) if np.isfinite(x) else (HIGH if x > 0 else LOW)


def _rounded() -> Array:
    """Numbers of 16 bits, those halfway between them, and next to that."""
    rng = np.random.default_rng(0)
    found: list[Any] = [np.array([np.nan, np.inf, -np.inf, 65504, 65519.99, 65520, 1e39, 0, -0.0])]
    for kind in (np.float16, ml_dtypes.bfloat16):
        bits = np.sort(rng.integers(0x2000, 0x5800, 120)).astype(np.uint16)
        below, above = (
            (bits + step).astype(np.uint16).view(kind).astype(np.float64) for step in (0, 1)
        )
        ties = (below + above) / 2
        found += [below, ties, -ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)]
    return np.concatenate(found)


class FunctionCheck(Check):
    """Integers that stop at their ends, NaN in minima, rounding, element kinds, random words."""

    def __init__(self, dtype: str) -> None:
        self.name, self.dtype = f"functions in {dtype}", dtype
        self.kind: Any = np.dtype(dtype).type
        self.pairs = np.array(list(itertools.product(_INTS, _INTS)), np.int64)
        self.reals = np.array(list(itertools.product(_FLOATS, _FLOATS)))
        self.rounded = _rounded()
        self.whole = self._whole()
        with np.errstate(all="ignore"):
            self.real = self._real()
            narrow = self.rounded.astype(self.kind)
            self.stored = [self._stored(narrow, kind) for kind in KINDS]

    def compose(self, read: Read) -> str:
        body = _BODY.format(pairs=len(self.pairs), reals=len(self.reals), rounded=len(self.rounded))
        return _text(read, self.dtype, (1, 1, 1), body)

    def judge(self, machine: Machine) -> str | None:
        whole, real = np.zeros_like(self.whole), np.zeros_like(self.real)
        stored = np.zeros(sum(x.nbytes for x in self.stored), np.uint8)
        places = (self.pairs, self.reals, self.rounded, whole, real, stored)
        machine.launch(1, bytearray(struct.pack("=6Q", *(x.ctypes.data for x in places))))
        if not np.array_equal(whole, self.whole):
            return f"{self.name}: integers, number {int(np.argmax(whole != self.whole))}"
        same = np.array_equal(real, self.real, equal_nan=True)
        if not same or ((np.signbit(real) != np.signbit(self.real)) & ~np.isnan(real)).any():
            return f"{self.name}: reals"
        first = 0
        for wanted in self.stored:
            found = stored[first : first + wanted.nbytes].view(wanted.dtype)
            first += wanted.nbytes
            if not np.array_equal(
                found.astype(np.float64), wanted.astype(np.float64), equal_nan=True
            ):
                return f"{self.name}: stored as {wanted.dtype}"
        return None

    def _whole(self) -> Array:
        found = []
        for x, y in self.pairs.tolist():
            found += [_held(x + y), _held(x - y), _held(x * y)]
            divides = y != 0 and (y != -1 or x != LOW)
            found += [x // y, x % y] if divides else [0, 0]
        for x, _ in self.reals:
            found += [_floor(x), _floor(float(np.float32(x)))]
        return np.array(found, np.int64)

    def _real(self) -> Array:
        x, y = self.reals.T
        u, v = x.astype(np.float32), y.astype(np.float32)
        zero = np.zeros(len(x))
        # Of two equal numbers the second one, as in the twin: 0 and -0 are told apart.
        columns = [
            *(np.where(less(a, b) | np.isnan(a), a, b)
              for a, b in ((x, y), (u, v)) for less in (np.less, np.greater)), x * y, u * v,
            zero + np.inf, zero + np.nan, zero + np.nan, np.isfinite(x.astype(self.kind)),
            *(np.where((x == 0) & (np.signbit(x) == negative), 0, 3) for negative in (True, False)),
        ]  # fmt: skip
        n = np.arange(len(self.rounded), dtype=np.uint64)
        narrow = self.rounded.astype(self.kind)
        half, bfloat, single, double = (self._stored(narrow, kind) for kind in KINDS)
        loaded = [half, bfloat, single, double.astype(np.float32), double]
        kept = []
        for p, step, i, j in ((0.5, 0x300000007, 977, 1), (0.25, 1, 1, 3)):
            first = 0x200000000 if p == 0.25 else 0
            kept.append([
                philox.keep(0x123456789ABCDEF0 + m, p, m * step, i * m, first + j * m)
                for m in range(len(n))
            ])  # fmt: skip
        kept.append([m % 3 == 1 for m in range(len(n))])  # below 2^15, at the number, just above it
        rest = np.stack([np.asarray(x).astype(np.float64) for x in (*loaded, *kept)], axis=1)
        whole = np.stack([np.asarray(x, np.float64) for x in columns], axis=1)
        return np.concatenate([whole.reshape(-1), rest.reshape(-1)])

    def _stored(self, values: Array, kind: Any) -> Array:
        made: Array = values.astype(kind)
        if kind is ml_dtypes.bfloat16 and values.dtype == np.float64:
            # Rounded once: of the neighbours the nearest one, and of two the even one.
            near = made.view(np.uint16).astype(np.int64)
            around = np.stack([near - 1, near, near + 1]).astype(np.uint16)
            far = np.abs(around.view(kind).astype(np.float64) - values)
            far = np.where(np.isnan(far), np.inf, far)
            best = np.lexsort((around % 2 == 1, far), axis=0)[0]
            once = np.take_along_axis(around, best[None], 0)[0].view(kind)
            made = np.where(np.isfinite(made.astype(np.float64)) & (values != 0), once, made)
        return made
