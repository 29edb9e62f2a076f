// Queries that pass by a block of keys: what the block knows of them, and of itself, in shared
// memory, because registers hold the sums.
#pragma once
#include "../sm80/fragment_tile.cuh"
#include "../common/layout.cuh"
#include "warpgroup.cuh"

namespace warpgroup_passing {

constexpr int CONSUMER_THREADS = THREADS - warpgroup::WARPGROUP_SIZE;  // those that compute
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / ptx::WARP_SIZE;
constexpr int STAGES = 2;  // of heads, and of tiles
__device__ __forceinline__ int stage_of(unsigned int n) { return n % STAGES; }
__device__ __forceinline__ int parity_of(unsigned int n) { return n / STAGES % 2; }

// -- tiles that pass by ---------------------------------------------------------------------------

// A tile that is not EMPTY is a number: 4 times its place among the head's, and its class.
constexpr int NO_TILE = -1;
__device__ __forceinline__ int place_of(int tile) { return tile >> 2; }
__device__ __forceinline__ int class_of(int tile) { return tile & 3; }
__device__ __forceinline__ long long first_of(int tile) {
  return static_cast<long long>(place_of(tile)) * BLOCK_Q;
}

// Tiles of one head, and what is known of it. Without a mask they are all of the head's; else as
// many as there are threads that compute, each of which finds the class of one.
struct Span {
  static constexpr int MOST = CONSUMER_THREADS;
  layout::Entry entry;
  long long h;
  memory::RowStatistic lse, delta;
  float* dq_accum;  // row 0
  warpgroup::TmaHead q, d_out;
  int first, end, whole;              // places among the head's; from `whole` on rows are missing
  unsigned int some[CONSUMER_WARPS];  // bit n of word w: tile first + 32 w + n is not EMPTY
  unsigned int full[CONSUMER_WARPS];

  __device__ __forceinline__ int rows_of(int tile) const {
    return tile::rows_from(first_of(tile), entry.len_q, BLOCK_Q);
  }
  __device__ __forceinline__ TileBox box_of(int tile, long long j0, int nj) const {
    return tile::describe_tile(entry, h, first_of(tile), rows_of(tile), j0, nj);
  }

  // The classes, found by all threads that compute together.
  __device__ __forceinline__ void classify(const Params& p, long long j0, int nj) {
    // Beyond the last tile, the last one's class: all lanes ask together.
    const int place = first + static_cast<int>(threadIdx.x);
    int tile_class = tile::classify_tile(p, box_of(4 * (place < end ? place : end - 1), j0, nj));
    if (place >= end) tile_class = EMPTY;
    const unsigned int own_some = ptx::ballot(tile_class != EMPTY);
    const unsigned int own_full = ptx::ballot(tile_class == FULL);
    if (ptx::lane_index() == 0) {
      some[threadIdx.x / ptx::WARP_SIZE] = own_some;
      full[threadIdx.x / ptx::WARP_SIZE] = own_full;
    }
  }

  // The tile from `place` on that is not EMPTY.
  __device__ __forceinline__ int next_tile(int place) const {
    if constexpr (!HAS_MASK) return place < end ? 4 * place + FULL : NO_TILE;
#pragma unroll 1
    while (place < end) {
      const int n = place - first;
      const unsigned int left = some[n / 32] >> n % 32;
      if (left == 0) {
        place += 32 - n % 32;
        continue;
      }
      const int skipped = __ffs(static_cast<int>(left)) - 1;
      const bool is_full = (full[n / 32] >> (n % 32 + skipped) & 1) != 0;
      return 4 * (place + skipped) + (is_full ? FULL : PARTIAL);
    }
    return NO_TILE;
  }

