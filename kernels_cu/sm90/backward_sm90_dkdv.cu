// Tiled attention, backward, gradients of keys and values in 16-bit types by the tensor cores of
// compute capability 9.0: the twin of `backward_dkdv` in reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2: a block of keys and values stays, the queries pass by.
// The sum runs over the batch entries that share the keys, the group's heads and the query blocks,
// in that order. Nothing is written by two blocks, so the result does not depend on their order.
// Where it ATOMIC_DQ, the kernel also multiplies dS and the keys, and adds the product to sums of
// dq that are float32 and 0 before, in any order of the blocks. backward_dq_rows.cu makes rows of
// them.
//
// The last warpgroup of a block copies: one thread begins to copy boxes of queries and do, and a
// warp brings lse and delta. The others compute, each with 64 of the block's keys. Scores and dP
// are keys by queries, so that P and dS lie in registers as left operands of the products with do
// and q (FlashAttention-3: Shah et al. 2024). Only for dq does dS go through shared memory. Wide
// heads' warpgroups share 64 keys: P goes there, too, and each has half of the results' columns.
// Where nothing but the product for dq makes warpgroups wait for each other, it is deferred: one of
// them multiplies a tile's dS during the next one, in turns, while the other one goes ahead.
//
// Grid: prod(own_size) * heads_kv * blocks; packed: heads_kv * blocks. Shared memory: the keys, the
// values, the stages of queries, of do, of dS and P, what a block knows. BLOCK_KV is 128, or 64 for
// wide heads, BLOCK_Q 64. Behind the parameters come the maps of q, k, v, do and, where
// TMA_STORE, dk and dv.
#include "../common/params.cuh"
#include "backward_producer.cuh"
#include "backward_storage.cuh"
#include "ds_scale.cuh"
#include "warpgroup_gradient.cuh"

