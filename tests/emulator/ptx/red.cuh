// The twin of kernels_cu/ptx/red.cuh in C++.
#pragma once

namespace ptx {

inline void red_add(float* to_gmem, float x) { emulator::add_at_once(to_gmem, x); }
inline void red_add(double* to_gmem, double x) { emulator::add_at_once(to_gmem, x); }

inline void red_max(unsigned int* to_gmem, unsigned int x) { emulator::raise_at_once(to_gmem, x); }

inline void red_add_v4(float* to_gmem, float x, float y, float z, float w) {
  if (reinterpret_cast<unsigned long long>(to_gmem) % 16 != 0) __builtin_trap();
  red_add(to_gmem, x);
  red_add(to_gmem + 1, y);
  red_add(to_gmem + 2, z);
  red_add(to_gmem + 3, w);
}

}  // namespace ptx
