// dS in 16 bits: its scale in float16, and how it is rounded. Part of the twin of
// reference/cpu/gradient_tile.py.
#pragma once
#include "fragment_gradient.cuh"

namespace fragment_gradient {

// dS is multiplied by a power of two before it is rounded to float16, so that it neither overflows
// nor vanishes: the largest |dS| becomes at least 2^7, none reaches 2^16. Sums have the same scale.
struct DsScale {
  float factor = 1.0f;
  float largest = fragment::Mma::SCALES_DS ? 0.0f : number::infinity();  // it suits |dS| up to this

  // The factor for |dS| up to `x`. Its inverse is a normal number, too.
  __device__ __forceinline__ static float factor_for(float x) {
    const int exponent = static_cast<int>(__float_as_uint(x) >> 23);
    const int field = 261 - exponent;
    return number::bits_to_float(static_cast<unsigned int>(field < 253 ? field : 253) << 23);
  }
  __device__ __forceinline__ float inverse() const {
    return number::bits_to_float((254u << 23) - __float_as_uint(factor));
  }

  // Lowers the factor for |dS| up to `x`, and rescales the sums.
  template <int ROWS, int COLUMNS>
  __device__ __forceinline__ void rescale(float x, float (&sums)[ROWS][COLUMNS]) {
    const float smaller = factor_for(x);
    if (x == 0.0f || (largest > 0.0f && smaller >= factor)) return;
    if (largest > 0.0f) matmul::scale(sums, smaller * inverse());
    factor = smaller;
    largest = 32768.0f * inverse();
  }
};

// The largest magnitude of a thread's elements, ignoring NaN.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ float largest_of(const float (&x)[ROWS][COLUMNS]) {
  float largest = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) largest = fmax(largest, fabs(x[r][n]));
  }
  return largest;
}

// The largest finite magnitude of a warp's elements.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ float largest_finite(const float (&x)[ROWS][COLUMNS]) {
  float largest = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const float size = fabs(x[r][n]);
      largest = fmax(largest, size <= number::largest_float() ? size : 0.0f);
    }
  }
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    largest = fmax(largest, ptx::shuffle_xor(largest, lanes));
  }
  return largest;
}

// Rounds dS, times a factor, to the storage type.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void narrow(const float (&ds)[ROWS][COLUMNS], float factor,
                                       unsigned int (&to)[ROWS][COLUMNS / 2]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      to[r][n / 2] = number::narrow_pair(ds[r][n] * factor, ds[r][n + 1] * factor);
    }
  }
}

// Multiplies float16 dS that a thread wrote by store_words by `factor`, a power of two of at
// most 1.
template <int BYTES, int ROWS, int WORDS>
__device__ __forceinline__ void scale_words(const Corner& corner, float factor, char* tile_smem) {
#pragma unroll 1
  for (int n = 0; n < WORDS; ++n) {
#pragma unroll 1
    for (int r = 0; r < ROWS; ++r) {
      const int at = fragment::swizzled_offset<BYTES>(corner.row + 8 * r, corner.column / 8 + n);
      auto* const word =
          reinterpret_cast<unsigned int*>(tile_smem + at + 2 * fragment::lane_column());
      const auto low = static_cast<storage_t>(*word), high = static_cast<storage_t>(*word >> 16);
      *word = number::narrow_pair(number::widen(low) * factor, number::widen(high) * factor);
    }
  }
}

}  // namespace fragment_gradient