namespace {

using backward_producer::FUSE_SCORE_EXP;
using backward_producer::STATISTICS_PROVE_FINITE;
using warpgroup_gradient::ColumnShare;
using namespace backward_storage;

// A consumer's queries of a tile, and the scores of a thread in each of its two rows.
constexpr int QUERIES = SHARE_KEYS ? BLOCK_Q / CONSUMERS : BLOCK_Q;
constexpr int COLUMNS = QUERIES / 4;
constexpr int DQ_COLUMNS = SHARE_KEYS ? ColumnShare<D>::COLUMNS : warpgroup::SLAB_COLUMNS / 4;
constexpr int FUSED_COLUMNS = 8;  // for which a fused score mod is instantiated
// The distance between the slabs of a tile of 64 rows.
constexpr int SLAB_BYTES = 64 * warpgroup::SLAB_ROW_BYTES;
constexpr int PRODUCER_REGS = 24, CONSUMER_REGS = 240;

// Whether each warp scales its dS in float16 by a factor of its own, after a common first one: then
// no warp waits for another one's vote.
constexpr bool SCALE_BY_WARP = IS_FLOAT16 && DEFER_DQ;
// Whether probabilities are computed between the steps of the product for dP. Wider heads are
// slower that way.
constexpr bool OVERLAP_DP_SOFTMAX = !SHARE_KEYS && !MAY_MASK && D <= 64 && D_V <= 64;
// Whether the mask is evaluated before the product for the scores is issued, or while it is
// multiplied. Which of the two is faster was measured.
constexpr bool MASK_FIRST = SHARE_KEYS || DEFER_DQ;
// Whether FULL tiles have code of their own, without masked pairs.
constexpr bool SPLIT_FULL_TILES = HAS_EDGES && !HAS_SCORE && !DEFER_DQ;
// Whether dv is issued before dS is stored. Which is faster was measured.
constexpr bool DV_FIRST = HAS_SCORE && !SHARE_KEYS;
// Whether dS goes through shared memory: for dq, or where the consumers share keys.
constexpr bool STORE_DS = ATOMIC_DQ || SHARE_KEYS;

static_assert(SHARE_KEYS || (KEY_TILES == CONSUMERS && ColumnShare<D>::SLABS <= CONSUMERS),
              "BLOCK_KV");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ ptx::TensorMap v_map,
                const __grid_constant__ ptx::TensorMap do_map,
                const __grid_constant__ ptx::TensorMap dk_map,
                const __grid_constant__ ptx::TensorMap dv_map) {
  extern __shared__ Aligned shared_smem[];
  const SharedMemory smem(shared_smem[0].x);
  SharedStorage& shared = *smem.storage;

  const layout::WorkTile work = layout::work_tile_of(p, layout::interleave_heads(p, blockIdx.x),
                                                     p.heads_kv, true, BLOCK_KV, false);
  if (work.idle) return;
  if (threadIdx.x == 0) publish_block(p, work, shared);
  if (threadIdx.x == ptx::WARP_SIZE) shared.init_barriers();
  if (threadIdx.x == CONSUMER_THREADS) {
    backward_producer::load_keys_and_values(p, work, smem, k_map, v_map);
  }
  __syncthreads();  // the block's keys and the mbarriers, initialised

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    const int warp = threadIdx.x / ptx::WARP_SIZE % 4;
    if (warp == 0 && ptx::lane_index() == 0) backward_producer::producer(smem, q_map, do_map);
    if (warp == 1) backward_producer::statistics_warp(smem);
    return;
  }

  ptx::setmaxnreg_inc<CONSUMER_REGS>();
  const int own = warpgroup::index();
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const fragment_gradient::Corner corner(SHARE_KEYS ? 16 * (warp % 4) : 16 * warp,
                                         SHARE_KEYS ? own * QUERIES : 0);
  const int key_tile = SHARE_KEYS ? 0 : own;
  const warpgroup::SmemDesc k =
      warpgroup::make_smem_desc(ptx::shared_address(smem.k) + key_tile * K_TILE_BYTES, 0);
  const warpgroup::SmemDesc v =
      warpgroup::make_smem_desc(ptx::shared_address(smem.v) + key_tile * V_TILE_BYTES, 0);
  const int ds_offset = warpgroup_gradient::stmatrix_offset(corner);
  const ColumnShare<D> k_share(own);
  const ColumnShare<D_V> v_share(own);
  float dk[2][ColumnShare<D>::COLUMNS], dv[2][ColumnShare<D_V>::COLUMNS];
  matmul::clear(dk);
  matmul::clear(dv);
  ds_scale::WarpScale warp_scale;  // of dS in 16 bits
  unsigned int tile_number = 0;
  unsigned long long visited = 0;

  // Of keys that are not finite products for dq take a finite copy, where dq is deferred; else the
  // keys are finite for a while.
  unsigned int finite_k = ptx::shared_address(smem.k);
  bool has_nonfinite_keys = false;

  const auto lines_of = [](unsigned int tile_address, int line) {
    return warpgroup::make_smem_desc(tile_address + line * SLAB_BYTES, SLAB_BYTES);
  };
  const auto describe_ds = [&](int stage) {
    return warpgroup::make_smem_desc(ptx::shared_address(smem.ds + stage * DS_TILE_BYTES), 0);
  };
  const auto begin_dq = [&](float (&dq)[2][DQ_COLUMNS], warpgroup::SmemDesc ds, int line) {
    warpgroup::multiply_transposed<BLOCK_KV>(dq, ds, lines_of(finite_k, line), K_TILE_BYTES);
    ptx::wgmma_commit();
  };
  // Where dq is deferred: the tile before, whose part of it is to be added, if there is one.
  float* deferred_gmem = nullptr;
  int deferred_rows = 0;
  const auto add_deferred = [&](int first_line, int end_line, bool together) {
    const unsigned int n = tile_number - 1;
    shared.ds_pipeline.wait_full(n);
    const int stage = Pipeline::stage_of(n);
    if constexpr (SCALE_BY_WARP) {
      warp_scale.common = ds_scale::common_scale(shared.ds_scales[stage],
                                                 smem.ds + stage * DS_TILE_BYTES, together);
    }
#pragma unroll 1
    for (int line = first_line; line < end_line; ++line) {
      float dq[2][DQ_COLUMNS];
      ptx::wgmma_fence();
      begin_dq(dq, describe_ds(stage), line);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dq);
      if constexpr (SCALE_BY_WARP)
        matmul::scale(dq, fragment_gradient::DsScale{warp_scale.common}.inverse());
      // Before sums are added: the other one may be waiting already.
      if (line + 1 == end_line && Pipeline::stage_of(n) == own)
        warpgroup::arrive_warpgroup(shared.ds_pipeline.empty_barrier(n));
      warpgroup_gradient::atomic_add_dq(dq, deferred_gmem, line * warpgroup::SLAB_COLUMNS, 0,
                                        deferred_rows);
    }
  };

  publish_span(p, shared, 0);
  warpgroup::mbarrier_wait(shared.kv_full_barrier(), 0);
  const float c = shared.c;
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // once, and kept
  if (PACKED && shared.nj < BLOCK_KV) {
    warpgroup_gradient::clear_missing_keys(smem.k, smem.v, shared.nj);
  }
  if constexpr (ATOMIC_DQ && MAY_MASK) {
    has_nonfinite_keys = warpgroup_gradient::has_nonfinite_keys(smem.k);
    if (DEFER_DQ && has_nonfinite_keys) {
      warpgroup_gradient::copy_finite_keys(smem.k, smem.finite_k);
      finite_k = ptx::shared_address(smem.finite_k);
    }
  }
