// Offsets of packed sequences: converts them to int64, and reports wrong ones. They are wrong if
// they do not begin with 0, decrease, do not end with the packed array's length, or if a sequence
// is longer than the arrays of bias and mask. What is written is what was read: the kernels that
// use it hold it within the packed arrays. But they rely on it that sequences are not too long for
// bias and mask, nor longer than the caller says; where such a limit is there, one block looks for
// longer sequences first, and if there is one, it makes all sequences empty. Where callers vouch
// for offsets, but name the longest length, nothing else is reported.
//
// Grid: the blocks of each array, one array after the other; a thread has one entry. With a limit
// one block. Shared memory: none.
#include "../common/params.cuh"
#include "../ptx/atomic.cuh"
#include "../common/layout.cuh"
#include "../common/lookup.cuh"

namespace {

// What is wrong with an entry, as in cupyflash/arrays/reports.py.
constexpr int NOT_ZERO = 1, DECREASES = 2, NOT_TOTAL = 3, TOO_LONG = 4, BEYOND = 5;
constexpr int KIND_BITS = 3;
constexpr int LENGTHS_ALONE = 2;  // `limited`: what is reported

__device__ __forceinline__ long long load(const char* data, int kind, long long index) {
  switch (kind) {
    case KIND_INT8:
      return lookup::load_as_int<KIND_INT8>(data + index);
    case KIND_UINT8:
      return lookup::load_as_int<KIND_UINT8>(data + index);
    case KIND_INT16:
      return lookup::load_as_int<KIND_INT16>(data + 2 * index);
    case KIND_UINT16:
      return lookup::load_as_int<KIND_UINT16>(data + 2 * index);
    case KIND_INT32:
      return lookup::load_as_int<KIND_INT32>(data + 4 * index);
    case KIND_UINT32:
      return lookup::load_as_int<KIND_UINT32>(data + 4 * index);
    default:
      return lookup::load_as_int<KIND_INT64>(data + 8 * index);
  }
}

// How far a sequence reaches that ends with entry n, as other kernels hold it within the arrays.
__device__ __forceinline__ bool is_too_long(const OffsetsParams& p, int array, long long n) {
  const long long first = load(p.inputs[array], p.kinds[array], (n - 1) * p.steps[array]);
  const long long last = load(p.inputs[array], p.kinds[array], n * p.steps[array]);
  const long long start = layout::clamp(first, 0, p.totals[array]);
  return layout::clamp(last, start, p.totals[array]) - start > p.limits[array];
}

// Writes and checks one entry.
__device__ __forceinline__ void take(const OffsetsParams& p, int array, long long n, bool empty) {
  const char* const input = p.inputs[array];
  const long long own = load(input, p.kinds[array], n * p.steps[array]);
  if (p.results[array] != nullptr) p.results[array][n] = empty ? 0 : own;
  if (p.reports[array] == nullptr) return;
  const bool too_long = n > 0 && is_too_long(p, array, n);
  int wrong = too_long ? TOO_LONG : 0;
  if (p.limited != LENGTHS_ALONE) {
    if (n == 0) {
      if (own != 0) wrong = NOT_ZERO;
    } else {
      const long long before = load(input, p.kinds[array], (n - 1) * p.steps[array]);
      if (own < before) {
        wrong = DECREASES;
      } else if (own > p.totals[array]) {
        wrong = BEYOND;
      }
    }
    if (n == p.count - 1 && (wrong == 0 || wrong == BEYOND) && own != p.totals[array]) {
      wrong = NOT_TOTAL;
    }
  }
  // Of several wrong entries, any is reported.
  if (wrong != 0) {
    ptx::tell_host(p.reports[array], static_cast<unsigned long long>(n) << KIND_BITS | wrong);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ OffsetsParams p) {
  if (p.limited == 0) {
    const long long n = static_cast<long long>(blockIdx.x % p.blocks) * THREADS + threadIdx.x;
    if (n < p.count) take(p, blockIdx.x / p.blocks, n, false);
    return;
  }
  bool empty = false;
#pragma unroll 1
  for (int array = 0; array < p.arrays; ++array) {
#pragma unroll 1
    for (long long n = 1 + threadIdx.x; n < p.count; n += THREADS)
      empty |= is_too_long(p, array, n);
  }
  empty = ptx::barrier_or(empty);
#pragma unroll 1
  for (int array = 0; array < p.arrays; ++array) {
#pragma unroll 1
    for (long long n = threadIdx.x; n < p.count; n += THREADS) take(p, array, n, empty);
  }
}
