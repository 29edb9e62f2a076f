// The backward's tiles by warpgroups: who computes what, probabilities, dS in shared memory, sums
// of dq in global memory, and what is not finite.
//
// Rows of a warpgroup's tiles are its keys, and a thread has two of them.
#pragma once
#include "../sm80/fragment_gradient.cuh"
#include "../sm80/fragment_product.cuh"
#include "warpgroup_passing.cuh"
#include "warpgroup_rows.cuh"

namespace warpgroup_gradient {

using warpgroup_passing::CONSUMER_THREADS;
using warpgroup_passing::TOGETHER;

// Begins to copy the block's keys or values from row `first` on, in tiles of 64, by one thread.
template <int WIDTH>
__device__ __forceinline__ void begin_keys(unsigned int to, const ptx::TensorMap& map,
                                           const warpgroup::TmaHead& head, long long first,
                                           unsigned int barrier) {
  constexpr int ROWS = warpgroup::WARPGROUP_ROWS;
#pragma unroll
  for (int n = 0; n < BLOCK_KV; n += ROWS) {
    warpgroup::tma_load_tile<ROWS, WIDTH>(to + n * fragment::row_bytes(WIDTH), map, head, first + n,
                                          barrier);
  }
}

// -- who computes what ----------------------------------------------------------------------------

// Warpgroups have 64 keys each, and all columns of their dk and dv; or wide heads' 64 keys
// together, half of a tile's queries, and half of the columns.
constexpr bool SHARES_KEYS = BLOCK_KV == warpgroup::WARPGROUP_ROWS;

// A warpgroup's columns, by lines of 64. Of an odd number the one between belongs to the first
// warpgroup, and the other one computes it, too.
template <int WIDTH>
struct OwnLines {
  static constexpr int LINES = fragment::row_bytes(WIDTH) / warpgroup::SLAB_ROW_BYTES;
  static constexpr int EACH = SHARES_KEYS ? (LINES + 1) / 2 : LINES;
  static constexpr int COLUMNS = EACH * warpgroup::SLAB_COLUMNS / 4;  // of a thread
  int line, first, begin;  // the first line and its first column, and that which is its own

  __device__ __forceinline__ explicit OwnLines(int own)
      : line(SHARES_KEYS && own > 0 ? LINES - EACH : 0),
        first(line * warpgroup::SLAB_COLUMNS),
        begin(SHARES_KEYS ? own * EACH * warpgroup::SLAB_COLUMNS : 0) {}
};

// -- probabilities --------------------------------------------------------------------------------

// lse or delta of a thread's queries.
template <int COLUMNS>
using Numbers = fragment_gradient::PerQuery<true, 2, COLUMNS>;

// Those from `first` on, which have been loaded or come from the first one's place.
template <int AT_ONCE, int COLUMNS>
__device__ __forceinline__ Numbers<AT_ONCE> numbers_from(const Numbers<COLUMNS>& all, int first) {
  Numbers<AT_ONCE> own;
#pragma unroll
  for (int n = 0; n < AT_ONCE; ++n) own.x[n] = all.x[first + n];
  return own;
}
template <int AT_ONCE>
__device__ __forceinline__ Numbers<AT_ONCE> numbers_from(const float* all_smem, int first) {
  return Numbers<AT_ONCE>(all_smem + fragment_gradient::query_of<true>(0, first));
}

// delta for `score_gradients`: loaded, where registers are left for it, or its place.
template <int COLUMNS>
__device__ __forceinline__ auto delta_from(const float* all_smem) {
  if constexpr (HAS_SCORE || HAS_DROPOUT) {
    return all_smem;
  } else {
    return Numbers<COLUMNS>(all_smem);
  }
}

// Makes products q k into probabilities, 2^(c s - lse log2 e), at most 1. `lse` has the latter. Of
// the columns from `first` on, up to `end`.
template <int COLUMNS>
__device__ __forceinline__ void exponentiate(float (&s)[2][COLUMNS], const Numbers<COLUMNS>& lse,
                                             float c, int first, int end) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
    if (n < first || n >= end) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      s[r][n] = ptx::exp2(gradient_tile::at_most_zero(fma(s[r][n], c, -lse.of(r, n))));
    }
  }
}

// Gives probabilities of pairs that take no part the weight that says so.
template <int COLUMNS>
__device__ __forceinline__ void hide_pairs(float (&p)[2][COLUMNS],
                                           const unsigned int (&allowed)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if ((allowed[r] >> n & 1) == 0) p[r][n] = matmul::masked_weight();
    }
  }
}

