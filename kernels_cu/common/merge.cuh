// Two sets of keys become one: their row maximum m, row sum l and output o, not yet divided by l.
// The twin of reference/cpu/merge.py.
//
// m is a maximum of scores, `c` logits (to the base 2) per score. A set without keys has l = 0 and
// changes no bit of another. Every product and every sum is written as one instruction, so that the
// compiler cannot contract them here and not there: in whichever kernel and in whichever order in
// time sets are merged, the same two sets give the same bits.
#pragma once
#include "number.cuh"
#include "power.cuh"

namespace merge {

// A row's maximum and sum.
struct Statistics {
  accum_t m, l;
};

__device__ __forceinline__ Statistics no_keys() { return Statistics{-number::infinity(), 0}; }

__device__ __forceinline__ float product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double product(double x, double y) { return __dmul_rn(x, y); }

// What the outputs of two sets are multiplied by before they are added.
struct Factors {
  accum_t own, other;
  bool keeps, replaces;  // the other set, or this one, has no keys

  // The sum of two sets that have keys, or have 0 in o.
  __device__ __forceinline__ accum_t sum(accum_t o, accum_t other_o) const {
    return fma(other_o, other, product(o, own));
  }
  __device__ __forceinline__ accum_t apply(accum_t o, accum_t other_o) const {
    return keeps ? o : replaces ? other_o : sum(o, other_o);
  }
};

// 2^((m - top) c), exactly 1 for the larger maximum.
__device__ __forceinline__ accum_t factor(accum_t m, accum_t top, accum_t c) {
  return m == top ? accum_t(1) : power::exp2(product(m - top, c));
}

// Merges `other` into `own`; returns what to do with the outputs.
__device__ __forceinline__ Factors statistics(Statistics& own, const Statistics& other, accum_t c) {
  const accum_t top = other.m > own.m ? other.m : own.m;
  Factors factors{factor(own.m, top, c), factor(other.m, top, c), other.l == 0, own.l == 0};
  if (!factors.keeps) {
    own.l = factors.apply(own.l, other.l);
    own.m = factors.replaces ? other.m : top;
  }
  return factors;
}

}  // namespace merge
