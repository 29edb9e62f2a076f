// Tiles as fragments of tensor cores: which elements a thread holds in registers, and how rows are
// stored in shared memory. This file serves every type; products of 16-bit types are in
// fragment.cuh, those of 4- and 8-byte types in fragment_wide.cuh.
//
// A warp owns 16 M_TILES adjacent rows of a result. Of a result c[ROWS][COLUMNS], ROWS = 2 M_TILES,
// a thread's element (r, n) is in row 8 r + lane / 4 of the warp's rows and in column 8 (n / 2) + 2
// (lane % 4) + n % 2.
//
// In shared memory a row is padded to lines of 128 bytes and swizzled: its 16-byte piece c is
// stored at c ^ swizzle(row), so that the rows that a warp reads at a time fall on all banks.
#pragma once
#include "../ptx/mma.cuh"
#include "../common/join.cuh"
#include "../common/tile.cuh"

namespace fragment {

constexpr int WARPS = THREADS / ptx::WARP_SIZE;
// For kernels whose blocks own queries; the others compute their warps' rows themselves. Of wide
// heads, ROW_SHARERS warps have the same rows (fragment_sharers.cuh): each computes the scores of
// WARP_KEYS keys of a tile.
constexpr int M_TILES = matmul::larger(1, BLOCK_Q* ROW_SHARERS / (16 * WARPS));
constexpr int WARP_ROWS = 16 * M_TILES;
constexpr int WARP_KEYS = BLOCK_KV / ROW_SHARERS;

// A float32 as the sum of two numbers of 11 bits, for products in tf32.
struct Split {
  unsigned int large, small;
};

// The element trait of tensor cores: one specialisation for each type.
//
// WIDE: elements of 4 or 8 bytes, whose products are in fragment_wide.cuh.
// part, TERMS: what an instruction multiplies of a wide element, and how many products of parts
// make a product of elements. SPLIT_CAN_FAIL: infinities, and float32 from 2^127 on, cannot be
// split into parts. LAGS: the softmax keeps a row's maximum as long as no weight exceeds 2^8
// (fragment_softmax.cuh). SCALES_DS: dS is scaled, or it would overflow or vanish
// (fragment_gradient.cuh). EXPONENTS, LAST, SIGNS: bits of a 32-bit word of a row: exponents, their
// lowest bits, signs. For NaN and infinity, whose exponent is all ones, exponent + LAST carries
// into the sign; for float32, whose LAST is twice that, also for numbers from 2^127 on. UPPER:
// which word of an element has the exponent.
template <int CODE>
struct MmaElement {
  static_assert(CODE < 0, "STORAGE is no element type of tensor cores: specialise MmaElement");
};
template <>
struct MmaElement<0> {  // float16
  using part = Split;   // unused, as are TERMS and SPLIT_CAN_FAIL
  static constexpr int TERMS = 1;
  static constexpr bool SPLIT_CAN_FAIL = false;
  static constexpr bool WIDE = false, LAGS = true, SCALES_DS = true;
  static constexpr unsigned int EXPONENTS = 0x7c007c00u, LAST = 0x04000400u, SIGNS = 0x80008000u;
  static constexpr int UPPER = 0;
};
template <>
struct MmaElement<1> {  // bfloat16
  using part = Split;   // unused, as are TERMS and SPLIT_CAN_FAIL
  static constexpr int TERMS = 1;
  static constexpr bool SPLIT_CAN_FAIL = false;
  static constexpr bool WIDE = false, LAGS = true, SCALES_DS = false;
  static constexpr unsigned int EXPONENTS = 0x7f807f80u, LAST = 0x00800080u, SIGNS = 0x80008000u;
  static constexpr int UPPER = 0;
};
template <>
struct MmaElement<2> {  // float32
  using part = Split;
  static constexpr int TERMS = 3;  // of 4: the product of the two small parts is dropped
  static constexpr bool SPLIT_CAN_FAIL = true;
  static constexpr bool WIDE = true, LAGS = false, SCALES_DS = false;
  static constexpr unsigned int EXPONENTS = 0x7f800000u, LAST = 0x01000000u, SIGNS = 0x80000000u;
  static constexpr int UPPER = 0;
};
template <>
struct MmaElement<3> {  // float64
  using part = double;
  static constexpr int TERMS = 1;
  static constexpr bool SPLIT_CAN_FAIL = false;
  static constexpr bool WIDE = true, LAGS = false, SCALES_DS = false;
  static constexpr unsigned int EXPONENTS = 0x7ff00000u, LAST = 0x00100000u, SIGNS = 0x80000000u;
  static constexpr int UPPER = 1;
};
using Mma = MmaElement<STORAGE>;

constexpr bool WIDE = Mma::WIDE;
constexpr int LINE = 8 * STORED_VECTOR;  // elements in 128 bytes

// Selects the overload for the storage type where the other arguments do not.
struct Narrow {};
struct Wide {};
template <bool>
struct KindOf {
  using type = Narrow;
  using word = unsigned int;  // two weights
};
template <>
struct KindOf<true> {
  using type = Wide;
  using word = accum_t;
};
using Kind = KindOf<WIDE>::type;
using word_t = KindOf<WIDE>::word;
constexpr int PER_WORD = WIDE ? 1 : 2;

// The left operand of all products of a warp's rows, resident in registers or reloaded for each.
template <int WIDTH, bool IN_REGISTERS, bool IS_WIDE = WIDE>
struct Left;

__device__ constexpr int row_bytes(int width) {
  return matmul::round_up(width, LINE) * static_cast<int>(sizeof(storage_t));
}
// Columns that products read: those beyond the array's width are 0.
__device__ constexpr int whole_columns(int width) {
  return matmul::round_up(width, WIDE ? LINE : 16);
}

__device__ __forceinline__ int lane_row() { return ptx::lane_index() / 4; }
__device__ __forceinline__ int lane_column() { return 2 * (ptx::lane_index() % 4); }
__device__ __forceinline__ int warp_row() {
  return threadIdx.x / (ptx::WARP_SIZE * ROW_SHARERS) * WARP_ROWS;
}
__device__ __forceinline__ int warp_key() {
  return threadIdx.x / ptx::WARP_SIZE % ROW_SHARERS * WARP_KEYS;
}

// Wide elements are read by 8 lanes at a time: two adjacent rows and four adjacent pieces, or four
// rows, every other one, and two pieces.
__device__ __forceinline__ int swizzle(int row) { return WIDE ? row % 8 ^ row % 2 * 4 : row % 8; }
// The same for rows of ROW_BYTES; two rows of 64 bytes, of 16-bit weights, share a line.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzle_of(int row) {
  return ROW_BYTES == 64 ? row / 2 % 4 : swizzle(row);
}

