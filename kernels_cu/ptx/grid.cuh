// Grids of one stream that overlap: one PTX instruction per function, on compute capability 9.0 and
// later. Elsewhere, and where the host does not ask for it, a grid begins when the one before has
// ended.
#pragma once

namespace ptx {

// Lets the next grid begin, as soon as all blocks of this one have called it or ended.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the grids before this one have ended, and what they wrote can be read. Before it, a
// kernel reads parameters only, or what was written before the grid that let it begin, or takes
// what it reads for a guess. All lanes of a warp call it together.
__device__ __forceinline__ void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ptx
