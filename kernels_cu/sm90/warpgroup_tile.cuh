// The classes of the tiles of keys of a work tile: the twin of reference/cpu/tile.py. Producer and
// consumers walk over the same tiles, each by itself, the last one first.
//
// One warp finds the classes of all tiles before the first is loaded. If there are more tiles than
// classes, a group of 2^n neighbours shares one.
#pragma once
#include "../warp/fragment_tile.cuh"

namespace warpgroup_tile {

constexpr int GROUPS = 2048;  // that have a class each, at most

// Bit n of word w is that of group 32 w + n.
struct TileClasses {
  unsigned int nonempty[GROUPS / 32];
  unsigned int full[GROUPS / 32];
  int shift;         // a group has 2^shift tiles
  int tiles, whole;  // the tiles; those of which every key exists
};

__device__ __forceinline__ int tiles_in(long long length) {
  return static_cast<int>((length + BLOCK_KV - 1) / BLOCK_KV);
}

// Finds the classes of all tiles, by the lanes of a warp. `describe` makes the box of keys from the
// first one and their number. The caller's barrier makes the classes visible.
template <class Describe>
__device__ __forceinline__ void find_classes(const Params& p, TileClasses& classes_smem,
                                             long long length, const Describe& describe) {
  const int tiles = tiles_in(length);
  const int shift = 32 - __clz((tiles - 1) / GROUPS);
  const int lane = ptx::lane_index();
  if (lane == 0) {
    classes_smem.shift = shift;
    classes_smem.tiles = tiles;
    classes_smem.whole = static_cast<int>(length / BLOCK_KV);
  }
  if constexpr (HAS_LISTS) {
    // They have the words of the same groups.
    const TileBox box = describe(0, 1);
    const tile_lists::ClassWord* const words =
        tile_lists::words_of(p, box.b, box.h, static_cast<int>(box.i_low) / BLOCK_Q);
#pragma unroll 1
    for (int n = lane;
         n < GROUPS / 32 && (static_cast<long long>(n) * 32 * BLOCK_KV << shift) < length;
         n += ptx::WARP_SIZE) {
      const tile_lists::ClassWord word = words[n];
      classes_smem.nonempty[n] = word.nonempty;
      classes_smem.full[n] = word.full;
    }
    __syncwarp();  // the words of all lanes, which one of them reads and publishes
  } else if constexpr (HAS_MASK) {
    const long long keys = static_cast<long long>(BLOCK_KV) << shift;
#pragma unroll 1
    for (int n = lane; n < GROUPS && (n - lane) * keys < length; n += ptx::WARP_SIZE) {
      // Lanes beyond the last group classify that one again: generated code runs for all together.
      const int last = (tiles - 1) >> shift;
      const long long first = (n < last ? n : last) * keys;
      const long long left = length - first;
      int tile_class =
          tile::classify_tile(p, describe(first, static_cast<int>(left < keys ? left : keys)));
      if (n > last) tile_class = EMPTY;
      const unsigned int nonempty = ptx::ballot(tile_class != EMPTY);
      const unsigned int full = ptx::ballot(tile_class == FULL);
      if (lane == 0) {
        classes_smem.nonempty[n / 32] = nonempty;
        classes_smem.full[n / 32] = full;
      }
    }
  }
}

// The last tile below tile `below` that is not EMPTY, or -1.
__device__ __forceinline__ int tile_before(const TileClasses& classes_smem, int below) {
  if constexpr (!HAS_MASK) return below - 1;
  const int shift = classes_smem.shift, last = below - 1;
#pragma unroll 1
  for (int group = last >> shift; group >= 0; group = (group & ~31) - 1) {
    const unsigned int nonempty = classes_smem.nonempty[group / 32] << (31 - group % 32);
    if (nonempty == 0) continue;
    const int tile = ((group - __clz(static_cast<int>(nonempty)) + 1) << shift) - 1;
    return tile < last ? tile : last;
  }
  return -1;
}

// The first tile of the run of FULL tiles that ends with tile `last`.
__device__ __forceinline__ int first_of_full(const TileClasses& classes_smem, int last) {
  const int shift = classes_smem.shift;
#pragma unroll 1
  for (int group = last >> shift; group >= 0; group = (group & ~31) - 1) {
    const unsigned int others = ~classes_smem.full[group / 32] << (31 - group % 32);
    if (others != 0) return (group - __clz(static_cast<int>(others)) + 1) << shift;
  }
  return 0;
}

// FULL or PARTIAL, of a tile that is not EMPTY.
__device__ __forceinline__ int class_of(const TileClasses& classes_smem, int tile) {
  if constexpr (!HAS_MASK) return FULL;
  const int group = tile >> classes_smem.shift;
  return (classes_smem.full[group / 32] >> group % 32 & 1) != 0 ? FULL : PARTIAL;
}

}  // namespace warpgroup_tile
