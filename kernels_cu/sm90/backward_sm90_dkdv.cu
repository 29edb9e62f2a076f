// Tiled attention, backward, gradients of keys and values in 16-bit types by the tensor cores of
// compute capability 9.0: the twin of `backward_dkdv` in reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2: a block of keys and values is resident, and tiles of
// queries are streamed. The sum runs over the batch entries that share the keys, the heads of the
// group and the tiles of queries, in that order. No two blocks write the same element, so the
// result does not depend on the order in which blocks run. With ATOMIC_DQ the kernel also
// multiplies dS and the keys, and adds the product to float32 sums of dq, which are 0 at first, by
// atomic additions in the order in which blocks run; backward_dq_rows.cu converts the sums. Where
// a block has all keys of a head (WHOLE_DQ), or all that a tile sees (HAS_SINGLES), it stores dq.
//
// A warp-specialised kernel. The last warpgroup of a block is the producer: one thread issues TMA
// loads, and the statistics warp brings lse and delta. The others are the two consumers, each with
// 64 of the block's keys, or where no row has more, one. kernels_cu/README.md has their barriers.
//
// Scores and dP are keys by queries, so that P and dS are left operands of the products with do and
// q as they lie in registers (FlashAttention-3: Shah et al. 2024). Only for dq does dS go through
// shared memory. Where dk and dv leave no registers for the scores of all queries of a tile, these
// are computed in two parts. The consumers of wider heads share 64 keys: P goes through shared
// memory, too, and each has half of the columns of dk, dv and dq. Where they wait for each other
// for dq alone, it is deferred: they alternate in computing it during the next tile, and one runs
// ahead.
//
// The consumer is one body: split into functions, the same steps took up to 3 % longer on an H100.
//
// Where HAS_PARTS, blocks that share keys have some heads each, and write parts of dk and dv, which
// backward_sums.cu adds up. Grid: prod(own_size) * heads_kv * blocks for each part; packed: that of
// one entry. Shared memory: see backward_storage.cuh. BLOCK_KV is 128, or 64 for wide heads or few
// keys, BLOCK_Q is 64. After the parameters come maps of q, k, v, do, dk, dv and a bias in tiles.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "backward_order.cuh"
#include "backward_results.cuh"
#include "backward_turns.cuh"
#include "ds_scale.cuh"
#include "warpgroup_dq.cuh"
#include "warpgroup_gradient.cuh"

