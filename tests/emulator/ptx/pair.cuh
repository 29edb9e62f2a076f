// The twin of kernels_cu/ptx/pair.cuh in C++.
#pragma once
#include "convert.cuh"

namespace ptx {

// EXPONENT has the bits of infinity. Of -0.0 and +0 the sum is +0.
template <unsigned int EXPONENT>
struct ZeroTimes {
  unsigned int result = 0;

  ZeroTimes(unsigned int x, unsigned int sum) {
    for (int half = 0; half < 32; half += 16) {
      const unsigned int own = x >> half & 0xffff, before = sum >> half & 0xffff;
      const bool spoilt = (own & EXPONENT) == EXPONENT || (before & 0x7fff) > EXPONENT;
      const bool cancels = before == 0x8000 && (own & 0x8000) == 0;
      result |= (spoilt ? 0x7fff : cancels ? 0 : before) << half;
    }
  }
};

// x y + z of two 16-bit numbers each: exact in float64 before it is rounded, if they are of a size.
struct Fma {
  static double of_bfloat(unsigned int bits) {
    const int exponent = bits >> 7 & 255, fraction = bits & 127;
    const double sign = bits >> 15 & 1 ? -1 : 1;
    if (exponent == 255) return fraction ? __builtin_nan("") : sign * __builtin_inf();
    return sign * (exponent == 0 ? __builtin_ldexp(fraction, -133)
                                 : __builtin_ldexp(128 + fraction, exponent - 134));
  }
  static double of_half(unsigned int bits) {
    return half_to_float(static_cast<unsigned short>(bits));
  }
  static unsigned int to_bfloat(double value) {
    if (value != value) return 0x7fff;
    const unsigned int sign = __builtin_signbit(value) ? 0x8000 : 0;
    const double size = __builtin_fabs(value);
    if (size >= 0x1.ffp127) return sign | 0x7f80;  // halfway to what would come next
    const int exponent = size < 0x1p-126 ? -126 : __builtin_ilogb(size);
    const int units = static_cast<int>(__builtin_nearbyint(__builtin_ldexp(size, 7 - exponent)));
    return sign | (((exponent + 126) << 7) + units);
  }
  template <class From, class To>
  static unsigned int both(unsigned int x, unsigned int y, unsigned int z, From from, To to) {
    unsigned int result = 0;
    for (int half = 0; half < 32; half += 16) {
      const double product = from(x >> half & 0xffff) * from(y >> half & 0xffff);
      result |= static_cast<unsigned int>(to(product + from(z >> half & 0xffff))) << half;
    }
    return result;
  }
};

inline unsigned int fma_halves(unsigned int x, unsigned int y, unsigned int z) {
  return Fma::both(x, y, z, Fma::of_half, double_to_half);
}
inline unsigned int fma_bfloats(unsigned int x, unsigned int y, unsigned int z) {
  return Fma::both(x, y, z, Fma::of_bfloat, Fma::to_bfloat);
}

inline unsigned int zero_times_halves(unsigned int x, unsigned int sum) {
  return ZeroTimes<0x7c00>(x, sum).result;
}
inline unsigned int zero_times_bfloats(unsigned int x, unsigned int sum) {
  return ZeroTimes<0x7f80>(x, sum).result;
}

}  // namespace ptx
