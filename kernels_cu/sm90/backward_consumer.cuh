// The consumers of backward_sm90_dkdv.cu: what one of the two warpgroups that compute has for all
// tiles, and the step in which it recomputes the probabilities of a tile of queries, makes dS of
// them, and adds products to dk, dv and dq.
#pragma once
#include "ds_scale.cuh"
#include "warpgroup_gradient.cuh"

namespace backward_consumer {

using warpgroup_gradient::ColumnShare;
using namespace backward_pipeline;

// A consumer's queries of a tile, and the columns of scores that a thread has of them.
constexpr int QUERIES = SHARE_KEYS ? BLOCK_Q / CONSUMERS : BLOCK_Q;
constexpr int COLUMNS = QUERIES / 4;
constexpr int DQ_COLUMNS = SHARE_KEYS ? ColumnShare<D>::COLUMNS : warpgroup::SLAB_COLUMNS / 4;
constexpr int FUSED_COLUMNS = 8;  // that generated code makes into probabilities at a time
// From slab to slab of a tile of 64 rows.
constexpr int SLAB_BYTES = 64 * warpgroup::SLAB_ROW_BYTES;

// Whether each warp scales dS in float16 by a factor of its own, after the first one of all: then
// none waits to hear of another's.
constexpr bool SCALE_BY_WARP = IS_FLOAT16 && DEFER_DQ;
// Whether the softmax runs between the steps of the product for dP; slower for wider heads.
constexpr bool OVERLAP_DP_SOFTMAX = !SHARE_KEYS && !MAY_MASK && D <= 64 && D_V <= 64;
// Whether the mask is evaluated before the product for S is issued, or beside it: either measured.
constexpr bool MASK_FIRST = SHARE_KEYS || DEFER_DQ;
// Whether tiles without masked pairs have code of their own.
constexpr bool SPLIT_FULL_TILES = HAS_EDGES && !HAS_SCORE && !DEFER_DQ;
// Whether dv is issued before dS is stored: either measured.
constexpr bool DV_FIRST = HAS_SCORE && !SHARE_KEYS;
// Whether dS is stored for the other warps: for dq, or where they share keys.
constexpr bool STORE_DS = ATOMIC_DQ || SHARE_KEYS;

static_assert(IS_FLOAT16 || IS_BFLOAT16, "16-bit types");
static_assert(SHARE_KEYS || (KEY_TILES == CONSUMERS && ColumnShare<D>::SLABS <= CONSUMERS),
              "BLOCK_KV");

__device__ __forceinline__ warpgroup::SmemDesc slab_desc(unsigned int tile_address, int slab) {
  return warpgroup::make_smem_desc(tile_address + slab * SLAB_BYTES, SLAB_BYTES);
}
__device__ __forceinline__ warpgroup::SmemDesc desc_of(const char* tile_smem) {
  return warpgroup::make_smem_desc(ptx::shared_address(tile_smem), 0);
}

// -- for all tiles --------------------------------------------------------------------------------

struct Consumer {
  const Params& p;
  SharedStorage& storage;
  float (&dk)[2][ColumnShare<D>::COLUMNS];
  float (&dv)[2][ColumnShare<D_V>::COLUMNS];
  const int index, warp, key_tile;  // of the consumers, of all warps, of the tiles of 64 keys
  const fragment_gradient::Corner corner;  // the thread's first key and query of a tile
  const warpgroup::SmemDesc k, v;
  const int ds_offset;  // where the thread stores its words of P and dS
  const ColumnShare<D> k_share;
  const ColumnShare<D_V> v_share;
  const float c, scale;
  ds_scale::WarpScale warp_scale;
  unsigned int tile_number = 0;
  unsigned long long visited = 0;
  // Products for dq take finite keys: of keys that are not, a copy where dq is deferred; else the
  // keys themselves are made finite for a while.
  bool has_nonfinite_keys = false;
  unsigned int dq_keys;
  // Where dq is deferred: where that of the tile before is to be added, if there is one.
  float* deferred_gmem = nullptr;
  int deferred_rows = 0;

