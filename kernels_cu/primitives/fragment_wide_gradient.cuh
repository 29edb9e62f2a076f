// Adding a gradient that lies in fragments of wide elements to memory, to which other blocks add,
// too.
#pragma once
#include "../arch/add.cuh"
#include "fragment_gradient.cuh"
#include "fragment_wide_product.cuh"

namespace fragment_wide_gradient {

// Adds a warp's share of a result of WIDTH columns, times a factor. The first row at `to_gmem` is
// the warp's own; `valid` rows exist from there on. Four lanes have four neighbouring columns each:
// they exchange them, so that one instruction adds to neighbours.
template <int WIDTH, int SHARERS, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_rows(
    const accum_t (&result)[ROWS][COLUMNS],
    const fragment_wide_product::Share<WIDTH, SHARERS>& share, accum_t* to_gmem, const Operand& to,
    int valid, accum_t factor) {
  static_assert(STORED_VECTOR == 2, "four columns of a line for each lane");
  const int lane = arch::lane_index() % 4;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = 8 * r + fragment::lane_row();
    accum_t* const row_gmem = to_gmem + row * to.row;
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      if (!share.has(n / 4)) break;
      accum_t x[4] = {result[r][n], result[r][n + 1], result[r][n + 2], result[r][n + 3]};
      fragment_gradient::transpose(x, lane, 1);
      if (row >= valid) continue;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int column = fragment::LINE * (share.first + n / 4) + 4 * m + lane;
        if (WIDTH % fragment::LINE == 0 || column < WIDTH) {
          arch::add(row_gmem + column * to.col, x[m] * factor);
        }
      }
    }
  }
}

}  // namespace fragment_wide_gradient
