// The twin of kernels_cu/ptx/grid.cuh in C++. What the grid ahead writes late is there when the
// first thread waits for it.
#pragma once

namespace ptx {

inline void launch_dependents() {}
inline void wait_for_grids() { emulator::end_grids(); }

}  // namespace ptx
