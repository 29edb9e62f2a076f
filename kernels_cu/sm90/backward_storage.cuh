// The shared memory of a block of backward_sm90_dkdv.cu, and the constants that it depends on: the
// block's keys and values, stages of q, do, dS and P, and the spans of tiles of queries that the
// block computes. What the roles need to know lies here, because the sums fill the registers.
#pragma once
#include "../warp/fragment_product.cuh"
#include "../warp/fragment_tile.cuh"
#include "../common/gradient_tile.cuh"
#include "../common/layout.cuh"
#include "bias_tiles.cuh"
#include "warpgroup.cuh"

namespace backward_storage {

constexpr int CONSUMER_THREADS = THREADS - warpgroup::WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / ptx::WARP_SIZE;
constexpr int CONSUMERS = CONSUMER_THREADS / warpgroup::WARPGROUP_SIZE;
// Registers of a thread of the producer and of the consumers. Blocks of one consumer share an SM.
constexpr int PRODUCER_REGS = 24, CONSUMER_REGS = CONSUMERS == 1 ? 232 : 240;
// The distance between the slabs of a tile of 64 rows.
constexpr int SLAB_BYTES = 64 * warpgroup::SLAB_ROW_BYTES;

// Whether the consumers share 64 keys, as those of wide heads do: each has half of a tile's queries
// for S and dP, and half of the columns of dk, dv and dq. Otherwise each has 64 keys, and all
// columns of their dk and dv.
constexpr bool SHARE_KEYS = BLOCK_KV < CONSUMERS * warpgroup::WARPGROUP_ROWS;
// Parts of a tile's queries, one after the other: where the sums of dk and dv leave no registers
// for the scores of all queries.
constexpr int SUM_SLABS =
    (fragment::row_bytes(D) + fragment::row_bytes(D_V)) / warpgroup::SLAB_ROW_BYTES;
constexpr int QUERY_PARTS = !SHARE_KEYS && SUM_SLABS > 4 ? 2 : 1;
// Whether the block has one consumer, for rows of so few keys, which computes all of dq.
constexpr bool ONE_CONSUMER = CONSUMERS == 1;
// Whether a tile's dq has one slab of columns.
constexpr bool ONE_SLAB = fragment::row_bytes(D) == warpgroup::SLAB_ROW_BYTES;
// Whether the consumers compute dq in turns, each that of every other tile. Otherwise each computes
// some of a tile's slabs.
constexpr bool ALTERNATE_DQ = !SHARE_KEYS && !ONE_CONSUMER && ONE_SLAB;
// Whether one consumer has all slabs of a tile's dq, of several. Narrow heads are slower that way.
constexpr bool HAS_WHOLE_TILES =
    ATOMIC_DQ && !SHARE_KEYS && !ONE_SLAB && !CHANGES_SCORES && !(HAS_MASK && HAS_DROPOUT);
// Whether it is one of two, and computes them during the next tile.
constexpr bool DEFER_DQ = HAS_WHOLE_TILES && !ONE_CONSUMER;
static_assert(QUERY_PARTS == 1 || DEFER_DQ || !ATOMIC_DQ, "parts of a tile's queries");

constexpr int KEY_TILES = BLOCK_KV / warpgroup::WARPGROUP_ROWS;
constexpr int K_ROW_BYTES = fragment::row_bytes(D), V_ROW_BYTES = fragment::row_bytes(D_V);

constexpr int STORES_DQ = 256;  // where HAS_SINGLES: added to a tile's queries whose dq is stored
static_assert(!HAS_SINGLES || (HAS_LISTS && ATOMIC_DQ && !WHOLE_DQ && !HAS_PARTS && !PACKED),
              "HAS_SINGLES");

constexpr int STAGES = 2;  // of tiles of q and do, and of spans
// Of dS. One consumer multiplies each before the next one is stored.
constexpr int DS_STAGES = ONE_CONSUMER ? 1 : STAGES;
// P goes through shared memory where the consumers share keys, in stages after those of dS.
constexpr int P_STAGES = SHARE_KEYS ? STAGES : 0;

// 64 keys or their values, a tile's q or do, and its dS or P.
using KTiles = warpgroup::SmemTile<warpgroup::WARPGROUP_ROWS, K_ROW_BYTES, KEY_TILES>;
using VTiles = warpgroup::SmemTile<warpgroup::WARPGROUP_ROWS, V_ROW_BYTES, KEY_TILES>;
using QTiles = warpgroup::SmemTile<BLOCK_Q, K_ROW_BYTES, STAGES>;
using DoTiles = warpgroup::SmemTile<BLOCK_Q, V_ROW_BYTES, STAGES>;
using DsTiles = warpgroup::SmemTile<BLOCK_KV, warpgroup::SLAB_ROW_BYTES, DS_STAGES + P_STAGES>;
// A copy of the keys without non-finite values is made where dq may be deferred, if there is room.
constexpr int FINITE_K_BYTES =
    SHARE_KEYS || ONE_CONSUMER || ONE_SLAB || QUERY_PARTS > 1 ? 0 : KEY_TILES * KTiles::BYTES;
constexpr bool COPY_KEYS = DEFER_DQ && FINITE_K_BYTES > 0;

// Uses of a pipeline are counted without a sign, which divides by two with one instruction.
using Pipeline = warpgroup::Pipeline<STAGES, unsigned int>;

// -- tiles of queries -----------------------------------------------------------------------------

using gradient_tile::TileRef;
__device__ __forceinline__ TileRef tile_ref(int index, int tile_class) {
  return TileRef{4 * index + tile_class};
}
__device__ __forceinline__ int index_of(TileRef tile) { return static_cast<int>(tile) >> 2; }
__device__ __forceinline__ int class_of(TileRef tile) { return static_cast<int>(tile) & 3; }
__device__ __forceinline__ long long first_query(TileRef tile) {
  return static_cast<long long>(index_of(tile)) * BLOCK_Q;
}

// A span: tiles of queries of one head, and where the head's arrays lie. Without a mask it has all
// tiles of the head. With a mask it has at most one for each consumer thread, which classifies it.
struct Span {
  static constexpr int MAX_TILES = CONSUMER_THREADS;
  layout::Entry entry;
  long long h;
  memory::RowStatistic lse, delta;
  float* dq_accum;  // row 0; where WHOLE_DQ, of dq, whatever its type
  char* dq;         // row 0, where HAS_SINGLES
  warpgroup::TmaHead q, d_out;
  // Indices of tiles; from `whole` on rows are missing, or keys, if ONE_CONSUMER.
  int first, end, whole;
  unsigned int nonempty[CONSUMER_WARPS];  // bit n of word w is that of tile first + 32 w + n
  unsigned int full[CONSUMER_WARPS];
  unsigned int single[CONSUMER_WARPS];  // where HAS_SINGLES: of which no other block has pairs

