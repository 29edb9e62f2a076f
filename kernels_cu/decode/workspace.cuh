// What decode kernels keep between blocks, and how kept results become one: the twin of
// reference/cpu/decode.py.
//
// Every unit has a slot for its rows' m, l and o. Of a node's children the first one's slot
// receives the node, level by level, so that the first unit's slot ends as the whole task. The
// block that has all units of a node folds it; nodes whose units lie in several blocks are folded
// by the block that finishes its part of the task last. Blocks never wait for each other.
//
// Nothing has to be set before a launch: a counter of another launch, or of none, is recognised by
// its upper half and counts from 0.
#pragma once
#include "tasks.cuh"
#include "../common/merge.cuh"
#include "../common/softmax.cuh"
#include "../ptx/atomic.cuh"

namespace decode {

constexpr int COLUMNS = (D_V + 15) / 16 * 16;  // of a row of o in a slot: whole vectors

// A slot's unit: which of how many of its task, and the place of the task's first unit.
struct alignas(16) UnitRecord {
  int task, index, count, first_node;
};

// The workspace in global memory.
struct Workspace {
  unsigned long long* counters;  // one of each task
  UnitRecord* units;             // one of each unit
  merge::Statistics* statistics;
  accum_t* sums;
  int rows;  // of a slot