  // The place of the last of the FULL tiles that follow each other from `place` on, one of them.
  __device__ __forceinline__ int last_of_full(int place) const {
    int n = place - first;
#pragma unroll 1
    for (; n < MOST; n = (n & ~31) + 32) {
      const unsigned int others = ~full[n / 32] >> n % 32;
      if (others != 0) return first + n + __ffs(static_cast<int>(others)) - 2;
    }
    return first + MOST - 1;
  }
};

// Whether a score is changed and becomes its weight in one go, pair by pair: where its derivative
// is needed, too, or generated code is long.
constexpr bool WEIGHS_AT_ONCE = HAS_SCORE && (HAS_DSCORE || fragment_tile::IS_LONG_SCORE_MOD);

// lse and delta of a tile's queries on their way to shared memory, by the lanes of a warp. An empty
// row gets lse = inf, so that its p is 0; so do the rows beyond the last. Where all scores are
// known before the first weight, it is lse log2 e that these are made of.
struct LaneNumbers {
  static constexpr int EACH = BLOCK_Q / ptx::WARP_SIZE;
  float lse[EACH], delta[EACH];

  __device__ __forceinline__ void load(const Span& span, int tile) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const long long i = first_of(tile) + n * ptx::WARP_SIZE + ptx::lane_index();
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
      const float own = lse[n] == -number::infinity() ? number::infinity() : lse[n];
      lse_smem[i] = WEIGHS_AT_ONCE ? own : own * tile::LOG2_E;
      delta_smem[i] = delta[n];
    }
  }
  // Whether those of all queries that exist are finite: lse is inf of the others, or where delta is
  // not finite.
  __device__ __forceinline__ bool are_finite() const {
    bool any = false;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      any = any || !(lse[n] > -number::infinity()) || !number::is_finite(delta[n]);
    }
    return !ptx::any_lane(any);
  }
};

// Whether lse and delta tell that queries and do are finite: where these are, so are those, unless
// scores are changed. A sink makes lse finite, too, and backward_delta skips zeros then.
constexpr bool NUMBERS_TELL = HAS_MASK && !HAS_SCORE;

// -- the block ------------------------------------------------------------------------------------

// Barriers of places in shared memory: what is there has come, and has been read.
struct Passing {
  unsigned long long full[STAGES], empty[STAGES];
};
__device__ __forceinline__ unsigned int full(Passing& of, unsigned int n) {
  return ptx::shared_address(&of.full[stage_of(n)]);
}
__device__ __forceinline__ unsigned int empty(Passing& of, unsigned int n) {
  return ptx::shared_address(&of.empty[stage_of(n)]);
}

struct Known {
  layout::Entry entry;
  long long j0;  // the first key
  int h_kv, nj, tiles;
  bool has_sink;
  unsigned int spans_each, spans;  // of a head, and in all
  float c;                         // scale log2 e
  Span span[STAGES];
  Passing told, queries;  // do is read before the queries have been
  unsigned long long full_d_out[STAGES];
  unsigned long long held;  // the keys and values
  Passing d_scores;         // dS, where dq is deferred
  float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];
  unsigned int doubtful[STAGES];  // whether queries or do may not be finite
  // Of a tile's dS: the warps' largest, and what they multiplied theirs by.
  float largest[STAGES][CONSUMER_WARPS], factors[STAGES][CONSUMER_WARPS];

  // Makes all barriers but that of the keys and values.
  __device__ __forceinline__ void init_barriers() {
    const auto init = [](unsigned long long& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
      init(told.full[n], CONSUMER_THREADS);
      init(told.empty[n], CONSUMER_THREADS + 1 + ptx::WARP_SIZE);
      init(queries.full[n], 1 + ptx::WARP_SIZE);
      init(full_d_out[n], 1);
      init(queries.empty[n],
           CONSUMER_THREADS / warpgroup::WARPGROUP_SIZE * warpgroup::ARRIVALS_OF_WARPGROUP);
      init(d_scores.full[n], CONSUMER_WARPS * warpgroup::ARRIVALS_OF_WARP);
      init(d_scores.empty[n], warpgroup::ARRIVALS_OF_WARPGROUP);
    }
    ptx::fence_mbarrier_init();
  }
};

__device__ __forceinline__ unsigned int full_d_out(Known& known, unsigned int n) {
  return ptx::shared_address(&known.full_d_out[stage_of(n)]);
}

constexpr int TOGETHER = 1;  // the barrier of all that compute

// Whether a condition holds for any thread that computes; and what was written to shared memory
// before has been written. The vote tells the compiler that lanes agree.
__device__ __forceinline__ bool any_thread(bool condition) {
  return ptx::any_lane(ptx::named_barrier_or(TOGETHER, CONSUMER_THREADS, condition));
}

