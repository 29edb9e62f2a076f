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

namespace fragment_tangent_gradient {

using fragment_gradient::Corner;
using fragment_gradient::DsScale;
using fragment_gradient::PerQuery;

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

// s = a b^T and ts = ta b^T + a tb^T, for rows that begin at a_smem and b_smem, and their tangents,
// if there are any, A_FAR and B_FAR bytes further. Fragments of a and b serve two products each.
template <int WIDTH, bool HAS_TA, bool HAS_TB, int A_FAR, int B_FAR, int UNROLL, int ROWS,
          int COLUMNS>
__device__ __forceinline__ void multiply(float (&s)[ROWS][COLUMNS], float (&ts)[ROWS][COLUMNS],
                                         const char* a_smem, const char* b_smem) {
  constexpr int BYTES = fragment::row_bytes(WIDTH);
  const auto a = fragment::left_rows<BYTES>(a_smem);
  const auto b = fragment::right_rows<BYTES>(b_smem);
  matmul::clear(s);
  matmul::clear(ts);
#pragma unroll UNROLL
  for (int step = 0; step < fragment::whole_columns(WIDTH) / 16; ++step) {
    unsigned int left[ROWS / 2][4], tangents[ROWS / 2][4];
#pragma unroll
    for (int m = 0; m < ROWS / 2; ++m) {
      ptx::ldmatrix_x4(left[m], a.at(16 * m, step));
      if constexpr (HAS_TA) ptx::ldmatrix_x4(tangents[m], a.at(16 * m, step) + A_FAR);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      unsigned int right[4];
      ptx::ldmatrix_x4(right, b.at(4 * n, step));
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) {
        fragment::multiply_step(s, m, n, left[m], right);
        if constexpr (HAS_TA) fragment::multiply_step(ts, m, n, tangents[m], right);
      }
      if constexpr (HAS_TB) {
        ptx::ldmatrix_x4(right, b.at(4 * n, step) + B_FAR);
#pragma unroll
        for (int m = 0; m < ROWS / 2; ++m) fragment::multiply_step(ts, m, n, left[m], right);
      }
    }
  }
}

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
__device__ __forceinline__ void fit(const float (&x)[ROWS][COLUMNS], const float (&y)[ROWS][COLUMNS],
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

// Products q k and those of directions become P and tP. A masked pair gets the weight of one.
// `rows_smem` has the numbers of queries, from the corner's on.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void probabilities(const Params& p, const TileBox& box, int tile_class,
                                              bool masked, float (&s)[ROWS][COLUMNS],
                                              float (&ts)[ROWS][COLUMNS], const Corner& corner,
                                              const float* rows_smem) {
  const float scale = static_cast<float>(p.scale), c = scale * number::LOG2_E<float>;
  // 3 score mod
  // 4 mask
  unsigned int mask[ROWS];
  if (masked) {
    fragment_gradient::evaluate_mask<KEYS_ARE_ROWS, COLUMNS>(p, box, tile_class, corner, mask);
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
  if (!masked) return;
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

// Products do v and those of directions, in dt and tdt, become dS and tdS. s and ts are P and tP.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_gradients(const Params& p, bool masked,
                                                const float (&s)[ROWS][COLUMNS],
                                                const float (&ts)[ROWS][COLUMNS],
                                                const float* rows_smem,
                                                const unsigned int (&kept)[ROWS],
                                                float (&dt)[ROWS][COLUMNS],
                                                float (&tdt)[ROWS][COLUMNS]) {
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS> delta(rows_smem + 2 * BLOCK_Q),
      tdelta(rows_smem + 3 * BLOCK_Q);
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float dp = dt[r][n], tdp = tdt[r][n];
      if constexpr (HAS_DROPOUT) {
        const float factor = (kept[r] >> n & 1) != 0 ? keep_scale : 0.0f;
        dp *= factor;
        tdp *= factor;
      }
      const float g = dp - delta.of(r, n);
      dt[r][n] = s[r][n] * g;
      tdt[r][n] = fma(ts[r][n], g, s[r][n] * (tdp - tdelta.of(r, n)));
    }
  }
  if (!masked) return;
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool is_masked = !matmul::is_unmasked(s[r][n]);
      // +0.0: -0.0 means masked.
      dt[r][n] = is_masked ? s[r][n] : dt[r][n] + 0.0f;
      tdt[r][n] = is_masked ? s[r][n] : tdt[r][n] + 0.0f;
    }
  }
}

// P or tP after dropout, without its factor, which is left to the epilogue.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void drop(const float (&x)[ROWS][COLUMNS],
                                     const unsigned int (&kept)[ROWS],
                                     float (&to)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      to[r][n] = !HAS_DROPOUT || (kept[r] >> n & 1) != 0 ? x[r][n] : x[r][n] * 0.0f;
    }
  }
}

}  // namespace fragment_tangent_gradient
