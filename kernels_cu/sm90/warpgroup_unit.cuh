// Units of dS in float16: each warp's power of two, and a tile brought to one of them.
#pragma once
#include "../sm80/fragment_gradient.cuh"
#include "warpgroup_passing.cuh"

namespace warpgroup_unit {

using warpgroup_passing::CONSUMER_THREADS;
using warpgroup_passing::CONSUMER_WARPS;
using warpgroup_passing::TOGETHER;

// The largest finite magnitude of dS in a tile, by all threads that compute.
template <int COLUMNS>
__device__ __forceinline__ float largest_of_tile(float (&largest_smem)[CONSUMER_WARPS],
                                                 const float (&ds)[2][COLUMNS]) {
  const float own = fragment_gradient::largest_finite(ds);
  if (ptx::lane_index() == 0) largest_smem[threadIdx.x / ptx::WARP_SIZE] = own;
  ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // the warps' largest
  float largest = 0;
#pragma unroll
  for (int n = 0; n < CONSUMER_WARPS; ++n) largest = fmax(largest, largest_smem[n]);
  return largest;
}

// What a warp multiplies dS by in float16, as large as it can be at first.
struct WarpUnit {
  float factor = STORAGE == 0 ? fragment_gradient::DsScale::factor_for(0.0f) : 1.0f;
  float agreed = factor;  // the least of the warps' factors, when last they differed

  __device__ __forceinline__ bool is_first() const {
    return factor == fragment_gradient::DsScale::factor_for(0.0f);
  }
  __device__ __forceinline__ float inverse() const {
    return fragment_gradient::DsScale{factor}.inverse();
  }

  // Takes numbers up to `x` in, and brings sums to the new unit.
  template <int COLUMNS>
  __device__ __forceinline__ void rescale(float x, float (&sums)[2][COLUMNS]) {
    fragment_gradient::DsScale unit{factor, 32768.0f * inverse()};
    unit.rescale(x, sums);
    factor = unit.factor;
  }

  // Takes the least of all, so that the next tiles need not be brought to one unit, unless it is so
  // small that few bits of dS would be left.
  template <int COLUMNS>
  __device__ __forceinline__ void agree(float (&sums)[2][COLUMNS]) {
    constexpr float NEAR = 1.0f / 65536;
    if (agreed >= factor || agreed * inverse() < NEAR) return;
    matmul::scale(sums, agreed * inverse());
    factor = agreed;
  }
};

// Brings a tile of dS to one unit before it is multiplied for dq: the largest among those of the
// warps whose keys are its rows. By one warpgroup, or TOGETHER by both, of which the first one does
// it. Returns what dS is multiplied by.
__device__ __forceinline__ float unify(const float (&factors_smem)[CONSUMER_WARPS], char* ds_smem,
                                       bool together) {
  const float own = factors_smem[ptx::lane_index() % CONSUMER_WARPS];
  if (!ptx::any_lane(own != ptx::shuffle(own, 0))) return ptx::shuffle(own, 0);
  float least = own;
#pragma unroll
  for (int lanes = CONSUMER_WARPS / 2; lanes > 0; lanes /= 2) {
    least = fmin(least, ptx::shuffle_xor(least, lanes));
  }
  if (!together || warpgroup::index() == 0) {
#pragma unroll 1
    for (int n = threadIdx.x % warpgroup::WARPGROUP_SIZE;
         n < BLOCK_KV * warpgroup::SLAB_ROW_BYTES / 4; n += warpgroup::WARPGROUP_SIZE) {
      const int row = n / (warpgroup::SLAB_ROW_BYTES / 4);
      const float ratio = least * fragment_gradient::DsScale{factors_smem[row / 16]}.inverse();
      unsigned int& word = reinterpret_cast<unsigned int*>(ds_smem)[n];
      word = number::narrow_pair(number::widen(static_cast<storage_t>(word)) * ratio,
                                 number::widen(static_cast<storage_t>(word >> 16)) * ratio);
    }
    ptx::fence_proxy_async();
  }
  if (together) {
    ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // dS in one unit
  } else {  // one at a time: the other one first stores dS in the place of this tile
    ptx::named_barrier_sync(TOGETHER + 1, warpgroup::WARPGROUP_SIZE);  // the same
  }
  return least;
}

}  // namespace warpgroup_unit
