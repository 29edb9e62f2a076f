// A tile of scores before the softmax: its class, score mods, masks, dropout. The
// twin of reference/cpu/tile.py.
//
// A thread's scores are in registers for the products. To modify them the thread writes them to its
// own cells of the tile in shared memory and loops over these, so that generated code is
// instantiated once and not once per register.
#pragma once
#include "lookup.cuh"
#include "matmul.cuh"
#include "philox.cuh"
#include "tile_lists.cuh"

// A pair of a query and a key. step_i and step_j are the parts of i and j that the compiler knows,
// for `distance` of cupyflash/expr/distance.py.
struct Site {
  long long b, h, i, j, len_q, len_k, start_q, start_k;
  int step_i = 0, step_j = 0;
};

// The bounds of a tile of pairs: i_low to i_high and j_low to j_high, inclusive.
struct TileBox {
  long long b, h, i_low, i_high, j_low, j_high, len_q, len_k, start_q, start_k;
};

// The first and the last key of a query whose mask is a contiguous range of keys.
struct KeyRange {
  long long low, high;
};

// What a query sees of a block of MASK_BLOCK keys: whether any, and if so from the first key to the
// last one, which may lie beyond the block.
struct BlockKeys {
  bool some;
  int low, high;
};

// Values that score mods use and that are the same for all pairs of a head.
struct HeadConstants {
  accum_t x[NUM_HEAD_CONSTANTS];
};

constexpr int EMPTY = 0, PARTIAL = 1, FULL = 2;
// Whether a bias comes in tiles of its own, and is not part of the score change.
constexpr bool HAS_BIAS_TILES = BIAS_KIND >= 0;
constexpr bool CHANGES_SCORES = HAS_SCORE || HAS_BIAS_TILES;
constexpr bool MAY_MASK = HAS_MASK || CHANGES_SCORES;

// Generated from the expressions of masks and scores; each is defined if its flag is set.
__device__ bool mask_allows(const Params& p, const Site& at);
__device__ KeyRange mask_range(const Params& p, const Site& at);
__device__ BlockKeys mask_block(const Params& p, const Site& at);  // at the block's first key
__device__ int tile_class(const Params& p, const TileBox& at);
__device__ HeadConstants score_head_constants(const Params& p, const Site& at);
__device__ accum_t score_mod(const Params& p, const HeadConstants& constants, accum_t score,
                             const Site& at);
__device__ accum_t score_mod_derivative(const Params& p, const HeadConstants& constants,
                                        accum_t score, const Site& at);

