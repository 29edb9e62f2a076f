// The twin of kernels_cu/ptx/warp.cuh in C++: the caller's line is what faults report.
#pragma once

namespace ptx {

constexpr int WARP_SIZE = 32;

inline int lane_index() { return static_cast<int>(threadIdx.x % WARP_SIZE); }

template <typename T>
T shuffle_xor(T value, int lanes, EMULATOR_WHERE) {
  return __shfl_xor_sync(emulator::WHOLE_WARP, value, lanes, file, line);
}

template <typename T>
T shuffle(T value, int lane, EMULATOR_WHERE) {
  return __shfl_sync(emulator::WHOLE_WARP, value, lane, file, line);
}

inline bool any_lane(bool condition, EMULATOR_WHERE) {
  return __any_sync(emulator::WHOLE_WARP, condition, file, line) != 0;
}

inline unsigned int ballot(bool condition, EMULATOR_WHERE) {
  return __ballot_sync(emulator::WHOLE_WARP, condition, file, line);
}

inline bool barrier_or(bool condition, EMULATOR_WHERE) {
  return __syncthreads_or(condition, file, line) != 0;
}

}  // namespace ptx
