// The shared memory of a block of decode_sm90.cu: queries, tiles of keys in their stages, what the
// producers publish about these, and what the consumers exchange.
#pragma once
#include "../decode/cursor.cuh"
#include "warpgroup.cuh"

namespace decode_storage {

using decode::LEAF;

constexpr int CONSUMERS = 2;  // warpgroups, each with half of the block's columns of o
constexpr int STAGES = 2;     // of tiles of keys; each has two producer warps
constexpr int PRODUCER_WARPS = warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE;
constexpr int WARPS_OF_STAGE = PRODUCER_WARPS / STAGES;
constexpr int SLABS = D / warpgroup::SLAB_COLUMNS, SLABS_V = D_V / warpgroup::SLAB_COLUMNS;
// Of the columns of o: those of a consumer, in slabs, and its first one.
constexpr int OWN_SLABS = SLABS_V / CONSUMERS / V_PARTS, OWN_COLUMNS = D_V / CONSUMERS / V_PARTS;
__device__ __forceinline__ int first_slab(int consumer) {
  return (decode::part_of_team() * CONSUMERS + consumer) * OWN_SLABS;
}
__device__ __forceinline__ int first_column(int consumer) {
  return first_slab(consumer) * warpgroup::SLAB_COLUMNS;
}
constexpr int SLAB_BYTES = LEAF * warpgroup::SLAB_ROW_BYTES;
using QTile = warpgroup::SmemTile<LEAF, SLABS * warpgroup::SLAB_ROW_BYTES, 1>;
using KTiles = warpgroup::SmemTile<LEAF, SLABS * warpgroup::SLAB_ROW_BYTES, STAGES>;
// Keys come in parts: scores are computed from the first one while the others are on their way.
constexpr int PARTS = 3, PART_SLABS = SLABS / PARTS;

// Named barriers. TURN: the scores of a turn's first tile are issued, those of the second may be.
// ALONE: both consumers, at the end of a turn of one tile. WEIGHTS + c: the weights that consumer c
// has computed; the other one waits for them. REPAIR + c: all threads of consumer c, for values
// that are not finite.
constexpr int WEIGHTS = 1, REPAIR = WEIGHTS + CONSUMERS;
constexpr int TURN = REPAIR + CONSUMERS, ALONE = TURN + 1;
constexpr int BOTH_CONSUMERS = CONSUMERS * warpgroup::WARPGROUP_SIZE;  // threads

// What a consumer needs to know of a tile: whether there is one, whether it begins or ends its node
// of level 1, whether that opens its unit, and whether pairs may be masked.
struct alignas(16) TileFacts {
  static constexpr int EXISTS = 1, BEGINS = 2, ENDS = 4, OPENS = 8, MASKED = 16;
  int flags;
  int unit, rows;  // its slot; the rows of its task

  __device__ __forceinline__ bool exists() const { return (flags & EXISTS) != 0; }
  __device__ __forceinline__ bool begins() const { return (flags & BEGINS) != 0; }
  __device__ __forceinline__ bool ends() const { return (flags & ENDS) != 0; }
  __device__ __forceinline__ bool opens() const { return (flags & OPENS) != 0; }
  __device__ __forceinline__ bool masked() const { return (flags & MASKED) != 0; }
};

// A tile: a leaf of a task.
struct StagedTile {
  TileFacts facts;
  decode::Task task;
  decode::Leaf leaf;
};

static_assert(SLABS > SLABS_V, "a slab without values, whose place weights take after the scores");

// The rows of a thread: what is known of them after a tile. Thread t of one consumer writes for
// thread t of the other one.
struct alignas(8) TwoRows {
  float of[2];
};
struct RowState {
  TwoRows m[warpgroup::WARPGROUP_SIZE], l[warpgroup::WARPGROUP_SIZE];
  TwoRows alpha[warpgroup::WARPGROUP_SIZE];
};

struct SharedStorage {
  RowState rows;
  StagedTile tiles[2 * STAGES];  // a tile is told of when its stage is free
  decode::WarpTasks tasks[PRODUCER_WARPS];
  warpgroup::Pipeline<STAGES> pipeline;  // full: with its first part; empty: values of consumer 0
  unsigned long long rest_full[STAGES * (PARTS - 1)];  // the other parts
  unsigned long long second_empty[STAGES], scored[STAGES];
  decode::ScheduleStorage schedule;

