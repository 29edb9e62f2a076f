// What happens to a tile of scores before the softmax where they lie in fragments: the twin of
// reference/cpu/tile.py for tensor cores.
#pragma once
#include "fragment_rows.cuh"

namespace fragment_tile {

// A tile that is not EMPTY: the first of the rows that pass by, and how many of them exist. Without
// one there are none.
struct Tile {
  long long first;
  int rows;
  int tile_class;
};

// The classes of THREADS tiles, found together: bit n of word w tells of tile 32 w + n.
struct Classes {
  unsigned int some[fragment::WARPS];  // not EMPTY
  unsigned int full[fragment::WARPS];
};

// The next tile of BLOCK rows from row `first` on, of `length`, that is not EMPTY; `describe` makes
// the box of a tile from its first row and their number. Every thread finds the class of one tile,
// when the tiles before are done. All threads of the block call this together, from row 0 on.
template <int BLOCK, class Describe>
__device__ __forceinline__ Tile next_tile(const Params& p, Classes& classes_smem, long long first,
                                          long long length, const Describe& describe) {
#pragma unroll 1
  while (first < length) {
    if constexpr (!HAS_MASK) return Tile{first, tile::rows_from(first, length, BLOCK), FULL};
    const int n = static_cast<int>(static_cast<unsigned long long>(first) / BLOCK % THREADS);
    if (n == 0) {
      __syncthreads();  // the classes before, which were read
      // Beyond the last tile, the last one's class: all lanes ask together.
      const long long last = (length - 1) / BLOCK * BLOCK, place = first + threadIdx.x * BLOCK;
      const long long own = place < last ? place : last;
      int tile_class = tile::classify_tile(p, describe(own, tile::rows_from(own, length, BLOCK)));
      if (place > last) tile_class = EMPTY;
      const unsigned int some = ptx::ballot(tile_class != EMPTY);
      const unsigned int full = ptx::ballot(tile_class == FULL);
      if (ptx::lane_index() == 0) {
        classes_smem.some[threadIdx.x / ptx::WARP_SIZE] = some;
        classes_smem.full[threadIdx.x / ptx::WARP_SIZE] = full;
      }
      __syncthreads();  // the classes, which other threads found
    }
    const unsigned int some = classes_smem.some[n / 32] >> n % 32;
    if (some == 0) {
      first += (32 - n % 32) * BLOCK;
      continue;
    }
    const int skipped = __ffs(static_cast<int>(some)) - 1;
    const bool full = (classes_smem.full[n / 32] >> (n % 32 + skipped) & 1) != 0;
    first += skipped * BLOCK;
    return Tile{first, tile::rows_from(first, length, BLOCK), full ? FULL : PARTIAL};
  }
  return Tile{first, 0, EMPTY};
}

// Where a thread's pairs lie: of element (r, n) the query is `i` + 8 r, the key `j` + that of
// column n. So many rows and columns are left from there that exist.
struct Pairs {
  long long i, j;
  int rows, columns;

  __device__ __forceinline__ explicit Pairs(const TileBox& box)
      : i(box.i_low + fragment::warp_row() + fragment::lane_row()),
        j(box.j_low + fragment::lane_column()),
        rows(static_cast<int>(box.i_high - i)),
        columns(static_cast<int>(box.j_high - j)) {}

  __device__ __forceinline__ static int key_of(int n) { return 8 * (n / 2) + n % 2; }
  __device__ __forceinline__ bool has_row(int r) const { return 8 * r <= rows; }
  // The site of element (r, n).
  __device__ __forceinline__ Site site(const TileBox& box, int r, int n) const {
    return Site{box.b,     box.h,       i + 8 * r,   j + key_of(n), box.len_q,
                box.len_k, box.start_q, box.start_k, 8 * r,         key_of(n)};
  }
  // The same, or that of the last query before it that exists; and where KEYS_END of the last key.
  template <bool KEYS_END = true>
  __device__ __forceinline__ Site nearest(const TileBox& box, int r, int n) const {
    Site at = site(box, r, n);
    at.i = i + tile::smaller(8 * r, rows);
    if constexpr (KEYS_END) at.j = j + tile::smaller(key_of(n), columns);
    return at;
  }
};

// The bits of a thread's columns up to key `last`, counted from its first.
__device__ __forceinline__ unsigned int columns_to(int last) {
  const int highest = (last >> 3) * 2 + tile::smaller(last & 7, 1);
  return last < 0 ? 0 : (2u << highest) - 1;
}

// How far `position` lies behind `first`, which is not negative; -1 or BLOCK_KV where it lies
// before or beyond a tile.
__device__ __forceinline__ int distance(long long position, long long first) {
  if (position < first) return -1;
  return position - first < BLOCK_KV ? static_cast<int>(position - first) : BLOCK_KV;
}

// Which of a thread's pairs take part: bit n of word r tells of element (r, n). They exist, and the
// mask allows them. Where that is a range of keys, the mask is asked once for a row, without a
// branch, lest rows wait for each other; else generated code stands here for AT_ONCE columns.
// Returns whether any pair of the warp takes part.
template <int COLUMNS, int AT_ONCE = 1, int ROWS>
__device__ __forceinline__ bool evaluate_mask(const Params& p, const TileBox& box, int tile_class,
                                           unsigned int (&allowed)[ROWS]) {
  static_assert(COLUMNS <= 32, "a row's answers are bits of a word");
  const Pairs pairs(box);
  int low[ROWS], high[ROWS];  // keys, counted from the thread's first
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    low[r] = 0;
    high[r] = pairs.has_row(r) ? pairs.columns : -1;
  }
  if constexpr (HAS_RANGE) {
    if (tile_class == PARTIAL) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const KeyRange seen = mask_range(p, pairs.nearest<false>(box, r, 0));
        const int last = distance(seen.high, box.j_low) - fragment::lane_column();
        high[r] = tile::smaller(last, high[r]);
        // Most ranges have no lower end, and the compiler knows.
        if (seen.low != SMALLEST_INT) {
          low[r] = distance(seen.low, box.j_low) - fragment::lane_column();
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) allowed[r] = columns_to(high[r]) & ~columns_to(low[r] - 1);
  if constexpr (HAS_MASK && !HAS_RANGE) {
    if (tile_class == PARTIAL) {
#pragma unroll AT_ONCE
      for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          // What does not hang on the key is read before the loop, because every pass needs it.
          if (!mask_allows(p, pairs.nearest(box, r, n))) allowed[r] &= ~(1u << n);
        }
      }
    }
  }
  unsigned int any = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) any |= allowed[r];
  return ptx::any_lane(any != 0);
}

