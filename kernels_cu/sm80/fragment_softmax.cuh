// The online softmax on fragments of scores: the twin of reference/cpu/softmax.py for tensor cores.
//
// Scores stay as the product left them, and logits are `unit` times a score: so the maximum is one
// of scores, and 2^x takes one multiply-add before it. The four lanes of a row hold the same m, and
// a partial l of their own columns, which `row_sum` joins at the end.
#pragma once
#include "fragment_rows.cuh"
#include "../common/power.cuh"
#include "../common/softmax.cuh"

namespace fragment_softmax {

constexpr accum_t LOG2_E = static_cast<accum_t>(1.4426950408889634);

// The larger number, or the first where the second is NaN. The first is none.
__device__ __forceinline__ float larger(float x, float y) { return fmax(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return y > x ? y : x; }

// A maximum that lags stays where it is as long as no weight exceeds 2^LAG, so that sums are seldom
// rescaled. Weights of 16 bits lose none of them; in wider types log(l) would lose some of m's.
constexpr accum_t LAG = 8;

// Where |m * c| is larger, the rounding of m * c would show in s * c - m * c.
constexpr accum_t LARGEST_OFFSET = 1048576;

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void init_state(accum_t (&m)[ROWS], accum_t (&l)[ROWS],
                                           accum_t (&acc)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m[r] = -number::infinity();
    l[r] = 0;
  }
  matmul::clear(acc);
}

// m_new = max(m, row maxima of the tile), or m where it LAGS and stays; NaN is passed over. Whether
// any of the warp's rows grew. `c` is unit * log2 e.
template <bool LAGS = fragment::Mma::LAGS, int ROWS, int COLUMNS>
__device__ __forceinline__ bool row_max(const accum_t (&s)[ROWS][COLUMNS], const accum_t (&m)[ROWS],
                                        accum_t (&m_new)[ROWS], accum_t c) {
  bool grew = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m_new[r] = m[r];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) m_new[r] = larger(m_new[r], s[r][n]);
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      m_new[r] = larger(m_new[r], ptx::shuffle_xor(m_new[r], lanes));
    }
    // Row by row, so that no bit of a row depends on its neighbours. The first maximum of a row
    // does not stay, also where c is 0.
    const bool stays = LAGS ? (m_new[r] - m[r]) * c <= LAG : m_new[r] == m[r];
    if (stays) m_new[r] = m[r];
    grew = grew || !stays;
  }
  return ptx::any_lane(grew);
}

// Brings l from the old maxima to the new ones; what is accumulated is to be multiplied by `alpha`.
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

// Brings l and the accumulated output from the old maxima to the new ones.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void rescale(accum_t (&m)[ROWS], const accum_t (&m_new)[ROWS],
                                        accum_t (&l)[ROWS], accum_t (&acc)[ROWS][COLUMNS],
                                        accum_t c) {
  accum_t alpha[ROWS];
  raise_max(m, m_new, l, alpha, c);
  scale_rows(acc, alpha);
}

// offset = m c, or 0 without a maximum. Whether its rounding would show in any of the warp's rows.
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

// Makes s into p = 2^((s - m) c); l grows by its row sums. Where `masked`, a score of -inf becomes
// the weight of a pair that takes no part.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void exponentiate(accum_t (&s)[ROWS][COLUMNS], const accum_t (&m)[ROWS],
                                             accum_t (&l)[ROWS], accum_t c, bool masked) {
  accum_t offset[ROWS];
  if (find_offset(m, c, offset)) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      // Row by row, so that no bit of a row depends on its neighbours.
      const bool own = !(fabs(offset[r]) <= LARGEST_OFFSET);
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) s[r][n] -= own ? m[r] : accum_t(0);
      if (own) offset[r] = 0;
    }
  }
  if (masked) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const bool seen = s[r][n] != -number::infinity();
        const accum_t p = power::exp2(fma(s[r][n], c, -offset[r]));
        s[r][n] = seen ? p : matmul::masked_weight();
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

// The same by halves of the columns: the weights of one in which the warp has no pair that takes
// part are 0, without being computed.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void exponentiate_halves(accum_t (&s)[ROWS][COLUMNS],
                                                    const accum_t (&m)[ROWS], accum_t (&l)[ROWS],
                                                    accum_t c, const bool (&takes_part)[2]) {
  accum_t offset[ROWS];
  const bool large = find_offset(m, c, offset);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = half * COLUMNS / 2, end = begin + COLUMNS / 2;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (!takes_part[half]) {
#pragma unroll
        for (int n = begin; n < end; ++n) s[r][n] = 0;
        continue;
      }
      const bool own = !(fabs(offset[r]) <= LARGEST_OFFSET);
      const accum_t left = own ? accum_t(0) : offset[r];
      if (large) {
#pragma unroll
        for (int n = begin; n < end; ++n) s[r][n] -= own ? m[r] : accum_t(0);
      }
#pragma unroll
      for (int n = begin; n < end; ++n) {
        s[r][n] = power::exp2(fma(s[r][n], c, -left));
        l[r] += s[r][n];
      }
    }
  }
}

// Joins the partial sums of the lanes that share rows; all of them get the whole.
template <int ROWS>
__device__ __forceinline__ void row_sum(accum_t (&l)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) l[r] += ptx::shuffle_xor(l[r], lanes);
  }
}

// Makes the maxima into logits, and adds one key of logit `sink` and value 0: `weight` is what is
// left of the accumulated output.
template <int ROWS>
__device__ __forceinline__ void join_sink(accum_t (&m)[ROWS], accum_t (&l)[ROWS],
                                          accum_t (&weight)[ROWS], accum_t unit, accum_t sink) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (m[r] != -number::infinity()) m[r] *= unit;
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
