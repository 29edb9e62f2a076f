// The twin of kernels_cu/ptx/setmaxnreg.cuh in C++: here a thread has as many as it likes.
#pragma once

namespace ptx {

template <int REGISTERS>
inline void setmaxnreg_dec() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what there is");
}

template <int REGISTERS>
inline void setmaxnreg_inc() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what there is");
}

}  // namespace ptx
