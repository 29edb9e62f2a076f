// Products of tiles of 4- and 8-byte elements by warps, by mma.m16n8k8: the twin of
// reference/cpu/microkernel.py and reference/cpu/accumulate.py for tensor cores.
//
// float64 is multiplied as it is. A float32 is split into two numbers of 11 bits, which tf32 holds,
// and a last bit that is cut off. Of the four products of two split numbers the smallest is
// dropped: a relative error of at most 2^-21.
//
// ldmatrix moves 16-bit elements only, so lanes load 16 bytes of a row. Of 8 elements along the
// contraction a lane with t = lane % 4 supplies elements 2 t and 2 t + 1 where the instruction
// expects t and t + 4: any order will do if both operands have it, and with this one the result of
// a product has the layout of a left operand. A K-major operand (rows along the contraction) needs
// one 16-byte load for one or two instructions. Of an MN-major one a lane loads 16 bytes of two
// rows, which give one column to each of several instructions: so a thread has 2 STORED_VECTOR
// adjacent columns of a line of the result, for N = 2 STORED_VECTOR columns 8 STORED_VECTOR (n / N)
// + N (lane % 4) + n % N.
#pragma once
#include "fragment_rows.cuh"

namespace fragment {

// -- elements -------------------------------------------------------------------------------------

using part_t = Mma::part;
constexpr int TERMS = Mma::TERMS;  // products of parts that make a product of elements

__device__ Split part(unsigned short);  // for 16-bit types, never called
__device__ __forceinline__ double part(double x) { return x; }

// The large part is rounded to 11 bits, which leaves 12 to the small one; the instruction ignores
// the last of these. The small part of NaN is NaN.
__device__ __forceinline__ Split part(float x) {
  const unsigned int large = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  return Split{large, __float_as_uint(x - __uint_as_float(large))};
}

// c += term number `term` of a b; the smaller terms come first.
__device__ __forceinline__ void mma(int, double& c0, double& c1, double& c2, double& c3,
                                    const double (&a)[4], double b0, double b1) {
  ptx::mma_m16n8k8_f64(c0, c1, c2, c3, a, b0, b1);
}
__device__ __forceinline__ void mma(int term, float& c0, float& c1, float& c2, float& c3,
                                    const Split (&a)[4], const Split& b0, const Split& b1) {
  unsigned int left[4];
#pragma unroll
  for (int x = 0; x < 4; ++x) left[x] = term == 0 ? a[x].small : a[x].large;
  ptx::mma_m16n8k8_tf32(c0, c1, c2, c3, left, term == 1 ? b0.small : b0.large,
                        term == 1 ? b1.small : b1.large);
}

__device__ __forceinline__ storage_t element_of(const char* tile_smem) {
  return *reinterpret_cast<const storage_t*>(tile_smem);
}

// Bytes from the beginning of a tile to an element.
template <int ROW_BYTES>
__device__ __forceinline__ int element_offset(int row, int column) {
  return swizzled_offset<ROW_BYTES>(row, column / STORED_VECTOR) +
         column % STORED_VECTOR * static_cast<int>(sizeof(storage_t));
}

// -- operands -------------------------------------------------------------------------------------

constexpr int STEP = 4 * STORED_VECTOR;  // elements of a row that four lanes load at a time
constexpr int PIECES = STEP / 8;         // instructions that these suffice for

// A K-major operand: the lane's row of 8.
template <int ROW_BYTES>
struct KMajorRow {
  const char* row_smem;
  int piece;

  __device__ __forceinline__ explicit KMajorRow(const char* rows_smem)
      : row_smem(rows_smem + lane_row() * ROW_BYTES),
        piece((ptx::lane_index() % 4 ^ swizzle(lane_row())) << 4) {}

  // Step `step` of the row that is `rows` further, a multiple of 8.
  __device__ __forceinline__ StoredVector at(int rows, int step) const {
    return *reinterpret_cast<const StoredVector*>(row_smem + rows * ROW_BYTES + step / 2 * 128 +
                                                  (piece ^ step % 2 * 64));
  }
};

// An MN-major operand: the lane's two rows of 8.
template <int ROW_BYTES>
struct MnMajorRows {
  const char* row_smem;
  int piece;

