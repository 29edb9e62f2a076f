// Where a decode kernel leaves the results of units, for decode_combine.cu to join them.
//
// The workspace holds a record of each task, and slots of as many rows as a task has: one for each
// unit, then those of each warp, for nodes of its unit that are not in registers, and then one for
// each node of level 1 that a task shares with others.
#pragma once
#include "tasks.cuh"
#include "../common/merge.cuh"
#include "../ptx/grid.cuh"

namespace decode {

// A row of a slot: its statistics, which its columns follow. Where all of a block works on one
// unit, the rows are cut in pieces of 16 elements, and the same pieces of 8 rows follow each other.
// Those 8 rows and 16 columns, of which a warp's threads have 16 bytes each in a product, are then
// 512 adjacent bytes. The first piece has the statistics.
constexpr int PIECE = 16, ROWS_OF_PIECES = OF_BLOCKS ? 8 : 1;
// Elements from a piece of a row to the next one, and from its statistics, m and l, to its columns.
constexpr int PIECE_STEP = ROWS_OF_PIECES * PIECE;
constexpr int STATISTICS = OF_BLOCKS ? PIECE_STEP : 16 / sizeof(accum_t);
constexpr int COLUMNS = (D_V + 15) / 16 * 16;                    // of a row of o: whole vectors
constexpr int ROW = COLUMNS + (OF_BLOCKS ? PIECE : STATISTICS);  // elements

// Where row `row` of those that begin at `rows` has its statistics.
__device__ __forceinline__ accum_t* row_at(accum_t* rows, long long row) {
  if constexpr (!OF_BLOCKS) return rows + row * ROW;
  const int of_pieces = static_cast<int>(row % ROWS_OF_PIECES);
  return rows + (row - of_pieces) * ROW + of_pieces * PIECE;
}

// Where a row's vector of columns is, counted in vectors from the first one.
__device__ __forceinline__ int place_of_vector(int vector) {
  if constexpr (!OF_BLOCKS) return vector;
  constexpr int OF_PIECE = PIECE / VECTOR;
  return vector / OF_PIECE * (ROWS_OF_PIECES * OF_PIECE) + vector % OF_PIECE;
}

// Where a column of o is, counted from the row's first one. In a piece, a thread of a product has
// 16 bytes of its own: column 8 a + 2 b + c has place 4 b + 2 a + c.
__device__ __forceinline__ int place_of(int column) {
  if constexpr (!OF_BLOCKS) return column;
  return column / PIECE * PIECE_STEP + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
}

// The most rows of a task.
__device__ __forceinline__ int rows_of_slot(const Params& p) {
  return heads_of_task(p) * tile::smaller(p.len_q, queries_of_task(p));
}

// The units of a task: the slot of the first, how many, which node of their level the first is.
struct alignas(16) TaskRecord {
  int slot, units, first_node, level;
};

struct Workspace {
  TaskRecord* records;
  accum_t* rows;
  int rows_of_slot;

  __device__ __forceinline__ explicit Workspace(const Params& p) {
    records = reinterpret_cast<TaskRecord*>(p.workspace);
    // Rows in pieces begin at multiples of 128 bytes.
    constexpr int RECORDS = OF_BLOCKS ? 128 / sizeof(TaskRecord) : 1;
    rows = reinterpret_cast<accum_t*>(records + (p.tasks + RECORDS - 1) / RECORDS * RECORDS);
    rows_of_slot = decode::rows_of_slot(p);
  }
  // The statistics of a row of a slot.
  __device__ __forceinline__ accum_t* row(long long slot, int row) const {
    return row_at(rows, slot * rows_of_slot + row);
  }
  // The slot where this warp of a decode kernel keeps a node of level n, from 1 on, of its unit.
  __device__ __forceinline__ static long long held(const Params& p, int level) {
    const long long warp = blockIdx.x * WARPS + threadIdx.x / ptx::WARP_SIZE;
    return p.slots + warp * p.held + level - 1;
  }
  // The slot of a task's node of level 1 that decode_sm80_shared.cu computes.
  __device__ __forceinline__ static long long shared(const Params& p, int number, int node) {
    return p.shared_slots + static_cast<long long>(number) * p.shared + node;
  }
};

// The leaves of a block's whole task, in shared memory; the visible ones are numbered from 0 on.
struct Leaves {
  accum_t* first;
  int step;  // elements from one to the next

  __device__ __forceinline__ accum_t* row(int number, int row) const {
    return first + number * step + row * ROW;
  }
};

__device__ __forceinline__ merge::Statistics& statistics_of(accum_t* row) {
  return *reinterpret_cast<merge::Statistics*>(row);
}

}  // namespace decode