  __device__ __forceinline__ Consumer(const Params& p, SharedStorage& storage,
                                      float (&dk)[2][ColumnShare<D>::COLUMNS],
                                      float (&dv)[2][ColumnShare<D_V>::COLUMNS])
      : p(p),
        storage(storage),
        dk(dk),
        dv(dv),
        index(warpgroup::index()),
        warp(threadIdx.x / ptx::WARP_SIZE),
        key_tile(SHARE_KEYS ? 0 : index),
        corner(SHARE_KEYS ? 16 * (warp % 4) : 16 * warp, SHARE_KEYS ? index * QUERIES : 0),
        k(desc_of(storage.k[0] + key_tile * K_BYTES)),
        v(desc_of(storage.v + key_tile * V_BYTES)),
        ds_offset(warpgroup_gradient::stmatrix_offset(corner)),
        k_share(index),
        v_share(index),
        c(storage.c),
        scale(ptx::shuffle(static_cast<float>(p.scale), 0)),  // read once, and kept
        dq_keys(ptx::shared_address(storage.k[0])) {
    matmul::clear(dk);
    matmul::clear(dv);
  }

  // Waits for the keys and values, and makes them what the products may have.
  __device__ __forceinline__ void prepare_keys() {
    warpgroup::mbarrier_wait(ptx::shared_address(&storage.kv_full), 0);
    if (PACKED && storage.nj < BLOCK_KV) {
      warpgroup_gradient::clear_missing_keys(storage.k[0], storage.v, storage.nj);
    }
    if constexpr (ATOMIC_DQ && MAY_MASK) {
      has_nonfinite_keys = warpgroup_gradient::has_nonfinite_keys(storage.k[0]);
      if (DEFER_DQ && has_nonfinite_keys) {
        warpgroup_gradient::copy_finite_keys(storage.k[0], storage.k[1]);
        dq_keys = ptx::shared_address(storage.k[1]);
      }
    }
  }

  // Issues the product dS^T k of all keys for one slab of the columns of dq.
  __device__ __forceinline__ void issue_dq(float (&dq)[2][DQ_COLUMNS], warpgroup::SmemDesc ds,
                                           int slab) const {
    warpgroup::multiply_transposed<BLOCK_KV>(dq, ds, slab_desc(dq_keys, slab), K_BYTES);
    ptx::wgmma_commit();
  }

  // Computes some slabs of the dq of the tile before, and adds them, by one consumer; or after the
  // last tile by both, which have a slab each.
  __device__ __forceinline__ void accumulate_deferred_dq(int first_slab, int end_slab,
                                                         bool both_consumers) {
    const PipelineState state(tile_number - 1);
    storage.ds_pipeline.wait_full(state);
    char* const ds_smem = storage.ds[0][state.index];
    if constexpr (SCALE_BY_WARP) {
      warp_scale.common =
          ds_scale::common_scale(storage.ds_scales[state.index], ds_smem, both_consumers);
    }
#pragma unroll 1
    for (int slab = first_slab; slab < end_slab; ++slab) {
      float dq[2][DQ_COLUMNS];
      ptx::wgmma_fence();
      issue_dq(dq, desc_of(ds_smem), slab);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dq);
      if constexpr (SCALE_BY_WARP) {
        matmul::scale(dq, ds_scale::Scale{warp_scale.common}.inverse());
      }
      // Before the sums are added: the other consumer may be waiting for the stage already.
      if (slab + 1 == end_slab && state.index == index) {
        warpgroup::arrive_warpgroup(storage.ds_pipeline.empty_barrier(state));
      }
      warpgroup_gradient::atomic_add_dq(dq, deferred_gmem, slab * warpgroup::SLAB_COLUMNS, 0,
                                        deferred_rows);
    }
  }
};

// -- one tile -------------------------------------------------------------------------------------

// What a thread has of a tile. The arrays are the caller's: as members of a step they would keep
// its other members out of registers until loops are unrolled, and optimisations before that would
// not see their values.
struct TileRegisters {
  float (&s)[2][COLUMNS];                    // S, then P
  float (&dp)[2][COLUMNS];                   // dP, then dS
  unsigned int (&p_words)[2][COLUMNS / 2];   // P after dropout, in 16 bits
  unsigned int (&ds_words)[2][COLUMNS / 2];  // dS in 16 bits
  unsigned int (&allowed)[2];                // bits of a row's columns that the mask allows
  unsigned int (&kept)[2];                   // those that dropout keeps
  warpgroup_gradient::QueryStatistics<COLUMNS>& lse;
};

