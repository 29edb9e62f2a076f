// Rotation of rows by their positions: the twin of reference/cpu/rope.py.
//
// The first columns of a row are pairs, (j, j + pairs) or (2 j, 2 j + 1) if interleaved; pair j is
// rotated by the angle of its position. The other columns are copied. A warp works on a row, 16
// bytes a lane where rows allow it.
#pragma once
#include "../ptx/warp.cuh"
#include "layout.cuh"

namespace rotary {

// A row in global memory.
struct Row {
  storage_t* data;
  long long col;

  // Whether its elements are neighbours that begin at a multiple of 16 bytes.
  __device__ __forceinline__ bool vectors() const {
    return col == 1 && reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  }
};

// Row `row` of a head of an entry.
__device__ __forceinline__ Row row_of(const Operand& operand, long long entry, long long head,
                                      long long row) {
  storage_t* data = reinterpret_cast<storage_t*>(operand.data);
  const long long lead = entry * operand.lead[MAX_LEAD - 1];
  return Row{data + lead + head * operand.head + row * operand.row, operand.col};
}

// The angles of a position: numbers of accum_t if they are wide, else of float32.
struct Angles {
  const char* cos;
  const char* sin;
  long long cos_col;
  long long sin_col;
  int pairs;
  bool interleaved;
  bool inverse;
  bool wide;
};

// Of rows that are copied.
__device__ __forceinline__ Angles none() { return Angles{}; }

// Positions come from the device unchecked, so they are clamped to the arrays.
template <typename P>
__device__ __forceinline__ Angles angles(const P& p, long long position, bool inverse) {
  const long long row = layout::clamp(position, 0, p.rotary_rows - 1);
  const bool wide = sizeof(accum_t) == sizeof(double) && p.kind_angles == KIND_FLOAT64;
  const long long step = wide ? sizeof(double) : sizeof(float);
  return Angles{reinterpret_cast<const char*>(p.cos.data) + row * p.cos.row * step,
                reinterpret_cast<const char*>(p.sin.data) + row * p.sin.row * step,
                p.cos.col,
                p.sin.col,
                p.pairs,
                p.interleaved != 0,
                inverse,
                wide};
}

// Number n of a row of angles.
__device__ __forceinline__ accum_t number_of(const char* row, bool wide, long long n) {
  if constexpr (sizeof(accum_t) == sizeof(double)) {
    if (wide) return reinterpret_cast<const accum_t*>(row)[n];
  }
  return reinterpret_cast<const float*>(row)[n];
}

// Loads COUNT numbers from number `first` on.
template <int COUNT>
__device__ __forceinline__ void load(const char* row, long long col, bool wide, int first,
                                     accum_t (&values)[COUNT]) {
  constexpr int WIDTH = COUNT < 4 ? COUNT : 4;
  struct alignas(WIDTH * sizeof(float)) Chunk {
    float x[WIDTH];
  };
  const float* from = reinterpret_cast<const float*>(row) + first * col;
  if (!wide && col == 1 && reinterpret_cast<unsigned long long>(from) % sizeof(Chunk) == 0) {
#pragma unroll
    for (int n = 0; n < COUNT; n += WIDTH) {
      const Chunk chunk = *reinterpret_cast<const Chunk*>(from + n);
#pragma unroll
      for (int x = 0; x < WIDTH; ++x) values[n + x] = chunk.x[x];
    }
  } else {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) values[n] = number_of(row, wide, (first + n) * col);
  }
}

// Rotates a pair.
__device__ __forceinline__ void rotate(storage_t& first, storage_t& second, accum_t cos,
                                       accum_t sin, bool inverse) {
  const accum_t x = number::widen(first), y = number::widen(second);
  const accum_t s = inverse ? -sin : sin;
  number::narrow(x * cos - y * s, &first);
  number::narrow(y * cos + x * s, &second);
}

__device__ __forceinline__ StoredVector vector(const Row& row, int column) {
  return *reinterpret_cast<const StoredVector*>(row.data + column);
}

__device__ __forceinline__ void store(const Row& row, int column, const StoredVector& values) {
  *reinterpret_cast<StoredVector*>(row.data + column) = values;
}

// Copies a row whose elements and pairs come in whole vectors.
__device__ __forceinline__ void copy_vectors(const Row& to, const Row& from, int columns,
                                             const Angles& by) {
  constexpr int STEP = ptx::WARP_SIZE * STORED_VECTOR;
  const int lane_column = ptx::lane_index() * STORED_VECTOR, rotated = 2 * by.pairs;
  if (by.interleaved) {
    constexpr int PAIRS = STORED_VECTOR / 2;
#pragma unroll 1
    for (int c = lane_column; c < rotated; c += STEP) {
      StoredVector values = vector(from, c);
      accum_t cos[PAIRS], sin[PAIRS];
      load(by.cos, by.cos_col, by.wide, c / 2, cos);
      load(by.sin, by.sin_col, by.wide, c / 2, sin);
#pragma unroll
      for (int n = 0; n < PAIRS; ++n) {
        rotate(values.x[2 * n], values.x[2 * n + 1], cos[n], sin[n], by.inverse);
      }
      store(to, c, values);
    }
  } else {
#pragma unroll 1
    for (int c = lane_column; c < by.pairs; c += STEP) {
      StoredVector first = vector(from, c), second = vector(from, c + by.pairs);
      accum_t cos[STORED_VECTOR], sin[STORED_VECTOR];
      load(by.cos, by.cos_col, by.wide, c, cos);
      load(by.sin, by.sin_col, by.wide, c, sin);
#pragma unroll
      for (int n = 0; n < STORED_VECTOR; ++n) {
        rotate(first.x[n], second.x[n], cos[n], sin[n], by.inverse);
      }
      store(to, c, first);
      store(to, c + by.pairs, second);
    }
  }
#pragma unroll 1
  for (int c = rotated + lane_column; c < columns; c += STEP) store(to, c, vector(from, c));
}

// Copies a row with its first columns rotated. All lanes of the warp call it.
__device__ __forceinline__ void copy_row(const Row& to, const Row& from, int columns,
                                         const Angles& by) {
  const int rotated = 2 * by.pairs, whole = by.interleaved ? rotated : by.pairs;
  if (to.vectors() && from.vectors() && columns % STORED_VECTOR == 0 &&
      whole % STORED_VECTOR == 0) {
    copy_vectors(to, from, columns, by);
    return;
  }
#pragma unroll 1
  for (int n = ptx::lane_index(); n < by.pairs; n += ptx::WARP_SIZE) {
    const int c = by.interleaved ? 2 * n : n, d = by.interleaved ? c + 1 : n + by.pairs;
    storage_t first = from.data[c * from.col], second = from.data[d * from.col];
    rotate(first, second, number_of(by.cos, by.wide, n * by.cos_col),
           number_of(by.sin, by.wide, n * by.sin_col), by.inverse);
    to.data[c * to.col] = first;
    to.data[d * to.col] = second;
  }
#pragma unroll 1
  for (int c = rotated + ptx::lane_index(); c < columns; c += ptx::WARP_SIZE) {
    to.data[c * to.col] = from.data[c * from.col];
  }
}

}  // namespace rotary