#pragma unroll 1
  for (unsigned int n = 0; n < shared.spans; ++n) {
    publish_span(p, shared, n + 1);
    shared.span_pipeline.wait_full(n);
    const Span& span = shared.span[Pipeline::stage_of(n)];
    const HeadConstants given = tile::head_constants_of(p, span.box_of(0, shared.j0, shared.nj));
    // From this tile on rows are missing, or keys of all tiles.
    const int whole = shared.nj < BLOCK_KV ? 0 : span.whole;
    const auto step = [&](int tile, auto may_apply_mask) {
      constexpr bool HIDES = decltype(may_apply_mask)::value, MASKS = MAY_MASK && HIDES;
      constexpr bool VOTES = MASKS && !STATISTICS_PROVE_FINITE;
      // Whether the product with q begins before the warpgroups meet: where one has all of dq.
      constexpr bool DK_WITH_DV = (ALTERNATE_DQ && !MASKS && IS_BFLOAT16) || DEFER_DQ;
      const int stage = Pipeline::stage_of(tile_number), phase = Pipeline::phase_of(tile_number);
      const int tile_class = class_of(tile);
      const bool ends = HIDES && index_of(tile) >= whole;
      const int ni = ends ? span.rows_of(tile) : BLOCK_Q;
      const bool masked = HIDES && (tile_class == PARTIAL || ends);
      const bool may_hide = HAS_SCORE || masked;
      ++visited;
      char* const own_q_smem = smem.q + stage * Q_TILE_BYTES;
      char* const own_do_smem = smem.d_out + stage * DO_TILE_BYTES;
      const unsigned int q_stage = ptx::shared_address(smem.q) + stage * Q_TILE_BYTES;
      const unsigned int do_stage = ptx::shared_address(smem.d_out) + stage * DO_TILE_BYTES;
      const int own_rows = SHARE_KEYS ? own * QUERIES * warpgroup::SLAB_ROW_BYTES : 0;
      const float* const lse_smem = shared.lse[stage] + corner.column;
      warpgroup_gradient::QueryStatistics<COLUMNS> lse;
      float s[2][COLUMNS], dp[2][COLUMNS];
      unsigned int weights[2][COLUMNS / 2], ds[2][COLUMNS / 2], allowed[2], kept[2];
      bool nonfinite = false;
      // What is dropped is drawn first, while few registers are in use.
      const auto box = [&] { return span.box_of(tile, shared.j0, shared.nj); };
      if constexpr (HAS_DROPOUT)
        fragment_gradient::draw_dropout<true, COLUMNS>(p, box(), corner, kept);
      const auto ask = [&] {
        fragment_gradient::evaluate_mask<true, COLUMNS, fragment_tile::MASK_COLUMNS_AT_ONCE>(
            p, box(), tile_class, corner, allowed);
      };
      if (MASK_FIRST && masked) ask();
      const auto begin_dp = [&] {
        constexpr int STEPS = fragment::whole_columns(D_V) / 16;
        constexpr int EACH = (COLUMNS + STEPS - 1) / STEPS;  // columns of scores beside a step
        warpgroup::mbarrier_wait(shared.do_full_barrier(tile_number), phase);
        if constexpr (HAS_SCORE || OVERLAP_DP_SOFTMAX) ptx::wgmma_fence();
        const warpgroup::SmemDesc d_out = warpgroup::make_smem_desc(do_stage + own_rows, 0);
        warpgroup::multiply<D_V, BLOCK_Q>(dp, v, d_out, [&](int n) {
          if (!OVERLAP_DP_SOFTMAX) return;
          warpgroup_gradient::exponentiate(s, lse, c, n * EACH, (n + 1) * EACH);
        });
        ptx::wgmma_commit();
      };

      // 2 scores
      warpgroup::mbarrier_wait(shared.q_pipeline.full_barrier(tile_number), phase);
      if (PACKED && ni < BLOCK_Q) {
        warpgroup::mbarrier_wait(shared.do_full_barrier(tile_number), phase);
        warpgroup_gradient::clear_rows<BLOCK_Q, D>(own_q_smem, ni);
        warpgroup_gradient::clear_rows<BLOCK_Q, D_V>(own_do_smem, ni);
        ptx::fence_proxy_async();
        consumers_sync();  // the queries that exist, and no others
      }
      bool careful = false;  // of values that are not finite, and pairs that take no part
      const auto look = [&] {
        if (!STATISTICS_PROVE_FINITE || !masked || shared.needs_finite_check[stage] == 0) return;
        warpgroup::mbarrier_wait(shared.do_full_barrier(tile_number), phase);
        careful = warpgroup_gradient::has_nonfinite_rows(own_q_smem, own_do_smem);
      };
      if constexpr (DEFER_DQ) look();
      ptx::wgmma_fence();
      warpgroup::multiply<D, BLOCK_Q>(s, k, warpgroup::make_smem_desc(q_stage + own_rows, 0));
      ptx::wgmma_commit();
      if (!MASK_FIRST && masked) ask();
      if constexpr (!HAS_SCORE) {
        lse = warpgroup_gradient::QueryStatistics<COLUMNS>(lse_smem);
        if constexpr (!OVERLAP_DP_SOFTMAX) begin_dp();
      }
      ptx::wgmma_wait<HAS_SCORE || OVERLAP_DP_SOFTMAX ? 0 : 1>();
      ptx::fence_accumulator(s);
      if (VOTES && may_hide) nonfinite = !warpgroup_gradient::all_finite(s);
      // 3 score mod
      // 4 mask
      // 5 probabilities and the gradient of the output's weights
      bool hides = masked;
      if constexpr (FUSE_SCORE_EXP) {
        const bool hidden = fragment_gradient::recompute_modified<true, 0, FUSED_COLUMNS>(
            p, given, scale, box(), masked, allowed, s, corner, lse_smem, kept, weights, nullptr);
        hides = ptx::any_lane(hidden) || masked;
        begin_dp();
      } else {
        if constexpr (HAS_SCORE) {
          hides = ptx::any_lane(fragment_gradient::apply_score_mod<true>(p, given, scale, box(), s,
                                                                         corner)) ||
                  masked;
          if (hides) fragment_gradient::mask_infinite(s, masked, allowed);
          lse = warpgroup_gradient::QueryStatistics<COLUMNS>(lse_smem);
        }
        if constexpr (OVERLAP_DP_SOFTMAX) begin_dp();
        if constexpr (!OVERLAP_DP_SOFTMAX) warpgroup_gradient::exponentiate(s, lse, c, 0, COLUMNS);
        if (hides) warpgroup_gradient::apply_mask(s, allowed);
        if constexpr (HAS_SCORE) begin_dp();
      }
      if constexpr (!DEFER_DQ) look();
      const auto delta =
          warpgroup_gradient::load_delta<COLUMNS>(shared.delta[stage] + corner.column);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dp);
      if (VOTES && may_hide && !warpgroup_gradient::all_finite(dp)) nonfinite = true;
      warpgroup_gradient::compute_ds(p, hides, s, dp, delta, kept);
      if constexpr (!FUSE_SCORE_EXP) warpgroup_gradient::narrow_kept(s, kept, weights);
      char* const own_ds_smem = smem.ds + stage * DS_TILE_BYTES;
      // P: where warpgroups share keys, or for what is not finite in place of dS.
      char* const p_smem = own_ds_smem + (SHARE_KEYS ? STAGES * DS_TILE_BYTES : 0);
      const auto store = [&] {
        if (SCALE_BY_WARP && warp_scale.is_first()) {  // every warp's
          warp_scale.rescale(ds_scale::largest_of_tile(shared.ds_largest[stage], dp), dk);
        } else if constexpr (SCALE_BY_WARP) {
          warp_scale.take_common(dk);
        }
        fragment_gradient::narrow(dp, warp_scale.factor, ds);
        if constexpr (SCALE_BY_WARP) {  // too large for the warp's unit, or NaN
          if (ptx::any_lane(!warpgroup_gradient::all_finite(ds))) {
            warp_scale.rescale(fragment_gradient::largest_finite(dp), dk);
            fragment_gradient::narrow(dp, warp_scale.factor, ds);
          }
          if (ptx::lane_index() == 0) shared.ds_scales[stage][warp] = warp_scale.factor;
        }
        if constexpr (STORE_DS) {
          warpgroup_gradient::store_words(ds, ds_offset, ptx::shared_address(own_ds_smem));
        }
      };
      // Of do that is not finite there are products by hand, and no others; and none of queries,
      // whose dS says as much.
      const auto take_nonfinite = [&] {
        warpgroup_gradient::add_nonfinite(dv, corner.row, p_smem,
                                          own_do_smem + v_share.slab * SLAB_BYTES);
        consumers_sync();  // do, read as it came
        warpgroup_gradient::clear_nonfinite(own_q_smem, Q_TILE_BYTES);
        warpgroup_gradient::clear_nonfinite(own_do_smem, DO_TILE_BYTES);
        ptx::fence_proxy_async();
        consumers_sync();  // both, now finite
      };
      // Two tiles ago it was multiplied for dq.
      if constexpr (DEFER_DQ)
        warpgroup::mbarrier_wait(shared.ds_pipeline.empty_barrier(tile_number), phase ^ 1);
      if (MASKS && !SHARE_KEYS && may_hide) {
        if constexpr (VOTES) careful = any_consumer(nonfinite);
        if (careful) {
          warpgroup_gradient::store_words(weights, ds_offset, ptx::shared_address(p_smem));
          __syncwarp();  // the warp's keys, which its lanes wrote
          take_nonfinite();
        }
      }

      // 6 accumulate dv and dk
      const auto begin_dk = [&] {
        warpgroup::multiply_add<QUERIES>(dk, ds, lines_of(q_stage, k_share.slab));
        ptx::wgmma_commit();
      };
      const auto begin_dv = [&] {
        ptx::wgmma_fence();
        warpgroup::multiply_add<QUERIES>(dv, weights, lines_of(do_stage, v_share.slab));
        if constexpr (DK_WITH_DV) begin_dk();
      };
      if constexpr (SHARE_KEYS) {
        warpgroup_gradient::store_words(weights, ds_offset, ptx::shared_address(p_smem));
      }
      if constexpr (DV_FIRST) begin_dv();
      store();
      if constexpr (!SHARE_KEYS && !DV_FIRST) begin_dv();
      if constexpr (STORE_DS) ptx::fence_proxy_async();
      const bool votes = VOTES && SHARE_KEYS && may_hide;
      if (votes) careful = any_consumer(nonfinite);
      if constexpr (IS_FLOAT16 && !SCALE_BY_WARP) {
        if (any_consumer(
                !warpgroup_gradient::all_finite(ds))) {  // too large for their unit, or NaN
          warp_scale.rescale(ds_scale::largest_of_tile(shared.ds_largest[stage], dp), dk);
          store();
          if constexpr (STORE_DS) ptx::fence_proxy_async();
          consumers_sync();  // dS in its new unit
        }
      } else if constexpr (DEFER_DQ) {
        warpgroup::arrive_warp(shared.ds_pipeline.full_barrier(tile_number));
      } else if (STORE_DS && !votes) {
        consumers_sync();  // P and dS
      }
      if (MASKS && SHARE_KEYS && careful) take_nonfinite();
      const bool clears_keys = MASKS && !DEFER_DQ && has_nonfinite_keys;
      if (clears_keys) warpgroup_gradient::clear_nonfinite_keys(smem.k);
      float* const sum_gmem = span.dq_accum + first_query(tile) * fragment::whole_columns(D);
      float dq[2][DQ_COLUMNS];
      const int line = SHARE_KEYS ? k_share.slab : ALTERNATE_DQ ? 0 : own;
      const warpgroup::SmemDesc ds_described = describe_ds(stage);
      const auto add_dq = [&] {
        ptx::fence_accumulator(dq);
        if constexpr (IS_FLOAT16) matmul::scale(dq, warp_scale.inverse());
        warpgroup_gradient::atomic_add_dq(dq, sum_gmem, line * warpgroup::SLAB_COLUMNS,
                                          k_share.begin, ni);
      };
      if constexpr (!DEFER_DQ) ptx::wgmma_fence();
      if constexpr (ATOMIC_DQ && !ALTERNATE_DQ && !DEFER_DQ) begin_dq(dq, ds_described, line);
      if constexpr (SHARE_KEYS) {
        const warpgroup::SmemDesc p_described =
            warpgroup::make_smem_desc(ptx::shared_address(p_smem), 0);
        warpgroup::multiply_add<BLOCK_Q>(dv, p_described, lines_of(do_stage, v_share.slab));
        warpgroup::multiply_add<BLOCK_Q>(dk, ds_described, lines_of(q_stage, k_share.slab));
        ptx::wgmma_commit();
      } else if constexpr (!DK_WITH_DV) {
        begin_dk();
      }
      if constexpr (DEFER_DQ) {
        if (deferred_gmem != nullptr && stage != own) add_deferred(0, ColumnShare<D>::SLABS, false);
        deferred_gmem = sum_gmem;
        deferred_rows = ni;
      } else if constexpr (ATOMIC_DQ && !ALTERNATE_DQ) {
        ptx::wgmma_wait<1>();
        add_dq();
      } else if (ATOMIC_DQ && stage == own) {
        begin_dq(dq, ds_described, line);
        ptx::wgmma_wait<0>();
        add_dq();
      }
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dv);
      ptx::fence_accumulator(dk);
      if (clears_keys) warpgroup_gradient::reload_keys(p, shared, smem.k);
      warpgroup::arrive_warpgroup(shared.q_pipeline.empty_barrier(tile_number));
    };
    // Of FULL tiles in a row the last one: before it, what comes next is known.
    int last = HAS_MASK ? -1 : span.end - 1;
    const auto next_tile = [&](int place) {
      if ((HAS_EDGES || !HAS_MASK) && place <= last) return 4 * place + FULL;
      const int tile = span.next_tile(place);
      if (HAS_EDGES && tile != NO_TILE && class_of(tile) == FULL) {
        last = span.last_of_full(index_of(tile));
      }
      return tile;
    };