namespace {

using backward_producer::FUSE_SCORE_EXP;
using backward_producer::STATISTICS_PROVE_FINITE;
using fragment_gradient::DsScale;
using warpgroup::make_smem_desc;
using warpgroup_dq::write_dq;
using warpgroup_gradient::ColumnShare;
using namespace backward_order;
using namespace backward_turns;

// A consumer's queries of a tile, and the scores of a thread in each of its two rows.
constexpr int QUERIES = BLOCK_Q / (SHARE_KEYS ? CONSUMERS : QUERY_PARTS), COLUMNS = QUERIES / 4;
constexpr int DQ_COLUMNS = SHARE_KEYS ? ColumnShare<D>::COLUMNS : warpgroup::SLAB_COLUMNS / 4;
constexpr int FUSED_COLUMNS = 8;  // for which a fused score mod is instantiated
static_assert(SHARE_KEYS || KEY_TILES == CONSUMERS, "BLOCK_KV");
static_assert(SHARE_KEYS || !ATOMIC_DQ || DEFER_DQ || ColumnShare<D>::SLABS <= 2, "dq");

// A warpgroup: adds up dk and dv of its keys, or its columns of them, over all tiles of queries.
__device__ __forceinline__ void consumer(const Params& p, const SharedMemory& smem,
                                         const ptx::TensorMap& dk_map,
                                         const ptx::TensorMap& dv_map) {
  SharedStorage& shared = *smem.storage;
  const int index = warpgroup::index();
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const fragment_gradient::Corner first_corner(SHARE_KEYS ? 16 * (warp % 4) : 16 * warp,
                                               SHARE_KEYS ? index * QUERIES : 0);
  const int key_tile = SHARE_KEYS ? 0 : index;
  const warpgroup::SmemDesc k = make_smem_desc(smem.k.address(key_tile), 0),
                            v = make_smem_desc(smem.v.address(key_tile), 0);
  // The same with parts: computed anew each time, it takes fewer registers.
  const auto left_desc = [](const auto& tiles, warpgroup::SmemDesc known) {
    return QUERY_PARTS == 1 ? known : tiles.desc(warpgroup::index());
  };
  const int ds_offset = warpgroup_gradient::stmatrix_offset(first_corner);
  const ColumnShare<D> k_share(index);
  const ColumnShare<D_V> v_share(index);
  float dk[2][ColumnShare<D>::COLUMNS], dv[2][ColumnShare<D_V>::COLUMNS];
  matmul::clear(dk);
  matmul::clear(dv);
  ds_scale::WarpScale warp_scale;
  const philox::DropoutKeys seed = warpgroup_dropout::dropout_keys<!DRAW_FIRST>(p);
  unsigned int tile_number = 0;  // the use of the pipelines
  unsigned long long visited = 0;

  // The product for dq must not read non-finite keys. Where dq is deferred it reads a copy without
  // them, if there is room for one; otherwise they are set to 0 for this product, and loaded again.
  unsigned int dq_keys = smem.k.address(0);
  bool has_nonfinite_keys = false;

  const auto slab_desc = [](unsigned int tile_address, int slab) {
    return make_smem_desc(tile_address + slab * SLAB_BYTES, SLAB_BYTES);
  };
  const auto ds_desc = [&](int stage) {
    return make_smem_desc(ptx::shared_address(smem.ds.stage(stage)), 0);
  };
  const auto issue_dq = [&](float (&dq)[2][DQ_COLUMNS], warpgroup::SmemDesc ds, int slab) {
    warpgroup::multiply_transposed<BLOCK_KV>(dq, ds, slab_desc(dq_keys, slab), KTiles::BYTES);
    ptx::wgmma_commit();
  };
  // Where dq is deferred: the sums to which the dq of the tile before is to be added, if there is
  // one, and the queries of that tile.
  float* deferred_gmem = nullptr;
  int deferred_rows = 0;
  // Computes slabs of the dq of the tile before, by one consumer alone or by both.
  const auto accumulate_deferred_dq = [&](int first_slab, int end_slab, bool both_consumers) {
    const unsigned int n = tile_number - 1;
    shared.ds_pipeline.wait_full(n);
    const int stage = Pipeline::stage_of(n);
    if constexpr (SCALE_BY_WARP) {
      warp_scale.common =
          ds_scale::common_scale(shared.ds_scales[stage], smem.ds.stage(stage), both_consumers);
    }
#pragma unroll 1
    for (int slab = first_slab; slab < end_slab; ++slab) {
      float dq[2][DQ_COLUMNS];
      ptx::wgmma_fence();
      issue_dq(dq, ds_desc(stage), slab);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dq);
      if constexpr (SCALE_BY_WARP) matmul::scale(dq, DsScale{warp_scale.common}.inverse());
      // dS is released before the atomic additions: the other consumer may wait for its stage.
      if (slab + 1 == end_slab && Pipeline::stage_of(n) == index) {
        warpgroup::arrive_warpgroup(shared.ds_pipeline.empty_barrier(n));
      }
      write_dq(p, dq, deferred_gmem, slab * warpgroup::SLAB_COLUMNS, 0, deferred_rows);
    }
  };

  // The same of all slabs, by both consumers: in the end, or where keys are set to 0.
  const auto finish_deferred_dq = [&] {
    constexpr int SLABS = ColumnShare<D>::SLABS, OF_FIRST = (SLABS + 1) / 2;
    if (!COPY_KEYS && has_nonfinite_keys) {
      consumers_sync();  // the keys, read for the scores of the tile before
      warpgroup_gradient::clear_nonfinite_keys(smem.k.begin);
    }
    const int end = SLABS % 2 != 0 && index != 0 ? SLABS : (index + 1) * OF_FIRST;
    accumulate_deferred_dq(index * OF_FIRST, end, true);
    if constexpr (!COPY_KEYS) deferred_gmem = nullptr;
  };

