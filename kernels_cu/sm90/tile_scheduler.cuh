// The persistent tile scheduler of forward_sm90.cu: which work tiles a block computes, and in which
// order. A work tile is a block of queries of one head. The scheduler warp publishes each in shared
// memory for the producer and the consumers. The twin of reference/cpu/layout.py.
#pragma once
#include "../common/cache.cuh"
#include "warpgroup.cuh"
#include "warpgroup_tile.cuh"

namespace tile_scheduler {

// A tile of keys that is not EMPTY, in one register: twice its index, and 1 more where the mask may
// hide pairs of it. What is not greater than NONE is no tile. Members of a struct, and functions
// that return bool, would change the order of instructions.
enum class TileRef : int { NONE = -1 };
constexpr int UNMASKED = 0;  // a kind
__device__ __forceinline__ int index_of(TileRef tile) { return static_cast<int>(tile) / 2; }
__device__ __forceinline__ int kind_of(TileRef tile) { return static_cast<int>(tile) % 2; }
// The tile with the index before this one, as masked as this one.
__device__ __forceinline__ TileRef tile_before(TileRef tile) {
  return TileRef{static_cast<int>(tile) - 2};
}
// The same tile. The shuffle tells the compiler that lanes agree; without it, it serialises the
// products.
__device__ __forceinline__ TileRef uniform(TileRef tile) {
  return TileRef{ptx::shuffle(static_cast<int>(tile), 0)};
}

// Of wide values, V_PARTS work tiles have the same queries: each computes all of their scores, with
// equal bits, and a part of the columns of the output. This is the twin of cupyflash's
// gpu/kernels/sm90_wide.py.
constexpr int V_COLUMNS = V_PARTS == 1 ? D_V : matmul::round_up((D_V + V_PARTS - 1) / V_PARTS, 8);
static_assert(V_PARTS == 1 || ((V_PARTS - 1) * V_COLUMNS < D_V && !ONE_TILE), "V_PARTS");

template <int PARTS>
struct ColumnsOfValues {
  int part;
  __device__ __forceinline__ int first_column() const { return part * V_COLUMNS; }
  __device__ __forceinline__ int columns() const {
    return part + 1 < PARTS ? V_COLUMNS : D_V - (PARTS - 1) * V_COLUMNS;
  }
  // Whether it writes what belongs to rows, of which there is one for all parts.
  __device__ __forceinline__ bool has_rows() const { return part == 0; }
  __device__ __forceinline__ void set(unsigned int number) { part = static_cast<int>(number); }
};
template <>
struct ColumnsOfValues<1> {  // takes no memory
  __device__ __forceinline__ static int first_column() { return 0; }
  __device__ __forceinline__ static int columns() { return D_V; }
  __device__ __forceinline__ static bool has_rows() { return true; }
  __device__ __forceinline__ static void set(unsigned int) {}
};

// What producer and consumers need to know of a block of queries of one head. Without rows there is
// nothing to compute.
struct ScheduledTile : ColumnsOfValues<V_PARTS> {
  layout::Entry entry;
  long long head;
  long long first;  // query
  int rows;         // of queries that exist
  // For TMA: the heads of the arrays, and the tensor maps' rows of the first query and key.
  warpgroup::TmaHead q, k, v, out;
  int first_row_q, first_row_k;
  // The tiles of keys, and the first two of them that are not EMPTY, which are the last ones. Where
  // such a tile is FULL and the mask has edges, its run begins at the lowest of the FULL tiles that
  // adjoin it.
  warpgroup_tile::TileClasses classes;
  TileRef first_tile;
  int first_run;
  TileRef second_tile;
  int second_run;