// The step of a consumer for one tile, and what it has of the tile. MAY_HIDE: whether pairs of the
// tile may take no part.
template <bool MAY_HIDE>
struct Step : TileRegisters {
  static constexpr bool MASKS = MAY_MASK && MAY_HIDE;
  // Whether scores and dP tell of values that are not finite, where lse and delta do not.
  static constexpr bool VOTES = MASKS && !STATISTICS_PROVE_FINITE;
  // Whether dk is issued with dv, before the consumers meet: where one computes all of dq.
  static constexpr bool DK_WITH_DV = (ALTERNATE_DQ && !MASKS && IS_BFLOAT16) || DEFER_DQ;

  Consumer& consumer;
  SharedStorage& storage;
  const Span& span;
  const HeadConstants& given;
  const int tile, tile_class;
  const PipelineState state;
  const int rows;       // queries that exist
  const bool masked;    // whether pairs are masked, or do not exist
  const bool may_hide;  // the same, or a changed score may be -inf
  char *const q_smem, *const do_smem, *const ds_smem;
  char* const p_smem;  // where consumers share keys; else in place of dS, for what is not finite
  const float* const lse_smem;
  bool hides;                           // whether any pair may take no part
  bool sees_nonfinite = false;          // in the thread's S or dP
  bool has_nonfinite_operands = false;  // q or do of the tile, where pairs of it may hide them

  __device__ __forceinline__ Step(Consumer& consumer, const Span& span, const HeadConstants& given,
                                  int tile, int whole, const TileRegisters& registers)
      : TileRegisters(registers),
        consumer(consumer),
        storage(consumer.storage),
        span(span),
        given(given),
        tile(tile),
        tile_class(class_of(tile)),
        state(consumer.tile_number),
        rows(MAY_HIDE && index_of(tile) >= whole ? span.rows_of(tile) : BLOCK_Q),
        masked(MAY_HIDE && (tile_class == PARTIAL || index_of(tile) >= whole)),
        may_hide(HAS_SCORE || masked),
        q_smem(storage.q[state.index]),
        do_smem(storage.d_out[state.index]),
        ds_smem(storage.ds[0][state.index]),
        p_smem(storage.ds[SHARE_KEYS ? 1 : 0][state.index]),
        lse_smem(storage.lse[state.index] + consumer.corner.column),
        hides(masked) {}

  __device__ __forceinline__ TileBox box() const {
    return span.box_of(tile, storage.j0, storage.nj);
  }

  // -- S and P

  __device__ __forceinline__ void ask_mask() {
    fragment_gradient::evaluate_mask<true, COLUMNS, fragment_tile::MASK_COLUMNS_AT_ONCE>(
        consumer.p, box(), tile_class, consumer.corner, allowed);
  }

  // In a packed array TMA loads rows of the next sequence, too.
  __device__ __forceinline__ void clear_missing_queries() {
    storage.wait_do_full(state);
    warpgroup_gradient::clear_rows<BLOCK_Q, D>(q_smem, rows);
    warpgroup_gradient::clear_rows<BLOCK_Q, D_V>(do_smem, rows);
    ptx::fence_proxy_async();
    consumers_sync();  // q and do, with 0 for queries that do not exist
  }

  // Looks at q and do of a masked tile, if lse or delta is not finite.
  __device__ __forceinline__ void check_finite() {
    if (!STATISTICS_PROVE_FINITE || !masked || storage.needs_finite_check[state.index] == 0) return;
    storage.wait_do_full(state);
    has_nonfinite_operands = warpgroup_gradient::has_nonfinite_rows(q_smem, do_smem);
  }

