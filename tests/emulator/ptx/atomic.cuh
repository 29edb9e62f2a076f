// The twin of kernels_cu/ptx/atomic.cuh in C++.
#pragma once

namespace ptx {

inline void fence_device() { emulator::fence_device(); }

inline void fence_system() { emulator::fence_device(); }

inline void tell_host(unsigned long long* place, unsigned long long value) {
  unsigned long long seen = 0;
  for (unsigned long long found;
       (found = emulator::compare_and_swap(place, seen, value)) != seen;) {
    seen = found;
  }
}

inline unsigned long long compare_and_swap(unsigned long long* place_gmem,
                                           unsigned long long expected,
                                           unsigned long long desired) {
  return emulator::compare_and_swap(place_gmem, expected, desired);
}

inline unsigned long long fetch_add(unsigned long long* place_gmem, unsigned long long value) {
  unsigned long long seen = 0;
  while (true) {
    const unsigned long long found = emulator::compare_and_swap(place_gmem, seen, seen + value);
    if (found == seen) return found;
    seen = found;
  }
}

}  // namespace ptx