  __device__ __forceinline__ int rows_in(int tile) const {
    return tile::rows_from(static_cast<long long>(tile) * BLOCK_KV, entry.len_k, BLOCK_KV);
  }
  // Whether a tile may have masked pairs, or keys beyond the last one.
  __device__ __forceinline__ bool is_masked(int tile) const {
    return warpgroup_tile::class_of(classes, tile) == PARTIAL || tile >= classes.whole;
  }
  // The tile of an index, or none if that is negative.
  __device__ __forceinline__ TileRef ref_of(int tile) const {
    return tile < 0 ? TileRef::NONE : TileRef{2 * tile + (HAS_MASK && is_masked(tile) ? 1 : 0)};
  }
  __device__ __forceinline__ int run_from(int tile) const {
    return HAS_EDGES && tile >= 0 ? warpgroup_tile::first_of_full(classes, tile) : 0;
  }
  __device__ __forceinline__ TileBox box_of(long long j0, int nj) const {
    return tile::describe_tile(entry, head, first, rows, j0, nj);
  }
  __device__ __forceinline__ TileBox box_of(int tile) const {
    return box_of(static_cast<long long>(tile) * BLOCK_KV, rows_in(tile));
  }
  // The last tile below `tile` that is not EMPTY, or -1.
  __device__ __forceinline__ int tile_before(int tile) const {
    return warpgroup_tile::tile_before(classes, tile);
  }
  __device__ __forceinline__ int last_tile() const { return tile_before(classes.tiles); }
};

// Deals the launch's work tiles to its blocks, in rounds of one tile a block.
//
// Under a mask the work tiles of a head differ in length, so heads are interleaved: a group of
// heads is dealt together, the last queries first, which may see most keys. A group is all heads;
// or where queries see ranges of keys, which are often long, as many heads as fill a few rounds, so
// that their keys and values stay in L2. Codes are half as large: if two blocks share a head's keys
// and values, memory is fast enough for them, and larger groups are dealt more evenly; not so codes
// of heads beyond 128. Every other round is dealt in reverse, and the first block is another one
// from time to time, so that the same blocks do not get long tiles again.
//
// With lists of tiles, the blocks of a head are dealt by their tiles, the longest first.
//
// Of packed arrays, and without a mask, block b has tiles b, b + gridDim.x, and so on. Where all
// keys of a row are one tile, tiles are dealt like that, too, so that heads which lie beside each
// other in memory are read at the same time. But each round begins with another block: a mask may
// differ from head to head in a pattern, and a block should not always get its longest part.
//
// Parts of a head's values are dealt like neighbouring heads, so that they find its keys in L2.
constexpr bool ROTATES = ONE_TILE && !PACKED;
constexpr unsigned int ROTATION = 5;  // blocks from the first one of a round to that of the next

struct TileScheduler {
  static constexpr bool INTERLEAVE_HEADS = HAS_MASK && !PACKED && !ONE_TILE;
  unsigned int heads, blocks;              // heads times parts
  unsigned int group_heads, group_rounds;  // of a group of heads that is dealt together
  int rounds;

  __device__ __forceinline__ explicit TileScheduler(const Params& p)
      : heads(static_cast<unsigned int>(p.heads) * V_PARTS),
        blocks(static_cast<unsigned int>(p.blocks)) {
    if constexpr (!PACKED) {
#pragma unroll
      for (int axis = 0; axis < MAX_LEAD; ++axis) {
        heads *= static_cast<unsigned int>(p.own_size[axis]);
      }
    }
    if constexpr (ONLY_LONG) {
      blocks = long_sequences::blocks(p, false, BLOCK_Q);
    }
    if constexpr (INTERLEAVE_HEADS) {
      const unsigned int few = D > 128 || blocks < 8 ? 2 : 4, half = gridDim.x / 2;
      unsigned int most = few * gridDim.x / blocks;
      if constexpr (KEY_CODES >= 0 && D <= 128) most = most > half ? most : half;
      group_heads = most >= heads || !HAS_RANGE ? heads : most > 0 ? most : 1;
      group_rounds = (group_heads * blocks + gridDim.x - 1) / gridDim.x;
      rounds = static_cast<int>((heads + group_heads - 1) / group_heads * group_rounds);
    } else {
      rounds = static_cast<int>((heads * blocks - blockIdx.x + gridDim.x - 1) / gridDim.x);
    }
  }

