// A tile of scores before the softmax, in fragments: its class, score mods, masks, dropout. The
// twin of reference/cpu/tile.py for tensor cores.
#pragma once
#include "../ptx/bytes.cuh"
#include "fragment_rows.cuh"

namespace fragment_tile {

// A tile of the streamed operand that is not EMPTY: its first row, and how many of its rows exist.
// Zero rows: there is no further tile.
struct Tile {
  long long first;
  int rows;
  int tile_class;
};

// The classes of THREADS tiles: bit n of word w is that of tile 32 w + n.
struct Classes {
  unsigned int some[fragment::WARPS];  // not EMPTY
  unsigned int full[fragment::WARPS];
};

// The next tile of BLOCK rows, from row `first` on, of `length`, that is not EMPTY. `describe`
// returns the bounds of a tile from its first row and number of rows. The classes of THREADS tiles
// are found at a time, one by each thread. All threads of the block call this together, from row 0
// on.
template <int BLOCK, class Describe>
__device__ __forceinline__ Tile next_tile(const Params& p, Classes& classes_smem, long long first,
                                          long long length, const Describe& describe) {
#pragma unroll 1
  while (first < length) {
    if constexpr (!HAS_MASK) return Tile{first, tile::rows_from(first, length, BLOCK), FULL};
    const int n = static_cast<int>(static_cast<unsigned long long>(first) / BLOCK % THREADS);
    if (n == 0) {
      __syncthreads();  // the previous classes, which other threads may still read
      // Beyond the last tile, threads classify the last one, because all lanes must take part.
      const long long last = (length - 1) / BLOCK * BLOCK, start = first + threadIdx.x * BLOCK;
      const long long classified = start < last ? start : last;
      int tile_class =
          tile::classify_tile(p, describe(classified, tile::rows_from(classified, length, BLOCK)));
      if (start > last) tile_class = EMPTY;
      const unsigned int some = ptx::ballot(tile_class != EMPTY);
      const unsigned int full = ptx::ballot(tile_class == FULL);
      if (ptx::lane_index() == 0) {
        classes_smem.some[threadIdx.x / ptx::WARP_SIZE] = some;
        classes_smem.full[threadIdx.x / ptx::WARP_SIZE] = full;
      }
      __syncthreads();  // the classes, written by all warps
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

// The pairs of a thread: element (r, n) is query `i` + 8 r and key `j` + key_of(n). rows and
// columns count the queries and keys after the first that exist.
struct Pairs {
  long long i, j;
  int rows, columns;

  __device__ __forceinline__ explicit Pairs(const TileBox& box)
      : i(box.i_low + fragment::warp_row() + fragment::lane_row()),
        j(box.j_low + fragment::warp_key() + fragment::lane_column()),
        rows(static_cast<int>(box.i_high - i)),
        columns(static_cast<int>(box.j_high - j)) {}

  __device__ __forceinline__ static int key_of(int n) { return 8 * (n / 2) + n % 2; }
  __device__ __forceinline__ bool has_row(int r) const { return 8 * r <= rows; }
  // The site of element (r, n).
  __device__ __forceinline__ Site site(const TileBox& box, int r, int n) const {
    return Site{box.b,     box.h,       i + 8 * r,   j + key_of(n), box.len_q,
                box.len_k, box.start_q, box.start_k, 8 * r,         key_of(n)};
  }
  // That site, clamped to the last query that exists and, with KEYS_END, to the last key.
  template <bool KEYS_END = true>
  __device__ __forceinline__ Site nearest(const TileBox& box, int r, int n) const {
    Site at = site(box, r, n);
    at.i = i + tile::smaller(8 * r, rows);
    if constexpr (KEYS_END) at.j = j + tile::smaller(key_of(n), columns);
    return at;
  }
};

// The mask bits of a thread's columns up to key `last`, counted from its first.
__device__ __forceinline__ unsigned int columns_to(int last) {
  const int highest = (last >> 3) * 2 + tile::smaller(last & 7, 1);
  return last < 0 ? 0 : (2u << highest) - 1;
}

// The distance of `position` from `first`, which is not negative; -1 if it lies before, BLOCK_KV if
// it lies beyond the tile.
__device__ __forceinline__ int distance(long long position, long long first) {
  if (position < first) return -1;
  return position - first < BLOCK_KV ? static_cast<int>(position - first) : BLOCK_KV;
}

__device__ constexpr int common_divisor(int a, int b) {
  return b == 0 ? a : common_divisor(b, a % b);
}
// Keys of the blocks of which a query sees one range, of a thread with so many columns.
__device__ constexpr int block_of(int columns) {
  return MASK_BLOCK == 0 ? 0 : common_divisor(MASK_BLOCK, 4 * columns);
}
constexpr int SMALLEST_BLOCK = 32;  // for which to solve for the range takes less than its pairs

// The mask bits of a thread's columns in row r of a PARTIAL tile, where a query sees a range of
// each block of keys.
template <int COLUMNS>
__device__ __forceinline__ unsigned int blocks_of_row(const Params& p, const TileBox& box,
                                                      const Pairs& pairs, int r) {
  constexpr int EACH = block_of(COLUMNS);
  static_assert(BLOCK_KV % (4 * COLUMNS) == 0, "blocks begin where tiles and parts of them do");
  const int start = static_cast<int>(box.j_low) + fragment::warp_key();
  const int own = start + fragment::lane_column();  // the thread's first key
  unsigned int found = 0;
#pragma unroll
  for (int n = 0; n < 4 * COLUMNS / EACH; ++n) {
    Site at = pairs.nearest<false>(box, r, 0);
    at.j = start + n * EACH;
    const BlockKeys keys = mask_block(p, at);
    const int first = start + n * EACH, last = first + EACH - 1;
    // Ends far away are brought near, so that no difference leaves 32 bits.
    const int high =
        keys.some ? matmul::larger(first - 1, tile::smaller(keys.high, last)) : first - 1;
    const int low = tile::smaller(matmul::larger(keys.low, first), last + 1);
    found |= columns_to(high - own) & ~columns_to(low - 1 - own);
  }
  return found;
}

// Evaluates the mask: bit n of mask[r] is set if the pair of element (r, n) exists and is not
// masked. If the mask is a range of keys, the range is computed once a row, without a branch, so
// that rows overlap; else mask_allows is instantiated for AT_ONCE columns. Returns whether any pair
// of the warp is unmasked.
template <int COLUMNS, int AT_ONCE = 1, int ROWS>
__device__ __forceinline__ bool evaluate_mask(const Params& p, const TileBox& box, int tile_class,
                                              unsigned int (&mask)[ROWS]) {
  static_assert(COLUMNS <= 32, "a row's answers are bits of a word");
  const Pairs pairs(box);
  const int first = fragment::warp_key() + fragment::lane_column();
  int low[ROWS], high[ROWS];  // keys, relative to the thread's first
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    low[r] = 0;
    high[r] = pairs.has_row(r) ? pairs.columns : -1;
  }
  if constexpr (HAS_RANGE) {
    if (tile_class == PARTIAL) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const KeyRange range = mask_range(p, pairs.nearest<false>(box, r, 0));
        const int last = distance(range.high, box.j_low) - first;
        high[r] = tile::smaller(last, high[r]);
        // Most ranges have no lower end, and the compiler can tell.
        if (range.low != SMALLEST_INT) {
          low[r] = distance(range.low, box.j_low) - first;
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) mask[r] = columns_to(high[r]) & ~columns_to(low[r] - 1);
  if constexpr (HAS_MASK && !HAS_RANGE && block_of(COLUMNS) >= SMALLEST_BLOCK) {
    if (tile_class == PARTIAL) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) mask[r] &= blocks_of_row<COLUMNS>(p, box, pairs, r);
    }
  } else if constexpr (HAS_MASK && !HAS_RANGE) {
    if (tile_class == PARTIAL) {
#pragma unroll AT_ONCE
      for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          // The compiler hoists what does not depend on the key out of the loop.
          if (!mask_allows(p, pairs.nearest(box, r, n))) mask[r] &= ~(1u << n);
        }
      }
    }
  }
  unsigned int any = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) any |= mask[r];
  return ptx::any_lane(any != 0);
}

// Sets the scores of masked pairs to -inf.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_mask(accum_t (&s)[ROWS][COLUMNS],
                                           const unsigned int (&mask)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if ((mask[r] >> n & 1) == 0) s[r][n] = -number::infinity();
    }
  }
}

// Sets the scores of keys that do not exist to -inf, in a tile of `keys` keys.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void mask_missing_keys(accum_t (&s)[ROWS][COLUMNS], int keys) {
  const int columns = keys - fragment::warp_key() - fragment::lane_column();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (Pairs::key_of(n) >= columns) s[r][n] = -number::infinity();
    }
  }
}

// Columns for which warpgroups evaluate a mask at a time, so that their loads overlap.
constexpr int MASK_COLUMNS_AT_ONCE = MASK_STEPS <= 16 ? 32 : 2;

// Columns whose score mod warpgroups instantiate at a time: all, unless its code is long.
constexpr bool IS_LONG_SCORE_MOD = SCORE_STEPS > 32;
__device__ constexpr int columns_at_once(int columns) {
  if (!IS_LONG_SCORE_MOD) return columns;
  return columns % 8 == 0 ? 8 : 4;
}

// Turns a thread's scores into logits: scale, then score mod. The results of pairs that do not
// exist are arbitrary; table look-ups for them are clamped to the last query and, with KEYS_END,
// the last key. The score mod is instantiated for STEP columns, through which all columns rotate.
// Returns whether any logit may be -inf.
template <bool KEYS_END, int STEP = 2, int ROWS, int COLUMNS>
__device__ __forceinline__ bool apply_score_mod(const Params& p, const HeadConstants& constants,
                                                const TileBox& box, accum_t (&s)[ROWS][COLUMNS],
                                                accum_t scale) {
  const Pairs pairs(box);
  accum_t sum[ROWS];  // of logits, not finite if one of them is not
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
        at.step_j = Pairs::key_of(n);  // `column` is no compile-time constant
        s[r][n] = score_mod(p, constants, s[r][n] * scale, at);
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

// The two numbers of a word of a bias of 16 bits.
__device__ __forceinline__ float low_half(unsigned int word) {
  if constexpr (BIAS_KIND == KIND_FLOAT16) {
    return ptx::half_to_float(static_cast<unsigned short>(word));
  } else {
    return number::bits_to_float(word << 16);
  }
}
__device__ __forceinline__ float high_half(unsigned int word) {
  if constexpr (BIAS_KIND == KIND_FLOAT16) {
    return ptx::half_to_float(static_cast<unsigned short>(word >> 16));
  } else {
    return number::bits_to_float(word & 0xffff0000u);
  }
}

// Scores become logits: scale, plus the bias. A bias of -inf hides a pair whatever its score is.
// Returns whether any logit may be -inf. All lanes of the warp call it together.
// `from` reads the bias of a group of four columns.
template <int ROWS, int COLUMNS, class From>
__device__ __forceinline__ bool add_bias(float (&s)[ROWS][COLUMNS], float scale, const From& from) {
  static_assert(COLUMNS % 4 == 0, "groups of 16 keys or queries");
  float sum[ROWS] = {};  // of logits, not finite if one of them is not
#pragma unroll
  for (int group = 0; group < COLUMNS / 4; ++group) {
    float bias[ROWS][4];
    from.read(group, bias);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float& logit = s[r][4 * group + n];
        logit = fma(logit, scale, bias[r][n]);
        sum[r] += logit;
      }
    }
  }
  bool nan = false, finite = true;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    nan = nan || sum[r] != sum[r];
    finite = finite && number::is_finite(sum[r]);
  }
  // Only a score that is not finite makes NaN of a bias of -inf, which is rare.
  if (ptx::any_lane(nan)) {
#pragma unroll 1
    for (int group = 0; group < COLUMNS / 4; ++group) {
      float bias[ROWS][4];
      from.read(group, bias);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if (bias[r][n] == -number::infinity()) s[r][n] = -number::infinity();
        }
      }
      fragment::rotate<4>(s);
    }
    return true;
  }
  return ptx::any_lane(!finite);
}

