// Products of tiles of float64 in shared memory by warps, by mma.m16n8k8: the twin of
// reference/cpu/microkernel.py and reference/cpu/accumulate.py for the backward in float64.
//
// The instruction takes its operands from adjacent registers, in an order that no 16 bytes of
// memory have, so every element is loaded by itself: of 8 elements along the contraction a lane
// with t = lane % 4 loads numbers t and t + 4. Half a warp loads four rows and four columns of each
// at a time, which fall on all banks.
//
// Of 8 columns of a result whose right operand is MN-major, a lane has columns t and 4 + (t ^ 2):
// so four lanes store 32 adjacent bytes at a time.
#pragma once
#include "../ptx/red.cuh"
#include "fragment_rows.cuh"

namespace fragment_f64 {

__device__ __forceinline__ int lane_quarter() { return ptx::lane_index() % 4; }

// The column of a thread's element n in a result of an MN-major right operand.
__device__ __forceinline__ int column_of(int n) {
  return 8 * (n / 2) + (n % 2 == 0 ? lane_quarter() : 4 + (lane_quarter() ^ 2));
}

// A K-major operand, whose rows lie along the contraction: the lane's row of 8, from rows_smem on.
template <int BYTES>
struct KMajor {
  const char* row_smem;
  int swizzled;

  __device__ __forceinline__ explicit KMajor(const char* rows_smem)
      : row_smem(rows_smem + fragment::lane_row() * BYTES + lane_quarter() % 2 * 8),
        swizzled((lane_quarter() / 2 ^ fragment::swizzle(fragment::lane_row())) << 4) {}

  // The first or second number of columns 8 `eight` and on, `rows` rows further, a multiple of 8.
  __device__ __forceinline__ double at(int rows, int eight, int second) const {
    return *reinterpret_cast<const double*>(row_smem + rows * BYTES + eight / 2 * 128 +
                                            (swizzled ^ (eight % 2 * 64 + second * 32)));
  }
};

// An MN-major operand, whose columns lie along the contraction: one column of 8, from columns 8
// `first` on. `eight` below may be 0 and more if `first` is even, else 0 only.
template <int BYTES>
struct MnMajor {
  const char* row_smem;
  int swizzled;

  __device__ __forceinline__ MnMajor(const char* tile_smem, int column, int first)
      : row_smem(tile_smem + lane_quarter() * BYTES + first / 2 * 128 + column % 2 * 8),
        swizzled((column / 2 + first % 2 * 4 ^ fragment::swizzle(lane_quarter())) << 4) {}

  // The first or second number of the 8 rows from `row` on, in columns 8 `eight` and on.
  __device__ __forceinline__ double at(int row, int eight, int second) const {
    return *reinterpret_cast<const double*>(row_smem + (row + 4 * second) * BYTES +
                                            eight / 2 * 128 +
                                            (swizzled ^ (eight % 2 ^ second) * 64));
  }
};

// The right operand of a result whose columns are those of column_of.
template <int BYTES>
__device__ __forceinline__ MnMajor<BYTES> right_rows(const char* tile_smem, int first) {
  const int lane = fragment::lane_row();
  return {tile_smem, lane % 2 == 0 ? lane / 2 : 4 + (lane / 2 ^ 2), first};
}

// c += a b for columns n and n + 1 of c.
template <int M, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_piece(double (&c)[ROWS][COLUMNS], const double (&a)[M][4],
                                               int n, double b0, double b1) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    ptx::mma_m16n8k8_f64(c[2 * m][n], c[2 * m][n + 1], c[2 * m + 1][n], c[2 * m + 1][n + 1], a[m],
                         b0, b1);
  }
}

// How many of `rows` rows of a result a warp owns: 32 if sharing by columns then costs no more
// loads for each product than 16 do. The result has `pieces` pieces of 8 columns.
__device__ constexpr int warp_rows(int rows, int pieces) {
  const bool tall = rows % 32 == 0 && rows * pieces > 32 * fragment::WARPS;
  return tall || rows > 16 * fragment::WARPS ? 32 : 16;
}

// A warp's share of the columns of a result, in units of 8 columns. Warps that share rows swizzled
// adjacent units; if a row has too few units, the last warps are idle.
template <int WIDTH, int SHARERS>
struct WideShare {
  static constexpr int UNITS = (WIDTH + 7) / 8;
  static constexpr int EVEN = (UNITS + SHARERS - 1) / SHARERS;
  static constexpr int EACH = EVEN == 1 || SHARERS == 1 ? EVEN : matmul::round_up(EVEN, 2);
  static constexpr int COLUMNS = 2 * EACH;  // of a thread
  int first;                                // the warp's first unit

  __device__ __forceinline__ explicit WideShare(int sharer) : first(sharer * EACH) {}
  // Whether unit x of the share exists.
  __device__ __forceinline__ bool has(int x) const {
    return SHARERS * EACH == UNITS || first + x < UNITS;
  }
};

// c = a b^T for rows that begin at a_smem and b_smem; the columns of c are those of
// fragment_rows.cuh. UNROLL steps of 8 columns are in flight, as in the products below.
template <int WIDTH, int UNROLL, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(double (&c)[ROWS][COLUMNS], const char* a_smem,
                                         const char* b_smem) {
  constexpr int BYTES = fragment::row_bytes(WIDTH);
  const KMajor<BYTES> a(a_smem), b(b_smem);
  matmul::clear(c);
#pragma unroll UNROLL
  for (int k = 0; k < (WIDTH + 7) / 8; ++k) {
    double left[ROWS / 2][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      left[r / 2][r % 2] = a.at(8 * r, k, 0);
      left[r / 2][r % 2 + 2] = a.at(8 * r, k, 1);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      multiply_piece(c, left, n, b.at(4 * n, k, 0), b.at(4 * n, k, 1));
    }
  }
}

