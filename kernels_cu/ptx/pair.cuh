// Arithmetic on two packed 16-bit numbers, the first in the low half.
#pragma once

namespace ptx {

// sum + 0 x: NaN if x is not finite, or if sum is NaN.
__device__ __forceinline__ unsigned int zero_times_halves(unsigned int x, unsigned int sum) {
  unsigned int result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(0u), "r"(sum));
  return result;
}

// x y + z, rounded once.
__device__ __forceinline__ unsigned int fma_halves(unsigned int x, unsigned int y, unsigned int z) {
  unsigned int result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}

// Since compute capability 8.0, as the next.
__device__ __forceinline__ unsigned int fma_bfloats(unsigned int x, unsigned int y,
                                                    unsigned int z) {
  unsigned int result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}

__device__ __forceinline__ unsigned int zero_times_bfloats(unsigned int x, unsigned int sum) {
  unsigned int result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(0u), "r"(sum));
  return result;
}

}  // namespace ptx
