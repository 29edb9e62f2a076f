// The shared memory of a block of forward_sm90_fp8.cu, and the constants that it depends on: tiles
// of codes in their stages, values as they come and transposed, the output on its way to the array,
// work tiles, and their barriers.
//
// A tile of codes is a sequence of slabs of 128 columns, whose rows have 128 bytes in wgmma's
// swizzle. Tensor maps describe pairs of codes as elements of 16 bits.
#pragma once
#include "../warp/fragment_tile.cuh"
#include "warpgroup.cuh"
#include "tile_scheduler.cuh"

namespace fp8_storage {

using tile_scheduler::ScheduledTile;
using tile_scheduler::TileRef;
using tile_scheduler::TileScheduler;
using tile_scheduler::uniform;
using tile_scheduler::UNMASKED;

constexpr int CONSUMERS = BLOCK_Q / warpgroup::WARPGROUP_ROWS;  // warpgroups of 64 queries each
constexpr int CONSUMER_THREADS = CONSUMERS * warpgroup::WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / ptx::WARP_SIZE;
constexpr int TRANSPOSERS = 2;  // warps
constexpr int KV_STAGES = 2;
constexpr int V_STAGES = D_V <= 128 ? 2 : 1;  // of values as they come
constexpr int WORK_STAGES = 3;  // work tiles: the one before, the current and the next one

constexpr bool ENDS_ON_DEVICE = PACKED;
// Whether keys may take no part although they are in the tile: their values may be anything.
constexpr bool CHECK_FINITE = MAY_MASK || ENDS_ON_DEVICE;
constexpr bool SCALE_ROWS = K_SCALE_ROWS || V_SCALE_ROWS;

constexpr int LINE = warpgroup::SLAB_ROW_BYTES;  // codes
constexpr int D_LINES = (D + LINE - 1) / LINE, V_LINES = (D_V + LINE - 1) / LINE;
constexpr int V_ROWS = matmul::round_up(D_V, 64);  // of transposed values
using QTiles =                                     // of one consumer each
    warpgroup::SmemTile<warpgroup::WARPGROUP_ROWS, D_LINES * LINE, CONSUMERS>;
using KTiles = warpgroup::SmemTile<BLOCK_KV, D_LINES * LINE, KV_STAGES>;
using VTiles = warpgroup::SmemTile<BLOCK_KV, V_LINES * LINE, V_STAGES>;
using TransposedTiles =  // a line for the keys of a column
    warpgroup::SmemTile<V_ROWS, LINE, KV_STAGES>;
constexpr int OUT_ROW_BYTES = fragment::row_bytes(D_V), OUT_BYTES = BLOCK_Q * OUT_ROW_BYTES;
constexpr int TILES_BYTES = CONSUMERS * QTiles::BYTES +
                            KV_STAGES * (KTiles::BYTES + TransposedTiles::BYTES) +
                            V_STAGES * VTiles::BYTES;

// Named barriers. PING_PONG + c: the turn of consumer c to issue products; the consumer before it
// arrives. ALL_CONSUMERS: all of their threads, for a tile of v with non-finite values.
constexpr int PING_PONG = 1, ALL_CONSUMERS = PING_PONG + CONSUMERS;
constexpr int TWO_CONSUMERS = 2 * warpgroup::WARPGROUP_SIZE;  // threads

using KvPipeline = warpgroup::Pipeline<KV_STAGES>;
using VPipeline = warpgroup::Pipeline<V_STAGES>;
using WorkPipeline = warpgroup::Pipeline<WORK_STAGES>;

// The scales of the rows of a tile, by which scores and weights are multiplied. A thread loads
// those of four of its columns at once: of 16 keys, key 8 a + 2 b + c has place 4 b + 2 a + c.
struct alignas(16) RowScales {
  float k[BLOCK_KV], v[BLOCK_KV];  // NaN for infinite ones of v
  float v_of_tile[BLOCK_KV];       // v, divided by a power of two so that none is larger than 1

  __device__ __forceinline__ static int place_of(int key) {
    return key / 16 * 16 + key % 8 / 2 * 4 + key % 16 / 8 * 2 + key % 2;
  }
};

// Calls use(column, scale) for the columns of a thread's rows.
template <int COLUMNS, class Use>
__device__ __forceinline__ void each_scale(const float (&scales)[BLOCK_KV], const Use& use) {
  struct alignas(16) Four {
    float x[4];
  };
  const Four* const own = reinterpret_cast<const Four*>(scales) + ptx::lane_index() % 4;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 4) {
    const Four four = own[n];  // of 16 keys
#pragma unroll
    for (int x = 0; x < 4; ++x) use(n + x, four.x[x]);
  }
}

// The power of two that is not smaller than the largest of some scales, as the exponent of a
// float32 with its bias, from 1 to 253.
struct Unit {
  static constexpr int ONE = 127;

