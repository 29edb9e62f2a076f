// The shared storage of backward_sm90_dkdv.cu, and the pipelines through which a block of keys sees
// the queries: tiles of q and do with their lse and delta, which two stages hold, and before them
// the spans of tiles that say what to load. It lies in shared memory, because the sums fill the
// registers.
#pragma once
#include "../sm80/fragment_tile.cuh"
#include "../common/layout.cuh"
#include "warpgroup.cuh"

namespace backward_pipeline {

constexpr int CONSUMER_THREADS = THREADS - warpgroup::WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / ptx::WARP_SIZE;
constexpr int CONSUMERS = CONSUMER_THREADS / warpgroup::WARPGROUP_SIZE;

// Whether the consumers share 64 keys, as those of wide heads do: each has half of a tile's queries
// and half of the columns of dk, dv and dq. Else each has 64 keys and all columns of dk and dv.
constexpr bool SHARE_KEYS = BLOCK_KV == warpgroup::WARPGROUP_ROWS;
// Whether a tile's dq has one slab of columns, which one consumer computes, and the other one the
// next tile's. Else each has a share of them.
constexpr bool ALTERNATE_DQ = !SHARE_KEYS && fragment::row_bytes(D) == warpgroup::SLAB_ROW_BYTES;
// Whether a tile's dq is computed during the next tile, by one consumer; slower for narrow heads.
constexpr bool DEFER_DQ =
    ATOMIC_DQ && !SHARE_KEYS && !ALTERNATE_DQ && !HAS_SCORE && !(HAS_MASK && HAS_DROPOUT);

// -- pipelines ------------------------------------------------------------------------------------

constexpr int STAGES = 2;  // of tiles of queries, of dS and of spans

// The stage of element n of a pipeline, and the phase in which its barriers are then.
struct PipelineState {
  int index, phase;

  __device__ __forceinline__ explicit PipelineState(unsigned int n)
      : index(n % STAGES), phase(n / STAGES % 2) {}
};

// The mbarriers of a pipeline: a stage is full when its data have come, and empty when all have
// read them.
struct Pipeline {
  unsigned long long full[STAGES], empty[STAGES];

  __device__ __forceinline__ unsigned int full_barrier(const PipelineState& state) const {
    return ptx::shared_address(&full[state.index]);
  }
  __device__ __forceinline__ unsigned int empty_barrier(const PipelineState& state) const {
    return ptx::shared_address(&empty[state.index]);
  }
  __device__ __forceinline__ void wait_full(const PipelineState& state) const {
    warpgroup::mbarrier_wait(full_barrier(state), state.phase);
  }
  // The first phase of an empty barrier counts as over: nothing has been there before.
  __device__ __forceinline__ void wait_empty(const PipelineState& state) const {
    warpgroup::mbarrier_wait(empty_barrier(state), state.phase ^ 1);
  }
};

// -- tiles of queries -----------------------------------------------------------------------------

// A tile of queries that is not EMPTY is coded as 4 times its index in the head, and its class.
constexpr int NO_TILE = -1;
__device__ __forceinline__ int index_of(int tile) { return tile >> 2; }
__device__ __forceinline__ int class_of(int tile) { return tile & 3; }
__device__ __forceinline__ long long first_query(int tile) {
  return static_cast<long long>(index_of(tile)) * BLOCK_Q;
}

// A span: tiles of queries of one head, and where that head lies. Without a mask it has all tiles
// of the head; else as many as there are consumer threads, each of which classifies one.
struct Span {
  static constexpr int MAX_TILES = CONSUMER_THREADS;
  layout::Entry entry;
  long long h;
  memory::RowStatistic lse, delta;
  float* dq_accum;  // row 0
  warpgroup::TmaHead q, d_out;
  int first, end, whole;                  // indices of tiles; from `whole` on rows are missing
  unsigned int nonempty[CONSUMER_WARPS];  // bit n of word w is that of tile first + 32 w + n
  unsigned int full[CONSUMER_WARPS];