namespace tile {

__device__ __forceinline__ int smaller(long long x, int limit) {
  return x < limit ? static_cast<int>(x) : limit;
}

__device__ __forceinline__ int smaller(int x, int limit) { return x < limit ? x : limit; }

// Rows that exist in a block of rows that begins at `first`.
__device__ __forceinline__ int rows_from(long long first, long long length, int block) {
  return smaller(length - first, block);
}

__device__ __forceinline__ TileBox describe_tile(const layout::Entry& entry, long long h,
                                                 long long i0, int ni, long long j0, int nj) {
  return TileBox{entry.b,     h,           i0,          i0 + ni - 1,   j0,
                 j0 + nj - 1, entry.len_q, entry.len_k, entry.start_q, entry.start_k};
}

// Where HAS_LISTS, bits 0 and 1: whether the tile that begins with a query and a key is not EMPTY,
// and is FULL.
__device__ __forceinline__ unsigned int listed_bits(const Params& p, long long b, long long h,
                                                    long long i, long long j) {
  using namespace tile_lists;
  const Table& lists = table(p);
  const int of_query = static_cast<int>(i) / BLOCK_Q, of_key = static_cast<int>(j) / BLOCK_KV;
  const bool of_keys = lists.shape[OF_KEYS] != 0;
  const int tile = (of_keys ? of_query : of_key) >> static_cast<int>(lists.shape[SHIFT]);
  const ClassWord word = words_of(p, b, h, of_keys ? of_key : of_query)[tile / TILES];
  return (word.nonempty >> tile % TILES & 1) | (word.full >> tile % TILES & 1) << 1;
}

// EMPTY, PARTIAL or FULL. All threads of the block call it together and get the same answer.
__device__ __forceinline__ int classify_tile(const Params& p, const TileBox& box) {
  if constexpr (HAS_LISTS) {
    const unsigned int bits = listed_bits(p, box.b, box.h, box.i_low, box.j_low);
    return bits == 0 ? EMPTY : bits == 1 ? PARTIAL : FULL;
  } else if constexpr (HAS_MASK) {
    return tile_class(p, box);
  } else {
    return FULL;
  }
}

// How many of the `nj` keys of a tile that is not EMPTY take part: the first half where no query
// sees another, as in every second diagonal tile if a tile has twice as many keys as queries. All
// threads of the block call it together and get the same answer.
constexpr bool HALVES_KEYS = HAS_MASK && !HAS_LISTS && BLOCK_KV > BLOCK_Q;
__device__ __forceinline__ int keys_of(const Params& p, TileBox box, int tile_class, int nj) {
  if constexpr (HALVES_KEYS) {
    if (tile_class == PARTIAL && nj > BLOCK_KV / 2) {
      box.j_low += BLOCK_KV / 2;
      if (::tile_class(p, box) == EMPTY) return BLOCK_KV / 2;
    }
  }
  return nj;
}

// The constants of a head, computed from any of its tiles. The shuffle keeps the compiler from
// recomputing them at every use. All lanes of the warp call it together.
__device__ __forceinline__ HeadConstants head_constants_of(const Params& p, const TileBox& box) {
  HeadConstants constants{};
  if constexpr (HAS_SCORE) {
    constants = score_head_constants(p, Site{box.b, box.h, box.i_low, box.j_low, box.len_q,
                                             box.len_k, box.start_q, box.start_k});
#pragma unroll
    for (int n = 0; n < NUM_HEAD_CONSTANTS; ++n) constants.x[n] = ptx::shuffle(constants.x[n], 0);
  }
  return constants;
}

__device__ __forceinline__ bool is_whole(const TileBox& box) {
  return box.i_high - box.i_low + 1 == BLOCK_Q && box.j_high - box.j_low + 1 == BLOCK_KV;
}

// The offset of a thread's element (r, n) in a tile whose rows are STRIDE elements apart.
template <int STRIDE>
__device__ __forceinline__ int cell(int r, int n) {
  return (matmul::row_thread() + ROW_THREADS * r) * STRIDE + matmul::column_thread() +
         COLUMN_THREADS * n;
}

template <int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_cells(const accum_t (&s)[ROWS][COLUMNS], accum_t* tile_smem) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) tile_smem[cell<STRIDE>(r, n)] = s[r][n];
  }
}

template <int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void load_cells(accum_t (&s)[ROWS][COLUMNS], const accum_t* tile_smem) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) s[r][n] = tile_smem[cell<STRIDE>(r, n)];
  }
}

// The score of one pair after score mod and mask, -inf if it is masked; its derivative in *dscore.
__device__ __forceinline__ accum_t modify_score(const Params& p, const HeadConstants& constants,
                                                const Site& at, bool masked, accum_t score,
                                                accum_t* dscore) {
  // 3 score mod
  if constexpr (HAS_DSCORE) {
    if (dscore != nullptr) *dscore = score_mod_derivative(p, constants, score, at);
  }
  if constexpr (HAS_SCORE) score = score_mod(p, constants, score, at);
  // 4 mask
  if constexpr (HAS_MASK) {
    if (masked && !mask_allows(p, at)) score = -number::infinity();
  }
  return score;
}

// The same, for a pair alone.
__device__ __forceinline__ accum_t modify_score(const Params& p, const Site& at, bool masked,
                                                accum_t score, accum_t* dscore) {
  HeadConstants constants{};
  if constexpr (HAS_SCORE) constants = score_head_constants(p, at);
  return modify_score(p, constants, at, masked, score, dscore);
}

// The pair at a row and a column of a tile.
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ Site site(const TileBox& box, int row, int column) {
  return Site{box.b,
              box.h,
              box.i_low + (KEYS_ARE_ROWS ? column : row),
              box.j_low + (KEYS_ARE_ROWS ? row : column),
              box.len_q,
              box.len_k,
              box.start_q,
              box.start_k};
}

// The row or the column of a tile of a thread's element `n` along that axis.
__device__ __forceinline__ int row_of(int n) { return matmul::row_thread() + ROW_THREADS * n; }
__device__ __forceinline__ int column_of(int n) {
  return matmul::column_thread() + COLUMN_THREADS * n;
}

// The distance of `position` from `first`, which is not negative; -1 if it lies before, BLOCK_KV if
// it lies beyond the tile.
__device__ __forceinline__ int distance(long long position, long long first) {
  if (position < first) return -1;
  return position - first < BLOCK_KV ? static_cast<int>(position - first) : BLOCK_KV;
}