  __device__ __forceinline__ static int exponent_of(float largest) {
    const unsigned int bits = __float_as_uint(largest) + 0x7fffffu;
    return bits < 2u << 23 ? 1 : bits > 253u << 23 ? 253 : static_cast<int>(bits >> 23);
  }
  __device__ __forceinline__ static int larger_of(int x, int y) { return x > y ? x : y; }
  // The quotient of two powers of two, 0 if it is less than any normal number. The first one may be
  // 2^127 times as large as the other one.
  __device__ __forceinline__ static float ratio(int of, int to) {
    return __uint_as_float(static_cast<unsigned int>(larger_of(of - to + ONE, 0)) << 23);
  }
  // The larger one of two scales, ignoring those that are not finite.
  __device__ __forceinline__ static float larger(float largest, float scale) {
    const float own = fabs(scale);
    return own > largest && number::is_finite(own) ? own : largest;
  }
};

// Where V_SCALE_ROWS: the units of a stage's values. The weights of a FULL tile, times the scales
// of their values, are in the unit of the tile's largest scale. The output is brought to the same
// unit when it is rescaled, so that no product is multiplied by it, as long as units are not larger
// than 1 and not 2^SPAN times smaller than the largest one so far, which keeps the output finite.
// The last tile brings it back to 1.
struct ValueUnits {
  static constexpr int SPAN = 64;
  int tile, output;
  float factor;   // of products in the tile's unit
  float rescale;  // of the output
};

// The factors of a work tile that come from scales: of its queries' logits, and of its result.
struct WorkScales {
  float logits[BLOCK_Q], result;
};

// Work tiles and the mbarriers of everything.
struct SharedStorage {
  RowScales scales[KV_STAGES];
  ScheduledTile work_tiles[WORK_STAGES];
  TileScheduler scheduler;
  KvPipeline k_pipeline;
  VPipeline v_pipeline;
  // Of transposed values, and of whether those of masked tiles are finite. Scales come with the
  // keys, and are released with the values.
  KvPipeline transposed_pipeline;
  ValueUnits v_units[KV_STAGES];
  unsigned int has_nonfinite[KV_STAGES][2];  // of masked tiles, by each transposer
  WorkScales work_scales[WORK_STAGES];
  unsigned long long q_full[CONSUMERS], q_empty[CONSUMERS];
  WorkPipeline work_pipeline;

  __device__ __forceinline__ ScheduledTile& work_tile(int w) {
    return work_tiles[WorkPipeline::stage_of(w)];
  }
  // Whether the block has work tile w. Every block has one, with which the number of rounds comes.
  __device__ __forceinline__ bool has_work(int w) const { return w == 0 || w < scheduler.rounds; }

  __device__ __forceinline__ unsigned int q_full_barrier(int consumer) const {
    return ptx::shared_address(&q_full[consumer]);
  }
  __device__ __forceinline__ unsigned int q_empty_barrier(int consumer) const {
    return ptx::shared_address(&q_empty[consumer]);
  }

  // Gives each mbarrier the number of arrivals that complete its phase; called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int OF_CONSUMERS = CONSUMERS * warpgroup::ARRIVALS_OF_WARPGROUP;
    constexpr int OF_TRANSPOSERS = TRANSPOSERS * warpgroup::ARRIVALS_OF_WARP;
    k_pipeline.init(1 + (SCALE_ROWS ? warpgroup::ARRIVALS_OF_WARP : 0), OF_CONSUMERS);
    v_pipeline.init(1, OF_TRANSPOSERS);
    transposed_pipeline.init(OF_TRANSPOSERS, OF_CONSUMERS);
#pragma unroll
    for (int c = 0; c < CONSUMERS; ++c) {
      ptx::mbarrier_init(q_full_barrier(c), 1);
      ptx::mbarrier_init(q_empty_barrier(c), warpgroup::ARRIVALS_OF_WARPGROUP);
    }
    // Work tiles are read by the producer, the transposers and the consumers.
    work_pipeline.init(1, (CONSUMER_WARPS + 1 + TRANSPOSERS) * warpgroup::ARRIVALS_OF_WARP);
    ptx::fence_mbarrier_init();
  }
};
constexpr int SHARED_STORAGE_BYTES = static_cast<int>(sizeof(SharedStorage));

// The tiles of q, k, v and the output, and the storage after them.
struct SharedMemory {
  QTiles q;
  KTiles k;
  VTiles v;
  TransposedTiles transposed;
  char* out;
  SharedStorage* storage;

  __device__ __forceinline__ explicit SharedMemory(char* begin)
      : q{begin},
        k{q.end()},
        v{k.end()},
        transposed{v.end()},
        out(transposed.end()),
        storage(reinterpret_cast<SharedStorage*>(out + (TMA_STORE ? OUT_BYTES : 0))) {}
};

// TMA and wgmma need tiles that begin at multiples of 1024 bytes.
struct alignas(1024) Aligned {
  char x[1024];
};

static_assert(IS_16_BIT, "the type of the output, or with WIDE_RESULT any of 16 bits");
static_assert(THREADS == CONSUMER_THREADS + warpgroup::WARPGROUP_SIZE && fragment::WARP_ROWS == 16,
              "BLOCK_Q, THREADS");
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "BLOCK_Q");
static_assert(BLOCK_KV % 32 == 0 && BLOCK_KV <= LINE, "BLOCK_KV");
static_assert(SHARED_BYTES == TILES_BYTES + OUT_BYTES + SHARED_STORAGE_BYTES ||
                  (SHARED_BYTES == TILES_BYTES + SHARED_STORAGE_BYTES && !TMA_STORE),
              "SHARED_BYTES");

}  // namespace fp8_storage
