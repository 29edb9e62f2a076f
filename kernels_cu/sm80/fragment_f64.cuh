// Products of tiles of float64 in shared memory by warps in pieces of 16 x 8 x 8: the twin of
// reference/cpu/microkernel.py and reference/cpu/accumulate.py for tensor cores.
//
// The instruction takes its operands from neighbouring registers, so every element is read by
// itself, to where it is needed: of 8 elements of a sum a lane with t = lane % 4 reads numbers t
// and t + 4. Half a warp reads four rows and four columns of each at a time, which fall on all
// banks.
//
// Of a piece of 8 columns of a result whose right operand lies across the sum, a lane has columns t
// and 4 + (t ^ 2): so four lanes write 32 neighbouring bytes at a time.
#pragma once
#include "../ptx/red.cuh"
#include "fragment_rows.cuh"

namespace fragment_f64 {

__device__ __forceinline__ int lane_quarter() { return ptx::lane_index() % 4; }

// The column of a thread's element n of a result, as said above.
__device__ __forceinline__ int column_of(int n) {
  return 8 * (n / 2) + (n % 2 == 0 ? lane_quarter() : 4 + (lane_quarter() ^ 2));
}

// An operand whose rows lie along the sum: of rows that begin at rows_smem, the lane's of 8.
template <int BYTES>
struct Along {
  const char* row_smem;
  int own;

  __device__ __forceinline__ explicit Along(const char* rows_smem)
      : row_smem(rows_smem + fragment::lane_row() * BYTES + lane_quarter() % 2 * 8),
        own((lane_quarter() / 2 ^ fragment::swizzle(fragment::lane_row())) << 4) {}

  // The first or second number of columns 8 `eight` and on, of the row that is `rows`, a multiple
  // of 8, further.
  __device__ __forceinline__ double at(int rows, int eight, int second) const {
    return *reinterpret_cast<const double*>(row_smem + rows * BYTES + eight / 2 * 128 +
                                            (own ^ (eight % 2 * 64 + second * 32)));
  }
};

// An operand whose columns lie along the sum: a column of 8, from columns 8 `first` on. Those that
// are read are 0 and on if `first` is even, and else 0 alone.
template <int BYTES>
struct Across {
  const char* row_smem;
  int own;

  __device__ __forceinline__ Across(const char* tile_smem, int column, int first)
      : row_smem(tile_smem + lane_quarter() * BYTES + first / 2 * 128 + column % 2 * 8),
        own((column / 2 + first % 2 * 4 ^ fragment::swizzle(lane_quarter())) << 4) {}