  __device__ __forceinline__ explicit MnMajorRows(const char* tile_smem)
      : row_smem(tile_smem + lane_column() * ROW_BYTES),
        piece((lane_row() ^ swizzle(lane_column())) << 4) {}

  // Line `line` of the first or second row, `rows` rows further, a multiple of 8.
  __device__ __forceinline__ StoredVector at(int rows, int second, int line) const {
    const int swizzled = second ? piece ^ (swizzle(1) << 4) : piece;
    return *reinterpret_cast<const StoredVector*>(row_smem + (rows + second) * ROW_BYTES +
                                                  line * 128 + swizzled);
  }
};

// Rows that begin at rows_smem, as the K-major left operand of products, 16 M rows at a time.
template <int WIDTH, int M>
struct LeftRows {
  static constexpr int STEPS = whole_columns(WIDTH) / STEP;
  const char* begin_smem;
  KMajorRow<row_bytes(WIDTH)> rows;

  __device__ __forceinline__ explicit LeftRows(const char* rows_smem)
      : begin_smem(rows_smem), rows(rows_smem) {}

  // Loads and splits a step.
  __device__ __forceinline__ void load(part_t (&to)[M][PIECES][4], int step) const {
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      const StoredVector from = rows.at(8 * r, step);
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        to[r / 2][x / 2][r % 2 + x % 2 * 2] = part(from.x[x]);
      }
    }
  }
};

template <int WIDTH>
struct Left<WIDTH, false, true> : LeftRows<WIDTH, M_TILES> {
  using LeftRows<WIDTH, M_TILES>::LeftRows;
  __device__ __forceinline__ void load_registers() {}  // nothing: registers are too few
};

// -- products -------------------------------------------------------------------------------------

// The products of up to 16 elements of the contraction, for up to TILES tiles of 8 columns of c.
// Tensor cores truncate the float32 sums they accumulate: so they form these short sums only, which
// are then added to c with rounding. A thread's columns n and n + `distance` belong to a tile.
template <int TILES, int M>
struct Sums {
  static constexpr bool SHORT = TERMS > 1;
  accum_t part[SHORT ? TILES : 1][M][4] = {};

  template <int ROWS, int COLUMNS>
  __device__ __forceinline__ void multiply(accum_t (&c)[ROWS][COLUMNS], int m, int tile, int n,
                                           int distance, int term, const part_t (&a)[4],
                                           const part_t& b0, const part_t& b1) {
    if constexpr (SHORT) {
      accum_t(&to)[4] = part[tile][m];
      mma(term, to[0], to[1], to[2], to[3], a, b0, b1);
    } else {
      accum_t *const low = c[2 * m] + n, *const high = c[2 * m + 1] + n;
      mma(term, low[0], low[distance], high[0], high[distance], a, b0, b1);
    }
  }
  template <int ROWS, int COLUMNS>
  __device__ __forceinline__ void add(accum_t (&c)[ROWS][COLUMNS], int tile, int n, int distance) {
    if constexpr (SHORT) {
#pragma unroll
      for (int r = 0; r < 2 * M; ++r) {
        c[r][n] += part[tile][r / 2][r % 2 * 2];
        c[r][n + distance] += part[tile][r / 2][r % 2 * 2 + 1];
      }
    }
  }
};

