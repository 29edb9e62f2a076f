// The bytes of words.
#pragma once

namespace ptx {

// Four of the eight bytes of two words: digit n of `selector`, in base 16, says which is byte n;
// those of `high` are 4 to 7. Digits 8 to 15 stand for the sign of one of them, in all of its bits.
__device__ __forceinline__ unsigned int select_bytes(unsigned int low, unsigned int high,
                                                     unsigned int selector) {
  unsigned int result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

// Rounds to codes of float8_e4m3fn, to nearest even, the first in the low byte. What is too large
// becomes the largest number, and NaN stays NaN. Since compute capability 8.9.
__device__ __forceinline__ unsigned short floats_to_e4m3(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

}  // namespace ptx
