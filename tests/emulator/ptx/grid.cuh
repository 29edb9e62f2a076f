// The twin of kernels_cu/ptx/grid.cuh in C++. What the grid ahead writes late is there when the
// first warp waits for it.
#pragma once

namespace ptx {

inline void launch_dependents() {}
inline void wait_for_grids(EMULATOR_WHERE) {
  // All lanes are here: none is told late writes before another one has read what was there.
  emulator::meet_warp("wait_for_grids", {file, line}, emulator::WHOLE_WARP, false, 0, 0);
  emulator::end_grids();
}

}  // namespace ptx
