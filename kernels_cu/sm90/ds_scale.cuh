// The powers of two by which backward_sm90_dkdv.cu multiplies dS before it rounds it to float16:
// one of each warp, and how the warps of a tile come to a common one for the product for dq.
#pragma once
#include "../sm80/fragment_gradient.cuh"
#include "backward_storage.cuh"

namespace ds_scale {

using backward_storage::CONSUMER_WARPS;
using backward_storage::consumers_sync;

using Scale = fragment_gradient::DsScale;  // a power of two

constexpr int WARPGROUP_BARRIER = backward_storage::ALL_CONSUMERS + 1;

// The largest finite magnitude of dS in a tile, by all consumers.
template <int COLUMNS>
__device__ __forceinline__ float largest_of_tile(float (&largest_smem)[CONSUMER_WARPS],
                                                 const float (&ds)[2][COLUMNS]) {
  const float of_warp = fragment_gradient::largest_finite(ds);
  if (ptx::lane_index() == 0) largest_smem[threadIdx.x / ptx::WARP_SIZE] = of_warp;
  consumers_sync();  // the warps' largest magnitudes
  float largest = 0;
#pragma unroll
  for (int n = 0; n < CONSUMER_WARPS; ++n) largest = fmax(largest, largest_smem[n]);
  return largest;
}

// What a warp multiplies dS by, and what the sums of dk are multiplied by therefore. In float16 it
// is as large as it can be until the first dS that is not 0; else it is 1.
struct WarpScale {
  float factor = IS_FLOAT16 ? Scale::factor_for(0.0f) : 1.0f;
  float common = factor;  // the smallest of the warps' factors, when last they differed

  __device__ __forceinline__ bool is_first() const { return factor == Scale::factor_for(0.0f); }
  __device__ __forceinline__ float inverse() const { return Scale{factor}.inverse(); }

  // Makes the factor small enough for magnitudes up to `x`; the sums follow.
  template <int COLUMNS>
  __device__ __forceinline__ void rescale(float x, float (&sums)[2][COLUMNS]) {
    Scale scale{factor, 32768.0f * inverse()};
    scale.rescale(x, sums);
    factor = scale.factor;
  }

  // Takes the common factor, so that the next tiles need no common_scale, unless it is so small
  // that few bits of this warp's dS would be left. The sums follow.
  template <int COLUMNS>
  __device__ __forceinline__ void take_common(float (&sums)[2][COLUMNS]) {
    constexpr float NEAR = 1.0f / 65536;
    if (common >= factor || common * inverse() < NEAR) return;
    matmul::scale(sums, common * inverse());
    factor = common;
  }
};

// Brings a tile of dS to one factor before it is multiplied for dq, the smallest among those of the
// warps whose keys are its rows, and returns it. It is called by one consumer alone, or by
// `both_consumers`, of which the first one does the work.
__device__ __forceinline__ float common_scale(const float (&scales_smem)[CONSUMER_WARPS],
                                              char* ds_smem, bool both_consumers) {
  const float of_warp = scales_smem[ptx::lane_index() % CONSUMER_WARPS];
  if (!ptx::any_lane(of_warp != ptx::shuffle(of_warp, 0))) return ptx::shuffle(of_warp, 0);
  float least = of_warp;
#pragma unroll
  for (int lanes = CONSUMER_WARPS / 2; lanes > 0; lanes /= 2) {
    least = fmin(least, ptx::shuffle_xor(least, lanes));
  }
  if (!both_consumers || warpgroup::index() == 0) {
#pragma unroll 1
    for (int n = threadIdx.x % warpgroup::WARPGROUP_SIZE;
         n < BLOCK_KV * warpgroup::SLAB_ROW_BYTES / 4; n += warpgroup::WARPGROUP_SIZE) {
      const int row = n / (warpgroup::SLAB_ROW_BYTES / 4);
      const float ratio = least * Scale{scales_smem[row / 16]}.inverse();
      unsigned int& word = reinterpret_cast<unsigned int*>(ds_smem)[n];
      word = number::narrow_pair(number::widen(static_cast<storage_t>(word)) * ratio,
                                 number::widen(static_cast<storage_t>(word >> 16)) * ratio);
    }
    ptx::fence_proxy_async();
  }
  if (both_consumers) {
    consumers_sync();  // dS, multiplied by one factor
  } else {
    // The same, of one warpgroup. Both never are here at a time: before the other one multiplies a
    // tile of dS, it stores its next dS in the stage that this one is to release first.
    ptx::named_barrier_sync(WARPGROUP_BARRIER, warpgroup::WARPGROUP_SIZE);
  }
  return least;
}

}  // namespace ds_scale
