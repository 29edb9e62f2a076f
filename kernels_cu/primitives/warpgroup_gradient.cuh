// The backward's tiles by warpgroups: what a block knows of the queries that pass by, dS in shared
// memory, sums of dq in global memory, and what is not finite.
//
// Rows of a warpgroup's tiles are its keys, and a thread has two of them.
#pragma once
#include "fragment_gradient.cuh"
#include "fragment_product.cuh"
#include "warpgroup.cuh"

namespace warpgroup_gradient {

constexpr int CONSUMER_THREADS = THREADS - warpgroup::THREADS_OF;  // those that compute
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / arch::WARP_SIZE;

// -- tiles that pass by ---------------------------------------------------------------------------

// A tile that is not EMPTY is a number: 4 times its place among the head's, and its class.
constexpr int NO_TILE = -1;
__device__ __forceinline__ long long first_of(int tile) {
  return static_cast<long long>(tile / 4) * BLOCK_Q;
}

// Tiles of one head, and what is known of it. Without a mask they are all of the head's; else as
// many as there are threads that compute, each of which finds the class of one.
struct Span {
  static constexpr int MOST = CONSUMER_THREADS;
  layout::Entry entry;
  long long h;
  memory::Numbers lse, delta;
  float* dq_sum;  // row 0
  warpgroup::Head q, d_out;
  int first, end;                     // places among the head's
  unsigned int some[CONSUMER_WARPS];  // bit n of word w: tile first + 32 w + n is not EMPTY
  unsigned int full[CONSUMER_WARPS];

  __device__ __forceinline__ int rows_of(int tile) const {
    return tile::rows_from(first_of(tile), entry.len_q, BLOCK_Q);
  }
  __device__ __forceinline__ TileBox box_of(int tile, long long j0, int nj) const {
    return tile::describe_tile(entry, h, first_of(tile), rows_of(tile), j0, nj);
  }

  // The classes, found by all threads that compute together.
  __device__ __forceinline__ void classify(const Params& p, long long j0, int nj) {
    const int place = first + static_cast<int>(threadIdx.x);
    int tile_class = EMPTY;
    if (place < end) tile_class = tile::classify_tile(p, box_of(4 * place, j0, nj));
    const unsigned int own_some = arch::ballot(tile_class != EMPTY);
    const unsigned int own_full = arch::ballot(tile_class == FULL);
    if (arch::lane_index() == 0) {
      some[threadIdx.x / arch::WARP_SIZE] = own_some;
      full[threadIdx.x / arch::WARP_SIZE] = own_full;
    }
  }

  // The tile from `place` on that is not EMPTY.
  __device__ __forceinline__ int next_tile(int place) const {
    if constexpr (!HAS_MASK) return place < end ? 4 * place + FULL : NO_TILE;
#pragma unroll 1
    while (place < end) {
      const int n = place - first;
      const unsigned int left = some[n / 32] >> n % 32;
      if (left == 0) {
        place += 32 - n % 32;
        continue;
      }
      const int skipped = __ffs(static_cast<int>(left)) - 1;
      const bool is_full = (full[n / 32] >> (n % 32 + skipped) & 1) != 0;
      return 4 * (place + skipped) + (is_full ? FULL : PARTIAL);
    }
    return NO_TILE;
  }
};

// Loads lse and delta of a tile's queries to shared memory, by the lanes of a warp. An empty row
// gets lse = inf, so that its p is 0; so do the rows beyond the last.
__device__ __forceinline__ void load_numbers(const Span& span, int tile, float* lse_smem,
                                             float* delta_smem) {
  const int rows = span.rows_of(tile);
#pragma unroll
  for (int i = arch::lane_index(); i < BLOCK_Q; i += arch::WARP_SIZE) {
    float lse = number::infinity(), delta = 0;
    if (i < rows) {
      lse = span.lse.data[(first_of(tile) + i) * span.lse.row];
      delta = span.delta.data[(first_of(tile) + i) * span.delta.row];
    }
    lse_smem[i] = lse == -number::infinity() ? number::infinity() : lse;
    delta_smem[i] = delta;
  }
}

// -- probabilities --------------------------------------------------------------------------------

// Makes products q k into probabilities, 2^(c s - lse log2 e), at most 1. `lse_smem` is that of the
// thread's first query.
template <int COLUMNS>
__device__ __forceinline__ void exponentiate(float (&s)[2][COLUMNS], const float* lse_smem,
                                             float c) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
    const float offset = lse_smem[fragment_gradient::query_of<true>(0, n)] * tile::LOG2_E;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      s[r][n] = arch::exp2(gradient_tile::at_most_zero(fma(s[r][n], c, -offset)));
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
      if ((allowed[r] >> n & 1) == 0) p[r][n] = matmul::no_part();
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

// Writes a thread's words to a tile in shared memory: a slab for 64 queries, whose rows are keys.
template <int WORDS>
__device__ __forceinline__ void store_words(const unsigned int (&words)[2][WORDS], int key,
                                            char* tile_smem) {
#pragma unroll
  for (int n = 0; n < WORDS; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = n / 8 * BLOCK_KV * warpgroup::LINE_BYTES +
                     fragment::place<warpgroup::LINE_BYTES>(key + 8 * r, n % 8);
      *reinterpret_cast<unsigned int*>(tile_smem + at + 2 * fragment::lane_column()) = words[r][n];
    }
  }
}

