// Shuffles and votes of the threads of a warp, and a vote of a block.
#pragma once

namespace ptx {

constexpr int WARP_SIZE = 32;

__device__ __forceinline__ int lane_index() { return threadIdx.x % WARP_SIZE; }

// The value of lane (lane_index() ^ lanes). All lanes of the warp call it together.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}

// The value of lane `lane`. All lanes of the warp call it together.
template <typename T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// Whether the condition holds for any lane of the warp. All lanes call it together.
__device__ __forceinline__ bool any_lane(bool condition) {
  return __any_sync(0xffffffffu, condition) != 0;
}

// The lanes of the warp for which the condition holds, as bits. All lanes call it together.
__device__ __forceinline__ unsigned int ballot(bool condition) {
  return __ballot_sync(0xffffffffu, condition);
}

// A barrier of the block that returns to every thread whether the condition holds for any of them.
__device__ __forceinline__ bool barrier_or(bool condition) {
  return __syncthreads_or(condition) != 0;
}

}  // namespace ptx
