// Products of float32 tiles by the four warps of a warpgroup together, as three products of split
// numbers: the twin of reference/cpu/microkernel.py and reference/cpu/accumulate.py for the tensor
// cores of compute capability 9.0.
//
// fragment_wide.cuh says how a number is split. Rows that pass by are split once a block, on their
// way through registers to shared memory: a tile there is one of large parts, and behind it one of
// small ones. Both are slabs of 32 numbers along the sum, each of rows of 128 bytes whose 16-byte
// piece c lies at c ^ (row % 8). So values lie transposed, a row for each column of theirs.
//
// Of 8 numbers along a sum, places 0 to 3 have the even ones, places 4 to 7 the odd ones: a thread
// has two neighbours of a left operand, which are what the instruction counts lane % 4 and 4 more.
#pragma once
#include "../sm80/fragment_wide.cuh"
#include "warpgroup.cuh"

namespace warpgroup_split {

using fragment::Split;

struct alignas(8) Pair {
  float x, y;
};

constexpr int SLAB = 32;       // numbers of a sum
constexpr int AT_ONCE = 64;    // columns of an output that are multiplied together
constexpr int STEPS_HELD = 2;  // steps of 8 numbers whose left operand registers hold

__device__ constexpr int columns_of(int width) { return matmul::round_up(width, AT_ONCE); }

// -- tiles to shared memory -----------------------------------------------------------------------

// Writes 8 numbers along the sum to a line, from piece `piece` on, as bytes; `apart` is how far the
// small parts lie behind. Where one cannot be split, `spoilt` becomes NaN.
__device__ __forceinline__ void put_unit(const float (&x)[8], char* line_smem, int piece, int apart,
                                         float& spoilt) {
  float sums[2];
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    ptx::Bytes16 large, small;
#pragma unroll
    for (int y = 0; y < 4; ++y) {
      const Split made = fragment::part(x[2 * y + odd]);
      large.x[y] = made.large;
      small.x[y] = made.small;
    }
    sums[odd] = (__uint_as_float(small.x[0]) + __uint_as_float(small.x[1])) +
                (__uint_as_float(small.x[2]) + __uint_as_float(small.x[3]));
    char* const piece_smem = line_smem + (piece ^ odd * 16);
    *reinterpret_cast<ptx::Bytes16*>(piece_smem) = large;
    *reinterpret_cast<ptx::Bytes16*>(piece_smem + apart) = small;
  }
  spoilt = fma(sums[0] + sums[1], 0.0f, spoilt);
}

// The units that a thread brings of ROWS keys of WIDTH columns. Four lanes read a line, and eight
// write to all banks.
template <int ROWS, int WIDTH>
struct Keys {
  static constexpr int SLAB_BYTES = ROWS * warpgroup::SLAB_ROW_BYTES;
  static constexpr int BYTES = ROWS * fragment::row_bytes(WIDTH);  // of large parts
  static constexpr int UNITS = BYTES / 32 / THREADS;
  static constexpr int IN_SLAB = 4 * ROWS / THREADS;  // of a thread's units
  static_assert(IN_SLAB * THREADS == 4 * ROWS, "every thread has as many");

  __device__ __forceinline__ static int row(int unit) {
    return threadIdx.x / 4 + unit % IN_SLAB * (THREADS / 4);
  }

  __device__ __forceinline__ static void load(float (&to)[8], int unit, const memory::Rows& from,
                                              long long first, int valid) {
    const int column = unit / IN_SLAB * SLAB + threadIdx.x % 4 * 8;
    const float* from_gmem = reinterpret_cast<const float*>(from.data) +
                             (first + row(unit)) * from.row + column * from.col;
    const bool exists = row(unit) < valid;
    if (from.vectors && column + 8 <= WIDTH) {
#pragma unroll
      for (int x = 0; x < 8; x += 4) {
        StoredVector piece = {};
        if (exists) piece = *reinterpret_cast<const StoredVector*>(from_gmem + x);
#pragma unroll
        for (int y = 0; y < 4; ++y) to[x + y] = piece.x[y];
      }
      return;
    }
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      to[x] = exists && column + x < WIDTH ? *from_gmem : 0.0f;
      from_gmem += from.col;
    }
  }
  __device__ __forceinline__ static void store(const float (&from)[8], int unit, char* tile_smem) {
    float unused = 0;
    const int piece = (2 * (threadIdx.x % 4) ^ row(0) % 8) << 4;
    put_unit(from, tile_smem + unit / IN_SLAB * SLAB_BYTES + row(unit) * warpgroup::SLAB_ROW_BYTES,
             piece, BYTES, unused);
  }
};

