// Philox4x32, the counter-based generator behind dropout and the signs of hadamard: the twin of
// reference/cpu/philox.py.
//
// Whether a pair (query i, key j) of head h in batch b is kept is a function of
// (seed, b * Hq + h, i, j) alone, so the forward and the backward, the CPU and the GPU and every
// tile size see equal bits without storing anything. One draw, of 7 rounds, has eight numbers of 15
// bits, for eight pairs: those of two queries, 8 apart, and of four keys, which are two neighbours
// and the two that are 8 apart from them. A thread has such pairs where tensor cores multiply:
//
//     key     = (seed & 0xffffffff, seed >> 32)
//     keys    = (j >> 4) << 2 | (j >> 1 & 3)
//     queries = (i >> 4) << 3 | (i & 7)
//     counter = (keys, queries, n & 0xffffffff, n >> 32)      with n = b * Hq + h
//     word    = philox4x32_7(counter, key)[2 * (i >> 3 & 1) + (j >> 3 & 1)]
//     keep    = (word >> 16 * (j & 1) & 0x7fff) >= round(p * 2^15)
//
// Seven rounds are the fewest that pass all tests of the paper; hadamard has ten, its default.
//
// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011, section 3.3. The file includes nothing, so that NVRTC needs no include path and g++
// compiles the same text.
#pragma once

namespace philox {

constexpr int ROUNDS = 10, DROPOUT_ROUNDS = 7;
constexpr unsigned int NUMBERS = 0x7fff7fffu;  // of a word
constexpr unsigned int MULTIPLIER_0 = 0xD2511F53u;
constexpr unsigned int MULTIPLIER_1 = 0xCD9E8D57u;
// The key is bumped each round by the golden ratio and by sqrt(3) - 1, as 32-bit fractions.
constexpr unsigned int WEYL_0 = 0x9E3779B9u;
constexpr unsigned int WEYL_1 = 0xBB67AE85u;

struct Key {
  unsigned int word[2];  // low word first
};

struct Words {
  unsigned int word[4];  // least significant first
};

// The two 32-bit key words of a seed.
__device__ __forceinline__ Key split_seed(unsigned long long seed) {
  return Key{{static_cast<unsigned int>(seed), static_cast<unsigned int>(seed >> 32)}};
}

// Philox rounds. The products are 32 x 32 -> 64 bits: one wide multiply each.
template <int COUNT = ROUNDS>
__device__ __forceinline__ Words philox4x32(Words counter, Key key) {
  unsigned int c0 = counter.word[0];
  unsigned int c1 = counter.word[1];
  unsigned int c2 = counter.word[2];
  unsigned int c3 = counter.word[3];
  unsigned int key_0 = key.word[0];
  unsigned int key_1 = key.word[1];
#pragma unroll
  for (int round = 0; round < COUNT; ++round) {
    const unsigned long long product_0 = static_cast<unsigned long long>(MULTIPLIER_0) * c0;
    const unsigned long long product_1 = static_cast<unsigned long long>(MULTIPLIER_1) * c2;
    c0 = static_cast<unsigned int>(product_1 >> 32) ^ c1 ^ key_0;
    c1 = static_cast<unsigned int>(product_1);
    c2 = static_cast<unsigned int>(product_0 >> 32) ^ c3 ^ key_1;
    c3 = static_cast<unsigned int>(product_0);
    key_0 += WEYL_0;
    key_1 += WEYL_1;
  }
  return Words{{c0, c1, c2, c3}};
}

// The keys of all rounds, for a caller that has registers for them.
template <int COUNT>
struct Schedule {
  Key round[COUNT];

  __device__ __forceinline__ explicit Schedule(Key key) {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      round[n] = key;
      key.word[0] += WEYL_0;
      key.word[1] += WEYL_1;
    }
  }
};
template <int COUNT>
__device__ __forceinline__ Words philox4x32(Words counter, const Schedule<COUNT>& keys) {
#pragma unroll
  for (int round = 0; round < COUNT; ++round) {
    counter = philox4x32<1>(counter, keys.round[round]);
  }
  return counter;
}

// Four random words of ten rounds, numbered by three counters.
__device__ __forceinline__ Words words(Key key, unsigned int group, unsigned int i,
                                       unsigned long long n) {
  return philox4x32(
      Words{{group, i, static_cast<unsigned int>(n), static_cast<unsigned int>(n >> 32)}}, key);
}

// -- dropout --------------------------------------------------------------------------------------

// The groups of keys and of queries that share a draw.
__device__ __forceinline__ unsigned int group_of_key(unsigned long long j) {
  return static_cast<unsigned int>(j >> 4) << 2 | (static_cast<unsigned int>(j) >> 1 & 3u);
}
__device__ __forceinline__ unsigned int group_of_query(unsigned int i) {
  return i >> 4 << 3 | (i & 7u);
}

// The draw of a group of queries and one of keys: word 2 x + y has in its halves what keys 0 and 1
// of their pair y draw with query x. b_h is b * Hq + h.
__device__ __forceinline__ Words draw(Key key, unsigned int keys, unsigned int queries,
                                      unsigned long long b_h) {
  const unsigned int b_h_low = static_cast<unsigned int>(b_h);
  const unsigned int b_h_high = static_cast<unsigned int>(b_h >> 32);
  return philox4x32<DROPOUT_ROUNDS>(Words{{keys, queries, b_h_low, b_h_high}}, key);
}
using DropoutKeys = Schedule<DROPOUT_ROUNDS>;
__device__ __forceinline__ Words draw(const DropoutKeys& keys_of_rounds, unsigned int keys,
                                      unsigned int queries, unsigned long long b_h) {
  const unsigned int b_h_low = static_cast<unsigned int>(b_h);
  const unsigned int b_h_high = static_cast<unsigned int>(b_h >> 32);
  return philox4x32(Words{{keys, queries, b_h_low, b_h_high}}, keys_of_rounds);
}

// The words of a draw for query i: those of both pairs of keys. Indices are constants, so that
// words stay in registers.
struct TwoWords {
  unsigned int word[2];
};
__device__ __forceinline__ TwoWords words_of_query(const Words& drawn, unsigned int i) {
  const bool second = (i & 8u) != 0;
  return TwoWords{{second ? drawn.word[2] : drawn.word[0], second ? drawn.word[3] : drawn.word[1]}};
}

// What keep_bits adds, of threshold = round(p * 2^15), which is less than 2^15.
__device__ __forceinline__ unsigned int addend(unsigned long long threshold) {
  return (0x8000u - static_cast<unsigned int>(threshold)) * 0x10001u;
}

// Bits 15 and 31 say of a word whether the pairs of its halves are kept.
__device__ __forceinline__ unsigned int keep_bits(unsigned int word, unsigned int addend) {
  return (word & NUMBERS) + addend;
}

// Whether dropout keeps the pair (i, j).
__device__ __forceinline__ bool keep(Key key, unsigned long long threshold, unsigned long long b_h,
                                     unsigned int i, unsigned long long j) {
  const Words drawn = draw(key, group_of_key(j), group_of_query(i), b_h);
  const TwoWords both = words_of_query(drawn, i);
  const unsigned int word = (j & 8) != 0 ? both.word[1] : both.word[0];
  return (keep_bits(word, addend(threshold)) >> ((j & 1) != 0 ? 31 : 15) & 1u) != 0;
}

}  // namespace philox
