// The twin of kernels_cu/ptx/pair.cuh in C++.
#pragma once

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

inline unsigned int zero_times_halves(unsigned int x, unsigned int sum) {
  return ZeroTimes<0x7c00>(x, sum).result;
}
inline unsigned int zero_times_bfloats(unsigned int x, unsigned int sum) {
  return ZeroTimes<0x7f80>(x, sum).result;
}

}  // namespace ptx