// Makes products dP = do v into dS, of as many queries of a thread at a time as registers go.
template <int COLUMNS, typename Delta>
__device__ __forceinline__ void score_gradients(const Params& p, bool masked,
                                                const float (&s)[2][COLUMNS],
                                                float (&dp)[2][COLUMNS], const Delta& delta,
                                                const unsigned int (&kept)[2]) {
  constexpr int AT_ONCE = HAS_SCORE || HAS_DROPOUT ? 4 : COLUMNS;
#pragma unroll
  for (int first = 0; first < COLUMNS; first += AT_ONCE) {
    float own[2][AT_ONCE], change[2][AT_ONCE];
    unsigned int own_kept[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own_kept[r] = HAS_DROPOUT ? kept[r] >> first : 0;
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        own[r][n] = s[r][first + n];
        change[r][n] = dp[r][first + n];
      }
    }
    fragment_gradient::score_gradients<true>(p, masked, own, change,
                                             numbers_from<AT_ONCE>(delta, first), own_kept, change);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) dp[r][first + n] = change[r][n];
    }
  }
}

// Rounds probabilities after dropout to the storage type.
template <int COLUMNS>
__device__ __forceinline__ void narrow_kept(const float (&p)[2][COLUMNS],
                                            const unsigned int (&kept)[2],
                                            unsigned int (&to)[2][COLUMNS / 2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      float weight[2];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        weight[x] = p[r][n + x];
        if (HAS_DROPOUT && (kept[r] >> (n + x) & 1) == 0) weight[x] *= 0.0f;
      }
      to[r][n / 2] = number::narrow_pair(weight[0], weight[1]);
    }
  }
}

// -- dS -------------------------------------------------------------------------------------------

// Where the rows lie that a lane stores of a tile in shared memory: 64 queries, and rows that are
// keys. Matrices are 8 x 8, two of the warp's keys by two of its queries.
__device__ __forceinline__ int place_of_words(const fragment_gradient::Corner& corner) {
  const int lane = ptx::lane_index();
  return fragment::swizzled_offset<warpgroup::SLAB_ROW_BYTES>(
      corner.row - fragment::lane_row() + lane % 16, corner.column / 8 + lane / 16);
}

// Writes a thread's words, from its first key and query on, to the tile, which begins at a multiple
// of 1024 bytes: pieces of 16 bytes are told apart by bits that a row's swizzle changes.
template <int WORDS>
__device__ __forceinline__ void store_words(const unsigned int (&words)[2][WORDS], int place,
                                            unsigned int tile_address) {
#pragma unroll
  for (int n = 0; n < WORDS; n += 2) {
    const unsigned int from[4] = {words[0][n], words[1][n], words[0][n + 1], words[1][n + 1]};
    ptx::stmatrix_x4((tile_address + place) ^ 16 * n, from);
  }
}

// -- sums of dq -----------------------------------------------------------------------------------

// A thread's four numbers of 8 rows and 16 columns are neighbours, and so are those of the lanes:
// where element (row, column) lies. `GROUP_SIZE` says where other columns and rows are.
__device__ __forceinline__ int place_of_sum(int row, int column) {
  return row / 8 * fragment_product::GROUP_SIZE<D> + column / 16 * 128 + row % 8 * 16 +
         column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

// Adds a warpgroup's 64 queries by columns from `column` on, but for those before `begin`; `valid`
// queries exist.
template <int COLUMNS>
__device__ __forceinline__ void add_rows(const float (&dq)[2][COLUMNS], float* to_gmem, int column,
                                         int begin, int valid) {
  const int row = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE * 16;
  float* const lane_gmem = to_gmem + place_of_sum(row, column) + 4 * ptx::lane_index();
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 4) {
    if (column + 4 * n >= fragment::whole_columns(D)) break;
    if (column + 4 * n < begin) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= valid) break;
      ptx::red_add_v4(lane_gmem + r * fragment_product::GROUP_SIZE<D> + n / 4 * 128, dq[r][n],
                      dq[r][n + 1], dq[r][n + 2], dq[r][n + 3]);
    }
  }
}

// -- what is not finite ---------------------------------------------------------------------------