  __device__ __forceinline__ int rows_of(int tile) const {
    return tile::rows_from(first_query(tile), entry.len_q, BLOCK_Q);
  }
  __device__ __forceinline__ TileBox box_of(int tile, long long j0, int nj) const {
    return tile::describe_tile(entry, h, first_query(tile), rows_of(tile), j0, nj);
  }

  // Finds the classes of all tiles, by all consumers together.
  __device__ __forceinline__ void classify(const Params& p, long long j0, int nj) {
    // Lanes beyond the last tile take the last one's class: generated code runs for all together.
    const int index = first + static_cast<int>(threadIdx.x);
    int tile_class = tile::classify_tile(p, box_of(4 * (index < end ? index : end - 1), j0, nj));
    if (index >= end) tile_class = EMPTY;
    const unsigned int warp_nonempty = ptx::ballot(tile_class != EMPTY);
    const unsigned int warp_full = ptx::ballot(tile_class == FULL);
    if (ptx::lane_index() == 0) {
      nonempty[threadIdx.x / ptx::WARP_SIZE] = warp_nonempty;
      full[threadIdx.x / ptx::WARP_SIZE] = warp_full;
    }
  }

  // The first tile from `index` on that is not EMPTY.
  __device__ __forceinline__ int next_tile(int index) const {
    if constexpr (!HAS_MASK) return index < end ? 4 * index + FULL : NO_TILE;
#pragma unroll 1
    while (index < end) {
      const int n = index - first;
      const unsigned int left = nonempty[n / 32] >> n % 32;
      if (left == 0) {
        index += 32 - n % 32;
        continue;
      }
      const int skipped = __ffs(static_cast<int>(left)) - 1;
      const bool is_full = (full[n / 32] >> (n % 32 + skipped) & 1) != 0;
      return 4 * (index + skipped) + (is_full ? FULL : PARTIAL);
    }
    return NO_TILE;
  }

  // The last tile of the run of FULL tiles that begins with tile `index`.
  __device__ __forceinline__ int last_of_full(int index) const {
    int n = index - first;
#pragma unroll 1
    for (; n < MAX_TILES; n = (n & ~31) + 32) {
      const unsigned int others = ~full[n / 32] >> n % 32;
      if (others != 0) return first + n + __ffs(static_cast<int>(others)) - 2;
    }
    return first + MAX_TILES - 1;
  }
};

// -- shared storage -------------------------------------------------------------------------------

// Bytes of tiles: of 64 keys and values, of a tile's q and do, and of its dS or P.
constexpr int KEY_TILES = BLOCK_KV / warpgroup::WARPGROUP_ROWS;
constexpr int K_BYTES = warpgroup::WARPGROUP_ROWS * fragment::row_bytes(D);
constexpr int V_BYTES = warpgroup::WARPGROUP_ROWS * fragment::row_bytes(D_V);
constexpr int Q_BYTES = BLOCK_Q * fragment::row_bytes(D);
constexpr int DO_BYTES = BLOCK_Q * fragment::row_bytes(D_V);
constexpr int DS_BYTES = BLOCK_KV * warpgroup::SLAB_ROW_BYTES;
static_assert(BLOCK_Q == warpgroup::SLAB_COLUMNS, "dS has one slab of columns");

struct SharedStorage {
  // Tiles, each of which begins at a multiple of 1024 bytes. Of the keys, where the consumers do
  // not share them or alternate, there is a copy with 0 for what is not finite; P is there only
  // where they share keys.
  char k[SHARE_KEYS || ALTERNATE_DQ ? 1 : 2][KEY_TILES * K_BYTES];
  char v[KEY_TILES * V_BYTES];
  char q[STAGES][Q_BYTES], d_out[STAGES][DO_BYTES];
  char ds[SHARE_KEYS ? 2 : 1][STAGES][DS_BYTES];  // dS, and P
  // The block's keys.
  layout::Entry entry;
  long long j0;  // the first key
  int h_kv, nj, tiles_per_head;
  bool has_sink;
  unsigned int spans_per_head, spans;  // the latter of all heads
  float c;                             // scale log2 e
  // Spans, written by the consumers.
  Span span[STAGES];
  Pipeline span_pipeline;
  // Tiles: q with lse and delta, and do, which is read before q is.
  Pipeline q_pipeline;
  unsigned long long do_full[STAGES];
  unsigned long long kv_full;
  Pipeline ds_pipeline;  // dS, where dq is deferred
  float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];
  unsigned int needs_finite_check[STAGES];  // whether q or do may hold what is not finite
  // Of a tile's dS in float16: the largest magnitude of each warp, and what it multiplied dS by.
  float ds_largest[STAGES][CONSUMER_WARPS], ds_scales[STAGES][CONSUMER_WARPS];