// Tells what a block is to work on, by one thread.
__device__ __forceinline__ void tell_block(const Params& p, const layout::WorkTile& work,
                                           Known& known) {
  const unsigned int tiles = static_cast<unsigned int>((work.entry.len_q + BLOCK_Q - 1) / BLOCK_Q);
  known.entry = work.entry;
  known.j0 = work.block * BLOCK_KV;
  known.h_kv = static_cast<int>(work.head);
  known.nj = tile::rows_from(known.j0, work.entry.len_k, BLOCK_KV);
  known.tiles = static_cast<int>(tiles);
  known.has_sink = p.sink != nullptr;
  known.spans_each = HAS_MASK ? (tiles + Span::MOST - 1) / Span::MOST : 1;
  known.spans = static_cast<unsigned int>(layout::entries_sharing(p)) * p.group * known.spans_each;
  known.c = (HAS_SCORE ? 1.0f : static_cast<float>(p.scale)) * tile::LOG2_E;
}

// Tells of span n, if there is one: all threads that compute, together.
__device__ __forceinline__ void tell(const Params& p, Known& known, unsigned int n) {
  if (n >= known.spans) return;
  warpgroup::mbarrier_wait(empty(known.told, n), parity_of(n) ^ 1);
  Span& span = known.span[stage_of(n)];
  if (threadIdx.x == 0) {
    const unsigned int number = n / known.spans_each, first = n % known.spans_each * Span::MOST;
    const long long h = static_cast<long long>(known.h_kv) * p.group + number % p.group;
    const layout::Entry entry = layout::shared_entry(p, known.entry, number / p.group);
    const int end = first + Span::MOST < known.tiles ? first + Span::MOST : known.tiles;
    span = Span{
        entry,
        h,
        memory::row_statistic(p.lse, entry, h),
        memory::row_statistic(p.delta, entry, h),
        reinterpret_cast<float*>(p.dq_accum.data) + layout::grouped_offset(p.dq_accum, entry, h),
        warpgroup::TmaHead(p.q, entry, h),
        warpgroup::TmaHead(p.d_out, entry, h),
        static_cast<int>(first),
        HAS_MASK ? end : known.tiles,
        static_cast<int>(entry.len_q / BLOCK_Q),
        {},
        {}};
  }
  if constexpr (HAS_MASK) {
    ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // what is known of the head
    span.classify(p, known.j0, known.nj);
  }
  ptx::mbarrier_arrive(full(known.told, n));
}

// Visits every tile that is not EMPTY, each of which has a number, for those who copy.
template <class Visit>
__device__ __forceinline__ void each_tile(Known& known, const Visit& visit) {
  unsigned int tile_number = 0;
#pragma unroll 1
  for (unsigned int n = 0; n < known.spans; ++n) {
    warpgroup::mbarrier_wait(full(known.told, n), parity_of(n));
    const Span& span = known.span[stage_of(n)];
#pragma unroll 1
    for (int tile = span.next_tile(span.first); tile != NO_TILE;
         tile = span.next_tile(place_of(tile) + 1), ++tile_number) {
      visit(span, tile, tile_number);
    }
    ptx::mbarrier_arrive(empty(known.told, n));
  }
}

// Waits until the place of tile n was read.
__device__ __forceinline__ void wait_for_place(Known& known, unsigned int n) {
  warpgroup::mbarrier_wait(empty(known.queries, n), parity_of(n) ^ 1);
}

// Brings lse and delta of every tile, by the lanes of a warp.
__device__ __forceinline__ void bring_numbers(Known& known) {
  LaneNumbers numbers;
  each_tile(known, [&](const Span& span, int tile, unsigned int n) {
    numbers.load(span, tile);
    wait_for_place(known, n);
    numbers.store(known.lse[stage_of(n)], known.delta[stage_of(n)]);
    if constexpr (NUMBERS_TELL) {
      const bool doubtful = known.has_sink || !numbers.are_finite();
      if (ptx::lane_index() == 0) known.doubtful[stage_of(n)] = doubtful ? 1 : 0;
    }
    ptx::mbarrier_arrive(full(known.queries, n));
  });
}

}  // namespace warpgroup_passing
