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

// A code of 8 bits.
inline double widened_code(unsigned int code, bool e4m3) {
  const unsigned int width = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, size = code & 0x7f;
  const unsigned int exponent = size >> width, fraction = size & ((1u << width) - 1);
  double value;
  if (size == 0x7f || (!e4m3 && size > 0x7c)) {
    value = __builtin_nan("");
  } else if (!e4m3 && size == 0x7c) {
    value = __builtin_inf();
  } else {
    const unsigned int normal = exponent ? 1u << width : 0u;
    const int power = static_cast<int>(exponent ? exponent : 1u) - static_cast<int>(bias + width);
    value = __builtin_ldexp(static_cast<double>(normal + fraction), power);
  }
  return code & 0x80 ? -value : value;
}

// A sum as tensor cores make it of codes: each term is cut off after 13 bits behind the first bit
// of the largest, and so is the sum.
inline float sum_of_codes(const double* terms, unsigned int count) {
  double largest = 0, special = 0;
  for (unsigned int n = 0; n < count; ++n) {
    largest = std::fmax(largest, std::fabs(terms[n]));
    special += terms[n] - terms[n] == 0 ? 0 : terms[n];
  }
  if (special - special != 0) return static_cast<float>(special);
  if (largest == 0) return 0;
  const double unit = __builtin_ldexp(1.0, __builtin_ilogb(largest) - 13);
  double sum = 0;
  for (unsigned int n = 0; n < count; ++n) sum += std::trunc(terms[n] / unit);
  sum *= unit;
  if (sum == 0) return 0;
  const double last = __builtin_ldexp(1.0, __builtin_ilogb(sum) - 13);
  return static_cast<float>(std::trunc(sum / last) * last);
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