// Of sums up to the largest number, too, this is not so; which costs time, but nothing else.
template <int COLUMNS>
__device__ __forceinline__ bool all_finite(const float (&x)[2][COLUMNS]) {
  float sum[4] = {};
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[2 * r + n % 2] += x[r][n];
  }
  return number::is_finite((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// The same of numbers in 16 bits, without exception.
template <int WORDS>
__device__ __forceinline__ bool all_finite(const unsigned int (&x)[2][WORDS]) {
  unsigned int sum[2] = {0, 0};  // 0, or NaN
#pragma unroll
  for (int n = 0; n < WORDS; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = warpgroup_rows::zero_times(x[r][n], sum[r]);
  }
  return (sum[0] | sum[1]) == 0;
}

// An element of a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ storage_t& element(char* tile_smem, int row, int column) {
  const int at = column / warpgroup::SLAB_COLUMNS * ROWS * warpgroup::SLAB_ROW_BYTES +
                 fragment::swizzled_offset<warpgroup::SLAB_ROW_BYTES>(
                     row, column % warpgroup::SLAB_COLUMNS / STORED_VECTOR);
  return reinterpret_cast<storage_t*>(tile_smem + at)[column % STORED_VECTOR];
}

// dv += p do for those elements of do only that are NaN or infinite, without pairs that take no
// part: the product leaves them to this. Rows of P are keys, of which the thread's first is `key`.
template <int COLUMNS>
__device__ __forceinline__ void add_nonfinite(float (&dv)[2][COLUMNS], int key, char* p_smem,
                                              char* do_smem) {
#pragma unroll 1
  for (int query = 0; query < BLOCK_Q; ++query) {
    const storage_t weight[2] = {element<BLOCK_KV>(p_smem, key, query),
                                 element<BLOCK_KV>(p_smem, key + 8, query)};
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = 8 * (n / 2) + fragment::lane_column() + n % 2;
      const float value = number::widen(element<BLOCK_Q>(do_smem, query, column));
      if (number::is_finite(value)) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (weight[r] != 0x8000) dv[r][n] += number::widen(weight[r]) * value;
      }
    }
  }
}

// Makes 0 of what is not finite in so many bytes, by all threads that compute.
__device__ __forceinline__ void clear_nonfinite(char* tile_smem, int bytes) {
#pragma unroll 1
  for (int n = threadIdx.x; n < bytes / 4; n += CONSUMER_THREADS) {
    fragment_product::clear_pair(reinterpret_cast<unsigned int*>(tile_smem)[n]);
  }
}

// Whether queries or do of a tile are not finite; all threads that compute look.
__device__ __forceinline__ bool is_spoilt(const char* q_smem, const char* do_smem) {
  constexpr int Q_BYTES = BLOCK_Q * fragment::row_bytes(D);
  constexpr int DO_BYTES = BLOCK_Q * fragment::row_bytes(D_V);
  const int own = threadIdx.x;
  const bool finite = warpgroup_rows::finite_rows<Q_BYTES, CONSUMER_THREADS>(q_smem, own) &&
                      warpgroup_rows::finite_rows<DO_BYTES, CONSUMER_THREADS>(do_smem, own);
  return warpgroup_passing::any_thread(!finite);
}

// The same of the block's keys.
__device__ __forceinline__ bool are_keys_spoilt(const char* k_smem) {
  constexpr int BYTES = BLOCK_KV * fragment::row_bytes(D);
  const bool finite = warpgroup_rows::finite_rows<BYTES, CONSUMER_THREADS>(k_smem, threadIdx.x);
  return warpgroup_passing::any_thread(!finite);
}

// Copies keys to where they are 0 if they are not finite. Before the copy is multiplied by dS, each
// warp publishes its part of dS, and this with it.
__device__ __forceinline__ void copy_finite_keys(const char* k_smem, char* to_smem) {
#pragma unroll 1
  for (int n = threadIdx.x; n < BLOCK_KV * fragment::row_bytes(D) / 4; n += CONSUMER_THREADS) {
    unsigned int pair = reinterpret_cast<const unsigned int*>(k_smem)[n];
    fragment_product::clear_pair(pair);
    reinterpret_cast<unsigned int*>(to_smem)[n] = pair;
  }
}

// Makes the keys finite, when all threads that compute have read them, and as they came.
__device__ __forceinline__ void clear_keys_for_a_while(char* k_smem) {
  clear_nonfinite(k_smem, BLOCK_KV * fragment::row_bytes(D));
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // the keys, now finite
}
__device__ __forceinline__ void restore_keys(const Params& p, const warpgroup_passing::Known& known,
                                             char* k_smem) {
  constexpr int ROWS = warpgroup::WARPGROUP_ROWS;
  ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // the keys, which were read for dq
  const memory::Rows from = memory::rows(p.k, known.entry, known.h_kv, true);
  const long long first = known.j0;
  const int valid = known.nj;
#pragma unroll 1
  for (int n = threadIdx.x; n < BLOCK_KV * D; n += CONSUMER_THREADS) {
    const int row = n / D, column = n % D;
    element<ROWS>(k_smem + row / ROWS * (ROWS * fragment::row_bytes(D)), row % ROWS, column) =
        row < valid ? from.data[(first + row) * from.row + column * from.col] : storage_t(0);
  }
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // the keys as they came
}

// Makes 0 of rows from row `valid` on, by all threads that compute: in a packed array boxes bring
// those of the next sequence.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void clear_rows(char* tile_smem, int valid) {
  constexpr int SLAB = ROWS * warpgroup::SLAB_ROW_BYTES;
  constexpr int SLABS = fragment::row_bytes(WIDTH) / warpgroup::SLAB_ROW_BYTES;
