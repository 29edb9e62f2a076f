// The role of the thread of forward_sm90_tangent.cu that issues TMA loads, of tangents, too, as in
// forward_producer.cuh.
#pragma once
#include "tangent_storage.cuh"

namespace tangent_producer {

using namespace tangent_storage;

// The tensor maps of q, k, v and of their tangents; those of tangents that a call does not have are
// not used.
struct Maps {
  const ptx::TensorMap &q, &k, &v, &tq, &tk, &tv;
};

// One thread: issues the TMA loads of every work tile.
__device__ __forceinline__ void producer(const SharedMemory& smem, const Maps& maps) {
  SharedStorage& shared = *smem.storage;
  int n = 0, q_uses = 0;
#pragma unroll 1
  for (int w = 0; shared.has_work(w); ++w) {
    shared.work_pipeline.wait_full(w);
    const ScheduledTile& work = shared.work_tile(w);
    const TangentHeads& heads = shared.heads_of(w);
    const int last = work.last_tile();
#pragma unroll 1
    for (int tile = last; tile >= 0; ++n, tile = work.tile_before(tile)) {
      const int first_row = work.first_row_k + tile * BLOCK_KV, stage = KvPipeline::stage_of(n);
      const unsigned int k_full = shared.k_pipeline.full_barrier(n);
      shared.k_pipeline.wait_empty(n);
      ptx::mbarrier_arrive_expect_tx(k_full, K_ARRIVING);
      warpgroup::tma_load_tile<BLOCK_KV, D>(smem.k.address(2 * stage), maps.k, work.k, first_row,
                                            k_full);
      if constexpr (HAS_TK) {
        warpgroup::tma_load_tile<BLOCK_KV, D>(smem.k.address(2 * stage + 1), maps.tk, heads.k,
                                              first_row, k_full);
      }
      if (tile == last) {
        // 1 load q
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; ++c) {
          const int first_query = work.first_row_q + c * warpgroup::WARPGROUP_ROWS;
          const unsigned int q_full = shared.q_full_barrier(c);
          warpgroup::mbarrier_wait(shared.q_empty_barrier(c), q_uses % 2 ^ 1);
          ptx::mbarrier_arrive_expect_tx(q_full, Q_ARRIVING);
          warpgroup::tma_load_tile<warpgroup::WARPGROUP_ROWS, D>(smem.q.address(2 * c), maps.q,
                                                                 work.q, first_query, q_full);
          if constexpr (HAS_TQ) {
            warpgroup::tma_load_tile<warpgroup::WARPGROUP_ROWS, D>(
                smem.q.address(2 * c + 1), maps.tq, heads.q, first_query, q_full);
          }
        }
        ++q_uses;
      }
      const unsigned int v_full = shared.v_pipeline.full_barrier(n);
      shared.v_pipeline.wait_empty(n);
      ptx::mbarrier_arrive_expect_tx(v_full, V_ARRIVING);
      warpgroup::tma_load_tile<BLOCK_KV, D_V>(smem.v.address(2 * stage), maps.v, work.v, first_row,
                                              v_full);
      if constexpr (HAS_TV) {
        warpgroup::tma_load_tile<BLOCK_KV, D_V>(smem.v.address(2 * stage + 1), maps.tv, heads.v,
                                                first_row, v_full);
      }
    }
    ptx::mbarrier_arrive(shared.work_pipeline.empty_barrier(w));
  }
}

}  // namespace tangent_producer
