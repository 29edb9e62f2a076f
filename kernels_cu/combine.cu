// Join attention over disjoint sets of keys: the twin of reference/combine.py.
//
// Given (out, lse) of each set, the result is what one call over all keys gives:
// lse = log sum exp(lse_n) and out = sum exp(lse_n - lse) out_n. A set that saw nothing
// (lse = -inf) takes no part, so (0, -inf) is the unit. A warp works on one row.
//
// Grid: the rows of all entries and heads, THREADS / 32 to a block. Shared memory: none.
#include "params.cuh"
#include "arch/warp.cuh"
#include "primitives/number.cuh"

namespace {

// A row's place in the arrays of a call.
struct Row {
  long long lead[MAX_LEAD];
  long long head;
  long long i;
};

__device__ __forceinline__ long long offset(const Operand& operand, const Row& row) {
  long long elements = row.head * operand.head + row.i * operand.row;
#pragma unroll
  for (int axis = 0; axis < MAX_LEAD; ++axis) elements += row.lead[axis] * operand.lead[axis];
  return elements;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ CombineParams p) {
  constexpr int WARPS = THREADS / arch::WARP_SIZE;
  const int lane = arch::lane_index();
  long long place = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / arch::WARP_SIZE;
  Row row;
  row.i = place % p.rows;
  place /= p.rows;
  row.head = place % p.heads;
  place /= p.heads;
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    row.lead[axis] = place % p.lead_size[axis];
    place /= p.lead_size[axis];
  }
  if (place > 0) return;

  accum_t weights[MAX_PARTS];
  accum_t m = -number::infinity();
#pragma unroll
  for (int n = 0; n < MAX_PARTS; ++n) {
    weights[n] = -number::infinity();
    if (n < p.parts) {
      weights[n] = reinterpret_cast<const accum_t*>(p.lses[n].data)[offset(p.lses[n], row)];
    }
    m = weights[n] > m || weights[n] != weights[n] ? weights[n] : m;
  }
  accum_t l = 0;
#pragma unroll
  for (int n = 0; n < MAX_PARTS; ++n) {
    if (weights[n] == -number::infinity()) {
      weights[n] = -1;  // takes no part, whatever its output holds
    } else {
      weights[n] = weights[n] == m ? accum_t(1) : exp(weights[n] - m);
      l += weights[n];
    }
  }

  const bool empty = m == -number::infinity();
  const accum_t inverse = empty ? accum_t(0) : accum_t(1) / l;
  const long long target = offset(p.out, row);
#pragma unroll 1
  for (long long d = lane; d < p.columns; d += arch::WARP_SIZE) {
    accum_t sum = 0;
#pragma unroll
    for (int n = 0; n < MAX_PARTS; ++n) {
      if (n < p.parts && !(weights[n] < accum_t(0))) {
        const long long source = offset(p.outs[n], row) + d * p.outs[n].col;
        sum += weights[n] * number::load<accum_t>(p.outs[n].data, p.kinds[n], source);
      }
    }
    number::store(p.out.data, p.kind_out, target + d * p.out.col, sum * inverse);
  }
  if (lane == 0) {
    reinterpret_cast<accum_t*>(p.lse.data)[offset(p.lse, row)] = empty ? m : m + log(l);
  }
}