  // Whether the tile's dq is stored.
  __device__ __forceinline__ bool is_single(TileRef tile) const {
    const int n = index_of(tile) - first;
    return (single[n / 32] >> n % 32 & 1) != 0;
  }
  // Where a tile's dq is added or stored to.
  __device__ __forceinline__ float* dq_of(const Params& p, TileRef tile) const {
    const long long first = first_query(tile);
    if (HAS_SINGLES && is_single(tile)) {
      return reinterpret_cast<float*>(fragment_product::dq_row(p, dq, first));
    } else if constexpr (WHOLE_DQ) {
      return reinterpret_cast<float*>(
          fragment_product::dq_row(p, reinterpret_cast<char*>(dq_accum), first));
    } else {
      return dq_accum + first * fragment::whole_columns(D);
    }
  }
  __device__ __forceinline__ int rows_of(TileRef tile) const {
    return tile::rows_from(first_query(tile), entry.len_q, BLOCK_Q);
  }
  __device__ __forceinline__ TileBox box_of(TileRef tile, long long j0, int nj) const {
    return tile::describe_tile(entry, h, first_query(tile), rows_of(tile), j0, nj);
  }

  // Finds the classes of all tiles. All consumer threads call it together.
  __device__ __forceinline__ void classify(const Params& p, long long j0, int nj) {
    // Threads beyond the last tile classify the last one again: generated code runs for whole
    // warps.
    const int index = first + static_cast<int>(threadIdx.x);
    const TileRef tile = tile_ref(index < end ? index : end - 1, 0);
    unsigned int warp_single = 0;
    if constexpr (HAS_SINGLES) {
      warp_single = tile_lists::singles_of(p, entry.b, h)[index_of(tile) / tile_lists::TILES];
    }
    int tile_class = tile::classify_tile(p, box_of(tile, j0, nj));
    if (index >= end) tile_class = EMPTY;
    const unsigned int warp_nonempty = ptx::ballot(tile_class != EMPTY);
    const unsigned int warp_full = ptx::ballot(tile_class == FULL);
    if (ptx::lane_index() == 0) {
      nonempty[threadIdx.x / ptx::WARP_SIZE] = warp_nonempty;
      full[threadIdx.x / ptx::WARP_SIZE] = warp_full;
      if constexpr (HAS_SINGLES) single[threadIdx.x / ptx::WARP_SIZE] = warp_single;
    }
  }