// -- sums of dq -----------------------------------------------------------------------------------

// A thread's four numbers of 8 rows and 16 columns are neighbours, and so are those of the lanes:
// where element (row, column) lies. `GROUP_SIZE` says where other columns and rows are.
__device__ __forceinline__ int place_of_sum(int row, int column) {
  return row / 8 * fragment_product::GROUP_SIZE<D> + column / 16 * 128 + row % 8 * 16 +
         column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

// Adds a warpgroup's 64 queries by 64 columns from `column` on; `valid` queries exist from there.
__device__ __forceinline__ void add_rows(const float (&dq)[2][16], float* to_gmem, int column,
                                         int valid) {
  const int row = threadIdx.x % warpgroup::THREADS_OF / arch::WARP_SIZE * 16;
  float* const lane_gmem = to_gmem + place_of_sum(row, column) + 4 * arch::lane_index();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= valid) break;
#pragma unroll
    for (int n = 0; n < 16; n += 4) {
      if (column + 4 * n >= fragment::whole_columns(D)) break;
      arch::add_four(lane_gmem + r * fragment_product::GROUP_SIZE<D> + n / 4 * 128, dq[r][n],
                     dq[r][n + 1], dq[r][n + 2], dq[r][n + 3]);
    }
  }
}

// -- what is not finite ---------------------------------------------------------------------------

template <int COLUMNS>
__device__ __forceinline__ bool all_finite(const float (&x)[2][COLUMNS]) {
  bool finite = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) finite = finite && fabs(x[r][n]) <= number::largest_float();
  }
  return finite;
}

// An element of a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ storage_t& element(char* tile_smem, int row, int column) {
  const int at =
      column / warpgroup::LINE_COLUMNS * ROWS * warpgroup::LINE_BYTES +
      fragment::place<warpgroup::LINE_BYTES>(row, column % warpgroup::LINE_COLUMNS / STORED_VECTOR);
  return reinterpret_cast<storage_t*>(tile_smem + at)[column % STORED_VECTOR];
}

// A thread's first key.
__device__ __forceinline__ int thread_key() {
  return threadIdx.x / arch::WARP_SIZE * 16 + fragment::lane_row();
}

// c += a b for those elements of b only that are NaN or infinite, without pairs that take no part,
// which the weights `seen` tell: the product leaves them to this. Rows of a and `seen` are keys.
template <int COLUMNS>
__device__ __forceinline__ void add_nonfinite(float (&c)[2][COLUMNS], char* a_smem, char* seen_smem,
                                              char* b_smem) {
#pragma unroll 1
  for (int k = 0; k < BLOCK_Q; ++k) {
    float weight[2];
    bool takes_part[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] = number::widen(element<BLOCK_KV>(a_smem, thread_key() + 8 * r, k));
      takes_part[r] = element<BLOCK_KV>(seen_smem, thread_key() + 8 * r, k) != 0x8000;
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = 8 * (n / 2) + fragment::lane_column() + n % 2;
      const float value = number::widen(element<BLOCK_Q>(b_smem, k, column));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!number::is_finite(value) && takes_part[r]) c[r][n] += weight[r] * value;
      }
    }
  }
}

