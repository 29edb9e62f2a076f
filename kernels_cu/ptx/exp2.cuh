// 2^x by the special function unit: relative error at most 2^-22, results below 2^-126 are 0.
#pragma once

namespace ptx {

__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx
