// What happens to a tile of scores before the softmax where they lie in fragments: the twin of
// reference/tile.py for tensor cores.
#pragma once
#include "fragment_rows.cuh"

namespace fragment_tile {

// A tile that is not EMPTY: the first of the rows that pass by, and how many of them exist. Without
// one there are none.
struct Next {
  long long first;
  int rows;
  int tile_class;
};

// The next such tile of BLOCK rows from row `first` on, of `length`; `describe` makes the box of a
// tile from its first row and their number.
template <int BLOCK, class Describe>
__device__ __forceinline__ Next next_tile(const Params& p, long long first, long long length,
                                          const Describe& describe) {
#pragma unroll 1
  for (; first < length; first += BLOCK) {
    const int rows = tile::rows_from(first, length, BLOCK);
    const int tile_class = tile::classify_tile(p, describe(first, rows));
    if (tile_class != EMPTY) return Next{first, rows, tile_class};
  }
  return Next{first, 0, EMPTY};
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
  __device__ __forceinline__ bool has(int r, int n) const {
    return 8 * r <= rows && key_of(n) <= columns;
  }
  __device__ __forceinline__ Site site(const TileBox& box, int r, int n) const {
    return Site{box.b,     box.h,     i + 8 * r,   j + key_of(n),
                box.len_q, box.len_k, box.start_q, box.start_k};
  }
  __device__ __forceinline__ void advance(int n) {
    j += 4 * n;
    columns -= 4 * n;
  }
};

// Masks a thread's scores: pairs that take no part, and those beyond the end of the queries or
// keys, get -inf. Generated code stands here for one column, and says its answers by bits.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_mask(const Params& p, const TileBox& box, int tile_class,
                                           accum_t (&s)[ROWS][COLUMNS]) {
  static_assert(COLUMNS <= 32, "a row's answers are bits of a word");
  const Pairs pairs(box);
  unsigned int allowed[ROWS] = {};
#pragma unroll 1
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      bool allow = pairs.has(r, n);
      if constexpr (HAS_MASK) {
        if (allow && tile_class == PARTIAL) allow = mask_allows(p, pairs.site(box, r, n));
      }
      allowed[r] |= static_cast<unsigned int>(allow) << n;
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if ((allowed[r] >> n & 1u) == 0) s[r][n] = -number::infinity();
    }
  }
}

// Changes and masks a thread's scores, which are logits after it where scores are changed.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_score_and_mask(const Params& p, const TileBox& box,
                                                     int tile_class, accum_t (&s)[ROWS][COLUMNS],
                                                     accum_t scale) {
  if constexpr (!HAS_SCORE) {
    apply_mask(p, box, tile_class, s);
  } else {
    Pairs pairs(box);
#pragma unroll 1
    for (int column = 0; column < COLUMNS; column += 2) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          accum_t score = -number::infinity();
          if (pairs.has(r, n)) {
            const Site at = pairs.site(box, r, n);
            score = tile::change(p, at, tile_class == PARTIAL, s[r][n] * scale, nullptr);
          }
          s[r][n] = score;
        }
      }
      fragment::rotate<2>(s);
      pairs.advance(2);
    }
  }
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
  const bool second = arch::lane_index() % 2 != 0;
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
        const unsigned int got = arch::shuffle_xor(given, 1);
        const unsigned int word[2] = {second ? got : kept, second ? kept : got};
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          accum_t& weight = s[r + x][n];
          if (word[x] < p.drop_below && matmul::takes_part(weight)) weight *= accum_t(0);
        }
      }
    }
    fragment::rotate<2>(s);
    group += 2;
  }
}

}  // namespace fragment_tile
