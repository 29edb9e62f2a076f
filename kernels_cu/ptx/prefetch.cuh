// Prefetches: one PTX instruction per function. They change no result.
#pragma once

namespace ptx {

// Brings bytes of global memory to the L2 cache, which has what was last written, ahead of reads
// that are the only ones: they leave it before other data. `address` and `bytes` are multiples of
// 16. Since compute capability 9.0.
__device__ __forceinline__ void prefetch_once(const void* address, int bytes) {
#if __CUDA_ARCH__ >= 900
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(
                   __cvta_generic_to_global(address)),
               "r"(bytes), "l"(policy)
               : "memory");
#endif
}

// Brings a tensor map of the kernel's parameters to where TMA reads it.
__device__ __forceinline__ void prefetch_map(const void* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

}  // namespace ptx
