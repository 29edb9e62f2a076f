// The twin of kernels_cu/ptx/bytes.cuh in C++.
#pragma once

namespace ptx {

inline unsigned int select_bytes(unsigned int low, unsigned int high, unsigned int selector) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  unsigned int result = 0;
  for (unsigned int n = 0; n < 4; ++n) {
    const unsigned int which = selector >> 4 * n & 7;
    result |= static_cast<unsigned int>(both >> 8 * which & 0xff) << 8 * n;
  }
  return result;
}

// A number of units of the last place, as in convert.cuh.
inline unsigned int float_to_e4m3(float value) {
  if (value != value) return 0x7f;
  const unsigned int sign = __builtin_signbit(value) ? 0x80 : 0;
  const float magnitude = __builtin_fabsf(value);
  if (magnitude >= 448.0f) return sign | 0x7e;
  const int exponent = magnitude < 0x1p-6f ? -6 : __builtin_ilogbf(magnitude);
  const int units = static_cast<int>(__builtin_nearbyintf(__builtin_ldexpf(magnitude, 3 - exponent)));
  const unsigned int code = static_cast<unsigned int>(((exponent + 6) << 3) + units);
  return sign | (code > 0x7e ? 0x7e : code);
}

inline unsigned short floats_to_e4m3(float low, float high) {
  return static_cast<unsigned short>(float_to_e4m3(low) | float_to_e4m3(high) << 8);
}

}  // namespace ptx
