// The roles of the producer warpgroup of backward_sm90_dkdv.cu: one thread issues the TMA loads of
// k, v, q and do, and the statistics warp brings lse and delta.
#pragma once
#include "backward_storage.cuh"

namespace backward_producer {

using backward_storage::first_query;
using backward_storage::index_of;
using backward_storage::Pipeline;
using backward_storage::SharedMemory;
using backward_storage::SharedStorage;
using backward_storage::Span;
using backward_storage::TileRef;

// Visits every tile of queries that is not EMPTY, with its number: the use of the pipelines.
template <class Visit>
__device__ __forceinline__ void for_each_tile(SharedStorage& shared, const Visit& visit) {
  unsigned int tile_number = 0;
#pragma unroll 1
  for (unsigned int n = 0; n < shared.spans; ++n) {
    shared.span_pipeline.wait_full(n);
    const Span& span = shared.span[Pipeline::stage_of(n)];
#pragma unroll 1
    for (TileRef tile = span.next_tile(span.first); tile != TileRef::NONE;
         tile = span.next_tile(index_of(tile) + 1), ++tile_number) {
      visit(span, tile, tile_number);
    }
    ptx::mbarrier_arrive(shared.span_pipeline.empty_barrier(n));
  }
}

// -- TMA loads ------------------------------------------------------------------------------------

// Issues the TMA loads of the block's keys or values from row `first` on, in tiles of 64.
template <int WIDTH>
__device__ __forceinline__ void tma_load_keys(unsigned int to, const ptx::TensorMap& map,
                                              const warpgroup::TmaHead& head, long long first,
                                              unsigned int barrier) {
  constexpr int ROWS = warpgroup::WARPGROUP_ROWS;
#pragma unroll
  for (int n = 0; n < BLOCK_KV; n += ROWS) {
    warpgroup::tma_load_tile<ROWS, WIDTH>(to + n * fragment::row_bytes(WIDTH), map, head, first + n,
                                          barrier);
  }
}

// One thread: loads the block's keys and values. It initialises their barrier itself, so that it
// need not wait for what other threads write first.
__device__ __forceinline__ void load_keys_and_values(const Params& p, const layout::WorkTile& work,
                                                     const SharedMemory& smem,
                                                     const ptx::TensorMap& k_map,
                                                     const ptx::TensorMap& v_map) {
  using namespace backward_storage;
  const unsigned int kv_full = smem.storage->kv_full_barrier();
  ptx::mbarrier_init(kv_full, 1);
  ptx::fence_mbarrier_init();
  ptx::mbarrier_arrive_expect_tx(kv_full, KEY_TILES * (KTiles::BYTES + VTiles::BYTES));
  const warpgroup::TmaHead k(p.k, work.entry, work.head), v(p.v, work.entry, work.head);
  const long long first = work.entry.start_k + work.block * BLOCK_KV;
  tma_load_keys<D>(smem.k.address(0), k_map, k, first, kv_full);
  tma_load_keys<D_V>(smem.v.address(0), v_map, v, first, kv_full);
}

// One thread: issues the TMA loads of q and do of every tile, and of the bias beside q.
__device__ __forceinline__ void producer(const Params& p, const SharedMemory& smem,
                                         const ptx::TensorMap& q_map, const ptx::TensorMap& do_map,
                                         const ptx::TensorMap& bias_map) {
  using namespace backward_storage;
  SharedStorage& shared = *smem.storage;
  for_each_tile(shared, [&](const Span& span, TileRef tile, unsigned int n) {
    const long long first = span.entry.start_q + first_query(tile);
    const int stage = Pipeline::stage_of(n);
    shared.q_pipeline.wait_empty(n);
    const int bias_bytes = HAS_BIAS_TILES ? bias_tiles::bytes(p) : 0;
    ptx::mbarrier_arrive_expect_tx(shared.q_pipeline.full_barrier(n), QTiles::BYTES + bias_bytes);
    warpgroup::tma_load_tile<BLOCK_Q, D>(smem.q.address(stage), q_map, span.q, first,
                                         shared.q_pipeline.full_barrier(n));
    if constexpr (HAS_BIAS_TILES) {
      bias_tiles::issue(p, smem.bias, bias_map, warpgroup::TmaHead(p.bias, span.entry, span.h),
                        stage, static_cast<int>(first), static_cast<int>(shared.j0),
                        shared.q_pipeline.full_barrier(n));
    }
    ptx::mbarrier_arrive_expect_tx(shared.do_full_barrier(n), DoTiles::BYTES);
    warpgroup::tma_load_tile<BLOCK_Q, D_V>(smem.d_out.address(stage), do_map, span.d_out, first,
                                           shared.do_full_barrier(n));
  });
}

// -- lse and delta --------------------------------------------------------------------------------

// Whether the score mod and the exponential are computed pair by pair: where the derivative of the
// score mod is needed, too, or generated code is long.
constexpr bool FUSE_SCORE_EXP = HAS_SCORE && (HAS_DSCORE || fragment_tile::IS_LONG_SCORE_MOD);

// Whether finite lse and delta of a query prove that its q and do are finite. They do not with a
// score mod. Beside a sink, which makes lse finite and for which backward_delta skips zeros, every
// masked tile is checked.
constexpr bool STATISTICS_PROVE_FINITE = HAS_MASK && !CHANGES_SCORES;

// lse and delta of a tile's queries on the way to shared memory, in the registers of a warp. Empty
// and missing rows get lse = inf, which makes p = 0. Unless FUSE_SCORE_EXP, lse is multiplied by
// log2 e once here.
struct TileStatistics {
  static constexpr int EACH = BLOCK_Q / ptx::WARP_SIZE;
  float lse[EACH], delta[EACH];

