// The dq of backward_sm80_dkdv.cu: the product of dS and the keys, of which a warp has a share.
// With LATE_DQ it is that of the tile before, and a quarter of the share at a time accompanies each
// of the tile's other products, between whose steps it is added.
#pragma once
#include "../warp/fragment_gradient_ds.cuh"
#include "dkdv_storage.cuh"

namespace dkdv_dq {

using namespace dkdv_storage;

// Limited by registers.
constexpr int UNROLL = HAS_SCORE || (D <= 64 && !P_IN_REGISTERS) ? 2 : D > 64 && D <= 128 ? 8 : 4;
using Dq = float[DQ_QUERIES / 8][ShareQ::COLUMNS / DQ_PARTS];

// Multiplies dS and the keys for a part of the columns of a warp's share of dq.
__device__ __forceinline__ void multiply_dq(Dq& dq, int part, const char* ds_smem,
                                            const char* k_smem, bool has_nonfinite,
                                            const fragment_gradient::DsScale& ds_scale) {
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const ShareQ share = ShareQ(warp % DQ_SHARERS).part(part, DQ_PARTS);
  const int first = warp / DQ_SHARERS * DQ_QUERIES / 16;
  matmul::clear(dq);
  if (has_nonfinite) {
    fragment_product::multiply_add_transposed<D, BLOCK_KV, P_BYTES, 1, true>(dq, ds_smem, first,
                                                                             k_smem, share);
  } else {
    fragment_product::multiply_add_transposed<D, BLOCK_KV, P_BYTES, UNROLL, false>(
        dq, ds_smem, first, k_smem, share);
  }
  if constexpr (fragment::Mma::SCALES_DS) matmul::scale(dq, ds_scale.inverse());
}

// The tile before, whose dq is still to be multiplied and added.
struct LateDq {
  const char* ds_smem;
  float* to_gmem;  // of the warp's first query
  int valid;       // rows from there on, not more than 0 if there is nothing to do
  float inverse;   // scale of dS
};

// Quarter QUARTER of a warp's share of that dq.
template <int QUARTER>
struct LateQuarter {
  static constexpr int FIRST = QUARTER * LATE_UNITS;
  static constexpr int UNITS =
      ShareQ::EACH - FIRST < LATE_UNITS ? ShareQ::EACH - FIRST : LATE_UNITS;
  static constexpr int ROWS = DQ_QUERIES / 8;
  float sums[ROWS][4 * (UNITS > 0 ? UNITS : 1)];

  __device__ __forceinline__ static ShareQ share() {
    ShareQ share(threadIdx.x / ptx::WARP_SIZE % DQ_SHARERS);
    share.first += DQ_SHARERS * FIRST;  // the step of wide heads' shares
    return share;
  }
  // With ONLY_FINITE, without the keys that are not finite.
  template <bool ONLY_FINITE>
  __device__ __forceinline__ void multiply(const LateDq& late, const char* k_smem) {
    if constexpr (UNITS > 0) {
      const int first = threadIdx.x / ptx::WARP_SIZE / DQ_SHARERS * DQ_QUERIES / 16;
      matmul::clear(sums);
      if (late.valid <= 0) return;
      fragment_product::multiply_add_transposed<D, BLOCK_KV, P_BYTES, ONLY_FINITE ? 1 : UNROLL,
                                                ONLY_FINITE>(sums, late.ds_smem, first, k_smem,
                                                             share());
      if constexpr (fragment::Mma::SCALES_DS) matmul::scale(sums, late.inverse);
    }
  }
  // Adds a part of it.
  __device__ __forceinline__ void add(const LateDq& late, int step, int steps) const {
    if constexpr (UNITS > 0) {
      fragment_product::add_fragments(sums, share(), late.to_gmem, late.valid, step, steps);
    }
  }
};

// Multiplies and adds a quarter.
template <int QUARTER, bool ONLY_FINITE>
__device__ __forceinline__ void add_quarter(const LateDq& late, const char* k_smem) {
  LateQuarter<QUARTER> dq;
  dq.template multiply<ONLY_FINITE>(late, k_smem);
  dq.add(late, 0, 1);
}

// Multiplies and adds all of it.
template <bool ONLY_FINITE>
__device__ __forceinline__ void add_late(const LateDq& late, const char* k_smem) {
  add_quarter<0, ONLY_FINITE>(late, k_smem);
  add_quarter<1, ONLY_FINITE>(late, k_smem);
  add_quarter<2, ONLY_FINITE>(late, k_smem);
  add_quarter<3, ONLY_FINITE>(late, k_smem);
}

}  // namespace dkdv_dq
