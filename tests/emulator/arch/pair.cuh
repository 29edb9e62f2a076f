// The twin of kernels_cu/arch/pair.cuh in C++.
#pragma once

namespace arch {

// EXPONENT has the bits of infinity. A sum of 0 that is not -0.0 with +-0 is 0.
template <unsigned int EXPONENT>
unsigned int zero_times(unsigned int x, unsigned int sum) {
  unsigned int result = 0;
  for (int half = 0; half < 32; half += 16) {
    const unsigned int own = x >> half & 0xffff, before = sum >> half & 0xffff;
    const bool spoilt = (own & EXPONENT) == EXPONENT || (before & 0x7fff) > EXPONENT;
    const bool cancels = before == 0x8000 && (own & 0x8000) == 0;
    result |= (spoilt ? 0x7fff : cancels ? 0 : before) << half;
  }
  return result;
}

inline unsigned int zero_times_halves(unsigned int x, unsigned int sum) {
  return zero_times<0x7c00>(x, sum);
}
inline unsigned int zero_times_bfloats(unsigned int x, unsigned int sum) {
  return zero_times<0x7f80>(x, sum);
}

}  // namespace arch
