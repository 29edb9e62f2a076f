// Copies of rows between global and shared memory: the twin of reference/cpu/memory.py.
#pragma once
#include "../ptx/cp_async.cuh"
#include "layout.cuh"

namespace memory {

// The rows of one head of one batch entry in global memory.
struct Rows {
  const storage_t* data;  // row 0
  long long row;
  long long col;
  bool vectors;  // 16-byte copies are possible: rows are contiguous and 16-byte aligned
};

__device__ __forceinline__ Rows rows(const Operand& operand, const layout::Entry& entry,
                                     long long head, bool of_keys) {
  const storage_t* data = reinterpret_cast<const storage_t*>(operand.data) +
                          layout::offset(operand, entry, head, of_keys);
  const bool aligned = reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  const bool vectors = aligned && operand.col == 1 && operand.row % STORED_VECTOR == 0;
  return Rows{data, operand.row, operand.col, vectors};
}

// How the block's threads divide ROWS rows of COLUMNS elements among them for 16-byte copies: LANES
// threads copy a row, AT_ONCE rows are copied at a time.
template <int ROWS, int COLUMNS>
struct RowShare {
  static constexpr int PER_ROW = COLUMNS / STORED_VECTOR;
  static constexpr int LANES = PER_ROW < THREADS ? PER_ROW : THREADS;
  static constexpr int AT_ONCE = THREADS / LANES;
  static constexpr int STEPS = (ROWS + AT_ONCE - 1) / AT_ONCE;

  int row = threadIdx.x / LANES;
  int column = threadIdx.x % LANES * STORED_VECTOR;

  // Distance between a thread's columns of a row; the last ones may lie beyond the row's end.
  static constexpr int COLUMN_STEP = LANES * STORED_VECTOR;
  __device__ __forceinline__ static bool in_row(int vector_column) {
    return COLUMNS % COLUMN_STEP == 0 || vector_column < COLUMNS;
  }

