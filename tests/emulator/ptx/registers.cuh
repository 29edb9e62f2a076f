// The twin of kernels_cu/ptx/registers.cuh in C++: here a thread has as many as it likes.
#pragma once

namespace ptx {

template <int REGISTERS>
inline void shed_registers() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what there is");
}

template <int REGISTERS>
inline void take_registers() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what there is");
}

}  // namespace ptx
