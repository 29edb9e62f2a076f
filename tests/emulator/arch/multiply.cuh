// The twin of kernels_cu/arch/multiply.cuh in C++.
#pragma once

namespace arch {

inline long long multiply_wide(int x, int y) { return static_cast<long long>(x) * y; }

}  // namespace arch
