// Tiles of 16-bit elements in shared memory, and their products by warps in pieces of 16 x 8 x 16:
// the twin of reference/microkernel.py and reference/accumulate.py for tensor cores.
//
// A warp owns 16 M_TILES neighbouring rows of a result. Of a result c[ROWS][COLUMNS], ROWS =
// 2 M_TILES, a thread's element (r, n) lies at row 8 r + lane / 4 of the warp's rows and column
// 8 (n / 2) + 2 (lane % 4) + n % 2. What a product leaves in registers is the left operand of the
// next one as it lies: weights never go through memory.
//
// In shared memory a row takes whole lines of 128 bytes, and its 16-byte piece c lies at
// c ^ (row % 8): the eight rows that one matrix instruction reads at a time fall on all banks.
#pragma once
#include "../arch/matrix.cuh"
#include "tile.cuh"

namespace fragment {

constexpr int WARPS = THREADS / arch::WARP_SIZE;
// Of kernels whose blocks own queries; others say their warps' rows themselves.
constexpr int M_TILES = matmul::larger(1, BLOCK_Q / (16 * WARPS));
constexpr int WARP_ROWS = 16 * M_TILES;

__device__ constexpr int row_bytes(int width) { return matmul::round_up(width, 64) * 2; }
// Columns that take part in products: beyond the array's they are 0.
__device__ constexpr int whole_columns(int width) { return matmul::round_up(width, 16); }

__device__ __forceinline__ int lane_row() { return arch::lane_index() / 4; }
__device__ __forceinline__ int lane_column() { return 2 * (arch::lane_index() % 4); }
__device__ __forceinline__ int warp_row() { return threadIdx.x / arch::WARP_SIZE * WARP_ROWS; }

// Bytes between the beginning of a tile and a 16-byte piece of a row.
template <int ROW_BYTES>
__device__ __forceinline__ int place(int row, int piece) {
  return row * ROW_BYTES + ((piece ^ row % 8) << 4);
}

// -- rows between global and shared memory --------------------------------------------------------

// Threads that work on a row of so many pieces: a power of two.
__device__ constexpr int lanes_for(int pieces) {
  int lanes = 2;
  while (lanes < pieces) lanes *= 2;
  return lanes;
}

// How the block's threads share the 16-byte pieces of ROWS rows. Where a row's pieces are fewer
// than its threads, some have nothing to do.
template <int ROWS, int WIDTH>
struct Pieces {
  static constexpr int PER_ROW = whole_columns(WIDTH) / 8;
  static constexpr int LANES = lanes_for(PER_ROW);
  static constexpr int AT_ONCE = THREADS / LANES;
  static constexpr int STEPS = (ROWS + AT_ONCE - 1) / AT_ONCE;
  static_assert(THREADS % LANES == 0, "a row's pieces are shared by whole groups of threads");

  int row = threadIdx.x / LANES;
  int piece = threadIdx.x % LANES;

  __device__ __forceinline__ bool has(int step) const {
    return (PER_ROW == LANES || piece < PER_ROW) &&
           (ROWS % AT_ONCE == 0 || row + step * AT_ONCE < ROWS);
  }
};

// Begins to copy rows `first` to `first + valid` of an array that is WIDTH columns wide. What lies
// outside of it becomes 0. Rows that cannot be copied by vectors are there at once.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ void begin_rows(char* tile_smem, const memory::Rows& from,
                                           long long first, int valid) {
  using Share = Pieces<ROWS, WIDTH>;
  const Share own;
  const int columns = WIDTH - 8 * own.piece < 8 ? WIDTH - 8 * own.piece : 8;
  const storage_t* source = from.data + (first + own.row) * from.row + 8 * own.piece * from.col;
  if (from.vectors) {
    const unsigned int tile_address = arch::shared_address(tile_smem);
    const int bytes = columns < 0 ? 0 : 2 * columns;
#pragma unroll
    for (int step = 0; step < Share::STEPS; ++step) {
      const int row = own.row + step * Share::AT_ONCE;
      if (own.has(step)) {
        arch::begin_part_copy(tile_address + place<ROW_BYTES>(row, own.piece), source,
                              row < valid ? bytes : 0);
      }
      source += Share::AT_ONCE * from.row;
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < Share::STEPS; ++step) {
    const int row = own.row + step * Share::AT_ONCE;
    if (own.has(step)) {
      auto* const piece =
          reinterpret_cast<storage_t*>(tile_smem + place<ROW_BYTES>(row, own.piece));
#pragma unroll 1
      for (int x = 0; x < STORED_VECTOR; ++x) {
        piece[x] = row < valid && x < columns ? source[x * from.col] : storage_t(0);
      }
    }
    source += Share::AT_ONCE * from.row;
  }
}

// Changes the sign of what this thread copied.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ void negate_rows(char* tile_smem) {
  using Share = Pieces<ROWS, WIDTH>;
  const Share own;
#pragma unroll 1
  for (int step = 0; step < Share::STEPS; ++step) {
    if (!own.has(step)) continue;
    const int row = own.row + step * Share::AT_ONCE;
    auto* const piece =
        reinterpret_cast<arch::Bytes16*>(tile_smem + place<ROW_BYTES>(row, own.piece));
#pragma unroll
    for (int x = 0; x < 4; ++x) piece->x[x] ^= 0x80008000u;
  }
}