#pragma unroll 1
    for (int tile = next_tile(span.first); tile != NO_TILE;
         tile = next_tile(index_of(tile) + 1), ++tile_number) {
      if (SPLIT_FULL_TILES && class_of(tile) == FULL && index_of(tile) < whole) {
        step(tile, warpgroup::Bool<false>());
      } else {
        step(tile, warpgroup::Bool<true>());
      }
    }
    ptx::mbarrier_arrive(shared.span_pipeline.empty_barrier(n));
  }

  if (DEFER_DQ && deferred_gmem != nullptr) add_deferred(own, own + 1, true);
  // 7 scale and store
  if constexpr (IS_FLOAT16) matmul::scale(dk, warp_scale.inverse());
  const layout::Entry& entry = shared.entry;
  const int h_kv = shared.h_kv, nj = shared.nj;
  const long long j0 = shared.j0;
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  if constexpr (TMA_STORE) {
    // In place of the warp's own values, which nobody else reads, and then of its own keys; or of
    // both after they were read, where warpgroups share them.
    const long long first = j0 + key_tile * warpgroup::WARPGROUP_ROWS;
    if constexpr (SHARE_KEYS) consumers_sync();  // the keys and values
    warpgroup_gradient::tma_store_rows<D_V>(dv, v_share, keep_scale,
                                            ptx::shared_address(smem.v) + key_tile * V_TILE_BYTES,
                                            dv_map, warpgroup::TmaHead(p.dv, entry, h_kv), first);
    if constexpr (!SHARE_KEYS) consumers_sync();  // the keys
    warpgroup_gradient::tma_store_rows<D>(dk, k_share, static_cast<float>(p.scale),
                                          ptx::shared_address(smem.k) + key_tile * K_TILE_BYTES,
                                          dk_map, warpgroup::TmaHead(p.dk, entry, h_kv), first);
    if (ptx::lane_index() == 0) ptx::tma_store_wait_read();
  } else {
    const warpgroup_gradient::ResultRows<D> dk_rows(p.dk, p.kind_dk, entry, h_kv, j0, nj, smem.k);
    const warpgroup_gradient::ResultRows<D_V> dv_rows(p.dv, p.kind_dv, entry, h_kv, j0, nj, smem.v);
    consumers_sync();  // the keys and values, in whose place results go
    dk_rows.put(dk, corner.row, k_share, static_cast<float>(p.scale));
    dv_rows.put(dv, corner.row, v_share, keep_scale);
    consumers_sync();  // the results, which other threads wrote
    dk_rows.copy_out();
    dv_rows.copy_out();
  }
  tile::count_tiles(p, visited);
}
