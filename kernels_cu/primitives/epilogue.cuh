// Writing a block of results from registers to global memory.
#pragma once
#include "matmul.cuh"

namespace epilogue {

// Writes a thread's rows of a result of WIDTH columns, times `factor`, as elements of `kind`. Row 0
// of the block is row `first` of the entry's head; `valid` rows exist.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const accum_t (&result)[ROWS][COLUMNS],
                                           const Operand& to, int kind, long long offset,
                                           long long first, int valid,
                                           const accum_t (&factor)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = matmul::row_thread() + ROW_THREADS * r;
    if (row < valid) {
      const long long target = offset + (first + row) * to.row;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const int column = matmul::result_column<WIDTH>(n);
        if (column < WIDTH) {
          number::store(to.data, kind, target + column * to.col, result[r][n] * factor[r]);
        }
      }
    }
  }
}

template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const accum_t (&result)[ROWS][COLUMNS],
                                           const Operand& to, int kind, long long offset,
                                           long long first, int valid, accum_t factor) {
  accum_t factors[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) factors[r] = factor;
  store_rows<WIDTH>(result, to, kind, offset, first, valid, factors);
}

}  // namespace epilogue
