// Rows of keys and values between global and shared memory, where a cache may have them in pages:
// the twin of reference/cpu/cache.py for kernels whose blocks share a tile.
#pragma once
#include "../common/cache.cuh"
#include "fragment_rows.cuh"

namespace fragment {

// `begin_rows` of keys or values. Of a cache in pages `from` has row 0 of page 0, and pages are
// `page_step` elements apart.
template <int ROWS, int WIDTH, int ROW_BYTES>
__device__ __forceinline__ void begin_keys(char* tile_smem, const Params& p, long long b,
                                           const memory::Rows& from, long long page_step,
                                           long long first, int valid) {
  if constexpr (!PAGED) {
    begin_rows<ROWS, WIDTH, ROW_BYTES>(tile_smem, from, first, valid);
    return;
  }
  using Share = Pieces<ROWS, WIDTH>;
  const Share share;
  const int left = WIDTH - STORED_VECTOR * share.piece;
  const int columns = left < STORED_VECTOR ? left : STORED_VECTOR;
  const storage_t* const column = from.data + STORED_VECTOR * share.piece * from.col;
  // Rows that are not held are not looked up: their part of the table may hold anything.
  const auto source_of = [&](int row) {
    return row < valid ? column + cache::place(p, b, first + row).offset(page_step, from.row)
                       : column;
  };
  if (from.vectors && page_step % STORED_VECTOR == 0) {
    const unsigned int tile_address = ptx::shared_address(tile_smem);
    const int bytes = columns < 0 ? 0 : static_cast<int>(sizeof(storage_t)) * columns;
#pragma unroll
    for (int step = 0; step < Share::STEPS; ++step) {
      const int row = share.row + step * Share::AT_ONCE;
      if (share.has(step)) {
        ptx::cp_async_partial(tile_address + swizzled_offset<ROW_BYTES>(row, share.piece),
                              source_of(row), row < valid ? bytes : 0);
      }
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < Share::STEPS; ++step) {
    const int row = share.row + step * Share::AT_ONCE;
    if (!share.has(step)) continue;
    auto* const piece =
        reinterpret_cast<storage_t*>(tile_smem + swizzled_offset<ROW_BYTES>(row, share.piece));
    const storage_t* const source = source_of(row);
#pragma unroll 1
    for (int x = 0; x < STORED_VECTOR; ++x) {
      piece[x] = row < valid && x < columns ? source[x * from.col] : storage_t(0);
    }
  }
}

}  // namespace fragment
