// The shared memory of a block of forward_sm90_tangent.cu, and the constants that it depends on:
// tiles of q, k, v and of their tangents in their stages, work tiles, and their barriers.
#pragma once
#include "../warp/fragment_tangent.cuh"
#include "tile_scheduler.cuh"
#include "warpgroup.cuh"

namespace tangent_storage {

using tile_scheduler::ScheduledTile;
using tile_scheduler::TileScheduler;

constexpr int CONSUMERS = BLOCK_Q / warpgroup::WARPGROUP_ROWS;  // warpgroups of 64 queries each
constexpr int CONSUMER_THREADS = CONSUMERS * warpgroup::WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / ptx::WARP_SIZE;
constexpr int KV_STAGES = 2;
constexpr int WORK_STAGES = 3;  // work tiles: the one before, the current and the next one

// As in forward_storage.cuh: whether values of keys that take no part may be anything.
constexpr bool CHECK_FINITE = MAY_MASK || PACKED;
constexpr int CHECKER_WARPS = CHECK_FINITE ? 2 : 0;
constexpr int CHECKER_ARRIVALS = CHECKER_WARPS * warpgroup::ARRIVALS_OF_WARP;

constexpr int Q_ROW_BYTES = fragment::row_bytes(D), V_ROW_BYTES = fragment::row_bytes(D_V);
// Queries of consumer c are tile 2 c, keys and values of stage n tile 2 n; their tangents follow.
using QTiles = warpgroup::SmemTile<warpgroup::WARPGROUP_ROWS, Q_ROW_BYTES, 2 * CONSUMERS>;
using KTiles = warpgroup::SmemTile<BLOCK_KV, Q_ROW_BYTES, 2 * KV_STAGES>;
using VTiles = warpgroup::SmemTile<BLOCK_KV, V_ROW_BYTES, 2 * KV_STAGES>;
constexpr int TILES_BYTES =
    2 * (CONSUMERS * QTiles::BYTES + KV_STAGES * (KTiles::BYTES + VTiles::BYTES));
// Bytes that arrive of a consumer's queries, and of a stage's keys and values.
constexpr int Q_ARRIVING = QTiles::BYTES * (HAS_TQ ? 2 : 1);
constexpr int K_ARRIVING = KTiles::BYTES * (HAS_TK ? 2 : 1);
constexpr int V_ARRIVING = VTiles::BYTES * (HAS_TV ? 2 : 1);

// Named barriers, as in forward_storage.cuh.
constexpr int PING_PONG = 1, CONSUMER_Q = PING_PONG + CONSUMERS;
constexpr int ALL_CONSUMERS = CONSUMER_Q + CONSUMERS;
constexpr int TWO_CONSUMERS = 2 * warpgroup::WARPGROUP_SIZE;  // threads

using KvPipeline = warpgroup::Pipeline<KV_STAGES>;
using WorkPipeline = warpgroup::Pipeline<WORK_STAGES>;

// For TMA: the heads of the tangents of a work tile.
struct TangentHeads {
  warpgroup::TmaHead q, k, v;
};

// Work tiles and the mbarriers of everything.
struct SharedStorage {
  ScheduledTile work_tiles[WORK_STAGES];
  TileScheduler scheduler;
  TangentHeads tangent_heads[WORK_STAGES];
  KvPipeline k_pipeline, v_pipeline;
  unsigned long long q_full[CONSUMERS], q_empty[CONSUMERS];
  WorkPipeline work_pipeline;
  // A ring for the results of the finite check, apart from v's: only masked tiles are checked. A
  // stage is free again when its consumers release the tile of v.
  unsigned long long finite_checked[KV_STAGES];
  unsigned int has_nonfinite[KV_STAGES][2];  // according to each of the two check warps

  __device__ __forceinline__ ScheduledTile& work_tile(int w) {
    return work_tiles[WorkPipeline::stage_of(w)];
  }
  __device__ __forceinline__ TangentHeads& heads_of(int w) {
    return tangent_heads[WorkPipeline::stage_of(w)];
  }
  // Whether the block has work tile w. Every block has one, with which the number of rounds comes.
  __device__ __forceinline__ bool has_work(int w) const { return w == 0 || w < scheduler.rounds; }

  __device__ __forceinline__ unsigned int q_full_barrier(int consumer) const {
    return ptx::shared_address(&q_full[consumer]);
  }
  __device__ __forceinline__ unsigned int q_empty_barrier(int consumer) const {
    return ptx::shared_address(&q_empty[consumer]);
  }
  __device__ __forceinline__ unsigned int finite_checked_barrier(int check) const {
    return ptx::shared_address(&finite_checked[KvPipeline::stage_of(check)]);
  }

  // Gives each mbarrier the number of arrivals that complete its phase; called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int CONSUMER_ARRIVALS = CONSUMERS * warpgroup::ARRIVALS_OF_WARPGROUP;
    k_pipeline.init(1, CONSUMER_ARRIVALS);
    v_pipeline.init(1, CONSUMER_ARRIVALS + CHECKER_ARRIVALS);
    if constexpr (CHECK_FINITE) {
#pragma unroll
      for (int n = 0; n < KV_STAGES; ++n) {
        ptx::mbarrier_init(finite_checked_barrier(n), CHECKER_ARRIVALS);
      }
    }
#pragma unroll
    for (int c = 0; c < CONSUMERS; ++c) {
      ptx::mbarrier_init(q_full_barrier(c), 1);
      ptx::mbarrier_init(q_empty_barrier(c), warpgroup::ARRIVALS_OF_WARPGROUP);
    }
    // Work tiles are read by the producer, the finite check and the consumers.
    work_pipeline.init(1, CONSUMER_WARPS * warpgroup::ARRIVALS_OF_WARP + 1 + CHECKER_ARRIVALS);
    ptx::fence_mbarrier_init();
  }
};
constexpr int SHARED_STORAGE_BYTES = static_cast<int>(sizeof(SharedStorage));

// The tiles of q, k and v, and the storage after them.
struct SharedMemory {
  QTiles q;
  KTiles k;
  VTiles v;
  SharedStorage* storage;

  __device__ __forceinline__ explicit SharedMemory(char* begin)
      : q{begin}, k{q.end()}, v{k.end()}, storage(reinterpret_cast<SharedStorage*>(v.end())) {}
};

// TMA and wgmma need tiles that begin at multiples of 1024 bytes.
struct alignas(1024) Aligned {
  char x[1024];
};

static_assert(IS_16_BIT, "16-bit types");
static_assert(THREADS == CONSUMER_THREADS + warpgroup::WARPGROUP_SIZE && fragment::WARP_ROWS == 16,
              "BLOCK_Q, THREADS");
static_assert(CONSUMERS == 2, "BLOCK_Q");
static_assert(!ONE_TILE && !CACHED && V_PARTS == 1 && !HAS_BIAS_TILES, "dense or packed arrays");
static_assert(!WIDE_RESULT && !RESUMES, "results of the storage type over all keys");
static_assert(SHARED_BYTES == TILES_BYTES + SHARED_STORAGE_BYTES, "SHARED_BYTES");

}  // namespace tangent_storage
