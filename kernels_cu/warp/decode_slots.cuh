// What a warp of decode_sm80.cu knows of nodes: states in its registers, and in slots of the
// workspace. Part of the twin of reference/cpu/decode_nodes.py.
#pragma once
#include "../decode/cursor.cuh"
#include "fragment.cuh"
#include "fragment_codes.cuh"

namespace decode_slots {

using fragment_codes::ResultColumns;
constexpr accum_t VALUE_UNIT = fragment_codes::UNIT<VALUE_CODES, fragment_codes::Bfloats>;
constexpr int ROWS = 2;  // of a thread
constexpr int COLUMNS_V = ResultColumns::elements(D_V);

// A warp's rows: their statistics, and their part of o.
struct State {
  merge::Statistics row[ROWS];
  accum_t o[ROWS][COLUMNS_V];
};

// Elements n and n + 1 of a thread's row of o, n even, are at columns ResultColumns::column(n) and
// on.
struct alignas(8) Pair {
  accum_t x, y;
};

// Whether a slot has the columns of elements n and n + 1.
__device__ __forceinline__ bool has_room(int n) {
  return 4 * COLUMNS_V <= decode::COLUMNS || ResultColumns::column(n) < decode::COLUMNS;
}

// Stores a state in the rows that `place(row)` finds, null where there is none.
template <class Place>
__device__ __forceinline__ void store_rows(const Place& place, const State& state) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    accum_t* const to = place(fragment::lane_row() + 8 * r);
    if (to == nullptr) continue;
    accum_t* const sums = to + decode::STATISTICS;
#pragma unroll
    for (int n = 0; n < COLUMNS_V; n += 2) {
      if (!has_room(n)) continue;
      *reinterpret_cast<Pair*>(sums + ResultColumns::column(n)) =
          Pair{state.o[r][n], state.o[r][n + 1]};
    }
    if (ptx::lane_index() % 4 == 0) decode::statistics_of(to) = state.row[r];
  }
}

// Stores a state in a slot.
__device__ __forceinline__ void store_slot(const decode::Workspace& workspace, long long slot,
                                           const State& state, int rows) {
  store_rows([&](int row) { return row < rows ? workspace.row(slot, row) : nullptr; }, state);
}

__device__ __forceinline__ void load_slot(const decode::Workspace& workspace, long long slot,
                                          State& state, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = fragment::lane_row() + 8 * r;
    if (row >= rows) continue;
    accum_t* const from = workspace.row(slot, row);
    state.row[r] = decode::statistics_of(from);
    const accum_t* const sums = from + decode::STATISTICS;
#pragma unroll
    for (int n = 0; n < COLUMNS_V; n += 2) {
      if (!has_room(n)) continue;
      const Pair pair = *reinterpret_cast<const Pair*>(sums + ResultColumns::column(n));
      state.o[r][n] = pair.x;
      state.o[r][n + 1] = pair.y;
    }
  }
  __syncwarp();  // the slot, read by all lanes before it is written again
}

// Merges a leaf into `own`, with a thread's second row if that `has_second`. The leaf's o is in
// units of VALUE_UNIT. Where one of the two has no keys its o is 0, and needs no selection.
__device__ __forceinline__ void merge_leaf(State& own, const State& other, accum_t c,
                                           bool has_second) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r == 1 && !has_second) break;
    merge::Factors factors = merge::statistics(own.row[r], other.row[r], c);
    if (factors.replaces) factors.own = 0;  // instead of NaN, if c is 0
    if (factors.keeps) factors.other = 0;
    factors.other *= VALUE_UNIT;
#pragma unroll
    for (int n = 0; n < COLUMNS_V; ++n) own.o[r][n] = factors.sum(own.o[r][n], other.o[r][n]);
  }
}

