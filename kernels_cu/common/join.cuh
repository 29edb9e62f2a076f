// Results over disjoint sets of keys become one: the weights of combine.cu, and of forward kernels
// whose keys join a result over those before them. Part of the twin of reference/cpu/combine.py.
// On the CPU a forward begins with the result before instead (reference/cpu/forward.py).
#pragma once
#include "number.cuh"

namespace join {

// exp(lse - m): exactly 1 for the largest lse, 0 for a set without keys.
__device__ __forceinline__ accum_t weight(accum_t lse, accum_t m) {
  if (lse == -number::infinity()) return 0;
  return lse == m ? accum_t(1) : exp(lse - m);
}

// The larger lse of two; NaN if one is NaN.
__device__ __forceinline__ accum_t larger(accum_t lse, accum_t other) {
  return other > lse || other != other ? other : lse;
}

// A weighted mean that is no larger than the largest of its elements. Rounded weights may add up to
// more than 1, and then the sum may not be finite where all elements are.
__device__ __forceinline__ accum_t bounded(accum_t sum, accum_t most) {
  return fabs(sum) > most ? sum < 0 ? -most : most : sum;
}

// A row over two sets of keys: the weights of the sets' results, and the lse of both.
struct Joined {
  accum_t own, before, lse;

  __device__ __forceinline__ Joined(accum_t own_lse, accum_t lse_before) {
    const accum_t m = larger(own_lse, lse_before);
    own = weight(own_lse, m);
    before = weight(lse_before, m);
    const accum_t l = own + before;
    lse = m + log(l);
    if (l == accum_t(0)) return;  // neither set has keys
    own *= accum_t(1) / l;
    before *= accum_t(1) / l;
  }
  // An element of the result, from those of the sets; of one without keys it is 0.
  __device__ __forceinline__ accum_t mean(accum_t x, accum_t x_before) const {
    const accum_t sum = own * x + before * x_before;
    return bounded(sum, fmax(fabs(x), fabs(x_before)));
  }
};

}  // namespace join
