// The online softmax before weights are rounded to codes of 8 bits: the twin of
// reference/cpu/softmax.py for forward_sm90_fp8.cu.
//
// Every row has its own factor, because queries have scales: logits are unit[r] times a score, and
// c[r] = unit[r] log2 e. The maximum never lags. Weights are 2^SHIFT times as large as with it, so
// that the largest is 256 of the 448 that e4m3 holds, and so is l.
#pragma once
#include "../warp/fragment_softmax.cuh"

namespace fp8_softmax {

constexpr float SHIFT = 8, UNSHIFTED = 1.0f / 256;

// Raises the maxima to those of the tile, ignoring NaN, and rescales l; the output must be
// multiplied by `alpha`.
template <int COLUMNS>
__device__ __forceinline__ void raise_max(const float (&s)[2][COLUMNS], float (&m)[2],
                                          float (&l)[2], float (&alpha)[2], const float (&c)[2]) {
  // Four chains of comparisons in each row hide each other's latency.
  constexpr int CHAINS = 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest[CHAINS];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      largest[n % CHAINS] = fmax(n < CHAINS ? m[r] : largest[n % CHAINS], s[r][n]);
    }
#pragma unroll
    for (int chains = CHAINS / 2; chains > 0; chains /= 2) {
#pragma unroll
      for (int n = 0; n < chains; ++n) largest[n] = fmax(largest[n], largest[n + chains]);
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      largest[0] = fmax(largest[0], ptx::shuffle_xor(largest[0], lanes));
    }
    const bool moves = largest[0] > m[r] && m[r] != -number::infinity();
    alpha[r] = moves ? power::exp2((m[r] - largest[0]) * c[r]) : 1.0f;
    l[r] *= alpha[r];
    m[r] = largest[0];
  }
}

// s becomes 2^((s - m) c + SHIFT), and l grows by its row sums. With `masked`, a score of -inf
// becomes the weight of a masked pair.
template <int COLUMNS>
__device__ __forceinline__ void exponentiate(float (&s)[2][COLUMNS], const float (&m)[2],
                                             float (&l)[2], const float (&c)[2], bool masked) {
  float offset[2];
  bool large = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    offset[r] = m[r] != -number::infinity() ? m[r] * c[r] : 0.0f;
    large = large || !(fabs(offset[r]) <= fragment_softmax::LARGEST_OFFSET);
  }
  if (ptx::any_lane(large)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Decided for each row by itself, so that no bit of a row depends on its neighbours.
      const bool inexact = !(fabs(offset[r]) <= fragment_softmax::LARGEST_OFFSET);
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) s[r][n] -= inexact ? m[r] : 0.0f;
      if (inexact) offset[r] = 0;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) offset[r] = SHIFT - offset[r];
  if (masked) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const bool unmasked = s[r][n] != -number::infinity();
        const float p = power::exp2(fma(s[r][n], c[r], offset[r]));
        s[r][n] = unmasked ? p : matmul::masked_weight();
        l[r] += s[r][n];
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        s[r][n] = power::exp2(fma(s[r][n], c[r], offset[r]));
        l[r] += s[r][n];
      }
    }
  }
}

}  // namespace fp8_softmax
