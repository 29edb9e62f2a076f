// The shared memory of a block of forward_sm90.cu, and the constants that it depends on: tiles of
// q, k and v in their stages, the output on its way to the array, work tiles, and their barriers.
#pragma once
#include "bias_tiles.cuh"
#include "forward_block.cuh"

namespace forward_storage {

using namespace forward_block;
using finite_check::ENDS_ON_DEVICE;
using tile_scheduler::TileRef;
using tile_scheduler::uniform;
using tile_scheduler::UNMASKED;
using tile_scheduler::V_COLUMNS;

constexpr int MAX_CONSUMERS = 3;

// Small heads leave room for more stages, except with score changes: what these read should lie in
// L1, from which shared memory takes its room; or a bias takes it.
constexpr bool SMALL_HEADS = D <= 64 && D_V <= 64 && !CHANGES_SCORES;
constexpr int KV_STAGES = SMALL_HEADS && !ONE_TILE ? 4 : 2;

constexpr int Q_ROW_BYTES = fragment::row_bytes(D), V_ROW_BYTES = fragment::row_bytes(V_COLUMNS);
// Where a work tile is one tile of scores, its queries are needed as often as keys and values.
constexpr int BYTES_OF_TWO =
    BLOCK_Q * (2 * Q_ROW_BYTES + V_ROW_BYTES) + 2 * BLOCK_KV * (Q_ROW_BYTES + V_ROW_BYTES);
constexpr int Q_STAGES =
    SMALL_HEADS || (ONE_TILE && !CHANGES_SCORES && SHARED_BYTES > BYTES_OF_TWO) ? 2 : 1;
using QTiles =  // of one consumer each
    warpgroup::SmemTile<warpgroup::WARPGROUP_ROWS, Q_ROW_BYTES, Q_STAGES * CONSUMERS>;
using KTiles = warpgroup::SmemTile<BLOCK_KV, Q_ROW_BYTES, KV_STAGES>;
using VTiles = warpgroup::SmemTile<BLOCK_KV, V_ROW_BYTES, KV_STAGES>;
constexpr int OUT_BYTES = BLOCK_Q * V_ROW_BYTES;
constexpr int TILES_BYTES = Q_STAGES * CONSUMERS * QTiles::BYTES +
                            KV_STAGES * (KTiles::BYTES + VTiles::BYTES) + bias_tiles::TILES_BYTES;

using KvPipeline = warpgroup::Pipeline<KV_STAGES, UseCount>;
using SharedStorage = Storage<WorkTiles, KV_STAGES, Q_STAGES, MAX_CONSUMERS>;
constexpr int SHARED_STORAGE_BYTES =
    static_cast<int>(sizeof(SharedStorage)) + bias_tiles::PIPELINE_BYTES;

// Use n of q's pipeline: consumer c takes slot first_q_slot(n) + c.
__device__ __forceinline__ int first_q_slot(UseCount n) { return n % Q_STAGES * CONSUMERS; }
__device__ __forceinline__ int q_phase_of(UseCount n) { return n / Q_STAGES % 2; }

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

static_assert(CONSUMERS >= 1 && CONSUMERS <= MAX_CONSUMERS, "BLOCK_Q");
static_assert(!ONE_TILE || !CACHED, "the most keys of a row that is one tile are known");
// What a result joins may lie where the first part writes, while another one reads it.
static_assert(V_PARTS == 1 || (!RESUMES && !TMA_STORE), "V_PARTS");
static_assert(SHARED_BYTES == TILES_BYTES + OUT_BYTES + SHARED_STORAGE_BYTES ||
                  (SHARED_BYTES == TILES_BYTES + SHARED_STORAGE_BYTES && !TMA_STORE),
              "SHARED_BYTES");

}  // namespace forward_storage
