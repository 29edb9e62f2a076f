// The twin of kernels_cu/ptx/exp2.cuh in C++.
#pragma once

namespace ptx {

// The instruction may be wrong by 2^-22 of its result, so that nothing may count on more: here
// every result but those of whole numbers is off by up to 3/4 of that before it is rounded, in a
// way that the bits of x decide.
inline float exp2(float x) {
  double y = __builtin_exp2(static_cast<double>(x));
  if (x != __builtin_floorf(x)) {
    const int mixed = static_cast<int>(__float_as_uint(x) * 0x9e3779b1u);
    y *= 1 + mixed * 0x1p-31 * 0x1.8p-23;
  }
  return y < 0x1p-126 ? 0.0f : static_cast<float>(y);
}

}  // namespace ptx
