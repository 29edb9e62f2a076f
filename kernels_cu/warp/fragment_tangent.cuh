// Tangents of a tile of scores in fragments of 16-bit types, and their part of the online softmax:
// common/tangent.cuh for tensor cores, and the products that a direction adds.
//
// As in fragment_softmax.cuh, scores stay as products left them, and so do their tangents: those of
// logits are `scale` times them. A sink joins the sums at the end.
#pragma once
#include "../common/tangent.cuh"
#include "fragment_sharers.cuh"
#include "fragment_tangent_product.cuh"
#include "fragment_tile.cuh"

namespace fragment_tangent {

constexpr int ROWS = 2 * fragment::M_TILES;
constexpr int COLUMNS = fragment::WARP_KEYS / 4;
using Rows = fragment_sharers::ResultRows<D_V, ROW_SHARERS>;
using Share = fragment_product::Share<D_V, ROW_SHARERS, ROW_SHARERS>;
constexpr int COLUMNS_V = Rows::COLUMNS;
constexpr int Q_BYTES = fragment::row_bytes(D), V_BYTES = fragment::row_bytes(D_V);
constexpr int LARGEST_BYTES = matmul::larger(Q_BYTES, V_BYTES);
// Bytes from queries, or from a stage's keys or values, to their tangents.
constexpr int QUERIES_BYTES = BLOCK_Q * LARGEST_BYTES, KEYS_BYTES = BLOCK_KV * LARGEST_BYTES;
// Whether scores have tangents, and by a product. If they have none, only values have.
constexpr bool HAS_PRODUCT = HAS_TQ || HAS_TK, HAS_SCORES = HAS_PRODUCT || HAS_TBIAS;

static_assert(IS_16_BIT, "16-bit types");
static_assert(COLUMNS_V == Share::COLUMNS, "one share of a result's columns");

// -- products -------------------------------------------------------------------------------------

// s = q k^T and ts = tq k^T + q tk^T, for queries and keys from which their tangents have the
// distances above.
__device__ __forceinline__ void multiply(float (&s)[ROWS][COLUMNS], float (&ts)[ROWS][COLUMNS],
                                         const char* q_smem, const char* k_smem) {
  constexpr int UNROLL = fragment::whole_columns(D) / 16;  // all steps
  fragment_tangent_product::multiply<D, HAS_TQ, HAS_TK, QUERIES_BYTES, KEYS_BYTES, UNROLL>(
      s, ts, q_smem, k_smem);
}

// A warp's weights p and weighted tangents t in 16 bits, two to a word: left operands. Where warps
// share rows, they are in shared memory, too, and are read from there.
struct Weights {
  unsigned int p[ROWS][COLUMNS / 2], t[ROWS][COLUMNS / 2];

  // Loads 16 keys of both.
  template <class OfRows>
  __device__ __forceinline__ void load(const OfRows& rows, const OfRows& tangent_rows, int step,
                                       unsigned int (&left)[ROWS / 2][4],
                                       unsigned int (&tangents)[ROWS / 2][4]) const {
    if constexpr (ROW_SHARERS > 1) {
      using fragment_sharers::P_BYTES;
      const auto from = fragment::left_rows<P_BYTES>(rows.weights_smem());
      const auto from_tangents = fragment::left_rows<P_BYTES>(tangent_rows.weights_smem());
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) {
        ptx::ldmatrix_x4(left[m], from.at(16 * m, step));
        if constexpr (HAS_SCORES) ptx::ldmatrix_x4(tangents[m], from_tangents.at(16 * m, step));
      }
    } else {
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          left[m][x] = p[2 * m + x % 2][2 * step + x / 2];
          if constexpr (HAS_SCORES) tangents[m][x] = t[2 * m + x % 2][2 * step + x / 2];
        }
      }
    }
  }
};

// acc += p v and w += t v + p tv. Fragments of weights and values serve two products each.
__device__ __forceinline__ void multiply_add(float (&acc)[ROWS][COLUMNS_V],
                                             float (&w)[ROWS][COLUMNS_V], const Weights& weights,
                                             const Rows& rows, const Rows& tangent_rows,
                                             const char* v_smem) {
  constexpr int UNROLL = ROW_SHARERS > 1 ? 1 : BLOCK_KV / 16;
  const Share share(fragment_sharers::sharer());
  auto v = fragment::left_rows<V_BYTES>(v_smem);
  share.shift(v);
#pragma unroll UNROLL
  for (int k = 0; k < BLOCK_KV / 16; ++k) {
    unsigned int left[ROWS / 2][4], tangents[ROWS / 2][4];
    weights.load(rows, tangent_rows, k, left, tangents);
#pragma unroll
    for (int n = 0; n < COLUMNS_V; n += 4) {
      if (!share.has(n / 4)) break;
      unsigned int right[4];
      ptx::ldmatrix_x4_trans(right, v.at(16 * k, share.step(n / 4)));
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) {
        fragment::multiply_step(acc, m, n, left[m], right);
        if constexpr (HAS_SCORES) fragment::multiply_step(w, m, n, tangents[m], right);
      }
      if constexpr (HAS_TV) {
        ptx::ldmatrix_x4_trans(right, v.at(16 * k, share.step(n / 4)) + KEYS_BYTES);
#pragma unroll
        for (int m = 0; m < ROWS / 2; ++m) fragment::multiply_step(w, m, n, left[m], right);
      }
    }
  }
}

