// The shared memory of a block of forward_sm90_tangent.cu, and the constants that it depends on:
// tiles of q, k, v and of their tangents in their stages, work tiles, and their barriers.
#pragma once
#include "../warp/fragment_tangent.cuh"
#include "forward_block.cuh"

namespace tangent_storage {

using namespace forward_block;

constexpr int KV_STAGES = 2;

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

// For TMA: the heads of the tangents of a work tile.
struct TangentHeads {
  warpgroup::TmaHead q, k, v;
};

// Work tiles with these heads.
struct TangentWork : WorkTiles {
  TangentHeads tangent_heads[WORK_STAGES];

  __device__ __forceinline__ TangentHeads& heads_of(int w) {
    return tangent_heads[WorkPipeline::stage_of(w)];
  }
};
using KvPipeline = warpgroup::Pipeline<KV_STAGES>;
using SharedStorage = Storage<TangentWork, KV_STAGES, 1, CONSUMERS>;
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

static_assert(CONSUMERS == 2, "BLOCK_Q");
static_assert(!ONE_TILE && !CACHED && V_PARTS == 1 && !HAS_BIAS_TILES, "dense or packed arrays");
static_assert(!WIDE_RESULT && !RESUMES, "results of the storage type over all keys");
static_assert(SHARED_BYTES == TILES_BYTES + SHARED_STORAGE_BYTES, "SHARED_BYTES");

}  // namespace tangent_storage
