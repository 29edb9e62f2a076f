// What the generated code of masks and scores calls beyond lookup.cuh: see cupyflash/expr/cuda.py.
#pragma once
#include "lookup.cuh"

template <typename T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(number::bits_to_float(0x7f800000u));
}

template <typename T>
__device__ __forceinline__ T not_a_number() {
  return static_cast<T>(number::bits_to_float(0x7fc00000u));
}

// A product that is rounded before anything is added to it, as NumPy's is.
__device__ __forceinline__ float multiply_rounded(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double multiply_rounded(double x, double y) { return __dmul_rn(x, y); }

// Sums and products of the bounds of integers. A bound beyond 64 bits is no bound at all, so they
// stop at the ends; what they bound does not leave 64 bits.
__device__ __forceinline__ long long saturating_add(long long x, long long y) {
  const long long sum = static_cast<long long>(static_cast<unsigned long long>(x) +
                                               static_cast<unsigned long long>(y));
  const bool left = ((x ^ sum) & (y ^ sum)) < 0;  // the sum's sign is neither operand's
  return left ? (x < 0 ? SMALLEST_INT : LARGEST_INT) : sum;
}

__device__ __forceinline__ long long saturating_subtract(long long x, long long y) {
  const long long difference = static_cast<long long>(static_cast<unsigned long long>(x) -
                                                      static_cast<unsigned long long>(y));
  const bool left = ((x ^ y) & (x ^ difference)) < 0;
  return left ? (x < 0 ? SMALLEST_INT : LARGEST_INT) : difference;
}

__device__ __forceinline__ long long saturating_multiply(long long x, long long y) {
  const long long low = static_cast<long long>(static_cast<unsigned long long>(x) *
                                               static_cast<unsigned long long>(y));
  const long long high = __mul64hi(x, y);
  const bool left = high != (low < 0 ? -1 : 0);  // the upper half is not the lower one's sign
  return left ? ((x < 0) != (y < 0) ? SMALLEST_INT : LARGEST_INT) : low;
}
