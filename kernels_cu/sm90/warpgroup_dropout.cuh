// Dropout of a tile of the backward by warpgroups, drawn for all pairs of a thread at once. The
// twin of the draws in reference/cpu/gradient_tile.py.
#pragma once
#include "../warp/fragment_gradient_ds.cuh"

namespace warpgroup_dropout {

// Which pairs of a thread dropout keeps: two keys, 8 apart, and COLUMNS queries, in one word. Its
// halves have the queries of even and of odd columns.
template <int COLUMNS>
struct Kept {
  static_assert(COLUMNS % 4 == 0 && COLUMNS <= 16, "bits of a word");
  unsigned int bits;

  // The bit of element (r, n).
  __device__ __forceinline__ static int place_of(int r, int n) {
    return n % 2 * 16 + (16 - COLUMNS) + n / 2 * 2 + r;
  }
  // Counted from column `first` on, an even one.
  __device__ __forceinline__ Kept from(int first) const { return Kept{bits >> first}; }
  // Bit n of a row's word.
  __device__ __forceinline__ void split(unsigned int (&rows)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[r] = 0;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) rows[r] |= (bits >> place_of(r, n) & 1u) << n;
    }
  }
};

template <int COLUMNS>
__device__ __forceinline__ bool keeps(const Kept<COLUMNS>& kept, int r, int n) {
  return (kept.bits >> Kept<COLUMNS>::place_of(r, n) & 1u) != 0;
}

// The keys of all rounds; if IN_REGISTERS, for all draws: the compiler would add them up for each,
// but does not shuffle again.
template <bool IN_REGISTERS>
__device__ __forceinline__ philox::DropoutKeys dropout_keys(const Params& p) {
  philox::DropoutKeys keys(HAS_DROPOUT ? tile::seed_key(p) : philox::Key{});
  if constexpr (HAS_DROPOUT && IN_REGISTERS) {
#pragma unroll
    for (int round = 0; round < philox::DROPOUT_ROUNDS; ++round) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        keys.round[round].word[x] = ptx::shuffle(keys.round[round].word[x], 0);
      }
    }
  }
  return keys;
}

// Draws for a tile. One draw serves the four keys and two queries of two lanes: each makes that for
// one of two neighbouring queries, and they swap all halves of words at once.
template <int COLUMNS>
__device__ __forceinline__ Kept<COLUMNS> draw_dropout(const Params& p,
                                                      const philox::DropoutKeys& key,
                                                      const TileBox& box,
                                                      const fragment_gradient::Corner& corner) {
  const unsigned long long b_h = tile::number_of_head(p, box);
  const auto i = static_cast<unsigned int>(tile::origin_q(p) + box.i_low + corner.column);
  const auto j = static_cast<unsigned long long>(tile::origin_k(p) + box.j_low + corner.row);
  Kept<COLUMNS> kept{0};
  if (!tile::groups_are_whole(p)) {
#pragma unroll 1
    for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool own = philox::keep(key.round[0], p.drop_below, b_h,
                                      i + fragment_gradient::query_of<true>(r, n), j + 8 * r);
        kept.bits |= (own ? 1u : 0u) << Kept<COLUMNS>::place_of(r, n);
      }
    }
    return kept;
  }
  // The place of the lane's key in its pair, and of the query for which it draws.
  const unsigned int place = ptx::lane_index() / 4 % 2;
  const unsigned int keys = philox::group_of_key(j), queries = philox::group_of_query(i + place);
  const unsigned int addend = philox::addend(p.drop_below);
  unsigned int drawn = 0;  // a half for each key of the pair
#pragma unroll
  for (int column = 0; column < COLUMNS; column += 4) {
    const philox::Words words = philox::draw(key, keys, queries + 2 * column, b_h);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      drawn = drawn >> 1 | (philox::keep_bits(words.word[x], addend) & 0x80008000u);
    }
  }
  const unsigned int received = ptx::shuffle_xor(drawn, 4);
  kept.bits = ptx::select_bytes(drawn, received, place != 0 ? 0x3276 : 0x5410);
  return kept;
}

}  // namespace warpgroup_dropout