  __device__ __forceinline__ StagedTile& tile(int n) { return tiles[n % (2 * STAGES)]; }

  // The mbarrier of a part of tile n, all of which have the phase of the pipeline.
  __device__ __forceinline__ unsigned int part_barrier(int n, int part) const {
    if (part == 0) return pipeline.full_barrier(n);
    return ptx::shared_address(&rest_full[n % STAGES * (PARTS - 1) + part - 1]);
  }
  __device__ __forceinline__ void wait_part(int n, int part) const {
    warpgroup::mbarrier_wait(part_barrier(n, part), pipeline.phase_of(n));
  }

  // The mbarrier of tile n at which a consumer has read its half of the values, and the weights;
  // and that of its scores, which are the last to read the queries and the keys' last columns.
  __device__ __forceinline__ unsigned int half_barrier(int n, int consumer) const {
    return consumer == 0 ? pipeline.empty_barrier(n)
                         : ptx::shared_address(&second_empty[n % STAGES]);
  }
  __device__ __forceinline__ unsigned int scored_barrier(int n) const {
    return ptx::shared_address(&scored[n % STAGES]);
  }
  // Waits until tile n may overwrite a consumer's half of the values in its stage.
  __device__ __forceinline__ void wait_half(int n, int consumer) const {
    warpgroup::mbarrier_wait(half_barrier(n, consumer), pipeline.phase_of(n) ^ 1);
  }
  // The same of the slabs that only scores are computed of.
  __device__ __forceinline__ void wait_scored_before(int n) const {
    warpgroup::mbarrier_wait(scored_barrier(n), pipeline.phase_of(n) ^ 1);
  }
  __device__ __forceinline__ void wait_scored(int n) const {
    warpgroup::mbarrier_wait(scored_barrier(n), pipeline.phase_of(n));
  }

  // Gives each mbarrier the number of arrivals that complete its phase; called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int OF_CONSUMER =
        warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE * warpgroup::ARRIVALS_OF_WARP;
    pipeline.init(WARPS_OF_STAGE * warpgroup::ARRIVALS_OF_WARP, OF_CONSUMER);
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
      ptx::mbarrier_init(half_barrier(n, 1), OF_CONSUMER);
      ptx::mbarrier_init(scored_barrier(n), OF_CONSUMER);
#pragma unroll
      for (int part = 1; part < PARTS; ++part) {
        ptx::mbarrier_init(part_barrier(n, part), WARPS_OF_STAGE * warpgroup::ARRIVALS_OF_WARP);
      }
    }
    ptx::fence_mbarrier_init();
  }
};

// The queries and the stages of keys, and the storage after them.
struct SharedMemory {
  QTile q;
  KTiles k;
  SharedStorage* storage;

  __device__ __forceinline__ explicit SharedMemory(char* begin)
      : q{begin}, k{q.end()}, storage(reinterpret_cast<SharedStorage*>(k.end())) {}

  __device__ __forceinline__ char* stage(int n) const { return k.stage(n % STAGES); }
  // The last slab of a tile, and later its weights.
  __device__ __forceinline__ char* weights(int n) const {
    return stage(n) + (SLABS - 1) * SLAB_BYTES;
  }
};

// wgmma needs tiles that begin at multiples of 1024 bytes.
struct alignas(1024) Aligned {
  char x[1024];
};

static_assert(IS_16_BIT && !cache::HAS_CODES, "16-bit types");
static_assert(PART_SLABS * PARTS == SLABS, "PARTS");
static_assert(OWN_SLABS * CONSUMERS * V_PARTS == SLABS_V, "V_PARTS");
static_assert(D == SLABS * warpgroup::SLAB_COLUMNS && D_V == 512, "D, D_V");
static_assert(BLOCK_Q == warpgroup::WARPGROUP_ROWS && BLOCK_KV == LEAF, "BLOCK_Q, BLOCK_KV");
static_assert(THREADS == BOTH_CONSUMERS + warpgroup::WARPGROUP_SIZE, "THREADS");
static_assert(SHARED_BYTES == QTile::BYTES + STAGES * KTiles::BYTES + sizeof(SharedStorage),
              "SHARED_BYTES");

}  // namespace decode_storage