  // The first or second number of the 8 rows from `row` on, in columns 8 `eight` and on.
  __device__ __forceinline__ double at(int row, int eight, int second) const {
    return *reinterpret_cast<const double*>(row_smem + (row + 4 * second) * BYTES +
                                            eight / 2 * 128 + (own ^ (eight % 2 ^ second) * 64));
  }
};

// As the right operand of a result whose columns are as said at the top.
template <int BYTES>
__device__ __forceinline__ Across<BYTES> right_rows(const char* tile_smem, int first) {
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

// Rows that a warp has of a result, which warps share by columns too: 32 where it then reads no
// more for each product than with 16. The result has so many rows and pieces of 8 columns.
__device__ constexpr int warp_rows(int rows, int pieces) {
  const bool tall = rows % 32 == 0 && rows * pieces > 32 * fragment::WARPS;
  return tall || rows > 16 * fragment::WARPS ? 32 : 16;
}

// Eight columns of a result make a unit. Warps that share rows own neighbouring units; where a
// row's units are fewer, the last warps have nothing to do.
template <int WIDTH, int SHARERS>
struct Share {
  static constexpr int UNITS = (WIDTH + 7) / 8;
  static constexpr int EVEN = (UNITS + SHARERS - 1) / SHARERS;
  static constexpr int EACH = EVEN == 1 || SHARERS == 1 ? EVEN : matmul::round_up(EVEN, 2);
  static constexpr int COLUMNS = 2 * EACH;  // of a thread
  int first;                                // unit

  __device__ __forceinline__ explicit Share(int sharer) : first(sharer * EACH) {}
  // Whether unit x of the warp's exists.
  __device__ __forceinline__ bool has(int x) const {
    return SHARERS * EACH == UNITS || first + x < UNITS;
  }
};

// c = a b^T for rows that begin at a_smem and b_smem; columns of c are as fragment_rows.cuh says.
// UNROLL steps of 8 columns are in sight at a time, as in the products below.
template <int WIDTH, int UNROLL, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(double (&c)[ROWS][COLUMNS], const char* a_smem,
                                         const char* b_smem) {
  constexpr int BYTES = fragment::row_bytes(WIDTH);
  const Along<BYTES> a(a_smem), b(b_smem);
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

// An element of a right operand: where ONLY_FINITE, 0 in place of NaN and infinities.
template <bool ONLY_FINITE>
__device__ __forceinline__ double taken(double x) {
  return !ONLY_FINITE || number::is_finite(x) ? x : 0.0;
}

// c += a b for rows of DEPTH weights that begin at a_smem, A_BYTES apart, and DEPTH rows of b. The
// columns of c are the warp's share.
template <int WIDTH, int DEPTH, int A_BYTES, int UNROLL, bool ONLY_FINITE = false, int SHARERS,
          int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add(double (&c)[ROWS][COLUMNS], const char* a_smem,
                                             const char* b_smem,
                                             const Share<WIDTH, SHARERS>& share) {
  const Along<A_BYTES> a(a_smem);
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
      multiply_piece(c, left, n, taken<ONLY_FINITE>(b.at(8 * k, n / 2, 0)),
                     taken<ONLY_FINITE>(b.at(8 * k, n / 2, 1)));
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
                                                        const Share<WIDTH, SHARERS>& share) {
  const Across<A_BYTES> a(a_smem, fragment::lane_row(), first / 8);
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
      multiply_piece(c, left, n, taken<ONLY_FINITE>(b.at(8 * k, n / 2, 0)),
                     taken<ONLY_FINITE>(b.at(8 * k, n / 2, 1)));
    }
  }
}

template <int BYTES>
__device__ __forceinline__ double element(const char* tile_smem, int row, int column) {
  const int at = fragment::place<BYTES>(row, column / 2) + column % 2 * 8;
  return *reinterpret_cast<const double*>(tile_smem + at);
}

// c += a b for those elements of b only that are NaN or infinite, without pairs that take no part,
// which `seen_smem` tells: a product of what is finite leaves them to this. Where TRANSPOSED, the
// rows of c are columns of a from `first` on; else they are rows of it.
template <int WIDTH, int DEPTH, int A_BYTES, bool TRANSPOSED, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_nonfinite(double (&c)[ROWS][COLUMNS], const char* a_smem,
                                              const char* seen_smem, int first, const char* b_smem,
                                              const Share<WIDTH, SHARERS>& share) {
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
        const bool seen = matmul::is_unmasked(element<A_BYTES>(seen_smem, row, along));
        if (seen) c[r][n] += element<A_BYTES>(a_smem, row, along) * value;
      }
    }
  }
}

// -- results --------------------------------------------------------------------------------------

// Writes a warp's share of a result of WIDTH columns, times a factor; where it ADDS, adds it to
// what is there, as other blocks may do, too. The warp's first row is at `rows_gmem`; `valid` rows
// exist from there on.
template <bool ADDS, int WIDTH, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const double (&result)[ROWS][COLUMNS],
                                           const Share<WIDTH, SHARERS>& share, const Operand& to,
                                           double* rows_gmem, int valid, double factor) {
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
      double* const place_gmem = row_gmem + column * to.col;
      if constexpr (ADDS) {
        ptx::red_add(place_gmem, result[r][n] * factor);
      } else {
        *place_gmem = result[r][n] * factor;
      }
    }
  }
}

}  // namespace fragment_f64