// An element of a right operand; with ONLY_FINITE, 0 in place of NaN and infinities.
template <bool ONLY_FINITE>
__device__ __forceinline__ double finite_or_zero(double x) {
  return !ONLY_FINITE || number::is_finite(x) ? x : 0.0;
}

// c += a b for rows of DEPTH weights that begin at a_smem, A_BYTES apart, and DEPTH rows of b. The
// columns of c are the warp's share.
template <int WIDTH, int DEPTH, int A_BYTES, int UNROLL, bool ONLY_FINITE = false, int SHARERS,
          int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add(double (&c)[ROWS][COLUMNS], const char* a_smem,
                                             const char* b_smem,
                                             const WideShare<WIDTH, SHARERS>& share) {
  const KMajor<A_BYTES> a(a_smem);
  const auto b = right_rows<fragment::row_bytes(WIDTH)>(b_smem, share.first);
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH / 8; ++k) {
    double left[ROWS / 2][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      left[r / 2][r % 2] = a.at(8 * r, k, 0);
      left[r / 2][r % 2 + 2] = a.at(8 * r, k, 1);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      if (!share.has(n / 2)) break;
      multiply_piece(c, left, n, finite_or_zero<ONLY_FINITE>(b.at(8 * k, n / 2, 0)),
                     finite_or_zero<ONLY_FINITE>(b.at(8 * k, n / 2, 1)));
    }
  }
}

// c += a^T b for DEPTH rows of weights that begin at a_smem, A_BYTES apart, and DEPTH rows of b.
// The rows of c are columns of a, from `first` on, a multiple of 16.
template <int WIDTH, int DEPTH, int A_BYTES, int UNROLL, bool ONLY_FINITE = false, int SHARERS,
          int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add_transposed(double (&c)[ROWS][COLUMNS],
                                                        const char* a_smem, int first,
                                                        const char* b_smem,
                                                        const WideShare<WIDTH, SHARERS>& share) {
  const MnMajor<A_BYTES> a(a_smem, fragment::lane_row(), first / 8);
  const auto b = right_rows<fragment::row_bytes(WIDTH)>(b_smem, share.first);
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH / 8; ++k) {
    double left[ROWS / 2][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      left[r / 2][r % 2] = a.at(8 * k, r, 0);
      left[r / 2][r % 2 + 2] = a.at(8 * k, r, 1);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      if (!share.has(n / 2)) break;
      multiply_piece(c, left, n, finite_or_zero<ONLY_FINITE>(b.at(8 * k, n / 2, 0)),
                     finite_or_zero<ONLY_FINITE>(b.at(8 * k, n / 2, 1)));
    }
  }
}

template <int BYTES>
__device__ __forceinline__ double element(const char* tile_smem, int row, int column) {
  const int at = fragment::swizzled_offset<BYTES>(row, column / 2) + column % 2 * 8;
  return *reinterpret_cast<const double*>(tile_smem + at);
}

// c += a b for the non-finite elements of b alone, skipping masked pairs, which have the weight of
// one in `weights_smem`; the main product then runs with ONLY_FINITE. If TRANSPOSED, the rows of c
// are columns of a from `first` on, else rows of a.
template <int WIDTH, int DEPTH, int A_BYTES, bool TRANSPOSED, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_nonfinite(double (&c)[ROWS][COLUMNS], const char* a_smem,
                                              const char* weights_smem, int first,
                                              const char* b_smem,
                                              const WideShare<WIDTH, SHARERS>& share) {
#pragma unroll 1
  for (int k = 0; k < DEPTH; ++k) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (!share.has(n / 2)) break;
      const int column = 8 * share.first + column_of(n);
      const double value = element<fragment::row_bytes(WIDTH)>(b_smem, k, column);
      if (number::is_finite(value)) continue;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int at = first + 8 * r + fragment::lane_row();
        const int row = TRANSPOSED ? k : at, along = TRANSPOSED ? at : k;
        const bool unmasked = matmul::is_unmasked(element<A_BYTES>(weights_smem, row, along));
        if (unmasked) c[r][n] += element<A_BYTES>(a_smem, row, along) * value;
      }
    }
  }
}

// -- results --------------------------------------------------------------------------------------

// Stores a warp's share of a result of WIDTH columns, times a factor, or if ATOMIC adds it, because
// other blocks add to the same rows. The warp's first row is at `rows_gmem`; `valid` rows exist
// from there on.
template <bool ATOMIC, int WIDTH, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const double (&result)[ROWS][COLUMNS],
                                           const WideShare<WIDTH, SHARERS>& share,
                                           const Operand& to, double* rows_gmem, int valid,
                                           double factor) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = 8 * r + fragment::lane_row();
    if (row >= valid) break;
    double* const row_gmem = rows_gmem + row * to.row;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = 8 * share.first + column_of(n);
      if (WIDTH % 8 != 0 || !share.has(n / 2)) {
        if (column >= WIDTH) continue;
      }
      double* const element_gmem = row_gmem + column * to.col;
      if constexpr (ATOMIC) {
        ptx::red_add(element_gmem, result[r][n] * factor);
      } else {
        *element_gmem = result[r][n] * factor;
      }
    }
  }
}

}  // namespace fragment_f64
