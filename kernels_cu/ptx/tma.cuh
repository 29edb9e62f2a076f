// TMA: asynchronous copies of boxes of an array to shared memory and back, each issued by one
// thread, since compute capability 9.0: one PTX instruction per function.
#pragma once

namespace ptx {

// A tensor map: where an array of up to five axes lies, and how large its boxes are. The driver
// encodes it on the host.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// Issues a load of the box whose first element has these coordinates, the fastest axis first.
// Elements outside of the array become 0. The bytes count at an mbarrier when they have arrived.
__device__ __forceinline__ void tma_load(unsigned int to, const TensorMap& map,
                                         unsigned int barrier, int c0, int c1, int c2, int c3,
                                         int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same for a box that few read, at about the same time: it leaves the L2 cache before other
// data.
__device__ __forceinline__ void tma_load_once(unsigned int to, const TensorMap& map,
                                              unsigned int barrier, int c0, int c1, int c2, int c3,
                                              int c4) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

// Issues a store of a box; elements outside of the array are not written. fence_proxy_async must
// follow the writes to shared memory that it reads. Groups of stores belong to the issuing thread.
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned int from, int c0, int c1,
                                          int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Makes a group of this thread's stores since the last group.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all groups of this thread have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace ptx