  __device__ __forceinline__ bool has(int step) const {
    if (THREADS % LANES != 0 && row >= AT_ONCE) return false;
    return ROWS % AT_ONCE == 0 || row + step * AT_ONCE < ROWS;
  }
};

// Whether 16-byte copies are possible for COLUMNS columns of an array that is WIDTH columns wide,
// as far as sizes tell; Rows::vectors adds what strides and addresses tell.
template <int COLUMNS, int WIDTH>
constexpr bool BY_VECTORS = COLUMNS % STORED_VECTOR == 0 && WIDTH % STORED_VECTOR == 0;

// Starts the asynchronous copy of rows `first` to `first + valid`, from `column` on, to a tile in
// shared memory whose rows are STRIDE elements apart. Elements outside the array, which is WIDTH
// columns wide, become 0. All threads of the block call it, then finish_rows with the same
// arguments, and then meet at a barrier.
//
// Between the two calls, a 16-byte vector of a storage type narrower than the accumulator's lies at
// the beginning of the space that its widened elements will take. Rows that cannot be copied 16
// bytes at a time are left to finish_rows.
template <int ROWS, int COLUMNS, int STRIDE, int WIDTH>
__device__ __forceinline__ void begin_rows(accum_t* tile_smem, const Rows& from, long long first,
                                           int valid, int column) {
  if constexpr (BY_VECTORS<COLUMNS, WIDTH>) {
    if (!from.vectors) return;
    using Share = RowShare<ROWS, COLUMNS>;
    const Share share;
#pragma unroll
    for (int c = 0; c < COLUMNS; c += Share::COLUMN_STEP) {
      const int vector_column = c + share.column;
      if (!Share::in_row(vector_column)) break;
      const bool inside = column + vector_column < WIDTH;
      const storage_t* source = from.data + (first + share.row) * from.row + column + vector_column;
      accum_t* const target_smem = tile_smem + share.row * STRIDE + vector_column;
#pragma unroll 8
      for (int step = 0; step < Share::STEPS; ++step) {
        if (!share.has(step)) break;
        ptx::cp_async(target_smem + step * Share::AT_ONCE * STRIDE, source,
                      inside && share.row + step * Share::AT_ONCE < valid);
        source += Share::AT_ONCE * from.row;
      }
    }
  }
}

// Widens a 16-byte vector of stored elements in place. Returns whether all are finite (true without
// CHECK).
template <bool CHECK>
__device__ __forceinline__ bool finish_vector(accum_t* target_smem) {
  const StoredVector stored = *reinterpret_cast<const StoredVector*>(target_smem);
  bool finite = true;
#pragma unroll
  for (int part = 0; part < STORED_VECTOR / VECTOR; ++part) {
    Vector wide;
#pragma unroll
    for (int x = 0; x < VECTOR; ++x) {
      wide.x[x] = number::widen(stored.x[part * VECTOR + x]);
      if constexpr (CHECK) finite = finite && number::is_finite(wide.x[x]);
    }
    if constexpr (sizeof(storage_t) < sizeof(accum_t)) {
      *reinterpret_cast<Vector*>(target_smem + part * VECTOR) = wide;
    }
  }
  return finite;
}

// Completes begin_rows: the tile then holds elements of the accumulator's type. Returns whether all
// that this thread copied is finite (true without CHECK).
template <int ROWS, int COLUMNS, int STRIDE, int WIDTH, bool CHECK>
__device__ __forceinline__ bool finish_rows(accum_t* tile_smem, const Rows& from, long long first,
                                            int valid, int column) {
  bool finite = true;
  if constexpr (BY_VECTORS<COLUMNS, WIDTH>) {
    if (from.vectors) {
      using Share = RowShare<ROWS, COLUMNS>;
      const Share share;
      ptx::cp_async_wait_all();
      if constexpr (CHECK || sizeof(storage_t) < sizeof(accum_t)) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c += Share::COLUMN_STEP) {
          if (!Share::in_row(c + share.column)) break;
          accum_t* const target_smem = tile_smem + share.row * STRIDE + c + share.column;
#pragma unroll 2
          for (int step = 0; step < Share::STEPS; ++step) {
            if (!share.has(step)) break;
            finite = finish_vector<CHECK>(target_smem + step * Share::AT_ONCE * STRIDE) && finite;
          }
        }
      }
      return finite;
    }
  }
  const storage_t* source = from.data + first * from.row + column * from.col;
#pragma unroll 1
  for (int n = threadIdx.x; n < ROWS * COLUMNS; n += THREADS) {
    const int row = n / COLUMNS;
    const int c = n % COLUMNS;
    accum_t value = 0;
    if (row < valid && column + c < WIDTH) {
      value = number::widen(source[row * from.row + c * from.col]);
    }
    if constexpr (CHECK) finite = finite && number::is_finite(value);
    tile_smem[row * STRIDE + c] = value;
  }
  return finite;
}

// begin_rows and finish_rows in one.
template <int ROWS, int COLUMNS, int STRIDE, int WIDTH, bool CHECK = false>
__device__ __forceinline__ bool load_rows(accum_t* tile_smem, const Rows& from, long long first,
                                          int valid) {
  begin_rows<ROWS, COLUMNS, STRIDE, WIDTH>(tile_smem, from, first, valid, 0);
  return finish_rows<ROWS, COLUMNS, STRIDE, WIDTH, CHECK>(tile_smem, from, first, valid, 0);
}

// A statistic of every query's row (lse, delta), in the accumulator's type.
struct RowStatistic {
  accum_t* data;
  long long row;
};

__device__ __forceinline__ RowStatistic row_statistic(const Operand& operand,
                                                      const layout::Entry& entry, long long head) {
  return RowStatistic{
      reinterpret_cast<accum_t*>(operand.data) + layout::offset(operand, entry, head, false),
      operand.row};
}

}  // namespace memory