  __device__ __forceinline__ explicit Workspace(const Params& p) {
    rows = heads_of_task(p) * tile::smaller(p.len_q, queries_of_task(p));
    const long long slots = p.slots + static_cast<long long>(gridDim.x) * WARPS * p.held;
    units = reinterpret_cast<UnitRecord*>(p.workspace);
    sums = reinterpret_cast<accum_t*>(units + p.slots);
    statistics = reinterpret_cast<merge::Statistics*>(sums + slots * rows * COLUMNS);
    counters = reinterpret_cast<unsigned long long*>(statistics + slots * rows);
  }
  __device__ __forceinline__ merge::Statistics& statistic(long long slot, int row) const {
    return statistics[slot * rows + row];
  }
  __device__ __forceinline__ accum_t* row(long long slot, int row) const {
    return sums + (slot * rows + row) * COLUMNS;
  }
  // The slot where this warp keeps a node of level n, from 1 on, that is not a unit.
  __device__ __forceinline__ long long held(const Params& p, int level) const {
    const long long warp = blockIdx.x * WARPS + threadIdx.x / ptx::WARP_SIZE;
    return p.slots + warp * p.held + level - 1;
  }
};

// Logits to the base e and to the base 2 per score.
struct Scale {
  accum_t logit, power;
};

// The upper half of a counter that counts: any other one belongs to no launch of these kernels.
constexpr unsigned long long MARK = 0x6375707900000000ull, UPPER = 0xffffffff00000000ull;

// Makes a counter one that counts, if it is none. Every block does so before it counts.
__device__ __forceinline__ void prepare(unsigned long long* counter) {
  const unsigned long long seen = ptx::compare_and_swap(counter, 0, MARK);
  if (seen != 0 && (seen & UPPER) != MARK) ptx::compare_and_swap(counter, seen, MARK);
}

// Counts `units` of a task as done. Returns whether they were the last; then it counts from 0
// again.
__device__ __forceinline__ bool arrive(unsigned long long* counter, int units, int count) {
  const unsigned long long before = ptx::fetch_add(counter, units);
  const bool last = static_cast<int>(before & ~UPPER) + units == count;
  if (last) ptx::fetch_add(counter, 0ull - count);
  return last;
}

constexpr int ROWS_AT_ONCE = COLUMNS <= 128 ? 2 : 1;  // that a warp folds, so that loads overlap

// Folds the children of rows of a node, from `row` on, from the slot of the first child on, into
// that slot. Children are nodes of the level below; `first` and `end` are units of the task. A warp
// calls it: lane n has the statistics of child n and finds its factors, and all lanes have columns.
__device__ __forceinline__ void fold_rows(const Workspace& workspace, int first_node,
                                          long long slot, int first, int end, int level_below,
                                          int row, accum_t c) {
  constexpr int CHILDREN = 1 << LOG_CHILDREN;
  constexpr int VECTORS = COLUMNS / VECTOR, EACH = (VECTORS + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE;
  const int shift = LOG_CHILDREN * level_below, lane = ptx::lane_index();
  // The first unit of the lane's child, counted from the node's first one.
  const int node = ((first_node + first) >> shift) + lane;
  const int unit = lane == 0 ? 0 : (node << shift) - first_node - first;
  const bool exists = lane < CHILDREN && unit < end - first;
  const int held = exists ? unit : 0;
  const int step = workspace.rows * VECTORS;
  // All parts are loaded before the first is added, and no load depends on a condition. Where there
  // is no child, row or column, another one is loaded and not used.
  merge::Statistics mine[ROWS_AT_ONCE];
  Vector parts[ROWS_AT_ONCE][CHILDREN][EACH];
#pragma unroll
  for (int r = 0; r < ROWS_AT_ONCE; ++r) {
    const int nearest = tile::smaller(row + r, workspace.rows - 1);
    mine[r] = workspace.statistic(slot + held, nearest);
    const Vector* const rows = reinterpret_cast<const Vector*>(workspace.row(slot, nearest));
#pragma unroll
    for (int n = 0; n < CHILDREN; ++n) {
      const Vector* const from = rows + static_cast<long long>(ptx::shuffle(held, n)) * step;
#pragma unroll
      for (int x = 0; x < EACH; ++x) {
        const int place = lane + x * ptx::WARP_SIZE;
        parts[r][n][x] = from[place < VECTORS ? place : 0];
      }
    }
  }
  __syncwarp();  // the parts, loaded by all lanes before the first one's place is written
#pragma unroll
  for (int r = 0; r < ROWS_AT_ONCE; ++r) {
    if (row + r >= workspace.rows) break;
    if (!exists) mine[r] = merge::no_keys();
    // The maximum of this child and those before it, and of those before it.
    accum_t top = mine[r].m;
#pragma unroll
    for (int lanes = 1; lanes < CHILDREN; lanes *= 2) {
      const accum_t other = ptx::shuffle(top, (lane - lanes) & 31);
      top = lane >= lanes && other > top ? other : top;
    }
    accum_t before = ptx::shuffle(top, (lane - 1) & 31);
    before = lane == 0 ? -number::infinity() : before;
    const accum_t own = merge::factor(before, top, c), other = merge::factor(mine[r].m, top, c);
    accum_t l = 0;
    Vector sums[EACH] = {};
#pragma unroll
    for (int n = 0; n < CHILDREN; ++n) {
      const accum_t other_l = ptx::shuffle(mine[r].l, n);
      const merge::Factors factors{ptx::shuffle(own, n), ptx::shuffle(other, n), other_l == 0,
                                   l == 0};
      l = factors.apply(l, other_l);
#pragma unroll
      for (int x = 0; x < EACH; ++x) {
#pragma unroll
        for (int y = 0; y < VECTOR; ++y) {
          sums[x].x[y] = factors.apply(sums[x].x[y], parts[r][n][x].x[y]);
        }
      }
    }
    top = ptx::shuffle(top, CHILDREN - 1);
    Vector* const to = reinterpret_cast<Vector*>(workspace.row(slot, row + r));
#pragma unroll
    for (int x = 0; x < EACH; ++x) {
      const int place = lane + x * ptx::WARP_SIZE;
      if (place < VECTORS) to[place] = sums[x];
    }
    if (lane == 0) workspace.statistic(slot, row + r) = merge::Statistics{top, l};
  }
}

// How many levels lie above units, up to the one whose first node has all keys.
__device__ __forceinline__ int levels_above(const Params& p, int level) {
  int above = 0;
  while ((p.len_k - 1) >> (LOG_LEAF + LOG_CHILDREN * (level + above)) > 0) ++above;
  return above;
}

// The units of a node `above` levels up, of a task with `count` units: its first one and its end.
struct NodeUnits {
  int first, end;

  __device__ __forceinline__ NodeUnits(int node, int above, int first_node, int count) {
    const int begin = (node << LOG_CHILDREN * above) - first_node;
    const int behind = begin + (1 << LOG_CHILDREN * above);
    first = begin < 0 ? 0 : begin;
    end = behind < count ? behind : count;
  }
};

// Folds the nodes that lanes have, each some rows at a time, by all warps of the block: lane n's,
// if it `has` one, from slot `slot` on. `level_below` is that of the children, counted from units
// on. All warps call it with the same nodes.
__device__ __forceinline__ void fold_nodes(const Workspace& workspace, bool has, int first_node,
                                           const NodeUnits& node, long long slot, int level_below,
                                           accum_t c) {
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  unsigned int nodes = ptx::ballot(has);
  int item = 0;
#pragma unroll 1
  while (nodes != 0) {
    const int lane = __ffs(static_cast<int>(nodes)) - 1;
    nodes &= nodes - 1;
    const int first = ptx::shuffle(node.first, lane), end = ptx::shuffle(node.end, lane);
    const int task_first = ptx::shuffle(first_node, lane);
    const long long to = ptx::shuffle(slot, lane);
#pragma unroll 1
    for (int row = 0; row < workspace.rows; row += ROWS_AT_ONCE) {
      if (item++ % WARPS == warp) {
        fold_rows(workspace, task_first, to, first, end, level_below, row, c);
      }
    }
  }
}

// A row of a task whose first slot holds all of it.
__device__ __forceinline__ void finish_row(const Params& p, const Workspace& workspace,
                                           const Task& task, long long slot, Scale scale, int row) {
  const merge::Statistics held = workspace.statistic(slot, row);
  const long long head = task.head_of(row), i = task.query_of(row);
  accum_t m = held.m, l = held.l, weight = 1;
  if (m != -number::infinity()) m *= scale.logit;
  const accum_t sink =
      p.sink == nullptr ? -number::infinity() : number::load<accum_t>(p.sink, p.kind_sink, head);
  if (sink != -number::infinity()) {
    const accum_t top = m > sink ? m : sink;
    weight = m == top ? accum_t(1) : softmax::exponential(m - top);
    l = l * weight + (sink == top ? accum_t(1) : softmax::exponential(sink - top));
    m = top;
  }
  // 8 normalise
  const accum_t inverse = l == accum_t(0) ? accum_t(0) : weight / l;
  storage_t* const out = reinterpret_cast<storage_t*>(p.out.data) +
                         layout::offset(p.out, task.entry(), head, false) + i * p.out.row;
  for (int column = ptx::lane_index(); column < D_V; column += ptx::WARP_SIZE) {
    const accum_t o = held.l == accum_t(0) ? accum_t(0) : workspace.row(slot, row)[column];
    // A sum of 0 gets no sign, because the sign would depend on masked pairs.
    number::narrow(fma(o, inverse, accum_t(0)), out + column * p.out.col);
  }
  // 9 store lse
  if (p.lse.data != nullptr && ptx::lane_index() == 0) {
    const memory::RowStatistic lse = memory::row_statistic(p.lse, task.entry(), head);
    lse.data[i * lse.row] = l == accum_t(0) ? -number::infinity() : m + log(l);
  }
}

// Writes the results of the tasks that lanes have, by all warps of the block, a row at a time.
__device__ __forceinline__ void finish_tasks(const Params& p, const Workspace& workspace, bool has,
                                             int number, long long slot, Scale scale) {
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  unsigned int tasks = ptx::ballot(has);
  int item = 0;
#pragma unroll 1
  while (tasks != 0) {
    const int lane = __ffs(static_cast<int>(tasks)) - 1;
    tasks &= tasks - 1;
    const int mine = (warp + WARPS - item % WARPS) % WARPS;  // the warp's first row
    item += workspace.rows;
    if (mine >= workspace.rows) continue;
    const Task task = task_of(p, ptx::shuffle(number, lane));
    const long long from = ptx::shuffle(slot, lane);
#pragma unroll 1
    for (int row = mine; row < task.rows; row += WARPS) {
      finish_row(p, workspace, task, from, scale, row);
    }
  }
}

// Folds what the warps of all blocks have kept, and writes the results. All threads of a block call
// it, after they stored the units of its share.
__device__ __forceinline__ void fold_and_finish(const Params& p, const Workspace& workspace,
                                                const Units& units, Scale scale,
                                                int (&last_smem)[2]) {
  const int begin = units.begin(blockIdx.x), end = units.begin(blockIdx.x + 1);
  const int above = levels_above(p, units.level);
  __syncthreads();  // the units, stored by all warps
  if (begin == end) return;
  const UnitRecord ends[2] = {workspace.units[begin], workspace.units[end - 1]};
  const auto unit_at = [&](int slot) { return workspace.units[slot < end ? slot : begin]; };
  UnitRecord unit = unit_at(begin + ptx::lane_index());  // most blocks have no more
  // Nodes all of whose units are the block's: lanes look at 32 units at a time.
#pragma unroll 1
  for (int n = 1; n <= above; ++n) {
#pragma unroll 1
    for (int first = begin; first < end; first += ptx::WARP_SIZE) {
      const int slot = first + ptx::lane_index();
      if (end - begin > ptx::WARP_SIZE) unit = unit_at(slot);
      const NodeUnits node((unit.first_node + unit.index) >> (LOG_CHILDREN * n), n, unit.first_node,
                           unit.count);
      const bool has = slot < end && node.first == unit.index && node.end > unit.index + 1 &&
                       slot + node.end - unit.index <= end;
      fold_nodes(workspace, has, unit.first_node, node, slot, n - 1, scale.power);
    }
    __syncthreads();  // the nodes, folded by all warps
  }
  // Tasks all of whose units are the block's.
#pragma unroll 1
  for (int first = begin; first < end; first += ptx::WARP_SIZE) {
    const int slot = first + ptx::lane_index();
    if (end - begin > ptx::WARP_SIZE) unit = unit_at(slot);
    const bool has = slot < end && unit.index == 0 && slot + unit.count <= end;
    finish_tasks(p, workspace, has, unit.task, slot, scale);
  }
  // The first and the last task may have units of other blocks.
  int slots[2];  // of their first units
  bool shared[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    slots[n] = (n == 0 ? begin : end - 1) - ends[n].index;
    shared[n] = slots[n] < begin || slots[n] + ends[n].count > end;
  }
  if (slots[0] == slots[1]) shared[1] = false;  // the same task
  if (!shared[0] && !shared[1]) return;
  if (threadIdx.x < 2 && shared[threadIdx.x]) {
    const int n = threadIdx.x;
    const int from = slots[n] > begin ? slots[n] : begin;
    const int behind = slots[n] + ends[n].count < end ? slots[n] + ends[n].count : end;
    ptx::fence_device();  // what all threads stored before the last barrier
    last_smem[n] = arrive(workspace.counters + ends[n].task, behind - from, ends[n].count);
    ptx::fence_device();
  }
  __syncthreads();  // who was last, and what the others stored
#pragma unroll 1
  for (int task = 0; task < 2; ++task) {
    if (!shared[task] || !last_smem[task]) continue;
    const int first_node = ends[task].first_node, count = ends[task].count;
#pragma unroll 1
    for (int n = 1; n <= above; ++n) {
      const int shift = LOG_CHILDREN * n, end_node = ((first_node + count - 1) >> shift) + 1;
#pragma unroll 1
      for (int first = first_node >> shift; first < end_node; first += ptx::WARP_SIZE) {
        const int number = first + ptx::lane_index();
        const NodeUnits node(number, n, first_node, count);
        // Others were folded by the block that has all of their units.
        const bool has = number < end_node && units.block_of(slots[task] + node.first) !=
                                                  units.block_of(slots[task] + node.end - 1);
        fold_nodes(workspace, has, first_node, node, slots[task] + node.first, n - 1, scale.power);
      }
      __syncthreads();  // the nodes, folded by all warps
    }
    finish_tasks(p, workspace, ptx::lane_index() == 0, ends[task].task, slots[task], scale);
  }
}

}  // namespace decode
