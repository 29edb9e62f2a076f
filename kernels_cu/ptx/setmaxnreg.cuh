// Moves registers between the warpgroups of a block: one PTX instruction per function, on compute
// capability 9.0 only. All warps of a warpgroup call them together.
#pragma once

namespace ptx {

// Lowers the registers of a thread to REGISTERS, and gives the others to the block's pool.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what there is");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Raises the registers of a thread to REGISTERS, and waits until the pool has them.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what there is");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace ptx
