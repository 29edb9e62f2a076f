// What happens to a tile of scores before the softmax where they lie in fragments: the twin of
// reference/tile.py for tensor cores.
#pragma once
#include "fragment.cuh"

namespace fragment_tile {

// A tile of keys that is not EMPTY. Without one, `nj` is 0.
struct Keys {
  long long j0;
  int nj;
  int tile_class;
};

// The first such tile from key `j0` on. Where a class is arithmetic alone, each lane asks for a
// tile: a causal mask leaves many EMPTY ones behind the last that is not.
__device__ __forceinline__ Keys next_tile(const Params& p, const layout::Entry& entry, long long h,
                                          long long i0, int ni, long long j0) {
  constexpr int APART = HAS_MASK && !HAS_TABLES ? arch::WARP_SIZE : 1;
#pragma unroll 1
  for (; j0 < entry.len_k; j0 += APART * BLOCK_KV) {
    long long own = j0 + (APART > 1 ? arch::lane_index() * BLOCK_KV : 0);
    int tile_class = EMPTY;
    if (APART == 1 || own < entry.len_k) {
      const int nj = tile::rows_from(own, entry.len_k, BLOCK_KV);
      tile_class = tile::classify_tile(p, tile::describe_tile(entry, h, i0, ni, own, nj));
    }
    if constexpr (APART > 1) {
      const unsigned int found = arch::ballot(tile_class != EMPTY);
      if (found == 0) continue;
      const int lane = __ffs(static_cast<int>(found)) - 1;
      tile_class = arch::shuffle(tile_class, lane);
      own = j0 + lane * BLOCK_KV;
    }
    if (tile_class != EMPTY) {
      return Keys{own, tile::rows_from(own, entry.len_k, BLOCK_KV), tile_class};
    }
  }
  return Keys{j0, 0, EMPTY};
}

// Changes and masks a thread's scores, which are logits after it where scores are changed. Pairs
// beyond the end of the queries or keys get -inf. Where generated code may be long it stands here
// for two columns, which every pair of columns passes.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_score_and_mask(const Params& p, const TileBox& box,
                                                     int tile_class, float (&s)[ROWS][COLUMNS],
                                                     float scale) {
  constexpr int STEP = HAS_SCORE || HAS_TABLES ? 2 : 4;
  const int row = fragment::warp_row() + fragment::lane_row();
  const int rows = static_cast<int>(box.i_high - box.i_low) - row;
  int columns = static_cast<int>(box.j_high - box.j_low) - fragment::lane_column();
  const long long i = box.i_low + row;
  long long j = box.j_low + fragment::lane_column();
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += STEP) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < STEP; ++n) {
        const Site at{box.b,     box.h,     i + 8 * r,   j + 8 * (n / 2) + n % 2,
                      box.len_q, box.len_k, box.start_q, box.start_k};
        float score = -number::infinity();
        if (8 * r <= rows && 8 * (n / 2) + n % 2 <= columns) {
          score = HAS_SCORE ? s[r][n] * scale : s[r][n];
          score = tile::change(p, at, tile_class == PARTIAL, score, nullptr);
        }
        s[r][n] = score;
      }
    }
    if constexpr (STEP < COLUMNS) fragment::rotate<STEP>(s);
    j += 4 * STEP;
    columns -= 4 * STEP;
  }
}

// Drops weights: a pair that is dropped gets the weight 0, and what survives is divided by the
// probability of that at the end. One draw serves four keys of a row, which two lanes hold: of two
// rows, each of the lanes draws for one.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void apply_dropout(const Params& p, const TileBox& box,
                                              float (&s)[ROWS][COLUMNS]) {
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
          float& weight = s[r + x][n];
          if (word[x] < p.drop_below && matmul::takes_part(weight)) weight *= 0.0f;
        }
      }
    }
    fragment::rotate<2>(s);
    group += 2;
  }
}

}  // namespace fragment_tile