// Bytes from the beginning of a tile to a 16-byte piece of a row.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzled_offset(int row, int piece) {
  return row * ROW_BYTES + ((piece ^ swizzle_of<ROW_BYTES>(row)) << 4);
}

// -- rows between global and shared memory --------------------------------------------------------

// How many threads copy a row of `pieces` pieces: a power of two.
__device__ constexpr int lanes_for(int pieces) {
  int lanes = 2;
  while (lanes < pieces) lanes *= 2;
  return lanes;
}

// How the block's threads divide the 16-byte pieces of ROWS rows among them. If a row has fewer
// pieces than threads, some threads are idle.
template <int ROWS, int WIDTH>
struct Pieces {
  static constexpr int PER_ROW = whole_columns(WIDTH) / STORED_VECTOR;
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

// Starts the asynchronous copy of rows `first` to `first + valid` of an array that is WIDTH columns
// wide; elements outside of it become 0. Rows that do not allow 16-byte copies are copied at once.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ void begin_rows(char* tile_smem, const memory::Rows& from,
                                           long long first, int valid) {
  using Share = Pieces<ROWS, WIDTH>;
  const Share share;
  const int left = WIDTH - STORED_VECTOR * share.piece;
  const int columns = left < STORED_VECTOR ? left : STORED_VECTOR;
  const storage_t* source =
      from.data + (first + share.row) * from.row + STORED_VECTOR * share.piece * from.col;
  if (from.vectors) {
    const unsigned int tile_address = ptx::shared_address(tile_smem);
    const int bytes = columns < 0 ? 0 : static_cast<int>(sizeof(storage_t)) * columns;
#pragma unroll
    for (int step = 0; step < Share::STEPS; ++step) {
      const int row = share.row + step * Share::AT_ONCE;
      if (share.has(step)) {
        ptx::cp_async_partial(tile_address + swizzled_offset<ROW_BYTES>(row, share.piece), source,
                              row < valid ? bytes : 0);
      }
      source += Share::AT_ONCE * from.row;
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < Share::STEPS; ++step) {
    const int row = share.row + step * Share::AT_ONCE;
    if (share.has(step)) {
      auto* const piece =
          reinterpret_cast<storage_t*>(tile_smem + swizzled_offset<ROW_BYTES>(row, share.piece));
#pragma unroll 1
      for (int x = 0; x < STORED_VECTOR; ++x) {
        piece[x] = row < valid && x < columns ? source[x * from.col] : storage_t(0);
      }
    }
    source += Share::AT_ONCE * from.row;
  }
}

constexpr unsigned int EXPONENTS = Mma::EXPONENTS, LAST = Mma::LAST;
constexpr unsigned int SIGNS = Mma::SIGNS;
constexpr int UPPER = Mma::UPPER;

// Negates the elements that this thread copied.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ void negate_rows(char* tile_smem) {
  using Share = Pieces<ROWS, WIDTH>;
  const Share share;
#pragma unroll 1
  for (int step = 0; step < Share::STEPS; ++step) {
    if (!share.has(step)) continue;
    const int row = share.row + step * Share::AT_ONCE;
    auto* const piece =
        reinterpret_cast<ptx::Bytes16*>(tile_smem + swizzled_offset<ROW_BYTES>(row, share.piece));
#pragma unroll
    for (int x = UPPER; x < 4; x += 1 + UPPER) piece->x[x] ^= SIGNS;
  }
}