// Whether scores change and are masked in registers: a change of more operations would be too much
// code for each pair, and a mask has to be a range of keys.
constexpr int MOST_STEPS = 16;
constexpr bool IN_REGISTERS =
    !HAS_DSCORE && (!HAS_SCORE || SCORE_STEPS <= MOST_STEPS) && (!HAS_MASK || HAS_RANGE);

// Applies a score mod to a thread's scores. The results of pairs that do not exist are arbitrary;
// look-ups for them are clamped to the last query and the last key.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void change_scores(const Params& p, const TileBox& box,
                                              accum_t (&s)[ROWS][COLUMNS]) {
  const int last_row =
      static_cast<int>(KEYS_ARE_ROWS ? box.j_high - box.j_low : box.i_high - box.i_low);
  const int last_column =
      static_cast<int>(KEYS_ARE_ROWS ? box.i_high - box.i_low : box.j_high - box.j_low);
  const HeadConstants constants = head_constants_of(p, box);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const Site at = site<KEYS_ARE_ROWS>(box, smaller(row_of(r), last_row),
                                          smaller(column_of(n), last_column));
      s[r][n] = score_mod(p, constants, s[r][n], at);
    }
  }
}

// Gives -inf to those of a thread's scores whose pairs do not exist, or that a mask hides which
// lets a query see a range of keys. The range is computed once for each of the thread's queries.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void mask_by_range(const Params& p, const TileBox& box, int tile_class,
                                              accum_t (&s)[ROWS][COLUMNS]) {
  constexpr int QUERIES = KEYS_ARE_ROWS ? COLUMNS : ROWS, KEYS = KEYS_ARE_ROWS ? ROWS : COLUMNS;
  const int last_query = static_cast<int>(box.i_high - box.i_low);
  const int last_key = static_cast<int>(box.j_high - box.j_low);
#pragma unroll
  for (int x = 0; x < QUERIES; ++x) {
    const int query = KEYS_ARE_ROWS ? column_of(x) : row_of(x);
    int low = 0, high = query <= last_query ? last_key : -1;
    if constexpr (HAS_RANGE) {
      if (tile_class == PARTIAL) {
        const int nearest = smaller(query, last_query);
        const KeyRange range = mask_range(
            p, site<KEYS_ARE_ROWS>(box, KEYS_ARE_ROWS ? 0 : nearest, KEYS_ARE_ROWS ? nearest : 0));
        high = smaller(distance(range.high, box.j_low), high);
        // Most ranges have no lower end, and the compiler can tell.
        if (range.low != SMALLEST_INT) low = distance(range.low, box.j_low);
      }
    }
#pragma unroll
    for (int y = 0; y < KEYS; ++y) {
      const int key = KEYS_ARE_ROWS ? row_of(y) : column_of(y);
      accum_t& score = KEYS_ARE_ROWS ? s[y][x] : s[x][y];
      if (key < low || key > high) score = -number::infinity();
    }
  }
}

// Applies score mod and mask to a thread's scores. Pairs beyond the last query or key get -inf.
// tile_smem is scratch memory for the thread's cells; dscore_smem, if not null, receives the
// derivatives there.
template <bool KEYS_ARE_ROWS, int STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_score_and_mask(const Params& p, const TileBox& box,
                                                     int tile_class, accum_t (&s)[ROWS][COLUMNS],
                                                     accum_t* tile_smem, accum_t* dscore_smem) {
  const bool hides = tile_class != FULL || !is_whole(box);
  if constexpr (IN_REGISTERS) {
    if constexpr (HAS_SCORE) change_scores<KEYS_ARE_ROWS>(p, box, s);
    if (hides) mask_by_range<KEYS_ARE_ROWS>(p, box, tile_class, s);
  } else {
    if (!HAS_SCORE && !HAS_DSCORE && !hides) return;
    const HeadConstants constants = head_constants_of(p, box);
    store_cells<STRIDE>(s, tile_smem);
#pragma unroll 1
    for (int n = 0; n < ROWS * COLUMNS; ++n) {
      const int row = row_of(n / COLUMNS), column = column_of(n % COLUMNS);
      const int offset = row * STRIDE + column;
      const Site at = site<KEYS_ARE_ROWS>(box, row, column);
      accum_t score = -number::infinity();
      if (at.i <= box.i_high && at.j <= box.j_high) {
        score = modify_score(p, constants, at, tile_class == PARTIAL, tile_smem[offset],
                             dscore_smem == nullptr ? nullptr : dscore_smem + offset);
      }
      tile_smem[offset] = score;
    }
    load_cells<STRIDE>(s, tile_smem);
  }
}

