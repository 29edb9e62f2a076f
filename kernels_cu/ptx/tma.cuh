// Copies of boxes of an array to shared memory that one thread begins and a barrier waits for, and
// from there to an array, since compute capability 9.0: one PTX instruction per function.
#pragma once

namespace ptx {

// Where an array of up to five axes lies, and how large a box is; the host's driver writes it.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// Begins to copy the box whose first element has these coordinates, of the fastest axis first. What
// lies outside of the array becomes 0. Its bytes count at the barrier when they have come.
__device__ __forceinline__ void tma_load(unsigned int to, const TensorMap& map,
                                         unsigned int barrier, int c0, int c1, int c2, int c3,
                                         int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Begins to copy a box to an array, but for what lies outside of it. What was written to shared
// memory has to be published before. The thread that began copies makes groups of them.
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned int from, int c0, int c1,
                                          int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Makes a group of this thread's copies to arrays since the last one.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's groups have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace ptx
