// What a block with warpgroups works on, one block of queries after the other: the twin of
// reference/cpu/layout.py, where those who copy are told in shared memory of what comes next.
#pragma once
#include "warpgroup.cuh"
#include "warpgroup_tile.cuh"

namespace warpgroup_work {

// A block of queries of one head. Without a row of its own it has nothing to compute.
struct Job {
  layout::Entry entry;
  long long head;
  long long first;  // query
  int rows;         // of queries that exist
  // For copies: where its heads and the first rows of queries and keys are.
  warpgroup::TmaHead q, k, v, out;
  int first_q, first_k;
  warpgroup_tile::TileClasses classes;
  // The codes of its first tile and of the one after that; where one is FULL and a mask has edges,
  // the last of FULL ones in a row from there on.
  int begin, run, second, second_run;

  __device__ __forceinline__ int rows_in(int tile) const {
    return tile::rows_from(static_cast<long long>(tile) * BLOCK_KV, entry.len_k, BLOCK_KV);
  }
  // Whether a tile may have pairs that take no part, for their mask or their place.
  __device__ __forceinline__ bool is_masked(int tile) const {
    return warpgroup_tile::class_of(classes, tile) == PARTIAL || tile >= classes.whole;
  }
  // A tile's number, doubled, and 1 more where the mask may hide pairs of it; -1 for none.
  __device__ __forceinline__ int code_of(int tile) const {
    return tile < 0 ? -1 : 2 * tile + (HAS_MASK && is_masked(tile) ? 1 : 0);
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
  // The last tile before number `below` that is not EMPTY, or -1.
  __device__ __forceinline__ int tile_before(int below) const {
    return warpgroup_tile::tile_before(classes, below);
  }
  __device__ __forceinline__ int last_tile() const { return tile_before(classes.tiles); }
};

// How the blocks of a launch share its jobs: in rounds of one each. Under a mask the jobs of a head
// differ, and heads take turns: all of them; or where queries see ranges of keys, which are often
// long, so many as make a few rounds, whose keys and values find room in the second-level cache.
// Rounds go forth and back, the last queries first, which may see most keys; and now and then they
// are dealt out from another block on, lest the same blocks get long jobs again. Of a packed array,
// each block has one job.
struct Rounds {
  static constexpr bool TURNS = HAS_MASK && !PACKED;
  unsigned int heads, blocks;
  unsigned int together, each;  // heads that take turns, and in how many rounds
  int count;

  __device__ __forceinline__ explicit Rounds(const Params& p)
      : heads(static_cast<unsigned int>(p.heads)), blocks(static_cast<unsigned int>(p.blocks)) {
    if constexpr (!PACKED) {
#pragma unroll
      for (int axis = 0; axis < MAX_LEAD; ++axis) {
        heads *= static_cast<unsigned int>(p.own_size[axis]);
      }
    }
    if constexpr (TURNS) {
      const unsigned int few = D > 128 || blocks < 8 ? 2 : 4, most = few * gridDim.x / blocks;
      together = most >= heads || !HAS_RANGE ? heads : most > 0 ? most : 1;
      each = (together * blocks + gridDim.x - 1) / gridDim.x;
      count = static_cast<int>((heads + together - 1) / together * each);
    } else {
      count = static_cast<int>((heads * blocks - blockIdx.x + gridDim.x - 1) / gridDim.x);
    }
  }

  // The number of the block's job, or one beyond the last where it has none.
  __device__ __forceinline__ unsigned int number_in(const Params& p, unsigned int round) const {
    if constexpr (TURNS) {
      const unsigned int turn = round / each, first = turn * together;
      const unsigned int taking = heads - first < together ? heads - first : together;
      const bool forth = (round % each + turn) % 2 == 0;
      const unsigned int begin = (HAS_RANGE ? turn : round / 2) * (gridDim.x * 5 / 8 | 1);
      const unsigned int own = (blockIdx.x + begin) % gridDim.x;
      const unsigned int place = forth ? own : gridDim.x - 1 - own;
      const unsigned int number = round % each * gridDim.x + place;
      if (number >= taking * blocks) return heads * blocks;
      return (first + number % taking) * blocks + number / taking;
    }
    const unsigned int number = round * gridDim.x + blockIdx.x;
    return HAS_MASK ? layout::interleave_heads(p, number, p.heads, layout::heads_in_flight(p)) : number;
  }
};

// Writes what a job is, by the lanes of a warp. A barrier behind it is the caller's.
__device__ __forceinline__ void describe(const Params& p, const Rounds& rounds, unsigned int round,
                                         Job& job_smem) {
  const unsigned int number = rounds.number_in(p, round), jobs = rounds.heads * rounds.blocks;
  const layout::WorkTile work =
      layout::work_tile_of(p, number < jobs ? number : jobs - 1, p.heads, false, BLOCK_Q, true);
  const bool idle = work.idle || number == jobs;
  const long long first = work.block * BLOCK_Q;
  const int rows = idle ? 0 : tile::rows_from(first, work.entry.len_q, BLOCK_Q);
  if (ptx::lane_index() == 0) {
    job_smem.entry = work.entry;
    job_smem.head = work.head;
    job_smem.first = first;
    job_smem.rows = rows;
    const long long h_kv = layout::divide(work.head, p.group).quotient;
    job_smem.q = warpgroup::TmaHead(p.q, work.entry, work.head);
    job_smem.k = warpgroup::TmaHead(p.k, work.entry, h_kv);
    job_smem.v = warpgroup::TmaHead(p.v, work.entry, h_kv);
    job_smem.out = warpgroup::TmaHead(p.out, work.entry, work.head);
    job_smem.first_q = static_cast<int>(work.entry.start_q + first);
    job_smem.first_k = static_cast<int>(work.entry.start_k);
  }
  __syncwarp();  // what the job is, but for its tiles
  warpgroup_tile::find_classes(p, job_smem.classes, idle ? 0 : job_smem.entry.len_k,
                               [&](long long j0, int nj) { return job_smem.box_of(j0, nj); });
  if (ptx::lane_index() == 0) {
    const int last = job_smem.last_tile(), second = last < 0 ? -1 : job_smem.tile_before(last);
    job_smem.begin = job_smem.code_of(last);
    job_smem.run = job_smem.run_from(last);
    job_smem.second = job_smem.code_of(second);
    job_smem.second_run = job_smem.run_from(second);
  }
}

}  // namespace warpgroup_work
