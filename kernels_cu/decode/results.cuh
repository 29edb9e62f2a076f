// How rows of results come of the nodes of their trees, in shared memory or in a workspace:
// children become a node, and the last node becomes out and lse. Part of the twin of
// reference/cpu/decode.py.
#pragma once
#include "workspace.cuh"
#include "../common/softmax.cuh"

namespace decode {

constexpr int VECTORS = COLUMNS / VECTOR;

// Folds children in their order, and stores the columns of one of SHARERS warps; returns the node's
// statistics. Lane n, of the first CHILDREN, has child n or, where there is none, another one. The
// node may lie where one of its children does.
template <int SHARERS>
__device__ __forceinline__ merge::Statistics fold(accum_t* child, bool exists, accum_t* node,
                                                  int sharer, accum_t c) {
  const int lane = ptx::lane_index();
  merge::Statistics mine = statistics_of(child);
  if (!exists) mine = merge::no_keys();
  // The maximum of this child and those before it, and of those before it.
  accum_t top = mine.m;
#pragma unroll
  for (int lanes = 1; lanes < CHILDREN; lanes *= 2) {
    const accum_t other = ptx::shuffle(top, (lane - lanes) & 31);
    top = lane >= lanes && other > top ? other : top;
  }
  accum_t before = ptx::shuffle(top, (lane - 1) & 31);
  before = lane == 0 ? -number::infinity() : before;
  const accum_t own = merge::factor(before, top, c), other = merge::factor(mine.m, top, c);
  const long long address = reinterpret_cast<long long>(child + STATISTICS);
  accum_t l = 0;
#pragma unroll 1
  for (int first = sharer * ptx::WARP_SIZE; first < VECTORS; first += SHARERS * ptx::WARP_SIZE) {
    const int place = first + lane;
    Vector parts[CHILDREN];  // all loaded before the first is added
#pragma unroll
    for (int n = 0; n < CHILDREN; ++n) {
      const Vector* const from = reinterpret_cast<const Vector*>(ptx::shuffle(address, n));
      // Nothing that is written already.
      parts[n] = from[place_of_vector(tile::smaller(place, VECTORS - 1))];
    }
    Vector sums{};
    l = 0;
#pragma unroll
    for (int n = 0; n < CHILDREN; ++n) {
      const accum_t other_l = ptx::shuffle(mine.l, n);
      const merge::Factors factors{ptx::shuffle(own, n), ptx::shuffle(other, n), other_l == 0,
                                   l == 0};
      l = factors.apply(l, other_l);
#pragma unroll
      for (int x = 0; x < VECTOR; ++x) sums.x[x] = factors.apply(sums.x[x], parts[n].x[x]);
    }
    __syncwarp();  // the parts, loaded by all lanes before one of them is replaced
    if (place < VECTORS) {
      reinterpret_cast<Vector*>(node + STATISTICS)[place_of_vector(place)] = sums;
    }
  }
  return merge::Statistics{ptx::shuffle(top, CHILDREN - 1), l};
}

// Where a row's results go, and its sink.
struct Results {
  storage_t* out;
  accum_t* lse;  // null if it is not wanted
  accum_t sink;

  __device__ __forceinline__ Results(const Params& p, const Task& task, int row) {
    const long long head = task.head_of(row), i = task.query_of(row);
    const layout::Entry entry = task.entry();
    out = reinterpret_cast<storage_t*>(p.out.data) + layout::offset(p.out, entry, head, false) +
          i * p.out.row;
    lse = nullptr;
    if (p.lse.data != nullptr) {
      const memory::RowStatistic all = memory::row_statistic(p.lse, entry, head);
      lse = all.data + i * all.row;
    }
    sink = -number::infinity();
    if (p.sink != nullptr) sink = number::load<accum_t>(p.sink, p.kind_sink, head);
  }

  // A row's maximum and sum, with its sink, and what its sums of o are multiplied by.
  struct Finished {
    accum_t m, l, inverse, own_l;  // the last one without the sink

    __device__ __forceinline__ accum_t normalised(accum_t sum) const {
      // A sum of 0 gets no sign, because the sign would depend on masked pairs.
      return fma(own_l == accum_t(0) ? accum_t(0) : sum, inverse, accum_t(0));
    }
  };
  __device__ __forceinline__ Finished finished(const merge::Statistics& statistics,
                                               accum_t scale) const {
    accum_t m = statistics.m, l = statistics.l, weight = 1;
    if (m != -number::infinity()) m *= scale;
    if (sink != -number::infinity()) {
      const accum_t top = m > sink ? m : sink;
      weight = m == top ? accum_t(1) : softmax::exponential(m - top);
      l = l * weight + (sink == top ? accum_t(1) : softmax::exponential(sink - top));
      m = top;
    }
    // 8 normalise
    return Finished{m, l, l == accum_t(0) ? accum_t(0) : weight / l, statistics.l};
  }
  __device__ __forceinline__ void write_lse(const Finished& row) const {
    // 9 store lse
    if (lse != nullptr) *lse = row.l == accum_t(0) ? -number::infinity() : row.m + log(row.l);
  }

  // Writes the row from the place that holds all of its keys, with SHARE threads; `step` is the
  // distance of columns.
  template <int SHARE>
  __device__ __forceinline__ void write(const accum_t* held, long long step, accum_t scale) const {
    const Finished row = finished(*reinterpret_cast<const merge::Statistics*>(held), scale);
#pragma unroll 1
    for (int column = threadIdx.x % SHARE; column < D_V; column += SHARE) {
      number::narrow(row.normalised(held[STATISTICS + place_of(column)]), out + column * step);
    }
    if (threadIdx.x % SHARE == 0) write_lse(row);
  }
};

// Joins the leaves, or nodes of a level, that a task's warps hold, and writes its results: a warp
// for each row.
__device__ __forceinline__ void write_rows(const Params& p, const Task& task, const Leaves& leaves,
                                           accum_t scale, int level = 0) {
  const accum_t c = fmin(scale * number::LOG2_E<accum_t>, number::largest());
  const int of_level = LOG_CHILDREN * level, low = task.first >> of_level;
  const int high = matmul::larger(task.last - 1, task.first) >> of_level;
  const int lane = ptx::lane_index();
#pragma unroll 1
  for (int row = warp_of_task(); row < task.rows; row += TASK_WARPS) {
    // A node lies where its first leaf was.
    const auto place = [&](int leaf) { return leaves.row(matmul::larger(leaf - low, 0), row); };
#pragma unroll 1
    for (int shift = 0; low >> shift < high >> shift; shift += LOG_CHILDREN) {
      const int first = low >> shift, last = high >> shift;
#pragma unroll 1
      for (int node = first >> LOG_CHILDREN; node <= last >> LOG_CHILDREN; ++node) {
        const int wanted = (node << LOG_CHILDREN) + lane % CHILDREN;
        const int child = tile::smaller(matmul::larger(wanted, first), last);
        accum_t* const to = place(node << LOG_CHILDREN << shift);
        const merge::Statistics made =
            fold<1>(place(child << shift), child == wanted && lane < CHILDREN, to, 0, c);
        if (lane == 0) statistics_of(to) = made;
        __syncwarp();  // the node, written by all lanes
      }
    }
    Results(p, task, row).write<ptx::WARP_SIZE>(place(low), p.out.col, scale);
  }
}

}  // namespace decode
