// Rows of arrays, between global and shared memory: the twin of reference/memory.py.
#pragma once
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

// Copies rows `first` to `first + valid` and columns from `column` on to a tile of shared memory
// whose rows are STRIDE elements apart, as numbers of the accumulator's type. What lies outside
// the array, which is WIDTH columns wide, becomes 0. Returns whether all that this thread copied is
// finite (true without CHECK). The block works together; the caller places the barriers.
template <int ROWS, int COLUMNS, int STRIDE, int WIDTH, bool CHECK>
__device__ __forceinline__ bool load_rows(accum_t* tile_smem, const Rows& from, long long first,
                                          int valid, int column) {
  const storage_t* source = from.data + first * from.row;
  bool finite = true;
  if constexpr (COLUMNS % STORED_VECTOR == 0 && WIDTH % STORED_VECTOR == 0) {
    if (from.vectors) {
      constexpr int PER_ROW = COLUMNS / STORED_VECTOR;
      constexpr int STEPS = (ROWS * PER_ROW + THREADS - 1) / THREADS;
#pragma unroll 4
      for (int step = 0; step < STEPS; ++step) {
        const int n = step * THREADS + threadIdx.x;
        if (ROWS * PER_ROW % THREADS != 0 && n >= ROWS * PER_ROW) break;
        const int row = n / PER_ROW;
        const int c = n % PER_ROW * STORED_VECTOR;
        StoredVector stored = {};
        if (row < valid && column + c < WIDTH) {
          stored = *reinterpret_cast<const StoredVector*>(source + row * from.row + column + c);
        }
#pragma unroll
        for (int part = 0; part < STORED_VECTOR / VECTOR; ++part) {
          Vector wide;
#pragma unroll
          for (int x = 0; x < VECTOR; ++x) {
            wide.x[x] = number::widen(stored.x[part * VECTOR + x]);
            if constexpr (CHECK) finite = finite && number::is_finite(wide.x[x]);
          }
          *reinterpret_cast<Vector*>(tile_smem + row * STRIDE + c + part * VECTOR) = wide;
        }
      }
      return finite;
    }
  }
#pragma unroll 4
  for (int n = threadIdx.x; n < ROWS * COLUMNS; n += THREADS) {
    const int row = n / COLUMNS;
    const int c = n % COLUMNS;
    accum_t value = 0;
    if (row < valid && column + c < WIDTH) {
      value = number::widen(source[row * from.row + (column + c) * from.col]);
    }
    if constexpr (CHECK) finite = finite && number::is_finite(value);
    tile_smem[row * STRIDE + c] = value;
  }
  return finite;
}

// One number per row (lse, delta) of the accumulator's type.
struct Numbers {
  accum_t* data;
  long long row;
};

__device__ __forceinline__ Numbers numbers(const Operand& operand, const layout::Entry& entry,
                                           long long head) {
  return Numbers{
      reinterpret_cast<accum_t*>(operand.data) + layout::offset(operand, entry, head, false),
      operand.row};
}

}  // namespace memory
