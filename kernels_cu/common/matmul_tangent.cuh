// Products that only kernels of tangents have: two with the same right factor, which is streamed
// and read from shared memory once, and one with a tile from the left whose columns are the
// result's rows. Each sum has the order that it has in matmul.cuh.
#pragma once
#include "matmul.cuh"

namespace matmul {

// c += a b^T and d += e b^T, as `multiply` does: every vector of b is read once.
template <int DEPTH, int A_STRIDE, int B_STRIDE, int UNROLL, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_twice(accum_t (&c)[ROWS][COLUMNS], const accum_t* a_smem,
                                               accum_t (&d)[ROWS][COLUMNS], const accum_t* e_smem,
                                               const accum_t* b_smem) {
  a_smem += row_thread() * A_STRIDE;
  e_smem += row_thread() * A_STRIDE;
  b_smem += column_thread() * B_STRIDE;
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH; k += VECTOR) {
    Vector b[COLUMNS];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      b[n] = *reinterpret_cast<const Vector*>(b_smem + n * COLUMN_THREADS * B_STRIDE + k);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Vector a = *reinterpret_cast<const Vector*>(a_smem + r * ROW_THREADS * A_STRIDE + k);
      const Vector e = *reinterpret_cast<const Vector*>(e_smem + r * ROW_THREADS * A_STRIDE + k);
#pragma unroll
      for (int x = 0; x < VECTOR; ++x) {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
          c[r][n] += a.x[x] * b[n].x[x];
          d[r][n] += e.x[x] * b[n].x[x];
        }
      }
    }
  }
}

// c += a b and d += e b, as multiply_add does: every run of b is read once.
template <int DEPTH, int A_STRIDE, int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add_twice(accum_t (&c)[ROWS][COLUMNS],
                                                   const accum_t* a_smem,
                                                   accum_t (&d)[ROWS][COLUMNS],
                                                   const accum_t* e_smem, const accum_t* b_smem) {
  constexpr int RUN = run_of(WIDTH);
  struct alignas(RUN * sizeof(accum_t)) Run {
    accum_t x[RUN];
  };
  a_smem += row_thread() * A_STRIDE;
  e_smem += row_thread() * A_STRIDE;
  b_smem += column_thread() * RUN;
#pragma unroll 1
  for (int k = 0; k < DEPTH; k += VECTOR) {
    Vector a[ROWS], e[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      a[r] = *reinterpret_cast<const Vector*>(a_smem + r * ROW_THREADS * A_STRIDE + k);
      e[r] = *reinterpret_cast<const Vector*>(e_smem + r * ROW_THREADS * A_STRIDE + k);
    }
#pragma unroll
    for (int x = 0; x < VECTOR; ++x) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n += RUN) {
        const Run b = *reinterpret_cast<const Run*>(b_smem + (k + x) * padded_columns(WIDTH) +
                                                    n * COLUMN_THREADS);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
          for (int y = 0; y < RUN; ++y) {
            c[r][n + y] += a[r].x[x] * b.x[y];
            d[r][n + y] += e[r].x[x] * b.x[y];
          }
        }
      }
    }
  }
}

// c = a b^T and d += e b^T, for resident a and e, while rows of b are streamed once.
template <int B_ROWS, int WIDTH, int A_STRIDE, int UNROLL, int ROWS, int COLUMNS, int BUFFER>
__device__ __forceinline__ void multiply_rows_twice(accum_t (&c)[ROWS][COLUMNS],
                                                    const accum_t* a_smem,
                                                    accum_t (&d)[ROWS][COLUMNS],
                                                    const accum_t* e_smem, const memory::Rows& b,
                                                    long long first, int valid,
                                                    Stage<BUFFER>& stage) {
  constexpr int CHUNK = chunk_columns(WIDTH);
  clear(c);
  for_each_chunk<B_ROWS, WIDTH>(b, first, valid, stage,
                                [&](int column, const accum_t* filled_smem) {
                                  multiply_twice<CHUNK, A_STRIDE, odd_stride(CHUNK), UNROLL>(
                                      c, a_smem + column, d, e_smem + column, filled_smem);
                                });
}

// c += a b and d += e b, for tiles a and e of weights, while rows of b are streamed once.
template <int B_ROWS, int WIDTH, int A_STRIDE, bool MAY_MASK, int ROWS, int COLUMNS, int BUFFER>
__device__ __forceinline__ void accumulate_twice(accum_t (&c)[ROWS][COLUMNS], const accum_t* a_smem,
                                                 accum_t (&d)[ROWS][COLUMNS], const accum_t* e_smem,
                                                 const memory::Rows& b, long long first, int valid,
                                                 Stage<BUFFER>& stage) {
  constexpr int STEP = stage_rows(B_ROWS, WIDTH, BUFFER);
  for_each_rows<B_ROWS, WIDTH, STEP, MAY_MASK>(
      b, first, valid, stage, [&](int k, const accum_t* filled_smem, bool has_nonfinite) {
        if (has_nonfinite) {
          multiply_add_unmasked<STEP, A_STRIDE, WIDTH>(c, a_smem + k, filled_smem);
          multiply_add_unmasked<STEP, A_STRIDE, WIDTH>(d, e_smem + k, filled_smem);
        } else {
          multiply_add_twice<STEP, A_STRIDE, WIDTH>(c, a_smem + k, d, e_smem + k, filled_smem);
        }
      });
}

// c += a^T b, for a tile a of weights, while rows of b are streamed. The thread's rows of c are
// those of result_row.
template <int B_ROWS, int WIDTH, int A_STRIDE, bool MAY_MASK, int ROWS, int COLUMNS, int BUFFER>
__device__ __forceinline__ void accumulate_transposed(accum_t (&c)[ROWS][COLUMNS],
                                                      const accum_t* a_smem, const memory::Rows& b,
                                                      long long first, int valid,
                                                      Stage<BUFFER>& stage) {
  constexpr int STEP = stage_rows(B_ROWS, WIDTH, BUFFER);
  constexpr int STRIDE = padded_columns(WIDTH);
  for_each_rows<B_ROWS, WIDTH, STEP, MAY_MASK>(
      b, first, valid, stage, [&](int k, const accum_t* filled_smem, bool has_nonfinite) {
        if (has_nonfinite) {
          multiply_transposed_unmasked<STEP, A_STRIDE, STRIDE, WIDTH>(c, a_smem + k * A_STRIDE,
                                                                      filled_smem);
        } else {
          multiply_transposed<STEP, A_STRIDE, STRIDE, WIDTH>(c, a_smem + k * A_STRIDE, filled_smem);
        }
      });
}

}  // namespace matmul