// The first query and the first key of a launch, and the head of a tile among those of all entries,
// as dropout counts them. A piece of a larger problem has where it begins there, and the heads of
// an entry, as the last numbers of its expressions.
__device__ __forceinline__ long long origin_q(const Params& p) {
  if constexpr (HAS_ORIGINS) return p.ints[NUM_INTS - 4];
  return 0;
}
__device__ __forceinline__ long long origin_k(const Params& p) {
  if constexpr (HAS_ORIGINS) return p.ints[NUM_INTS - 3];
  return 0;
}
__device__ __forceinline__ unsigned long long number_of_head(const Params& p, const TileBox& box) {
  long long b_h = 0;
  if constexpr (HAS_ORIGINS) {
    b_h = p.ints[NUM_INTS - 2] + box.b * p.ints[NUM_INTS - 1] + box.h;
  } else {
    b_h = box.b * p.heads + box.h;
  }
  return static_cast<unsigned long long>(b_h);
}

// Whether groups of pairs that share a draw are whole in a launch, whose tiles begin at multiples
// of 16: a piece may begin anywhere.
__device__ __forceinline__ bool groups_are_whole(const Params& p) {
  return !HAS_ORIGINS || ((origin_q(p) | origin_k(p)) & 15) == 0;
}

__device__ __forceinline__ philox::Key seed_key(const Params& p) {
  return philox::split_seed(p.seed_gmem != nullptr ? *p.seed_gmem : p.seed);
}

// Applies dropout to a tile of weights and writes the result to `to_smem`, which may be the tile
// itself: 0 for a dropped pair, else the weight divided by the probability of being kept. One draw
// serves four keys, so threads work on cells of others: the caller synchronises before and after.
template <bool KEYS_ARE_ROWS, int STRIDE>
__device__ __forceinline__ void apply_dropout(const Params& p, const TileBox& box,
                                              const accum_t* tile_smem, accum_t* to_smem) {
  static_assert(BLOCK_KV % 4 == 0, "a tile's keys are whole groups of four");
  const philox::Key key = seed_key(p);
  const accum_t keep_scale = static_cast<accum_t>(p.keep_scale);
  const unsigned long long b_h = number_of_head(p, box);
  const unsigned int addend = philox::addend(p.drop_below);
  const bool whole = BLOCK_KV % 16 == 0 && (!HAS_ORIGINS || (origin_k(p) & 15) == 0);
#pragma unroll 1
  for (int n = threadIdx.x; n < BLOCK_Q * BLOCK_KV / 4; n += THREADS) {
    // Neighbouring threads work on neighbouring cells.
    const int row = KEYS_ARE_ROWS ? n % BLOCK_Q : n / (BLOCK_KV / 4);
    const int group = KEYS_ARE_ROWS ? n / BLOCK_Q : n % (BLOCK_KV / 4);
    const unsigned int i = static_cast<unsigned int>(origin_q(p) + box.i_low + row);
    const int first = whole ? group / 4 * 16 + group % 4 * 2 : 4 * group;
    const auto j_of = [&](int y, int z) { return first + (whole ? 8 : 2) * y + z; };
    unsigned int kept = 0;  // bit 2 y + z
    if (whole) {
      const unsigned long long j = static_cast<unsigned long long>(origin_k(p) + box.j_low + first);
      const philox::TwoWords words = philox::words_of_query(
          philox::draw(key, philox::group_of_key(j), philox::group_of_query(i), b_h), i);
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const unsigned int bits = philox::keep_bits(words.word[y], addend);
        kept |= (bits >> 15 & 1u) << 2 * y | bits >> 31 << (2 * y + 1);
      }
    } else {
#pragma unroll 1
      for (int x = 0; x < 4; ++x) {
        const long long j = origin_k(p) + box.j_low + first + x;
        const bool keeps =
            philox::keep(key, p.drop_below, b_h, i, static_cast<unsigned long long>(j));
        kept |= (keeps ? 1u : 0u) << x;
      }
    }
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int j = j_of(x / 2, x % 2);
      const int offset = KEYS_ARE_ROWS ? j * STRIDE + row : row * STRIDE + j;
      const accum_t weight = tile_smem[offset];
      const accum_t left = (kept >> x & 1u) != 0 ? weight * keep_scale : weight * accum_t(0);
      to_smem[offset] = matmul::is_unmasked(weight) ? left : weight;
    }
  }
}

// Adds to the debug build's counter of tiles that were visited.
__device__ __forceinline__ void count_tiles(const Params& p, unsigned long long visited) {
  if constexpr (COUNT_TILES) {
    if (threadIdx.x == 0) atomicAdd(p.tiles_visited, visited);
  }
}

}  // namespace tile
