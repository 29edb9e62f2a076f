// Products of float32 tiles by wgmma, as three TF32 products of split numbers: the twin of
// reference/cpu/microkernel.py and reference/cpu/accumulate.py for the tensor cores of compute
// capability 9.0.
//
// fragment_wide.cuh says how a number is split into a large and a small part. Tiles of k and v are
// split once for the block, on their way through registers to shared memory: there, a tile of small
// parts follows each tile of large parts. For TF32, wgmma takes both operands with the dimension of
// the sum contiguous, so v is stored transposed, with a row for each of its columns. Both tiles are
// slabs of 32 numbers along the sum, with rows of 128 bytes whose 16-byte piece c lies at
// c ^ (row % 8).
//
// Along a sum, 8 numbers lie in the order 0 2 4 6 1 3 5 7. So the two columns of the left operand
// that the instruction takes from a thread, lane % 4 and 4 more, are two neighbours in memory.
#pragma once
#include "../warp/fragment_wide.cuh"
#include "warpgroup.cuh"

namespace warpgroup_tf32x3 {

using fragment::Split;

struct alignas(8) Pair {
  float x, y;
};

constexpr int SLAB = 32;            // numbers of a sum
constexpr int OUTPUT_COLUMNS = 64;  // of one wgmma for the output
constexpr int STEPS_LOADED = 2;     // steps of 8 numbers, whose left operands are loaded together

__device__ constexpr int columns_of(int width) { return matmul::round_up(width, OUTPUT_COLUMNS); }

// -- tiles to shared memory -----------------------------------------------------------------------

// Splits 8 numbers along the sum and writes them to a row, at byte `piece` and one piece further.
// The small parts follow `stride` bytes later. `nonfinite` becomes NaN if one of them cannot be
// split.
__device__ __forceinline__ void put_unit(const float (&x)[8], char* row_smem, int piece, int stride,
                                         float& nonfinite) {
  float sums[2];
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    ptx::Bytes16 large, small;
#pragma unroll
    for (int y = 0; y < 4; ++y) {
      const Split split = fragment::part(x[2 * y + odd]);
      large.x[y] = split.large;
      small.x[y] = split.small;
    }
    sums[odd] = (__uint_as_float(small.x[0]) + __uint_as_float(small.x[1])) +
                (__uint_as_float(small.x[2]) + __uint_as_float(small.x[3]));
    char* const piece_smem = row_smem + (piece ^ odd * 16);
    *reinterpret_cast<ptx::Bytes16*>(piece_smem) = large;
    *reinterpret_cast<ptx::Bytes16*>(piece_smem + stride) = small;
  }
  nonfinite = fma(sums[0] + sums[1], 0.0f, nonfinite);
}

// A thread's share of a tile of ROWS keys of WIDTH columns, in units of 8 numbers of a row. Four
// lanes read 128 adjacent bytes, and the writes of eight lanes meet all banks.
template <int ROWS, int WIDTH>
struct Keys {
  static constexpr int SLAB_BYTES = ROWS * warpgroup::SLAB_ROW_BYTES;
  static constexpr int BYTES = ROWS * fragment::row_bytes(WIDTH);  // of large parts
  static constexpr int UNITS = BYTES / 32 / THREADS;
  static constexpr int IN_SLAB = 4 * ROWS / THREADS;  // a thread's units in one slab
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

// The same for a tile of v: a unit is 8 rows of one column.
template <int ROWS, int WIDTH>
struct Values {
  static constexpr int COLUMNS = columns_of(WIDTH);
  static constexpr int SLAB_BYTES = COLUMNS * warpgroup::SLAB_ROW_BYTES;
  static constexpr int BYTES = ROWS / SLAB * SLAB_BYTES;  // of large parts
  static constexpr int UNITS = BYTES / 32 / THREADS;
  static constexpr int UNITS_AT_ONCE = THREADS / COLUMNS;  // in one row of a slab
  static_assert(UNITS * THREADS * 32 == BYTES && 4 % UNITS_AT_ONCE == 0,
                "every thread has as many");

  __device__ __forceinline__ static int column() { return threadIdx.x % COLUMNS; }

  __device__ __forceinline__ static void load(float (&to)[8], int unit, const memory::Rows& from,
                                              long long first, int valid) {
    const int row = threadIdx.x / COLUMNS * 8 + unit * UNITS_AT_ONCE * 8;
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
                                               float& nonfinite) {
    const int piece = (2 * (threadIdx.x / COLUMNS) ^ column() % 8) << 4;
    put_unit(
        from,
        tile_smem + unit * UNITS_AT_ONCE / 4 * SLAB_BYTES + column() * warpgroup::SLAB_ROW_BYTES,
        piece ^ unit * UNITS_AT_ONCE % 4 * 32, BYTES, nonfinite);
  }
};

// -- products -------------------------------------------------------------------------------------

// Where step `step` of 8 numbers begins in a tile.
__device__ __forceinline__ warpgroup::SmemDesc at_step(warpgroup::SmemDesc tile, int slab_bytes,
                                                       int step) {
  return tile + (step / 4 * slab_bytes + step % 4 * 32) / 16;
}

// Products of 64 queries of a warpgroup and a tile of KEYS keys. The warp's queries lie unsplit in
// shared memory. If HELD, registers hold them split; else they are split anew for each tile.
template <int WIDTH, int KEYS, bool HELD>
struct Scores {
  static constexpr int BYTES = fragment::row_bytes(WIDTH);
  static constexpr int DEPTH = matmul::round_up(WIDTH, 8 * STEPS_LOADED) / 8;  // steps of 8
  static constexpr int STEPS = DEPTH / STEPS_LOADED;