// c = a b^T. UNROLL steps are in flight.
template <int UNROLL, int WIDTH, int M, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_rows(accum_t (&c)[ROWS][COLUMNS],
                                              const LeftRows<WIDTH, M>& a, const char* b_smem) {
  // Tiles of 8 columns.
  constexpr int AT_ONCE = TERMS > 1 && M > 1 || COLUMNS % 8 != 0 ? 2 : 4;
  const KMajorRow<row_bytes(WIDTH)> rows(b_smem);
  matmul::clear(c);
#pragma unroll UNROLL
  for (int step = 0; step < LeftRows<WIDTH, M>::STEPS; ++step) {
    part_t left[M][PIECES][4];
    a.load(left, step);
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2 * AT_ONCE) {
      part_t right[AT_ONCE][STORED_VECTOR];
#pragma unroll
      for (int y = 0; y < AT_ONCE; ++y) {
        const StoredVector from = rows.at(4 * n + 8 * y, step);
#pragma unroll
        for (int x = 0; x < STORED_VECTOR; ++x) right[y][x] = part(from.x[x]);
      }
      Sums<AT_ONCE, M> sums;
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
#pragma unroll
        for (int k = 0; k < PIECES; ++k) {
#pragma unroll
          for (int y = 0; y < AT_ONCE; ++y) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
              sums.multiply(c, m, y, n + 2 * y, 1, term, left[m][k], right[y][2 * k],
                            right[y][2 * k + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int y = 0; y < AT_ONCE; ++y) sums.add(c, y, n + 2 * y, 1);
    }
  }
}

// Whether any element of the warp's part of c is NaN.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ bool any_nan(const accum_t (&c)[ROWS][COLUMNS]) {
  accum_t sum = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) sum = fma(c[r][n], accum_t(0), sum);
  }
  return ptx::any_lane(sum != sum);
}

// Recomputes those elements of c = a b^T that are NaN, one by one: operands that are infinite, or
// too large to be split, made them NaN.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_nan(accum_t (&c)[ROWS][COLUMNS], const char* a_smem,
                                             const char* b_smem) {
#pragma unroll 1
  for (int n = 0; n < COLUMNS; ++n) {
    const int column = 8 * (n / 2) + lane_column() + n % 2;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (c[r][0] == c[r][0]) continue;
      accum_t sum = 0;
#pragma unroll 1
      for (int k = 0; k < WIDTH; ++k) {
        sum += element_of(a_smem + element_offset<row_bytes(WIDTH)>(8 * r + lane_row(), k)) *
               element_of(b_smem + element_offset<row_bytes(WIDTH)>(column, k));
      }
      c[r][0] = sum;
    }
    rotate<1>(c);
  }
}

// c = a b^T.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(accum_t (&c)[ROWS][COLUMNS],
                                         const Left<WIDTH, false, true>& a, const char* b_smem) {
  constexpr int UNROLL = TERMS > 1 ? 1 : 2;  // limited by registers
  multiply_rows<UNROLL, WIDTH, M_TILES>(c, a, b_smem);
  if constexpr (Mma::SPLIT_CAN_FAIL) {
    if (any_nan(c)) multiply_nan<WIDTH>(c, a.begin_smem, b_smem);
  }
}

// Weights are not rounded.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void narrow(const accum_t (&p)[ROWS][COLUMNS],
                                       accum_t (&to)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) to[r][n] = p[r][n];
  }
}

// A share that has all lines of a result.
struct Whole {
  __device__ __forceinline__ bool has(int) const { return true; }
};

// c += a b for 8 rows of b from `row` on, LINES lines of columns, and the parts of a in registers.
template <int LINES, int BYTES, int M, int ROWS, int COLUMNS, class Lines = Whole>
__device__ __forceinline__ void multiply_mn_major(accum_t (&c)[ROWS][COLUMNS],
                                                  const part_t (&a)[M][4],
                                                  const MnMajorRows<BYTES>& rows, int row,
                                                  const Lines& share = Whole()) {
  constexpr int V = STORED_VECTOR;
  constexpr int AT_ONCE = TERMS > 1 && M > 1 ? V / 2 : V;  // tiles of 8 columns
#pragma unroll
  for (int line = 0; line < LINES; ++line) {
    if (!share.has(line)) break;
    part_t right[V][2];
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const StoredVector from = rows.at(row, second, line);
#pragma unroll
      for (int x = 0; x < V; ++x) right[x][second] = part(from.x[x]);
    }
#pragma unroll
    for (int first = 0; first < V; first += AT_ONCE) {
      Sums<AT_ONCE, M> sums;
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
#pragma unroll
        for (int y = 0; y < AT_ONCE; ++y) {
#pragma unroll
          for (int m = 0; m < M; ++m) {
            const int x = first + y;
            sums.multiply(c, m, y, 2 * V * line + x, V, term, a[m], right[x][0], right[x][1]);
          }
        }
      }
#pragma unroll
      for (int y = 0; y < AT_ONCE; ++y) sums.add(c, y, 2 * V * line + first + y, V);
    }
  }
}