// The same of values: a unit is a column of 8 rows.
template <int ROWS, int WIDTH>
struct Values {
  static constexpr int COLUMNS = columns_of(WIDTH);
  static constexpr int SLAB_BYTES = COLUMNS * warpgroup::SLAB_ROW_BYTES;
  static constexpr int BYTES = ROWS / SLAB * SLAB_BYTES;  // of large parts
  static constexpr int UNITS = BYTES / 32 / THREADS;
  static constexpr int TOGETHER = THREADS / COLUMNS;  // of the four units in a line
  static_assert(UNITS * THREADS * 32 == BYTES && 4 % TOGETHER == 0, "every thread has as many");

  __device__ __forceinline__ static int column() { return threadIdx.x % COLUMNS; }

  __device__ __forceinline__ static void load(float (&to)[8], int unit, const memory::Rows& from,
                                              long long first, int valid) {
    const int row = threadIdx.x / COLUMNS * 8 + unit * TOGETHER * 8;
    const float* from_gmem =
        reinterpret_cast<const float*>(from.data) + (first + row) * from.row + column() * from.col;
    const int left = column() < WIDTH ? valid - row : 0;
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      to[x] = x < left ? *from_gmem : 0.0f;
      from_gmem += from.row;
    }
  }
  __device__ __forceinline__ static void store(const float (&from)[8], int unit, char* tile_smem,
                                               float& spoilt) {
    const int piece = (2 * (threadIdx.x / COLUMNS) ^ column() % 8) << 4;
    put_unit(from,
             tile_smem + unit * TOGETHER / 4 * SLAB_BYTES + column() * warpgroup::SLAB_ROW_BYTES,
             piece ^ unit * TOGETHER % 4 * 32, BYTES, spoilt);
  }
};

// -- products -------------------------------------------------------------------------------------

// Step `step` of 8 numbers of a tile's rows.
__device__ __forceinline__ warpgroup::SmemDesc at_step(warpgroup::SmemDesc tile, int slab_bytes,
                                                       int step) {
  return tile + (step / 4 * slab_bytes + step % 4 * 32) / 16;
}

// Products of 64 rows of the warpgroup, of which the warp's lie in shared memory as they came, and
// KEYS rows of a tile. Registers hold the former, split, where they have room: else they are split
// for each tile.
template <int WIDTH, int KEYS, bool HELD>
struct Scores {
  static constexpr int BYTES = fragment::row_bytes(WIDTH);
  static constexpr int DEPTH = matmul::round_up(WIDTH, 8 * STEPS_HELD) / 8;  // steps of 8 numbers
  static constexpr int STEPS = DEPTH / STEPS_HELD;

  const char* row_smem;
  int begin;
  unsigned int held[HELD ? DEPTH : 1][2][4];

