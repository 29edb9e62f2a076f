// Products of wide elements whose operands both lie in shared memory, and results that warps share
// by columns: what fragment_product.cuh is to 16-bit types. A tile of weights lies there in the
// storage type, like every tile.
#pragma once
#include "fragment_wide.cuh"

namespace fragment_wide_product {

// A line of 128 bytes of a result makes a unit. Warps that share rows own neighbouring units; where
// a row's units are fewer, the last warps have nothing to do. Of the warp's columns a thread has
// those that `fragment::column_of` says.
template <int WIDTH, int SHARERS>
struct Share {
  static constexpr int UNITS = fragment::whole_columns(WIDTH) / fragment::LINE;
  static constexpr int EACH = (UNITS + SHARERS - 1) / SHARERS;
  static constexpr int COLUMNS = 2 * STORED_VECTOR * EACH;  // of a thread
  int first;                                                // unit

  __device__ __forceinline__ explicit Share(int sharer) : first(sharer * EACH) {}
  // Whether unit x of the warp's exists.
  __device__ __forceinline__ bool has(int x) const {
    return SHARERS * EACH == UNITS || first + x < UNITS;
  }
};

struct alignas(2 * sizeof(storage_t)) Pair {
  storage_t x[2];
};

// The lane's two neighbouring columns of 8, of its row of 8: where the elements of a fragment that
// a product left are written, and where the left operand of the next one is read.
template <int ROW_BYTES>
struct PairRow {
  static constexpr int BYTES = 8 * static_cast<int>(sizeof(storage_t));  // of 8 columns
  int begin, pair;

  __device__ __forceinline__ explicit PairRow(int first_row = 0)
      : begin((first_row + fragment::lane_row()) * ROW_BYTES),
        pair(fragment::swizzle(fragment::lane_row()) << 4 ^
             fragment::lane_column() * static_cast<int>(sizeof(storage_t))) {}

  // Bytes from the tile's beginning to columns 8 `eight` and on, `rows`, a multiple of 8, further.
  __device__ __forceinline__ int at(int rows, int eight) const {
    return begin + rows * ROW_BYTES + eight * BYTES / 128 * 128 + (pair ^ eight * BYTES % 128);
  }
};

// Writes a warp's fragment, times a factor, to a tile. Its corner is at row `first_row` and column
// 8 `first_eight`.
template <int ROW_BYTES, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_tile(const accum_t (&c)[ROWS][COLUMNS], int first_row,
                                           int first_eight, accum_t factor, char* tile_smem) {
  const PairRow<ROW_BYTES> rows(first_row);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      const Pair pair{
          {static_cast<storage_t>(c[r][n] * factor), static_cast<storage_t>(c[r][n + 1] * factor)}};
      *reinterpret_cast<Pair*>(tile_smem + rows.at(8 * r, first_eight + n / 2)) = pair;
    }
  }
}

// c = a b^T for rows that begin at a_smem and b_smem. UNROLL steps of 64 bytes of a row are in
// sight at a time. Where numbers may not be split (fragment::LIMITED),
// fragment::multiply_one_by_one does the same.
template <int WIDTH, int UNROLL, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(accum_t (&c)[ROWS][COLUMNS], const char* a_smem,
                                         const char* b_smem) {
  const fragment::LeftRows<WIDTH, ROWS / 2> a(a_smem);
  fragment::multiply_rows<UNROLL>(c, a, b_smem);
}

// c += a b for rows of DEPTH weights that begin at a_smem, A_BYTES apart, and DEPTH rows of b. The
// columns of c are the warp's share. UNROLL steps of 8 weights are in sight at a time.
template <int WIDTH, int DEPTH, int A_BYTES, int UNROLL, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add(accum_t (&c)[ROWS][COLUMNS], const char* a_smem,
                                             const char* b_smem,
                                             const Share<WIDTH, SHARERS>& share) {
  const PairRow<A_BYTES> a;
  const fragment::AcrossRows<fragment::row_bytes(WIDTH)> b(b_smem + share.first * 128);
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH / 8; ++k) {
    fragment::part_t left[ROWS / 2][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Pair from = *reinterpret_cast<const Pair*>(a_smem + a.at(8 * r, k));
      left[r / 2][r % 2] = fragment::part(from.x[0]);
      left[r / 2][r % 2 + 2] = fragment::part(from.x[1]);
    }
    fragment::multiply_across<COLUMNS / (2 * STORED_VECTOR)>(c, left, b, 8 * k, share);
  }
}

