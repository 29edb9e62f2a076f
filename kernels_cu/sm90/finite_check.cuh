// The finite check of kernels with a producer warpgroup: two of its warps look for NaN and
// infinities among the values of masked tiles, and the consumers wait for what they find.
#pragma once
#include "warpgroup.cuh"
#include "warpgroup_rows.cuh"

namespace finite_check {

// Whether sequences may end within the memory of k and v, and have no keys at all.
constexpr bool ENDS_ON_DEVICE = PACKED || CACHED;
// Keys that take no part although they are in the tile, in PARTIAL tiles and after the end of such
// a sequence, have weight 0, and their values may be anything: 0 * NaN must not reach the sum.
constexpr bool CHECK_FINITE = MAY_MASK || ENDS_ON_DEVICE;
constexpr int WARPS = CHECK_FINITE ? 2 : 0;
constexpr int ARRIVALS = WARPS * warpgroup::ARRIVALS_OF_WARP;

// A ring for the results, apart from that of v: only masked tiles are checked. A stage is free
// again when its consumers release the tile of v.
template <int STAGES>
struct Results {
  using Uses = warpgroup::Pipeline<STAGES>;
  unsigned long long finite_checked[STAGES];
  unsigned int has_nonfinite[STAGES][2];  // according to each of the two warps

  __device__ __forceinline__ unsigned int finite_checked_barrier(int check) const {
    return ptx::shared_address(&finite_checked[Uses::stage_of(check)]);
  }
  __device__ __forceinline__ void init() const {
#pragma unroll
    for (int n = 0; n < STAGES; ++n) ptx::mbarrier_init(finite_checked_barrier(n), ARRIVALS);
  }
  // Writes what one of the two warps found; called by its lanes.
  __device__ __forceinline__ void put(int check, int warp, bool finite) {
    const bool has_nonfinite_values = ptx::any_lane(!finite);
    if (ptx::lane_index() == 0) {
      has_nonfinite[Uses::stage_of(check)][warp] = has_nonfinite_values ? 1 : 0;
    }
    warpgroup::arrive_warp(finite_checked_barrier(check));
  }
  // Waits for a check. Returns whether it found NaN or infinities.
  __device__ __forceinline__ bool found_nonfinite(int check) const {
    warpgroup::mbarrier_wait(finite_checked_barrier(check), Uses::phase_of(check));
    const unsigned int (&of_warps)[2] = has_nonfinite[Uses::stage_of(check)];
    return (of_warps[0] | of_warps[1]) != 0;
  }
};

// The role of warps 2 and 3 of the producer: they check whether all values of each masked tile are
// finite, which are the BYTES from `values_of(n)` on for use n of v's pipeline.
template <int BYTES, class SharedStorage, class Values>
__device__ __forceinline__ void check_values(SharedStorage& shared, int warp,
                                             const Values& values_of) {
  const int thread = threadIdx.x % warpgroup::WARPGROUP_SIZE - 2 * ptx::WARP_SIZE;
  int n = 0, checks = 0;
#pragma unroll 1
  for (int w = 0; shared.has_work(w); ++w) {
    shared.work_pipeline.wait_full(w);
    const auto& work = shared.work_tile(w);
#pragma unroll 1
    for (int tile = work.last_tile(); tile >= 0; ++n, tile = work.tile_before(tile)) {
      shared.v_pipeline.wait_full(n);
      if (CHANGES_SCORES || work.is_masked(tile)) {
        const bool finite =
            warpgroup_rows::finite_rows<BYTES, WARPS * ptx::WARP_SIZE>(values_of(n), thread);
        shared.checks.put(checks, warp - 2, finite);
        ++checks;
      }
      warpgroup::arrive_warp(shared.v_pipeline.empty_barrier(n));
    }
    warpgroup::arrive_warp(shared.work_pipeline.empty_barrier(w));
  }
}

}  // namespace finite_check
