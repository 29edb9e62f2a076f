// Joins what a decode kernel left in its workspace, and writes out and lse: part of the twin of
// reference/cpu/decode.py.
//
// Each row of a task has a block or, where there are many rows, a warp. It folds units to nodes of
// the next level, and so on: a warp folds the children of a node in their order, lane n with the
// statistics of child n, and all lanes with columns. Several warps share the columns of a wide row.
//
// Many rows in pieces (decode/workspace.cuh) are joined without shared memory (WIDE): a block has 8
// rows of a task, and a thread joins some of a row's vectors alone, in registers, all units in
// their order, with statistics of its own. A warp reads and writes a piece of all 8 rows at once.
//
// Grid: the rows of all tasks, BLOCK_ROWS to a block. Shared memory: NODES rows for each of them.
// BLOCK_Q is the decode kernel's. `scale` is the number of logits to the base e per score.
#include "../common/params.cuh"
#include "../decode/results.cuh"

namespace {

using decode::CHILDREN;
using decode::LOG_CHILDREN;
using decode::ROW;
constexpr bool WIDE = decode::OF_BLOCKS && SHARED_BYTES == 0;
// A block of two warps has a row for each; a larger one has one row.
constexpr int BLOCK_ROWS = THREADS > 2 * ptx::WARP_SIZE ? 1 : decode::WARPS;
constexpr int SHARE = THREADS / BLOCK_ROWS, ROW_WARPS = SHARE / ptx::WARP_SIZE;  // of a row
constexpr int NODES = SHARED_BYTES / BLOCK_ROWS / (ROW * static_cast<int>(sizeof(accum_t)));
constexpr int PIECES =
    (decode::VECTORS + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE;  // of a row, each a warp's
constexpr int SHARERS = PIECES < ROW_WARPS ? PIECES : ROW_WARPS;
constexpr int NODES_AT_ONCE = ROW_WARPS / SHARERS;
static_assert(WIDE || (NODES > 0 && NODES % decode::ROWS_OF_PIECES == 0), "SHARED_BYTES");

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
      return decode::row_at(nodes_smem, matmul::larger(child - base, 0));
    }
    if (is_shared) {
      const int child = node << (LOG_CHILDREN * (level - 1));
      return workspace.row(decode::Workspace::shared(p, number, child), row);
    }
    const int child = node << (LOG_CHILDREN * (level - own));
    return workspace.row(units.slot + matmul::larger(child - units.first_node, 0), row);
  }
};