// Whether all elements that this thread copied are finite.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ bool finite_rows(const char* tile_smem) {
  using Share = Pieces<ROWS, WIDTH>;
  const Share share;
  unsigned int carried = 0;
#pragma unroll 4
  for (int step = 0; step < Share::STEPS; ++step) {
    if (!share.has(step)) continue;
    const int row = share.row + step * Share::AT_ONCE;
    const auto piece = *reinterpret_cast<const ptx::Bytes16*>(
        tile_smem + swizzled_offset<ROW_BYTES>(row, share.piece));
#pragma unroll
    for (int x = UPPER; x < 4; x += 1 + UPPER) carried |= (piece.x[x] & EXPONENTS) + LAST;
  }
  return (carried & SIGNS) == 0;
}

// Sets to 0 the elements that this thread copied and that finite_rows does not count as finite.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ void clear_nonfinite(char* tile_smem) {
  using Share = Pieces<ROWS, WIDTH>;
  const Share share;
#pragma unroll 1
  for (int step = 0; step < Share::STEPS; ++step) {
    if (!share.has(step)) continue;
    const int row = share.row + step * Share::AT_ONCE;
    auto* const piece =
        reinterpret_cast<ptx::Bytes16*>(tile_smem + swizzled_offset<ROW_BYTES>(row, share.piece));
#pragma unroll
    for (int x = UPPER; x < 4; x += 1 + UPPER) {
      const unsigned int carried = (piece->x[x] & EXPONENTS) + LAST;
      if constexpr (WIDE) {
        if (carried & SIGNS) piece->x[x] = piece->x[x - UPPER] = 0;
      } else {
        if (carried & 0x8000u) piece->x[x] &= 0xffff0000u;
        if (carried & 0x80000000u) piece->x[x] &= 0x0000ffffu;
      }
    }
  }
}

// Rotates columns to the left by STEP. A loop that works on the first STEP columns and rotates
// keeps its body in the kernel once, without registers that are indexed at run time.
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

// -- results --------------------------------------------------------------------------------------

// Stores rows of a result of WIDTH columns from shared memory to global memory, by thread `thread`
// of `threads`. Row 0 goes to `offset`; `valid` of `rows` rows exist.
template <int WIDTH>
__device__ __forceinline__ void copy_out(const Operand& to, long long offset, int rows, int valid,
                                         int thread, int threads, const char* rows_smem) {
  storage_t* const data = reinterpret_cast<storage_t*>(to.data) + offset;
  const bool vectors = to.col == 1 && to.row % STORED_VECTOR == 0 &&
                       reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  constexpr int PIECES = (WIDTH + STORED_VECTOR - 1) / STORED_VECTOR;
#pragma unroll 1
  for (int n = thread; n < rows * PIECES; n += threads) {
    const int row = n / PIECES, piece = n % PIECES;
    if (row >= valid) break;
    const auto stored = *reinterpret_cast<const StoredVector*>(
        rows_smem + swizzled_offset<row_bytes(WIDTH)>(row, piece));
    storage_t* const target = data + row * to.row + STORED_VECTOR * piece * to.col;
    if (vectors && STORED_VECTOR * (piece + 1) <= WIDTH) {
      *reinterpret_cast<StoredVector*>(target) = stored;
    } else {
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        if (STORED_VECTOR * piece + x < WIDTH) target[x * to.col] = stored.x[x];
      }
    }
  }
}

