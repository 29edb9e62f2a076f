// The online softmax on one tile: row maximum m, row sum l, and the rescaling between tiles. The
// twin of reference/cpu/softmax.py.
//
// The threads of one row of the thread grid share its rows: each holds the same m and a partial l
// of its own columns, which `row_sum` reduces at the end. Milakov & Gimelshein 2018, Algorithm 3;
// FlashAttention-2 (Dao 2023), Algorithm 1, lines 8-10.
#pragma once
#include "../ptx/exp2.cuh"
#include "tile.cuh"

namespace softmax {

// e^x.
__device__ __forceinline__ float exponential(float x) {
  return ptx::exp2(x * number::LOG2_E<float>);
}
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// The initial state: no key, or the sink, which is one key of that logit with value 0.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void init_state(accum_t (&m)[ROWS], accum_t (&l)[ROWS],
                                           accum_t (&acc)[ROWS][COLUMNS], accum_t sink) {
  const bool has_sink = sink != -number::infinity() && matmul::column_thread() == 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m[r] = sink;
    l[r] = has_sink ? accum_t(1) : accum_t(0);
  }
  matmul::clear(acc);
}

// m_new = max(m, row maxima of the tile), ignoring NaN. Returns whether any of the thread's rows
// grew.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ bool row_max(const accum_t (&s)[ROWS][COLUMNS], const accum_t (&m)[ROWS],
                                        accum_t (&m_new)[ROWS]) {
  bool grew = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m_new[r] = m[r];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) m_new[r] = fmax(m_new[r], s[r][n]);
#pragma unroll
    for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
      if ((lanes & COLUMN_LANES) == 0) continue;
      m_new[r] = fmax(m_new[r], ptx::shuffle_xor(m_new[r], lanes));
    }
    grew = grew || m_new[r] > m[r];
  }
  return grew;
}

// Rescales l and the accumulated output from the old maxima to the new ones.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void rescale(accum_t (&m)[ROWS], const accum_t (&m_new)[ROWS],
                                        accum_t (&l)[ROWS], accum_t (&acc)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const accum_t alpha = m_new[r] > m[r] ? exponential(m[r] - m_new[r]) : accum_t(1);
    l[r] *= alpha;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) acc[r][n] *= alpha;
    m[r] = m_new[r];
  }
}

// s becomes p = exp(s - m), and l grows by its row sums. A score of -inf becomes the weight of a
// masked pair.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void exponentiate(accum_t (&s)[ROWS][COLUMNS], const accum_t (&m)[ROWS],
                                             accum_t (&l)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const accum_t safe = m[r] != -number::infinity() ? m[r] : accum_t(0);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const bool masked = MAY_MASK && s[r][n] == -number::infinity();
      const accum_t p = exponential(s[r][n] - safe);
      s[r][n] = masked ? matmul::masked_weight() : p;
      l[r] += p;
    }
  }
}

// Reduces the partial sums over the threads that share rows; all of them get the result.
template <int ROWS>
__device__ __forceinline__ void row_sum(accum_t (&l)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
      if ((lanes & COLUMN_LANES) == 0) continue;
      l[r] += ptx::shuffle_xor(l[r], lanes);
    }
  }
}

}  // namespace softmax
