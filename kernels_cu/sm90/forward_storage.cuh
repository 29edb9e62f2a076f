// The shared memory of a block of forward_sm90.cu, and the constants that it depends on: tiles of
// q, k and v in their stages, the output on its way to the array, work tiles, and their barriers.
#pragma once
#include "../warp/fragment_tile.cuh"
#include "bias_tiles.cuh"
#include "warpgroup.cuh"
#include "tile_scheduler.cuh"

namespace forward_storage {

using tile_scheduler::ScheduledTile;
using tile_scheduler::TileRef;
using tile_scheduler::TileScheduler;
using tile_scheduler::uniform;
using tile_scheduler::UNMASKED;
using tile_scheduler::V_COLUMNS;

constexpr int CONSUMERS = BLOCK_Q / warpgroup::WARPGROUP_ROWS;  // warpgroups of 64 queries each
constexpr int MAX_CONSUMERS = 3;
constexpr int CONSUMER_THREADS = CONSUMERS * warpgroup::WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / ptx::WARP_SIZE;

// Small heads leave room for more stages, except with score changes: what these read should lie in
// L1, from which shared memory takes its room; or a bias takes it.
constexpr bool SMALL_HEADS = D <= 64 && D_V <= 64 && !CHANGES_SCORES;
constexpr int KV_STAGES = SMALL_HEADS && !ONE_TILE ? 4 : 2, Q_STAGES = SMALL_HEADS ? 2 : 1;
constexpr int WORK_STAGES = 3;  // work tiles: the one before, the current and the next one

// Whether sequences may end within the memory of k and v, and have no keys at all.
constexpr bool ENDS_ON_DEVICE = PACKED || CACHED;
// Keys that take no part although they are in the tile, in PARTIAL tiles and after the end of such
// a sequence, have weight 0, and their values may be anything: 0 * NaN must not reach the sum.
constexpr bool CHECK_FINITE = MAY_MASK || ENDS_ON_DEVICE;
// Whether keys and values stay in their stage as long as a block's work tiles have the same ones.
// Then values are checked when they come, whether or not the tile is masked.
constexpr bool KEEPS_KV = ONE_TILE && !ENDS_ON_DEVICE && !CHANGES_SCORES;
constexpr int CHECKER_WARPS = CHECK_FINITE ? 2 : 0;
constexpr int CHECKER_ARRIVALS = CHECKER_WARPS * warpgroup::ARRIVALS_OF_WARP;

constexpr int Q_ROW_BYTES = fragment::row_bytes(D), V_ROW_BYTES = fragment::row_bytes(V_COLUMNS);
using QTiles =  // of one consumer each
    warpgroup::SmemTile<warpgroup::WARPGROUP_ROWS, Q_ROW_BYTES, Q_STAGES * CONSUMERS>;
using KTiles = warpgroup::SmemTile<BLOCK_KV, Q_ROW_BYTES, KV_STAGES>;
using VTiles = warpgroup::SmemTile<BLOCK_KV, V_ROW_BYTES, KV_STAGES>;
constexpr int OUT_BYTES = BLOCK_Q * V_ROW_BYTES;
constexpr int TILES_BYTES = Q_STAGES * CONSUMERS * QTiles::BYTES +
                            KV_STAGES * (KTiles::BYTES + VTiles::BYTES) + bias_tiles::TILES_BYTES;

// Named barriers. PING_PONG + c: the turn of consumer c to issue products; the consumer before it
// arrives. CONSUMER_Q + c: all threads of consumer c, for its queries. ALL_CONSUMERS: all of their
// threads, for a tile of v with non-finite values.
constexpr int PING_PONG = 1, CONSUMER_Q = PING_PONG + CONSUMERS;
constexpr int ALL_CONSUMERS = CONSUMER_Q + CONSUMERS;
constexpr int TWO_CONSUMERS = 2 * warpgroup::WARPGROUP_SIZE;  // threads

using KvPipeline = warpgroup::Pipeline<KV_STAGES>;
using WorkPipeline = warpgroup::Pipeline<WORK_STAGES>;

__device__ __forceinline__ int first_q_slot(int n) { return n % Q_STAGES * CONSUMERS; }
__device__ __forceinline__ int q_phase_of(int n) { return n / Q_STAGES % 2; }

// Work tiles and the mbarriers of everything.
struct SharedStorage {
  ScheduledTile work_tiles[WORK_STAGES];
  TileScheduler scheduler;
  KvPipeline k_pipeline, v_pipeline;
  // The pipelines of q, one for each consumer: use n of consumer c takes slot first_q_slot(n) + c.
  unsigned long long q_full[MAX_CONSUMERS * Q_STAGES], q_empty[MAX_CONSUMERS * Q_STAGES];
  WorkPipeline work_pipeline;
  // A ring for the results of the finite check, apart from v's: only masked tiles are checked. A
  // stage is free again when its consumers release the tile of v.
  unsigned long long finite_checked[KV_STAGES];
  unsigned int has_nonfinite[KV_STAGES][2];  // according to each of the two check warps

