// Products of tiles of 16-bit elements by warps, by mma.m16n8k16 and ldmatrix: the twin of
// reference/cpu/microkernel.py and reference/cpu/accumulate.py for tensor cores.
//
// The result of a product in registers has the layout of a left operand, so weights go from one
// product to the next without shared memory.
#pragma once
#include "fragment_rows.cuh"

namespace fragment {

// The bits of -0.0, the weight of a masked pair, in either 16-bit type.
constexpr unsigned short MASKED = 0x8000;

// -- products -------------------------------------------------------------------------------------

// The row that a lane addresses for ldmatrix. `row` is its row among the first 16, `half` selects
// the first or the second 8 of 16 columns.
template <int ROW_BYTES>
struct LaneRow {
  unsigned int address;
  unsigned int begin;

  __device__ __forceinline__ LaneRow(const char* tile_smem, int row, int half)
      : address(ptx::shared_address(tile_smem) + row * ROW_BYTES),
        begin((half ^ (ROW_BYTES == 64 ? row / 2 % 4 : row % 8)) << 4) {}

  // The address for columns 16 `step` and on, `rows` rows further, a multiple of 8.
  __device__ __forceinline__ unsigned int at(int rows, int step) const {
    return address + (begin ^ step % 4 * 32) + step / 4 * 128 + rows * ROW_BYTES;
  }
};

// The lanes' rows of a left operand, which begins at the warp's first row, and of a right operand,
// for ldmatrix without (keys x columns) and with transposition (columns x keys).
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

// c += a b for 16 columns of c, from element n of a thread's row on.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_step(float (&c)[ROWS][COLUMNS], int m, int n,
                                              const unsigned int (&a)[4],
                                              const unsigned int (&b)[4]) {
  mma(c[2 * m][n], c[2 * m][n + 1], c[2 * m + 1][n], c[2 * m + 1][n + 1], a, b[0], b[1]);
  mma(c[2 * m][n + 2], c[2 * m][n + 3], c[2 * m + 1][n + 2], c[2 * m + 1][n + 3], a, b[2], b[3]);
}

template <int WIDTH, bool IN_REGISTERS>
struct Left<WIDTH, IN_REGISTERS, false> {
  static constexpr int STEPS = whole_columns(WIDTH) / 16;
  LaneRow<row_bytes(WIDTH)> rows;
  unsigned int registers[IN_REGISTERS ? STEPS : 1][M_TILES][4];

  __device__ __forceinline__ Left(const char* rows_smem)
      : rows(left_rows<row_bytes(WIDTH)>(rows_smem)) {}

  // Loads 16 columns of the operand from shared memory or registers.
  __device__ __forceinline__ void load(unsigned int (&to)[M_TILES][4], int step) const {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      if constexpr (IN_REGISTERS) {
#pragma unroll
        for (int x = 0; x < 4; ++x) to[m][x] = registers[step][m][x];
      } else {
        ptx::ldmatrix_x4(to[m], rows.at(16 * m, step));
      }
    }
  }
  __device__ __forceinline__ void load_registers() {
    static_assert(IN_REGISTERS, "an operand in registers");
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ptx::ldmatrix_x4(registers[step][m], rows.at(16 * m, step));
    }
  }
};

// c = a b^T.
template <int WIDTH, bool IN_REGISTERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(float (&c)[ROWS][COLUMNS],
                                         const Left<WIDTH, IN_REGISTERS, false>& a,
                                         const char* b_smem) {
  constexpr int BYTES = row_bytes(WIDTH);
  const LaneRow<BYTES> rows = right_rows<BYTES>(b_smem);
  matmul::clear(c);
#pragma unroll
  for (int step = 0; step < Left<WIDTH, IN_REGISTERS, false>::STEPS; ++step) {
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

// Rounds weights to the storage type, two adjacent columns to a word.
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

// c += a b for the non-finite elements of b alone, skipping masked pairs; the main product then
// runs with zeros in their place. Every thread fetches the weights of its rows from the lane that
// holds them.
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
        const int at =
            swizzled_offset<row_bytes(WIDTH)>(8 * k + x, n / 2) + 2 * (lane_column() + n % 2);
        const float value = number::widen(*reinterpret_cast<const storage_t*>(b_smem + at));
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const bool unmasked = weight[r] != MASKED;
          if (unmasked && !number::is_finite(value)) c[r][n] += number::widen(weight[r]) * value;
        }
      }
    }
    rotate<1>(a);
  }
}

// -- results --------------------------------------------------------------------------------------

// Writes a warp's rows of a result of WIDTH columns, each times a factor, to shared memory that
// only this warp uses.
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
      const int at = swizzled_offset<BYTES>(8 * r + lane_row(), n / 2) + 2 * lane_column();
      *reinterpret_cast<unsigned int*>(rows_smem + at) = pair;
    }
  }
}

// Column of a thread's element n, n even, of a product with values.
__device__ __forceinline__ int result_column(Narrow, int n) { return pair_column(n); }

}  // namespace fragment
