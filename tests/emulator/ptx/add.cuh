// The twin of kernels_cu/ptx/add.cuh in C++.
#pragma once

namespace ptx {

inline void add(float* to_gmem, float x) { emulator::add_at_once(to_gmem, x); }
inline void add(double* to_gmem, double x) { emulator::add_at_once(to_gmem, x); }

inline void add_four(float* to_gmem, float x, float y, float z, float w) {
  if (reinterpret_cast<unsigned long long>(to_gmem) % 16 != 0) __builtin_trap();
  add(to_gmem, x);
  add(to_gmem + 1, y);
  add(to_gmem + 2, z);
  add(to_gmem + 3, w);
}

}  // namespace ptx
