// One tile of the backward: scores recomputed, probabilities, and the gradient of the scores. The
// twin of reference/cpu/gradient_tile.py.
//
// Every backward kernel goes through here, so that dq, dk, dv and dbias see the same dS.
// FlashAttention-2 (Dao 2023), Algorithm 2, lines 11-15, with score changes, masks and dropout.
//
// The tile lies in shared memory as [key, query] or [query, key], whichever lets the kernel's block
// of results have its rows. There it holds first p, then dS, which takes p's place.
#pragma once
#include "softmax.cuh"

namespace gradient_tile {

// The tiles of a block, and what it knows of the tile's queries.
struct Scratch {
  accum_t* tile_smem;     // scores, then probabilities, then dS
  accum_t* dropped_smem;  // probabilities after dropout; the tile itself without dropout
  accum_t* slope_smem;    // derivative of the score change, or null
  accum_t* lse_smem;
  accum_t* delta_smem;
};

// Loads lse and delta of the tile's queries. An empty row gets lse = inf, so that its p is 0; so do
// the rows beyond the last. Barriers before and after are the caller's.
__device__ __forceinline__ void load_row_statistics(const memory::RowStatistic& lse,
                                                 const memory::RowStatistic& delta, long long i0, int ni,
                                                 const Scratch& scratch) {
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

// x held at 0: a probability is at most 1. NaN stays.
__device__ __forceinline__ accum_t at_most_zero(accum_t x) { return x > 0 ? accum_t(0) : x; }

// The tile's query of a thread's element (r, n).
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ int query_of(int r, int n) {
  return KEYS_ARE_ROWS ? matmul::column_thread() + COLUMN_THREADS * n
                       : matmul::row_thread() + ROW_THREADS * r;
}

// Makes a thread's products q k into probabilities, at its own cells of the tile; with dropout also
// after it. A pair that takes no part has the weight that says so. What follows begins with a
// barrier, so that other threads' cells may be read after it.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void probabilities(const Params& p, const TileBox& box, int tile_class,
                                              accum_t (&s)[ROWS][COLUMNS], const Scratch& scratch) {
  matmul::scale(s, static_cast<accum_t>(p.scale));
  // 3 score mod
  // 4 mask
  tile::apply_score_and_mask<KEYS_ARE_ROWS, STRIDE>(p, box, tile_class, s, scratch.tile_smem,
                                                    HAS_DSCORE ? scratch.slope_smem : nullptr);
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

// Makes a thread's products do v into dS = p * (dP - delta), the gradient of the changed scores, at
// its own cells of the tile.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_gradients(const Params& p, accum_t (&ds)[ROWS][COLUMNS],
                                                const Scratch& scratch) {
  const accum_t keep_scale = static_cast<accum_t>(p.keep_scale);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int place = tile::cell<STRIDE>(r, n);
      const accum_t weight = scratch.tile_smem[place];
      const accum_t delta = scratch.delta_smem[query_of<KEYS_ARE_ROWS>(r, n)];
      accum_t dp = ds[r][n];
      if constexpr (HAS_DROPOUT) {
        dp *= scratch.dropped_smem[place] == accum_t(0) ? accum_t(0) : keep_scale;
      }
      accum_t gradient = weight * (dp - delta);
      gradient = gradient == accum_t(0) ? accum_t(0) : gradient;  // never -0.0 by chance
      ds[r][n] = matmul::is_unmasked(weight) ? gradient : weight;
      scratch.tile_smem[place] = ds[r][n];
    }
  }
}

// Makes dS the gradient of the scores before they were changed; what is 0 stays 0.
template <int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_dscore(const Scratch& scratch) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int place = tile::cell<STRIDE>(r, n);
      const accum_t ds = scratch.tile_smem[place];
      if (ds != accum_t(0)) {
        const accum_t changed = ds * scratch.slope_smem[place];
        scratch.tile_smem[place] = changed == accum_t(0) ? accum_t(0) : changed;
      }
    }
  }
}

}  // namespace gradient_tile
