// Products of tiles of 16-bit elements by warps in pieces of 16 x 8 x 16: the twin of
// reference/cpu/microkernel.py and reference/cpu/accumulate.py for tensor cores.
//
// What a product leaves in registers is the left operand of the next one as it lies: weights never
// go through memory.
#pragma once
#include "fragment_rows.cuh"

namespace fragment {

// -- products -------------------------------------------------------------------------------------

// Where a lane's row of the matrices that one instruction loads lies. `row` is the lane's row of
// the first 16, `half` which 8 of the first 16 columns.
template <int ROW_BYTES>
struct LaneRow {
  unsigned int address;
  unsigned int begin;

  __device__ __forceinline__ LaneRow(const char* tile_smem, int row, int half)
      : address(ptx::shared_address(tile_smem) + row * ROW_BYTES), begin((half ^ row % 8) << 4) {}

  // Columns 16 `step` and on of the rows that are `rows`, a multiple of 8, further.
  __device__ __forceinline__ unsigned int at(int rows, int step) const {
    return address + (begin ^ step % 4 * 32) + step / 4 * 128 + rows * ROW_BYTES;
  }
};

// The lanes' rows of a left operand, whose first row is the warp's, and of a right operand that is
// used as it lies (keys and columns) or transposed (columns and keys).
template <int ROW_BYTES>
__device__ __forceinline__ LaneRow<ROW_BYTES> left_rows(const char* rows_smem) {
  return {rows_smem, ptx::lane_index() % 16, ptx::lane_index() / 16};
}
template <int ROW_BYTES>
__device__ __forceinline__ LaneRow<ROW_BYTES> right_rows(const char* tile_smem) {
  const int lane = ptx::lane_index();
  return {tile_smem, lane / 16 * 8 + lane % 8, lane / 8 % 2};
}

template <int CODE = STORAGE>
__device__ __forceinline__ void mma(float& c0, float& c1, float& c2, float& c3,
                                    const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
  if constexpr (IS_FLOAT16) {
    ptx::mma_m16n8k16_f16(c0, c1, c2, c3, a, b0, b1);
  } else if constexpr (IS_BFLOAT16) {
    ptx::mma_m16n8k16_bf16(c0, c1, c2, c3, a, b0, b1);
  } else {
    unknown_element<CODE>();
  }
}

// c += a b for 16 columns of c from `n` / 2 * 8 on.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_step(float (&c)[ROWS][COLUMNS], int m, int n,
                                              const unsigned int (&a)[4],
                                              const unsigned int (&b)[4]) {
  mma(c[2 * m][n], c[2 * m][n + 1], c[2 * m + 1][n], c[2 * m + 1][n + 1], a, b[0], b[1]);
  mma(c[2 * m][n + 2], c[2 * m][n + 3], c[2 * m + 1][n + 2], c[2 * m + 1][n + 3], a, b[2], b[3]);
}

template <int WIDTH, bool HELD>
struct Left<WIDTH, HELD, false> {
  static constexpr int STEPS = whole_columns(WIDTH) / 16;
  LaneRow<row_bytes(WIDTH)> rows;
  unsigned int held[HELD ? STEPS : 1][M_TILES][4];

  __device__ __forceinline__ Left(const char* rows_smem)
      : rows(left_rows<row_bytes(WIDTH)>(rows_smem)) {}

  // Loads 16 columns, or takes them from where they are held.
  __device__ __forceinline__ void load(unsigned int (&to)[M_TILES][4], int step) const {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      if constexpr (HELD) {
#pragma unroll
        for (int x = 0; x < 4; ++x) to[m][x] = held[step][m][x];
      } else {
        ptx::ldmatrix_x4(to[m], rows.at(16 * m, step));
      }
    }
  }
  __device__ __forceinline__ void hold() {
    static_assert(HELD, "where registers have room");
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ptx::ldmatrix_x4(held[step][m], rows.at(16 * m, step));
    }
  }
};

// c = a b^T.
template <int WIDTH, bool HELD, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(float (&c)[ROWS][COLUMNS],
                                         const Left<WIDTH, HELD, false>& a, const char* b_smem) {
  constexpr int BYTES = row_bytes(WIDTH);
  const LaneRow<BYTES> rows = right_rows<BYTES>(b_smem);
  matmul::clear(c);
#pragma unroll
  for (int step = 0; step < Left<WIDTH, HELD, false>::STEPS; ++step) {
    unsigned int left[M_TILES][4];
    a.load(left, step);
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      unsigned int b[4];
      ptx::ldmatrix_x4(b, rows.at(4 * n, step));
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) multiply_step(c, m, n, left[m], b);
    }
  }
}

// Rounds weights to the storage type: neighbouring columns share a word.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void narrow(const float (&p)[ROWS][COLUMNS],
                                       unsigned int (&to)[ROWS][COLUMNS / 2]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) to[r][n / 2] = number::narrow_pair(p[r][n], p[r][n + 1]);
  }
}

// c += a b for weights a and rows b of WIDTH columns.
template <int WIDTH, int ROWS, int DEPTH, int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&c)[ROWS][COLUMNS],
                                             const unsigned int (&a)[ROWS][DEPTH],
                                             const char* b_smem) {
  const auto rows = left_rows<row_bytes(WIDTH)>(b_smem);
#pragma unroll
  for (int k = 0; k < DEPTH; k += 2) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      unsigned int b[4];
      ptx::ldmatrix_x4_trans(b, rows.at(8 * k, n / 4));
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) {
        const unsigned int left[4] = {a[2 * m][k], a[2 * m + 1][k], a[2 * m][k + 1],
                                      a[2 * m + 1][k + 1]};
        multiply_step(c, m, n, left, b);
      }
    }
  }
}

// c += a b for those elements of b only that are NaN or infinite, without pairs that take no part:
// the product leaves them to this. Every thread takes the weights of its rows from the lane that
// has them.
template <int WIDTH, int ROWS, int DEPTH, int COLUMNS>
__device__ __forceinline__ void add_nonfinite(float (&c)[ROWS][COLUMNS],
                                              unsigned int (&a)[ROWS][DEPTH], const char* b_smem) {
#pragma unroll 1
  for (int k = 0; k < DEPTH; ++k) {
#pragma unroll 1
    for (int x = 0; x < 8; ++x) {
      storage_t weight[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const unsigned int pair = ptx::shuffle(a[r][0], ptx::lane_index() / 4 * 4 + x / 2);
        weight[r] = static_cast<storage_t>(x % 2 == 0 ? pair : pair >> 16);
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const int at = place<row_bytes(WIDTH)>(8 * k + x, n / 2) + 2 * (lane_column() + n % 2);
        const float value = number::widen(*reinterpret_cast<const storage_t*>(b_smem + at));
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const bool seen = weight[r] != 0x8000;
          if (seen && !number::is_finite(value)) c[r][n] += number::widen(weight[r]) * value;
        }
      }
    }
    rotate<1>(a);
  }
}

// -- results --------------------------------------------------------------------------------------

// Writes a warp's rows of a result of WIDTH columns, times a factor each, to shared memory that is
// the warp's own.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void put_rows(Narrow, const float (&result)[ROWS][COLUMNS],
                                         const float (&factor)[ROWS], char* rows_smem) {
  constexpr int BYTES = row_bytes(WIDTH);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      const unsigned int pair =
          number::narrow_pair(result[r][n] * factor[r], result[r][n + 1] * factor[r]);
      const int at = place<BYTES>(8 * r + lane_row(), n / 2) + 2 * lane_column();
      *reinterpret_cast<unsigned int*>(rows_smem + at) = pair;
    }
  }
}

}  // namespace fragment