  // Initialises all mbarriers but kv_full.
  __device__ __forceinline__ void init_barriers() {
    const auto init = [](unsigned long long& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
      init(span_pipeline.full[n], CONSUMER_THREADS);
      init(span_pipeline.empty[n], CONSUMER_THREADS + 1 + ptx::WARP_SIZE);
      init(q_pipeline.full[n], 1 + ptx::WARP_SIZE);
      init(do_full[n], 1);
      init(q_pipeline.empty[n], CONSUMERS * warpgroup::ARRIVALS_OF_WARPGROUP);
      init(ds_pipeline.full[n], CONSUMER_WARPS * warpgroup::ARRIVALS_OF_WARP);
      init(ds_pipeline.empty[n], warpgroup::ARRIVALS_OF_WARPGROUP);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ unsigned int do_full_barrier(const PipelineState& state) const {
    return ptx::shared_address(&do_full[state.index]);
  }
  __device__ __forceinline__ void wait_do_full(const PipelineState& state) const {
    warpgroup::mbarrier_wait(do_full_barrier(state), state.phase);
  }
};

// -- consumers together ---------------------------------------------------------------------------

constexpr int CONSUMER_BARRIER = 1;  // the named barrier of all consumers

__device__ __forceinline__ void consumers_sync() {
  ptx::named_barrier_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
}

// Whether a condition holds for any consumer thread. It is a barrier, too: what consumers wrote to
// shared memory before is there. The vote tells the compiler that lanes agree.
__device__ __forceinline__ bool any_consumer(bool condition) {
  return ptx::any_lane(ptx::named_barrier_or(CONSUMER_BARRIER, CONSUMER_THREADS, condition));
}

// -- work -----------------------------------------------------------------------------------------

// Writes which keys the block has, and how many spans there are for them, by one thread.
__device__ __forceinline__ void publish_block(const Params& p, const layout::WorkTile& work,
                                              SharedStorage& storage) {
  const unsigned int tiles = static_cast<unsigned int>((work.entry.len_q + BLOCK_Q - 1) / BLOCK_Q);
  storage.entry = work.entry;
  storage.j0 = work.block * BLOCK_KV;
  storage.h_kv = static_cast<int>(work.head);
  storage.nj = tile::rows_from(storage.j0, work.entry.len_k, BLOCK_KV);
  storage.tiles_per_head = static_cast<int>(tiles);
  storage.has_sink = p.sink != nullptr;
  storage.spans_per_head = HAS_MASK ? (tiles + Span::MAX_TILES - 1) / Span::MAX_TILES : 1;
  storage.spans =
      static_cast<unsigned int>(layout::entries_sharing(p)) * p.group * storage.spans_per_head;
  storage.c = (HAS_SCORE ? 1.0f : static_cast<float>(p.scale)) * tile::LOG2_E;
}

// Writes span n, if there is one, by all consumers together.
__device__ __forceinline__ void publish_span(const Params& p, SharedStorage& storage,
                                             unsigned int n) {
  if (n >= storage.spans) return;
  const PipelineState state(n);
  storage.span_pipeline.wait_empty(state);
  Span& span = storage.span[state.index];
  if (threadIdx.x == 0) {
    const unsigned int head = n / storage.spans_per_head;
    const unsigned int first = n % storage.spans_per_head * Span::MAX_TILES;
    const long long h = static_cast<long long>(storage.h_kv) * p.group + head % p.group;
    const layout::Entry entry = layout::shared_entry(p, storage.entry, head / p.group);
    const int tiles = storage.tiles_per_head;
    const int end = first + Span::MAX_TILES < tiles ? first + Span::MAX_TILES : tiles;
    span = Span{
        entry,
        h,
        memory::row_statistic(p.lse, entry, h),
        memory::row_statistic(p.delta, entry, h),
        reinterpret_cast<float*>(p.dq_accum.data) + layout::grouped_offset(p.dq_accum, entry, h),
        warpgroup::TmaHead(p.q, entry, h),
        warpgroup::TmaHead(p.d_out, entry, h),
        static_cast<int>(first),
        HAS_MASK ? end : tiles,
        static_cast<int>(entry.len_q / BLOCK_Q),
        {},
        {}};
  }
  if constexpr (HAS_MASK) {
    consumers_sync();  // the span's head, which one thread wrote
    span.classify(p, storage.j0, storage.nj);
  }
  ptx::mbarrier_arrive(storage.span_pipeline.full_barrier(state));
}

// Visits every tile that is not EMPTY, and its number, for the producer and the statistics warp.
template <class Visit>
__device__ __forceinline__ void for_each_tile(SharedStorage& storage, const Visit& visit) {
  unsigned int tile_number = 0;
#pragma unroll 1
  for (unsigned int n = 0; n < storage.spans; ++n) {
    const PipelineState state(n);
    storage.span_pipeline.wait_full(state);
    const Span& span = storage.span[state.index];
#pragma unroll 1
    for (int tile = span.next_tile(span.first); tile != NO_TILE;
         tile = span.next_tile(index_of(tile) + 1), ++tile_number) {
      visit(span, tile, PipelineState(tile_number));
    }
    ptx::mbarrier_arrive(storage.span_pipeline.empty_barrier(state));
  }
}

// -- lse and delta --------------------------------------------------------------------------------

// Whether a score is changed and becomes its probability in one go, pair by pair: where the
// change's derivative is needed, too, or generated code is long.
constexpr bool FUSE_SCORE_EXP = HAS_SCORE && (HAS_DSCORE || fragment_tile::IS_LONG_SCORE_MOD);

// Whether finite lse and delta of a query prove that its q and do are finite. They do not where
// scores are changed. A sink makes lse finite, too, and backward_delta skips zeros then: beside one
// every tile needs the check.
constexpr bool STATISTICS_PROVE_FINITE = HAS_MASK && !HAS_SCORE;

// lse and delta of a tile's queries on their way to shared memory, in the registers of a warp. An
// empty row gets lse = inf, so that its p is 0; so do the rows beyond the last. Where all scores
// are known before the first probability, it is lse log2 e that these are made of.
struct RowStatistics {
  static constexpr int EACH = BLOCK_Q / ptx::WARP_SIZE;
  float lse[EACH], delta[EACH];

  __device__ __forceinline__ void load(const Span& span, int tile) {
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
      lse_smem[i] = FUSE_SCORE_EXP ? row_lse : row_lse * tile::LOG2_E;
      delta_smem[i] = delta[n];
    }
  }
  // Whether those of all queries that exist are finite: lse is inf of the others, or where delta is
  // not finite.
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

// The statistics warp: brings lse and delta of every tile, which may lie in any strides, so that no
// TMA could load them, and says of which tiles q and do need to be looked at.
__device__ __forceinline__ void statistics_warp(SharedStorage& storage) {
  RowStatistics statistics;
  for_each_tile(storage, [&](const Span& span, int tile, const PipelineState& state) {
    statistics.load(span, tile);
    storage.q_pipeline.wait_empty(state);
    statistics.store(storage.lse[state.index], storage.delta[state.index]);
    if constexpr (STATISTICS_PROVE_FINITE) {
      const bool check = storage.has_sink || !statistics.are_finite();
      if (ptx::lane_index() == 0) storage.needs_finite_check[state.index] = check ? 1 : 0;
    }
    ptx::mbarrier_arrive(storage.q_pipeline.full_barrier(state));
  });
}

}  // namespace backward_pipeline