  __device__ __forceinline__ void load(const Span& span, TileRef tile) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const long long i = first_query(tile) + n * ptx::WARP_SIZE + ptx::lane_index();
      lse[n] = number::infinity();
      delta[n] = 0;
      if (i < span.entry.len_q) {
        lse[n] = span.lse.data[i * span.lse.row];
        delta[n] = span.delta.data[i * span.delta.row];
      }
    }
  }
  __device__ __forceinline__ void store(float* lse_smem, float* delta_smem) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = n * ptx::WARP_SIZE + ptx::lane_index();
      const float row_lse = lse[n] == -number::infinity() ? number::infinity() : lse[n];
      lse_smem[i] = FUSE_SCORE_EXP ? row_lse : row_lse * number::LOG2_E<float>;
      delta_smem[i] = delta[n];
    }
  }
  // Whether they prove that the tile's q and do are finite. An lse of inf proves nothing against
  // it: missing rows have it, and where q or do is the cause, delta is not finite either.
  __device__ __forceinline__ bool are_finite() const {
    bool has_nonfinite = false;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      has_nonfinite =
          has_nonfinite || !(lse[n] > -number::infinity()) || !number::is_finite(delta[n]);
    }
    return !ptx::any_lane(has_nonfinite);
  }
};

// One warp: brings lse and delta of every tile. They may have any strides, which TMA could not
// load. It also publishes which tiles need a check for non-finite values.
__device__ __forceinline__ void statistics_warp(const SharedMemory& smem) {
  SharedStorage& shared = *smem.storage;
  TileStatistics statistics;
  for_each_tile(shared, [&](const Span& span, TileRef tile, unsigned int n) {
    statistics.load(span, tile);
    shared.q_pipeline.wait_empty(n);
    const int stage = Pipeline::stage_of(n);
    statistics.store(shared.lse[stage], shared.delta[stage]);
    if constexpr (STATISTICS_PROVE_FINITE) {
      const bool needs_check = shared.has_sink || !statistics.are_finite();
      if (ptx::lane_index() == 0) shared.needs_finite_check[stage] = needs_check ? 1 : 0;
    }
    ptx::mbarrier_arrive(shared.q_pipeline.full_barrier(n));
  });
}

// The warps of the producer: each has its role, or none. `begin()` waits for the grids that wrote
// lse and delta.
template <class Begin>
__device__ __forceinline__ void produce(const Params& p, const SharedMemory& smem,
                                        const ptx::TensorMap& q_map, const ptx::TensorMap& do_map,
                                        const ptx::TensorMap& bias_map, const Begin& begin) {
  const int warp = threadIdx.x / ptx::WARP_SIZE % 4;
  if (warp == 0 && ptx::lane_index() == 0) producer(p, smem, q_map, do_map, bias_map);
  if (warp == 1) {
    begin();
    statistics_warp(smem);
  }
}

}  // namespace backward_producer
