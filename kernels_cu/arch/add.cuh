// Additions to numbers in global memory that other blocks add to, too: one PTX instruction per
// function.
#pragma once

namespace arch {

__device__ __forceinline__ void add(float* to_gmem, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to_gmem)), "f"(x)
               : "memory");
}

}  // namespace arch
