// What the producer warpgroup of forward_sm90_fp8.cu does in addition to the tile scheduler: it
// loads tiles and the scales of their rows, and transposes values.
#pragma once
#include "fp8_storage.cuh"
#include "warpgroup_fp8.cuh"

namespace fp8_producer {

using namespace fp8_storage;

__device__ __forceinline__ float scale_at(const Operand& scale, long long offset) {
  return reinterpret_cast<const float*>(scale.data)[offset];
}

// Where the scales of a head's keys or values are.
__device__ __forceinline__ const float* scales_of(const Operand& scale, const layout::Entry& entry,
                                                  long long head) {
  return reinterpret_cast<const float*>(scale.data) + layout::offset(scale, entry, head, true);
}

// Writes the factors of a work tile, by the lanes of a warp. They are loaded here because consumers
// would wait for memory at the begin and the end of every work tile.
__device__ __forceinline__ void publish_work_scales(const Params& p, const ScheduledTile& work,
                                                    WorkScales& scales_smem) {
  if (work.rows == 0) return;
  const long long head = layout::divide(work.head, p.group).quotient;
  float of_keys = 1;
  if constexpr (!K_SCALE_ROWS) of_keys = *scales_of(p.k_scale, work.entry, head);
  if (!V_SCALE_ROWS && ptx::lane_index() == 0) {
    scales_smem.result = *scales_of(p.v_scale, work.entry, head);
  }
  const long long begin = layout::offset(p.q_scale, work.entry, work.head, false);
#pragma unroll 2
  for (int n = ptx::lane_index(); n < BLOCK_Q; n += ptx::WARP_SIZE) {
    const int row = tile::smaller(n, work.rows - 1);
    const float of_row = scale_at(p.q_scale, begin + (work.first + row) * p.q_scale.row);
    scales_smem.logits[n] = of_row * of_keys * (HAS_SCORE ? 1.0f : static_cast<float>(p.scale));
  }
}

// One warp: publishes the work tiles and their factors.
__device__ __forceinline__ void publish_work_tiles(const Params& p, SharedStorage& shared) {
  tile_scheduler::publish_work_tiles(p, shared, [&](int w) {
    publish_work_scales(p, shared.work_tile(w), shared.work_scales[WorkPipeline::stage_of(w)]);
    __syncwarp();  // the factors
  });
}

// The units of the output and of the largest scale so far, in a work tile.
struct OutputUnit {
  int now = Unit::ONE, largest = 1;

  __device__ __forceinline__ ValueUnits advance(int unit, bool last) {
    largest = Unit::larger_of(largest, unit);
    const int least = Unit::larger_of(unit, largest - ValueUnits::SPAN);
    const int next = last ? Unit::ONE : tile::smaller(least, Unit::ONE);
    const ValueUnits units{unit, next, Unit::ratio(unit, next), Unit::ratio(now, next)};
    now = next;
    return units;
  }
};

// A lane's share of the scales of a tile's rows.
struct LaneScales {
  static constexpr int COUNT = BLOCK_KV / ptx::WARP_SIZE;
  float values[COUNT];

  // Loads those of a tile, of which `rows` exist; those beyond have the scale of the last one.
  __device__ __forceinline__ void load(const float* scales_gmem, long long stride, int tile,
                                       int rows) {
    scales_gmem += tile * (BLOCK_KV * stride);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int row = tile::smaller(n * ptx::WARP_SIZE + ptx::lane_index(), rows - 1);
      values[n] = scales_gmem[row * stride];
    }
  }

  __device__ __forceinline__ void store_k(SharedStorage& shared, int stage) const {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      shared.scales[stage].k[RowScales::place_of(n * ptx::WARP_SIZE + ptx::lane_index())] =
          values[n];
    }
  }

  // `last`: whether the tile is the last one of its work tile.
  __device__ __forceinline__ void store_v(SharedStorage& shared, int stage, OutputUnit& output,
                                          bool last) const {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) largest = Unit::larger(largest, values[n]);
#pragma unroll
    for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
      largest = fmax(largest, ptx::shuffle_xor(largest, lanes));
    }
    const int unit = Unit::exponent_of(largest);
    const float inverse = Unit::ratio(Unit::ONE, unit);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int row = RowScales::place_of(n * ptx::WARP_SIZE + ptx::lane_index());
      const float value = number::is_finite(values[n]) ? values[n] : values[n] - values[n];
      shared.scales[stage].v[row] = value;
      shared.scales[stage].v_of_tile[row] = value * inverse;
    }
    const ValueUnits units = output.advance(unit, last);
    if (ptx::lane_index() == 0) shared.v_units[stage] = units;
  }
};

