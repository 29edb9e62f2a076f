// Sums that tell whether arrays have changed: the twin of reference/cpu/checksum.py, with the same
// numbers. A word of eight bytes adds a number that depends on its place, modulo 2^64, so the order
// of additions is free. Where `before` has sums, the kernel compares instead: if they differ, it
// reports it and fills arrays without gaps, which are gradients, with bytes of ones. They are NaN
// in every type.
//
// Grid: the blocks of each array, one array after the other. Shared memory: none.
#include "../common/params.cuh"
#include "../ptx/atomic.cuh"
#include "../ptx/warp.cuh"
#include "../common/layout.cuh"

namespace {

typedef unsigned long long word_t;

constexpr word_t PLACE = 0x9E3779B97F4A7C15ull;
constexpr int WORD = 8;      // bytes
constexpr int UNROLLED = 4;  // loads of a thread that are under way together

struct alignas(2 * WORD) Pair {
  word_t x[2];
};

// What one word adds.
__device__ __forceinline__ word_t summand(word_t word, long long place) {
  const word_t x = word ^ (static_cast<word_t>(place) * PLACE);
  return x + (x & 0xffffffffull) * (x >> 32);
}

// Loads `bytes` bytes, eight at most and a multiple of T's; the rest of the word is 0.
template <typename T>
__device__ __forceinline__ word_t gather(const unsigned char* from, long long bytes) {
  word_t word = 0;
#pragma unroll
  for (int n = 0; n < WORD; n += sizeof(T)) {
    if (n < bytes) {
      word |= static_cast<word_t>(*reinterpret_cast<const T*>(from + n)) << (8 * n);
    }
  }
  return word;
}

__device__ __forceinline__ word_t load_word(const unsigned char* from, long long bytes) {
  const word_t units = reinterpret_cast<word_t>(from) | static_cast<word_t>(bytes);
  if (units % 8 == 0) return gather<word_t>(from, bytes);
  if (units % 4 == 0) return gather<unsigned int>(from, bytes);
  if (units % 2 == 0) return gather<unsigned short>(from, bytes);
  return gather<unsigned char>(from, bytes);
}

// Where a unit begins.
__device__ __forceinline__ const unsigned char* unit_of(const Summed& array, long long unit) {
  const unsigned char* from = array.data + array.begin;
#pragma unroll
  for (int axis = 0; axis < MAX_AXES; ++axis) {
    const layout::Quotient at = layout::divide(unit, array.shape[axis]);
    from += at.remainder * array.strides[axis];
    unit = at.quotient;
    if (unit == 0) break;
  }
  return from;
}

// The sum of a thread's share, the words first, first + step, ... or pairs of them.
__device__ __forceinline__ word_t sum(const Summed& array, long long first, long long step) {
  const long long words = (array.size + WORD - 1) / WORD;
  long long units = 1;
  word_t places = reinterpret_cast<word_t>(array.data) + array.begin;
#pragma unroll
  for (int axis = 0; axis < MAX_AXES; ++axis) {
    units *= array.shape[axis];
    places |= static_cast<word_t>(array.strides[axis]);
  }
  word_t total = 0;
  long long done = 0;  // words of a unit that are summed in pairs
  if (places % sizeof(Pair) == 0 && (units == 1 || array.size % sizeof(Pair) == 0)) {
    const long long pairs = array.size / static_cast<long long>(sizeof(Pair));
    done = 2 * pairs;
#pragma unroll 1
    for (long long begin = first; begin < units * pairs; begin += UNROLLED * step) {
      Pair loaded[UNROLLED];
#pragma unroll
      for (int n = 0; n < UNROLLED; ++n) {
        const long long index = begin + n * step;
        if (index >= units * pairs) break;
        const layout::Quotient at =
            units == 1 ? layout::Quotient{0, index} : layout::divide(index, pairs);
        loaded[n] = reinterpret_cast<const Pair*>(unit_of(array, at.quotient))[at.remainder];
      }
#pragma unroll
      for (int n = 0; n < UNROLLED; ++n) {
        const long long index = begin + n * step;
        if (index >= units * pairs) break;
        // Units of whole pairs have no other words, so places count on from unit to unit.
        total += summand(loaded[n].x[0], 2 * index) + summand(loaded[n].x[1], 2 * index + 1);
      }
    }
  }
  const long long left = words - done;
#pragma unroll 1
  for (long long index = first; index < units * left; index += step) {
    const layout::Quotient at = layout::divide(index, left);
    const long long word = done + at.remainder;
    const long long bytes = array.size - word * WORD < WORD ? array.size - word * WORD : WORD;
    total += summand(load_word(unit_of(array, at.quotient) + word * WORD, bytes),
                     at.quotient * words + word);
  }
  return total;
}

// Writes bytes of ones to a thread's share of an array, whose elements have two bytes or more.
__device__ __forceinline__ void spoil(const Summed& array, long long first, long long step) {
  constexpr int HALVES = sizeof(Pair) / sizeof(unsigned short);
  const long long pairs = reinterpret_cast<word_t>(array.data) % sizeof(Pair) == 0
                              ? array.size / static_cast<long long>(sizeof(Pair))
                              : 0;
  const Pair ones = {{~word_t(0), ~word_t(0)}};
#pragma unroll 1
  for (long long n = first; n < pairs; n += step) reinterpret_cast<Pair*>(array.data)[n] = ones;
#pragma unroll 1
  for (long long n = pairs * HALVES + first; n < array.size / 2; n += step) {
    reinterpret_cast<unsigned short*>(array.data)[n] = 0xffff;
  }
}

// Whether any sum differs from the one before; it is reported by one thread.
__device__ __forceinline__ bool changed(const ChecksumParams& p) {
  const int word = threadIdx.x;
  const bool differs = word < p.words && p.sums[word] != p.before[word];
  if (!ptx::barrier_or(differs)) return false;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    word_t names = 0;
#pragma unroll 1
    for (int n = 0; n < p.words; ++n) names |= p.sums[n] != p.before[n] ? p.bits[n] : 0;
    *p.report = names;
  }
  return true;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ ChecksumParams p) {
  static_assert(MAX_SUMS <= THREADS, "a thread compares one sum");
  const int block = blockIdx.x;
  if (p.before != nullptr) {
    if (!changed(p)) return;
    const long long first = static_cast<long long>(block) * THREADS + threadIdx.x;
#pragma unroll 1
    for (int n = 0; n < p.count; ++n) {
      spoil(p.arrays[n], first, static_cast<long long>(p.blocks) * THREADS);
    }
    return;
  }
  int n = 0;
  long long begin = 0;
#pragma unroll 1
  while (block >= p.arrays[n].end) begin = p.arrays[n++].end;
  const Summed& array = p.arrays[n];
  word_t total = sum(array, (block - begin) * THREADS + threadIdx.x, (array.end - begin) * THREADS);
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    total += ptx::shuffle_xor(total, lanes);
  }
  if (ptx::lane_index() == 0) ptx::fetch_add(p.sums + array.word, total);
}