// c += a^T b for DEPTH rows of weights that begin at a_smem, A_BYTES apart, and DEPTH rows of b.
// The rows of c are columns of a, from `first` on, a multiple of 8.
template <int WIDTH, int DEPTH, int A_BYTES, int UNROLL, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add_transposed(accum_t (&c)[ROWS][COLUMNS],
                                                        const char* a_smem, int first,
                                                        const char* b_smem,
                                                        const Share<WIDTH, SHARERS>& share) {
  const fragment::AcrossRows<fragment::row_bytes(WIDTH)> b(b_smem + share.first * 128);
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH / 8; ++k) {
    fragment::part_t left[ROWS / 2][4];
#pragma unroll
    for (int second = 0; second < 2; ++second) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = 8 * k + fragment::lane_column() + second;
        const int column = first + 8 * r + fragment::lane_row();
        left[r / 2][r % 2 + 2 * second] =
            fragment::part(fragment::element_of(a_smem + fragment::place_of<A_BYTES>(row, column)));
      }
    }
    fragment::multiply_across<COLUMNS / (2 * STORED_VECTOR)>(c, left, b, 8 * k, share);
  }
}

// c += a b, or c += a^T b where TRANSPOSED, for those elements of b only that do not fit, without
// pairs that take no part, which `seen_smem` tells: the products leave them to this. The rows of c
// are rows, or columns, of a from `first` on.
template <int WIDTH, int DEPTH, int A_BYTES, bool TRANSPOSED, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_nonfinite(accum_t (&c)[ROWS][COLUMNS], const char* a_smem,
                                              const char* seen_smem, int first, const char* b_smem,
                                              const Share<WIDTH, SHARERS>& share) {
#pragma unroll 1
  for (int k = 0; k < DEPTH; ++k) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (!share.has(n / (2 * STORED_VECTOR))) break;
      const int column = share.first * fragment::LINE + fragment::column_of(n);
      const accum_t value =
          fragment::element_of(b_smem + fragment::place_of<fragment::row_bytes(WIDTH)>(k, column));
      if (fragment::fits(value)) continue;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = first + 8 * r + fragment::lane_row();
        const int at = fragment::place_of<A_BYTES>(TRANSPOSED ? k : row, TRANSPOSED ? row : k);
        const bool seen = matmul::takes_part(fragment::element_of(seen_smem + at));
        if (seen) c[r][n] += fragment::element_of(a_smem + at) * value;
      }
    }
  }
}

// Writes the block's BLOCK_ROWS rows of a result of WIDTH columns, times a factor, by way of shared
// memory. Of the warp's share the first row is `warp_row`; row 0 of the block is row `first` of the
// entry's head, and `valid` rows exist.
template <int BLOCK_ROWS, int WIDTH, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const accum_t (&result)[ROWS][COLUMNS],
                                           const Share<WIDTH, SHARERS>& share, int warp_row,
                                           const Operand& to, long long offset, long long first,
                                           int valid, accum_t factor, char* rows_smem) {
  constexpr int BYTES = fragment::row_bytes(WIDTH);
#pragma unroll
  for (int n = 0; n < COLUMNS; n += STORED_VECTOR) {
    if (!share.has(n / (2 * STORED_VECTOR))) break;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      StoredVector stored;
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        stored.x[x] = static_cast<storage_t>(result[r][n + x] * factor);
      }
      const int piece = 8 * share.first + fragment::column_of(n) / STORED_VECTOR;
      const int at = fragment::place<BYTES>(warp_row + 8 * r + fragment::lane_row(), piece);
      *reinterpret_cast<StoredVector*>(rows_smem + at) = stored;
    }
  }
  __syncthreads();  // the result, which other threads wrote
  fragment::copy_out<WIDTH>(to, offset + first * to.row, BLOCK_ROWS, valid, threadIdx.x, THREADS,
                            rows_smem);
}

}  // namespace fragment_wide_product
