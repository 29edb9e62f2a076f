// Tiles in shared memory that wgmma reads by itself: how they get there without TMA, how non-finite
// values are removed before, and how results get back to global memory. The twin of
// reference/cpu/accumulate.py where values are not finite.
#pragma once
#include "../ptx/pair.cuh"
#include "../warp/fragment.cuh"
#include "warpgroup.cuh"

namespace warpgroup_rows {

// Issues the asynchronous copies (cp.async) of a tile of ROWS rows of an array that is WIDTH
// columns wide, slab by slab, by all threads of the block, as fragment::begin_rows does.
template <int ROWS, int WIDTH, int COLUMN = 0>
__device__ __forceinline__ void begin_rows(char* tile_smem, const memory::Rows& from,
                                           long long first, int valid) {
  constexpr int LEFT = WIDTH - COLUMN;
  constexpr int COLUMNS = LEFT < warpgroup::SLAB_COLUMNS ? LEFT : warpgroup::SLAB_COLUMNS;
  const memory::Rows slab{from.data + COLUMN * from.col, from.row, from.col, from.vectors};
  fragment::begin_rows<ROWS, COLUMNS, warpgroup::SLAB_ROW_BYTES>(
      tile_smem + COLUMN / warpgroup::SLAB_COLUMNS * ROWS * warpgroup::SLAB_ROW_BYTES, slab, first,
      valid);
  if constexpr (LEFT > COLUMNS) {
    begin_rows<ROWS, WIDTH, COLUMN + COLUMNS>(tile_smem, from, first, valid);
  }
}

// The same for BLOCK_Q rows, in one tile for each warpgroup.
template <int WIDTH>
__device__ __forceinline__ void begin_queries(char* tile_smem, const memory::Rows& from,
                                              long long first, int valid) {
#pragma unroll
  for (int row = 0; row < BLOCK_Q; row += warpgroup::WARPGROUP_ROWS) {
    begin_rows<warpgroup::WARPGROUP_ROWS, WIDTH>(tile_smem + row * fragment::row_bytes(WIDTH), from,
                                                 first + row, valid - row);
  }
}

// sum + 0 x for two elements at a time: NaN if x is not finite, or the sum was NaN.
__device__ __forceinline__ unsigned int zero_times(unsigned int x, unsigned int sum) {
  if constexpr (IS_FLOAT16) {
    return ptx::zero_times_halves(x, sum);
  } else if constexpr (IS_BFLOAT16) {
    return ptx::zero_times_bfloats(x, sum);
  } else {
    unknown_element();
  }
}

// Multiplies a tile of BYTES bytes by 0 if `scale` is 0, else by -1; by THREAD_COUNT threads, of
// which this one is number `thread`.
template <int BYTES, int THREAD_COUNT>
__device__ __forceinline__ void apply_sign(char* tile_smem, int thread, float scale) {
#pragma unroll 1
  for (int n = thread; n < BYTES / 16; n += THREAD_COUNT) {
    ptx::Bytes16& piece = reinterpret_cast<ptx::Bytes16*>(tile_smem)[n];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      piece.x[x] = scale == 0 ? zero_times(piece.x[x], 0) : piece.x[x] ^ fragment::SIGNS;
    }
  }
}

// Whether this thread's 16-byte pieces of a tile of BYTES bytes are finite: every THREAD_COUNT-th
// one from piece `thread` on.
template <int BYTES, int THREAD_COUNT>
__device__ __forceinline__ bool finite_rows(const char* tile_smem, int thread) {
  unsigned int sum[4] = {0, 0, 0, 0};  // 0, or NaN
#pragma unroll 4
  for (int n = thread; n < BYTES / 16; n += THREAD_COUNT) {
    const ptx::Bytes16& piece = reinterpret_cast<const ptx::Bytes16*>(tile_smem)[n];
#pragma unroll
    for (int x = 0; x < 4; ++x) sum[x] = zero_times(piece.x[x], sum[x]);
  }
  return ((sum[0] | sum[1] | sum[2] | sum[3]) & ~fragment::SIGNS) == 0;
}

