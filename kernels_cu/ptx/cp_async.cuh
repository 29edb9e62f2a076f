// cp.async: asynchronous copies from global to shared memory that bypass the registers; and 16-byte
// stores to global memory. GPUs before compute capability 8.0 have no cp.async: there the copy is
// synchronous.
#pragma once

namespace ptx {

struct alignas(16) Bytes16 {
  unsigned int x[4];
};

// Issues a copy of 16 bytes, or of 16 zero bytes where not `wanted`.
__device__ __forceinline__ void cp_async(void* to_smem, const void* from_gmem, bool wanted) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"l"(__cvta_generic_to_shared(to_smem)),
      "l"(__cvta_generic_to_global(from_gmem)), "r"(wanted ? 16 : 0)
      : "memory");
#else
  *static_cast<Bytes16*>(to_smem) = wanted ? *static_cast<const Bytes16*>(from_gmem) : Bytes16{};
#endif
}

// Issues a copy of the first `bytes` of 16 bytes to an address in shared memory, and of zeros
// after them. Since compute capability 8.0.
__device__ __forceinline__ void cp_async_partial(unsigned int address, const void* from_gmem,
                                                 int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address),
               "l"(__cvta_generic_to_global(from_gmem)), "r"(bytes)
               : "memory");
}

// The same for what is read only once: it leaves the L2 cache before other data.
__device__ __forceinline__ void cp_async_once(unsigned int address, const void* from_gmem,
                                              int bytes) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(address),
               "l"(__cvta_generic_to_global(from_gmem)), "r"(bytes), "l"(policy)
               : "memory");
}

// Stores 16 bytes to a 16-byte boundary of global memory.
__device__ __forceinline__ void store(void* to_gmem, const Bytes16& bytes) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to_gmem)),
               "r"(bytes.x[0]), "r"(bytes.x[1]), "r"(bytes.x[2]), "r"(bytes.x[3])
               : "memory");
}

// Makes a group of this thread's copies since the last group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last `PENDING` groups of this thread are pending.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits for all copies of this thread. Other threads see them after a barrier.
__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace ptx
