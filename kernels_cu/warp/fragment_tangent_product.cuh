// Scores and their tangents along a direction, of 16-bit types: a fragment of an operand serves two
// products. The kernels with tangents share this.
#pragma once
#include "fragment_product.cuh"

namespace fragment_tangent_product {

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

}  // namespace fragment_tangent_product
