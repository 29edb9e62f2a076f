// Which work tiles blocks of backward_sm90_dkdv.cu have where others have kernels of their own:
// those of short packed sequences (ONLY_SHORT), and those of a list of the others (ONLY_LONG),
// which blocks take in turn. No bit of dk and dv depends on who takes a tile.
#pragma once
#include "../ptx/atomic.cuh"
#include "../ptx/grid.cuh"
#include "backward_producer.cuh"

namespace backward_turns {

using namespace backward_storage;

// Where ONLY_SHORT: whether the block has no work, as it has done it. Sets to 0 the dq of a short
// sequence without keys, of all heads that have this block's.
__device__ __forceinline__ bool is_left(const Params& p, const layout::WorkTile& work) {
  const bool is_short = long_sequences::is_short(p, work.entry.b);
  if (is_short && work.entry.len_k > 0) return false;
  ptx::wait_for_grids();
  if (!is_short) return true;
#pragma unroll 1
  for (long long h = work.head * p.group; h < (work.head + 1) * p.group; ++h) {
    fragment_product::clear_dq<THREADS>(
        p, p.dq.data + layout::offset(p.dq, work.entry, h, false) * fragment_product::dq_bytes(p),
        0, work.entry.len_q);
  }
  return true;
}

// Finds the work tile of turn n, which is idle if it has no keys; returns whether there is such a
// turn. All lanes of a warp call it together.
__device__ __forceinline__ bool find(const Params& p, unsigned int n, layout::WorkTile& work) {
  const long_sequences::Turns turns(p, p.heads_kv, true, BLOCK_KV);
  work = {};
  work.idle = true;
  if (n >= turns.count) return false;
  work = layout::work_tile_of<true>(p, turns.place(p, n), p.heads_kv, true, BLOCK_KV, false);
  return true;
}

// A turn that no block has taken; called by one thread. The first ones are those of the blocks.
__device__ __forceinline__ unsigned int take(const Params& p) {
  return gridDim.x + static_cast<unsigned int>(ptx::fetch_add(long_sequences::taken(p), 1));
}

// Where ONLY_LONG: the block's first work tile, idle if there is none. All threads call it.
__device__ __forceinline__ layout::WorkTile first_turn(const Params& p, SharedStorage& shared) {
  layout::WorkTile work;
  unsigned int turn = blockIdx.x;
#pragma unroll 1
  while (find(p, turn, work) && work.idle) {
    __syncthreads();  // the turn before, which all threads read
    if (threadIdx.x == 0) shared.turn = take(p);
    __syncthreads();
    turn = shared.turn;
  }
  return work;
}

// Where ONLY_LONG: goes on to the block's next work tile, when all threads are done with the last
// one. Returns whether there is one. All threads call it, those of the first warp as the one that
// FINDS it.
template <bool FINDS>
__device__ __forceinline__ bool takes_turn(const Params& p, const SharedMemory& smem,
                                           const ptx::TensorMap& k_map,
                                           const ptx::TensorMap& v_map) {
  if constexpr (!ONLY_LONG) return false;
  SharedStorage& shared = *smem.storage;
  __syncwarp();
  ptx::fence_proxy_async();  // results were staged where TMA loads the next keys
  ptx::named_barrier_sync(ALL_THREADS, THREADS);  // the last use of shared memory
  if (FINDS && threadIdx.x < ptx::WARP_SIZE) {
    layout::WorkTile work;
    unsigned int turn = 0;
    do {
      if (ptx::lane_index() == 0) turn = take(p);
      turn = ptx::shuffle(turn, 0);
    } while (find(p, turn, work) && work.idle);
    if (ptx::lane_index() == 0) {
      shared.ended = work.idle;
      if (!work.idle) {
        publish_block(p, work, shared);
        shared.end_barriers();
        shared.init_barriers();
        backward_producer::load_keys_and_values(p, work, smem, k_map, v_map);
      }
    }
    __syncwarp();
  }
  ptx::named_barrier_sync(ALL_THREADS, THREADS);  // what the first warp wrote
  return !shared.ended;
}

}  // namespace backward_turns
