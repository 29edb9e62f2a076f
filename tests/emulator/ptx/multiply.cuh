// The twin of kernels_cu/ptx/multiply.cuh in C++.
#pragma once

namespace ptx {

inline long long multiply_wide(int x, int y) { return static_cast<long long>(x) * y; }

}  // namespace ptx
