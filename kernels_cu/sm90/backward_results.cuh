// The stores of dk and dv, which the consumers of backward_sm90_dkdv.cu have in registers:
// warpgroup_dq.cuh has those of dq.
#pragma once
#include "../warp/fragment_product.cuh"
#include "backward_storage.cuh"
#include "warpgroup_gradient.cuh"
#include "warpgroup_rows.cuh"

namespace backward_results {

using backward_storage::CONSUMER_THREADS;
using backward_storage::consumers_sync;
using backward_storage::SHARE_KEYS;
using warpgroup_gradient::ColumnShare;

// The block's rows of dk or dv, WIDTH columns wide, from key `j0` on; `valid` of them exist. If the
// array has the storage type, they go through shared memory; otherwise threads write them to global
// memory as float32.
template <int WIDTH>
struct ResultRows {
  const Operand& to;
  bool wide;
  long long offset;
  int valid;
  char* smem;

  __device__ __forceinline__ ResultRows(const Params& p, const Operand& to, int kind,
                                        const layout::Entry& entry, int h_kv, long long j0,
                                        int valid, char* smem)
      : to(to),
        wide(kind != number::STORAGE_KIND),
        offset(layout::offset(to, entry, h_kv, true) + j0 * to.row + from_parts(p, to)),
        valid(valid),
        smem(smem) {}

  // Elements between the start of all parts and the block's.
  static __device__ __forceinline__ long long from_parts(const Params& p, const Operand& to) {
    if constexpr (!HAS_PARTS) return 0;
    const unsigned int number = layout::interleave_heads(p, blockIdx.x);
    return layout::part_offset(p, to, layout::part_of_keys(p, number));
  }

  // Writes a thread's part, times a factor. `key` is the block's row of its first one.
  template <int COLUMNS>
  __device__ __forceinline__ void put(const float (&result)[2][COLUMNS], int key,
                                      const ColumnShare<WIDTH>& share, float factor) const {
    float* const data = reinterpret_cast<float*>(to.data) + offset;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = key + 8 * r;
#pragma unroll
      for (int n = 0; n < COLUMNS; n += 2) {
        const int column = share.first + 8 * (n / 2) + fragment::lane_column();
        const float low = result[r][n] * factor, high = result[r][n + 1] * factor;
        if (column < share.begin) continue;
        if (!wide) {
          const int piece = fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(row, column / 8);
          *reinterpret_cast<unsigned int*>(smem + piece + 2 * fragment::lane_column()) =
              number::narrow_pair(low, high);
          continue;
        }
        if (row < valid && column < WIDTH) data[row * to.row + column * to.col] = low;
        if (row < valid && column + 1 < WIDTH) data[row * to.row + (column + 1) * to.col] = high;
      }
    }
  }

  // Copies to global memory what all threads have put into shared memory.
  __device__ __forceinline__ void copy_out() const {
    if (!wide) {
      fragment::copy_out<WIDTH>(to, offset, BLOCK_KV, valid, threadIdx.x, CONSUMER_THREADS, smem);
    }
  }
};

// Issues TMA stores of the warp's 16 rows of dk or dv, WIDTH columns wide, times a factor. The warp
// stages them in its rows of a tile of 64 in shared memory. `first` is the tile's first key.
template <int WIDTH, int COLUMNS>
__device__ __forceinline__ void tma_store_rows(const float (&result)[2][COLUMNS],
                                               const ColumnShare<WIDTH>& share, float factor,
                                               unsigned int tile_address, const ptx::TensorMap& to,
                                               const warpgroup::TmaHead& head, long long first) {
  constexpr int SLAB_BYTES = warpgroup::WARPGROUP_ROWS * warpgroup::SLAB_ROW_BYTES;
  const int warp = ptx::shuffle(threadIdx.x / ptx::WARP_SIZE % 4, 0);
  const int row = warp * fragment::WARP_ROWS;
  const float factors[2] = {factor, factor};
  unsigned int words[2][COLUMNS / 2];
  warpgroup_rows::narrow_rows(result, factors, words);
  warpgroup_rows::tma_store_rows<WIDTH, SLAB_BYTES>(
      words, tile_address + share.slab * SLAB_BYTES + row * warpgroup::SLAB_ROW_BYTES, to, head,
      static_cast<int>(first) + row, share.first, share.begin);
}

// Stores the block's dk, times the scale, and dv, times `keep_scale`. `key_tile` is the consumer's
// tile of 64 keys, and `first_row` the block's row of a thread's first one. All consumer threads
// call it together.
template <int COLUMNS, int V_COLUMNS>
__device__ __forceinline__ void store_gradients(
    const Params& p, const backward_storage::SharedMemory& smem, const ptx::TensorMap& dk_map,
    const ptx::TensorMap& dv_map, const float (&dk)[2][COLUMNS], const float (&dv)[2][V_COLUMNS],
    const ColumnShare<D>& k_share, const ColumnShare<D_V>& v_share, int key_tile, int first_row,
    float keep_scale) {
  backward_storage::SharedStorage& shared = *smem.storage;
  const layout::Entry& entry = shared.entry;
  const int h_kv = shared.h_kv, nj = shared.nj;
  const long long j0 = shared.j0;
  if constexpr (TMA_STORE) {
    // A warp stages its rows of dv in place of its own values, which no other warp reads, and then
    // those of dk in place of its keys; or where consumers share keys, both after all reads.
    const long long first = j0 + key_tile * warpgroup::WARPGROUP_ROWS;
    if constexpr (SHARE_KEYS) consumers_sync();  // the keys and values, read for the last time
    tma_store_rows<D_V>(dv, v_share, keep_scale, smem.v.address(key_tile), dv_map,
                        warpgroup::TmaHead(p.dv, entry, h_kv), first);
    if constexpr (!SHARE_KEYS) consumers_sync();  // the keys, read for dq for the last time
    tma_store_rows<D>(dk, k_share, static_cast<float>(p.scale), smem.k.address(key_tile), dk_map,
                      warpgroup::TmaHead(p.dk, entry, h_kv), first);
    if (ptx::lane_index() == 0) ptx::tma_store_wait_read();
  } else {
    const ResultRows<D> dk_rows(p, p.dk, p.kind_dk, entry, h_kv, j0, nj, smem.k.begin);
    const ResultRows<D_V> dv_rows(p, p.dv, p.kind_dv, entry, h_kv, j0, nj, smem.v.begin);
    consumers_sync();  // the keys and values, whose place the results take
    dk_rows.put(dk, first_row, k_share, static_cast<float>(p.scale));
    dv_rows.put(dv, first_row, v_share, keep_scale);
    consumers_sync();  // the results, which other threads wrote
    dk_rows.copy_out();
    dv_rows.copy_out();
  }
}

}  // namespace backward_results