  // The index of the block's work tile in a round, or one beyond the last where it has none.
  __device__ __forceinline__ unsigned int tile_index(const Params& p, unsigned int round) const {
    if constexpr (INTERLEAVE_HEADS) {
      const unsigned int group = round / group_rounds, first_head = group * group_heads;
      const unsigned int heads_here =
          heads - first_head < group_heads ? heads - first_head : group_heads;
      const bool forward = (round % group_rounds + group) % 2 == 0;
      const unsigned int shift = (HAS_RANGE ? group : round / 2) * (gridDim.x * 5 / 8 | 1);
      const unsigned int shifted = (blockIdx.x + shift) % gridDim.x;
      const unsigned int position = forward ? shifted : gridDim.x - 1 - shifted;
      const unsigned int n = round % group_rounds * gridDim.x + position;
      if (n >= heads_here * blocks) return heads * blocks;
      return (first_head + n % heads_here) * blocks + n / heads_here;
    }
    if constexpr (ROTATES) {
      const unsigned int first = round * gridDim.x, rest = heads * blocks - first;
      if (blockIdx.x >= rest) return heads * blocks;
      return first + (blockIdx.x + round * ROTATION) % (rest < gridDim.x ? rest : gridDim.x);
    }
    const unsigned int n = round * gridDim.x + blockIdx.x;
    if constexpr (!HAS_MASK || ONLY_LONG) return n;
    return layout::interleave_heads(p, n, p.heads * V_PARTS, layout::heads_in_flight(p));
  }
};

// How many queries the first block of an entry has. Where queries see ranges of keys, blocks end
// with the last query, and the first one may be shorter: under a causal mask it sees the fewest
// keys. It has whole rows of warps, each of which stores its own.
__device__ __forceinline__ int rows_of_first_block(const layout::Entry& entry) {
  if constexpr (!HAS_RANGE || PACKED) return BLOCK_Q;
  const int over = static_cast<int>(entry.len_q % BLOCK_Q);
  return over == 0 ? BLOCK_Q : matmul::round_up(over, fragment::WARP_ROWS);
}

// Sets what TMA needs of a work tile's head.
__device__ __forceinline__ void set_head(const Params& p, ScheduledTile& work_smem,
                                         const layout::Entry& entry, long long head) {
  const long long h_kv = layout::divide(head, p.group).quotient;
  work_smem.q = warpgroup::TmaHead(p.q, entry, head);
  work_smem.k = warpgroup::TmaHead(p.k, entry, h_kv);
  work_smem.v = warpgroup::TmaHead(p.v, entry, h_kv);
  work_smem.out = warpgroup::TmaHead(p.out, entry, head);
}

// Finds the classes of a work tile's keys, and the first two tiles, by the lanes of a warp.
__device__ __forceinline__ void find_tiles(const Params& p, ScheduledTile& work_smem, bool idle) {
  __syncwarp();  // the work tile, but for the classes of its tiles
  warpgroup_tile::find_classes(p, work_smem.classes, idle ? 0 : work_smem.entry.len_k,
                               [&](long long j0, int nj) { return work_smem.box_of(j0, nj); });
  if (ptx::lane_index() == 0) {
    const int last = work_smem.last_tile(), second = last < 0 ? -1 : work_smem.tile_before(last);
    work_smem.first_tile = work_smem.ref_of(last);
    work_smem.first_run = work_smem.run_from(last);
    work_smem.second_tile = work_smem.ref_of(second);
    work_smem.second_run = work_smem.run_from(second);
  }
}

// Writes the work tile of a round to shared memory, by the lanes of a warp. The caller's barrier
// makes it visible.
__device__ __forceinline__ void publish_work_tile(const Params& p, const TileScheduler& scheduler,
                                                  unsigned int round, ScheduledTile& work_smem) {
  const unsigned int index = scheduler.tile_index(p, round);
  const unsigned int work_tiles = scheduler.heads * scheduler.blocks;
  const unsigned int known = index < work_tiles ? index : work_tiles - 1;
  const unsigned int head = known / scheduler.blocks;  // times parts
  unsigned int number = known;
  if constexpr (ONLY_LONG) {  // the last blocks of a head are those that are listed
    const unsigned int blocks = static_cast<unsigned int>(p.blocks);
    number = head / V_PARTS * blocks + blocks - scheduler.blocks + known % scheduler.blocks;
  } else if constexpr (V_PARTS > 1) {
    number = head / V_PARTS * scheduler.blocks + known % scheduler.blocks;
  }
  layout::WorkTile work = cache::work_tile_of<true>(p, number);
  if constexpr (HAS_LISTS) {  // the longest first; the layout deals the last block first
    work.block = tile_lists::order_of(p, work.entry.b, work.head)[p.blocks - 1 - work.block];
  }
  bool idle = work.idle || index == work_tiles;
  if constexpr (ONLY_SHORT) idle = idle || !long_sequences::is_short(p, work.entry.b);
  const int of_first = rows_of_first_block(work.entry);
  const long long first = work.block == 0 ? 0 : of_first + (work.block - 1) * BLOCK_Q;
  const int most = work.block == 0 ? of_first : BLOCK_Q;
  const int rows = idle ? 0 : tile::rows_from(first, work.entry.len_q, most);
  if (ptx::lane_index() == 0) {
    work_smem.set(head % V_PARTS);
    work_smem.entry = work.entry;
    work_smem.head = work.head;
    work_smem.first = first;
    work_smem.rows = rows;
    set_head(p, work_smem, work.entry, work.head);
    work_smem.first_row_q = static_cast<int>(work.entry.start_q + first);
    work_smem.first_row_k = static_cast<int>(work.entry.start_k);
  }
  find_tiles(p, work_smem, idle);
}

// One warp: publishes all of the block's work tiles. `shared` has the scheduler, the work tiles and
// their pipeline. `add(w)` writes what else belongs to a work tile, by all lanes.
template <class SharedStorage, class Add>
__device__ __forceinline__ void publish_work_tiles(const Params& p, SharedStorage& shared,
                                                   const Add& add) {
  TileScheduler& scheduler = shared.scheduler;
  if (ptx::lane_index() == 0) scheduler = TileScheduler(p);
  __syncwarp();  // the scheduler, which lane 0 wrote
#pragma unroll 1
  for (int w = 0; w < scheduler.rounds; ++w) {
    shared.work_pipeline.wait_empty(w);
    publish_work_tile(p, scheduler, w, shared.work_tile(w));
    add(w);
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.work_pipeline.full_barrier(w));
  }
}

}  // namespace tile_scheduler