// Whether the warp has a pair that takes part in each half of a tile's columns; `allowed` is as
// evaluate_mask has made it for two rows.
template <int COLUMNS>
__device__ __forceinline__ void find_active_halves(const unsigned int (&allowed)[2],
                                            bool (&takes_part)[2]) {
  const unsigned int any = allowed[0] | allowed[1];
  takes_part[0] = ptx::any_lane((any & ((1u << COLUMNS / 2) - 1)) != 0);
  takes_part[1] = ptx::any_lane(any >> COLUMNS / 2 != 0);
}

// Gives pairs that take no part the score -inf.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_mask(accum_t (&s)[ROWS][COLUMNS],
                                           const unsigned int (&allowed)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if ((allowed[r] >> n & 1) == 0) s[r][n] = -number::infinity();
    }
  }
}

// Gives keys that do not exist the score -inf: of the tile's there are so many.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void mask_missing_keys(accum_t (&s)[ROWS][COLUMNS], int keys) {
  const int columns = keys - fragment::lane_column();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (Pairs::key_of(n) >= columns) s[r][n] = -number::infinity();
    }
  }
}

// Columns for which warpgroups ask a mask together: what it reads of all is on its way at a time.
constexpr int MASK_COLUMNS_AT_ONCE = MASK_STEPS <= 16 ? 32 : 2;

// Columns of scores that warpgroups' generated code changes together, of so many: all, unless it is
// long.
constexpr bool IS_LONG_SCORE_MOD = SCORE_STEPS > 32;
__device__ constexpr int columns_at_once(int columns) {
  if (!IS_LONG_SCORE_MOD) return columns;
  return columns % 8 == 0 ? 8 : 4;
}

// Makes a thread's scores into changed logits. Of pairs that do not exist they may be anything;
// what is read for them is of the last query that does, and where KEYS_END of the last key.
// Generated code stands here for STEP columns, which all columns pass, so many at a time. Returns
// whether any may be -inf.
template <bool KEYS_END, int STEP = 2, int ROWS, int COLUMNS>
__device__ __forceinline__ bool apply_score_mod(const Params& p, const HeadConstants& given,
                                              const TileBox& box, accum_t (&s)[ROWS][COLUMNS],
                                              accum_t scale) {
  const Pairs pairs(box);
  accum_t sum[ROWS];  // of logits: not finite if one of them is not
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sum[r] = 0;
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += STEP) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < STEP; ++n) {
        Site at = SCORE_READS ? pairs.nearest<KEYS_END>(box, r, column + n)
                              : pairs.site(box, r, column + n);
        at.step_j = Pairs::key_of(n);  // without the column, where it is not known
        s[r][n] = score_mod(p, given, s[r][n] * scale, at);
        sum[r] += s[r][n];
      }
    }
    if constexpr (STEP < COLUMNS) fragment::rotate<STEP>(s);
  }
  bool finite = true;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) finite = finite && number::is_finite(sum[r]);
  return !finite;
}

// Drops weights: a pair that is dropped gets the weight 0, and what survives is divided by the
// probability of that at the end. One draw serves four keys of a row, which two lanes hold: of two
// rows, each of the lanes draws for one.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_dropout(const Params& p, const TileBox& box,
                                              accum_t (&s)[ROWS][COLUMNS]) {
  const unsigned long long seed = p.seed_gmem != nullptr ? *p.seed_gmem : p.seed;
  const philox::Key key = philox::split_seed(seed);
  const unsigned long long b_h = static_cast<unsigned long long>(box.b * p.heads + box.h);
  const bool second = ptx::lane_index() % 2 != 0;
  const unsigned int i = static_cast<unsigned int>(box.i_low + fragment::warp_row() +
                                                   fragment::lane_row() + (second ? 8 : 0));
  unsigned int group = static_cast<unsigned int>(box.j_low / 4 + fragment::lane_column() / 4);
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += 2) {
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
      const philox::Words drawn = philox::words(key, group, i + 8 * r, b_h);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        // The first lane holds keys 0 and 1 of four, the second 2 and 3.
        const unsigned int given = second ? drawn.word[n] : drawn.word[2 + n];
        const unsigned int kept = second ? drawn.word[2 + n] : drawn.word[n];
        const unsigned int got = ptx::shuffle_xor(given, 1);
        const unsigned int word[2] = {second ? got : kept, second ? kept : got};
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          accum_t& weight = s[r + x][n];
          if (word[x] < p.drop_below && matmul::is_unmasked(weight)) weight *= accum_t(0);
        }
      }
    }
    fragment::rotate<2>(s);
    group += 2;
  }
}

}  // namespace fragment_tile
