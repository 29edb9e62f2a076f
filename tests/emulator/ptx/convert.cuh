// The twin of kernels_cu/ptx/convert.cuh in C++.
#pragma once

namespace ptx {

inline float half_to_float(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value;
  if (exponent == 31) {
    value = __uint_as_float(fraction ? 0x7fffffffu : 0x7f800000u);
  } else if (exponent == 0) {
    value = static_cast<float>(fraction) * 0x1p-24f;
  } else {
    value = static_cast<float>(1024 + fraction) * __uint_as_float((exponent + 102u) << 23);
  }
  return bits >> 15 && value == value ? -value : value;
}

// A number of units of the last place, which is a power of two: so only `nearbyint` rounds, to
// nearest even. The exponent's field is added, because a fraction that rounds up carries into it.
inline unsigned short double_to_half(double value) {
  if (value != value) return 0x7fff;
  const unsigned short sign = __builtin_signbit(value) ? 0x8000 : 0;
  const double magnitude = __builtin_fabs(value);
  if (magnitude >= 65520) return sign | 0x7c00;  // halfway to what would come next
  const int exponent = magnitude < 0x1p-14 ? -14 : __builtin_ilogb(magnitude);
  const int units =
      static_cast<int>(__builtin_nearbyint(__builtin_ldexp(magnitude, 10 - exponent)));
  return static_cast<unsigned short>(sign | (((exponent + 14) << 10) + units));
}

inline unsigned short float_to_half(float value) { return double_to_half(value); }

inline unsigned int floats_to_halves(float low, float high) {
  return float_to_half(low) | static_cast<unsigned int>(float_to_half(high)) << 16;
}

// Rounds to nearest even; a NaN stays one.
inline unsigned int floats_to_bfloats(float low, float high) {
  unsigned int both = 0;
  const float values[2] = {high, low};
  for (const float value : values) {
    const unsigned int bits = __float_as_uint(value);
    const unsigned int rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    both = both << 16 | (value != value ? 0x7fffu : rounded >> 16);
  }
  return both;
}

}  // namespace ptx
