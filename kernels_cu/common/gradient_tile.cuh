// One tile of the backward: recomputed scores, probabilities, and the gradient of the scores. The
// twin of reference/cpu/gradient_tile.py.
//
// All SIMT backward kernels use these functions, so that dq, dk, dv and dbias see the same dS.
// FlashAttention-2 (Dao 2023), Algorithm 2, lines 11-15, with score mods, masks and dropout.
//
// The tile lies in shared memory as [key, query] or [query, key], so that its rows are the rows of
// the kernel's result. It holds first p, then dS in cell of p.
#pragma once
#include "softmax.cuh"

namespace gradient_tile {

// A tile of queries that is not EMPTY, or none, in one register: 4 times its index, plus its class.
// The kernels take it apart by shifts or by divisions, whichever needs fewer registers. It is no
// struct, because that changes the allocation of registers.
enum class TileRef : int { NONE = -1 };

// A block's tiles in shared memory, with lse and delta of the tile's queries.
struct Scratch {
  accum_t* tile_smem;     // scores, then probabilities, then dS
  accum_t* dropped_smem;  // probabilities after dropout; the tile itself without dropout
  accum_t* dscore_smem;   // derivative of the score mod, or null
  accum_t* lse_smem;
  accum_t* delta_smem;
};

// Loads lse and delta of the tile's queries. Empty and missing rows get lse = inf, which makes
// p = 0. The caller synchronises before and after.
__device__ __forceinline__ void load_row_statistics(const memory::RowStatistic& lse,
                                                    const memory::RowStatistic& delta, long long i0,
                                                    int ni, const Scratch& scratch) {
  for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
    accum_t row_lse = number::infinity(), row_delta = 0;
    if (i < ni) {
      row_lse = lse.data[(i0 + i) * lse.row];
      row_delta = delta.data[(i0 + i) * delta.row];
    }
    scratch.lse_smem[i] = row_lse == -number::infinity() ? number::infinity() : row_lse;
    scratch.delta_smem[i] = row_delta;
  }
}

// min(x, 0), so that a probability is at most 1; NaN stays NaN.
__device__ __forceinline__ accum_t at_most_zero(accum_t x) { return x > 0 ? accum_t(0) : x; }

// The query, within the tile, of a thread's element (r, n).
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ int query_of(int r, int n) {
  return KEYS_ARE_ROWS ? matmul::column_thread() + COLUMN_THREADS * n
                       : matmul::row_thread() + ROW_THREADS * r;
}

// Turns a thread's products q k into probabilities, in registers and at the thread's cells of the
// tile, and with dropout also into those after it. A masked pair gets the weight of one. The caller
// must pass a barrier before it reads the cells of other threads.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void probabilities(const Params& p, const TileBox& box, int tile_class,
                                              accum_t (&s)[ROWS][COLUMNS], const Scratch& scratch) {
  matmul::scale(s, static_cast<accum_t>(p.scale));
  // 3 score mod
  // 4 mask
  tile::apply_score_and_mask<KEYS_ARE_ROWS, STRIDE>(p, box, tile_class, s, scratch.tile_smem,
                                                    HAS_DSCORE ? scratch.dscore_smem : nullptr);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const accum_t lse = scratch.lse_smem[query_of<KEYS_ARE_ROWS>(r, n)];
      const accum_t weight = softmax::exponential(at_most_zero(s[r][n] - lse));
      s[r][n] = s[r][n] == -number::infinity() ? matmul::masked_weight() : weight;
    }
  }
  tile::store_cells<STRIDE>(s, scratch.tile_smem);
  if constexpr (HAS_DROPOUT) {
    __syncthreads();  // the probabilities, which other threads wrote
    tile::apply_dropout<KEYS_ARE_ROWS, STRIDE>(p, box, scratch.tile_smem, scratch.dropped_smem);
  }
}

// Turns a thread's products do v into dS = p * (dP - delta), the gradient of the modified scores,
// at the thread's cells of the tile.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_gradients(const Params& p, accum_t (&ds)[ROWS][COLUMNS],
                                                const Scratch& scratch) {
  const accum_t keep_scale = static_cast<accum_t>(p.keep_scale);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int cell = tile::cell<STRIDE>(r, n);
      const accum_t weight = scratch.tile_smem[cell];
      const accum_t delta = scratch.delta_smem[query_of<KEYS_ARE_ROWS>(r, n)];
      accum_t dp = ds[r][n];
      if constexpr (HAS_DROPOUT) {
        dp *= scratch.dropped_smem[cell] == accum_t(0) ? accum_t(0) : keep_scale;
      }
      accum_t gradient = weight * (dp - delta);
      gradient = gradient == accum_t(0) ? accum_t(0) : gradient;  // +0.0: -0.0 means masked
      ds[r][n] = matmul::is_unmasked(weight) ? gradient : weight;
      scratch.tile_smem[cell] = ds[r][n];
    }
  }
}

// Multiplies dS by the derivative of the score mod; a dS of 0 stays 0.
template <int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_dscore(const Scratch& scratch) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int cell = tile::cell<STRIDE>(r, n);
      const accum_t ds = scratch.tile_smem[cell];
      if (ds != accum_t(0)) {
        const accum_t product = ds * scratch.dscore_smem[cell];
        scratch.tile_smem[cell] = product == accum_t(0) ? accum_t(0) : product;
      }
    }
  }
}

}  // namespace gradient_tile
