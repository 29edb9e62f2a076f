// Joins what a decode kernel left in its workspace, and writes out and lse: part of the twin of
// reference/cpu/decode.py.
//
// Each row of a task has a block or, where there are many rows, a warp. It folds units to nodes of
// the next level, and so on: a warp folds the children of a node in their order, lane n with the
// statistics of child n, and all lanes with columns. Several warps share the columns of a wide row.
//
// Grid: the rows of all tasks, BLOCK_ROWS to a block. Shared memory: NODES rows for each of them.
// BLOCK_Q is the decode kernel's. `scale` is the number of logits to the base e per score.
#include "../common/params.cuh"
#include "../common/softmax.cuh"
#include "../decode/workspace.cuh"

namespace {

using decode::CHILDREN;
using decode::LOG_CHILDREN;
using decode::ROW;
// A block of two warps has a row for each; a larger one has one row.
constexpr int BLOCK_ROWS = THREADS > 2 * ptx::WARP_SIZE ? 1 : decode::WARPS;
constexpr int SHARE = THREADS / BLOCK_ROWS, ROW_WARPS = SHARE / ptx::WARP_SIZE;  // of a row
constexpr int NODES = SHARED_BYTES / BLOCK_ROWS / (ROW * static_cast<int>(sizeof(accum_t)));
constexpr int VECTORS = decode::COLUMNS / VECTOR;
constexpr int PIECES = (VECTORS + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE;  // of a row, each a warp's
constexpr int SHARERS = PIECES < ROW_WARPS ? PIECES : ROW_WARPS;
constexpr int NODES_AT_ONCE = ROW_WARPS / SHARERS;
static_assert(NODES > 0, "SHARED_BYTES");

// A row of a task's tree. Nodes of a level are numbered from the first one of all keys. It begins
// with the task's units, and with the nodes of level 1 before them that it shares with other tasks.
struct Tree {
  const Params& p;
  const decode::Workspace& workspace;
  decode::TaskRecord units;
  accum_t* nodes_smem;
  int number, row;
  int own;            // the level of its units
  int shared;         // nodes of level 1, as many as make whole nodes of that level
  int lowest, joins;  // the level of its first nodes; the one from which on no kind is alone
  int made, base;     // the level of the first nodes that are made here, and the first of them
  bool has_room;      // for all nodes of that level in shared memory

  __device__ __forceinline__ Tree(const Params& p, const decode::Workspace& workspace,
                                  const decode::Task& task, accum_t* nodes_smem, int row)
      : p(p),
        workspace(workspace),
        units(workspace.records[task.number]),
        nodes_smem(nodes_smem),
        number(task.number),
        row(row),
        own(SHARED ? units.level : 0),  // levels matter to shared nodes only
        shared(task.shared(p, own)) {
    // Where no row sees any of them, units may begin later.
    if (units.first_node > shared >> (LOG_CHILDREN * own)) shared = 0;
    shared >>= LOG_CHILDREN;
    lowest = shared > 0 && own > 1 ? 1 : own;
    joins = shared > 0 && own == 0 ? 1 : own;
    made = lowest + 1;
    base = shared > 0 ? 0 : first(made);
    const int above = matmul::larger(own, made);
    const int end = (last(above) + 1) << (LOG_CHILDREN * (above - made));
    has_room = end - base <= NODES;
  }
  // The first and the last node of a level.
  __device__ __forceinline__ int first(int level) const {
    if (shared > 0 && level > 0) return 0;
    return units.first_node >> (LOG_CHILDREN * (level - own));
  }
  __device__ __forceinline__ int last(int level) const {
    if (SHARED && level < own) return (shared >> (LOG_CHILDREN * (level - 1))) - 1;
    return (units.first_node + units.units - 1) >> (LOG_CHILDREN * (level - own));
  }
  // The place of a node: that of its first child, which is in shared memory if there is room.
  __device__ __forceinline__ accum_t* place(int level, int node) const {
    const bool is_shared = SHARED && level > 0 && node << (LOG_CHILDREN * (level - 1)) < shared;
    if (level > (is_shared ? 1 : own) && has_room) {
      const int child = node << (LOG_CHILDREN * (level - made));
      return nodes_smem + ROW * matmul::larger(child - base, 0);
    }
    if (is_shared) {
      const int child = node << (LOG_CHILDREN * (level - 1));
      return workspace.row(decode::Workspace::shared(p, number, child), row);
    }
    const int child = node << (LOG_CHILDREN * (level - own));
    return workspace.row(units.slot + matmul::larger(child - units.first_node, 0), row);
  }
};

// Folds children in their order, and stores the columns of one of SHARERS warps; returns the node's
// statistics. Lane n, of the first CHILDREN, has child n or, where there is none, another one. The
// node may lie where one of its children does.
__device__ __forceinline__ merge::Statistics fold(accum_t* child, bool exists, accum_t* node,
                                                  int sharer, accum_t c) {
  const int lane = ptx::lane_index();
  merge::Statistics mine = decode::statistics_of(child);
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
  const long long address = reinterpret_cast<long long>(child + decode::STATISTICS);
  accum_t l = 0;
#pragma unroll 1
  for (int first = sharer * ptx::WARP_SIZE; first < VECTORS; first += SHARERS * ptx::WARP_SIZE) {
    const int place = first + lane;
    Vector parts[CHILDREN];  // all loaded before the first is added
#pragma unroll
    for (int n = 0; n < CHILDREN; ++n) {
      const Vector* const from = reinterpret_cast<const Vector*>(ptx::shuffle(address, n));
      parts[n] = from[place < VECTORS ? place : 0];
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
    if (place < VECTORS) reinterpret_cast<Vector*>(node + decode::STATISTICS)[place] = sums;
  }
  return merge::Statistics{ptx::shuffle(top, CHILDREN - 1), l};
}

// A barrier of a row's threads.
__device__ __forceinline__ void wait_for_row() {
  if constexpr (ROW_WARPS == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Where a row's results go, and its sink.
struct Results {
  storage_t* out;
  accum_t* lse;  // null if it is not wanted
  accum_t sink;

  __device__ __forceinline__ Results(const Params& p, const decode::Task& task, int row) {
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

  // Writes the row from the place that holds all of its keys; `step` is the distance of columns.
  __device__ __forceinline__ void write(const accum_t* held, long long step, accum_t scale) const {
    const merge::Statistics statistics = *reinterpret_cast<const merge::Statistics*>(held);
    accum_t m = statistics.m, l = statistics.l, weight = 1;
    if (m != -number::infinity()) m *= scale;
    if (sink != -number::infinity()) {
      const accum_t top = m > sink ? m : sink;
      weight = m == top ? accum_t(1) : softmax::exponential(m - top);
      l = l * weight + (sink == top ? accum_t(1) : softmax::exponential(sink - top));
      m = top;
    }
    // 8 normalise
    const accum_t inverse = l == accum_t(0) ? accum_t(0) : weight / l;
#pragma unroll 1
    for (int column = threadIdx.x % SHARE; column < D_V; column += SHARE) {
      const accum_t o = statistics.l == accum_t(0) ? accum_t(0) : held[decode::STATISTICS + column];
      // A sum of 0 gets no sign, because the sign would depend on masked pairs.
      number::narrow(fma(o, inverse, accum_t(0)), out + column * step);
    }
    // 9 store lse
    if (lse != nullptr && threadIdx.x % SHARE == 0) {
      *lse = l == accum_t(0) ? -number::infinity() : m + log(l);
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  ptx::launch_dependents();
  const int place = threadIdx.x / SHARE, warp = threadIdx.x % SHARE / ptx::WARP_SIZE;
  const accum_t scale = static_cast<accum_t>(p.scale);
  const accum_t c = fmin(scale * number::LOG2_E<accum_t>, number::largest());
  const decode::Workspace workspace(p);
  const unsigned int index = blockIdx.x * BLOCK_ROWS + place, rows = workspace.rows_of_slot;
  const int number = static_cast<int>(index / rows), row = static_cast<int>(index % rows);
  // What the decode kernel reads as well is read before it ends.
  const decode::Task task = decode::task_of(p, number < p.tasks ? number : 0);
  if (number >= p.tasks || row >= task.rows) {
    ptx::wait_for_grids();
    return;
  }
  const Results results(p, task, row);
  ptx::wait_for_grids();
  const Tree tree(p, workspace, task, reinterpret_cast<accum_t*>(shared_smem) + place * NODES * ROW,
                  row);

  int level = tree.lowest;
#pragma unroll 1
  for (; level < tree.joins || tree.first(level) < tree.last(level); ++level) {
    const int low = tree.first(level), high = tree.last(level), last = high >> LOG_CHILDREN;
#pragma unroll 1
    for (int first = low >> LOG_CHILDREN; first <= last; first += NODES_AT_ONCE) {
      const int node = first + warp / SHARERS, sharer = warp % SHARERS;
      const bool is_mine = warp < NODES_AT_ONCE * SHARERS && node <= last;
      merge::Statistics made = merge::no_keys();
      if (is_mine) {
        const int wanted = (node << LOG_CHILDREN) + ptx::lane_index() % CHILDREN;
        const int child = tile::smaller(matmul::larger(wanted, low), high);
        made = fold(tree.place(level, child), child == wanted && ptx::lane_index() < CHILDREN,
                    tree.place(level + 1, node), sharer, c);
      }
      if constexpr (SHARERS > 1) wait_for_row();  // statistics of children, read by all warps
      if (is_mine && sharer == 0 && ptx::lane_index() == 0) {
        decode::statistics_of(tree.place(level + 1, node)) = made;
      }
    }
    wait_for_row();  // the nodes, folded by all warps
  }
  results.write(tree.place(level, tree.first(level)), p.out.col, scale);
}