// c += a b for weights a and rows b of WIDTH columns. The weights rotate, 8 for each step.
template <int WIDTH, int ROWS, int DEPTH, int COLUMNS>
__device__ __forceinline__ void multiply_add(accum_t (&c)[ROWS][COLUMNS], accum_t (&a)[ROWS][DEPTH],
                                             const char* b_smem) {
  // Unrolling would need more registers for short sums than there are.
  constexpr int UNROLL = TERMS > 1 ? 1 : DEPTH / 2;
  const MnMajorRows<row_bytes(WIDTH)> rows(b_smem);
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH; k += 2) {
    part_t left[ROWS / 2][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      left[r / 2][r % 2] = part(a[r][0]);
      left[r / 2][r % 2 + 2] = part(a[r][1]);
    }
    multiply_mn_major<whole_columns(WIDTH) / LINE>(c, left, rows, 4 * k);
    rotate<2>(a);
  }
}

// Column of a thread's element n in a result of an MN-major operand.
__device__ __forceinline__ int column_of(int n) {
  constexpr int N = 2 * STORED_VECTOR;
  return n / N * LINE + N * (ptx::lane_index() % 4) + n % N;
}

// Whether tensor cores can multiply a number.
__device__ __forceinline__ bool fits(float x) { return fabs(x) < 0x1p127f; }
__device__ __forceinline__ bool fits(double x) { return number::is_finite(x); }

// c += a b for those elements of b alone that do not fit, skipping masked pairs; the main product
// then runs with zeros in their place. Every thread fetches the weights of its rows from the lane
// that holds them.
template <int WIDTH, int ROWS, int DEPTH, int COLUMNS>
__device__ __forceinline__ void add_nonfinite(accum_t (&c)[ROWS][COLUMNS],
                                              accum_t (&a)[ROWS][DEPTH], const char* b_smem) {
#pragma unroll 1
  for (int k = 0; k < 4 * DEPTH; ++k) {
    accum_t weight[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      weight[r] =
          ptx::shuffle(k % 2 == 0 ? a[r][0] : a[r][1], ptx::lane_index() / 4 * 4 + k % 8 / 2);
    }
#pragma unroll 1
    for (int n = 0; n < COLUMNS; ++n) {
      const accum_t value = element_of(b_smem + element_offset<row_bytes(WIDTH)>(k, column_of(n)));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (!fits(value) && matmul::is_unmasked(weight[r])) c[r][0] += weight[r] * value;
      }
      rotate<1>(c);
    }
    if (k % 8 == 7) rotate<2>(a);
  }
}

// -- results --------------------------------------------------------------------------------------

// Writes a warp's rows of a result of WIDTH columns, each times a factor, to shared memory that
// only this warp uses.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void put_rows(Wide, const accum_t (&result)[ROWS][COLUMNS],
                                         const accum_t (&factor)[ROWS], char* rows_smem) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += STORED_VECTOR) {
      StoredVector piece;
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        piece.x[x] = static_cast<storage_t>(result[r][n + x] * factor[r]);
      }
      const int at =
          swizzled_offset<row_bytes(WIDTH)>(8 * r + lane_row(), column_of(n) / STORED_VECTOR);
      *reinterpret_cast<StoredVector*>(rows_smem + at) = piece;
    }
  }
}

// Column of a thread's element n, n even, of a product with values.
__device__ __forceinline__ int result_column(Wide, int n) { return column_of(n); }

}  // namespace fragment