// Sets to 0 what is not finite in the same pieces.
template <int BYTES, int THREAD_COUNT>
__device__ __forceinline__ void clear_nonfinite(char* tile_smem, int thread) {
#pragma unroll 1
  for (int n = thread; n < BYTES / 16; n += THREAD_COUNT) {
    ptx::Bytes16& piece = reinterpret_cast<ptx::Bytes16*>(tile_smem)[n];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const unsigned int carried = (piece.x[x] & fragment::EXPONENTS) + fragment::LAST;
      if (carried & 0x8000u) piece.x[x] &= 0xffff0000u;
      if (carried & 0x80000000u) piece.x[x] &= 0x0000ffffu;
    }
  }
}

// c += a b for those elements of b only that are NaN or infinite, without pairs that take no part,
// as fragment::add_nonfinite does. The tile b has 8 DEPTH rows. `takes_part(r, column, weight)`
// says whether a pair of this thread takes part.
template <int DEPTH, int COLUMNS, class TakesPart>
__device__ __forceinline__ void add_nonfinite(float (&c)[2][COLUMNS], unsigned int (&a)[2][DEPTH],
                                              const char* tile_smem, const TakesPart& takes_part) {
#pragma unroll 1
  for (int k = 0; k < DEPTH; ++k) {
#pragma unroll 1
    for (int x = 0; x < 8; ++x) {
      const int from = ptx::lane_index() / 4 * 4 + x / 2;
      storage_t weight[2];
      bool seen[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned int half = x % 2 == 0 ? a[r][0] & 0xffff : a[r][0] >> 16;
        const bool mine = takes_part(r, 2 * k + x % 2, static_cast<storage_t>(half));
        const unsigned int pair = ptx::shuffle(half | (mine ? 0x10000u : 0), from);
        weight[r] = static_cast<storage_t>(pair);
        seen[r] = pair >= 0x10000u;
      }
      const char* const row_smem = tile_smem + (8 * k + x) * warpgroup::SLAB_ROW_BYTES;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const int slab = n / 16 * (8 * DEPTH * warpgroup::SLAB_ROW_BYTES), piece = n / 2 % 8 ^ x;
        const int at = slab + piece * 16 + 2 * (fragment::lane_column() + n % 2);
        const float value = number::widen(*reinterpret_cast<const storage_t*>(row_smem + at));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (seen[r] && !number::is_finite(value)) c[r][n] += number::widen(weight[r]) * value;
        }
      }
    }
    fragment::rotate<1>(a);
  }
}

// -- results --------------------------------------------------------------------------------------

// Four elements of the storage type, as two words.
struct alignas(8) Four {
  unsigned int word[2];
};

// Two neighbouring lanes swap halves of 16 columns, from word n on, so that each gets four adjacent
// columns to write. They begin at `first_column`.
template <int WORDS>
__device__ __forceinline__ Four swap_halves(const unsigned int (&row)[WORDS], int n) {
  const bool second = ptx::lane_index() % 2 != 0;
  const unsigned int received = ptx::shuffle_xor(second ? row[n] : row[n + 1], 1);
  return Four{{second ? received : row[n], second ? row[n + 1] : received}};
}
__device__ __forceinline__ int first_column() {
  return ptx::lane_index() % 2 * 8 + ptx::lane_index() % 4 / 2 * 4;
}

// Multiplies each row of a result by a factor, and rounds it to words of the storage type.
template <int COLUMNS>
__device__ __forceinline__ void narrow_rows(const float (&result)[2][COLUMNS],
                                            const float (&factor)[2],
                                            unsigned int (&words)[2][COLUMNS / 2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      words[r][n / 2] = number::narrow_pair(result[r][n] * factor[r], result[r][n + 1] * factor[r]);
    }
  }
}

