// The online softmax on fragments of scores: the twin of reference/softmax.py for tensor cores.
//
// Scores stay as the product left them, and logits are `unit` times a score: so the maximum is one
// of scores, and 2^x takes one multiply-add before it. The four lanes of a row hold the same m, and
// a partial l of their own columns, which `row_sum` joins at the end.
#pragma once
#include "fragment_rows.cuh"
#include "softmax.cuh"

namespace fragment_softmax {

// Where |m * c| is larger, the rounding of m * c would show in s * c - m * c.
constexpr float LARGEST_OFFSET = 1048576.0f;

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void init_state(float (&m)[ROWS], float (&l)[ROWS],
                                           float (&acc)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m[r] = -number::infinity();
    l[r] = 0;
  }
  matmul::clear(acc);
}

// m_new = max(m, row maxima of the tile); NaN is passed over. Whether any of the warp's rows grew.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ bool row_max(const float (&s)[ROWS][COLUMNS], const float (&m)[ROWS],
                                        float (&m_new)[ROWS]) {
  bool grew = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m_new[r] = m[r];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) m_new[r] = fmax(m_new[r], s[r][n]);
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      m_new[r] = fmax(m_new[r], arch::shuffle_xor(m_new[r], lanes));
    }
    grew = grew || m_new[r] > m[r];
  }
  return arch::any_lane(grew);
}

// Brings l and the accumulated output from the old maxima to the new ones. `c` is unit * log2 e.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void rescale(float (&m)[ROWS], const float (&m_new)[ROWS],
                                        float (&l)[ROWS], float (&acc)[ROWS][COLUMNS], float c) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const bool moves = m_new[r] > m[r] && m[r] != -number::infinity();
    const float alpha = moves ? arch::exp2((m[r] - m_new[r]) * c) : 1.0f;
    l[r] *= alpha;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) acc[r][n] *= alpha;
    m[r] = m_new[r];
  }
}

// Makes s into p = 2^((s - m) c); l grows by its row sums. Where `masked`, a score of -inf becomes
// the weight of a pair that takes no part.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void exponentiate(float (&s)[ROWS][COLUMNS], const float (&m)[ROWS],
                                             float (&l)[ROWS], float c, bool masked) {
  float offset[ROWS];
  bool large = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    offset[r] = m[r] != -number::infinity() ? m[r] * c : 0.0f;
    large = large || !(fabs(offset[r]) <= LARGEST_OFFSET);
  }
  if (arch::any_lane(large)) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      // Row by row, so that no bit of a row depends on its neighbours.
      const bool own = !(fabs(offset[r]) <= LARGEST_OFFSET);
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) s[r][n] -= own ? m[r] : 0.0f;
      if (own) offset[r] = 0;
    }
  }
  if (masked) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const bool seen = s[r][n] != -number::infinity();
        const float p = arch::exp2(fma(s[r][n], c, -offset[r]));
        s[r][n] = seen ? p : matmul::no_part();
        l[r] += s[r][n];
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        s[r][n] = arch::exp2(fma(s[r][n], c, -offset[r]));
        l[r] += s[r][n];
      }
    }
  }
}

// Joins the partial sums of the lanes that share rows; all of them get the whole.
template <int ROWS>
__device__ __forceinline__ void row_sum(float (&l)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) l[r] += arch::shuffle_xor(l[r], lanes);
  }
}

// Makes the maxima into logits, and adds one key of logit `sink` and value 0: `weight` is what is
// left of the accumulated output.
template <int ROWS>
__device__ __forceinline__ void join_sink(float (&m)[ROWS], float (&l)[ROWS], float (&weight)[ROWS],
                                          float unit, float sink) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (m[r] != -number::infinity()) m[r] *= unit;
    weight[r] = 1;
    if (sink != -number::infinity()) {
      const float top = m[r] > sink ? m[r] : sink;
      weight[r] = m[r] == top ? 1.0f : softmax::exponential(m[r] - top);
      l[r] = l[r] * weight[r] + (sink == top ? 1.0f : softmax::exponential(sink - top));
      m[r] = top;
    }
  }
}

}  // namespace fragment_softmax
