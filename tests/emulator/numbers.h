// Numbers as tensor cores take and make them.
#pragma once

#include <cmath>

namespace emulator {

// One of two 16-bit elements. Subnormal ones keep their value.
inline double widened(unsigned int pair, unsigned int which, bool brain) {
  const unsigned int bits = pair >> 16 * which & 0xffffu;
  const unsigned int width = brain ? 7 : 10, bias = brain ? 127 : 15;
  const unsigned int exponent = (bits & 0x7fffu) >> width, fraction = bits & ((1u << width) - 1);
  double value;
  if (exponent == 2 * bias + 1) {
    value = fraction ? __builtin_nan("") : __builtin_inf();
  } else {
    const unsigned int normal = exponent ? 1u << width : 0u;
    const int power = static_cast<int>(exponent ? exponent : 1u) - static_cast<int>(bias + width);
    value = __builtin_ldexp(static_cast<double>(normal + fraction), power);
  }
  return bits >> 15 ? -value : value;
}

// Rounds toward zero; what is too large becomes infinite.
inline float cut_off(double exact) {
  const float nearest = static_cast<float>(exact);
  if (nearest - nearest != 0 || std::fabs(static_cast<double>(nearest)) <= std::fabs(exact)) {
    return nearest;
  }
  return std::nextafter(nearest, 0.0f);
}

}  // namespace emulator
