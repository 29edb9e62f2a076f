// One tile of the backward with tangents, in fragments of 16-bit types: common/tangent_gradient.cuh
// for tensor cores. Of a tile's operands and their tangents, those of its rows are left factors.
//
// P, tP, dS and tdS are rounded to the storage type before their products with do, tdo, q, tq, k
// and tk, of which they are left factors in registers. In float16 they are multiplied by a power of
// two first (DsScale), as are the sums, which a warp has alone.
#pragma once
#include "../common/tangent_gradient.cuh"
#include "fragment_gradient_ds.cuh"
#include "fragment_product.cuh"
#include "fragment_tangent_product.cuh"

namespace fragment_tangent_gradient {

using fragment_gradient::Corner;
using fragment_gradient::DsScale;
using fragment_gradient::PerQuery;
using fragment_tangent_product::multiply;

constexpr int ROW_NUMBERS = tangent_gradient::ROW_NUMBERS;

// -- numbers of queries ---------------------------------------------------------------------------

// lse, mu, delta and tdelta of a tile's queries on the way to shared memory, where they follow each
// other. Empty and missing rows get lse = inf, which makes p = 0.
struct RowNumbers {
  static constexpr int EACH = (BLOCK_Q + THREADS - 1) / THREADS;
  float x[ROW_NUMBERS][EACH];

  __device__ __forceinline__ void load(const tangent_gradient::Statistics& from, long long i0,
                                       int ni) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS;
      const bool exists = i < ni;
      x[0][n] = exists ? from.lse.data[(i0 + i) * from.lse.row] : number::infinity();
      x[1][n] = exists ? from.mu.data[(i0 + i) * from.mu.row] : 0.0f;
      x[2][n] = exists ? from.delta.data[(i0 + i) * from.delta.row] : 0.0f;
      x[3][n] = exists ? from.tdelta.data[(i0 + i) * from.tdelta.row] : 0.0f;
    }
  }
  __device__ __forceinline__ void store(float* rows_smem) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS;
      if (i >= BLOCK_Q) break;
      rows_smem[i] = x[0][n] == -number::infinity() ? number::infinity() : x[0][n];
#pragma unroll
      for (int of = 1; of < ROW_NUMBERS; ++of) rows_smem[of * BLOCK_Q + i] = x[of][n];
    }
  }
};

// -- products -------------------------------------------------------------------------------------

// c += a b for weights a in registers and rows b of WIDTH columns, of which those that are not
// finite count as 0.
template <int WIDTH, int ROWS, int WORDS, int COLUMNS>
__device__ __forceinline__ void multiply_finite(float (&c)[ROWS][COLUMNS],
                                                const unsigned int (&a)[ROWS][WORDS],
                                                const char* b_smem) {
  const auto rows = fragment::left_rows<fragment::row_bytes(WIDTH)>(b_smem);
#pragma unroll 1
  for (int x = 0; x < COLUMNS / 4; ++x) {
#pragma unroll
    for (int k = 0; k < WORDS; k += 2) {
      unsigned int b[4];
      ptx::ldmatrix_x4_trans(b, rows.at(8 * k, x));
#pragma unroll
      for (int n = 0; n < 4; ++n) fragment_product::clear_pair(b[n]);
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) {
        const unsigned int left[4] = {a[2 * m][k], a[2 * m + 1][k], a[2 * m][k + 1],
                                      a[2 * m + 1][k + 1]};
        fragment::multiply_step(c, m, 0, left, b);
      }
    }
    fragment::rotate<4>(c);
  }
}

// c += a b. Where b has numbers that are not finite, masked pairs take no part in their products.
template <int WIDTH, int ROWS, int WORDS, int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&c)[ROWS][COLUMNS],
                                             unsigned int (&a)[ROWS][WORDS], const char* b_smem,
                                             bool has_nonfinite) {
  if (has_nonfinite) {
    fragment::add_nonfinite<WIDTH>(c, a, b_smem);
    multiply_finite<WIDTH>(c, a, b_smem);
  } else {
    fragment::multiply_add<WIDTH>(c, a, b_smem);
  }
}

// Lowers the scale of a warp's sums, where the storage type needs one, so that x and y fit.
template <int ROWS, int COLUMNS, int SUM_COLUMNS>
__device__ __forceinline__ void fit(const float (&x)[ROWS][COLUMNS],
                                    const float (&y)[ROWS][COLUMNS],
                                    float (&sums)[ROWS][SUM_COLUMNS], DsScale& scale) {
  if constexpr (fragment::Mma::SCALES_DS) {
    const float of_thread =
        fmax(fragment_gradient::largest_of(x), fragment_gradient::largest_of(y));
    if (!ptx::any_lane(of_thread > scale.largest)) return;
    const float largest =
        fmax(fragment_gradient::largest_finite(x), fragment_gradient::largest_finite(y));
    if (largest > scale.largest) scale.rescale(largest, sums);
  }
}

// -- the tile -------------------------------------------------------------------------------------

// What derivatives of the score mod are needed for after the probabilities: the first one, and the
// second one times the tangent of the score.
template <int ROWS, int COLUMNS>
struct Slopes {
  static constexpr int NUMBERS = HAS_DSCORE ? COLUMNS : 2;  // without a score mod, nobody uses them
  float slope[ROWS][NUMBERS], bent[ROWS][NUMBERS];
};