  publish_span(p, shared, 0);
  warpgroup::mbarrier_wait(shared.kv_full_barrier(), 0);
  const float c = shared.c;
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // once, and kept
  if (PACKED && shared.nj < BLOCK_KV) {
    warpgroup_gradient::clear_missing_keys(smem.k.begin, smem.v.begin, shared.nj);
  }
  if constexpr (ATOMIC_DQ && MAY_MASK) {
    has_nonfinite_keys = warpgroup_gradient::has_nonfinite_keys(smem.k.begin);
    if (COPY_KEYS && has_nonfinite_keys) {
      warpgroup_gradient::copy_finite_keys(smem.k.begin, smem.finite_k);
      dq_keys = ptx::shared_address(smem.finite_k);
    }
  }
#pragma unroll 1
  for (unsigned int n = 0; n < shared.spans; ++n) {
    publish_span(p, shared, n + 1);
    shared.span_pipeline.wait_full(n);
    const Span& span = shared.span[Pipeline::stage_of(n)];
    const HeadConstants head_constants =
        tile::head_constants_of(p, span.box_of(tile_ref(0, 0), shared.j0, shared.nj));
    // From this index on tiles miss queries. If the block misses keys, all tiles count.
    const int whole = !ONE_CONSUMER && shared.nj < BLOCK_KV ? 0 : span.whole;
    const auto step = [&](TileRef tile, int part, auto may_have_masked) {
      // Whether pairs of the tile may be masked or missing, and whether any may be masked.
      constexpr bool MAY_HAVE_MASKED = decltype(may_have_masked)::value;
      constexpr bool MASKS = MAY_MASK && MAY_HAVE_MASKED;
      // Whether the consumers vote on non-finite scores and dP, where lse and delta prove nothing.
      constexpr bool VOTE_NONFINITE = MASKS && !STATISTICS_PROVE_FINITE;
      const int stage = Pipeline::stage_of(tile_number), phase = Pipeline::phase_of(tile_number);
      const int tile_class = class_of(tile);
      const bool misses_rows = MAY_HAVE_MASKED && index_of(tile) >= whole;
      const int ni = misses_rows ? span.rows_of(tile) : BLOCK_Q;
      const bool masked = MAY_HAVE_MASKED && (tile_class == PARTIAL || misses_rows);
      const bool may_mask = CHANGES_SCORES || masked;  // a score mod masks pairs by -inf
      const bool begins = part == 0, ends = part == QUERY_PARTS - 1;
      if (begins) ++visited;
      fragment_gradient::Corner corner = first_corner;
      corner.column += part * QUERIES;
      char* const q_smem = smem.q.stage(stage);
      char* const do_smem = smem.d_out.stage(stage);
      const unsigned int q_address = smem.q.address(stage);
      const unsigned int do_address = smem.d_out.address(stage);
      // The first query, in bytes from the tile's.
      const int first_row = (SHARE_KEYS ? index : part) * QUERIES * warpgroup::SLAB_ROW_BYTES;
      const float* const lse_smem = shared.lse[stage] + corner.column;
      warpgroup_gradient::QueryStatistics<COLUMNS> lse;
      float s[2][COLUMNS], dp[2][COLUMNS];
      unsigned int weights[2][COLUMNS / 2], ds[2][COLUMNS / 2];  // P after dropout, and dS
      unsigned int mask[2];  // bit n of word r is that of pair (r, n)
      warpgroup_dropout::Kept<COLUMNS> kept{0};
      bool sees_nonfinite = false;  // in the thread's scores or dP
      const auto box = [&] { return span.box_of(tile, shared.j0, shared.nj); };
      const auto draw_dropout = [&] {
        kept = warpgroup_dropout::draw_dropout<COLUMNS>(p, seed, box(), corner);
      };
      if constexpr (HAS_DROPOUT && DRAW_FIRST) draw_dropout();
      const auto evaluate_mask = [&] {
        fragment_gradient::evaluate_mask<true, COLUMNS, fragment_tile::MASK_COLUMNS_AT_ONCE>(
            p, box(), tile_class, corner, mask);
      };
      if (MASK_FIRST && masked) evaluate_mask();
      // dP = v do^T, and meanwhile, if OVERLAP_DP_SOFTMAX, the probabilities.
      const auto issue_dp = [&] {
        constexpr int STEPS = fragment::whole_columns(D_V) / 16;
        constexpr int EACH =
            (COLUMNS + STEPS - 1) / STEPS;  // columns of scores that overlap with a step
        warpgroup::mbarrier_wait(shared.do_full_barrier(tile_number), phase);
        if constexpr (CHANGES_SCORES || OVERLAP_DP_SOFTMAX) ptx::wgmma_fence();
        const warpgroup::SmemDesc d_out = make_smem_desc(do_address + first_row, 0);
        warpgroup::multiply<D_V, BLOCK_Q>(dp, left_desc(smem.v, v), d_out, [&](int n) {
          if (!OVERLAP_DP_SOFTMAX) return;
          warpgroup_gradient::exponentiate(s, lse, c, n * EACH, (n + 1) * EACH);
        });
        ptx::wgmma_commit();
      };

      if (DEFER_DQ && !COPY_KEYS && begins && has_nonfinite_keys && deferred_gmem != nullptr) {
        finish_deferred_dq();
        warpgroup_gradient::reload_keys(p, shared, smem.k.begin);
      }

      // -- recompute P: s becomes P, and the product for dP is issued
      // 2 scores
      warpgroup::mbarrier_wait(shared.q_pipeline.full_barrier(tile_number), phase);
      if (PACKED && begins && ni < BLOCK_Q) {
        warpgroup::mbarrier_wait(shared.do_full_barrier(tile_number), phase);
        warpgroup_gradient::clear_rows<BLOCK_Q, D>(q_smem, ni);
        warpgroup_gradient::clear_rows<BLOCK_Q, D_V>(do_smem, ni);
        ptx::fence_proxy_async();
        consumers_sync();  // q and do, in which rows of the next sequence are now 0
      }
      bool has_nonfinite = false;  // q or do of a tile with masked pairs
      const auto check_finite = [&] {
        if (!STATISTICS_PROVE_FINITE || !masked || shared.needs_finite_check[stage] == 0) return;
        warpgroup::mbarrier_wait(shared.do_full_barrier(tile_number), phase);
        has_nonfinite = warpgroup_gradient::has_nonfinite_rows(q_smem, do_smem);
      };
      if constexpr (HAS_WHOLE_TILES) check_finite();
      ptx::wgmma_fence();
      warpgroup::multiply<D, BLOCK_Q>(s, left_desc(smem.k, k),
                                      make_smem_desc(q_address + first_row, 0));
      ptx::wgmma_commit();
      if constexpr (HAS_DROPOUT && !DRAW_FIRST) draw_dropout();
      if (!MASK_FIRST && MASK_BEFORE_DP && masked) evaluate_mask();
      if constexpr (!CHANGES_SCORES) {
        lse = warpgroup_gradient::QueryStatistics<COLUMNS>(lse_smem);
        if constexpr (!OVERLAP_DP_SOFTMAX) issue_dp();
      }
      if (!MASK_FIRST && !MASK_BEFORE_DP && masked) evaluate_mask();
      ptx::wgmma_wait<CHANGES_SCORES || OVERLAP_DP_SOFTMAX ? 0 : 1>();
      ptx::fence_accumulator(s);
      if (VOTE_NONFINITE && may_mask) sees_nonfinite = !warpgroup_gradient::all_finite(s);
      // 3 score mod
      // 4 mask
      // 5 probabilities and the gradient of the output's weights
      bool has_masked = masked;
      if constexpr (FUSE_SCORE_EXP) {
        unsigned int kept_of_rows[2];
        kept.split(kept_of_rows);
        const bool masks_more = fragment_gradient::recompute_modified<true, 0, FUSED_COLUMNS>(
            p, head_constants, scale, box(), masked, mask, s, corner, lse_smem, kept_of_rows,
            weights, nullptr);
        has_masked = ptx::any_lane(masks_more) || masked;
        issue_dp();
      } else {
        if constexpr (CHANGES_SCORES) {
          const bool masks_more = warpgroup_gradient::change_scores(
              p, smem.bias, stage, head_constants, scale, box(), s, corner);
          has_masked = ptx::any_lane(masks_more) || masked;
          if (has_masked) fragment_gradient::mask_infinite(s, masked, mask);
          lse = warpgroup_gradient::QueryStatistics<COLUMNS>(lse_smem);
        }
        if constexpr (OVERLAP_DP_SOFTMAX) issue_dp();
        if constexpr (!OVERLAP_DP_SOFTMAX) warpgroup_gradient::exponentiate(s, lse, c, 0, COLUMNS);
        if (has_masked) warpgroup_gradient::apply_mask(s, mask);
        if constexpr (CHANGES_SCORES) issue_dp();
      }

      // -- dS: dp becomes dS, and `weights` P in 16 bits
      if constexpr (!HAS_WHOLE_TILES) check_finite();
      const auto delta =
          warpgroup_gradient::load_delta<COLUMNS>(shared.delta[stage] + corner.column);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dp);
      if (PARTS_AT_ONCE > 1 && !begins) ptx::fence_accumulator(dv, dk);  // of the first part
      if (VOTE_NONFINITE && may_mask && !warpgroup_gradient::all_finite(dp)) sees_nonfinite = true;
      warpgroup_gradient::compute_ds<!FUSE_SCORE_EXP>(p, has_masked, s, dp, delta, kept, weights);

      // -- P and dS to shared memory, and the product for dv
      const int ds_stage = ONE_CONSUMER ? 0 : stage;
      char* const ds_smem = smem.ds.stage(ds_stage);
      const int part_offset = ds_offset ^ part * QUERIES * static_cast<int>(sizeof(storage_t));
      // P goes to stages of its own where the consumers share keys. Otherwise it takes the place of
      // dS while non-finite values are added to dv.
      char* const p_smem = ds_smem + (SHARE_KEYS ? STAGES * DsTiles::BYTES : 0);
      const auto store_p = [&] {
        warpgroup_gradient::store_words(weights, part_offset, ptx::shared_address(p_smem));
      };
      // Rounds dS to 16 bits, in float16 times the warp's scale, and stores it.
      const auto store_ds = [&] {
        if (SCALE_BY_WARP && warp_scale.is_first()) {  // for all warps alike
          warp_scale.rescale(ds_scale::largest_of_tile(shared.ds_largest[stage][part], dp), dk);
        } else if constexpr (SCALE_BY_WARP) {
          warp_scale.take_common(dk);
        }
        fragment_gradient::narrow(dp, warp_scale.factor, ds);
        if constexpr (SCALE_BY_WARP) {
          // An infinity means that dS is too large for the scale, unless dS is not finite itself.
          if (ptx::any_lane(!warpgroup_gradient::all_finite(ds))) {
            warp_scale.rescale(fragment_gradient::largest_finite(dp), dk);
            fragment_gradient::narrow(dp, warp_scale.factor, ds);
          }
          if (ptx::lane_index() == 0) {
            shared.ds_scales[stage][part * CONSUMER_WARPS + warp] = warp_scale.factor;
          }
        }
        if constexpr (STORE_DS) {
          warpgroup_gradient::store_words(ds, part_offset, ptx::shared_address(ds_smem));
        }
      };
      const auto repair_nonfinite = [&] {
        warpgroup_gradient::repair(dv, corner.row, p_smem, q_smem, do_smem, v_share.slab, part);
      };
      if constexpr (DEFER_DQ) {  // the stage's dS before has been multiplied for dq
        if (begins) {
          warpgroup::mbarrier_wait(shared.ds_pipeline.empty_barrier(tile_number), phase ^ 1);
        }
      } else if constexpr (ONE_CONSUMER && STORE_DS) {
        consumers_sync();  // the dS before, multiplied for dq by all warps
      }
      if (MASKS && !SHARE_KEYS && may_mask) {
        if constexpr (VOTE_NONFINITE) has_nonfinite = any_consumer(sees_nonfinite);
        if (has_nonfinite) {
          store_p();
          __syncwarp();  // P of the warp's keys, which its lanes wrote
          repair_nonfinite();
        }
      }
      // 6 accumulate dv and dk
      const auto issue_dk = [&] {
        warpgroup::multiply_add<QUERIES>(dk, ds, slab_desc(q_address + first_row, k_share.slab));
        ptx::wgmma_commit();
      };
      const auto issue_dv = [&] {
        ptx::wgmma_fence();
        warpgroup::multiply_add<QUERIES>(dv, weights,
                                         slab_desc(do_address + first_row, v_share.slab));
        if constexpr (DK_WITH_DV<MASKS>) issue_dk();
      };
      if constexpr (SHARE_KEYS) store_p();
      if constexpr (DV_FIRST) issue_dv();
      store_ds();
      if constexpr (!SHARE_KEYS && !DV_FIRST) issue_dv();
      if (STORE_DS && ends) ptx::fence_proxy_async();
      const bool votes = VOTE_NONFINITE && SHARE_KEYS && may_mask;
      if (votes) has_nonfinite = any_consumer(sees_nonfinite);
      if constexpr (IS_FLOAT16 && !SCALE_BY_WARP) {
        // dS is too large for the block's scale, or not finite itself.
        if (any_consumer(!warpgroup_gradient::all_finite(ds))) {
          warp_scale.rescale(ds_scale::largest_of_tile(shared.ds_largest[stage][part], dp), dk);
          store_ds();
          if constexpr (STORE_DS) ptx::fence_proxy_async();
          consumers_sync();  // dS, times its new scale
        }
      } else if constexpr (DEFER_DQ) {
        if (ends) warpgroup::arrive_warp(shared.ds_pipeline.full_barrier(tile_number));
      } else if (STORE_DS && !votes) {
        consumers_sync();  // P and dS
      }
      if (MASKS && SHARE_KEYS && has_nonfinite) repair_nonfinite();

      // -- dq, and what is left of dv and dk
      const bool clears_keys = MASKS && !DEFER_DQ && has_nonfinite_keys;
      if (clears_keys && !ONE_CONSUMER) warpgroup_gradient::clear_nonfinite_keys(smem.k.begin);
      float* const dq_gmem = span.dq_of(p, tile);
      const int dq_rows = HAS_SINGLES && span.is_single(tile) ? ni + STORES_DQ : ni;
      float dq[2][DQ_COLUMNS];
      const int dq_slab = SHARE_KEYS ? k_share.slab : ALTERNATE_DQ ? 0 : index;
      const warpgroup::SmemDesc stored_ds = ds_desc(ds_stage);
      float of_ds = warp_scale.factor;  // the scale of dS in shared memory
      if constexpr (SCALE_BY_WARP && ONE_CONSUMER) {
        of_ds = warp_scale.make_common(shared.ds_scales[stage], ds_smem, stage);
      }
      const auto add_dq = [&](int slab) {
        ptx::fence_accumulator(dq);
        if constexpr (IS_FLOAT16) matmul::scale(dq, DsScale{of_ds}.inverse());
        write_dq(p, dq, dq_gmem, slab * warpgroup::SLAB_COLUMNS, k_share.begin, dq_rows);
      };
      if constexpr (!DEFER_DQ) ptx::wgmma_fence();
      if constexpr (ATOMIC_DQ && !DQ_AFTER_DK) issue_dq(dq, stored_ds, dq_slab);
      if constexpr (SHARE_KEYS) {
        const warpgroup::SmemDesc stored_p = make_smem_desc(ptx::shared_address(p_smem), 0);
        warpgroup::multiply_add<BLOCK_Q>(dv, stored_p, slab_desc(do_address, v_share.slab));
        warpgroup::multiply_add<BLOCK_Q>(dk, stored_ds, slab_desc(q_address, k_share.slab));
        ptx::wgmma_commit();
      } else if constexpr (!DK_WITH_DV<MASKS>) {
        issue_dk();
      }
      if constexpr (DEFER_DQ) {
        if (begins && deferred_gmem != nullptr && stage != index) {
          accumulate_deferred_dq(0, ColumnShare<D>::SLABS, false);
        }
        if (ends) {
          deferred_gmem = dq_gmem;
          deferred_rows = dq_rows;
        }
      } else if constexpr (ATOMIC_DQ && ONE_CONSUMER) {
        ptx::wgmma_wait<0>();  // dq takes the registers of P and dS
        ptx::fence_accumulator(dv, dk);
        if (clears_keys) warpgroup_gradient::clear_nonfinite_keys(smem.k.begin);
#pragma unroll 1
        for (int slab = 0; slab < ColumnShare<D>::SLABS; ++slab) {
          ptx::wgmma_fence();
          issue_dq(dq, stored_ds, slab);
          ptx::wgmma_wait<0>();
          add_dq(slab);
        }
      } else if constexpr (ATOMIC_DQ && !ALTERNATE_DQ) {
        ptx::wgmma_wait<1>();
        add_dq(dq_slab);
      } else if (ATOMIC_DQ && stage == index) {
        issue_dq(dq, stored_ds, dq_slab);
        ptx::wgmma_wait<0>();
        add_dq(dq_slab);
      }
      if (PARTS_AT_ONCE > 1 && !ends) return;  // dv and dk, multiplied beside the next scores
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dv, dk);
      if (clears_keys) warpgroup_gradient::reload_keys(p, shared, smem.k.begin);
      if (ends) warpgroup::arrive_warpgroup(shared.q_pipeline.empty_barrier(tile_number));
    };
    const auto step_parts = [&](TileRef tile, auto may_have_masked) {
      if constexpr (QUERY_PARTS == 1) return step(tile, 0, may_have_masked);
#pragma unroll PARTS_AT_ONCE
      for (int part = 0; part < QUERY_PARTS; ++part) step(tile, part, may_have_masked);
    };
    FullRun full_run(span);
    int seen = span.first;  // tiles up to here have their dq
