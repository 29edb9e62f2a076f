// One tile of the backward by warpgroups: a consumer's columns, probabilities and dS in registers,
// dS in shared memory, and non-finite operands. The twin of reference/cpu/gradient_tile.py for
// backward_sm90_dkdv.cu.
//
// A tile of scores has keys as rows and queries as columns; a thread has two rows of it.
#pragma once
#include "../warp/fragment_gradient_ds.cuh"
#include "../warp/fragment_product.cuh"
#include "backward_storage.cuh"
#include "warpgroup_dropout.cuh"
#include "warpgroup_rows.cuh"

namespace warpgroup_gradient {

using backward_storage::any_consumer;
using backward_storage::CONSUMER_THREADS;
using backward_storage::consumers_sync;
using backward_storage::QUERY_PARTS;
using backward_storage::SHARE_KEYS;
using warpgroup_dropout::Kept;

// -- who computes what ----------------------------------------------------------------------------

// A consumer's columns of dk, dv or dq, in slabs of 64. If the number of slabs is odd, both
// consumers compute the middle one, and the first consumer stores it.
template <int WIDTH>
struct ColumnShare {
  static constexpr int SLABS = fragment::row_bytes(WIDTH) / warpgroup::SLAB_ROW_BYTES;
  static constexpr int EACH = SHARE_KEYS ? (SLABS + 1) / 2 : SLABS;
  static constexpr int COLUMNS = EACH * warpgroup::SLAB_COLUMNS / 4;  // of a thread
  int slab, first, begin;  // the first slab, its first column, and the first column to store

  __device__ __forceinline__ explicit ColumnShare(int consumer)
      : slab(SHARE_KEYS && consumer > 0 ? SLABS - EACH : 0),
        first(slab * warpgroup::SLAB_COLUMNS),
        begin(SHARE_KEYS ? consumer * EACH * warpgroup::SLAB_COLUMNS : 0) {}
};

// -- probabilities --------------------------------------------------------------------------------

// lse or delta of a thread's queries.
template <int COLUMNS>
using QueryStatistics = fragment_gradient::PerQuery<true, 2, COLUMNS>;

// Those of COLUMNS queries from column `first` on, out of those of all queries, which are in
// registers or in shared memory.
template <int COLUMNS, int ALL>
__device__ __forceinline__ QueryStatistics<COLUMNS> statistics_from(
    const QueryStatistics<ALL>& all_rmem, int first) {
  QueryStatistics<COLUMNS> some;
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) some.x[n] = all_rmem.x[first + n];
  return some;
}
template <int COLUMNS>
__device__ __forceinline__ QueryStatistics<COLUMNS> statistics_from(const float* all_smem,
                                                                    int first) {
  return QueryStatistics<COLUMNS>(all_smem + fragment_gradient::query_of<true>(0, first));
}

// Products q k become logits: scale, then score mod, or the bias of a stage. Returns whether any of
// them may be -inf.
template <int COLUMNS>
__device__ __forceinline__ bool change_scores(const Params& p, const bias_tiles::Tiles& bias,
                                              int stage, const HeadConstants& constants,
                                              float scale, const TileBox& box,
                                              float (&s)[2][COLUMNS],
                                              const fragment_gradient::Corner& corner) {
  if constexpr (HAS_BIAS_TILES) {
    const int first_key = corner.row / fragment::WARP_ROWS * fragment::WARP_ROWS;
    return fragment_tile::add_bias(s, scale, bias_tiles::KeysReader(p, bias, stage, first_key));
  } else if constexpr (HAS_SCORE) {
    return fragment_gradient::apply_score_mod<true>(p, constants, scale, box, s, corner);
  }
  return false;
}

// delta as compute_ds takes it: in registers, or where too few of them are free, in shared memory.
template <int COLUMNS>
__device__ __forceinline__ auto load_delta(const float* all_smem) {
  if constexpr (CHANGES_SCORES || (HAS_DROPOUT && HAS_MASK)) {
    return all_smem;
  } else {
    return QueryStatistics<COLUMNS>(all_smem);
  }
}

// Products q k become probabilities, 2^(c s - lse log2 e), at most 1, in the columns from `first`
// up to `end`. `lse` is already multiplied by log2 e.
template <int COLUMNS>
__device__ __forceinline__ void exponentiate(float (&s)[2][COLUMNS],
                                             const QueryStatistics<COLUMNS>& lse, float c,
                                             int first, int end) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
    if (n < first || n >= end) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      s[r][n] = ptx::exp2(gradient_tile::at_most_zero(fma(s[r][n], c, -lse.of(r, n))));
    }
  }
}

