// Tangents of a tile of scores, and their part of the online softmax: the twin of what
// reference/cpu/forward_tangent.py does with them.
//
// With e = exp(t - m), the tangents tt of logits add two sums to the softmax: r of e (tt - ref),
// and w of e (tt - ref) v + e tv. Any number may stand for ref; that of a row is the weighted mean
// of tt over the first tile of keys that it sees, so that what all tangents of a row have in common
// costs no digits.
#pragma once
#include "softmax.cuh"

// Generated from the tangent of a bias, if there is one: the tangent of a logit with that added.
__device__ accum_t score_tangent(const Params& p, const HeadConstants& constants, accum_t tangent,
                                 const Site& at);

namespace tangent {

// ts, tangents of scores, becomes tt: those of logits, 0 where s is -inf. slope_smem has the
// derivatives of changed scores in the thread's cells; tile_smem, which may be the same, is scratch
// memory.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void of_logits(const Params& p, const TileBox& box,
                                          const accum_t (&s)[ROWS][COLUMNS],
                                          accum_t (&ts)[ROWS][COLUMNS], const accum_t* slope_smem,
                                          accum_t* tile_smem) {
  if constexpr (HAS_DSCORE && (HAS_TQ || HAS_TK)) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        // Pairs that are not there have no derivative.
        if (s[r][n] != -number::infinity()) ts[r][n] *= slope_smem[tile::cell<STRIDE>(r, n)];
      }
    }
  }
  if constexpr (HAS_TBIAS) {
    tile::store_cells<STRIDE>(ts, tile_smem);
#pragma unroll 1
    for (int n = 0; n < ROWS * COLUMNS; ++n) {
      const int row = matmul::row_thread() + ROW_THREADS * (n / COLUMNS);
      const int column = matmul::column_thread() + COLUMN_THREADS * (n % COLUMNS);
      const Site at = tile::site<KEYS_ARE_ROWS>(box, row, column);
      accum_t* const element = tile_smem + row * STRIDE + column;
      if (at.i <= box.i_high && at.j <= box.j_high) {
        *element = score_tangent(p, score_head_constants(p, at), *element, at);
      }
    }
    tile::load_cells<STRIDE>(ts, tile_smem);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (s[r][n] == -number::infinity()) ts[r][n] = 0;
    }
  }
}

// Rescales all sums from the old maxima to the new ones.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void rescale(accum_t (&m)[ROWS], const accum_t (&m_new)[ROWS],
                                        accum_t (&l)[ROWS], accum_t (&sum)[ROWS],
                                        accum_t (&acc)[ROWS][COLUMNS],
                                        accum_t (&w)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const accum_t alpha = m_new[r] > m[r] ? softmax::exponential(m[r] - m_new[r]) : accum_t(1);
    l[r] *= alpha;
    sum[r] *= alpha;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      acc[r][n] *= alpha;
      w[r][n] *= alpha;
    }
    m[r] = m_new[r];
  }
}

// tt becomes e (tt - ref), and `sum`, the thread's part of r, grows by it. Rows that see their
// first keys, whose bits in `seen` are 0, get a ref; `before` is the thread's part of their row
// sums without this tile, which is the sink's. ref_smem has a row's ref, which its threads share.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void weigh(const accum_t (&e)[ROWS][COLUMNS],
                                      accum_t (&tt)[ROWS][COLUMNS], const accum_t (&before)[ROWS],
                                      accum_t (&sum)[ROWS], accum_t* ref_smem, unsigned int& seen) {
  ref_smem += matmul::row_thread();
  if (ptx::any_lane(seen != 0xffffffffu >> (32 - ROWS))) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      accum_t weight = 0, mean = 0;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        weight += e[r][n];
        mean += e[r][n] * tt[r][n];
      }
#pragma unroll
      for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
        if ((lanes & COLUMN_LANES) == 0) continue;
        weight += ptx::shuffle_xor(weight, lanes);
        mean += ptx::shuffle_xor(mean, lanes);
      }
      if ((seen >> r & 1u) == 0 && weight > accum_t(0)) {
        const accum_t ref = mean / weight;
        if (matmul::column_thread() == 0) ref_smem[ROW_THREADS * r] = ref;
        sum[r] -= before[r] * ref;
        seen |= 1u << r;
      }
    }
    __syncwarp();  // ref, written by the first thread of each row
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const accum_t ref = ref_smem[ROW_THREADS * r];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      // Adding 0 tells a product of -0 from the weight of a masked pair.
      const accum_t weighted = e[r][n] * (tt[r][n] - ref) + accum_t(0);
      const bool masked = MAY_MASK && !matmul::is_unmasked(e[r][n]);
      tt[r][n] = masked ? matmul::masked_weight() : weighted;
      sum[r] += tt[r][n];
    }
  }
}

}  // namespace tangent
