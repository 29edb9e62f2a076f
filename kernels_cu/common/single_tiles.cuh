// Tiles of queries that one block of keys alone sees, as bits of words, behind the lists of tiles of
// keys (common/tile_lists.cuh): their dq is whole after one product, and needs no sum in memory.
// single_tiles.cu writes them.
#pragma once
#include "params.cuh"

namespace single_tiles {

// What the lists' table has beyond tile_lists.cuh: where the words begin, in bytes, or 0 if there are
// none, and queries of a tile.
constexpr int BEGIN = 6, QUERIES = 7;
constexpr int TILES = 32;  // of a word

__device__ __forceinline__ const Table& table(const Params& p) { return p.tables[NUM_TABLES - 1]; }

__device__ __forceinline__ bool are_known(const Params& p) { return table(p).strides[BEGIN] != 0; }

// The words of an entry's head.
__device__ __forceinline__ const unsigned int* words_of(const Params& p, long long b, long long h) {
  const Table& lists = table(p);
  const int list = static_cast<int>(h) / static_cast<int>(lists.shape[7]);
  const int entry = lists.shape[0] > 1 ? static_cast<int>(b) : 0;
  return reinterpret_cast<const unsigned int*>(lists.data + lists.strides[BEGIN]) +
         (entry * static_cast<int>(lists.shape[1]) + list) * static_cast<int>(lists.shape[3]);
}

// Whether all tiles with queries from `first` up to `end` are such ones.
__device__ __forceinline__ bool are_single(const Params& p, const unsigned int* words, int first,
                                           int end) {
  const int queries = static_cast<int>(table(p).strides[QUERIES]);
  bool all = true;
#pragma unroll 1
  for (int tile = first / queries; tile * queries < end; ++tile) {
    all = all && (words[tile / TILES] >> tile % TILES & 1) != 0;
  }
  return all;
}

}  // namespace single_tiles