// multiply_add with the product t v times a number of its row, which is rare.
__device__ __forceinline__ void multiply_add_scaled(
    float (&acc)[ROWS][COLUMNS_V], float (&w)[ROWS][COLUMNS_V], const Weights& weights,
    const Rows& rows, const Rows& tangent_rows, const float (&of_row)[ROWS], const char* v_smem) {
  const Share share(fragment_sharers::sharer());
  auto v = fragment::left_rows<V_BYTES>(v_smem);
  share.shift(v);
#pragma unroll 1
  for (int x = 0; x < COLUMNS_V / 4; ++x) {
    float product[ROWS][4];
    matmul::clear(product);
    if (share.has(x)) {
#pragma unroll
      for (int k = 0; k < BLOCK_KV / 16; ++k) {
        unsigned int left[ROWS / 2][4], tangents[ROWS / 2][4], right[4], right_tangents[4];
        weights.load(rows, tangent_rows, k, left, tangents);
        ptx::ldmatrix_x4_trans(right, v.at(16 * k, share.step(x)));
        if constexpr (HAS_TV) {
          ptx::ldmatrix_x4_trans(right_tangents, v.at(16 * k, share.step(x)) + KEYS_BYTES);
        }
#pragma unroll
        for (int m = 0; m < ROWS / 2; ++m) {
          fragment::multiply_step(acc, m, 0, left[m], right);
          fragment::multiply_step(product, m, 0, tangents[m], right);
          if constexpr (HAS_TV) fragment::multiply_step(w, m, 0, left[m], right_tangents);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < 4; ++n) w[r][n] += product[r][n] * of_row[r];
    }
    fragment::rotate<4>(acc);
    fragment::rotate<4>(w);
  }
}

// -- tangents of logits ---------------------------------------------------------------------------

// fragment_tile::apply_score_mod, with tangents: s and ts become logits and their tangents.
template <int STEP = 2>
__device__ __forceinline__ bool apply_score_mod(const Params& p, const HeadConstants& constants,
                                                const TileBox& box, float (&s)[ROWS][COLUMNS],
                                                float (&ts)[ROWS][COLUMNS], float scale) {
  const fragment_tile::Pairs pairs(box);
  float sum[ROWS] = {};  // of logits, not finite if one of them is not
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += STEP) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < STEP; ++n) {
        Site at = SCORE_READS || HAS_TBIAS ? pairs.nearest(box, r, column + n)
                                           : pairs.site(box, r, column + n);
        at.step_j = fragment_tile::Pairs::key_of(n);  // `column` is no compile-time constant
        const float score = s[r][n] * scale;
        s[r][n] = score_mod(p, constants, score, at);
        sum[r] += s[r][n];
        ts[r][n] *= scale;
        if constexpr (HAS_DSCORE && HAS_PRODUCT) {
          ts[r][n] *= score_mod_derivative(p, constants, score, at);
        }
        if constexpr (HAS_TBIAS) ts[r][n] = score_tangent(p, constants, ts[r][n], at);
      }
    }
    if constexpr (STEP < COLUMNS) {
      fragment::rotate<STEP>(s);
      if constexpr (HAS_SCORES) fragment::rotate<STEP>(ts);
    }
  }
  bool finite = true;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) finite = finite && number::is_finite(sum[r]);
  return !finite;
}

// -- sums -----------------------------------------------------------------------------------------

// Rescales all sums from the old maxima to the new ones.
template <int RESULT_COLUMNS>
__device__ __forceinline__ void rescale(float (&m)[ROWS], const float (&m_new)[ROWS],
                                        float (&l)[ROWS], float (&sum)[ROWS],
                                        float (&acc)[ROWS][RESULT_COLUMNS],
                                        float (&w)[ROWS][RESULT_COLUMNS], float c) {
  float alpha[ROWS];
  fragment_softmax::raise_max(m, m_new, l, alpha, c);
  fragment_softmax::scale_rows(acc, alpha);
  fragment_softmax::scale_rows(w, alpha);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sum[r] *= alpha[r];
}

// The ref of a row that has not seen a key yet.
__device__ __forceinline__ float no_reference() { return number::bits_to_float(0x7fffffffu); }