  // The first tile from index `index` on that is not EMPTY.
  __device__ __forceinline__ TileRef next_tile(int index) const {
    if constexpr (!HAS_MASK) return index < end ? TileRef{4 * index + FULL} : TileRef::NONE;
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
      return TileRef{4 * (index + skipped) + (is_full ? FULL : PARTIAL)};
    }
    return TileRef::NONE;
  }

  // The index of the last tile of the run of FULL tiles that begins at index `index`.
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

// The tiles of a span that a consumer visits: within a run of FULL ones no class is looked up.
struct FullRun {
  int last;  // the index of the current run's last tile

  __device__ __forceinline__ explicit FullRun(const Span& span)
      : last(HAS_MASK ? -1 : span.end - 1) {}

  // The first tile from index `index` on that is not EMPTY.
  __device__ __forceinline__ TileRef next_tile(const Span& span, int index) {
    if ((HAS_EDGES || !HAS_MASK) && index <= last) return tile_ref(index, FULL);
    const TileRef tile = span.next_tile(index);
    if (HAS_EDGES && tile != TileRef::NONE && class_of(tile) == FULL) {
      last = span.last_of_full(index_of(tile));
    }
    return tile;
  }
};

// -- shared memory --------------------------------------------------------------------------------

// The block's keys, spans, lse and delta, and the mbarriers of everything.
struct SharedStorage {
  layout::Entry entry;
  long long j0;  // the first key
  int h_kv, nj, tiles_per_head;
  bool has_sink, ended;                // ended, where ONLY_LONG: the block has no more work
  unsigned short first_span;           // where HAS_LISTS: spans before it would be EMPTY
  unsigned int spans_per_head, spans;  // `spans` of all heads
  float c;                             // scale log2 e
  union {
    unsigned int first_head;  // where HAS_PARTS: the part's, of those that share the keys
    unsigned int turn;        // where ONLY_LONG: of the block, while it looks for its first tile
  };
  Span span[STAGES];
  // A stage of q_pipeline has q, do, lse and delta. do has a full barrier of its own, because q is
  // multiplied first.
  Pipeline span_pipeline, q_pipeline;
  unsigned long long do_full[STAGES];
  unsigned long long kv_full;
  Pipeline ds_pipeline;  // dS, where dq is deferred
  float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];
  unsigned int needs_finite_check[STAGES];  // whether q or do may have non-finite values
  // Of each part of a tile's dS in float16: the largest magnitude of each warp, and its scale.
  float ds_largest[STAGES][QUERY_PARTS][CONSUMER_WARPS];
  float ds_scales[STAGES][QUERY_PARTS * CONSUMER_WARPS];

  __device__ __forceinline__ unsigned int kv_full_barrier() const {
    return ptx::shared_address(&kv_full);
  }
  __device__ __forceinline__ unsigned int do_full_barrier(unsigned int n) const {
    return ptx::shared_address(&do_full[Pipeline::stage_of(n)]);
  }

