// Atomic additions and maxima in global memory without a result: one PTX instruction per function.
#pragma once

namespace ptx {

__device__ __forceinline__ void red_add(float* to_gmem, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to_gmem)), "f"(x)
               : "memory");
}

__device__ __forceinline__ void red_add(double* to_gmem, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(__cvta_generic_to_global(to_gmem)), "d"(x)
               : "memory");
}

// Raises a number to x if that is larger.
__device__ __forceinline__ void red_max(unsigned int* to_gmem, unsigned int x) {
  asm volatile("red.global.max.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to_gmem)), "r"(x)
               : "memory");
}

// Adds to four adjacent numbers, of which the first lies on a 16-byte boundary.
__device__ __forceinline__ void red_add_v4(float* to_gmem, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to_gmem)),
      "f"(x), "f"(y), "f"(z), "f"(w)
      : "memory");
#else
  red_add(to_gmem, x);
  red_add(to_gmem + 1, y);
  red_add(to_gmem + 2, z);
  red_add(to_gmem + 3, w);
#endif
}

}  // namespace ptx
