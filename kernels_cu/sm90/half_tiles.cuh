// The softmax of masked tiles of scores by halves of their columns, for warpgroups: of the tile on
// the diagonal of a causal mask, half of the warps see nothing of the second half, and the others
// see all of the first. The results have the bits of fragment_softmax. The twin of
// reference/cpu/softmax.py.
#pragma once
#include "../warp/fragment_softmax.cuh"
#include "../warp/fragment_tile.cuh"

namespace half_tiles {

// What a warp knows of each half: whether any of its pairs take part, and whether any do not.
struct Halves {
  bool sees[2] = {true, true};
  bool hides[2] = {false, false};

  // Asks all lanes, from the mask bits of two rows.
  template <int COLUMNS>
  __device__ __forceinline__ void find(const unsigned int (&mask)[2]) {
    constexpr unsigned int ALL = (1u << COLUMNS / 2) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = half * COLUMNS / 2;
      sees[half] = ptx::any_lane(((mask[0] | mask[1]) >> first & ALL) != 0);
      hides[half] = ptx::any_lane((mask[0] & mask[1] & ALL << first) != ALL << first);
    }
  }
};

// Masks the scores of the halves that the warp sees, and joins their maxima with those in m.
template <int COLUMNS>
__device__ __forceinline__ void masked_row_max(float (&s)[2][COLUMNS],
                                               const unsigned int (&mask)[2], const Halves& halves,
                                               float (&m)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!halves.sees[half]) continue;
    const int begin = half * COLUMNS / 2, end = begin + COLUMNS / 2;
    if (halves.hides[half]) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = begin; n < end; ++n) {
          if ((mask[r] >> n & 1) == 0) s[r][n] = -number::infinity();
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = begin; n < end; ++n) m[r] = fragment_softmax::larger(m[r], s[r][n]);
    }
  }
  fragment_softmax::join_max(m);
}

// s becomes p = 2^((s - m) c), and l grows by its row sums. A half that the warp does not see gets
// weights of 0 without computing them. For each half, this calls `narrow(half)` when its weights
// are in s, or `clear(half)` where they are 0.
template <int COLUMNS, class Narrow, class Clear>
__device__ __forceinline__ void exponentiate(float (&s)[2][COLUMNS], const Halves& halves,
                                             const float (&m)[2], float (&l)[2], float c,
                                             const Narrow& narrow, const Clear& clear) {
  float offset[2];
  if (fragment_softmax::find_offset(m, c, offset)) {
    fragment_softmax::subtract_max(s, m, offset);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = half * COLUMNS / 2, end = begin + COLUMNS / 2;
    if (halves.sees[half]) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = begin; n < end; ++n) {
          s[r][n] = power::exp2(fma(s[r][n], c, -offset[r]));
          l[r] += s[r][n];
        }
      }
      narrow(half);
    } else {
      clear(half);
    }
  }
}

}  // namespace half_tiles