  const char* row_smem;
  int begin;
  unsigned int held[HELD ? DEPTH : 1][2][4];

  __device__ __forceinline__ explicit Scores(const char* rows_smem) {
    const int row = fragment::lane_row(), t = ptx::lane_index() % 4;
    row_smem = rows_smem + row * BYTES + t % 2 * 8;
    begin = (t / 2 ^ fragment::swizzle(row)) << 4;
  }
  // Loads and splits step `step` of the queries.
  __device__ __forceinline__ void load(unsigned int (&to)[2][4], int step) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* const pair_smem =
          row_smem + 8 * r * BYTES + step / 4 * 128 + (begin ^ step % 4 * 32);
      const Pair pair = *reinterpret_cast<const Pair*>(pair_smem);
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

  // Issues the products of a step: c += its large parts, small += those with a small part. The
  // first step overwrites both.
  template <int COLUMNS>
  __device__ __forceinline__ static void issue_step(float (&c)[2][COLUMNS],
                                                    float (&small)[2][COLUMNS],
                                                    const unsigned int (&left)[2][4],
                                                    warpgroup::SmemDesc b, int step) {
    const warpgroup::SmemDesc large = at_step(b, KEYS * warpgroup::SLAB_ROW_BYTES, step);
    ptx::wgmma_rs_tf32(small, left[1], warpgroup::wgmma_desc(large), step > 0);
    ptx::wgmma_rs_tf32(small, left[0], warpgroup::wgmma_desc(large + KEYS * BYTES / 16), true);
    ptx::wgmma_rs_tf32(c, left[0], warpgroup::wgmma_desc(large), step > 0);
  }

  // c = the queries times b^T. `beside()` runs while the tensor cores work: when half of the
  // products were issued, or all if HELD.
  template <int COLUMNS, class Beside>
  __device__ __forceinline__ void multiply(float (&c)[2][COLUMNS], warpgroup::SmemDesc b,
                                           const Beside& beside) const {
    float small[2][COLUMNS];
    if constexpr (HELD) {
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < DEPTH; ++step) issue_step(c, small, held[step], b, step);
      ptx::wgmma_commit();
      beside();
    } else {
#pragma unroll
      for (int n = 0; n < STEPS; ++n) {
        if (n >= 2) ptx::wgmma_wait<1>();  // for the registers of the left operand
        unsigned int left[STEPS_LOADED][2][4];
#pragma unroll
        for (int x = 0; x < STEPS_LOADED; ++x) load(left[x], n * STEPS_LOADED + x);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < STEPS_LOADED; ++x) {
          issue_step(c, small, left[x], b, n * STEPS_LOADED + x);
        }
        ptx::wgmma_commit();
        if (n == STEPS / 2) beside();
      }
    }
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(small);
    ptx::fence_accumulator(c);
    matmul::add(c, small);
  }
};

// Whether any element of the warp is NaN.
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

// The weights of a tile as left operand, split.
template <int COLUMNS>
struct Weights {
  unsigned int large[2][COLUMNS], small[2][COLUMNS];

  __device__ __forceinline__ explicit Weights(const float (&p)[2][COLUMNS]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const Split split = fragment::part(p[r][n]);
        large[r][n] = split.large;
        small[r][n] = split.small;
      }
    }
  }
};

// c += a b for weights a and a tile b of v, WIDTH columns wide, in parts of 64 columns. Each sum
// over the tile begins at 0, with the smaller products, and is then added with rounding, because
// tensor cores truncate. `beside(part)` runs when the products of a part were issued.
template <int WIDTH, int COLUMNS, int COLUMNS_V, class Beside>
__device__ __forceinline__ void multiply_add(float (&c)[2][COLUMNS_V], const Weights<COLUMNS>& a,
                                             warpgroup::SmemDesc b, const Beside& beside) {
  using Tile = Values<4 * COLUMNS, WIDTH>;
#pragma unroll
  for (int part = 0; part < COLUMNS_V / 16; ++part) {
    float sums[2][16];
    const warpgroup::SmemDesc columns =
        b + part * (OUTPUT_COLUMNS * warpgroup::SLAB_ROW_BYTES / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int term = 0; term < 3; ++term) {
#pragma unroll
      for (int k = 0; k < COLUMNS; k += 2) {
        const unsigned int (&from)[2][COLUMNS] = term == 0 ? a.small : a.large;
        const unsigned int left[4] = {from[0][k], from[1][k], from[0][k + 1], from[1][k + 1]};
        const warpgroup::SmemDesc right =
            at_step(columns, Tile::SLAB_BYTES, k / 2) + (term == 1 ? Tile::BYTES / 16 : 0);
        ptx::wgmma_rs_tf32(sums, left, warpgroup::wgmma_desc(right), term > 0 || k > 0);
      }
    }
    ptx::wgmma_commit();
    beside(part);
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
// rows of b in global memory: `valid` ones from row `first` on.
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

// Whether a number can be split: its parts are finite then.
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

// Sets to 0 the numbers of a tile that cannot be split; each of its parts has BYTES bytes.
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

// Multiplies each row of a warp's result by a factor, and writes it to shared memory of the warp.
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

}  // namespace warpgroup_tf32x3