  // The bytes between a tile's first query and the consumer's first one.
  __device__ __forceinline__ int query_bytes() const {
    return SHARE_KEYS ? consumer.index * QUERIES * warpgroup::SLAB_ROW_BYTES : 0;
  }
  // S = k q^T
  __device__ __forceinline__ void issue_s() {
    ptx::wgmma_fence();
    warpgroup::multiply<D, BLOCK_Q>(s, consumer.k, desc_of(q_smem + query_bytes()));
    ptx::wgmma_commit();
  }
  // dP = v do^T, and beside it the softmax of S where they overlap
  __device__ __forceinline__ void issue_dp() {
    constexpr int STEPS = fragment::whole_columns(D_V) / 16;
    constexpr int EACH = (COLUMNS + STEPS - 1) / STEPS;  // columns of S beside a step
    storage.wait_do_full(state);
    if constexpr (HAS_SCORE || OVERLAP_DP_SOFTMAX) ptx::wgmma_fence();
    warpgroup::multiply<D_V, BLOCK_Q>(dp, consumer.v, desc_of(do_smem + query_bytes()), [&](int n) {
      if (!OVERLAP_DP_SOFTMAX) return;
      warpgroup_gradient::exponentiate(s, lse, consumer.c, n * EACH, (n + 1) * EACH);
    });
    ptx::wgmma_commit();
  }

  // Leaves P in place of S, and the product for dP issued.
  __device__ __forceinline__ void recompute_p() {
    const Params& p = consumer.p;
    const fragment_gradient::Corner& corner = consumer.corner;
    // What is dropped is drawn first, while few registers are in use.
    if constexpr (HAS_DROPOUT)
      fragment_gradient::draw_dropout<true, COLUMNS>(p, box(), corner, kept);
    if (MASK_FIRST && masked) ask_mask();
    // 2 scores
    storage.q_pipeline.wait_full(state);
    if (PACKED && rows < BLOCK_Q) clear_missing_queries();
    if constexpr (DEFER_DQ) check_finite();
    issue_s();
    if (!MASK_FIRST && masked) ask_mask();
    if constexpr (!HAS_SCORE) {
      lse = warpgroup_gradient::QueryStatistics<COLUMNS>(lse_smem);
      if constexpr (!OVERLAP_DP_SOFTMAX) issue_dp();
    }
    ptx::wgmma_wait<HAS_SCORE || OVERLAP_DP_SOFTMAX ? 0 : 1>();
    ptx::fence_accumulator(s);
    if (VOTES && may_hide) sees_nonfinite = !warpgroup_gradient::all_finite(s);
    // 3 score mod
    // 4 mask
    // 5 probabilities and the gradient of the output's weights
    if constexpr (FUSE_SCORE_EXP) {
      const bool hidden = fragment_gradient::recompute_modified<true, 0, FUSED_COLUMNS>(
          p, given, consumer.scale, box(), masked, allowed, s, corner, lse_smem, kept, p_words,
          nullptr);
      hides = ptx::any_lane(hidden) || masked;
      issue_dp();
    } else {
      if constexpr (HAS_SCORE) {
        hides = ptx::any_lane(fragment_gradient::apply_score_mod<true>(p, given, consumer.scale,
                                                                       box(), s, corner)) ||
                masked;
        if (hides) fragment_gradient::mask_infinite(s, masked, allowed);
        lse = warpgroup_gradient::QueryStatistics<COLUMNS>(lse_smem);
      }
      if constexpr (OVERLAP_DP_SOFTMAX) {
        issue_dp();
      } else {
        warpgroup_gradient::exponentiate(s, lse, consumer.c, 0, COLUMNS);
      }
      if (hides) warpgroup_gradient::apply_mask(s, allowed);
      if constexpr (HAS_SCORE) issue_dp();
    }
  }

  // -- dS

  // Leaves dS in place of dP, and P in 16 bits.
  __device__ __forceinline__ void compute_ds() {
    if constexpr (!DEFER_DQ) check_finite();
    const auto delta = warpgroup_gradient::load_delta<COLUMNS>(storage.delta[state.index] +
                                                               consumer.corner.column);
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(dp);
    if (VOTES && may_hide && !warpgroup_gradient::all_finite(dp)) sees_nonfinite = true;
    warpgroup_gradient::compute_ds(consumer.p, hides, s, dp, delta, kept);
    if constexpr (!FUSE_SCORE_EXP) warpgroup_gradient::narrow_kept(s, kept, p_words);
  }

  __device__ __forceinline__ void store_p() {
    warpgroup_gradient::store_words(p_words, consumer.ds_offset, ptx::shared_address(p_smem));
  }