  __device__ __forceinline__ ScheduledTile& work_tile(int w) {
    return work_tiles[WorkPipeline::stage_of(w)];
  }
  // Whether the block has work tile w. Every block has one, with which the number of rounds comes.
  __device__ __forceinline__ bool has_work(int w) const { return w == 0 || w < scheduler.rounds; }

  __device__ __forceinline__ unsigned int q_full_barrier(int slot) const {
    return ptx::shared_address(&q_full[slot]);
  }
  __device__ __forceinline__ unsigned int q_empty_barrier(int slot) const {
    return ptx::shared_address(&q_empty[slot]);
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
    for (int slot = 0; slot < Q_STAGES * CONSUMERS; ++slot) {
      ptx::mbarrier_init(q_full_barrier(slot), 1);
      ptx::mbarrier_init(q_empty_barrier(slot), warpgroup::ARRIVALS_OF_WARPGROUP);
    }
    // Work tiles are read by the producer, the finite check and the consumers.
    work_pipeline.init(1, CONSUMER_WARPS * warpgroup::ARRIVALS_OF_WARP + 1 + CHECKER_ARRIVALS);
    ptx::fence_mbarrier_init();
  }
};
constexpr int SHARED_STORAGE_BYTES =
    static_cast<int>(sizeof(SharedStorage)) + bias_tiles::PIPELINE_BYTES;

// The tiles of q, k, v, the bias and the output, the storage after them, and the mbarriers of the
// bias.
struct SharedMemory {
  QTiles q;
  KTiles k;
  VTiles v;
  bias_tiles::Tiles bias;
  char* out;
  SharedStorage* storage;
  bias_tiles::Pipeline* bias_pipeline;

  __device__ __forceinline__ explicit SharedMemory(char* begin)
      : q{begin},
        k{q.end()},
        v{k.end()},
        bias{v.end()},
        out(v.end() + bias_tiles::TILES_BYTES),
        storage(reinterpret_cast<SharedStorage*>(out + (TMA_STORE ? OUT_BYTES : 0))),
        bias_pipeline(reinterpret_cast<bias_tiles::Pipeline*>(storage + 1)) {}
};

// TMA and wgmma need tiles that begin at multiples of 1024 bytes.
struct alignas(1024) Aligned {
  char x[1024];
};

static_assert(IS_16_BIT, "16-bit types");
static_assert(THREADS == CONSUMER_THREADS + warpgroup::WARPGROUP_SIZE && fragment::WARP_ROWS == 16,
              "BLOCK_Q, THREADS");
static_assert(CONSUMERS >= 1 && CONSUMERS <= MAX_CONSUMERS, "BLOCK_Q");
static_assert(!ONE_TILE || !CACHED, "the most keys of a row that is one tile are known");
// What a result joins may lie where the first part writes, while another one reads it.
static_assert(V_PARTS == 1 || (!RESUMES && !TMA_STORE), "V_PARTS");
static_assert(SHARED_BYTES == TILES_BYTES + OUT_BYTES + SHARED_STORAGE_BYTES ||
                  (SHARED_BYTES == TILES_BYTES + SHARED_STORAGE_BYTES && !TMA_STORE),
              "SHARED_BYTES");

}  // namespace forward_storage
