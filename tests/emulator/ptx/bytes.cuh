// The twin of kernels_cu/ptx/bytes.cuh in C++.
#pragma once

namespace ptx {

inline unsigned int select_bytes(unsigned int low, unsigned int high, unsigned int selector) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  unsigned int result = 0;
  for (unsigned int n = 0; n < 4; ++n) {
    const unsigned int digit = selector >> 4 * n, byte = both >> 8 * (digit & 7) & 0xff;
    const unsigned int signs = byte >= 0x80 ? 0xff : 0;
    result |= ((digit & 8) != 0 ? signs : byte) << 8 * n;
  }
  return result;
}

// A number of units of the last place, as in convert.cuh.
inline unsigned short floats_to_e4m3(float low, float high) {
  unsigned int both = 0;
  const float values[2] = {high, low};
  for (const float value : values) {
    unsigned int code = 0x7f;
    if (value == value) {
      const float magnitude = __builtin_fabsf(value);
      const int exponent = magnitude < 0x1p-6f ? -6 : __builtin_ilogbf(magnitude);
      const float units = __builtin_nearbyintf(__builtin_ldexpf(magnitude, 3 - exponent));
      code = magnitude >= 448.0f ? 0x7e : static_cast<unsigned int>((exponent + 6) * 8) + units;
      if (code > 0x7e) code = 0x7e;
      if (__builtin_signbit(value)) code |= 0x80;
    }
    both = both << 8 | code;
  }
  return static_cast<unsigned short>(both);
}

}  // namespace ptx
