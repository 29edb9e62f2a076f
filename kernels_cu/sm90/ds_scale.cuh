// The scales of dS in float16 in backward_sm90_dkdv.cu: each warp has a power of two, and a tile of
// dS is brought to a common one for the product for dq.
#pragma once
#include "../warp/fragment_gradient_ds.cuh"
#include "backward_storage.cuh"

namespace ds_scale {

using backward_storage::ALONE;
using backward_storage::CONSUMER_WARPS;
using backward_storage::consumers_sync;
using backward_storage::QUERY_PARTS;

using Scale = fragment_gradient::DsScale;

// The largest finite magnitude of dS in a tile. All consumer threads call it together.
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

// Brings a tile of dS in shared memory to a common factor, the smallest of those of warps and
// parts, and returns it. One consumer calls it alone, or `both_consumers` do; then the first one
// does the work.
__device__ __forceinline__ float common_scale(
    const float (&scales_smem)[QUERY_PARTS * CONSUMER_WARPS], char* ds_smem, bool both_consumers) {
  constexpr int SCALES = QUERY_PARTS * CONSUMER_WARPS;
  const float of_warp = scales_smem[ptx::lane_index() % SCALES];
  if (!ptx::any_lane(of_warp != ptx::shuffle(of_warp, 0))) return ptx::shuffle(of_warp, 0);
  float least = of_warp;
#pragma unroll
  for (int lanes = SCALES / 2; lanes > 0; lanes /= 2) {
    least = fmin(least, ptx::shuffle_xor(least, lanes));
  }
  if (!both_consumers || warpgroup::index() == 0) {
#pragma unroll 1
    for (int n = threadIdx.x % warpgroup::WARPGROUP_SIZE;
         n < BLOCK_KV * warpgroup::SLAB_ROW_BYTES / 4; n += warpgroup::WARPGROUP_SIZE) {
      const int row = n / (warpgroup::SLAB_ROW_BYTES / 4);
      // The part whose queries the word has: pieces of a row lie at their number ^ (row % 8).
      const int part = QUERY_PARTS == 1 ? 0 : (n / 4 ^ row) / (8 / QUERY_PARTS) % QUERY_PARTS;
      const float ratio = least * Scale{scales_smem[part * CONSUMER_WARPS + row / 16]}.inverse();
      unsigned int& word = reinterpret_cast<unsigned int*>(ds_smem)[n];
      word = number::narrow_pair(number::widen(static_cast<storage_t>(word)) * ratio,
                                 number::widen(static_cast<storage_t>(word >> 16)) * ratio);
    }
    ptx::fence_proxy_async();
  }
  if (both_consumers) {
    consumers_sync();  // dS, with one factor
  } else {
    // The other consumer is never at this barrier at the same time: before it multiplies a tile of
    // dS, it stores its next dS in the stage that this consumer has to release first.
    ptx::named_barrier_sync(ALONE, warpgroup::WARPGROUP_SIZE);  // dS, with one factor
  }
  return least;
}

// What a warp multiplies dS by; its sums of dk have the same scale. In float16 the factor is the
// largest possible one until the first dS that is not 0; in bfloat16 it is 1.
struct WarpScale {
  float factor = IS_FLOAT16 ? Scale::factor_for(0.0f) : 1.0f;
  float common = factor;       // the smallest of the warps' factors, when last they differed
  float next_common = factor;  // of a consumer without another one

  __device__ __forceinline__ bool is_first() const { return factor == Scale::factor_for(0.0f); }
  __device__ __forceinline__ float inverse() const { return Scale{factor}.inverse(); }

  // Lowers the factor for |dS| up to `x`, and rescales the sums.
  template <int COLUMNS>
  __device__ __forceinline__ void rescale(float x, float (&sums)[2][COLUMNS]) {
    Scale scale{factor, 32768.0f * inverse()};
    scale.rescale(x, sums);
    factor = scale.factor;
  }

  // Takes the common factor, and rescales the sums, so that the next tiles already have a common
  // one; unless it is so small that few bits of this warp's dS would be left.
  template <int COLUMNS>
  __device__ __forceinline__ void take_common(float (&sums)[2][COLUMNS]) {
    constexpr float NEAR = 1.0f / 65536;
    if (common >= factor || common * inverse() < NEAR) return;
    matmul::scale(sums, common * inverse());
    factor = common;
  }

  // A consumer without another one brings each tile of dS to a common factor, and returns it. It
  // takes one when the first of two would, which computes the dq of even tiles during the next
  // tile: so dk has the same bits.
  __device__ __forceinline__ float make_common(
      const float (&scales_smem)[QUERY_PARTS * CONSUMER_WARPS], char* ds_smem, int stage) {
    const float of_tile = common_scale(scales_smem, ds_smem, true);
    if (stage == 0) {
      next_common = of_tile;
    } else {
      common = next_common;
    }
    return of_tile;
  }
};

}  // namespace ds_scale
