// Tiles of a bias in shared memory: TMA loads that of a tile of scores beside the keys, or in the
// backward beside the queries, and each consumer adds its part to its scores. The twin of
// reference/cpu/tile.py for a bias whose rows begin at multiples of 16 bytes; any other one is part
// of the score change.
//
// A tile has 64 queries and BLOCK_KV keys, in slabs of 128 bytes with TMA's swizzle. To TMA,
// elements of 4 bytes are pairs of 2 bytes. Where all queries have the same bias, a tile is one row
// of each slab, for all consumers. Beyond the last query or key, TMA fills with 0.
#pragma once
#include "../ptx/mma.cuh"
#include "../warp/fragment_tile.cuh"
#include "warpgroup.cuh"

namespace bias_tiles {

using fragment_tile::high_half;
using fragment_tile::low_half;

constexpr bool IS_WIDE = BIAS_KIND == KIND_FLOAT32;
constexpr int HALVES = IS_WIDE ? 2 : 1;  // of an element, as TMA counts columns
constexpr int SLAB_KEYS = warpgroup::SLAB_COLUMNS / HALVES;
constexpr int SLABS = (BLOCK_KV + SLAB_KEYS - 1) / SLAB_KEYS;
constexpr int CONSUMERS = BLOCK_Q / warpgroup::WARPGROUP_ROWS;
constexpr int STAGES = BIAS_STAGES > 0 ? BIAS_STAGES : 1;
using Tiles =  // of one consumer each
    warpgroup::SmemTile<warpgroup::WARPGROUP_ROWS, SLABS * warpgroup::SLAB_ROW_BYTES,
                        STAGES * CONSUMERS>;
using Pipeline = warpgroup::Pipeline<STAGES>;
constexpr int TILES_BYTES = HAS_BIAS_TILES ? STAGES * CONSUMERS * Tiles::BYTES : 0;
constexpr int PIPELINE_BYTES = HAS_BIAS_TILES ? static_cast<int>(sizeof(Pipeline)) : 0;

// Whether queries have rows of their own.
__device__ __forceinline__ bool has_rows(const Params& p) { return p.bias.row != 0; }

__device__ __forceinline__ void init(const Pipeline& pipeline) {
  pipeline.init(1, CONSUMERS * 4 * warpgroup::ARRIVALS_OF_WARP);
}

// The tiles of a stage: one for all consumers, if queries have no rows of their own.
__device__ __forceinline__ int copies_of(const Params& p) { return has_rows(p) ? CONSUMERS : 1; }
__device__ __forceinline__ int bytes(const Params& p) {
  return has_rows(p) ? CONSUMERS * Tiles::BYTES : SLABS * warpgroup::SLAB_ROW_BYTES;
}

// Issues the TMA loads of a stage, whose bytes count at an mbarrier: the bias of the queries of all
// consumers from `first_query` on and of the keys from `first_key` on.
__device__ __forceinline__ void issue(const Params& p, const Tiles& tiles,
                                      const ptx::TensorMap& map, const warpgroup::TmaHead& head,
                                      int stage, int first_query, int first_key,
                                      unsigned int barrier) {
#pragma unroll 1
  for (int c = 0; c < copies_of(p); ++c) {
    const unsigned int to = tiles.address(stage * CONSUMERS + c);
    const int first = has_rows(p) ? first_query + c * warpgroup::WARPGROUP_ROWS : 0;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      ptx::tma_load(to + slab * Tiles::SLAB_BYTES, map, barrier,
                    (first_key + slab * SLAB_KEYS) * HALVES, first, head.head, head.slow,
                    head.slower);
    }
  }
}

// The same for use n of the pipeline.
__device__ __forceinline__ void load(const Params& p, const Tiles& tiles, const Pipeline& pipeline,
                                     const ptx::TensorMap& map, const warpgroup::TmaHead& head,
                                     int n, int first_query, int first_key) {
  pipeline.wait_empty(n);
  ptx::mbarrier_arrive_expect_tx(pipeline.full_barrier(n), bytes(p));
  issue(p, tiles, map, head, Pipeline::stage_of(n), first_query, first_key,
        pipeline.full_barrier(n));
}

