// What blocks of forward_sm90.cu and of forward_sm90_tangent.cu have in common: the consumers and
// their named barriers, the ring of work tiles, and the mbarriers of everything.
#pragma once
#include "../warp/fragment_tile.cuh"
#include "finite_check.cuh"
#include "tile_scheduler.cuh"
#include "warpgroup.cuh"

namespace forward_block {

using finite_check::CHECK_FINITE;
using tile_scheduler::ScheduledTile;
using tile_scheduler::TileScheduler;

constexpr int CONSUMERS = BLOCK_Q / warpgroup::WARPGROUP_ROWS;  // warpgroups of 64 queries each
constexpr int CONSUMER_THREADS = CONSUMERS * warpgroup::WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / ptx::WARP_SIZE;

// Named barriers. PING_PONG + c: the turn of consumer c to issue products; the consumer before it
// arrives. CONSUMER_Q + c: all threads of consumer c, for its queries. ALL_CONSUMERS: all of their
// threads, for a tile of v with non-finite values.
constexpr int PING_PONG = 1, CONSUMER_Q = PING_PONG + CONSUMERS;
constexpr int ALL_CONSUMERS = CONSUMER_Q + CONSUMERS;
constexpr int TWO_CONSUMERS = 2 * warpgroup::WARPGROUP_SIZE;  // threads

// The type in which uses of pipelines are counted. Unsigned counts take fewer instructions, but
// more registers where scores change.
template <bool IS_SIGNED>
struct Count {
  using Type = unsigned int;
};
template <>
struct Count<true> {
  using Type = int;
};
using UseCount = Count<CHANGES_SCORES>::Type;

constexpr int WORK_STAGES = 3;  // work tiles: the one before, the current and the next one
using WorkPipeline = warpgroup::Pipeline<WORK_STAGES, UseCount>;

// The block's work tiles, in their ring.
struct WorkTiles {
  ScheduledTile work_tiles[WORK_STAGES];
  TileScheduler scheduler;

  __device__ __forceinline__ ScheduledTile& work_tile(int w) {
    return work_tiles[WorkPipeline::stage_of(w)];
  }
  // Whether the block has work tile w. Every block has one, with which the number of rounds comes.
  __device__ __forceinline__ bool has_work(int w) const { return w == 0 || w < scheduler.rounds; }
};

// Work tiles, with what else a kernel keeps of them, and the mbarriers of everything.
template <class Work, int KV_STAGES, int Q_STAGES, int MAX_CONSUMERS>
struct Storage : Work {
  warpgroup::Pipeline<KV_STAGES, UseCount> k_pipeline, v_pipeline;
  // The pipelines of q, one for each consumer: slot n CONSUMERS + c is stage n of consumer c.
  unsigned long long q_full[MAX_CONSUMERS * Q_STAGES], q_empty[MAX_CONSUMERS * Q_STAGES];
  WorkPipeline work_pipeline;
  finite_check::Results<KV_STAGES> checks;

  __device__ __forceinline__ unsigned int q_full_barrier(int slot) const {
    return ptx::shared_address(&q_full[slot]);
  }
  __device__ __forceinline__ unsigned int q_empty_barrier(int slot) const {
    return ptx::shared_address(&q_empty[slot]);
  }

  // Gives each mbarrier the number of arrivals that complete its phase; called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int CONSUMER_ARRIVALS = CONSUMERS * warpgroup::ARRIVALS_OF_WARPGROUP;
    k_pipeline.init(1, CONSUMER_ARRIVALS);
    v_pipeline.init(1, CONSUMER_ARRIVALS + finite_check::ARRIVALS);
    if constexpr (CHECK_FINITE) checks.init();
#pragma unroll
    for (int slot = 0; slot < Q_STAGES * CONSUMERS; ++slot) {
      ptx::mbarrier_init(q_full_barrier(slot), 1);
      ptx::mbarrier_init(q_empty_barrier(slot), warpgroup::ARRIVALS_OF_WARPGROUP);
    }
    // Work tiles are read by the producer, the finite check and the consumers.
    work_pipeline.init(1,
                       CONSUMER_WARPS * warpgroup::ARRIVALS_OF_WARP + 1 + finite_check::ARRIVALS);
    ptx::fence_mbarrier_init();
  }
};

// TMA and wgmma need tiles that begin at multiples of 1024 bytes.
struct alignas(1024) Aligned {
  char x[1024];
};

static_assert(IS_16_BIT, "16-bit types");
static_assert(THREADS == CONSUMER_THREADS + warpgroup::WARPGROUP_SIZE && fragment::WARP_ROWS == 16,
              "BLOCK_Q, THREADS");

}  // namespace forward_block