// The exponents of two elements; all ones tell NaN or infinity, and carry into the sign by LAST.
constexpr unsigned int EXPONENTS = STORAGE == 0 ? 0x7c007c00u : 0x7f807f80u;
constexpr unsigned int LAST = STORAGE == 0 ? 0x04000400u : 0x00800080u;

// Whether all that this thread copied is finite.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ bool finite_rows(const char* tile_smem) {
  using Share = Pieces<ROWS, WIDTH>;
  const Share own;
  unsigned int carried = 0;
#pragma unroll 4
  for (int step = 0; step < Share::STEPS; ++step) {
    if (!own.has(step)) continue;
    const int row = own.row + step * Share::AT_ONCE;
    const auto piece =
        *reinterpret_cast<const arch::Bytes16*>(tile_smem + place<ROW_BYTES>(row, own.piece));
#pragma unroll
    for (int x = 0; x < 4; ++x) carried |= (piece.x[x] & EXPONENTS) + LAST;
  }
  return (carried & 0x80008000u) == 0;
}

// Makes 0 of what this thread copied that is not finite.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ void clear_nonfinite(char* tile_smem) {
  using Share = Pieces<ROWS, WIDTH>;
  const Share own;
#pragma unroll 1
  for (int step = 0; step < Share::STEPS; ++step) {
    if (!own.has(step)) continue;
    const int row = own.row + step * Share::AT_ONCE;
    auto* const piece =
        reinterpret_cast<arch::Bytes16*>(tile_smem + place<ROW_BYTES>(row, own.piece));
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const unsigned int carried = (piece->x[x] & EXPONENTS) + LAST;
      if (carried & 0x8000u) piece->x[x] &= 0xffff0000u;
      if (carried & 0x80000000u) piece->x[x] &= 0x0000ffffu;
    }
  }
}

// -- products -------------------------------------------------------------------------------------

// Where a lane's row of the matrices that one instruction loads lies. `row` is the lane's row of
// the first 16, `half` which 8 of the first 16 columns.
template <int ROW_BYTES>
struct LaneRow {
  unsigned int address;
  unsigned int begin;

  __device__ __forceinline__ LaneRow(const char* tile_smem, int row, int half)
      : address(arch::shared_address(tile_smem) + row * ROW_BYTES), begin((half ^ row % 8) << 4) {}

  // Columns 16 `step` and on of the rows that are `rows`, a multiple of 8, further.
  __device__ __forceinline__ unsigned int at(int rows, int step) const {
    return address + (begin ^ step % 4 * 32) + step / 4 * 128 + rows * ROW_BYTES;
  }
};

// The lanes' rows of a left operand, whose first row is the warp's, and of a right operand that is
// used as it lies (keys and columns) or transposed (columns and keys).
template <int ROW_BYTES>
__device__ __forceinline__ LaneRow<ROW_BYTES> left_rows(const char* rows_smem) {
  return {rows_smem, arch::lane_index() % 16, arch::lane_index() / 16};
}
template <int ROW_BYTES>
__device__ __forceinline__ LaneRow<ROW_BYTES> right_rows(const char* tile_smem) {
  const int lane = arch::lane_index();
  return {tile_smem, lane / 16 * 8 + lane % 8, lane / 8 % 2};
}

__device__ __forceinline__ void mma(float& c0, float& c1, float& c2, float& c3,
                                    const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
  if constexpr (STORAGE == 0) {
    arch::mma_m16n8k16_f16(c0, c1, c2, c3, a, b0, b1);
  } else {
    arch::mma_m16n8k16_bf16(c0, c1, c2, c3, a, b0, b1);
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

// The left operand of all products of a warp's rows: kept in registers, or loaded for each.
template <int WIDTH, bool HELD>
struct Left {
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
        arch::ldmatrix_x4(to[m], rows.at(16 * m, step));
      }
    }
  }
  __device__ __forceinline__ void hold() {
    static_assert(HELD, "where registers have room");
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) arch::ldmatrix_x4(held[step][m], rows.at(16 * m, step));
    }
  }
};