  __device__ __forceinline__ explicit Scores(const char* rows_smem) {
    const int row = fragment::lane_row(), t = ptx::lane_index() % 4;
    row_smem = rows_smem + row * BYTES + t % 2 * 8;
    begin = (t / 2 ^ fragment::swizzle(row)) << 4;
  }
  // Splits step `step` of the rows.
  __device__ __forceinline__ void load(unsigned int (&to)[2][4], int step) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* const place = row_smem + 8 * r * BYTES + step / 4 * 128 + (begin ^ step % 4 * 32);
      const Pair pair = *reinterpret_cast<const Pair*>(place);
      const Split even = fragment::part(pair.x), odd = fragment::part(pair.y);
      to[0][r] = even.large;
      to[0][r + 2] = odd.large;
      to[1][r] = even.small;
      to[1][r + 2] = odd.small;
    }
  }
  __device__ __forceinline__ void hold() {
    if constexpr (HELD) {
#pragma unroll
      for (int step = 0; step < DEPTH; ++step) load(held[step], step);
    }
  }

  // c += the products of a step, or = where it is the first. Small parts have a sum of their own.
  template <int COLUMNS>
  __device__ __forceinline__ static void begin_step(float (&c)[2][COLUMNS],
                                                    float (&small)[2][COLUMNS],
                                                    const unsigned int (&left)[2][4],
                                                    warpgroup::SmemDesc b, int step) {
    const warpgroup::SmemDesc large = at_step(b, KEYS * warpgroup::SLAB_ROW_BYTES, step);
    ptx::wgmma_rs_tf32(small, left[1], warpgroup::whole(large), step > 0);
    ptx::wgmma_rs_tf32(small, left[0], warpgroup::whole(large + KEYS * BYTES / 16), true);
    ptx::wgmma_rs_tf32(c, left[0], warpgroup::whole(large), step > 0);
  }

  // c = the rows times b^T. When half of it was begun, comes what is to be done between.
  template <int COLUMNS, class Between>
  __device__ __forceinline__ void multiply(float (&c)[2][COLUMNS], warpgroup::SmemDesc b,
                                           const Between& between) const {
    float small[2][COLUMNS];
    if constexpr (HELD) {
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < DEPTH; ++step) begin_step(c, small, held[step], b, step);
      ptx::wgmma_commit();
      between();
    } else {
#pragma unroll
      for (int n = 0; n < STEPS; ++n) {
        if (n >= 2) ptx::wgmma_wait<1>();  // whose left operand was where this one's is to be
        unsigned int left[STEPS_HELD][2][4];
#pragma unroll
        for (int x = 0; x < STEPS_HELD; ++x) load(left[x], n * STEPS_HELD + x);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < STEPS_HELD; ++x) {
          begin_step(c, small, left[x], b, n * STEPS_HELD + x);
        }
        ptx::wgmma_commit();
        if (n == STEPS / 2) between();
      }
    }
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(small);
    ptx::fence_accumulator(c);
    matmul::add(c, small);
  }
};

// Whether a number of the warp's is NaN.
template <int COLUMNS>
__device__ __forceinline__ bool any_nan(const float (&c)[2][COLUMNS]) {
  float sums[4] = {};
#pragma unroll
  for (int n = 0; n < 2 * COLUMNS; ++n) {
    sums[n % 4] = fma(c[n / COLUMNS][n % COLUMNS], 0.0f, sums[n % 4]);
  }
  const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return ptx::any_lane(sum != sum);
}

// A tile's weights as left operand, in two parts.
template <int COLUMNS>
struct Weights {
  unsigned int large[2][COLUMNS], small[2][COLUMNS];

  __device__ __forceinline__ explicit Weights(const float (&p)[2][COLUMNS]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const Split made = fragment::part(p[r][n]);
        large[r][n] = made.large;
        small[r][n] = made.small;
      }
    }
  }
};

// c += a b for weights a and values b of WIDTH columns. Each sum over a tile begins anew, with the
// smaller products, and is then added with rounding. After each of the parts of 64 columns was
// begun comes what is to be done between.
template <int WIDTH, int COLUMNS, int COLUMNS_V, class Between>
__device__ __forceinline__ void multiply_add(float (&c)[2][COLUMNS_V], const Weights<COLUMNS>& a,
                                             warpgroup::SmemDesc b, const Between& between) {
  using Tile = Values<4 * COLUMNS, WIDTH>;
#pragma unroll
  for (int part = 0; part < COLUMNS_V / 16; ++part) {
    float sums[2][16];
    const warpgroup::SmemDesc own = b + part * (AT_ONCE * warpgroup::SLAB_ROW_BYTES / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int term = 0; term < 3; ++term) {
#pragma unroll
      for (int k = 0; k < COLUMNS; k += 2) {
        const unsigned int (&from)[2][COLUMNS] = term == 0 ? a.small : a.large;
        const unsigned int left[4] = {from[0][k], from[1][k], from[0][k + 1], from[1][k + 1]};
        const warpgroup::SmemDesc right =
            at_step(own, Tile::SLAB_BYTES, k / 2) + (term == 1 ? Tile::BYTES / 16 : 0);
        ptx::wgmma_rs_tf32(sums, left, warpgroup::whole(right), term > 0 || k > 0);
      }
    }
    ptx::wgmma_commit();
    between(part);
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(sums);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < 16; ++n) c[r][16 * part + n] += sums[r][n];
    }
  }
}

// -- numbers that cannot be split -----------------------------------------------------------------