// A barrier of a row's threads.
__device__ __forceinline__ void wait_for_row() {
  if constexpr (ROW_WARPS == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// A node of a row, as far as a thread joins it: its statistics, and SIZE vectors of o.
template <int SIZE>
struct Part {
  merge::Statistics row;
  Vector o[SIZE];

  __device__ __forceinline__ void clear() {
    row = merge::no_keys();
#pragma unroll
    for (int n = 0; n < SIZE; ++n) o[n] = Vector{};
  }
  // Adds the next child, as decode::fold does.
  __device__ __forceinline__ void add(const Part& child, accum_t c) {
    const accum_t top = child.row.m > row.m ? child.row.m : row.m;
    const merge::Factors factors{merge::factor(row.m, top, c), merge::factor(child.row.m, top, c),
                                 child.row.l == 0, row.l == 0};
    row = merge::Statistics{top, factors.apply(row.l, child.row.l)};
#pragma unroll
    for (int n = 0; n < SIZE; ++n) {
#pragma unroll
      for (int x = 0; x < VECTOR; ++x) o[n].x[x] = factors.apply(o[n].x[x], child.o[n].x[x]);
    }
  }
};

// Joins 8 rows of a task: lane 4 r + b of a warp has vector b of each of SIZE pieces of row r.
template <int SIZE>
struct WideRows {
  // Units that are all loaded before the first is added; a thread has 64 registers.
  static constexpr int AT_ONCE = SIZE == 1 ? CHILDREN : SIZE == 2 ? 2 : 1;
  static constexpr int LANES = ptx::WARP_SIZE / decode::ROWS_OF_PIECES;  // of a row
  static constexpr int MOST_LEVELS = (31 - decode::LOG_LEAF) / LOG_CHILDREN;
  static_assert(!WIDE || (!SHARED && LANES * VECTOR == decode::PIECE &&
                          SIZE * decode::WARPS * decode::PIECE == D_V),
                "THREADS");

  __device__ __forceinline__ static void join(const Params& p) {
    const accum_t scale = static_cast<accum_t>(p.scale);
    const accum_t c = fmin(scale * number::LOG2_E<accum_t>, number::largest());
    const decode::Workspace workspace(p);
    const int blocks =
        (workspace.rows_of_slot + decode::ROWS_OF_PIECES - 1) / decode::ROWS_OF_PIECES;
    const int number = static_cast<int>(blockIdx.x) / blocks;
    const int lane = ptx::lane_index(), vector = lane % LANES;
    const int first_row = static_cast<int>(blockIdx.x) % blocks * decode::ROWS_OF_PIECES;
    // What the decode kernel reads as well is read before it ends.
    const decode::Task task = decode::task_of(p, number < p.tasks ? number : 0);
    if (number >= p.tasks || first_row >= task.rows) {
      ptx::wait_for_grids();
      return;
    }
    const bool exists = first_row + lane / LANES < task.rows;
    const int row = exists ? first_row + lane / LANES : first_row;
    const decode::Results results(p, task, row);
    ptx::wait_for_grids();
    const int first_piece = static_cast<int>(threadIdx.x) / ptx::WARP_SIZE * SIZE;
    const Part<SIZE> made = root(workspace, workspace.records[number], row, first_piece, vector, c);
    const decode::Results::Finished finished = results.finished(made.row, scale);
    if (exists && first_piece == 0 && vector == 0) results.write_lse(finished);
    const bool is_odd = vector % 2 != 0;
#pragma unroll
    for (int n = 0; n < SIZE; ++n) {
      accum_t o[VECTOR];
#pragma unroll
      for (int x = 0; x < VECTOR; ++x) o[x] = finished.normalised(made.o[n].x[x]);
      // Two columns of each half of the piece become four neighbouring ones.
      const unsigned int low = number::narrow_pair(o[0], o[1]);
      const unsigned int high = number::narrow_pair(o[2], o[3]);
      const unsigned int other = ptx::shuffle_xor(is_odd ? low : high, 1);
      const TwoPairs columns{{is_odd ? other : low, is_odd ? high : other}};
      const int column =
          (first_piece + n) * decode::PIECE + (is_odd ? 8 + 2 * (vector - 1) : 2 * vector);
      if (exists) store(results.out + column * p.out.col, p.out.col, columns);
    }
  }

 private:
  struct alignas(8) TwoPairs {
    unsigned int of[2];
  };

  __device__ __forceinline__ static void store(storage_t* to, long long step,
                                               const TwoPairs& columns) {
    if (step == 1 && reinterpret_cast<unsigned long long>(to) % sizeof(TwoPairs) == 0) {
      *reinterpret_cast<TwoPairs*>(to) = columns;
    } else {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        to[x * step] = static_cast<storage_t>(columns.of[x / 2] >> (16 * (x % 2)));
      }
    }
  }

  __device__ __forceinline__ static void load(Part<SIZE>& part, const decode::Workspace& workspace,
                                              long long slot, int row, int first_piece,
                                              int vector) {
    const accum_t* const from = workspace.row(slot, row);
    part.row = *reinterpret_cast<const merge::Statistics*>(from);
#pragma unroll
    for (int n = 0; n < SIZE; ++n) {
      part.o[n] = *reinterpret_cast<const Vector*>(
          from + decode::STATISTICS + (first_piece + n) * decode::PIECE_STEP + vector * VECTOR);
    }
  }

  // The node that holds all units of a task.
  __device__ __forceinline__ static Part<SIZE> root(const decode::Workspace& workspace,
                                                    const decode::TaskRecord& units, int row,
                                                    int first_piece, int vector, accum_t c) {
    const int low_unit = units.first_node, high_unit = low_unit + units.units - 1;
    Part<SIZE> made, above[MOST_LEVELS];  // the one above each level that is not whole yet
    made.clear();
#pragma unroll 1
    for (int first = low_unit / AT_ONCE * AT_ONCE;;) {
      Part<SIZE> parts[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        const int unit = tile::smaller(matmul::larger(first + n, low_unit), high_unit);
        load(parts[n], workspace, units.slot + unit - low_unit, row, first_piece, vector);
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        if (first + n >= low_unit && first + n <= high_unit) made.add(parts[n], c);
      }
      int node = first >> LOG_CHILDREN;
      first += AT_ONCE;
      if (first <= high_unit && first % CHILDREN != 0) continue;
      // The node is whole: it joins those before it.
      int low = low_unit >> LOG_CHILDREN, high = high_unit >> LOG_CHILDREN;
#pragma unroll 1
      for (int level = 0; low < high; ++level) {
        if (node == low || node % CHILDREN == 0) above[level].clear();
        above[level].add(made, c);
        if (node != high && node % CHILDREN != CHILDREN - 1) break;
        made = above[level];
        node >>= LOG_CHILDREN;
        low >>= LOG_CHILDREN;
        high >>= LOG_CHILDREN;
      }
      if (first > high_unit) return made;
      made.clear();
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  ptx::launch_dependents();
  if constexpr (WIDE) {
    WideRows<WIDE ? D_V / decode::PIECE / decode::WARPS : 1>::join(p);
    return;
  }
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
  const decode::Results results(p, task, row);
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
        made = decode::fold<SHARERS>(tree.place(level, child),
                                     child == wanted && ptx::lane_index() < CHILDREN,
                                     tree.place(level + 1, node), sharer, c);
      }
      if constexpr (SHARERS > 1) wait_for_row();  // statistics of children, read by all warps
      if (is_mine && sharer == 0 && ptx::lane_index() == 0) {
        decode::statistics_of(tree.place(level + 1, node)) = made;
      }
    }
    wait_for_row();  // the nodes, folded by all warps
  }
  results.write<SHARE>(tree.place(level, tree.first(level)), p.out.col, scale);
}
