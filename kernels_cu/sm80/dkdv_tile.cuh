// What blocks of backward_sm80_dkdv.cu and backward_sm80_dkdv_tile.cu do alike with a tile and with
// dk and dv.
#pragma once
#include "../warp/fragment_gradient_ds.cuh"
#include "dkdv_storage.cuh"

namespace dkdv_tile {

using namespace dkdv_storage;

using Dk = float[SUM_ROWS][ShareK::COLUMNS];
using Dv = float[SUM_ROWS][ShareV::COLUMNS];

// All warps: agree on a scale of dS that the largest |dS| of any allows. `part` parts of the tile
// already have dS in shared memory, which then are brought to the new scale.
__device__ __forceinline__ void rescale_ds(const float (&ds)[ROWS][COLUMNS], Dk& dk, int part,
                                           int warp_key, int warp_query, float* largest_smem,
                                           char* ds_smem, fragment_gradient::DsScale& ds_scale) {
  const float of_warp = fragment_gradient::largest_finite(ds);
  if (ptx::lane_index() == 0) largest_smem[threadIdx.x / ptx::WARP_SIZE] = of_warp;
  __syncthreads();  // the warps' largest |dS|
  float largest = 0;
#pragma unroll
  for (int n = 0; n < WARPS; ++n) largest = fmax(largest, largest_smem[n]);
  const float before = ds_scale.inverse();
  if (largest > ds_scale.largest) ds_scale.rescale(largest, dk);
  for (int n = 0; n < part; ++n) {
    const fragment_gradient::Corner other(warp_key, warp_query + n * PART_QUERIES);
    fragment_gradient::scale_words<P_BYTES, ROWS, COLUMNS / 2>(other, before * ds_scale.factor,
                                                               ds_smem);
  }
}

// All warps: add the products of q and do that are not finite to dv and dk one by one, and set them
// to 0 in shared memory for the tensor cores.
__device__ __forceinline__ void repair_nonfinite(Dk& dk, Dv& dv, const ShareK& share_k,
                                                 const ShareV& share_v, const char* p_rows,
                                                 const char* ds_rows, char* q_smem, char* do_smem) {
  fragment_product::add_nonfinite<D_V, BLOCK_Q, P_BYTES>(dv, p_rows, p_rows, do_smem, share_v);
  fragment_product::add_nonfinite<D, BLOCK_Q, P_BYTES>(dk, ds_rows, p_rows, q_smem, share_k);
  __syncthreads();  // the tile, read by all warps as it was copied
  fragment::clear_nonfinite<BLOCK_Q, D, K_BYTES>(q_smem);
  fragment::clear_nonfinite<BLOCK_Q, D_V, V_BYTES>(do_smem);
  __syncthreads();  // the tile, made finite by all threads
}

// Writes dk and dv in place of the keys and values, and from there to global memory.
__device__ __forceinline__ void store_results(const Params& p, Dk& dk, Dv& dv,
                                              const ShareK& share_k, const ShareV& share_v,
                                              int sum_key, long long part,
                                              const layout::Entry& entry, int h_kv, long long j0,
                                              int nj, char* k_smem, char* v_smem) {
  fragment_product::store_rows<BLOCK_KV>(
      dk, share_k, sum_key, p.dk, p.kind_dk != number::STORAGE_KIND,
      layout::offset(p.dk, entry, h_kv, true) + layout::part_offset(p, p.dk, part), j0, nj,
      static_cast<float>(p.scale), k_smem);
  fragment_product::store_rows<BLOCK_KV>(
      dv, share_v, sum_key, p.dv, p.kind_dv != number::STORAGE_KIND,
      layout::offset(p.dv, entry, h_kv, true) + layout::part_offset(p, p.dv, part), j0, nj,
      HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f, v_smem);
}

}  // namespace dkdv_tile
