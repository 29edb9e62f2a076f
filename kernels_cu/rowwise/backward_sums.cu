// Gradients out of their parts, after the other backward kernels: the sum, in order, over the
// leading axes along which a gradient has no numbers of its own. These are parts that blocks of a
// kernel computed at the same time, and entries that share k or v.
//
// A thread sums p.widths[n] neighbouring columns of a row: 1, or as many as 16 bytes hold.
//
// Grid: blocks of THREADS threads for each array, one array after the other. Shared memory: none.
#include "../common/params.cuh"
#include "../common/layout.cuh"

namespace {

constexpr int WIDTH = 16 / sizeof(accum_t);
// Parts that are loaded before the first of them is added, along one axis and along several: code
// for more of the latter would not stay in the instruction cache.
constexpr int AHEAD = 16, AHEAD_BY_AXES = 2;

struct alignas(16) Columns {
  accum_t x[WIDTH];
};

// Which of the axes along which parts are summed is how long, and how far apart its parts are. If
// there is one such axis, `only_step` is its step, else it is 0.
struct SummedAxes {
  long long size[MAX_LEAD], step[MAX_LEAD], count, only_step;
};

// The elements between the first part and part `number`; the last axis runs fastest.
__device__ __forceinline__ long long offset_of(const SummedAxes& axes, long long number) {
  long long elements = 0;
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    const layout::Quotient rest = layout::divide(number, axes.size[axis]);
    elements += rest.remainder * axes.step[axis];
    number = rest.quotient;
  }
  return elements;
}

// Sums T, one column or several, from `first` on; `offset` says where a part is.
template <int AT_ONCE, class T, class Offset, class Add>
__device__ __forceinline__ T sum_parts(const T* first, long long count, const Offset& offset,
                                       const Add& add) {
  constexpr int COLUMNS = sizeof(T) / sizeof(accum_t);
  T total = *first;
#pragma unroll 1
  for (long long number = 1; number < count; number += AT_ONCE) {
    T next[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      if (number + n < count) next[n] = first[offset(number + n) / COLUMNS];
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      if (number + n < count) add(total, next[n]);
    }
  }
  return total;
}

template <class T, class Add>
__device__ __forceinline__ T sum_of(const T* first, const SummedAxes& axes, const Add& add) {
  if (axes.only_step != 0) {
    return sum_parts<AHEAD>(
        first, axes.count, [&](long long number) { return number * axes.only_step; }, add);
  }
  return sum_parts<AHEAD_BY_AXES>(
      first, axes.count, [&](long long number) { return offset_of(axes, number); }, add);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ SumsParams p) {
  const long long block = blockIdx.x;
  int n = 0;
  long long begin = 0;
#pragma unroll 1
  while (block >= p.ends[n]) begin = p.ends[n++];
  const Operand &parts = p.parts[n], &gradient = p.gradients[n];
  const long long width = p.widths[n];
  long long index = (block - begin) * THREADS + threadIdx.x;
  const auto take = [&](long long size) {
    const layout::Quotient at = layout::divide(index, size);
    index = at.quotient;
    return at.remainder;
  };
  const long long column = take(p.columns[n] / width) * width;
  const long long row = take(p.rows[n]), head = take(p.heads[n]);
  long long source = head * parts.head + row * parts.row + column;
  long long target = head * gradient.head + row * gradient.row + column * gradient.col;
  SummedAxes axes;
  axes.count = 1;
  axes.only_step = 0;
  int summed_axes = 0;
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    const long long size = p.lead_sizes[n][axis];
    const bool summed = gradient.lead[axis] == 0;
    axes.size[axis] = summed ? size : 1;
    axes.step[axis] = parts.lead[axis];
    axes.count *= axes.size[axis];
    if (axes.size[axis] > 1) {
      axes.only_step = ++summed_axes == 1 ? axes.step[axis] : 0;
    }
    const long long at = take(summed ? 1 : size);
    source += at * parts.lead[axis];
    target += at * gradient.lead[axis];
  }
  if (index > 0) return;  // beyond the last column
  const accum_t* const first = reinterpret_cast<const accum_t*>(parts.data) + source;
  const int kind = static_cast<int>(p.kinds[n]);
  if (width == 1) {
    const auto add = [](accum_t& sum, accum_t next) { sum += next; };
    number::store(gradient.data, kind, target, sum_of(first, axes, add));
    return;
  }
  const auto add = [](Columns& sum, const Columns& next) {
#pragma unroll
    for (int x = 0; x < WIDTH; ++x) sum.x[x] += next.x[x];
  };
  struct alignas(WIDTH * sizeof(storage_t)) Stored {
    storage_t x[WIDTH];
  };
  const Columns total = sum_of(reinterpret_cast<const Columns*>(first), axes, add);
  Stored* const to = reinterpret_cast<Stored*>(gradient.data + target * sizeof(storage_t));
  if (kind == number::STORAGE_KIND && gradient.col == 1 &&
      reinterpret_cast<unsigned long long>(to) % sizeof(Stored) == 0) {
    Stored rounded;
#pragma unroll
    for (int x = 0; x < WIDTH; ++x) number::narrow(total.x[x], &rounded.x[x]);
    *to = rounded;
    return;
  }
#pragma unroll
  for (int x = 0; x < WIDTH; ++x) {
    number::store(gradient.data, kind, target + x * gradient.col, total.x[x]);
  }
}
