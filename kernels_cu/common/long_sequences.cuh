// Packed sequences of which nobody knows the lengths but the device: short ones, whose queries and
// keys are one tile, have kernels for them (ONLY_SHORT), and others are listed for kernels that
// skip the short ones (ONLY_LONG). rowwise/list_long.cu writes the list to p.workspace.
#pragma once
#include "number.cuh"

namespace long_sequences {

constexpr int SHORT_ROWS = 64;  // queries, and keys, that are one tile

// The list begins with how many there are, their queries and keys, and two words that count turns
// which blocks have taken beyond the first of each. It goes on with their numbers and with how many
// queries and keys those before each have, for which there is room for all.
constexpr int COUNT = 0, ROWS_Q = 1, ROWS_K = 2, TAKEN = 4, HEAD = 6;
__device__ __forceinline__ const int* list(const Params& p) {
  return reinterpret_cast<const int*>(p.workspace);
}
__device__ __forceinline__ unsigned long long* taken(const Params& p) {
  return reinterpret_cast<unsigned long long*>(const_cast<int*>(list(p) + TAKEN));
}
__device__ __forceinline__ const int* numbers(const Params& p) { return list(p) + HEAD; }
__device__ __forceinline__ const int* first_rows(const Params& p, bool of_keys) {
  return numbers(p) + (of_keys ? 2 : 1) * p.batch;
}

// A bound of the blocks of all of them, of a head.
__device__ __forceinline__ unsigned int blocks(const Params& p, bool of_keys, int block) {
  return static_cast<unsigned int>(list(p)[of_keys ? ROWS_K : ROWS_Q] / block + list(p)[COUNT]);
}

// Where ONLY_LONG: numbers of work tiles that blocks take in turn, of `heads` heads, and that of
// one of them among p.blocks of each head. Elsewhere a block has the number of its own.
struct Turns {
  unsigned int each, count;

  __device__ __forceinline__ Turns(const Params& p, int heads, bool of_keys, int block)
      : each(blocks(p, of_keys, block)), count(each * static_cast<unsigned int>(heads)) {}
  __device__ __forceinline__ unsigned int place(const Params& p, unsigned int number) const {
    return number / each * static_cast<unsigned int>(p.blocks) + number % each;
  }
};

__device__ __forceinline__ long long hold(long long x, long long low, long long high) {
  return x < low ? low : x > high ? high : x;
}

// The rows of a sequence, held within the packed arrays.
__device__ __forceinline__ long long rows_of(const long long* offsets, long long total,
                                             long long b) {
  const long long start = hold(offsets[b], 0, total);
  return hold(offsets[b + 1], start, total) - start;
}

__device__ __forceinline__ bool is_short(const Params& p, long long b) {
  return rows_of(p.offsets_q, p.total_q, b) <= SHORT_ROWS &&
         rows_of(p.offsets_k, p.total_k, b) <= SHORT_ROWS;
}

}  // namespace long_sequences
