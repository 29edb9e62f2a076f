// Which tiles a block with warpgroups works on: the twin of reference/cpu/tile.py, where those who
// copy and those who compute walk over the same tiles, each by itself, the last one first.
//
// Classes of all tiles of a row are found before the first is copied. Where there are too many,
// neighbours are classified together: a power of two of them.
#pragma once
#include "../sm80/fragment_tile.cuh"

namespace warpgroup_tile {

constexpr int GROUPS = 2048;  // of tiles, that have a class each

// Bit n of word w tells of group 32 w + n.
struct TileClasses {
  unsigned int some[GROUPS / 32];  // not EMPTY
  unsigned int full[GROUPS / 32];
  int shift;         // a group has 2^shift tiles
  int tiles, whole;  // in all; of these all keys exist
};

__device__ __forceinline__ int tiles_in(long long length) {
  return static_cast<int>((length + BLOCK_KV - 1) / BLOCK_KV);
}

// Finds the classes of tiles, by the lanes of a warp; `describe` makes the box of keys from the
// first one and their number. A barrier behind it is the caller's.
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
  if constexpr (HAS_MASK) {
    const long long keys = static_cast<long long>(BLOCK_KV) << shift;
#pragma unroll 1
    for (int n = lane; n < GROUPS && (n - lane) * keys < length; n += ptx::WARP_SIZE) {
      // Beyond the last group, the last one's class: all lanes ask together.
      const int last = (tiles - 1) >> shift;
      const long long first = (n < last ? n : last) * keys;
      const long long left = length - first;
      int found =
          tile::classify_tile(p, describe(first, static_cast<int>(left < keys ? left : keys)));
      if (n > last) found = EMPTY;
      const unsigned int some = ptx::ballot(found != EMPTY);
      const unsigned int full = ptx::ballot(found == FULL);
      if (lane == 0) {
        classes_smem.some[n / 32] = some;
        classes_smem.full[n / 32] = full;
      }
    }
  }
}

// The last tile before number `below` that is not EMPTY, or -1.
__device__ __forceinline__ int tile_before(const TileClasses& classes_smem, int below) {
  if constexpr (!HAS_MASK) return below - 1;
  const int shift = classes_smem.shift, last = below - 1;
#pragma unroll 1
  for (int group = last >> shift; group >= 0; group = (group & ~31) - 1) {
    const unsigned int some = classes_smem.some[group / 32] << (31 - group % 32);
    if (some == 0) continue;
    const int found = ((group - __clz(static_cast<int>(some)) + 1) << shift) - 1;
    return found < last ? found : last;
  }
  return -1;
}

// The first of the FULL tiles that follow each other up to number `last`, which is one of them.
__device__ __forceinline__ int first_of_full(const TileClasses& classes_smem, int last) {
  const int shift = classes_smem.shift;
#pragma unroll 1
  for (int group = last >> shift; group >= 0; group = (group & ~31) - 1) {
    const unsigned int others = ~classes_smem.full[group / 32] << (31 - group % 32);
    if (others != 0) return (group - __clz(static_cast<int>(others)) + 1) << shift;
  }
  return 0;
}

__device__ __forceinline__ int class_of(const TileClasses& classes_smem, int tile) {
  if constexpr (!HAS_MASK) return FULL;
  const int group = tile >> classes_smem.shift;
  return (classes_smem.full[group / 32] >> group % 32 & 1) != 0 ? FULL : PARTIAL;
}

}  // namespace warpgroup_tile