// c = a b^T.
template <int WIDTH, bool HELD, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(float (&c)[ROWS][COLUMNS], const Left<WIDTH, HELD>& a,
                                         const char* b_smem) {
  constexpr int BYTES = row_bytes(WIDTH);
  const LaneRow<BYTES> rows = right_rows<BYTES>(b_smem);
  matmul::clear(c);
#pragma unroll
  for (int step = 0; step < Left<WIDTH, HELD>::STEPS; ++step) {
    unsigned int left[M_TILES][4];
    a.load(left, step);
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      unsigned int b[4];
      arch::ldmatrix_x4(b, rows.at(4 * n, step));
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) multiply_step(c, m, n, left[m], b);
    }
  }
}

__device__ __forceinline__ unsigned int narrow_pair(float low, float high) {
  if constexpr (STORAGE == 0) {
    return arch::floats_to_halves(low, high);
  } else {
    return arch::floats_to_bfloats(low, high);
  }
}

// Rounds weights to the storage type: neighbouring columns share a word.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void narrow(const float (&p)[ROWS][COLUMNS],
                                       unsigned int (&to)[ROWS][COLUMNS / 2]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) to[r][n / 2] = narrow_pair(p[r][n], p[r][n + 1]);
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
      arch::ldmatrix_x4_trans(b, rows.at(8 * k, n / 4));
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) {
        const unsigned int left[4] = {a[2 * m][k], a[2 * m + 1][k], a[2 * m][k + 1],
                                      a[2 * m + 1][k + 1]};
        multiply_step(c, m, n, left, b);
      }
    }
  }
}

// Moves the first STEP columns behind the last: a loop works on the first ones, so that its body
// stands in the kernel once and no register is chosen at run time.
template <int STEP, typename T, int ROWS, int COLUMNS>
__device__ __forceinline__ void rotate(T (&c)[ROWS][COLUMNS]) {
  static_assert(COLUMNS % STEP == 0, "whole steps");
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    T first[STEP];
#pragma unroll
    for (int n = 0; n < STEP; ++n) first[n] = c[r][n];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
      c[r][n] = n < COLUMNS - STEP ? c[r][n + STEP] : first[n % STEP];
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
        const unsigned int pair = arch::shuffle(a[r][0], arch::lane_index() / 4 * 4 + x / 2);
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

// Writes a warp's rows of a result of WIDTH columns, times a factor each, by way of shared memory
// that is the warp's own. Row 0 of the block is row `first` of the entry's head; `valid` rows
// exist.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const float (&result)[ROWS][COLUMNS], const Operand& to,
                                           long long offset, long long first, int valid,
                                           const float (&factor)[ROWS], char* rows_smem) {
  constexpr int BYTES = row_bytes(WIDTH);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      const unsigned int pair = narrow_pair(result[r][n] * factor[r], result[r][n + 1] * factor[r]);
      const int at = place<BYTES>(8 * r + lane_row(), n / 2) + 2 * lane_column();
      *reinterpret_cast<unsigned int*>(rows_smem + at) = pair;
    }
  }
  __syncwarp();  // the warp's rows, which its lanes wrote
  storage_t* const data =
      reinterpret_cast<storage_t*>(to.data) + offset + (first + warp_row()) * to.row;
  const bool vectors = to.col == 1 && to.row % STORED_VECTOR == 0 &&
                       reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  constexpr int PIECES = (WIDTH + 7) / 8;
#pragma unroll 1
  for (int n = arch::lane_index(); n < WARP_ROWS * PIECES; n += arch::WARP_SIZE) {
    const int row = n / PIECES, piece = n % PIECES;
    if (warp_row() + row >= valid) break;
    const auto stored =
        *reinterpret_cast<const StoredVector*>(rows_smem + place<BYTES>(row, piece));
    storage_t* const target = data + row * to.row + 8 * piece * to.col;
    if (vectors && 8 * piece + 8 <= WIDTH) {
      *reinterpret_cast<StoredVector*>(target) = stored;
    } else {
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        if (8 * piece + x < WIDTH) target[x * to.col] = stored.x[x];
      }
    }
  }
}

}  // namespace fragment
