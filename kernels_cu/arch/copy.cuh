// Copying from global to shared memory past the registers, while the thread goes on. GPUs before
// compute capability 8.0 have no such instruction: there the copy is finished at once.
#pragma once

namespace arch {

struct alignas(16) Bytes16 {
  unsigned int x[4];
};

// Begins to copy 16 bytes, or to write 16 zero bytes where not `wanted`.
__device__ __forceinline__ void begin_copy(void* to_smem, const void* from_gmem, bool wanted) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"l"(__cvta_generic_to_shared(to_smem)),
      "l"(__cvta_generic_to_global(from_gmem)), "r"(wanted ? 16 : 0)
      : "memory");
#else
  *static_cast<Bytes16*>(to_smem) = wanted ? *static_cast<const Bytes16*>(from_gmem) : Bytes16{};
#endif
}

// Waits for the copies that this thread began. Other threads see them after a barrier.
__device__ __forceinline__ void finish_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace arch