// Gives masked pairs the weight of one.
template <int COLUMNS>
__device__ __forceinline__ void apply_mask(float (&p)[2][COLUMNS], const unsigned int (&mask)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if ((mask[r] >> n & 1) == 0) p[r][n] = matmul::masked_weight();
    }
  }
}

// Rounds a row's probabilities after dropout to the storage type, from column `first` up to `end`.
// `kept` is counted from the first of them.
template <int COLUMNS>
__device__ __forceinline__ void narrow_kept(const float (&p)[COLUMNS], const Kept<COLUMNS>& kept,
                                            int r, int first, int end,
                                            unsigned int (&to)[COLUMNS / 2]) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 2) {
    if (n < first || n >= end) continue;
    float pair[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      pair[x] = p[n + x];
      if (HAS_DROPOUT && !keeps(kept, r, n - first + x)) pair[x] *= 0.0f;
    }
    to[n / 2] = number::narrow_pair(pair[0], pair[1]);
  }
}

// Products dP = do v become dS, for as many columns at a time as there are registers for. With
// NARROWS, `weights` receives the probabilities after dropout in the storage type.
template <bool NARROWS, int COLUMNS, typename Delta>
__device__ __forceinline__ void compute_ds(const Params& p, bool masked,
                                           const float (&s)[2][COLUMNS], float (&dp)[2][COLUMNS],
                                           const Delta& delta, const Kept<COLUMNS>& kept,
                                           unsigned int (&weights)[2][COLUMNS / 2]) {
  constexpr int AT_ONCE = CHANGES_SCORES || HAS_DROPOUT ? 4 : COLUMNS;
  const auto compute = [&](bool masked) {
#pragma unroll
    for (int first = 0; first < COLUMNS; first += AT_ONCE) {
      float some_p[2][AT_ONCE], some_dp[2][AT_ONCE];
      const Kept<COLUMNS> some_kept = kept.from(first);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
          some_p[r][n] = s[r][first + n];
          some_dp[r][n] = dp[r][first + n];
        }
      }
      fragment_gradient::score_gradients<true>(
          p, masked, some_p, some_dp, statistics_from<AT_ONCE>(delta, first), some_kept, some_dp);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) dp[r][first + n] = some_dp[r][n];
        // Beside dS, so that what dropout says of a pair is asked once.
        if constexpr (NARROWS) narrow_kept(s[r], some_kept, r, first, first + AT_ONCE, weights[r]);
      }
    }
  };
  if (HAS_DROPOUT && masked) {
    compute(true);
  } else {
    compute(!HAS_DROPOUT && masked);
  }
}

// -- P and dS in shared memory --------------------------------------------------------------------

// The byte offset, in a tile of P or dS with keys as rows and 64 queries, of the 16 bytes whose
// address a lane gives to stmatrix. Its matrices are 8 x 8: two of the warp's keys by two of its
// queries.
__device__ __forceinline__ int stmatrix_offset(const fragment_gradient::Corner& corner) {
  const int lane = ptx::lane_index();
  return fragment::swizzled_offset<warpgroup::SLAB_ROW_BYTES>(
      corner.row - fragment::lane_row() + lane % 16, corner.column / 8 + lane / 16);
}

// Stores a thread's words of P or dS, from its corner on. The tile begins at a multiple of 1024
// bytes, so that pieces of 16 bytes of a row differ only in bits that its swizzle flips.
template <int WORDS>
__device__ __forceinline__ void store_words(const unsigned int (&words)[2][WORDS], int offset,
                                            unsigned int tile_address) {
#pragma unroll
  for (int n = 0; n < WORDS; n += 2) {
    const unsigned int from[4] = {words[0][n], words[1][n], words[0][n + 1], words[1][n + 1]};
    ptx::stmatrix_x4((tile_address + offset) ^ 16 * n, from);
  }
}

// -- non-finite operands --------------------------------------------------------------------------

