// The shared memory of a block of forward_sm90.cu, and the constants that it depends on: tiles of
// q, k and v in their stages, the output on its way to the array, work tiles, and their barriers.
#pragma once
#include "../sm80/fragment_tile.cuh"
#include "tile_scheduler.cuh"
#include "warpgroup.cuh"

namespace forward_storage {

constexpr int CONSUMERS = BLOCK_Q / warpgroup::WARPGROUP_ROWS;  // warpgroups of 64 queries each
constexpr int MAX_CONSUMERS = 3;
constexpr int CONSUMER_THREADS = CONSUMERS * warpgroup::WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / ptx::WARP_SIZE;

// Small heads leave room for more stages, except with score changes: what these read should lie in
// L1, from which shared memory takes its room.
constexpr bool SMALL_HEADS = D <= 64 && D_V <= 64 && !HAS_SCORE;
constexpr int KV_STAGES = SMALL_HEADS ? 4 : 2, Q_STAGES = SMALL_HEADS ? 2 : 1;
constexpr int WORK_STAGES = 3;  // work tiles: the one before, the current and the next one

// Keys that take no part although they are in the tile, in PARTIAL tiles and behind the end of a
// packed sequence, have weight 0, and their values may be anything: 0 * NaN must not reach the sum.
constexpr bool CHECK_FINITE = MAY_MASK || PACKED;
constexpr int CHECKER_WARPS = CHECK_FINITE ? 2 : 0;
constexpr int CHECKER_ARRIVALS = CHECKER_WARPS * warpgroup::ARRIVALS_OF_WARP;

constexpr int Q_ROW_BYTES = fragment::row_bytes(D), V_ROW_BYTES = fragment::row_bytes(D_V);
constexpr int Q_TILE_BYTES = warpgroup::WARPGROUP_ROWS * Q_ROW_BYTES;  // of one consumer
constexpr int K_TILE_BYTES = BLOCK_KV * Q_ROW_BYTES, V_TILE_BYTES = BLOCK_KV * V_ROW_BYTES;
constexpr int OUT_BYTES = BLOCK_Q * V_ROW_BYTES;

using KvPipeline = warpgroup::Pipeline<KV_STAGES>;
using QPipeline = warpgroup::Pipeline<Q_STAGES>;
using WorkPipeline = warpgroup::Pipeline<WORK_STAGES>;

struct OperandTiles {
  char q[Q_STAGES][CONSUMERS][Q_TILE_BYTES];
  char k[KV_STAGES][K_TILE_BYTES];
  char v[KV_STAGES][V_TILE_BYTES];
};
// With the output of a work tile, on its way to the array, where there is room for it.
template <bool HAS_OUT>
struct Tiles : OperandTiles {
  __device__ __forceinline__ unsigned int out_address() const { return 0; }
};
template <>
struct Tiles<true> : OperandTiles {
  char out[OUT_BYTES];

  __device__ __forceinline__ unsigned int out_address() const { return ptx::shared_address(out); }
};

struct SharedStorage : Tiles<TMA_STORE> {
  tile_scheduler::WorkTile work_tiles[WORK_STAGES];
  tile_scheduler::TileScheduler scheduler;
  KvPipeline k_pipeline, v_pipeline;
  QPipeline q_pipelines[MAX_CONSUMERS];
  WorkPipeline work_pipeline;
  // A ring for the results of the finite check, apart from v's: only masked tiles are checked. A
  // stage is free again when its consumers release the tile of v.
  unsigned long long finite_checked[KV_STAGES];
  unsigned int has_nonfinite[KV_STAGES][2];  // of either warp that checks

  __device__ __forceinline__ tile_scheduler::WorkTile& work_tile(int w) {
    return work_tiles[WorkPipeline::stage_of(w)];
  }
  // Whether the block has work tile w. Every block has one, with which the number of rounds comes.
  __device__ __forceinline__ bool has_work(int w) const { return w == 0 || w < scheduler.rounds; }

  __device__ __forceinline__ unsigned int finite_checked_barrier(int check) const {
    return ptx::shared_address(&finite_checked[KvPipeline::stage_of(check)]);
  }

  // Gives each mbarrier the number of arrivals that complete its phase; called by one thread.
  __device__ __forceinline__ void init_barriers() {
    constexpr int CONSUMER_ARRIVALS = CONSUMERS * warpgroup::ARRIVALS_OF_WARPGROUP;
    k_pipeline.init(1, CONSUMER_ARRIVALS);
    v_pipeline.init(1, CONSUMER_ARRIVALS + CHECKER_ARRIVALS);
#pragma unroll
    for (int c = 0; c < CONSUMERS; ++c) q_pipelines[c].init(1, warpgroup::ARRIVALS_OF_WARPGROUP);
    // Work tiles are read by the producer, the finite check and the consumers.
    work_pipeline.init(1, 1 + CHECKER_ARRIVALS + CONSUMER_WARPS * warpgroup::ARRIVALS_OF_WARP);
    if constexpr (CHECK_FINITE) {
#pragma unroll
      for (int n = 0; n < KV_STAGES; ++n) {
        ptx::mbarrier_init(finite_checked_barrier(n), CHECKER_ARRIVALS);
      }
    }
    ptx::fence_mbarrier_init();
  }
};
constexpr int SHARED_STORAGE_BYTES = static_cast<int>(sizeof(SharedStorage));

// The named barriers, which take no room: PING_PONG + c is the turn of consumer c to issue its
// products, at which the consumer before it arrives; CONSUMER_Q + c is of all threads of consumer
// c, ALL_CONSUMERS of all consumers.
constexpr int PING_PONG = 1, CONSUMER_Q = PING_PONG + CONSUMERS;
constexpr int ALL_CONSUMERS = CONSUMER_Q + CONSUMERS;
constexpr int TWO_CONSUMERS = 2 * warpgroup::WARPGROUP_SIZE;  // threads

// TMA and wgmma need tiles that begin at multiples of 1024 bytes.
struct alignas(1024) Aligned {
  char x[1024];
};

static_assert(IS_16_BIT, "16-bit types");
static_assert(THREADS == CONSUMER_THREADS + warpgroup::WARPGROUP_SIZE && fragment::WARP_ROWS == 16,
              "BLOCK_Q, THREADS");
static_assert(CONSUMERS == 2 || CONSUMERS == MAX_CONSUMERS, "BLOCK_Q");
static_assert(SHARED_BYTES == SHARED_STORAGE_BYTES ||
                  (SHARED_BYTES == SHARED_STORAGE_BYTES + OUT_BYTES && !TMA_STORE),
              "SHARED_BYTES");

}  // namespace forward_storage