  // Gives each mbarrier but kv_full the number of arrivals that complete its phase; called by one
  // thread.
  __device__ __forceinline__ void init_barriers() const {
    // The consumers read spans, and so do the producer, one thread, and the statistics warp.
    span_pipeline.init(CONSUMER_THREADS, CONSUMER_THREADS + 1 + ptx::WARP_SIZE);
    q_pipeline.init(1 + ptx::WARP_SIZE, CONSUMERS * warpgroup::ARRIVALS_OF_WARPGROUP);
    ds_pipeline.init(CONSUMER_WARPS * warpgroup::ARRIVALS_OF_WARP,
                     warpgroup::ARRIVALS_OF_WARPGROUP);
#pragma unroll
    for (int n = 0; n < STAGES; ++n) ptx::mbarrier_init(do_full_barrier(n), 1);
    ptx::fence_mbarrier_init();
  }
  // Ends all mbarriers, when no thread waits for one; called by one thread.
  __device__ __forceinline__ void end_barriers() const {
    span_pipeline.end();
    q_pipeline.end();
    ds_pipeline.end();
#pragma unroll
    for (int n = 0; n < STAGES; ++n) ptx::mbarrier_inval(do_full_barrier(n));
    ptx::mbarrier_inval(kv_full_barrier());
  }
};
constexpr int SHARED_STORAGE_BYTES = static_cast<int>(sizeof(SharedStorage));

// The tiles, and the storage after them. A bias in tiles arrives and leaves with q.
struct SharedMemory {
  KTiles k;
  VTiles v;
  QTiles q;
  DoTiles d_out;
  DsTiles ds;
  bias_tiles::Tiles bias;
  char* finite_k;
  SharedStorage* storage;

  __device__ __forceinline__ explicit SharedMemory(char* begin)
      : k{begin},
        v{k.end()},
        q{v.end()},
        d_out{q.end()},
        ds{d_out.end()},
        bias{ds.end()},
        finite_k(ds.end() + bias_tiles::TILES_BYTES),
        storage(reinterpret_cast<SharedStorage*>(finite_k + FINITE_K_BYTES)) {}
};

// TMA and wgmma need tiles that begin at multiples of 1024 bytes.
struct alignas(1024) Aligned {
  char x[1024];
};

static_assert(IS_16_BIT, "16-bit types");
static_assert((CONSUMERS == 2 || (ONE_CONSUMER && KEY_TILES == 1)) && BLOCK_Q == 64,
              "THREADS, BLOCK_KV, BLOCK_Q");
static_assert(!ONE_CONSUMER || !HAS_BIAS_TILES, "a bias");
static_assert(!TMA_STORE || !PACKED, "TMA_STORE");
static_assert(!HAS_BIAS_TILES || (!HAS_SCORE && !SHARE_KEYS && BIAS_STAGES == STAGES), "a bias");
static_assert(!HAS_BIAS_TILES || !bias_tiles::IS_WIDE, "a bias of 16 bits");
static_assert(!WHOLE_DQ || ATOMIC_DQ, "WHOLE_DQ");
static_assert(!HAS_PARTS || (!PACKED && !TMA_STORE), "HAS_PARTS");
static_assert(SHARED_BYTES == KEY_TILES * (KTiles::BYTES + VTiles::BYTES) +
                                  STAGES * (QTiles::BYTES + DoTiles::BYTES) +
                                  (DS_STAGES + P_STAGES) * DsTiles::BYTES + FINITE_K_BYTES +
                                  bias_tiles::TILES_BYTES + SHARED_STORAGE_BYTES,
              "SHARED_BYTES");

// -- consumers together ---------------------------------------------------------------------------

// Named barriers: of all consumer threads, of those of one consumer, and where ONLY_LONG, of all
// threads of the block.
constexpr int ALL_CONSUMERS = 1, ALONE = 2, ALL_THREADS = 3;

__device__ __forceinline__ void consumers_sync() {
  ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);
}

