// The scores of a leaf before the softmax, for decode kernels on tensor cores: masks and score
// mods. The twin of reference/cpu/tile.py.
//
// A thread has two rows of a task, or of several, `first_row` and the one 8 further, and COLUMNS
// of a leaf.
#pragma once
#include "../decode/cursor.cuh"
#include "fragment_tile.cuh"

namespace decode_scores {

using decode::LEAF;
constexpr int COLUMNS = LEAF / 4;  // of a thread, in each of its two rows

// The mask bits of a thread's pairs, as fragment_tile::evaluate_mask has them.
template <class Rows>
__device__ __forceinline__ void evaluate_mask(const Params& p, const Rows& task,
                                              const decode::Leaf& leaf, int first_row,
                                              unsigned int (&mask)[2]) {
  const int lane_column = fragment::lane_column();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r;
    int low = 0, high = row < task.rows ? leaf.keys - 1 - lane_column : -1;
    const int nearest = row < task.rows ? row : task.rows - 1;
    if constexpr (HAS_RANGE) {
      if (leaf.tile_class == PARTIAL) {
        const KeyRange range = mask_range(p, site_of(task, nearest, leaf.first_key()));
        high = tile::smaller(fragment_tile::distance(range.high, leaf.first_key()) - lane_column,
                             high);
        low = fragment_tile::distance(range.low, leaf.first_key()) - lane_column;
      }
    }
    mask[r] = fragment_tile::columns_to(high) & ~fragment_tile::columns_to(low - 1);
    if constexpr (HAS_MASK && !HAS_RANGE) {
      if (leaf.tile_class == PARTIAL && leaf.keys > 0) {
#pragma unroll 1
        for (int n = 0; n < COLUMNS; ++n) {
          const int key =
              tile::smaller(lane_column + fragment_tile::Pairs::key_of(n), leaf.keys - 1);
          if (!mask_allows(p, site_of(task, nearest, leaf.first_key() + key))) {
            mask[r] &= ~(1u << n);
          }
        }
      }
    }
  }
}

// Turns a thread's scores into logits. Returns whether any of the warp's may be -inf.
template <class Rows>
__device__ __forceinline__ bool apply_score_mod(const Params& p, const Rows& task,
                                                const decode::Leaf& leaf, int first_row,
                                                accum_t (&s)[2][COLUMNS], accum_t scale) {
  accum_t sum[2] = {0, 0};  // of logits, not finite if one of them is not
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Site at = site_of(task, tile::smaller(first_row + 8 * r, task.rows - 1), leaf.first_key());
      const HeadConstants constants = score_head_constants(p, at);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int key = fragment::lane_column() + fragment_tile::Pairs::key_of(column + n);
        at.j = leaf.first_key() + tile::smaller(key, matmul::larger(leaf.keys - 1, 0));
        s[r][n] = score_mod(p, constants, s[r][n] * scale, at);
        sum[r] += s[r][n];
      }
    }
    fragment::rotate<2>(s);
  }
  return ptx::any_lane(!number::is_finite(sum[0]) || !number::is_finite(sum[1]));
}

}  // namespace decode_scores