// Whether a row of the warp has none.
__device__ __forceinline__ bool lack_references(const float (&ref)[ROWS]) {
  bool lacks = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) lacks = lacks || ref[r] != ref[r];
  return ptx::any_lane(lacks);
}

// Rows that see their first keys get a ref.
template <class OfRows>
__device__ __forceinline__ void find_references(const float (&e)[ROWS][COLUMNS],
                                                const float (&ts)[ROWS][COLUMNS], float scale,
                                                float (&ref)[ROWS], const OfRows& rows,
                                                const OfRows& tangent_rows) {
  float weight[ROWS], mean[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    weight[r] = mean[r] = 0;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      weight[r] += e[r][n];
      // Nothing is known of the tangents of masked pairs.
      if (e[r][n] != 0.0f) mean[r] += e[r][n] * (ts[r][n] * scale);
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      weight[r] += ptx::shuffle_xor(weight[r], lanes);
      mean[r] += ptx::shuffle_xor(mean[r], lanes);
    }
  }
  if constexpr (ROW_SHARERS > 1) {
    tangent_rows.numbers().add(weight);
    rows.numbers().add(mean);  // all have read maxima there: they have waited since
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (ref[r] != ref[r] && weight[r] > 0.0f) ref[r] = mean[r] / weight[r];
  }
}

// ts becomes e (tt - ref), tt being `scale` times ts, and `sum`, the thread's part of r, grows by
// it. With `masked`, a pair of weight 0 gets this weight, with its sign, which tells masked ones.
__device__ __forceinline__ void weigh(const float (&e)[ROWS][COLUMNS], float (&ts)[ROWS][COLUMNS],
                                      float scale, const float (&ref)[ROWS], float (&sum)[ROWS],
                                      bool masked) {
  if (masked) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const float weighted = fma(e[r][n], fma(ts[r][n], scale, -ref[r]), 0.0f);
        ts[r][n] = e[r][n] == 0.0f ? e[r][n] : weighted;
        sum[r] += ts[r][n];
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        // Adding 0 tells a product of -0 from the weight of a masked pair.
        ts[r][n] = fma(e[r][n], fma(ts[r][n], scale, -ref[r]), 0.0f);
        sum[r] += ts[r][n];
      }
    }
  }
}

// Drops the pairs of t whose weights dropout has made 0.
__device__ __forceinline__ void drop(const float (&e)[ROWS][COLUMNS], float (&t)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) t[r][n] = e[r][n] == 0.0f ? e[r][n] : t[r][n];
  }
}

// Above this, weighted tangents do not fit float16 with a margin.
constexpr float LARGEST_WEIGHTED = 32768;

// Multiplies rows of t that would overflow in float16 by powers of two, of which `inverse` has the
// inverses. Returns whether any of the warp's rows is one.
template <class OfRows>
__device__ __forceinline__ bool fit_float16(float (&t)[ROWS][COLUMNS], float (&inverse)[ROWS],
                                            const OfRows& tangent_rows) {
  float largest[ROWS];
  bool exceeds = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    largest[r] = 0;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) largest[r] = fmax(largest[r], fabs(t[r][n]));
    exceeds = exceeds || largest[r] > LARGEST_WEIGHTED;
  }
  if (ROW_SHARERS == 1 && !ptx::any_lane(exceeds)) return false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (!number::is_finite(largest[r])) {
      largest[r] = 0;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        if (number::is_finite(t[r][n])) largest[r] = fmax(largest[r], fabs(t[r][n]));
      }
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      largest[r] = fmax(largest[r], ptx::shuffle_xor(largest[r], lanes));
    }
  }
  if constexpr (ROW_SHARERS > 1) tangent_rows.numbers().take_largest(largest);
  exceeds = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    inverse[r] = 1;
    if (largest[r] > LARGEST_WEIGHTED) {
      // The largest becomes at least 2^14 and less than 2^15.
      const unsigned int exponent = __float_as_uint(largest[r]) >> 23;
      inverse[r] = number::bits_to_float((exponent - 14) << 23);
      const float factor = number::bits_to_float((268 - exponent) << 23);
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) t[r][n] *= factor;
      exceeds = true;
    }
  }
  return ptx::any_lane(exceeds);
}

// After fragment_softmax::join_sink, which made logits of m and gave `weight`: adds the sink to
// the reduced sums r. Rows without a ref get 0.
__device__ __forceinline__ void join_sink(float (&sum)[ROWS], const float (&m)[ROWS],
                                          const float (&weight)[ROWS], float (&ref)[ROWS],
                                          float sink, float tsink) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) ref[r] = ref[r] != ref[r] ? 0.0f : ref[r];
  if (sink == -number::infinity()) return;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float e = sink == m[r] ? 1.0f : softmax::exponential(sink - m[r]);
    sum[r] = sum[r] * weight[r] + e * (tsink - ref[r]);
  }
}

}  // namespace fragment_tangent