// Products q k and those of directions become logits and their tangents, by way of the score mod,
// which is instantiated for two columns, through which all rotate. Masked pairs get -inf.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_score_mod(const Params& p, const HeadConstants& constants,
                                                const TileBox& box, bool masked,
                                                const unsigned int (&mask)[ROWS],
                                                const Corner& corner, float (&s)[ROWS][COLUMNS],
                                                float (&ts)[ROWS][COLUMNS],
                                                Slopes<ROWS, COLUMNS>& slopes) {
  const float scale = static_cast<float>(p.scale);
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += 2) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const Site at = fragment_gradient::site_of<KEYS_ARE_ROWS>(box, corner, r, column, n);
        const float score = s[r][n] * scale;
        float tangent = ts[r][n] * scale;
        s[r][n] = score_mod(p, constants, score, at);
        if constexpr (HAS_DSCORE) {
          const float slope = score_mod_derivative(p, constants, score, at);
          slopes.slope[r][n] = slope;
          if constexpr (tangent_gradient::BENDS) {
            slopes.bent[r][n] = score_mod_curvature(p, constants, score, at) * tangent;
          }
          tangent *= slope;
        }
        if constexpr (HAS_TBIAS) tangent = score_tangent(p, constants, tangent, at);
        ts[r][n] = tangent;
        if (masked && (mask[r] >> (column + n) & 1) == 0) s[r][n] = -number::infinity();
      }
    }
    fragment::rotate<2>(s);
    fragment::rotate<2>(ts);
    if constexpr (HAS_DSCORE) fragment::rotate<2>(slopes.slope);
    if constexpr (tangent_gradient::BENDS) fragment::rotate<2>(slopes.bent);
  }
}

// Products q k and those of directions become P and tP. A masked pair gets the weight of one.
// `rows_smem` has the numbers of queries, from the corner's on.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void probabilities(const Params& p, const TileBox& box, int tile_class,
                                              bool masked, float (&s)[ROWS][COLUMNS],
                                              float (&ts)[ROWS][COLUMNS], const Corner& corner,
                                              const float* rows_smem,
                                              Slopes<ROWS, COLUMNS>& slopes) {
  const float scale = HAS_SCORE ? 1.0f : static_cast<float>(p.scale);
  const float c = scale * number::LOG2_E<float>;
  unsigned int mask[ROWS];
  if (masked) {
    fragment_gradient::evaluate_mask<KEYS_ARE_ROWS, COLUMNS>(p, box, tile_class, corner, mask);
  }
  // 3 score mod
  // 4 mask
  if constexpr (HAS_SCORE) {
    apply_score_mod<KEYS_ARE_ROWS>(p, tile::head_constants_of(p, box), box, masked, mask, corner, s,
                                   ts, slopes);
    fragment_gradient::mask_infinite(s, masked, mask);
  }
  const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS> lse(rows_smem), mu(rows_smem + BLOCK_Q);
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float offset = lse.of(r, n) * number::LOG2_E<float>;
      s[r][n] = ptx::exp2(gradient_tile::at_most_zero(fma(s[r][n], c, -offset)));
      // Adding 0 tells a product of -0 from the weight of a masked pair.
      ts[r][n] = fma(s[r][n], fma(ts[r][n], scale, -mu.of(r, n)), 0.0f);
    }
  }
  if (!HAS_SCORE && !masked) return;
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if ((mask[r] >> n & 1) != 0) continue;
      s[r][n] = matmul::masked_weight();
      ts[r][n] = matmul::masked_weight();
    }
  }
}

// Products do v and those of directions, in ds and tds, become dS and tdS. s and ts are P and tP.
// Where a gradient is 0, it stays so: a derivative of the score mod may be infinite there.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_gradients(
    const Params& p, bool masked, const float (&s)[ROWS][COLUMNS], const float (&ts)[ROWS][COLUMNS],
    const float* rows_smem, const unsigned int (&kept)[ROWS], const Slopes<ROWS, COLUMNS>& slopes,
    float (&ds)[ROWS][COLUMNS], float (&tds)[ROWS][COLUMNS]) {
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS> delta(rows_smem + 2 * BLOCK_Q),
      tdelta(rows_smem + 3 * BLOCK_Q);
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float dp = ds[r][n], tdp = tds[r][n];
      if constexpr (HAS_DROPOUT) {
        const float factor = (kept[r] >> n & 1) != 0 ? keep_scale : 0.0f;
        dp *= factor;
        tdp *= factor;
      }
      const float g = dp - delta.of(r, n);
      float dt = s[r][n] * g;
      float tdt = fma(ts[r][n], g, s[r][n] * (tdp - tdelta.of(r, n)));
      if constexpr (HAS_DSCORE) {
        tdt = tdt == 0.0f ? 0.0f : tdt * slopes.slope[r][n];
        if constexpr (tangent_gradient::BENDS) tdt += dt == 0.0f ? 0.0f : slopes.bent[r][n] * dt;
        dt = dt == 0.0f ? 0.0f : dt * slopes.slope[r][n];
      }
      ds[r][n] = dt;
      tds[r][n] = tdt;
    }
  }
  if (!HAS_SCORE && !masked) return;
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool is_masked = !matmul::is_unmasked(s[r][n]);
      // +0.0: -0.0 means masked.
      ds[r][n] = is_masked ? s[r][n] : ds[r][n] + 0.0f;
      tds[r][n] = is_masked ? s[r][n] : tds[r][n] + 0.0f;
    }
  }
}

// P or tP after dropout, without its factor, which is left to the epilogue.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void drop(const float (&x)[ROWS][COLUMNS],
                                     const unsigned int (&kept)[ROWS], float (&to)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      to[r][n] = !HAS_DROPOUT || (kept[r] >> n & 1) != 0 ? x[r][n] : x[r][n] * 0.0f;
    }
  }
}

}  // namespace fragment_tangent_gradient
