// Rotates rows by their positions, or back: the twin of reference/cpu/rope.py. A warp rotates a
// row.
//
// Grid: the rows of all entries and heads, THREADS / 32 to a block. Shared memory: none.
#include "../common/params.cuh"
#include "../common/cache.cuh"
#include "../common/rotary.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ RopeParams p) {
  constexpr int WARPS = THREADS / ptx::WARP_SIZE;
  const long long index = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / ptx::WARP_SIZE;
  // Neighbouring warps have heads of one row, whose angles are the same.
  const layout::Quotient by_row = layout::divide(index, p.heads);
  const layout::Quotient by_entry = layout::divide(by_row.quotient, p.rows);
  const long long head = by_row.remainder, row = by_entry.remainder, b = by_entry.quotient;
  if (b >= p.batch) return;
  const long long position =
      cache::integer(p.positions.data, p.kind_positions,
                     b * p.positions.lead[MAX_LEAD - 1] + row * p.positions.row);
  rotary::copy_row(rotary::row_of(p.out, b, head, row), rotary::row_of(p.x, b, head, row),
                   p.columns, rotary::angles(p, position, p.inverse != 0));
}
