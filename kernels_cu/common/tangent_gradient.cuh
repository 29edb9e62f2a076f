// Weights and gradients of a tile of scores, and the tangents of both: the twin of
// reference/cpu/tangent_tile.py.
//
// With g = Z dP - delta and the tangent mu of the log-sum-exp,
//
//   tP = P (tt - mu)     dT = P g      tdT = tP g + P (Z tdP - tdelta)
//                        dS = f' dT    tdS = f' tdT + f'' ts dT
//
// delta and tdelta are less the gradient of the log-sum-exp, and its tangent. A masked pair has the
// weight of one everywhere. A thread works on its own cells of all tiles.
#pragma once
#include "gradient_tile.cuh"
#include "tangent.cuh"

// Generated from the second derivative of the score mod, if that is not 0 everywhere.
__device__ accum_t score_mod_curvature(const Params& p, const HeadConstants& constants,
                                       accum_t score, const Site& at);

namespace tangent_gradient {

constexpr bool HAS_TS = HAS_TQ || HAS_TK;    // whether scores have tangents
constexpr bool HAS_TDP = HAS_TDO || HAS_TV;  // whether products of do and v have tangents
constexpr bool BENDS = HAS_CURVE && HAS_TS;

// A block's tiles in shared memory, with what each of the tile's queries has one number of.
struct TangentScratch {
  accum_t* p_smem;        // scores, then probabilities
  accum_t* dropped_smem;  // probabilities after dropout; those before it without dropout
  accum_t* tp_smem;       // their tangents, at last after dropout, too
  accum_t* ds_smem;       // derivatives of the score mod, then dS
  accum_t* tds_smem;      // the second one times the tangent of the score, then tdS; or null
  accum_t* lse_smem;
  accum_t* mu_smem;
  accum_t* delta_smem;
  accum_t* tdelta_smem;
};
constexpr int ROW_NUMBERS = 4;

// The tiles of a kernel that keeps dS and tdS, and the numbers of rows that follow them.
template <int TILE>
__device__ __forceinline__ TangentScratch scratch_at(accum_t* tiles_smem) {
  accum_t* const rows_smem = tiles_smem + (HAS_DROPOUT ? 5 : 4) * TILE;
  return TangentScratch{tiles_smem,
                        HAS_DROPOUT ? tiles_smem + 4 * TILE : tiles_smem,
                        tiles_smem + TILE,
                        tiles_smem + 2 * TILE,
                        tiles_smem + 3 * TILE,
                        rows_smem,
                        rows_smem + BLOCK_Q,
                        rows_smem + 2 * BLOCK_Q,
                        rows_smem + 3 * BLOCK_Q};
}

// Where the numbers of a head's queries are.
struct Statistics {
  memory::RowStatistic lse, mu, delta, tdelta;
};

__device__ __forceinline__ Statistics statistics_of(const SecondParams& x,
                                                    const layout::Entry& entry, long long head) {
  const Params& p = x.first.call;
  return Statistics{
      memory::row_statistic(p.lse, entry, head), memory::row_statistic(x.first.tlse, entry, head),
      memory::row_statistic(p.delta, entry, head), memory::row_statistic(x.tdelta, entry, head)};
}

// Loads the numbers of the tile's queries, as gradient_tile::load_row_statistics does.
__device__ __forceinline__ void load_statistics(const Statistics& of, long long i0, int ni,
                                                const TangentScratch& scratch) {
  for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
    accum_t lse = number::infinity(), mu = 0, delta = 0, tdelta = 0;
    if (i < ni) {
      const accum_t stored = of.lse.data[(i0 + i) * of.lse.row];
      lse = stored == -number::infinity() ? lse : stored;
      mu = of.mu.data[(i0 + i) * of.mu.row];
      delta = of.delta.data[(i0 + i) * of.delta.row];
      tdelta = of.tdelta.data[(i0 + i) * of.tdelta.row];
    }
    scratch.lse_smem[i] = lse;
    scratch.mu_smem[i] = mu;
    scratch.delta_smem[i] = delta;
    scratch.tdelta_smem[i] = tdelta;
  }
}

// The tangents of scores, and what the second derivative of the score mod makes of them, at the
// thread's cells of tds_smem. s are the scores before the score mod.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void bend(const Params& p, const TileBox& box,
                                     const accum_t (&s)[ROWS][COLUMNS],
                                     const accum_t (&ts)[ROWS][COLUMNS],
                                     const TangentScratch& scratch) {
  tile::store_cells<STRIDE>(s, scratch.p_smem);
  tile::store_cells<STRIDE>(ts, scratch.tds_smem);
#pragma unroll 1
  for (int n = 0; n < ROWS * COLUMNS; ++n) {
    const int row = matmul::row_thread() + ROW_THREADS * (n / COLUMNS);
    const int column = matmul::column_thread() + COLUMN_THREADS * (n % COLUMNS);
    const int offset = row * STRIDE + column;
    const Site at = tile::site<KEYS_ARE_ROWS>(box, row, column);
    if (at.i <= box.i_high && at.j <= box.j_high) {
      scratch.tds_smem[offset] *=
          score_mod_curvature(p, score_head_constants(p, at), scratch.p_smem[offset], at);
    }
  }
}

