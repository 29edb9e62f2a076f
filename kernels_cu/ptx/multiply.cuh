// The product of two 32-bit integers in 64 bits. Written as a product of two widened numbers, the
// compiler multiplies 64 by 64 bits if one of them comes from outside a loop: three instructions.
#pragma once

namespace ptx {

__device__ __forceinline__ long long multiply_wide(int x, int y) {
  long long product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  return product;
}

}  // namespace ptx