// Waits for the bias of use n, and releases it; each warp of the consumers. Also one that reads
// nothing waits, lest it miss a phase.
__device__ __forceinline__ void wait(const Pipeline& pipeline, int n) {
  if constexpr (HAS_BIAS_TILES) pipeline.wait_full(n);
}
__device__ __forceinline__ void release(const Pipeline& pipeline, int n) {
  if constexpr (HAS_BIAS_TILES) warpgroup::arrive_warp(pipeline.empty_barrier(n));
}

// Two neighbouring elements of 4 bytes.
struct alignas(8) TwoFloats {
  float x[2];
};

// Where a lane reads the rows of its warp.
struct Reader {
  Tiles tiles;
  int row;      // bytes from the tiles to the row of ldmatrix, or to the first of the lane's scores
  int swizzle;  // with which the pieces of this row are exchanged
  int below;    // bytes to the lane's second row

  __device__ __forceinline__ Reader(const Params& p, const Tiles& of, int stage, int consumer)
      : tiles(of) {
    const bool rows = has_rows(p);
    const int lane = ptx::lane_index();
    const int in_warp = IS_WIDE ? lane / 4 : lane % fragment::WARP_ROWS;
    const int n = rows ? fragment::warp_row() % warpgroup::WARPGROUP_ROWS + in_warp : 0;
    row =
        (stage * CONSUMERS + (rows ? consumer : 0)) * Tiles::BYTES + n * warpgroup::SLAB_ROW_BYTES;
    swizzle = (IS_WIDE ? lane % 4 / 2 : lane / fragment::WARP_ROWS) ^ n % 8;
    below = rows ? 8 * warpgroup::SLAB_ROW_BYTES : 0;
  }

  // The bias of the group-th 16 keys: x[r][n] belongs to element (r, 4 group + n) of the scores.
  __device__ __forceinline__ void read(int group, float (&x)[2][4]) const {
    if constexpr (IS_WIDE) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int piece = 4 * group + 2 * n;
        const int at = row + piece / 8 * Tiles::SLAB_BYTES + (piece % 8 ^ swizzle) * 16 +
                       ptx::lane_index() % 2 * static_cast<int>(sizeof(TwoFloats));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const TwoFloats two = *reinterpret_cast<const TwoFloats*>(tiles.begin + at + r * below);
          x[r][2 * n] = two.x[0];
          x[r][2 * n + 1] = two.x[1];
        }
      }
    } else {
      const int piece = 2 * group;
      unsigned int words[4];  // of both rows and keys 0 to 7, then of both and keys 8 to 15
      ptx::ldmatrix_x4(words, tiles.address(0) + row + piece / 8 * Tiles::SLAB_BYTES +
                                  (piece % 8 ^ swizzle) * 16);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        x[r][0] = low_half(words[r]);
        x[r][1] = high_half(words[r]);
        x[r][2] = low_half(words[2 + r]);
        x[r][3] = high_half(words[2 + r]);
      }
    }
  }
};

// The same where rows of scores are keys: a lane reads those of its warp from `first_key` of the
// tile on, and groups are of 16 queries.
struct KeysReader {
  unsigned int address;
  int step;  // bytes to the next group

  __device__ __forceinline__ KeysReader(const Params& p, const Tiles& tiles, int stage,
                                        int first_key) {
    const bool rows = has_rows(p);
    const int lane = ptx::lane_index(), n = rows ? lane / 16 * 8 + lane % 8 : 0;
    const int piece = first_key % SLAB_KEYS / 8 + lane / 8 % 2;
    address = tiles.address(stage) + first_key / SLAB_KEYS * Tiles::SLAB_BYTES +
              n * warpgroup::SLAB_ROW_BYTES + (piece ^ n % 8) * 16;
    step = rows ? 16 * warpgroup::SLAB_ROW_BYTES : 0;
  }

  __device__ __forceinline__ void read(int group, float (&x)[2][4]) const {
    unsigned int words[4];  // of both rows and queries 0 to 7, then of both and queries 8 to 15
    ptx::ldmatrix_x4_trans(words, address + group * step);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[n % 2][n / 2 * 2] = low_half(words[n]);
      x[n % 2][n / 2 * 2 + 1] = high_half(words[n]);
    }
  }
};

}  // namespace bias_tiles
