// The twin of kernels_cu/ptx/atomic.cuh in C++.
#pragma once

namespace ptx {

inline void fence_device() { emulator::fence_device(); }

inline unsigned long long compare_and_swap(unsigned long long* place_gmem,
                                           unsigned long long expected,
                                           unsigned long long desired) {
  return emulator::compare_and_swap(place_gmem, expected, desired);
}

}  // namespace ptx
