// Writes new keys and values to a cache, and rotates keys and queries by their positions: the twin
// of reference/cpu/append.py. Rows of a cache of codes are quantised.
//
// `lengths` counts what the cache holds afterwards, so an entry's last new row is its last
// position. A row for which the cache has no room, or no such page, is not written. A warp moves a
// row.
//
// Grid: the rows of k, v and q of all entries and heads, THREADS / 32 to a block. Shared memory:
// none.
#include "../common/params.cuh"
#include "../common/cache.cuh"
#include "../common/code_row.cuh"
#include "../common/rotary.cuh"
#include "../ptx/grid.cuh"

namespace {

// The packed entry to which a row belongs: the last one that begins at or before it. All lanes of
// the warp call it, and look at as many offsets at a time.
__device__ __forceinline__ long long entry_of(const AppendParams& p, long long row) {
  long long low = 0, count = p.batch;
  while (count > 1) {
    const long long step = (count + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE;
    const long long own = ptx::lane_index() * step;
    const unsigned int begun = ptx::ballot(own < count && p.offsets[low + own] <= row);
    const int last = begun == 0 ? 0 : 31 - __clz(static_cast<int>(begun));
    low += last * step;
    count = count - last * step < step ? count - last * step : step;
  }
  return low;
}

// Codes need many registers. Blocks that share an SM by three have enough, and spill nothing.
constexpr int LEAST_BLOCKS = cache::HAS_CODES ? 3 : 0;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
    KERNEL_NAME(const __grid_constant__ AppendParams p) {
  constexpr int WARPS = THREADS / ptx::WARP_SIZE;
  ptx::wait_for_grids();
  ptx::launch_dependents();
  const long long index = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / ptx::WARP_SIZE;
  // Neighbouring warps have heads of one row, which look up the same.
  const layout::Quotient by_row = layout::divide(index, 2 * p.heads_kv + p.heads);
  const layout::Quotient by_entry = layout::divide(by_row.quotient, p.rows);
  if (by_entry.quotient >= (p.offsets == nullptr ? p.batch : 1)) return;
  const long long row = by_entry.remainder;
  long long b = by_entry.quotient, behind = p.rows - row;
  if (p.offsets != nullptr) {
    b = entry_of(p, row);
    behind = layout::clamp(p.offsets[b + 1], 0, p.rows) - row;
    if (p.offsets[b] > row || behind <= 0) return;
  }
  const long long position = cache::written_length(p, b) - behind;

  long long head = by_row.remainder;
  const bool of_q = head >= 2 * p.heads_kv, of_v = head >= p.heads_kv && !of_q;
  rotary::Angles by = rotary::none();
  if (p.pairs > 0 && !of_v) {
    const long long at = b * p.positions.lead[MAX_LEAD - 1] + row * p.positions.row;
    by = rotary::angles(p,
                        p.positions.data == nullptr
                            ? position
                            : cache::integer(p.positions.data, p.kind_positions, at),
                        false);
  }
  rotary::Row from, to;
  code::Target codes{};
  if (of_q) {
    head -= 2 * p.heads_kv;
    from = rotary::row_of(p.q, b, head, row);
    to = rotary::row_of(p.out, b, head, row);
  } else {
    const cache::Place place = cache::written_place(p, b, position);
    if (place.page < 0) return;
    if (of_v) {
      head -= p.heads_kv;
      from = rotary::row_of(p.v_new, b, head, row);
      to = rotary::row_of(p.v, place.page, head, place.row);
      codes = code::target(p.v, p.v_scale, place, head);
    } else {
      from = rotary::row_of(p.k_new, b, head, row);
      to = rotary::row_of(p.k, place.page, head, place.row);
      codes = code::target(p.k, p.k_scale, place, head);
    }
    if (VALUE_CODES != KEY_CODES && of_v) {
      if (code::put<VALUE_CODES>(codes, from, p.columns_v, by)) return;
    } else if (code::put<KEY_CODES>(codes, from, of_v ? p.columns_v : p.columns, by)) {
      return;
    }
  }
  rotary::copy_row(to, from, of_v ? p.columns_v : p.columns, by);
}
