// 1 / x by the special function unit: relative error at most 2^-23, of results below 2^-126 it is
// 0.
#pragma once

namespace ptx {

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx
