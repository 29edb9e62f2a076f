// Arithmetic that generated code of masks and scores calls, beyond lookup.cuh: see
// cupyflash/expr/cuda.py.
#pragma once
#include "../ptx/exp2.cuh"
#include "../ptx/reciprocal.cuh"
#include "lookup.cuh"

template <typename T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(number::bits_to_float(0x7f800000u));
}

template <typename T>
__device__ __forceinline__ T not_a_number() {
  return static_cast<T>(number::bits_to_float(0x7fc00000u));
}

// A product that is not fused with an addition, as in NumPy.
__device__ __forceinline__ float multiply_rounded(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double multiply_rounded(double x, double y) { return __dmul_rn(x, y); }

// Branch-free, because many calls are unrolled side by side. Near 0 a minimax polynomial in
// relative error; further out, 1 - 2 / (e^2x + 1). Either is within 7 units in the last place of
// float32.
__device__ __forceinline__ float tanh_of(float x) {
  constexpr float EDGE = 0.65f;
  constexpr float COEFFICIENTS[] = {0x1.e43210p-7f, -0x1.a734a4p-5f, 0x1.106ea0p-3f,
                                    -0x1.5551e0p-2f};
  const float square = x * x;
  float y = COEFFICIENTS[0];
#pragma unroll
  for (int n = 1; n <= 3; ++n) y = fma(y, square, COEFFICIENTS[n]);
  const float power = ptx::exp2(fabs(x) * (2 * number::LOG2_E<float>));
  const float beyond = fma(ptx::reciprocal(power + 1.0f), -2.0f, 1.0f);
  return fabs(x) < EDGE ? fma(y * square, x, x) : copysign(beyond, x);
}
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

// 1 / (1 + e^-x) without overflow.
template <typename T>
__device__ __forceinline__ T sigmoid(T x) {
  const T grown = exp(-fabs(x));  // at most 1
  return (x < T(0) ? grown : T(1)) / (T(1) + grown);
}

// Sums and products of bounds of integers saturate: a bound outside 64 bits bounds nothing, since
// what is bounded has 64 bits.
__device__ __forceinline__ long long saturating_add(long long x, long long y) {
  const long long sum = static_cast<long long>(static_cast<unsigned long long>(x) +
                                               static_cast<unsigned long long>(y));
  const bool overflows = ((x ^ sum) & (y ^ sum)) < 0;  // the sum has neither operand's sign
  return overflows ? (x < 0 ? SMALLEST_INT : LARGEST_INT) : sum;
}

__device__ __forceinline__ long long saturating_subtract(long long x, long long y) {
  const long long difference = static_cast<long long>(static_cast<unsigned long long>(x) -
                                                      static_cast<unsigned long long>(y));
  const bool overflows = ((x ^ y) & (x ^ difference)) < 0;
  return overflows ? (x < 0 ? SMALLEST_INT : LARGEST_INT) : difference;
}

__device__ __forceinline__ long long saturating_multiply(long long x, long long y) {
  const long long low = static_cast<long long>(static_cast<unsigned long long>(x) *
                                               static_cast<unsigned long long>(y));
  const long long high = __mul64hi(x, y);
  const bool overflows = high != (low < 0 ? -1 : 0);  // the upper half is not a sign extension
  return overflows ? ((x < 0) != (y < 0) ? SMALLEST_INT : LARGEST_INT) : low;
}

// By a proven number of bits, at least 0.
__device__ __forceinline__ long long saturating_left_shift(long long x, long long bits) {
  const long long moved = left_shift(x, bits);
  return right_shift(moved, bits) == x ? moved : (x < 0 ? SMALLEST_INT : LARGEST_INT);
}
