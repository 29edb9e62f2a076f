// The online softmax on fragments of scores: the twin of reference/cpu/softmax.py for tensor cores.
//
// Scores stay as the product left them; logits are `logit_scale` times a score. So m is a maximum
// of scores, and 2^x needs one multiply-add before it. The four lanes of a row hold the same m and
// a partial l of their own columns, which row_sum reduces at the end.
#pragma once
#include "fragment_rows.cuh"
#include "../common/power.cuh"
#include "../common/softmax.cuh"

namespace fragment_softmax {

// The larger number, or x if y is NaN. x is not NaN.
__device__ __forceinline__ float larger(float x, float y) { return fmax(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return y > x ? y : x; }

// With a lagging maximum, m stays as long as no weight exceeds 2^LAG, so that sums are rarely
// rescaled. 16-bit weights lose no precision by it; in wider types log(l) would cancel bits of m.
constexpr accum_t LAG = 8;

// Above this |m * c|, its rounding error is visible in s * c - m * c, so (s - m) * c is used.
constexpr accum_t LARGEST_OFFSET = 1048576;

template <int ROWS>
__device__ __forceinline__ void init_sums(accum_t (&m)[ROWS], accum_t (&l)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m[r] = -number::infinity();
    l[r] = 0;
  }
}

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void init_state(accum_t (&m)[ROWS], accum_t (&l)[ROWS],
                                           accum_t (&acc)[ROWS][COLUMNS]) {
  init_sums(m, l);
  matmul::clear(acc);
}

// Joins the maxima of a lane's columns with those of the lanes that share rows.
template <int ROWS>
__device__ __forceinline__ void join_max(accum_t (&m)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) m[r] = larger(m[r], ptx::shuffle_xor(m[r], lanes));
  }
}

// Where m LAGS and may stay, m_new becomes m. Returns whether the maximum of any of the warp's rows
// moved. `c` is logit_scale * log2 e.
template <bool LAGS, int ROWS>
__device__ __forceinline__ bool choose_max(const accum_t (&m)[ROWS], accum_t (&m_new)[ROWS],
                                           accum_t c) {
  bool grew = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    // Decided for each row by itself, so that no bit of a row depends on its neighbours. The first
    // maximum of a row always moves, even if c is 0.
    const bool stays = LAGS ? (m_new[r] - m[r]) * c <= LAG : m_new[r] == m[r];
    if (stays) m_new[r] = m[r];
    grew = grew || !stays;
  }
  return ptx::any_lane(grew);
}

// m_new = max(m, row maxima of the tile), ignoring NaN, or m if it LAGS and may stay. Returns
// whether the maximum of any of the warp's rows moved.
template <bool LAGS = fragment::Mma::LAGS, int ROWS, int COLUMNS>
__device__ __forceinline__ bool row_max(const accum_t (&s)[ROWS][COLUMNS], const accum_t (&m)[ROWS],
                                        accum_t (&m_new)[ROWS], accum_t c) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m_new[r] = m[r];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) m_new[r] = larger(m_new[r], s[r][n]);
  }
  join_max(m_new);
  return choose_max<LAGS>(m, m_new, c);
}

// Rescales l from the old maxima to the new ones; the output must be multiplied by `alpha`.
template <int ROWS>
__device__ __forceinline__ void raise_max(accum_t (&m)[ROWS], const accum_t (&m_new)[ROWS],
                                          accum_t (&l)[ROWS], accum_t (&alpha)[ROWS], accum_t c) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const bool moves = m_new[r] > m[r] && m[r] != -number::infinity();
    alpha[r] = moves ? power::exp2((m[r] - m_new[r]) * c) : accum_t(1);
    l[r] *= alpha[r];
    m[r] = m_new[r];
  }
}

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void scale_rows(accum_t (&acc)[ROWS][COLUMNS],
                                           const accum_t (&alpha)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) acc[r][n] *= alpha[r];
  }
}

// Rescales l and the accumulated output from the old maxima to the new ones.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void rescale(accum_t (&m)[ROWS], const accum_t (&m_new)[ROWS],
                                        accum_t (&l)[ROWS], accum_t (&acc)[ROWS][COLUMNS],
                                        accum_t c) {
  accum_t alpha[ROWS];
  raise_max(m, m_new, l, alpha, c);
  scale_rows(acc, alpha);
}

// offset = m c, or 0 if there is no maximum. Returns whether its rounding error is visible in any
// of the warp's rows.
template <int ROWS>
__device__ __forceinline__ bool find_offset(const accum_t (&m)[ROWS], accum_t c,
                                            accum_t (&offset)[ROWS]) {
  bool large = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    offset[r] = m[r] != -number::infinity() ? m[r] * c : accum_t(0);
    large = large || !(fabs(offset[r]) <= LARGEST_OFFSET);
  }
  return ptx::any_lane(large);
}

// Subtracts the maxima whose offset has a visible error from the scores, instead of the offset.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void subtract_max(accum_t (&s)[ROWS][COLUMNS], const accum_t (&m)[ROWS],
                                             accum_t (&offset)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    // Decided for each row by itself, so that no bit of a row depends on its neighbours.
    const bool inexact = !(fabs(offset[r]) <= LARGEST_OFFSET);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) s[r][n] -= inexact ? m[r] : accum_t(0);
    if (inexact) offset[r] = 0;
  }
}

// s becomes p = 2^((s - m) c), and l grows by its row sums. With `masked`, a score of -inf becomes
// the weight of a masked pair.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void exponentiate(accum_t (&s)[ROWS][COLUMNS], const accum_t (&m)[ROWS],
                                             accum_t (&l)[ROWS], accum_t c, bool masked) {
  accum_t offset[ROWS];
  if (find_offset(m, c, offset)) subtract_max(s, m, offset);
  if (masked) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const bool unmasked = s[r][n] != -number::infinity();
        const accum_t p = power::exp2(fma(s[r][n], c, -offset[r]));
        s[r][n] = unmasked ? p : matmul::masked_weight();
        l[r] += s[r][n];
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        s[r][n] = power::exp2(fma(s[r][n], c, -offset[r]));
        l[r] += s[r][n];
      }
    }
  }
}

// Reduces the partial sums over the lanes that share rows; all of them get the result.
template <int ROWS>
__device__ __forceinline__ void row_sum(accum_t (&l)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) l[r] += ptx::shuffle_xor(l[r], lanes);
  }
}

// Turns the maxima into logits and adds the sink, a key of logit `sink` with value 0; the
// accumulated output must be multiplied by `weight`.
template <int ROWS>
__device__ __forceinline__ void join_sink(accum_t (&m)[ROWS], accum_t (&l)[ROWS],
                                          accum_t (&weight)[ROWS], accum_t logit_scale,
                                          accum_t sink) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (m[r] != -number::infinity()) m[r] *= logit_scale;
    weight[r] = 1;
    if (sink != -number::infinity()) {
      const accum_t top = m[r] > sink ? m[r] : sink;
      weight[r] = m[r] == top ? accum_t(1) : softmax::exponential(m[r] - top);
      l[r] = l[r] * weight[r] + (sink == top ? accum_t(1) : softmax::exponential(sink - top));
      m[r] = top;
    }
  }
}

}  // namespace fragment_softmax