// Waits until the warp's TMA stores have read shared memory.
__device__ __forceinline__ void tma_store_wait() {
  if (ptx::lane_index() == 0) ptx::tma_store_wait_read();
  __syncwarp();  // the warp's rows in shared memory, which were read
}

// Stores a result of WIDTH columns to an array by TMA: a warp writes its 16 rows to shared memory
// at `warp_address`, in slabs of 64 columns that begin every SLAB_BYTES bytes, and one lane issues
// the stores of these. The words are those from column `column` on; slabs before column `begin`
// belong to another warp, and are left out. `first` is the warp's first row. Rows and columns
// beyond the array are not written.
template <int WIDTH, int SLAB_BYTES, int WORDS>
__device__ __forceinline__ void tma_store_rows(const unsigned int (&words)[2][WORDS],
                                               unsigned int warp_address, const ptx::TensorMap& to,
                                               const warpgroup::TmaHead& head, int first,
                                               int column = 0, int begin = 0) {
  constexpr int SLAB_WORDS = warpgroup::SLAB_COLUMNS / 8;
  const int lane = ptx::lane_index();
  const unsigned int row_address = warp_address + lane % 16 * warpgroup::SLAB_ROW_BYTES;
#pragma unroll
  for (int n = 0; n < WORDS; n += 2) {
    if (column + n / SLAB_WORDS * warpgroup::SLAB_COLUMNS < begin) continue;
    const unsigned int from[4] = {words[0][n], words[1][n], words[0][n + 1], words[1][n + 1]};
    const int piece = (n % SLAB_WORDS + lane / 16) ^ lane % 8;
    ptx::stmatrix_x4(row_address + n / SLAB_WORDS * SLAB_BYTES + 16 * piece, from);
  }
  ptx::fence_proxy_async();
  __syncwarp();  // the slabs, which all lanes wrote
  if (lane == 0) {
#pragma unroll
    for (int n = 0; n < WORDS; n += SLAB_WORDS) {
      const int from = column + n / SLAB_WORDS * warpgroup::SLAB_COLUMNS;
      if (from < begin || from >= WIDTH) continue;
      ptx::tma_store(to, warp_address + n / SLAB_WORDS * SLAB_BYTES, from, first, head.head,
                     head.slow, head.slower);
    }
    ptx::tma_store_commit();
  }
}

// Writes a thread's words of a result of `columns` of at most WIDTH columns to an array, without
// TMA. The block's row 0 lies at `offset`; `valid` rows exist.
template <int WIDTH, int WORDS>
__device__ __forceinline__ void store_rows(unsigned int (&words)[2][WORDS], const Operand& to,
                                           long long offset, int valid, int columns = WIDTH) {
  storage_t* const data = reinterpret_cast<storage_t*>(to.data) + offset;
  const int first_row = fragment::warp_row() + fragment::lane_row();
  if (columns % 4 == 0 && to.col == 1 && to.row % 4 == 0 &&
      reinterpret_cast<unsigned long long>(data) % sizeof(Four) == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      storage_t* const row_gmem = data + (first_row + 8 * r) * to.row + first_column();
#pragma unroll
      for (int n = 0; n < WORDS; n += 2) {
        const Four four = swap_halves(words[r], n);
        if (first_row + 8 * r < valid && 8 * n + first_column() < columns) {
          *reinterpret_cast<Four*>(row_gmem + 8 * n) = four;
        }
      }
    }
    return;
  }
#pragma unroll 1
  for (int first = first_column(); first < 8 * WORDS + first_column(); first += 16) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Four four = swap_halves(words[r], 0);
      storage_t* const row_gmem = data + (first_row + 8 * r) * to.row;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        if (first_row + 8 * r < valid && first + x < columns) {
          row_gmem[(first + x) * to.col] = static_cast<storage_t>(four.word[x / 2] >> x % 2 * 16);
        }
      }
    }
    fragment::rotate<2>(words);
  }
}

}  // namespace warpgroup_rows