// Whether a condition holds for any consumer thread. This is a barrier, too: afterwards every
// consumer sees what the others wrote to shared memory before. The vote tells the compiler that
// lanes agree.
__device__ __forceinline__ bool any_consumer(bool condition) {
  return ptx::any_lane(ptx::named_barrier_or(ALL_CONSUMERS, CONSUMER_THREADS, condition));
}

// A condition on which lanes agree. Where blocks store dq or have parts, the assembler would run
// products one by one if a vote did not tell it.
__device__ __forceinline__ bool lanes_agree(bool condition) {
  if constexpr (WHOLE_DQ || HAS_PARTS) return ptx::any_lane(condition);
  return condition;
}

// -- work -----------------------------------------------------------------------------------------

// The block's keys. With lists in an order, it is that of the first head that has these keys.
__device__ __forceinline__ layout::WorkTile work_tile(const Params& p) {
  layout::WorkTile work = layout::work_tile_of<true>(p, layout::interleave_heads(p, blockIdx.x),
                                                     p.heads_kv, true, BLOCK_KV, false);
  if constexpr (HAS_LISTS) {
    if (!work.idle && tile_lists::are_ordered(p)) {
      work.block = tile_lists::order_of(p, work.entry.b, work.head * p.group)[work.block];
    }
  }
  return work;
}

// Tiles of queries from the span of the first one that is not EMPTY up to the last one.
struct ListedTiles {
  unsigned int first_span, end;
};

// Where HAS_LISTS: those of the block's keys, of `tiles` ones; all of them, if heads or entries
// that share the keys have different lists. The lanes of a warp call it together.
__device__ __forceinline__ ListedTiles listed_tiles(const Params& p, const layout::WorkTile& work,
                                                    unsigned int tiles) {
  using namespace tile_lists;
  const Table& lists = table(p);
  const long long h = work.head * p.group;
  const bool differ = list_of(lists, h) != list_of(lists, h + p.group - 1) ||
                      (lists.strides[ENTRIES] != 0 && layout::entries_sharing(p) > 1);
  if (WHOLE_DQ || differ) return {0, tiles};  // or dq of EMPTY tiles is to be set to 0
  const ClassWord* const words = words_of(p, work.entry.b, h, static_cast<int>(work.block));
  const int count = static_cast<int>(lists.shape[WORDS]);
  int first = count * TILES, end = 0;  // those that the lane has seen
#pragma unroll 1
  for (int w = ptx::lane_index(); w < count; w += ptx::WARP_SIZE) {
    const unsigned int nonempty = words[w].nonempty;
    if (nonempty == 0) continue;
    const int lowest = w * TILES + __ffs(static_cast<int>(nonempty)) - 1;
    first = lowest < first ? lowest : first;
    end = (w + 1) * TILES - __clz(static_cast<int>(nonempty));
  }
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    const int other = ptx::shuffle_xor(first, lanes), other_end = ptx::shuffle_xor(end, lanes);
    first = other < first ? other : first;
    end = other_end > end ? other_end : end;
  }
  constexpr int MOST = 65535;  // of the type that has it
  const int span = end == 0 ? 0 : first / Span::MAX_TILES;
  return {static_cast<unsigned int>(span < MOST ? span : MOST), static_cast<unsigned int>(end)};
}