// Merges a state into the rows that `place(row)` finds, null where there is none: some columns
// after the others, because two states would need more registers than there are.
template <class Place>
__device__ __forceinline__ void merge_into_rows(const Place& place, const State& state, accum_t c) {
  constexpr int AT_ONCE = COLUMNS_V < 16 ? COLUMNS_V : 16;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    accum_t* const held = place(fragment::lane_row() + 8 * r);
    const bool exists = held != nullptr;
    merge::Statistics own = merge::no_keys();
    if (exists) own = decode::statistics_of(held);
    const merge::Factors factors = merge::statistics(own, state.row[r], c);
    __syncwarp();  // the statistics, read by all lanes of their row
    if (!exists) continue;
    if (ptx::lane_index() % 4 == 0) decode::statistics_of(held) = own;
    accum_t* const sums = held + decode::STATISTICS;
#pragma unroll
    for (int first = 0; first < COLUMNS_V; first += AT_ONCE) {
      Pair pairs[AT_ONCE / 2];  // all loaded before the first is stored
#pragma unroll
      for (int n = 0; n < AT_ONCE / 2; ++n) {
        if (!has_room(first + 2 * n)) continue;
        pairs[n] = *reinterpret_cast<Pair*>(sums + ResultColumns::column(first + 2 * n));
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE / 2; ++n) {
        const int at = first + 2 * n;
        if (!has_room(at)) continue;
        pairs[n].x = factors.apply(pairs[n].x, state.o[r][at]);
        pairs[n].y = factors.apply(pairs[n].y, state.o[r][at + 1]);
        *reinterpret_cast<Pair*>(sums + ResultColumns::column(at)) = pairs[n];
      }
    }
  }
  __syncwarp();  // the slot, written by all lanes
}

// Merges a state into a slot.
__device__ __forceinline__ void merge_into_slot(const decode::Workspace& workspace, long long slot,
                                                const State& state, int rows, accum_t c) {
  merge_into_rows([&](int row) { return row < rows ? workspace.row(slot, row) : nullptr; }, state,
                  c);
}

// Of the o of a leaf, in units of VALUE_UNIT, numbers.
__device__ __forceinline__ void apply_unit(State& leaf) {
  if constexpr (VALUE_UNIT == 1) return;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS_V; ++n) leaf.o[r][n] *= VALUE_UNIT;
  }
}

__device__ __forceinline__ void clear(State& state) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) state.row[r] = merge::no_keys();
  matmul::clear(state.o);
}

// Where a warp's nodes that are not in registers are: in slots, those of level n, from 1 on, until
// they are whole, and that of the unit.
struct Nodes {
  const Params& p;
  const decode::Workspace& workspace;
  int unit_level;
  unsigned int fresh;     // bit n: nothing is in the node of level n
  decode::Leaves leaves;  // instead of all slots (WHOLE)

  // Merges a whole node, of the leaves up to `now`, into that of `level`, and that one, if it is
  // whole, into the next. Of `state` nothing remains.
  __device__ __forceinline__ void add(State& state, int level, const decode::Leaf& now,
                                      const decode::Leaf& next, int rows, accum_t c) {
    if constexpr (WHOLE) {
      __syncwarp();  // what was here, read by all lanes
      const auto place = [&](int row) { return row < rows ? leaves.row(now.unit, row) : nullptr; };
      store_rows(place, state);
      return;
    }
    bool whole = true;
#pragma unroll 1
    while (whole) {
      const bool is_unit = level >= unit_level;
      const long long slot = is_unit ? now.unit : workspace.held(p, level);
      if ((fresh >> level & 1) != 0) {
        store_slot(workspace, slot, state, rows);
        fresh &= ~(1u << level);
      } else {
        merge_into_slot(workspace, slot, state, rows, c);
      }
      whole = !is_unit && !now.shares_node(next, level);
      if (whole) {
        load_slot(workspace, slot, state, rows);
        fresh |= 1u << level;
      }
      ++level;
    }
    if (!next.exists || next.unit != now.unit) fresh = ~0u;
  }
};

}  // namespace decode_slots
