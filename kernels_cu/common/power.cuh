// 2^x in the accumulator's types, for x <= 0 or slightly above.
#pragma once
#include "../ptx/exp2.cuh"

namespace power {

__device__ __forceinline__ float exp2(float x) { return ptx::exp2(x); }

// x = n + f with an integer n and |f| <= 1/2; 2^f is the minimax polynomial of degree 10 in
// relative error: 2^-52 exactly, 2^-51 with roundings. Results below 2^-1022 flush to 0. It has no
// branch, and NaN stays NaN.
__device__ __forceinline__ double exp2(double x) {
  constexpr double COEFFICIENTS[] = {0x1.e398f94be91efp-28,
                                     0x1.b6740ee6dbadep-24,
                                     0x1.62c1580231d06p-20,
                                     0x1.ffcb55e91c0b4p-17,
                                     0x1.430912604f85ap-13,
                                     0x1.5d87fe9cc583ap-10,
                                     0x1.3b2ab6fbde114p-7,
                                     0x1.c6b08d703d48dp-5,
                                     0x1.ebfbdff82c3b9p-3,
                                     0x1.62e42fefa3a17p-1,
                                     1.0};
  constexpr double WHOLE = 0x1.8p52;  // rounds to an integer: the low bits of x + WHOLE are n
  const double shifted = x + WHOLE;
  const double f = x - (shifted - WHOLE);
  double y = COEFFICIENTS[0];
#pragma unroll
  for (int n = 1; n <= 10; ++n) y = fma(y, f, COEFFICIENTS[n]);
  const int exponent = static_cast<int>(__double_as_longlong(shifted));
  const double whole = __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
  return x < -1022.0 ? 0.0 : y * whole;
}

}  // namespace power