// The weight, if `mask` has all bits, or 0 with its sign, which tells a masked pair.
__device__ __forceinline__ float keep_weight(float weight, unsigned int mask) {
  return number::bits_to_float(__float_as_uint(weight) & (mask | 0x80000000u));
}
__device__ __forceinline__ double keep_weight(double weight, unsigned int mask) {
  return mask != 0 ? weight : copysign(0.0, weight);
}

// Applies dropout: the weight of a dropped pair becomes 0. The division by the probability of
// keeping is left to the epilogue. One draw serves eight pairs of a thread, in two rows and four
// columns.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_dropout(const Params& p, const TileBox& box,
                                              accum_t (&s)[ROWS][COLUMNS]) {
  static_assert(ROWS % 2 == 0, "groups of pairs");
  const philox::Key key = tile::seed_key(p);
  const unsigned long long b_h = tile::number_of_head(p, box);
  const auto i = static_cast<unsigned int>(tile::origin_q(p) + box.i_low + fragment::warp_row() +
                                           fragment::lane_row());
  const auto j = static_cast<unsigned long long>(tile::origin_k(p) + box.j_low +
                                                 fragment::warp_key() + fragment::lane_column());
  // Where warps share keys by eight, groups are not whole either.
  if (COLUMNS % 4 != 0 || !tile::groups_are_whole(p)) {
#pragma unroll 1
    for (int column = 0; column < COLUMNS; column += 2) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const bool keeps = philox::keep(key, p.drop_below, b_h, i + 8 * r,
                                          j + static_cast<unsigned int>(4 * column + n));
          s[r][n] = keep_weight(s[r][n], keeps ? ~0u : 0);
        }
      }
      fragment::rotate<2>(s);
    }
    return;
  }
  const unsigned int keys = philox::group_of_key(j), queries = philox::group_of_query(i);
  const unsigned int addend = philox::addend(p.drop_below);
#pragma unroll
  for (int column = 0; column < COLUMNS; column += 4) {
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
      const philox::Words drawn = philox::draw(key, keys + column, queries + 4 * r, b_h);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          const unsigned int bits = philox::keep_bits(drawn.word[2 * x + y], addend);
          accum_t* const pair = &s[r + x][column + 2 * y];
          pair[0] = keep_weight(pair[0], ptx::select_bytes(bits, 0, 0x9999));  // all its bit 15
          pair[1] = keep_weight(pair[1], ptx::select_bytes(bits, 0, 0xbbbb));  // or its bit 31
        }
      }
    }
  }
}

}  // namespace fragment_tile
