// The keys that all entries share, and rows of several entries that a warp computes at once: what
// decode_sm80_shared.cu divides.
//
// A unit is a node of level 1 of the keys of one key head, for a team of TEAM warps, each with 16
// rows. The rows of a warp are those of a task, or of the tasks of as many entries as fit, which
// have the same heads and queries.
#pragma once
#include "cursor.cuh"

namespace decode {

constexpr int TEAMS = WARPS / TEAM;

// Entries whose tasks are the rows of a warp.
__device__ __forceinline__ int entries_of_warp(const Params& p) {
  return MOST_ROWS / rows_of_slot(p);
}

// How many warps the rows of a key head need, and the units of a call.
__device__ __forceinline__ int tiles_of_head(const Params& p) {
  const int entries = entries_of_warp(p);
  const int groups = (static_cast<int>(p.batch) + entries - 1) / entries;
  return groups * head_blocks(p) * static_cast<int>(p.blocks);
}
__device__ __forceinline__ int shared_units(const Params& p) {
  return (tiles_of_head(p) + TEAM - 1) / TEAM * p.heads_kv * p.shared;
}

// The keys of a unit, where entry 0 has them, and the first of its team's tiles of rows. Units with
// the same keys are neighbours, so that they read these at about the same time.
struct SharedUnit {
  const storage_t *k, *v;  // row 0 of its head, or of page 0
  const float *k_scale, *v_scale;
  int head_kv, node, tile;

  __device__ __forceinline__ SharedUnit(const Params& p, int number) {
    const Division by_team(number, (tiles_of_head(p) + TEAM - 1) / TEAM);
    const Division by_head(by_team.quotient, p.heads_kv);
    tile = static_cast<int>(by_team.remainder) * TEAM;
    head_kv = static_cast<int>(by_head.remainder);
    node = static_cast<int>(by_head.quotient);
    k = reinterpret_cast<const storage_t*>(p.k.data + cache::STEP<KEY_CODES> * head_kv * p.k.head);
    v = reinterpret_cast<const storage_t*>(p.v.data +
                                           cache::STEP<VALUE_CODES> * head_kv * p.v.head);
    k_scale = reinterpret_cast<const float*>(p.k_scale.data) + head_kv * p.k_scale.head;
    v_scale = reinterpret_cast<const float*>(p.v_scale.data) + head_kv * p.v_scale.head;
  }
  // Leaf n of the node.
  __device__ __forceinline__ Leaf leaf(int n, int tile_class = FULL) const {
    return Leaf{0, (node << LOG_CHILDREN) + n, LEAF, tile_class, 0, true};
  }
};

// The rows of a warp: first those of the first entry's task.
struct SharedRows {
  const Params& p;
  int first_entry, first_task, head, heads, i0;
  int own, rows;  // of one task, and all: none where there is no such tile

  __device__ __forceinline__ SharedRows(const Params& p, int head_kv, int tile) : p(p) {
    const Division by_block(tile, p.blocks);
    const Division by_part(by_block.quotient, head_blocks(p));
    const int part = static_cast<int>(by_part.remainder), most = heads_of_task(p);
    const int block = static_cast<int>(by_block.remainder), queries = queries_of_task(p);
    first_entry = static_cast<int>(by_part.quotient) * entries_of_warp(p);
    first_task = static_cast<int>(
        ((static_cast<long long>(first_entry) * p.heads_kv + head_kv) * head_blocks(p) + part) *
            p.blocks +
        block);
    head = head_kv * p.group + part * most;
    heads = tile::smaller(p.group - part * most, most);
    i0 = block * queries;
    own = heads * tile::smaller(p.len_q - i0, queries);
    rows = own * tile::smaller(matmul::larger(static_cast<int>(p.batch) - first_entry, 0),
                               entries_of_warp(p));
  }
  __device__ __forceinline__ int member(int row) const {
    return static_cast<int>(static_cast<unsigned int>(row) / own);
  }
  __device__ __forceinline__ int own_row(int row) const { return row - member(row) * own; }
  __device__ __forceinline__ layout::Entry entry_of(int row) const {
    const int b = first_entry + member(row);
    return layout::Entry{b, {0, 0, 0, b}, p.len_q, cache::length(p, b), 0, 0};
  }
  __device__ __forceinline__ long long head_of(int row) const {
    return head + static_cast<int>(static_cast<unsigned int>(own_row(row)) % heads);
  }
  __device__ __forceinline__ long long query_of(int row) const {
    return i0 + static_cast<unsigned int>(own_row(row)) / heads;
  }
  // Where a row of a node of level 1 is kept.
  __device__ __forceinline__ accum_t* place(const Workspace& workspace, int node, int row) const {
    const int tasks_of_entry = p.heads_kv * head_blocks(p) * static_cast<int>(p.blocks);
    const int task = first_task + member(row) * tasks_of_entry;
    return workspace.row(Workspace::shared(p, task, node), own_row(row));
  }
};

__device__ __forceinline__ Site site_of(const SharedRows& rows, int row, long long j) {
  const layout::Entry entry = rows.entry_of(row);
  return Site{entry.b,     rows.head_of(row), rows.query_of(row), j,
              entry.len_q, entry.len_k,       entry.start_q,      0};
}

// Row `row` of a warp's queries; the first one where there is none.
__device__ __forceinline__ const storage_t* query_row(const Params& p, const SharedRows& rows,
                                                      int row) {
  const int held = row < rows.rows ? row : 0;
  return reinterpret_cast<const storage_t*>(p.q.data) +
         layout::offset(p.q, rows.entry_of(held), rows.head_of(held), false) +
         rows.query_of(held) * p.q.row;
}

// The classes of a node's leaves, over all rows of a warp: bits of those that are FULL. The others
// may be EMPTY, too: their masked pairs change no bit. All lanes of a warp call it together.
__device__ __forceinline__ unsigned int full_leaves(const SharedRows& rows, int node) {
  if constexpr (!HAS_MASK) return ~0u;
  const int leaf = (node << LOG_CHILDREN) + ptx::lane_index() % CHILDREN;
  const int queries = rows.own / rows.heads;
  bool full = true;
#pragma unroll 1
  for (int n = 0; n < rows.rows / queries; ++n) {
    const int row = n / rows.heads * rows.own + n % rows.heads;
    const int found = tile::classify_tile(
        rows.p, tile::describe_tile(rows.entry_of(row), rows.head_of(row), rows.i0, queries,
                                    static_cast<long long>(leaf) << LOG_LEAF, LEAF));
    full = full && found == FULL;
  }
  return ptx::ballot(full);
}

}  // namespace decode
