// Philox4x32-10, the counter-based generator behind dropout: the twin of reference/cpu/philox.py.
//
// Whether a pair (query i, key j) of head h in batch b is kept is a function of
// (seed, b * Hq + h, i, j) alone, so the forward and the backward, the CPU and the GPU and every
// tile size see equal bits without storing anything:
//
//     key     = (seed & 0xffffffff, seed >> 32)
//     counter = (j >> 2, i, n & 0xffffffff, n >> 32)      with n = b * Hq + h
//     word    = philox4x32(counter, key)[j & 3]
//     keep    = word >= round(p * 2^32)
//
// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011, section 3.3. The file includes nothing, so that NVRTC needs no include path and g++
// compiles the same text.
#pragma once

namespace philox {

constexpr int ROUNDS = 10;
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

// Ten Philox rounds. The products are 32 x 32 -> 64 bits: one wide multiply each.
__device__ __forceinline__ Words philox4x32(Words counter, Key key) {
  unsigned int c0 = counter.word[0];
  unsigned int c1 = counter.word[1];
  unsigned int c2 = counter.word[2];
  unsigned int c3 = counter.word[3];
  unsigned int key_0 = key.word[0];
  unsigned int key_1 = key.word[1];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
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

// The random words of query i and keys 4 * group to 4 * group + 3, in order: a kernel draws once
// for four keys. b_h is b * Hq + h.
__device__ __forceinline__ Words words(Key key, unsigned int group, unsigned int i,
                                       unsigned long long b_h) {
  const unsigned int b_h_low = static_cast<unsigned int>(b_h);
  const unsigned int b_h_high = static_cast<unsigned int>(b_h >> 32);
  return philox4x32(Words{{group, i, b_h_low, b_h_high}}, key);
}

// The random words of query i and keys j to j + 3, wherever these begin: two draws, unless j is a
// multiple of 4.
__device__ __forceinline__ Words words_from(Key key, unsigned long long j, unsigned int i,
                                            unsigned long long b_h) {
  const unsigned int group = static_cast<unsigned int>(j >> 2);
  Words drawn = words(key, group, i, b_h);
  if ((j & 3) != 0) {
    Words next = words(key, group + 1, i, b_h);
    // Indices are constants, so that words stay in registers.
    if ((j & 2) != 0) {
      drawn = Words{{drawn.word[2], drawn.word[3], next.word[0], next.word[1]}};
      next.word[0] = next.word[2];
    }
    if ((j & 1) != 0) drawn = Words{{drawn.word[1], drawn.word[2], drawn.word[3], next.word[0]}};
  }
  return drawn;
}

// Whether dropout keeps the pair (i, j). threshold is round(p * 2^32), in 64 bits because a p
// within 2^-33 of 1 rounds to 2^32, which drops every pair.
__device__ __forceinline__ bool keep(Key key, unsigned long long threshold, unsigned long long b_h,
                                     unsigned int i, unsigned long long j) {
  const Words drawn = words(key, static_cast<unsigned int>(j >> 2), i, b_h);
  return drawn.word[j & 3] >= threshold;
}

}  // namespace philox
