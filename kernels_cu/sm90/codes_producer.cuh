// What the producer warpgroup of forward_sm90_fp8.cu does in addition to the tile scheduler: it
// loads tiles, transposes values, and has the scales of rows ready.
#pragma once
#include "codes_storage.cuh"
#include "warpgroup_codes.cuh"

namespace codes_producer {

using namespace codes_storage;

__device__ __forceinline__ float scale_at(const Operand& scale, long long offset) {
  return reinterpret_cast<const float*>(scale.data)[offset];
}

// Copies the scales of a tile's rows to shared memory: those of k by the first warp, and those of v
// by the second. Rows that do not exist have those of the last one.
__device__ __forceinline__ void stage_scales(const Params& p, const ScheduledTile& work, int tile,
                                             SharedStorage& shared, int stage, int warp) {
  const long long head = layout::divide(work.head, p.group).quotient;
  const Operand& operand = warp == 0 ? p.k_scale : p.v_scale;
  const long long begin = layout::offset(operand, work.entry, head, true);
  float values[BLOCK_KV / ptx::WARP_SIZE];
  float largest = 0;
#pragma unroll
  for (int n = 0; n < BLOCK_KV / ptx::WARP_SIZE; ++n) {
    const long long key = static_cast<long long>(tile) * BLOCK_KV + n * ptx::WARP_SIZE +
                          ptx::lane_index(),
                    last = work.entry.len_k - 1;
    values[n] = scale_at(operand, begin + (key < last ? key : last) * operand.row);
    const float size = fabs(values[n]);
    if (size > largest && number::is_finite(size)) largest = size;
  }
  if (warp == 0) {
#pragma unroll
    for (int n = 0; n < BLOCK_KV / ptx::WARP_SIZE; ++n) {
      shared.scales[stage].k[n * ptx::WARP_SIZE + ptx::lane_index()] = values[n];
    }
    return;
  }
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    largest = fmax(largest, ptx::shuffle_xor(largest, lanes));
  }
  // The power of two that is not smaller, and its inverse; infinite scales become NaN.
  const unsigned int bits = __float_as_uint(largest) + 0x7fffffu;
  const unsigned int exponent = bits < 2u << 23 ? 1 : bits > 253u << 23 ? 253 : bits >> 23;
  const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
  for (int n = 0; n < BLOCK_KV / ptx::WARP_SIZE; ++n) {
    const float value = number::is_finite(values[n]) ? values[n] * inverse : values[n] - values[n];
    shared.scales[stage].v[n * ptx::WARP_SIZE + ptx::lane_index()] = value;
  }
  if (ptx::lane_index() == 0) shared.v_scale[stage] = __uint_as_float(exponent << 23);
}

// Two warps: transpose the values of every tile, and check whether those of masked tiles are
// finite.
__device__ __forceinline__ void transposer_warps(const Params& p, const SharedMemory& smem,
                                                 int warp) {
  SharedStorage& shared = *smem.storage;
  const unsigned int v_address = ptx::shared_address(smem.v);
  const unsigned int transposed_address = ptx::shared_address(smem.transposed);
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
      const unsigned int from = v_address + VPipeline::stage_of(n) * V_TILE_BYTES,
                         to = transposed_address + stage * TRANSPOSED_BYTES;
      const bool checks = CHECK_FINITE && (HAS_SCORE || work.is_masked(tile));
      bool found = false;
      if (checks) {
        found = warpgroup_codes::transpose<true, BLOCK_KV, V_ROWS, TRANSPOSERS>(from, to, warp);
      } else {
        warpgroup_codes::transpose<false, BLOCK_KV, V_ROWS, TRANSPOSERS>(from, to, warp);
      }
      warpgroup::arrive_warp(shared.v_pipeline.empty_barrier(n));
      if (warp == 0 ? K_SCALE_ROWS : V_SCALE_ROWS) stage_scales(p, work, tile, shared, stage, warp);
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

// One thread: issues the TMA loads of every work tile.
__device__ __forceinline__ void producer(const SharedMemory& smem, const ptx::TensorMap& q_map,
                                         const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  SharedStorage& shared = *smem.storage;
  const unsigned int q_address = ptx::shared_address(smem.q);
  const unsigned int k_address = ptx::shared_address(smem.k);
  const unsigned int v_address = ptx::shared_address(smem.v);
  // Two codes are an element of a tensor map.
  constexpr int WIDTH = (D + 1) / 2, WIDTH_V = (D_V + 1) / 2;
  int n = 0, q_uses = 0;
#pragma unroll 1
  for (int w = 0; shared.has_work(w); ++w) {
    shared.work_pipeline.wait_full(w);
    const ScheduledTile& work = shared.work_tile(w);
    const int last = work.last_tile();
#pragma unroll 1
    for (int tile = last; tile >= 0; ++n, tile = work.tile_before(tile)) {
      const int first_row = work.first_row_k + tile * BLOCK_KV;
      const int stage = KvPipeline::stage_of(n);
      shared.k_pipeline.wait_empty(n);
      ptx::mbarrier_arrive_expect_tx(shared.k_pipeline.full_barrier(n), K_TILE_BYTES);
      warpgroup::tma_load_tile<BLOCK_KV, WIDTH>(k_address + stage * K_TILE_BYTES, k_map, work.k,
                                                first_row, shared.k_pipeline.full_barrier(n));
      if (tile == last) {
        // 1 load q
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; ++c) {
          warpgroup::mbarrier_wait(shared.q_empty_barrier(c), q_uses % 2 ^ 1);
          ptx::mbarrier_arrive_expect_tx(shared.q_full_barrier(c), Q_TILE_BYTES);
          warpgroup::tma_load_tile<warpgroup::WARPGROUP_ROWS, WIDTH>(
              q_address + c * Q_TILE_BYTES, q_map, work.q,
              work.first_row_q + c * warpgroup::WARPGROUP_ROWS, shared.q_full_barrier(c));
        }
        ++q_uses;
      }
      shared.v_pipeline.wait_empty(n);
      ptx::mbarrier_arrive_expect_tx(shared.v_pipeline.full_barrier(n), V_TILE_BYTES);
      warpgroup::tma_load_tile<BLOCK_KV, WIDTH_V>(v_address + VPipeline::stage_of(n) * V_TILE_BYTES,
                                                  v_map, work.v, first_row,
                                                  shared.v_pipeline.full_barrier(n));
    }
    ptx::mbarrier_arrive(shared.work_pipeline.empty_barrier(w));
  }
}

}  // namespace codes_producer
