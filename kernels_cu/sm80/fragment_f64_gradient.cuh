// One tile of the backward in float64 where it lies in fragments: fragment_gradient.cuh without
// roundings. The twin of reference/cpu/gradient_tile.py for tensor cores.
#pragma once
#include "fragment_gradient.cuh"
#include "../common/power.cuh"

namespace fragment_f64_gradient {

using fragment_gradient::Corner;
using fragment_gradient::query_of;

__device__ __forceinline__ double probability(double score, double lse) {
  constexpr double LOG2_E = 1.4426950408889634;
  return power::exp2(gradient_tile::at_most_zero(score - lse) * LOG2_E);
}

// Writes neighbouring columns n and n + 1 of a tile's row r.
template <int BYTES>
__device__ __forceinline__ void store_pair(char* tile_smem, const Corner& corner, int r, int n,
                                           double low, double high) {
  struct alignas(16) Pair {
    double low, high;
  };
  const int at = fragment::place<BYTES>(corner.row + 8 * r, (corner.column + 4 * n) / 2);
  *reinterpret_cast<Pair*>(tile_smem + at) = Pair{low, high};
}

// Makes products q k into probabilities; where scores are changed, into probabilities times the
// derivative of the change. A pair that takes no part has the weight that says so. Where keys are
// rows, the probabilities after dropout go to the tile in shared memory, whose rows are BYTES
// apart; what survives is divided by the probability of that at the end. `lse_smem` is that of the
// corner's query.
//
// Where generated code may be long it stands here for two columns, which every pair of columns
// passes.
template <bool KEYS_ARE_ROWS, int BYTES, int ROWS, int COLUMNS>
__device__ __forceinline__ void recompute_probabilities(
    const Params& p, const TileBox& box, int tile_class, bool masked, double (&s)[ROWS][COLUMNS],
    const Corner& corner, const double* lse_smem, const unsigned int (&kept)[ROWS],
    char* tile_smem) {
  const double scale = p.scale;
  if (!masked) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        double weight[2];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const double lse = lse_smem[query_of<KEYS_ARE_ROWS>(r, n + x)];
          weight[x] = s[r][n + x] = probability(s[r][n + x] * scale, lse);
          if (HAS_DROPOUT && (kept[r] >> (n + x) & 1) == 0) weight[x] *= 0.0;
        }
        if constexpr (KEYS_ARE_ROWS) {
          store_pair<BYTES>(tile_smem, corner, r, n, weight[0], weight[1]);
        }
      }
    }
    return;
  }
  const int rows =
      static_cast<int>(KEYS_ARE_ROWS ? box.j_high - box.j_low : box.i_high - box.i_low);
  const int columns =
      static_cast<int>(KEYS_ARE_ROWS ? box.i_high - box.i_low : box.j_high - box.j_low);
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += 2) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      double weight[2];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = corner.row + 8 * r, place = corner.column + 4 * column + x;
        const Site at{box.b,
                      box.h,
                      box.i_low + (KEYS_ARE_ROWS ? place : row),
                      box.j_low + (KEYS_ARE_ROWS ? row : place),
                      box.len_q,
                      box.len_k,
                      box.start_q,
                      box.start_k};
        double slope = 1.0, score = -number::infinity();
        if (row <= rows && place <= columns) {
          score = tile::modify_score(p, at, tile_class == PARTIAL, s[r][x] * scale, &slope);
        }
        const double lse = lse_smem[query_of<KEYS_ARE_ROWS>(r, column + x)];
        double own = probability(score, lse);
        weight[x] = own;
        if (HAS_DROPOUT && (kept[r] >> (column + x) & 1) == 0) weight[x] *= 0.0;
        if constexpr (HAS_DSCORE) {
          const double changed = own * slope;
          own = own == 0.0 || changed == 0.0 ? 0.0 : changed;  // never -0.0 by chance
        }
        if (score == -number::infinity()) own = weight[x] = matmul::masked_weight();
        s[r][x] = own;
      }
      if constexpr (KEYS_ARE_ROWS) {
        store_pair<BYTES>(tile_smem, corner, r, column, weight[0], weight[1]);
      }
    }
    fragment::rotate<2>(s);
  }
}

// Makes p into dS = p (dP - delta), for products dP = do v; where scores are changed, the gradient
// of the scores before. What is 0 stays 0. `delta_smem` is that of the corner's query.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_gradients(const Params& p, bool masked,
                                                double (&s)[ROWS][COLUMNS],
                                                const double (&dp)[ROWS][COLUMNS],
                                                const double* delta_smem,
                                                const unsigned int (&kept)[ROWS]) {
  const double keep_scale = HAS_DROPOUT ? p.keep_scale : 1.0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      double change = dp[r][n];
      if constexpr (HAS_DROPOUT) change *= (kept[r] >> n & 1) != 0 ? keep_scale : 0.0;
      change -= delta_smem[query_of<KEYS_ARE_ROWS>(r, n)];
      double gradient = s[r][n] * change;
      if (HAS_DSCORE && change == 0.0) gradient = 0.0;
      if (masked) {
        gradient = gradient == 0.0 ? 0.0 : gradient;  // never -0.0 by chance
        if (!matmul::is_unmasked(s[r][n])) gradient = matmul::masked_weight();
      }
      s[r][n] = gradient;
    }
  }
}

// Writes a warp's part of dS to the tile in shared memory.
template <int BYTES, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_tile(const double (&ds)[ROWS][COLUMNS], const Corner& corner,
                                           char* tile_smem) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      store_pair<BYTES>(tile_smem, corner, r, n, ds[r][n], ds[r][n + 1]);
    }
  }
}

}  // namespace fragment_f64_gradient