// Writes which keys the block has, and how many spans it computes with them; called by one thread,
// or where HAS_LISTS by a warp.
__device__ __forceinline__ void publish_block(const Params& p, const layout::WorkTile& work,
                                              SharedStorage& shared) {
  unsigned int tiles = static_cast<unsigned int>((work.entry.len_q + BLOCK_Q - 1) / BLOCK_Q);
  unsigned int before = 0;  // tiles in spans that are EMPTY
  if constexpr (HAS_LISTS) {
    const ListedTiles listed = listed_tiles(p, work, tiles);
    if (ptx::lane_index() != 0) return;
    shared.first_span = static_cast<unsigned short>(listed.first_span);
    before = listed.first_span * Span::MAX_TILES;
    tiles = listed.end;
  }
  shared.entry = work.entry;
  shared.j0 = work.block * BLOCK_KV;
  shared.h_kv = static_cast<int>(work.head);
  shared.nj = tile::rows_from(shared.j0, work.entry.len_k, BLOCK_KV);
  shared.tiles_per_head = static_cast<int>(tiles);
  shared.has_sink = p.sink != nullptr;
  shared.spans_per_head = HAS_MASK ? (tiles - before + Span::MAX_TILES - 1) / Span::MAX_TILES : 1;
  shared.spans =
      static_cast<unsigned int>(layout::entries_sharing(p)) * p.group * shared.spans_per_head;
  if constexpr (HAS_PARTS) {
    const layout::PartOfSum part(p,
                                 layout::part_of_keys(p, layout::interleave_heads(p, blockIdx.x)),
                                 layout::entries_sharing(p) * p.group);
    shared.first_head = static_cast<unsigned int>(part.begin);
    shared.spans = static_cast<unsigned int>(part.end - part.begin) * shared.spans_per_head;
  }
  shared.c = (CHANGES_SCORES ? 1.0f : static_cast<float>(p.scale)) * number::LOG2_E<float>;
}

constexpr int PUBLISHERS = HAS_LISTS ? ptx::WARP_SIZE : 1;  // threads that call it

// Row 0 of what a head's dq is added to or, where WHOLE_DQ, stored to.
__device__ __forceinline__ float* dq_of(const Params& p, const layout::Entry& entry, long long h) {
  if constexpr (WHOLE_DQ) {
    return reinterpret_cast<float*>(p.dq.data + layout::offset(p.dq, entry, h, false) *
                                                    fragment_product::dq_bytes(p));
  } else {
    return reinterpret_cast<float*>(p.dq_accum.data) + layout::grouped_offset(p.dq_accum, entry, h);
  }
}

// Writes span n, if there is one. All consumer threads call it together.
__device__ __forceinline__ void publish_span(const Params& p, SharedStorage& shared,
                                             unsigned int n) {
  if (n >= shared.spans) return;
  shared.span_pipeline.wait_empty(n);
  Span& span = shared.span[Pipeline::stage_of(n)];
  // Where HAS_PARTS, one thread's branch would have the assembler run products one by one.
  if (HAS_PARTS ? ptx::any_lane(threadIdx.x == 0) : threadIdx.x == 0) {
    unsigned int head = n / shared.spans_per_head;  // of those that share the keys
    unsigned int first = n % shared.spans_per_head * Span::MAX_TILES;
    if constexpr (HAS_LISTS) first += shared.first_span * Span::MAX_TILES;
    if constexpr (HAS_PARTS) head += shared.first_head;
    const long long h = static_cast<long long>(shared.h_kv) * p.group + head % p.group;
    const layout::Entry entry = layout::shared_entry(p, shared.entry, head / p.group);
    const int tiles = shared.tiles_per_head, whole = static_cast<int>(entry.len_q / BLOCK_Q);
    const int end = first + Span::MAX_TILES < tiles ? first + Span::MAX_TILES : tiles;
    const Span made = {entry,
                       h,
                       memory::row_statistic(p.lse, entry, h),
                       memory::row_statistic(p.delta, entry, h),
                       dq_of(p, entry, h),
                       HAS_SINGLES ? p.dq.data + layout::offset(p.dq, entry, h, false) *
                                                     fragment_product::dq_bytes(p)
                                   : nullptr,
                       warpgroup::TmaHead(p.q, entry, h),
                       warpgroup::TmaHead(p.d_out, entry, h),
                       static_cast<int>(first),
                       HAS_MASK ? end : tiles,
                       ONE_CONSUMER && shared.nj < BLOCK_KV ? 0 : whole,
                       {},
                       {},
                       {}};
    if (!HAS_PARTS || threadIdx.x == 0) span = made;
  }
  if constexpr (HAS_MASK) {
    consumers_sync();  // the span's head, which one thread wrote
    span.classify(p, shared.j0, shared.nj);
  }
  ptx::mbarrier_arrive(shared.span_pipeline.full_barrier(n));
}

}  // namespace backward_storage