// Turns a thread's products q k, and those of directions, into probabilities and their tangents, at
// its cells of the tiles. The caller passes a barrier before it reads cells of other threads.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void probabilities(const Params& p, const TileBox& box, int tile_class,
                                              accum_t (&s)[ROWS][COLUMNS],
                                              accum_t (&ts)[ROWS][COLUMNS],
                                              const TangentScratch& scratch) {
  const accum_t scale = static_cast<accum_t>(p.scale);
  matmul::scale(s, scale);
  matmul::scale(ts, scale);
  if constexpr (BENDS) {
    if (scratch.tds_smem != nullptr) bend<KEYS_ARE_ROWS, STRIDE>(p, box, s, ts, scratch);
  }
  // 3 score mod
  // 4 mask
  tile::apply_score_and_mask<KEYS_ARE_ROWS, STRIDE>(p, box, tile_class, s, scratch.p_smem,
                                                    HAS_DSCORE ? scratch.ds_smem : nullptr);
  tangent::of_logits<KEYS_ARE_ROWS, STRIDE>(p, box, s, ts, scratch.ds_smem, scratch.p_smem);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int i = gradient_tile::query_of<KEYS_ARE_ROWS>(r, n);
      const accum_t below = gradient_tile::at_most_zero(s[r][n] - scratch.lse_smem[i]);
      const accum_t weight = softmax::exponential(below);
      // Adding 0 tells a product of -0 from the weight of a masked pair.
      const accum_t moved = weight * (ts[r][n] - scratch.mu_smem[i]) + accum_t(0);
      const bool masked = s[r][n] == -number::infinity();
      s[r][n] = masked ? matmul::masked_weight() : weight;
      ts[r][n] = masked ? matmul::masked_weight() : moved;
    }
  }
  tile::store_cells<STRIDE>(s, scratch.p_smem);
  tile::store_cells<STRIDE>(ts, scratch.tp_smem);
  if constexpr (HAS_DROPOUT) {
    __syncthreads();  // the probabilities, which other threads wrote
    tile::apply_dropout<KEYS_ARE_ROWS, STRIDE>(p, box, scratch.p_smem, scratch.dropped_smem);
  }
}

// Turns a thread's products do v, and those of directions, into dT and tdT.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void logit_gradients(const Params& p, accum_t (&dt)[ROWS][COLUMNS],
                                                accum_t (&tdt)[ROWS][COLUMNS],
                                                const TangentScratch& scratch) {
  const accum_t keep_scale = static_cast<accum_t>(p.keep_scale);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int cell = tile::cell<STRIDE>(r, n), i = gradient_tile::query_of<KEYS_ARE_ROWS>(r, n);
      const accum_t weight = scratch.p_smem[cell], moved = scratch.tp_smem[cell];
      const bool masked = !matmul::is_unmasked(weight);
      accum_t dp = dt[r][n], tdp = tdt[r][n];
      if constexpr (HAS_DROPOUT) {
        const accum_t kept = scratch.dropped_smem[cell] == accum_t(0) ? accum_t(0) : keep_scale;
        dp *= kept;
        tdp *= kept;
        scratch.tp_smem[cell] = masked ? moved : moved * kept + accum_t(0);
      }
      const accum_t g = dp - scratch.delta_smem[i];
      const accum_t change = tdp - scratch.tdelta_smem[i];
      dt[r][n] = masked ? weight : weight * g + accum_t(0);
      tdt[r][n] = masked ? weight : moved * g + weight * change + accum_t(0);
    }
  }
}

// Turns dT and tdT into dS and tdS, at the thread's cells of the tiles. Where a gradient is 0, it
// stays so: a derivative may be infinite there.
template <int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_gradients(accum_t (&ds)[ROWS][COLUMNS],
                                                accum_t (&tds)[ROWS][COLUMNS],
                                                const TangentScratch& scratch) {
  if constexpr (HAS_DSCORE) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const accum_t dt = ds[r][n];
        if (!matmul::is_unmasked(dt)) continue;  // such pairs need not have a derivative
        const int cell = tile::cell<STRIDE>(r, n);
        const accum_t slope = scratch.ds_smem[cell];
        accum_t tangent = tds[r][n] == accum_t(0) ? accum_t(0) : tds[r][n] * slope;
        if constexpr (BENDS) tangent += dt == accum_t(0) ? accum_t(0) : scratch.tds_smem[cell] * dt;
        ds[r][n] = dt == accum_t(0) ? dt : dt * slope + accum_t(0);
        tds[r][n] = tangent + accum_t(0);
      }
    }
  }
  tile::store_cells<STRIDE>(ds, scratch.ds_smem);
  tile::store_cells<STRIDE>(tds, scratch.tds_smem);
}

}  // namespace tangent_gradient
