// What a block with warpgroups works on, one block of queries after the other: the twin of
// reference/layout.py, where those who copy are told in shared memory of what comes next.
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
  warpgroup::Head q, k, v;
  int first_q, first_k;
  warpgroup_tile::TileClasses classes;

  __device__ __forceinline__ int rows_in(int tile) const {
    return tile::rows_from(static_cast<long long>(tile) * BLOCK_KV, entry.len_k, BLOCK_KV);
  }
  // Whether a tile may have pairs that take no part.
  __device__ __forceinline__ bool is_masked(int tile) const {
    return HAS_SCORE || warpgroup_tile::class_of(classes, tile) == PARTIAL || tile >= classes.whole;
  }
  __device__ __forceinline__ TileBox box_of(int tile) const {
    return tile::describe_tile(entry, head, first, rows, static_cast<long long>(tile) * BLOCK_KV,
                               rows_in(tile));
  }
  // The last tile before number `below` that is not EMPTY, or -1.
  __device__ __forceinline__ int tile_before(int below) const {
    return warpgroup_tile::tile_before(classes, below);
  }
  __device__ __forceinline__ int last_tile() const { return tile_before(classes.tiles); }
};

// How many jobs the blocks of a launch share.
__device__ __forceinline__ unsigned int jobs_of(const Params& p) {
  unsigned int jobs = static_cast<unsigned int>(p.blocks) * static_cast<unsigned int>(p.heads);
  if constexpr (!PACKED) {
#pragma unroll
    for (int axis = 0; axis < MAX_LEAD; ++axis) jobs *= static_cast<unsigned int>(p.own_size[axis]);
  }
  return jobs;
}

// The number of a block's job in a round: rounds go forth and back, because of the jobs that come
// one after the other the first are the longest.
__device__ __forceinline__ unsigned int number_in(int round) {
  const unsigned int place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  return static_cast<unsigned int>(round) * gridDim.x + place;
}

// Writes what a job is, by TOGETHER threads, which are whole warps; this one has number `own`. A
// barrier behind it is the caller's. Whether there is something to compute.
template <int TOGETHER>
__device__ __forceinline__ bool describe(const Params& p, Job& job_smem, unsigned int number,
                                         int own) {
  const layout::Work work =
      layout::work_of(p, HAS_MASK ? layout::taking_turns(p, number, p.heads) : number, p.heads,
                      false, BLOCK_Q, true);
  const long long first = work.block * BLOCK_Q;
  const int rows = work.idle ? 0 : tile::rows_from(first, work.entry.len_q, BLOCK_Q);
  if (own == 0) {
    job_smem.entry = work.entry;
    job_smem.head = work.head;
    job_smem.first = first;
    job_smem.rows = rows;
    const long long h_kv = layout::divide(work.head, p.group).quotient;
    job_smem.q = warpgroup::Head(p.q, work.entry, work.head);
    job_smem.k = warpgroup::Head(p.k, work.entry, h_kv);
    job_smem.v = warpgroup::Head(p.v, work.entry, h_kv);
    job_smem.first_q = static_cast<int>(work.entry.start_q + first);
    job_smem.first_k = static_cast<int>(work.entry.start_k);
  }
  warpgroup_tile::find_classes<TOGETHER>(
      p, job_smem.classes, work.idle ? 0 : work.entry.len_k, own, [&](long long j0, int nj) {
        return tile::describe_tile(work.entry, work.head, first, rows, j0, nj);
      });
  return !work.idle;
}

}  // namespace warpgroup_work