// Two elements of the accumulator's type.
struct alignas(2 * sizeof(accum_t)) Pair {
  accum_t x[2];
};

// Column of a thread's element n, n even, in a result as tensor cores make it.
__device__ __forceinline__ int pair_column(int n) { return 4 * n + lane_column(); }

// The keys of a result, of which a warp has some rows, join those before them. `acc` times `weight`
// is the result over the keys here, with row maxima m and sums l; afterwards it is that over all
// keys. Elements n and n + 1, n even, are in column `column_of(n)` and the next one. The warp's
// first row is row `first` of the head; `valid` rows exist.
template <int WIDTH, int ROWS, int COLUMNS, class ColumnOf>
__device__ __forceinline__ void resume(accum_t (&acc)[ROWS][COLUMNS], accum_t (&weight)[ROWS],
                                       accum_t (&m)[ROWS], accum_t (&l)[ROWS], const Params& p,
                                       const layout::Entry& entry, long long head, long long first,
                                       int valid, const ColumnOf& column_of) {
  constexpr int AT_ONCE = COLUMNS < 32 ? COLUMNS : 32;  // elements that are loaded at a time
  const Operand& before = p.out_before;
  const memory::RowStatistic lse = memory::row_statistic(p.lse_before, entry, head);
  const accum_t* const data = reinterpret_cast<const accum_t*>(before.data) +
                              layout::offset(before, entry, head, false) + first * before.row;
  const bool pairs = WIDTH % 2 == 0 && before.col == 1 && before.row % 2 == 0 &&
                     reinterpret_cast<unsigned long long>(data) % sizeof(Pair) == 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = 8 * r + lane_row();
    const accum_t own = l[r] == accum_t(0) ? -number::infinity() : m[r] + log(l[r]);
    const accum_t lse_before =
        row < valid ? lse.data[(first + row) * lse.row] : -number::infinity();
    const bool has_before = lse_before != -number::infinity();
    const join::Joined joined(own, lse_before);
    const accum_t* const row_gmem = data + row * before.row;
#pragma unroll
    for (int begin = 0; begin < COLUMNS; begin += AT_ONCE) {
      Pair held[AT_ONCE / 2];  // all loaded before the first is used: the result may go there
#pragma unroll
      for (int n = 0; n < AT_ONCE; n += 2) {
        if (begin + n >= COLUMNS) break;
        const int column = column_of(begin + n);
        held[n / 2] = Pair{};
        if (!has_before) continue;
        if (pairs && column < WIDTH) {
          held[n / 2] = *reinterpret_cast<const Pair*>(row_gmem + column);
        } else {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            if (column + x < WIDTH) held[n / 2].x[x] = row_gmem[(column + x) * before.col];
          }
        }
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        if (begin + n >= COLUMNS) break;
        accum_t& element = acc[r][begin + n];
        element = joined.mean(element * weight[r], held[n / 2].x[n % 2]);
      }
    }
    weight[r] = 1;
    m[r] = joined.lse;
    l[r] = joined.lse == -number::infinity() ? accum_t(0) : accum_t(1);
  }
  __syncwarp();  // the lse before, read by all lanes of its row
}

// Writes a warp's rows of a result of `columns` of at most WIDTH columns, each times a factor, to
// an array of the accumulator's type. The warp's row 0 goes to `offset`; `valid` rows exist.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_wide(const accum_t (&result)[ROWS][COLUMNS],
                                           const accum_t (&factor)[ROWS], const Operand& to,
                                           long long offset, int valid, int columns = WIDTH) {
  accum_t* const data = reinterpret_cast<accum_t*>(to.data) + offset;
  const bool pairs = columns % 2 == 0 && to.col == 1 && to.row % 2 == 0 &&
                     reinterpret_cast<unsigned long long>(data) % sizeof(Pair) == 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = 8 * r + lane_row();
    if (row >= valid) break;
    accum_t* const row_gmem = data + row * to.row;
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      const int column = pair_column(n);
      const Pair stored{{result[r][n] * factor[r], result[r][n + 1] * factor[r]}};
      if (pairs && column < columns) {
        *reinterpret_cast<Pair*>(row_gmem + column) = stored;
      } else {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          if (column + x < columns) row_gmem[(column + x) * to.col] = stored.x[x];
        }
      }
    }
  }
}

}  // namespace fragment
