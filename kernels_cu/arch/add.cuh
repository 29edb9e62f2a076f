// Additions to numbers in global memory that other blocks add to, too: one PTX instruction per
// function where the GPU has it.
#pragma once

namespace arch {

__device__ __forceinline__ void add(float* to_gmem, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to_gmem)), "f"(x)
               : "memory");
}

__device__ __forceinline__ void add(double* to_gmem, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(__cvta_generic_to_global(to_gmem)), "d"(x)
               : "memory");
}

// Adds to two neighbours, the first of which begins on an 8-byte boundary.
__device__ __forceinline__ void add_pair(float* to_gmem, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to_gmem)),
               "f"(x), "f"(y)
               : "memory");
#else
  add(to_gmem, x);
  add(to_gmem + 1, y);
#endif
}

}  // namespace arch
