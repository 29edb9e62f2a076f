// Sums that tell whether arrays have changed: the twin of reference/cpu/checksum.py, with the same
// numbers. A word of eight bytes adds a number that depends on its place, modulo 2^64, so the order
// of additions is free. Each warp keeps the sum of its share. Where there is a word for reports, it
// compares with what was kept instead: if that differs, it reports it, and its block fills the
// gradients with bytes of ones, unless another one of the launch does. They are NaN in every type.
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

// The sum of a thread's share of an array without gaps, or of the first of several units: the pairs
// first, first + step, ...
__device__ __forceinline__ word_t sum_of_pairs(const unsigned char* from, long long pairs,
                                               long long first, long long step) {
  const Pair* held = reinterpret_cast<const Pair*>(from);
  word_t total = 0;
  long long index = first;
#pragma unroll 1
  for (; index + (UNROLLED - 1) * step < pairs; index += UNROLLED * step) {
    Pair loaded[UNROLLED];
#pragma unroll
    for (int n = 0; n < UNROLLED; ++n) loaded[n] = held[index + n * step];
#pragma unroll
    for (int n = 0; n < UNROLLED; ++n) {
      const long long place = 2 * (index + n * step);
      total += summand(loaded[n].x[0], place) + summand(loaded[n].x[1], place + 1);
    }
  }
#pragma unroll 1
  for (; index < pairs; index += step) {
    const Pair one = held[index];
    total += summand(one.x[0], 2 * index) + summand(one.x[1], 2 * index + 1);
  }
  return total;
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
    if (units == 1) {
      total = sum_of_pairs(array.data + array.begin, pairs, first, step);
    } else {
#pragma unroll 2
      for (long long index = first; index < units * pairs; index += step) {
        const layout::Quotient at = layout::divide(index, pairs);
        const Pair one = reinterpret_cast<const Pair*>(unit_of(array, at.quotient))[at.remainder];
        // Units of whole pairs have no other words, so places count on from unit to unit.
        total += summand(one.x[0], 2 * index) + summand(one.x[1], 2 * index + 1);
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

// Writes bytes of ones to an array without gaps, whose elements have two bytes or more.
__device__ __forceinline__ void spoil(unsigned char* to, long long bytes) {
  constexpr int HALVES = sizeof(Pair) / sizeof(unsigned short);
  const long long pairs = reinterpret_cast<word_t>(to) % sizeof(Pair) == 0
                              ? bytes / static_cast<long long>(sizeof(Pair))
                              : 0;
  const Pair ones = {{~word_t(0), ~word_t(0)}};
#pragma unroll 1
  for (long long n = threadIdx.x; n < pairs; n += THREADS) reinterpret_cast<Pair*>(to)[n] = ones;
#pragma unroll 1
  for (long long n = pairs * HALVES + threadIdx.x; n < bytes / 2; n += THREADS) {
    reinterpret_cast<unsigned short*>(to)[n] = 0xffff;
  }
}

// Whether no other thread of this turn was here before.
__device__ __forceinline__ bool is_first_of(word_t turn, word_t* last) {
  word_t seen = 0;
  while (seen != turn) {
    const word_t before = ptx::compare_and_swap(last, seen, turn);
    if (before == seen) return true;
    seen = before;
  }
  return false;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ ChecksumParams p) {
  constexpr int WARPS = THREADS / ptx::WARP_SIZE;
  const int block = blockIdx.x;
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
  // The first word says in which turn gradients were spoiled.
  const long long warp = threadIdx.x / ptx::WARP_SIZE;
  word_t* kept = p.kept + 1 + (p.first_block + block) * WARPS + warp;
  if (p.report == nullptr) {
    if (ptx::lane_index() == 0) *kept = total;
    if (p.first_block + block == 0 && threadIdx.x == 0) *p.kept = 0;
    return;
  }
  if (!ptx::barrier_or(*kept != total)) return;
  bool is_first = false;
  if (threadIdx.x == 0) {
    ptx::tell_host(p.report + array.name, 1);
    ptx::fence_system();
    ptx::tell_host(p.report + REPORTS - 1, 1);
    is_first = is_first_of(p.turn, p.kept);
  }
  if (!ptx::barrier_or(is_first)) return;
#pragma unroll 1
  for (int gradient = 0; gradient < MAX_GRADIENTS; ++gradient) {
    spoil(p.gradients[gradient], p.gradient_bytes[gradient]);
  }
}