// Whether a thread's numbers are finite. If their sum overflows, the answer is no although they
// are, which costs time but nothing else.
template <int COLUMNS>
__device__ __forceinline__ bool all_finite(const float (&x)[2][COLUMNS]) {
  float sum[4] = {};
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[2 * r + n % 2] += x[r][n];
  }
  return number::is_finite((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// The same of numbers in 16 bits, without that exception.
template <int WORDS>
__device__ __forceinline__ bool all_finite(const unsigned int (&x)[2][WORDS]) {
  unsigned int sum[2] = {0, 0};  // 0, or NaN
#pragma unroll
  for (int n = 0; n < WORDS; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = warpgroup_rows::zero_times(x[r][n], sum[r]);
  }
  return (sum[0] | sum[1]) == 0;
}

// An element of a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ storage_t& element(char* tile_smem, int row, int column) {
  const int offset = column / warpgroup::SLAB_COLUMNS * ROWS * warpgroup::SLAB_ROW_BYTES +
                     fragment::swizzled_offset<warpgroup::SLAB_ROW_BYTES>(
                         row, column % warpgroup::SLAB_COLUMNS / STORED_VECTOR);
  return reinterpret_cast<storage_t*>(tile_smem + offset)[column % STORED_VECTOR];
}

// dv += p do for the elements of do that are NaN or infinite, without masked pairs: of queries from
// `first` up to `end` of the tile. The tensor cores multiply 0 in their place. Rows of P are keys,
// and `key` is the thread's first one.
template <int COLUMNS>
__device__ __forceinline__ void add_nonfinite(float (&dv)[2][COLUMNS], int key, char* p_smem,
                                              char* do_smem, int first, int end) {
#pragma unroll 1
  for (int query = first; query < end; ++query) {
    const storage_t p[2] = {element<BLOCK_KV>(p_smem, key, query),
                            element<BLOCK_KV>(p_smem, key + 8, query)};
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = 8 * (n / 2) + fragment::lane_column() + n % 2;
      const float value = number::widen(element<BLOCK_Q>(do_smem, query, column));
      if (number::is_finite(value)) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (p[r] != 0x8000) dv[r][n] += number::widen(p[r]) * value;
      }
    }
  }
}

// Sets non-finite values in a number of bytes to 0. All consumer threads call it together.
__device__ __forceinline__ void clear_nonfinite(char* tile_smem, int bytes) {
#pragma unroll 1
  for (int n = threadIdx.x; n < bytes / 4; n += CONSUMER_THREADS) {
    fragment_product::clear_pair(reinterpret_cast<unsigned int*>(tile_smem)[n]);
  }
}

// The same of a part of a tile's queries, of QUERY_PARTS.
template <int WIDTH>
__device__ __forceinline__ void clear_nonfinite_queries(char* tile_smem, int part) {
  constexpr int SLAB = BLOCK_Q * warpgroup::SLAB_ROW_BYTES;
  constexpr int BYTES = BLOCK_Q * fragment::row_bytes(WIDTH);
  if constexpr (QUERY_PARTS == 1) return clear_nonfinite(tile_smem, BYTES);
#pragma unroll 1
  for (int slab = 0; slab < BYTES; slab += SLAB) {
    clear_nonfinite(tile_smem + slab + part * (SLAB / QUERY_PARTS), SLAB / QUERY_PARTS);
  }
}

// Adds the products of non-finite values of do to dv one by one, and sets them to 0 for the tensor
// cores, in a part of a tile's queries. Non-finite values of q are set to 0, too: their dS is NaN
// already. `slab` has dv's first column.
template <int COLUMNS>
__device__ __forceinline__ void repair(float (&dv)[2][COLUMNS], int key, char* p_smem, char* q_smem,
                                       char* do_smem, int slab, int part) {
  constexpr int OF_PART = BLOCK_Q / QUERY_PARTS;
  add_nonfinite(dv, key, p_smem, do_smem + slab * backward_storage::SLAB_BYTES, part * OF_PART,
                (part + 1) * OF_PART);
  consumers_sync();  // do, read as it came
  clear_nonfinite_queries<D>(q_smem, part);
  clear_nonfinite_queries<D_V>(do_smem, part);
  ptx::fence_proxy_async();
  consumers_sync();  // q and do, now finite
}

// Whether q or do of a tile has non-finite values. All consumer threads call it together.
__device__ __forceinline__ bool has_nonfinite_rows(const char* q_smem, const char* do_smem) {
  constexpr int Q_BYTES = BLOCK_Q * fragment::row_bytes(D);
  constexpr int DO_BYTES = BLOCK_Q * fragment::row_bytes(D_V);
  const int thread = threadIdx.x;
  const bool finite = warpgroup_rows::finite_rows<Q_BYTES, CONSUMER_THREADS>(q_smem, thread) &&
                      warpgroup_rows::finite_rows<DO_BYTES, CONSUMER_THREADS>(do_smem, thread);
  return any_consumer(!finite);
}

