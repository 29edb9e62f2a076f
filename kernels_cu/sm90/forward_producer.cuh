// The role of the thread of forward_sm90.cu that issues TMA loads.
#pragma once
#include "forward_storage.cuh"

namespace forward_producer {

using namespace forward_storage;

// The rows of a tile of keys and values that a lane loads of a cache in pages.
struct PagePiece {
  int tile_row;
  cache::Place at;

  __device__ __forceinline__ PagePiece(const Params& p, const ScheduledTile& work, int tile) {
    if constexpr (PAGED) {
      tile_row = ptx::lane_index() * p.tma_rows;
      const long long position = static_cast<long long>(tile) * BLOCK_KV + tile_row;
      // Rows that do not exist are not looked up; TMA reads them after the last page, as 0.
      at = tile_row < BLOCK_KV && position < work.entry.len_k
               ? cache::place(p, work.entry.b, position)
               : cache::Place{static_cast<int>(p.pages), 0};
    }
  }
};

// Issues the TMA loads of a tile of keys or values, ROWS rows of WIDTH columns from row `first` and
// column `column` on.
// Of a cache in pages, `piece` is the lane's place of tma_rows rows, of which the tile has as many
// as it has room for.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_keys(unsigned int to, const ptx::TensorMap& map,
                                          const warpgroup::TmaHead& head, int first,
                                          const PagePiece& piece, unsigned int barrier,
                                          int column = 0) {
  if constexpr (PAGED) {
    if (piece.tile_row < ROWS) {
      warpgroup::TmaHead page = head;
      page.slow = piece.at.page;
      warpgroup::tma_load_tile<ROWS, WIDTH>(to + piece.tile_row * warpgroup::SLAB_ROW_BYTES, map,
                                            page, piece.at.row, barrier, column);
    }
  } else {
    warpgroup::tma_load_tile<ROWS, WIDTH>(to, map, head, first, barrier, column);
  }
}

// One thread, or of a cache in pages one warp: issues the TMA loads of every work tile.
__device__ __forceinline__ void producer(const Params& p, const SharedMemory& smem,
                                         const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                         const ptx::TensorMap& v_map,
                                         const warpgroup::LastMaps& maps) {
  SharedStorage& shared = *smem.storage;
  const bool leads = !PAGED || ptx::lane_index() == 0;
  // One lane expects the bytes that all lanes load, perhaps after the first of them came.
  const auto expect = [&](unsigned int barrier, int bytes) {
    if (leads) ptx::mbarrier_arrive_expect_tx(barrier, bytes);
  };
  int n = 0, q_uses = 0;
#pragma unroll 1
  for (int w = 0; shared.has_work(w); ++w) {
    shared.work_pipeline.wait_full(w);
    const ScheduledTile& work = shared.work_tile(w);
    const int last = work.last_tile();
#pragma unroll 1
    for (int tile = last; tile >= 0; tile = work.tile_before(tile)) {
      const int first_row = work.first_row_k + tile * BLOCK_KV;
      const PagePiece piece(p, work, tile);
      shared.k_pipeline.wait_empty(n);
      expect(shared.k_pipeline.full_barrier(n), KTiles::BYTES);
      load_keys<BLOCK_KV, D>(smem.k.address(KvPipeline::stage_of(n)), k_map, work.k, first_row,
                             piece, shared.k_pipeline.full_barrier(n));
      if (tile == last && leads) {
        // 1 load q
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; ++c) {
          const int q_slot = first_q_slot(q_uses) + c;
          warpgroup::mbarrier_wait(shared.q_empty_barrier(q_slot), q_phase_of(q_uses) ^ 1);
          ptx::mbarrier_arrive_expect_tx(shared.q_full_barrier(q_slot), QTiles::BYTES);
          warpgroup::tma_load_tile<warpgroup::WARPGROUP_ROWS, D>(
              smem.q.address(q_slot), q_map, work.q,
              work.first_row_q + c * warpgroup::WARPGROUP_ROWS, shared.q_full_barrier(q_slot));
        }
        ++q_uses;
      }
      if constexpr (HAS_BIAS_TILES) {
        bias_tiles::load(p, smem.bias, *smem.bias_pipeline, maps.bias(),
                         warpgroup::TmaHead(p.bias, work.entry, work.head), n,
                         static_cast<int>(work.first), tile * BLOCK_KV);
      }
      shared.v_pipeline.wait_empty(n);
      expect(shared.v_pipeline.full_barrier(n), VTiles::BYTES);
      load_keys<BLOCK_KV, V_COLUMNS>(smem.v.address(KvPipeline::stage_of(n)), v_map, work.v,
                                     first_row, piece, shared.v_pipeline.full_barrier(n),
                                     work.first_column());
      ++n;
    }
    if constexpr (PAGED) __syncwarp();  // the work tile, read by all lanes
    if (leads) ptx::mbarrier_arrive(shared.work_pipeline.empty_barrier(w));
  }
}

}  // namespace forward_producer