#pragma unroll 1
  for (int n = threadIdx.x; n < SLABS * SLAB / 4; n += CONSUMER_THREADS) {
    if (n * 4 % SLAB / warpgroup::SLAB_ROW_BYTES >= valid) {
      reinterpret_cast<unsigned int*>(tile_smem)[n] = 0;
    }
  }
}

// The same of the block's keys or values, in tiles of 64, of which `valid` exist.
template <int WIDTH>
__device__ __forceinline__ void clear_keys(char* tiles_smem, int valid) {
  constexpr int TILE_BYTES = warpgroup::WARPGROUP_ROWS * fragment::row_bytes(WIDTH);
  for (int n = 0; n < BLOCK_KV / warpgroup::WARPGROUP_ROWS; ++n) {
    clear_rows<warpgroup::WARPGROUP_ROWS, WIDTH>(tiles_smem + n * TILE_BYTES,
                                                 valid - n * warpgroup::WARPGROUP_ROWS);
  }
}

// Makes 0 of keys and values that do not exist, by all threads that compute.
__device__ __forceinline__ void clear_missing_keys(char* k_smem, char* v_smem, int valid) {
  clear_keys<D>(k_smem, valid);
  clear_keys<D_V>(v_smem, valid);
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(TOGETHER,
                          CONSUMER_THREADS);  // the keys and values that exist, and no others
}

// -- results --------------------------------------------------------------------------------------

// A result of WIDTH columns on its way to rows of an array, from key `j0` on, of which `valid`
// exist: by way of shared memory if they are of the storage type, else as the accumulator's.
template <int WIDTH>
struct ResultRows {
  const Operand& to;
  bool wide;
  long long offset;
  int valid;
  char* smem;

  __device__ __forceinline__ ResultRows(const Operand& to, int kind, const layout::Entry& entry,
                                        int h_kv, long long j0, int valid, char* smem)
      : to(to),
        wide(kind != number::STORAGE_KIND),
        offset(layout::offset(to, entry, h_kv, true) + j0 * to.row),
        valid(valid),
        smem(smem) {}

  // Writes a thread's part, times a factor, from row `key` of the block on.
  template <int COLUMNS>
  __device__ __forceinline__ void put(const float (&result)[2][COLUMNS], int key,
                                      const OwnLines<WIDTH>& share, float factor) const {
    float* const data = reinterpret_cast<float*>(to.data) + offset;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = key + 8 * r;
#pragma unroll
      for (int n = 0; n < COLUMNS; n += 2) {
        const int column = share.first + 8 * (n / 2) + fragment::lane_column();
        const float low = result[r][n] * factor, high = result[r][n + 1] * factor;
        if (column < share.begin) continue;
        if (!wide) {
          const int at = fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(row, column / 8);
          *reinterpret_cast<unsigned int*>(smem + at + 2 * fragment::lane_column()) =
              number::narrow_pair(low, high);
          continue;
        }
        if (row < valid && column < WIDTH) data[row * to.row + column * to.col] = low;
        if (row < valid && column + 1 < WIDTH) data[row * to.row + (column + 1) * to.col] = high;
      }
    }
  }

  // Writes what all put into shared memory.
  __device__ __forceinline__ void copy_out() const {
    if (!wide) {
      fragment::copy_out<WIDTH>(to, offset, BLOCK_KV, valid, threadIdx.x, CONSUMER_THREADS, smem);
    }
  }
};

// Begins to write the warp's 16 keys of a result of WIDTH columns, times a factor, by boxes, from
// its rows of a tile of 64 in shared memory, the first of which is `first`.
template <int WIDTH, int COLUMNS>
__device__ __forceinline__ void tma_store_rows(const float (&result)[2][COLUMNS],
                                               const OwnLines<WIDTH>& share, float factor,
                                               unsigned int tile_address, const ptx::TensorMap& to,
                                               const warpgroup::TmaHead& head, long long first) {
  constexpr int SLAB_ROW_BYTES = warpgroup::WARPGROUP_ROWS * warpgroup::SLAB_ROW_BYTES;
  const int warp = ptx::shuffle(threadIdx.x / ptx::WARP_SIZE % 4, 0);
  const int row = warp * fragment::WARP_ROWS;
  const float factors[2] = {factor, factor};
  unsigned int words[2][COLUMNS / 2];
  warpgroup_rows::narrow_rows(result, factors, words);
  warpgroup_rows::tma_store_rows<WIDTH, SLAB_ROW_BYTES>(
      words, tile_address + share.line * SLAB_ROW_BYTES + row * warpgroup::SLAB_ROW_BYTES, to, head,
      static_cast<int>(first) + row, share.first, share.begin);
}

}  // namespace warpgroup_gradient
