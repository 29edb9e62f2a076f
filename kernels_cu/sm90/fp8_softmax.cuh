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

__device__ __forceinline__ int bits_of(float x) { return static_cast<int>(__float_as_uint(x)); }

// The largest number of a row, of which a lane of four has some. Numbers that are not negative
// compare as their bits do, of which an instruction compares three.
template <int COLUMNS>
__device__ __forceinline__ float largest_of_row(const float (&s)[COLUMNS], float m) {
  // Four chains of comparisons hide each other's latency.
  constexpr int CHAINS = 4;
  int bits[CHAINS];
#pragma unroll
  for (int n = 0; n < CHAINS; ++n) bits[n] = bits_of(m);
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 2) {
    int& chain = bits[n / 2 % CHAINS];
    chain = matmul::larger(matmul::larger(bits_of(s[n]), bits_of(s[n + 1])), chain);
  }
  int largest = matmul::larger(matmul::larger(bits[0], bits[1]), matmul::larger(bits[2], bits[3]));
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
    largest = matmul::larger(largest, ptx::shuffle_xor(largest, lanes));
  }
  return __uint_as_float(static_cast<unsigned int>(largest));
}

// Raises the maxima to those of the tile, ignoring NaN, and rescales l; the output must be
// multiplied by `alpha`.
template <int COLUMNS>
__device__ __forceinline__ void raise_max(const float (&s)[2][COLUMNS], float (&m)[2],
                                          float (&l)[2], float (&alpha)[2], const float (&c)[2]) {
  float largest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = largest_of_row(s[r], m[r]);
  // All numbers of a row are negative, which is rare.
  if (ptx::any_lane(bits_of(largest[0]) < 0 || bits_of(largest[1]) < 0)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float own = m[r];
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) own = fmax(own, s[r][n]);
#pragma unroll
      for (int lanes = 1; lanes <= 2; lanes *= 2) own = fmax(own, ptx::shuffle_xor(own, lanes));
      largest[r] = bits_of(largest[r]) < 0 ? own : largest[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool moves = largest[r] > m[r] && m[r] != -number::infinity();
    alpha[r] = moves ? power::exp2((m[r] - largest[r]) * c[r]) : 1.0f;
    l[r] *= alpha[r];
    m[r] = largest[r];
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