#pragma unroll 1
    for (TileRef tile = full_run.next_tile(span, span.first); tile != TileRef::NONE;
         tile = full_run.next_tile(span, index_of(tile) + 1), ++tile_number) {
      warpgroup_dq::clear_dq(p, span, seen, index_of(tile));
      if (SPLIT_FULL_TILES && lanes_agree(class_of(tile) == FULL && index_of(tile) < whole)) {
        step_parts(tile, warpgroup::Bool<false>());
      } else {
        step_parts(tile, warpgroup::Bool<true>());
      }
    }
    warpgroup_dq::clear_dq(p, span, seen, span.end);
    ptx::mbarrier_arrive(shared.span_pipeline.empty_barrier(n));
  }

  if (DEFER_DQ && deferred_gmem != nullptr) finish_deferred_dq();
  // 7 scale and store
  if constexpr (IS_FLOAT16) matmul::scale(dk, warp_scale.inverse());
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  backward_results::store_gradients(p, smem, dk_map, dv_map, dk, dv, k_share, v_share, key_tile,
                                    first_corner.row, keep_scale);
  tile::count_tiles(p, visited);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ ptx::TensorMap v_map,
                const __grid_constant__ ptx::TensorMap do_map,
                const __grid_constant__ ptx::TensorMap dk_map,
                const __grid_constant__ warpgroup::LastMaps dv_map) {
  extern __shared__ Aligned shared_smem[];
  const SharedMemory smem(shared_smem[0].x);
  // The grid before wrote delta and lists. Idle blocks wait, too: the next one waits for this.
  if constexpr (HAS_LISTS) ptx::wait_for_grids();
  const layout::WorkTile work = ONLY_LONG ? first_turn(p, *smem.storage) : work_tile(p);
  if (ONLY_SHORT && is_left(p, work)) return;
  if (work.idle) return ptx::wait_for_grids();
  if (threadIdx.x < PUBLISHERS) publish_block(p, work, *smem.storage);
  if (threadIdx.x == ptx::WARP_SIZE) smem.storage->init_barriers();
  if (threadIdx.x == CONSUMER_THREADS) {
    backward_producer::load_keys_and_values(p, work, smem, k_map, v_map);
  }
  __syncthreads();  // what publish_block wrote, and the mbarriers, initialised

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    do {
      backward_producer::produce(p, smem, q_map, do_map, dv_map.bias(), [] {
        ptx::wait_for_grids();  // the consumers, which add to dq, wait for lse and delta
        ptx::launch_dependents();
      });
    } while (takes_turn<false>(p, smem, k_map, v_map));
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGS>();
    do {
      consumer(p, smem, dk_map, dv_map.stored());
    } while (takes_turn<true>(p, smem, k_map, v_map));
  }
}
