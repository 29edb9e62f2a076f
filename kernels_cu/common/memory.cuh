// Rows of arrays, between global and shared memory: the twin of reference/cpu/memory.py.
#pragma once
#include "../ptx/cp_async.cuh"
#include "layout.cuh"

namespace memory {

// The rows of one head of one entry.
struct Rows {
  const storage_t* data;  // row 0
  long long row;
  long long col;
  bool vectors;  // every row begins on a 16-byte boundary and is contiguous
};

__device__ __forceinline__ Rows rows(const Operand& operand, const layout::Entry& entry,
                                     long long head, bool of_keys) {
  const storage_t* data = reinterpret_cast<const storage_t*>(operand.data) +
                          layout::offset(operand, entry, head, of_keys);
  const bool aligned = reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  const bool vectors = aligned && operand.col == 1 && operand.row % STORED_VECTOR == 0;
  return Rows{data, operand.row, operand.col, vectors};
}

// How the block's threads share ROWS rows of COLUMNS elements that are copied 16 bytes at a time:
// LANES threads work on a row, AT_ONCE rows are worked on together.
template <int ROWS, int COLUMNS>
struct Shares {
  static constexpr int PER_ROW = COLUMNS / STORED_VECTOR;
  static constexpr int LANES = PER_ROW < THREADS ? PER_ROW : THREADS;
  static constexpr int AT_ONCE = THREADS / LANES;
  static constexpr int STEPS = (ROWS + AT_ONCE - 1) / AT_ONCE;

  int row = threadIdx.x / LANES;
  int column = threadIdx.x % LANES * STORED_VECTOR;

  // The thread's columns of a row lie so far apart; the last ones may be beyond the row's end.
  static constexpr int APART = LANES * STORED_VECTOR;
  __device__ __forceinline__ static bool in_row(int place) {
    return COLUMNS % APART == 0 || place < COLUMNS;
  }

  __device__ __forceinline__ bool has(int step) const {
    if (THREADS % LANES != 0 && row >= AT_ONCE) return false;
    return ROWS % AT_ONCE == 0 || row + step * AT_ONCE < ROWS;
  }
};

// Whether rows of COLUMNS elements, of an array that is WIDTH columns wide, are copied 16 bytes at
// a time where they lie so that it is possible.
template <int COLUMNS, int WIDTH>
constexpr bool BY_VECTORS = COLUMNS % STORED_VECTOR == 0 && WIDTH % STORED_VECTOR == 0;

// Begins to copy rows `first` to `first + valid` and columns from `column` on to a tile of shared
// memory whose rows are STRIDE elements apart. What lies outside the array, which is WIDTH columns
// wide, becomes 0. The block works together: each thread calls `finish_rows` with the same
// arguments, and then comes a barrier.
//
// Until it is finished, a vector of elements that are stored narrower than the accumulator's type
// lies at the beginning of the place that it will take. What cannot be copied by vectors is left to
// `finish_rows`.
template <int ROWS, int COLUMNS, int STRIDE, int WIDTH>
__device__ __forceinline__ void begin_rows(accum_t* tile_smem, const Rows& from, long long first,
                                           int valid, int column) {
  if constexpr (BY_VECTORS<COLUMNS, WIDTH>) {
    if (!from.vectors) return;
    using Share = Shares<ROWS, COLUMNS>;
    const Share own;
#pragma unroll
    for (int c = 0; c < COLUMNS; c += Share::APART) {
      const int place = c + own.column;
      if (!Share::in_row(place)) break;
      const bool inside = column + place < WIDTH;
      const storage_t* source = from.data + (first + own.row) * from.row + column + place;
      accum_t* const target_smem = tile_smem + own.row * STRIDE + place;
#pragma unroll 8
      for (int step = 0; step < Share::STEPS; ++step) {
        if (!own.has(step)) break;
        ptx::cp_async(target_smem + step * Share::AT_ONCE * STRIDE, source,
                      inside && own.row + step * Share::AT_ONCE < valid);
        source += Share::AT_ONCE * from.row;
      }
    }
  }
}

// Widens the elements of 16 stored bytes where they lie. Returns whether they are finite (true
// without CHECK).
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

// Finishes what `begin_rows` began: the tile holds row_statistic of the accumulator's type. Returns
// whether all that this thread copied is finite (true without CHECK).
template <int ROWS, int COLUMNS, int STRIDE, int WIDTH, bool CHECK>
__device__ __forceinline__ bool finish_rows(accum_t* tile_smem, const Rows& from, long long first,
                                            int valid, int column) {
  bool finite = true;
  if constexpr (BY_VECTORS<COLUMNS, WIDTH>) {
    if (from.vectors) {
      using Share = Shares<ROWS, COLUMNS>;
      const Share own;
      ptx::cp_async_wait_all();
      if constexpr (CHECK || sizeof(storage_t) < sizeof(accum_t)) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c += Share::APART) {
          if (!Share::in_row(c + own.column)) break;
          accum_t* const target_smem = tile_smem + own.row * STRIDE + c + own.column;
#pragma unroll 2
          for (int step = 0; step < Share::STEPS; ++step) {
            if (!own.has(step)) break;
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

// Copies rows as `begin_rows` and `finish_rows` do.
template <int ROWS, int COLUMNS, int STRIDE, int WIDTH, bool CHECK = false>
__device__ __forceinline__ bool load_rows(accum_t* tile_smem, const Rows& from, long long first,
                                          int valid) {
  begin_rows<ROWS, COLUMNS, STRIDE, WIDTH>(tile_smem, from, first, valid, 0);
  return finish_rows<ROWS, COLUMNS, STRIDE, WIDTH, CHECK>(tile_smem, from, first, valid, 0);
}

// One number per row (lse, delta) of the accumulator's type.
struct RowStatistic {
  accum_t* data;
  long long row;
};

__device__ __forceinline__ RowStatistic row_statistic(const Operand& operand, const layout::Entry& entry,
                                           long long head) {
  return RowStatistic{
      reinterpret_cast<accum_t*>(operand.data) + layout::offset(operand, entry, head, false),
      operand.row};
}

}  // namespace memory