// Computes those elements of c = a b^T again that are NaN, as fragment::multiply_nan does, from the
// `valid` rows of b from row `first` on as they lie in global memory.
template <int WIDTH, int COLUMNS>
__device__ __forceinline__ void multiply_nan(float (&c)[2][COLUMNS], const char* a_smem,
                                             const memory::Rows& b, long long first, int valid) {
#pragma unroll 1
  for (int n = 0; n < COLUMNS; ++n) {
    const int row = 8 * (n / 2) + fragment::lane_column() + n % 2;
    const float* const row_gmem = reinterpret_cast<const float*>(b.data) + (first + row) * b.row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (c[r][0] == c[r][0] || row >= valid) continue;
      float sum = 0;
#pragma unroll 1
      for (int k = 0; k < WIDTH; ++k) {
        const int at =
            fragment::element_offset<fragment::row_bytes(WIDTH)>(8 * r + fragment::lane_row(), k);
        sum += *reinterpret_cast<const float*>(a_smem + at) * row_gmem[k * b.col];
      }
      c[r][0] = sum;
    }
    fragment::rotate<1>(c);
  }
}

// Whether a number's parts are finite.
__device__ __forceinline__ bool splits(float x) {
  return number::is_finite(__uint_as_float(fragment::part(x).small));
}

// c += a b for those elements of b only that cannot be split, without pairs that take no part, as
// fragment::add_nonfinite does, from b in global memory.
template <int WIDTH, int COLUMNS, int COLUMNS_V>
__device__ __forceinline__ void add_nonfinite(float (&c)[2][COLUMNS_V], Weights<COLUMNS>& a,
                                              const memory::Rows& b, long long first, int valid) {
#pragma unroll 1
  for (int k = 0; k < 4 * COLUMNS; ++k) {
    float weight[2];
    bool seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lane = ptx::lane_index() / 4 * 4 + k % 8 / 2;
      const unsigned int large = ptx::shuffle(k % 2 == 0 ? a.large[r][0] : a.large[r][1], lane);
      const unsigned int small = ptx::shuffle(k % 2 == 0 ? a.small[r][0] : a.small[r][1], lane);
      weight[r] = __uint_as_float(large) + __uint_as_float(small);
      // The large part of a NaN may be any number.
      seen[r] = matmul::is_unmasked(__uint_as_float(large)) || weight[r] != weight[r];
    }
#pragma unroll 1
    for (int n = 0; n < COLUMNS_V; ++n) {
      const int column = 8 * (n / 2) + fragment::lane_column() + n % 2;
      if (k < valid && column < WIDTH) {
        const float value =
            reinterpret_cast<const float*>(b.data)[(first + k) * b.row + column * b.col];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (!splits(value) && seen[r]) c[r][0] += weight[r] * value;
        }
      }
      fragment::rotate<1>(c);
    }
    if (k % 8 == 7) {
      fragment::rotate<2>(a.large);
      fragment::rotate<2>(a.small);
    }
  }
}

// Makes 0 of numbers in a tile that could not be split, of BYTES bytes for each part.
template <int BYTES>
__device__ __forceinline__ void clear_nonfinite(char* tile_smem) {
#pragma unroll 1
  for (int n = threadIdx.x; n < BYTES / 4; n += THREADS) {
    float* const large = reinterpret_cast<float*>(tile_smem) + n;
    float* const small = reinterpret_cast<float*>(tile_smem + BYTES) + n;
    if (!number::is_finite(*small)) *large = *small = 0.0f;
  }
}

// -- results --------------------------------------------------------------------------------------

// Writes a warp's rows of a result, times a factor each, to shared memory that is the warp's own.
template <int WIDTH, int COLUMNS>
__device__ __forceinline__ void put_rows(const float (&result)[2][COLUMNS],
                                         const float (&factor)[2], char* rows_smem) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      const int row = 8 * r + fragment::lane_row(), column = 4 * n + fragment::lane_column();
      if (4 * n >= fragment::whole_columns(WIDTH)) break;
      const int at = fragment::element_offset<fragment::row_bytes(WIDTH)>(row, column);
      *reinterpret_cast<Pair*>(rows_smem + at) =
          Pair{result[r][n] * factor[r], result[r][n + 1] * factor[r]};
    }
  }
}

}  // namespace warpgroup_split