  // Rounds dS to 16 bits, in float16 times the warp's factor, and stores it for the other warps.
  __device__ __forceinline__ void store_ds() {
    ds_scale::WarpScale& scale = consumer.warp_scale;
    if (SCALE_BY_WARP && scale.is_first()) {  // every warp's
      scale.rescale(ds_scale::largest_of_tile(storage.ds_largest[state.index], dp), consumer.dk);
    } else if constexpr (SCALE_BY_WARP) {
      scale.take_common(consumer.dk);
    }
    fragment_gradient::narrow(dp, scale.factor, ds_words);
    if constexpr (SCALE_BY_WARP) {  // too large for the warp's factor, or NaN
      if (ptx::any_lane(!warpgroup_gradient::all_finite(ds_words))) {
        scale.rescale(fragment_gradient::largest_finite(dp), consumer.dk);
        fragment_gradient::narrow(dp, scale.factor, ds_words);
      }
      if (ptx::lane_index() == 0) storage.ds_scales[state.index][consumer.warp] = scale.factor;
    }
    if constexpr (STORE_DS) {
      warpgroup_gradient::store_words(ds_words, consumer.ds_offset, ptx::shared_address(ds_smem));
    }
  }

  // Adds the products of do that is not finite to dv one by one, and replaces it by 0 for the
  // tensor cores; and q that is not finite, because its dS says as much.
  __device__ __forceinline__ void accumulate_nonfinite() {
    warpgroup_gradient::add_nonfinite(consumer.dv, consumer.corner.row, p_smem,
                                      do_smem + consumer.v_share.slab * SLAB_BYTES);
    consumers_sync();  // do, which all have read as it came
    warpgroup_gradient::clear_nonfinite(q_smem, Q_BYTES);
    warpgroup_gradient::clear_nonfinite(do_smem, DO_BYTES);
    ptx::fence_proxy_async();
    consumers_sync();  // q and do, now finite
  }

  // -- products

