// Tiles of scores that were given the same tile of a bias, one after the other: what a block of
// backward_sm80_bias.cu or backward_sm90_bias.cu knows of them, in shared memory, because registers
// hold the sums.
#pragma once
#include "../common/bias_tile.cuh"
#include "fragment_gradient.cuh"
#include "fragment_tile.cuh"

namespace fragment_bias {

constexpr int STRIDE = BLOCK_KV + 8;  // numbers between rows of sums in shared memory

// Where a tile of scores lies, and its rows that exist.
struct Place {
  layout::Entry entry;
  long long h, i0, j0;
  int ni, nj;

  __device__ __forceinline__ TileBox box() const {
    return tile::describe_tile(entry, h, i0, ni, j0, nj);
  }
};

// A tile and its operands.
struct Passing {
  Place at;
  int tile_class;
  memory::Rows rows[4];  // of q, k, do and v
  memory::RowStatistic lse, delta;

  __device__ __forceinline__ bool masked() const {
    return tile_class == PARTIAL || at.nj < BLOCK_KV || at.ni < BLOCK_Q;
  }
};

struct Known {
  bias_tile::BiasTile own;
  Passing passing[2];  // now, and next
  fragment_tile::Classes classes;
  float lse[2][BLOCK_Q], delta[2][BLOCK_Q];
};

// The tiles are numbers: of batch entries, heads, and blocks of queries and of keys, as far as the
// bias is broadcast along them. Of packed arrays some do not exist.
struct Tiles {
  const Params& p;
  Known& known_smem;
  long long heads, blocks_q, blocks_k, end;

  __device__ __forceinline__ Tiles(const Params& p, Known& known_smem)
      : p(p),
        known_smem(known_smem),
        heads(known_smem.own.one_head ? p.heads : 1),
        blocks_q(known_smem.own.one_query ? (p.len_q + BLOCK_Q - 1) / BLOCK_Q : 1),
        blocks_k(known_smem.own.one_key ? (p.len_k + BLOCK_KV - 1) / BLOCK_KV : 1),
        end(layout::entries_sharing(p) * heads * blocks_q * blocks_k) {}

  __device__ __forceinline__ Place place_of(long long number) const {
    const bias_tile::BiasTile& own = known_smem.own;
    const layout::Quotient of_keys = layout::divide(number, blocks_k);
    const layout::Quotient of_queries = layout::divide(of_keys.quotient, blocks_q);
    const layout::Quotient of_heads = layout::divide(of_queries.quotient, heads);
    const layout::Entry entry = layout::shared_entry(p, own.first, of_heads.quotient);
    const long long h = own.one_head ? of_heads.remainder : own.head;
    const long long i0 = (own.one_query ? of_queries.remainder : own.q_block) * BLOCK_Q;
    const long long j0 = (own.one_key ? of_keys.remainder : own.kv_block) * BLOCK_KV;
    return Place{entry,
                 h,
                 i0,
                 j0,
                 tile::rows_from(i0, entry.len_q, BLOCK_Q),
                 tile::rows_from(j0, entry.len_k, BLOCK_KV)};
  }

  // The first tile from `number` on that exists and is not EMPTY.
  __device__ __forceinline__ fragment_tile::Tile next_from(long long number) const {
    const auto describe = [&](long long own, int) { return place_of(own).box(); };
    fragment_tile::Tile found{};
#pragma unroll 1
    do {
      found = fragment_tile::next_tile<1>(p, known_smem.classes, number, end, describe);
      if (!PACKED || found.rows == 0) break;
      const Place at = place_of(found.first);
      if (at.ni > 0 && at.nj > 0) break;
      number = found.first + 1;
    } while (true);
    return found;
  }

  // Tells of a tile that was found, if it was, a lane of each operand; what reads it comes behind a
  // barrier.
  __device__ __forceinline__ void tell(const fragment_tile::Tile& found, int slot) const {
    const int lane = threadIdx.x;
    if (lane > 4 || found.rows == 0) return;
    Passing& passing = known_smem.passing[slot];
    const Place at = place_of(found.first);
    if (lane == 4) {
      passing.at = at;
      passing.tile_class = found.tile_class;
      passing.lse = memory::row_statistic(p.lse, at.entry, at.h);
      passing.delta = memory::row_statistic(p.delta, at.entry, at.h);
      return;
    }
    const bool of_keys = lane % 2 != 0;
    const Operand& of = of_keys ? (lane == 1 ? p.k : p.v) : (lane == 0 ? p.q : p.d_out);
    const long long h = of_keys ? layout::divide(at.h, p.group).quotient : at.h;
    passing.rows[lane] = memory::rows(of, at.entry, h, of_keys);
  }
};

// Makes a thread's products q k into probabilities; a pair that takes no part has the weight that
// says so. Generated code stands here for all of its pairs, unless that is long. `between` comes
// where fewest registers are in use. Returns whether any pair takes no part.
template <int ROWS, int COLUMNS, class Between>
__device__ __forceinline__ bool weigh(const Params& p, const HeadConstants& given, float scale,
                                      const TileBox& box, bool masked,
                                      unsigned int (&allowed)[ROWS], float (&s)[ROWS][COLUMNS],
                                      const fragment_gradient::Corner& corner,
                                      const float* lse_smem, const Between& between) {
  // 3 score mod
  if constexpr (fragment_tile::IS_LONG_SCORE_MOD) {
    between();
    unsigned int kept[ROWS] = {}, weights[ROWS][COLUMNS / 2];
    return fragment_gradient::recompute_modified<false, 0, 4>(p, given, scale, box, masked, allowed,
                                                              s, corner, lse_smem, kept, weights,
                                                              nullptr) ||
           masked;
  } else {
    const bool hides =
        fragment_gradient::apply_score_mod<false>(p, given, scale, box, s, corner) || masked;
    // 4 mask
    if (hides) fragment_gradient::mask_infinite(s, masked, allowed);
    between();
    // 5 probabilities and the gradient of the output's weights
    const fragment_gradient::PerQuery<false, ROWS, COLUMNS> lse(lse_smem);
    if (hides) {
      fragment_gradient::exponentiate<true>(s, lse, tile::LOG2_E, allowed);
    } else {
      fragment_gradient::exponentiate<false>(s, lse, tile::LOG2_E, allowed);
    }
    return hides;
  }
}

// Writes a thread's sums to shared memory, from its corner on.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void put_sums(const float (&total)[ROWS][COLUMNS],
                                         const fragment_gradient::Corner& corner,
                                         float* sums_smem) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      sums_smem[(corner.row + 8 * r) * STRIDE + corner.column + 8 * (n / 2) + n % 2] = total[r][n];
    }
  }
}

}  // namespace fragment_bias
