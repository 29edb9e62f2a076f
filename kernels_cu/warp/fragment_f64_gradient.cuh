// One tile of the backward in float64, in fragments: fragment_gradient.cuh without roundings. The
// twin of reference/cpu/gradient_tile.py for tensor cores.
#pragma once
#include "fragment_gradient.cuh"
#include "../common/power.cuh"

namespace fragment_f64_gradient {

using fragment_gradient::Corner;
using fragment_gradient::query_of;

__device__ __forceinline__ double probability(double score, double lse) {
  return power::exp2(gradient_tile::at_most_zero(score - lse) * number::LOG2_E<double>);
}

// A product q k, scaled and rounded. The compiler would fuse the scale with the subtraction of lse
// where no mask stands between them, and bits would depend on what is proven about a tile.
__device__ __forceinline__ double scaled(double product, double scale) {
  return __dmul_rn(product, scale);
}

// Writes adjacent columns n and n + 1 of a thread's row r to a tile whose rows are BYTES apart.
template <int BYTES>
__device__ __forceinline__ void store_pair(char* tile_smem, const Corner& corner, int r, int n,
                                           double low, double high) {
  struct alignas(16) Pair {
    double low, high;
  };
  const int at = fragment::swizzled_offset<BYTES>(corner.row + 8 * r, (corner.column + 4 * n) / 2);
  *reinterpret_cast<Pair*>(tile_smem + at) = Pair{low, high};
}

// Products q k become probabilities; with a score mod, probabilities times its derivative. A masked
// pair gets the weight of one. If keys are rows, the tile in shared memory, whose rows are BYTES
// apart, receives the probabilities after dropout; the division by the probability of keeping is
// left to the epilogue. `lse_smem` is that of the corner's query.
//
// Masks and score mods are instantiated for two columns, through which all columns rotate.
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
          weight[x] = s[r][n + x] = probability(scaled(s[r][n + x], scale), lse);
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
        const int row = corner.row + 8 * r, tile_column = corner.column + 4 * column + x;
        const Site at{box.b,
                      box.h,
                      box.i_low + (KEYS_ARE_ROWS ? tile_column : row),
                      box.j_low + (KEYS_ARE_ROWS ? row : tile_column),
                      box.len_q,
                      box.len_k,
                      box.start_q,
                      box.start_k};
        double dscore = 1.0, score = -number::infinity();
        if (row <= rows && tile_column <= columns) {
          score = tile::modify_score(p, at, tile_class == PARTIAL, scaled(s[r][x], scale), &dscore);
        }
        const double lse = lse_smem[query_of<KEYS_ARE_ROWS>(r, column + x)];
        double p_dscore = probability(score, lse);
        weight[x] = p_dscore;
        if (HAS_DROPOUT && (kept[r] >> (column + x) & 1) == 0) weight[x] *= 0.0;
        if constexpr (HAS_DSCORE) {
          const double product = p_dscore * dscore;
          // +0.0: -0.0 means masked
          p_dscore = p_dscore == 0.0 || product == 0.0 ? 0.0 : product;
        }
        if (score == -number::infinity()) p_dscore = weight[x] = matmul::masked_weight();
        s[r][x] = p_dscore;
      }
      if constexpr (KEYS_ARE_ROWS) {
        store_pair<BYTES>(tile_smem, corner, r, column, weight[0], weight[1]);
      }
    }
    fragment::rotate<2>(s);
  }
}

// p becomes dS = p (dP - delta), for products dP = do v; with a score mod, times its derivative,
// which s contains. What is 0 stays 0. `delta_smem` is that of the corner's query.
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
      double dp_minus_delta = dp[r][n];
      if constexpr (HAS_DROPOUT) dp_minus_delta *= (kept[r] >> n & 1) != 0 ? keep_scale : 0.0;
      dp_minus_delta -= delta_smem[query_of<KEYS_ARE_ROWS>(r, n)];
      double gradient = s[r][n] * dp_minus_delta;
      if (HAS_DSCORE && dp_minus_delta == 0.0) gradient = 0.0;
      if (masked) {
        gradient = gradient == 0.0 ? 0.0 : gradient;  // +0.0: -0.0 means masked
        if (!matmul::is_unmasked(s[r][n])) gradient = matmul::masked_weight();
      }
      s[r][n] = gradient;
    }
  }
}

// Writes a thread's elements of dS to the tile in shared memory.
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
