// Lists of tiles: of each row of tiles, those that are not EMPTY and those that are FULL, as the
// bits of words. list_tiles.cu writes them once for all heads that share a mask, and kernels with
// HAS_LISTS read them where others evaluate the mask's class.
//
// The last table of the parameters describes them. Its axes are entries, heads, rows and words; an
// entry or a head that shares the lists of others has a stride of 0.
#pragma once
#include "number.cuh"

namespace tile_lists {

// Bit n of word w is that of tile 32 w + n, where 2^shift neighbours count as one tile.
struct ClassWord {
  unsigned int nonempty, full;
};
constexpr int TILES = 32;  // of a word
// Lengths of the table's axes, and what it has beyond them: whether a row is a block of keys, whose
// tiles are those of queries, and the shift.
constexpr int ENTRIES = 0, HEADS = 1, ROWS = 2, WORDS = 3, OF_KEYS = 4, SHIFT = 5;
// Where the orders of rows begin, in bytes, if order_tiles.cu wrote them, or 0; and the strides of
// their entries and heads.
constexpr int ORDERS = 6, ORDER_ENTRIES = 4, ORDER_HEADS = 5;
constexpr int EACH = 7;  // neighbouring heads that share a list

__device__ __forceinline__ const Table& table(const Params& p) { return p.tables[NUM_TABLES - 1]; }

__device__ __forceinline__ int list_of(const Table& lists, long long h) {
  return static_cast<int>(h) / static_cast<int>(lists.shape[EACH]);
}

__device__ __forceinline__ const ClassWord* words_of(const Params& p, long long b, long long h,
                                                     int row) {
  const Table& lists = table(p);
  return reinterpret_cast<const ClassWord*>(lists.data + b * lists.strides[ENTRIES] +
                                            list_of(lists, h) * lists.strides[HEADS] +
                                            row * lists.strides[ROWS]);
}

__device__ __forceinline__ bool are_ordered(const Params& p) { return table(p).shape[ORDERS] != 0; }

// The rows of an entry's head, the longest first.
__device__ __forceinline__ const int* order_of(const Params& p, long long b, long long h) {
  const Table& lists = table(p);
  return reinterpret_cast<const int*>(lists.data + lists.shape[ORDERS] +
                                      b * lists.strides[ORDER_ENTRIES] +
                                      list_of(lists, h) * lists.strides[ORDER_HEADS]);
}

// Bits 0 and 1: whether the tile that begins with a query and a key is not EMPTY, and is FULL.
__device__ __forceinline__ unsigned int bits_of(const Params& p, long long b, long long h,
                                                long long i, long long j) {
  const Table& lists = table(p);
  const int of_query = static_cast<int>(i) / BLOCK_Q, of_key = static_cast<int>(j) / BLOCK_KV;
  const bool of_keys = lists.shape[OF_KEYS] != 0;
  const int tile = (of_keys ? of_query : of_key) >> static_cast<int>(lists.shape[SHIFT]);
  const ClassWord word = words_of(p, b, h, of_keys ? of_key : of_query)[tile / TILES];
  return (word.nonempty >> tile % TILES & 1) | (word.full >> tile % TILES & 1) << 1;
}

}  // namespace tile_lists