// Two warps: transpose the values of every tile, and check whether those of masked tiles are
// finite.
__device__ __forceinline__ void transposer_warps(const SharedMemory& smem, int warp) {
  SharedStorage& shared = *smem.storage;
  int n = 0;
#pragma unroll 1
  for (int w = 0; shared.has_work(w); ++w) {
    shared.work_pipeline.wait_full(w);
    const ScheduledTile& work = shared.work_tile(w);
#pragma unroll 1
    for (int tile = work.last_tile(); tile >= 0; ++n, tile = work.tile_before(tile)) {
      const int stage = KvPipeline::stage_of(n);
      shared.v_pipeline.wait_full(n);
      shared.transposed_pipeline.wait_empty(n);
      const unsigned int from = smem.v.address(VPipeline::stage_of(n)),
                         to = smem.transposed.address(stage);
      const bool checks = CHECK_FINITE && (HAS_SCORE || work.is_masked(tile));
      bool found = false;
      if (checks) {
        found = warpgroup_fp8::transpose<true, BLOCK_KV, V_ROWS, TRANSPOSERS>(from, to, warp);
      } else {
        warpgroup_fp8::transpose<false, BLOCK_KV, V_ROWS, TRANSPOSERS>(from, to, warp);
      }
      warpgroup::arrive_warp(shared.v_pipeline.empty_barrier(n));
      if (checks) {
        const bool has_nonfinite = ptx::any_lane(found);
        if (ptx::lane_index() == 0) shared.has_nonfinite[stage][warp] = has_nonfinite ? 1 : 0;
      }
      ptx::fence_proxy_async();
      warpgroup::arrive_warp(shared.transposed_pipeline.full_barrier(n));
    }
    warpgroup::arrive_warp(shared.work_pipeline.empty_barrier(w));
  }
}

// A warp: one lane issues the TMA loads of every work tile, and all lanes stage the scales of rows,
// which come with the keys.
__device__ __forceinline__ void producer(const Params& p, const SharedMemory& smem,
                                         const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                         const ptx::TensorMap& v_map) {
  SharedStorage& shared = *smem.storage;
  const bool loads = ptx::lane_index() == 0;
  // Two codes are an element of a tensor map.
  constexpr int WIDTH = (D + 1) / 2, WIDTH_V = (D_V + 1) / 2;
  int n = 0, q_uses = 0;
#pragma unroll 1
  for (int w = 0; shared.has_work(w); ++w) {
    shared.work_pipeline.wait_full(w);
    const ScheduledTile& work = shared.work_tile(w);
    const int last = work.last_tile();
    const float *k_scales = nullptr, *v_scales = nullptr;
    if constexpr (SCALE_ROWS) {
      const long long head = layout::divide(work.head, p.group).quotient;
      k_scales = scales_of(p.k_scale, work.entry, head);
      v_scales = scales_of(p.v_scale, work.entry, head);
    }
    OutputUnit output_unit;
    int before = 0;
#pragma unroll 1
    for (int tile = last; tile >= 0; ++n, tile = before) {
      before = work.tile_before(tile);
      const int first_row = work.first_row_k + tile * BLOCK_KV;
      const int stage = KvPipeline::stage_of(n);
      // Loaded before the wait for the stage, which hides their latency.
      LaneScales k_scale, v_scale;
      const int rows = work.rows_in(tile);
      if constexpr (K_SCALE_ROWS) k_scale.load(k_scales, p.k_scale.row, tile, rows);
      if constexpr (V_SCALE_ROWS) v_scale.load(v_scales, p.v_scale.row, tile, rows);
      shared.k_pipeline.wait_empty(n);
      if (loads) {
        ptx::mbarrier_arrive_expect_tx(shared.k_pipeline.full_barrier(n), KTiles::BYTES);
        warpgroup::tma_load_tile<BLOCK_KV, WIDTH>(smem.k.address(stage), k_map, work.k, first_row,
                                                  shared.k_pipeline.full_barrier(n));
      }
      if constexpr (SCALE_ROWS) {
        // Until then the scales of the tile before are used.
        shared.transposed_pipeline.wait_empty(n);
        if constexpr (K_SCALE_ROWS) k_scale.store_k(shared, stage);
        if constexpr (V_SCALE_ROWS) v_scale.store_v(shared, stage, output_unit, before < 0);
        warpgroup::arrive_warp(shared.k_pipeline.full_barrier(n));
      }
      if (tile == last) {
        // 1 load q
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; ++c) {
          warpgroup::mbarrier_wait(shared.q_empty_barrier(c), q_uses % 2 ^ 1);
          if (loads) {
            ptx::mbarrier_arrive_expect_tx(shared.q_full_barrier(c), QTiles::BYTES);
            warpgroup::tma_load_tile<warpgroup::WARPGROUP_ROWS, WIDTH>(
                smem.q.address(c), q_map, work.q, work.first_row_q + c * warpgroup::WARPGROUP_ROWS,
                shared.q_full_barrier(c));
          }
        }
        ++q_uses;
      }
      shared.v_pipeline.wait_empty(n);
      if (loads) {
        ptx::mbarrier_arrive_expect_tx(shared.v_pipeline.full_barrier(n), VTiles::BYTES);
        warpgroup::tma_load_tile<BLOCK_KV, WIDTH_V>(smem.v.address(VPipeline::stage_of(n)), v_map,
                                                    work.v, first_row,
                                                    shared.v_pipeline.full_barrier(n));
      }
    }
    warpgroup::arrive_warp(shared.work_pipeline.empty_barrier(w));
  }
}

}  // namespace fp8_producer