// The same of dq, where threads have keys; k_smem has tiles of 64 of them.
__device__ __forceinline__ void add_nonfinite_keys(char* ds_smem, char* seen_smem, char* k_smem,
                                                   float* to_gmem, int valid, float factor) {
  constexpr int TILE_BYTES = warpgroup::ROWS_OF * fragment::row_bytes(D);
#pragma unroll 1
  for (int n = threadIdx.x; n < BLOCK_KV * D; n += CONSUMER_THREADS) {
    const int key = n / D, column = n % D;
    const float value = number::widen(element<warpgroup::ROWS_OF>(
        k_smem + key / warpgroup::ROWS_OF * TILE_BYTES, key % warpgroup::ROWS_OF, column));
#pragma unroll 1
    for (int query = 0; !number::is_finite(value) && query < valid; ++query) {
      if (element<BLOCK_KV>(seen_smem, key, query) == 0x8000) continue;
      const float weight = number::widen(element<BLOCK_KV>(ds_smem, key, query));
      arch::add(to_gmem + place_of_sum(query, column), weight * value * factor);
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

// Makes 0 of rows from row `valid` on, by all threads that compute: in a packed array boxes bring
// those of the next sequence.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void clear_rows(char* tile_smem, int valid) {
  constexpr int SLAB = ROWS * warpgroup::LINE_BYTES;
  constexpr int SLABS = fragment::row_bytes(WIDTH) / warpgroup::LINE_BYTES;
#pragma unroll 1
  for (int n = threadIdx.x; n < SLABS * SLAB / 4; n += CONSUMER_THREADS) {
    if (n * 4 % SLAB / warpgroup::LINE_BYTES >= valid) {
      reinterpret_cast<unsigned int*>(tile_smem)[n] = 0;
    }
  }
}

// Copies a warpgroup's keys again.
__device__ __forceinline__ void restore_keys(const memory::Rows& from, long long first, int valid,
                                             char* k_smem) {
#pragma unroll 1
  for (int n = threadIdx.x % warpgroup::THREADS_OF; n < warpgroup::ROWS_OF * D;
       n += warpgroup::THREADS_OF) {
    const int row = n / D, column = n % D;
    element<warpgroup::ROWS_OF>(k_smem, row, column) =
        row < valid ? from.data[(first + row) * from.row + column * from.col] : storage_t(0);
  }
}

// -- results --------------------------------------------------------------------------------------

// Writes a warp's rows of a result of WIDTH columns, times a factor, as elements of the storage
// type by way of shared memory that is the warp's own, or where `wide` as the accumulator's.
template <int WIDTH, int COLUMNS>
__device__ __forceinline__ void store_rows(const float (&result)[2][COLUMNS], const Operand& to,
                                           bool wide, long long offset, int valid, float factor,
                                           char* rows_smem) {
  if (!wide) {
    const float factors[2] = {factor, factor};
    fragment::put_rows<WIDTH>(fragment::Kind(), result, factors, rows_smem);
    __syncwarp();  // the warp's rows, which its lanes wrote
    fragment::copy_out<WIDTH>(to, offset, 16, valid, arch::lane_index(), arch::WARP_SIZE,
                              rows_smem);
    return;
  }
  float* const data = reinterpret_cast<float*>(to.data) + offset;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r + fragment::lane_row();
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = 8 * (n / 2) + fragment::lane_column() + n % 2;
      if (row < valid && column < WIDTH) {
        data[row * to.row + column * to.col] = result[r][n] * factor;
      }
    }
  }
}

}  // namespace warpgroup_gradient