  __device__ __forceinline__ void issue_dk() {
    warpgroup::multiply_add<QUERIES>(consumer.dk, ds_words,
                                     slab_desc(ptx::shared_address(q_smem), consumer.k_share.slab));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void issue_dv() {
    ptx::wgmma_fence();
    warpgroup::multiply_add<QUERIES>(
        consumer.dv, p_words, slab_desc(ptx::shared_address(do_smem), consumer.v_share.slab));
    if constexpr (DK_WITH_DV) issue_dk();
  }
  // The same where consumers share keys: P and dS of all queries, from shared memory.
  __device__ __forceinline__ void issue_shared_dkdv() {
    warpgroup::multiply_add<BLOCK_Q>(
        consumer.dv, desc_of(p_smem),
        slab_desc(ptx::shared_address(do_smem), consumer.v_share.slab));
    warpgroup::multiply_add<BLOCK_Q>(consumer.dk, desc_of(ds_smem),
                                     slab_desc(ptx::shared_address(q_smem), consumer.k_share.slab));
    ptx::wgmma_commit();
  }

  // Stores P and dS for the other warps, and issues dv, which needs only the warp's own.
  __device__ __forceinline__ void publish_ds() {
    // The stage's dS of two tiles ago has been multiplied for dq.
    if constexpr (DEFER_DQ) storage.ds_pipeline.wait_empty(state);
    if (MASKS && !SHARE_KEYS && may_hide) {
      if constexpr (VOTES) has_nonfinite_operands = any_consumer(sees_nonfinite);
      if (has_nonfinite_operands) {
        store_p();
        __syncwarp();  // P of the warp's keys, which its lanes wrote
        accumulate_nonfinite();
      }
    }
    if constexpr (SHARE_KEYS) store_p();
    if constexpr (DV_FIRST) issue_dv();
    store_ds();
    if constexpr (!SHARE_KEYS && !DV_FIRST) issue_dv();
    if constexpr (STORE_DS) ptx::fence_proxy_async();
    const bool votes = VOTES && SHARE_KEYS && may_hide;
    if (votes) has_nonfinite_operands = any_consumer(sees_nonfinite);
    if constexpr (IS_FLOAT16 && !SCALE_BY_WARP) {
      // Too large for the block's factor, or NaN.
      if (any_consumer(!warpgroup_gradient::all_finite(ds_words))) {
        consumer.warp_scale.rescale(ds_scale::largest_of_tile(storage.ds_largest[state.index], dp),
                                    consumer.dk);
        store_ds();
        if constexpr (STORE_DS) ptx::fence_proxy_async();
        consumers_sync();  // dS, multiplied by its new factor
      }
    } else if constexpr (DEFER_DQ) {
      warpgroup::arrive_warp(storage.ds_pipeline.full_barrier(state));
    } else if (STORE_DS && !votes) {
      consumers_sync();  // P and dS
    }
    if (MASKS && SHARE_KEYS && has_nonfinite_operands) accumulate_nonfinite();
  }

  __device__ __forceinline__ void accumulate_dkdv() {
    if constexpr (SHARE_KEYS) {
      issue_shared_dkdv();
    } else if constexpr (!DK_WITH_DV) {
      issue_dk();
    }
  }

  // The first slab of dq that the consumer computes.
  __device__ __forceinline__ int dq_slab() const {
    return SHARE_KEYS ? consumer.k_share.slab : ALTERNATE_DQ ? 0 : consumer.index;
  }
  __device__ __forceinline__ void issue_dq(float (&dq)[2][DQ_COLUMNS]) {
    consumer.issue_dq(dq, desc_of(ds_smem), dq_slab());
  }
  __device__ __forceinline__ void add_dq(float (&dq)[2][DQ_COLUMNS], float* dq_accum_gmem) {
    ptx::fence_accumulator(dq);
    if constexpr (IS_FLOAT16) matmul::scale(dq, consumer.warp_scale.inverse());
    warpgroup_gradient::atomic_add_dq(dq, dq_accum_gmem, dq_slab() * warpgroup::SLAB_COLUMNS,
                                      consumer.k_share.begin, rows);
  }

  // Adds what was issued before dk and dv; or where consumers alternate, computes and adds all; or
  // where dq is deferred, that of the tile before, which this tile's replaces then.
  __device__ __forceinline__ void accumulate_dq(float (&dq)[2][DQ_COLUMNS]) {
    float* const dq_accum_gmem = span.dq_accum + first_query(tile) * fragment::whole_columns(D);
    if constexpr (DEFER_DQ) {
      if (consumer.deferred_gmem != nullptr && state.index != consumer.index) {
        consumer.accumulate_deferred_dq(0, ColumnShare<D>::SLABS, false);
      }
      consumer.deferred_gmem = dq_accum_gmem;
      consumer.deferred_rows = rows;
    } else if constexpr (ATOMIC_DQ && !ALTERNATE_DQ) {
      ptx::wgmma_wait<1>();
      add_dq(dq, dq_accum_gmem);
    } else if (ATOMIC_DQ && state.index == consumer.index) {
      issue_dq(dq);
      ptx::wgmma_wait<0>();
      add_dq(dq, dq_accum_gmem);
    }
  }

  __device__ __forceinline__ void run() {
    ++consumer.visited;
    recompute_p();
    compute_ds();
    // 6 accumulate dv and dk
    publish_ds();
    const bool clears_keys = MASKS && !DEFER_DQ && consumer.has_nonfinite_keys;
    if (clears_keys) warpgroup_gradient::clear_nonfinite_keys(storage.k[0]);
    float dq[2][DQ_COLUMNS];
    if constexpr (!DEFER_DQ) ptx::wgmma_fence();
    if constexpr (ATOMIC_DQ && !ALTERNATE_DQ && !DEFER_DQ) issue_dq(dq);
    accumulate_dkdv();
    accumulate_dq(dq);
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(consumer.dv);
    ptx::fence_accumulator(consumer.dk);
    if (clears_keys) warpgroup_gradient::reload_keys(consumer.p, storage, storage.k[0]);
    warpgroup::arrive_warpgroup(storage.q_pipeline.empty_barrier(state));
  }
};

template <bool MAY_HIDE>
__device__ __forceinline__ void run_step(Consumer& consumer, const Span& span,
                                         const HeadConstants& given, int tile, int whole) {
  float s[2][COLUMNS], dp[2][COLUMNS];
  unsigned int p_words[2][COLUMNS / 2], ds_words[2][COLUMNS / 2], allowed[2], kept[2];
  warpgroup_gradient::QueryStatistics<COLUMNS> lse;
  Step<MAY_HIDE> step(consumer, span, given, tile, whole,
                      {s, dp, p_words, ds_words, allowed, kept, lse});
  step.run();
}

}  // namespace backward_consumer
