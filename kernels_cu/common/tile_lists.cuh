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
// Where HAS_SINGLES: where the words begin, in bytes, of which a bit says whether one block of keys
// alone sees a tile of queries, and the queries of a tile. Its dq is whole after one product, and
// needs no sum in memory. An entry's list has as many words as a row; single_tiles.cu writes them.
constexpr int SINGLES = 6, SINGLE_QUERIES = 7;

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

// Where HAS_SINGLES: the words of an entry's head.
__device__ __forceinline__ const unsigned int* singles_of(const Params& p, long long b,
                                                          long long h) {
  const Table& lists = table(p);
  const int entry = lists.shape[ENTRIES] > 1 ? static_cast<int>(b) : 0;
  const int list = entry * static_cast<int>(lists.shape[HEADS]) + list_of(lists, h);
  return reinterpret_cast<const unsigned int*>(lists.data + lists.strides[SINGLES]) +
         list * static_cast<int>(lists.shape[WORDS]);
}

__device__ __forceinline__ int single_queries(const Params& p) {
  return static_cast<int>(table(p).strides[SINGLE_QUERIES]);
}

// Whether one block of keys alone sees the tile of a query.
__device__ __forceinline__ bool is_single(const Params& p, const unsigned int* singles,
                                          long long i) {
  const int tile = static_cast<int>(i) / single_queries(p);
  return (singles[tile / TILES] >> tile % TILES & 1) != 0;
}

}  // namespace tile_lists
