// dq of a tile, which a consumer of backward_sm90_dkdv.cu has in registers: it is added to sums in
// global memory, or, where it is whole, stored.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/warp.cuh"
#include "../warp/fragment_product.cuh"
#include "backward_storage.cuh"

namespace warpgroup_dq {

// -- sums of dq in global memory ------------------------------------------------------------------

// Adds the columns from `column` on of a tile's 64 queries, except columns before `begin`. `valid`
// queries exist.
template <int COLUMNS>
__device__ __forceinline__ void atomic_add_dq(const float (&dq)[2][COLUMNS], float* dq_accum_gmem,
                                              int column, int begin, int valid) {
  const int row = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE * 16;
  float* const lane_gmem = dq_accum_gmem + fragment_product::sum_offset<D>(row, column) +
                           ptx::lane_index() * fragment_product::LANE_STEP;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 4) {
    if (column + 4 * n >= fragment::whole_columns(D)) break;
    if (column + 4 * n < begin) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= valid) break;
      fragment_product::add_four(lane_gmem + r * fragment_product::GROUP_SIZE<D> + n / 4 * 128,
                                 &dq[r][n]);
    }
  }
}

// -- whole rows of dq -----------------------------------------------------------------------------

// Stores the same columns of a tile's dq, times the scale, to rows of dq that begin at row_gmem,
// two at a time.
template <int COLUMNS>
__device__ __forceinline__ void store_pairs(const Params& p, const float (&dq)[2][COLUMNS],
                                            char* row_gmem, int column, int begin, int valid) {
  const int row =
      threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE * 16 + fragment::lane_row();
  const float scale = static_cast<float>(p.scale);
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 2) {
    const int first = column + 8 * (n / 2) + fragment::lane_column();
    if (column + 4 * n >= D) break;
    if (column + 4 * n < begin) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= valid) break;
      fragment_product::store_pair(p, row_gmem, row + 8 * r, first, dq[r][n] * scale,
                                   dq[r][n + 1] * scale);
    }
  }
}

// The lanes of a row have four words each, of which word n is their two columns of piece n of 8
// columns; lane n gets the words of piece n. All lanes of the warp call it together.
__device__ __forceinline__ void gather_piece(unsigned int (&words)[4]) {
  const bool odd = ptx::lane_index() % 2 != 0, upper = ptx::lane_index() % 4 / 2 != 0;
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    const unsigned int received = ptx::shuffle_xor(odd ? words[n] : words[n + 1], 1);
    words[n] = odd ? received : words[n];
    words[n + 1] = odd ? words[n + 1] : received;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const unsigned int received = ptx::shuffle_xor(upper ? words[n] : words[n + 2], 2);
    words[n] = upper ? received : words[n];
    words[n + 2] = upper ? words[n + 2] : received;
  }
}

// Stores the same, 16 bytes at a time where rows are aligned: a warp's instruction that stores
// pairs writes half a sector of each of 8 rows. All lanes of the warp call it together.
template <int COLUMNS>
__device__ __forceinline__ void store_dq(const Params& p, const float (&dq)[2][COLUMNS],
                                         char* row_gmem, int column, int begin, int valid) {
  constexpr int PIECES = 4, COLUMNS_OF_PIECE = sizeof(ptx::Bytes16) / sizeof(storage_t);
  const bool vectors = p.kind_dq == number::STORAGE_KIND && p.dq.col == 1 &&
                       p.dq.row % COLUMNS_OF_PIECE == 0 &&
                       reinterpret_cast<unsigned long long>(row_gmem) % sizeof(ptx::Bytes16) == 0;
  if (D % COLUMNS_OF_PIECE != 0 || !vectors) {
    return store_pairs(p, dq, row_gmem, column, begin, valid);
  }
  const int row =
      threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE * 16 + fragment::lane_row();
  const float scale = static_cast<float>(p.scale);
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 2 * PIECES) {
    const int first = column + 4 * n + ptx::lane_index() % PIECES * COLUMNS_OF_PIECE;
    if (column + 4 * n < begin) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ptx::Bytes16 piece;
#pragma unroll
      for (int m = 0; m < PIECES; ++m) {
        piece.x[m] = number::narrow_pair(dq[r][n + 2 * m] * scale, dq[r][n + 2 * m + 1] * scale);
      }
      gather_piece(piece.x);
      if (row + 8 * r >= valid || first >= D) continue;
      ptx::store(
          reinterpret_cast<storage_t*>(fragment_product::dq_row(p, row_gmem, row + 8 * r)) + first,
          piece);
    }
  }
}

// Where HAS_SINGLES: stores what backward_dq_rows.cu would make of sums of one summand.
template <int COLUMNS>
__device__ __forceinline__ void store_single_dq(const Params& p, const float (&dq)[2][COLUMNS],
                                                char* row_gmem, int column, int begin, int valid) {
  float sums[2][COLUMNS];
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
    sums[0][n] = 0.0f + dq[0][n];  // as if it was added to 0: no zero has a sign
    sums[1][n] = 0.0f + dq[1][n];
  }
  store_dq(p, sums, row_gmem, column, begin, valid);
}

// Stores dq, or adds it to the sums.
template <int COLUMNS>
__device__ __forceinline__ void write_dq(const Params& p, const float (&dq)[2][COLUMNS],
                                         float* to_gmem, int column, int begin, int valid) {
  if constexpr (WHOLE_DQ) {
    store_dq(p, dq, reinterpret_cast<char*>(to_gmem), column, begin, valid);
  } else if (HAS_SINGLES && ptx::any_lane(valid >= backward_storage::STORES_DQ)) {
    store_single_dq(p, dq, reinterpret_cast<char*>(to_gmem), column, begin,
                    valid % backward_storage::STORES_DQ);
  } else {
    atomic_add_dq(dq, to_gmem, column, begin, valid);
  }
}

// Where WHOLE_DQ: sets to 0 the dq of queries of EMPTY tiles, which are those from `seen` up to
// `end`. All consumer threads call it together.
__device__ __forceinline__ void clear_dq(const Params& p, const backward_storage::Span& span,
                                         int& seen, int end) {
  if constexpr (!WHOLE_DQ || !HAS_MASK) return;
  const long long rows = static_cast<long long>(end) * BLOCK_Q, len_q = span.entry.len_q;
  fragment_product::clear_dq<backward_storage::CONSUMER_THREADS>(
      p, reinterpret_cast<char*>(span.dq_accum), static_cast<long long>(seen) * BLOCK_Q,
      rows < len_q ? rows : len_q);
  seen = end + 1;
}

}  // namespace warpgroup_dq