// The same of the block's keys.
__device__ __forceinline__ bool has_nonfinite_keys(const char* k_smem) {
  constexpr int BYTES = BLOCK_KV * fragment::row_bytes(D);
  const bool finite = warpgroup_rows::finite_rows<BYTES, CONSUMER_THREADS>(k_smem, threadIdx.x);
  return any_consumer(!finite);
}

// Copies the keys, with 0 in place of non-finite values. No barrier follows: the copy is first
// multiplied by dS, and each warp publishes its part of the copy with its part of dS.
__device__ __forceinline__ void copy_finite_keys(const char* k_smem, char* copy_smem) {
#pragma unroll 1
  for (int n = threadIdx.x; n < BLOCK_KV * fragment::row_bytes(D) / 4; n += CONSUMER_THREADS) {
    unsigned int pair = reinterpret_cast<const unsigned int*>(k_smem)[n];
    fragment_product::clear_pair(pair);
    reinterpret_cast<unsigned int*>(copy_smem)[n] = pair;
  }
}

// Where there is no room for a copy: sets non-finite values of the keys to 0 before the product for
// dq; reload_keys loads the keys again after it.
__device__ __forceinline__ void clear_nonfinite_keys(char* k_smem) {
  clear_nonfinite(k_smem, BLOCK_KV * fragment::row_bytes(D));
  ptx::fence_proxy_async();
  consumers_sync();  // the keys, now finite
}
__device__ __forceinline__ void reload_keys(const Params& p,
                                            const backward_storage::SharedStorage& storage,
                                            char* k_smem) {
  constexpr int ROWS = warpgroup::WARPGROUP_ROWS;
  consumers_sync();  // the finite keys, read for dq
  const memory::Rows from = memory::rows(p.k, storage.entry, storage.h_kv, true);
  const long long first = storage.j0;
  const int valid = storage.nj;
#pragma unroll 1
  for (int n = threadIdx.x; n < BLOCK_KV * D; n += CONSUMER_THREADS) {
    const int row = n / D, column = n % D;
    element<ROWS>(k_smem + row / ROWS * (ROWS * fragment::row_bytes(D)), row % ROWS, column) =
        row < valid ? from.data[(first + row) * from.row + column * from.col] : storage_t(0);
  }
  ptx::fence_proxy_async();
  consumers_sync();  // the keys as they came
}

// Sets the rows from `valid` on to 0: of a packed array, TMA loads rows of the next sequence there.
// All consumer threads call it together.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void clear_rows(char* tile_smem, int valid) {
  constexpr int SLAB = ROWS * warpgroup::SLAB_ROW_BYTES;
  constexpr int SLABS = fragment::row_bytes(WIDTH) / warpgroup::SLAB_ROW_BYTES;
#pragma unroll 1
  for (int n = threadIdx.x; n < SLABS * SLAB / 4; n += CONSUMER_THREADS) {
    if (n * 4 % SLAB / warpgroup::SLAB_ROW_BYTES >= valid) {
      reinterpret_cast<unsigned int*>(tile_smem)[n] = 0;
    }
  }
}

// The same of the block's keys or values, in tiles of 64, of which `valid` exist.
template <int WIDTH>
__device__ __forceinline__ void clear_keys(char* tiles_smem, int valid) {
  constexpr int TILE_BYTES = warpgroup::WARPGROUP_ROWS * fragment::row_bytes(WIDTH);
  for (int n = 0; n < BLOCK_KV / warpgroup::WARPGROUP_ROWS; ++n) {
    clear_rows<warpgroup::WARPGROUP_ROWS, WIDTH>(tiles_smem + n * TILE_BYTES,
                                                 valid - n * warpgroup::WARPGROUP_ROWS);
  }
}

// The same of keys and values.
__device__ __forceinline__ void clear_missing_keys(char* k_smem, char* v_smem, int valid) {
  clear_keys<D>(k_smem, valid);
  clear_keys<D_V>(v_smem, valid);
  ptx::fence_proxy_async();
  consumers_sync();  // the keys and values, in which missing ones are now 0
}

}  // namespace warpgroup_gradient
