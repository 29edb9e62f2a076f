// The twin of kernels_cu/ptx/reciprocal.cuh in C++.
#pragma once

namespace ptx {

// The instruction may be wrong by 2^-23 of its result: here every result is off by up to half of
// that before it is rounded, in a way that the bits of x decide; those of powers of two are exact.
inline float reciprocal(float x) {
  const unsigned int bits = __float_as_uint(x);
  if ((bits >> 23 & 0xff) == 0) return __builtin_copysignf(__builtin_inff(), x);
  double y = 1 / static_cast<double>(x);
  if ((bits & 0x7fffffu) != 0) {
    const int mixed = static_cast<int>(bits * 0x9e3779b1u);
    y *= 1 + mixed * 0x1p-31 * 0x1p-24;
  }
  return __builtin_fabs(y) < 0x1p-126 ? __builtin_copysignf(0.0f, x) : static_cast<float>(y);
}

}  // namespace ptx
