// Copies of boxes of an array to shared memory that one thread begins and a barrier waits for,
// since compute capability 9.0: one PTX instruction per function.
#pragma once

namespace arch {

// Where an array of up to five axes lies, and how large a box is; the host's driver writes it.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// Begins to copy the box whose first element has these coordinates, of the fastest axis first. What
// lies outside of the array becomes 0. Its bytes count at the barrier when they have come.
__device__ __forceinline__ void begin_box_copy(unsigned int to, const TensorMap& map,
                                               unsigned int barrier, int c0, int c1, int c2, int c3,
                                               int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

}  // namespace arch
