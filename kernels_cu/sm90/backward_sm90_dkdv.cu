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
#include "warpgroup_gradient.cuh"
#include "warpgroup_unit.cuh"

namespace {

using warpgroup_gradient::OwnLines;
using warpgroup_gradient::SHARES_KEYS;
using namespace warpgroup_passing;

constexpr int CONSUMERS = CONSUMER_THREADS / warpgroup::WARPGROUP_SIZE;
constexpr int KEY_TILES = BLOCK_KV / warpgroup::WARPGROUP_ROWS;
constexpr int QUERIES =
    SHARES_KEYS ? BLOCK_Q / CONSUMERS : BLOCK_Q;  // whose scores a warpgroup has
constexpr int COLUMNS = QUERIES / 4;
constexpr int AT_ONCE = 8;  // columns of scores that generated code weighs together
constexpr int K_ROW_BYTES = fragment::row_bytes(D), V_ROW_BYTES = fragment::row_bytes(D_V);

// A tile of 64 rows has lines of 64 columns, so many bytes apart.
constexpr int SLAB_ROW_BYTES = 64 * warpgroup::SLAB_ROW_BYTES;
// Of 64 keys and their values, of a tile's queries and do, and of dS or P.
constexpr int K_BYTES = warpgroup::WARPGROUP_ROWS * K_ROW_BYTES;
constexpr int V_BYTES = warpgroup::WARPGROUP_ROWS * V_ROW_BYTES;
constexpr int Q_BYTES = BLOCK_Q * K_ROW_BYTES, DO_BYTES = BLOCK_Q * V_ROW_BYTES;
constexpr int DS_BYTES = BLOCK_KV * warpgroup::SLAB_ROW_BYTES;
// Of dq a warpgroup has its share, or a line; a single line is one's of every other tile.
constexpr bool TAKES_TURNS = !SHARES_KEYS && OwnLines<D>::LINES == 1;
// Whether a tile's dS is multiplied during the next one, by one warpgroup; slower for narrow heads.
constexpr bool DEFERS_DQ =
    ATOMIC_DQ && !SHARES_KEYS && !TAKES_TURNS && !HAS_SCORE && !(HAS_MASK && HAS_DROPOUT);
// Whether each warp has a unit of its own for dS in float16, after the first one of all: then
// nobody waits to hear of another's.
constexpr bool OWN_UNITS = STORAGE == 0 && DEFERS_DQ;
// Whether weights are made between the steps of dP's product; slower for wider heads.
constexpr bool MIXES_DP = !SHARES_KEYS && !MAY_MASK && D <= 64 && D_V <= 64;
// Whether the mask is asked before the product for scores begins, or beside it: either measured.
constexpr bool ASKS_FIRST = SHARES_KEYS || DEFERS_DQ;
// Whether tiles that hide nothing have code of their own.
constexpr bool TWO_STEPS = HAS_EDGES && !HAS_SCORE && !DEFERS_DQ;
// Where warpgroups share keys there are places of P, too; where dq may be deferred, a copy of keys.
constexpr int DS_PLACES = STAGES, P_PLACES = SHARES_KEYS ? STAGES : 0;
constexpr int FINITE_K_BYTES = SHARES_KEYS || TAKES_TURNS ? 0 : KEY_TILES * K_BYTES;
constexpr int COLUMNS_Q = SHARES_KEYS ? OwnLines<D>::COLUMNS : warpgroup::SLAB_COLUMNS / 4;

constexpr int KNOWN_BYTES = static_cast<int>(sizeof(Known));
struct alignas(1024) Swizzled {
  char x[1024];
};

static_assert(STORAGE < 2, "16-bit types");
static_assert(CONSUMERS == 2 && BLOCK_Q == 64, "THREADS, BLOCK_Q");
static_assert(!TMA_STORE || !PACKED, "TMA_STORE");
static_assert(SHARES_KEYS || (KEY_TILES == CONSUMERS && OwnLines<D>::LINES <= CONSUMERS),
              "BLOCK_KV");
static_assert(SHARED_BYTES == KEY_TILES * (K_BYTES + V_BYTES) + STAGES * (Q_BYTES + DO_BYTES) +
                                  (DS_PLACES + P_PLACES) * DS_BYTES + FINITE_K_BYTES + KNOWN_BYTES,
              "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ ptx::TensorMap v_map,
                const __grid_constant__ ptx::TensorMap do_map,
                const __grid_constant__ ptx::TensorMap dk_map,
                const __grid_constant__ ptx::TensorMap dv_map) {
  extern __shared__ Swizzled shared_smem[];
  char* const k_smem = shared_smem[0].x;
  char* const v_smem = k_smem + KEY_TILES * K_BYTES;
  char* const q_smem = v_smem + KEY_TILES * V_BYTES;
  char* const do_smem = q_smem + STAGES * Q_BYTES;
  char* const ds_smem = do_smem + STAGES * DO_BYTES;
  char* const finite_k_smem = ds_smem + (DS_PLACES + P_PLACES) * DS_BYTES;
  Known* const known_smem = reinterpret_cast<Known*>(finite_k_smem + FINITE_K_BYTES);
  const unsigned int k_address = ptx::shared_address(k_smem);
  const unsigned int v_address = ptx::shared_address(v_smem);
  const unsigned int q_address = ptx::shared_address(q_smem);
  const unsigned int do_address = ptx::shared_address(do_smem);
  const unsigned int held = ptx::shared_address(&known_smem->held);
  Passing &told = known_smem->told, &queries = known_smem->queries;
  Passing& d_scores = known_smem->d_scores;

  const layout::WorkTile work = layout::work_tile_of(p, layout::interleave_heads(p, blockIdx.x),
                                                     p.heads_kv, true, BLOCK_KV, false);
  if (work.idle) return;
  if (threadIdx.x == 0) tell_block(p, work, *known_smem);
  if (threadIdx.x == ptx::WARP_SIZE) known_smem->init_barriers();
  if (threadIdx.x == CONSUMER_THREADS) {  // by itself, as soon as may be
    ptx::mbarrier_init(held, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(held, KEY_TILES * (K_BYTES + V_BYTES));
    const warpgroup::TmaHead k(p.k, work.entry, work.head), v(p.v, work.entry, work.head);
    const long long first = work.entry.start_k + work.block * BLOCK_KV;
    warpgroup_gradient::begin_keys<D>(k_address, k_map, k, first, held);
    warpgroup_gradient::begin_keys<D_V>(v_address, v_map, v, first, held);
  }
  __syncthreads();  // what is known, and the barriers

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<24>();
    const int warp = threadIdx.x / ptx::WARP_SIZE % 4;
    if (warp == 0 && ptx::lane_index() == 0) {
      each_tile(*known_smem, [&](const Span& span, int tile, unsigned int n) {
        const long long first = span.entry.start_q + first_of(tile);
        const int stage = stage_of(n);
        wait_for_place(*known_smem, n);
        ptx::mbarrier_arrive_expect_tx(full(queries, n), Q_BYTES);
        warpgroup::tma_load_tile<BLOCK_Q, D>(q_address + stage * Q_BYTES, q_map, span.q, first,
                                             full(queries, n));
        ptx::mbarrier_arrive_expect_tx(full_d_out(*known_smem, n), DO_BYTES);
        warpgroup::tma_load_tile<BLOCK_Q, D_V>(do_address + stage * DO_BYTES, do_map, span.d_out,
                                               first, full_d_out(*known_smem, n));
      });
    }
    if (warp == 1) bring_numbers(*known_smem);
    return;
  }

  ptx::setmaxnreg_inc<240>();
  const int own = warpgroup::index();
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const fragment_gradient::Corner corner(SHARES_KEYS ? 16 * (warp % 4) : 16 * warp,
                                         SHARES_KEYS ? own * QUERIES : 0);
  const int key_tile = SHARES_KEYS ? 0 : own;
  const warpgroup::SmemDesc k = warpgroup::make_smem_desc(k_address + key_tile * K_BYTES, 0);
  const warpgroup::SmemDesc v = warpgroup::make_smem_desc(v_address + key_tile * V_BYTES, 0);
  const int words_at = warpgroup_gradient::place_of_words(corner);
  const OwnLines<D> share_k(own);
  const OwnLines<D_V> share_v(own);
  float dk[2][OwnLines<D>::COLUMNS], dv[2][OwnLines<D_V>::COLUMNS];
  matmul::clear(dk);
  matmul::clear(dv);
  warpgroup_unit::WarpUnit unit;  // of dS in 16 bits
  unsigned int tile_number = 0;
  unsigned long long visited = 0;

  // Of keys that are not finite products for dq take a finite copy, where dq is deferred; else the
  // keys are finite for a while.
  unsigned int finite_k = k_address;
  bool spoilt_keys = false;

  const auto lines_of = [](unsigned int tile_address, int line) {
    return warpgroup::make_smem_desc(tile_address + line * SLAB_ROW_BYTES, SLAB_ROW_BYTES);
  };
  const auto describe_ds = [&](int stage) {
    return warpgroup::make_smem_desc(ptx::shared_address(ds_smem + stage * DS_BYTES), 0);
  };
  const auto begin_dq = [&](float (&dq)[2][COLUMNS_Q], warpgroup::SmemDesc ds, int line) {
    warpgroup::multiply_transposed<BLOCK_KV>(dq, ds, lines_of(finite_k, line), K_BYTES);
    ptx::wgmma_commit();
  };
  // Where dq is deferred: the tile before, whose part of it is to be added, if there is one.
  float* deferred_gmem = nullptr;
  int deferred_rows = 0;
  const auto add_deferred = [&](int first_line, int end_line, bool together) {
    const unsigned int n = tile_number - 1;
    warpgroup::mbarrier_wait(full(d_scores, n), parity_of(n));
    const int stage = stage_of(n);
    if constexpr (OWN_UNITS) {
      unit.agreed =
          warpgroup_unit::unify(known_smem->factors[stage], ds_smem + stage * DS_BYTES, together);
    }
#pragma unroll 1
    for (int line = first_line; line < end_line; ++line) {
      float dq[2][COLUMNS_Q];
      ptx::wgmma_fence();
      begin_dq(dq, describe_ds(stage), line);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dq);
      if constexpr (OWN_UNITS) matmul::scale(dq, fragment_gradient::DsScale{unit.agreed}.inverse());
      // Before sums are added: the other one may be waiting already.
      if (line + 1 == end_line && stage_of(n) == own)
        warpgroup::arrive_warpgroup(empty(d_scores, n));
      warpgroup_gradient::add_rows(dq, deferred_gmem, line * warpgroup::SLAB_COLUMNS, 0,
                                   deferred_rows);
    }
  };

  tell(p, *known_smem, 0);
  warpgroup::mbarrier_wait(held, 0);
  const float c = known_smem->c;
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // once, and kept
  if (PACKED && known_smem->nj < BLOCK_KV) {
    warpgroup_gradient::clear_missing_keys(k_smem, v_smem, known_smem->nj);
  }
  if constexpr (ATOMIC_DQ && MAY_MASK) {
    spoilt_keys = warpgroup_gradient::are_keys_spoilt(k_smem);
    if (DEFERS_DQ && spoilt_keys) {
      warpgroup_gradient::copy_finite_keys(k_smem, finite_k_smem);
      finite_k = ptx::shared_address(finite_k_smem);
    }
  }
#pragma unroll 1
  for (unsigned int n = 0; n < known_smem->spans; ++n) {
    tell(p, *known_smem, n + 1);
    warpgroup::mbarrier_wait(full(told, n), parity_of(n));
    const Span& span = known_smem->span[stage_of(n)];
    const HeadConstants given =
        tile::head_constants_of(p, span.box_of(0, known_smem->j0, known_smem->nj));
    // From this tile on rows are missing, or keys of all tiles.
    const int whole = known_smem->nj < BLOCK_KV ? 0 : span.whole;
    const auto step = [&](int tile, auto may_hide_pairs) {
      constexpr bool HIDES = decltype(may_hide_pairs)::value, MASKS = MAY_MASK && HIDES;
      constexpr bool VOTES = MASKS && !NUMBERS_TELL;
      // Whether dv begins before dS is stored: either measured.
      constexpr bool DV_FIRST = HAS_SCORE && !SHARES_KEYS;
      // Whether the product with q begins before the warpgroups meet: where one has all of dq.
      constexpr bool BEGINS_DK = (TAKES_TURNS && !MASKS && STORAGE == 1) || DEFERS_DQ;
      const int stage = stage_of(tile_number), parity = parity_of(tile_number);
      const int tile_class = class_of(tile);
      const bool ends = HIDES && place_of(tile) >= whole;
      const int ni = ends ? span.rows_of(tile) : BLOCK_Q;
      const bool masked = HIDES && (tile_class == PARTIAL || ends);
      const bool may_hide = HAS_SCORE || masked;
      ++visited;
      char* const own_q_smem = q_smem + stage * Q_BYTES;
      char* const own_do_smem = do_smem + stage * DO_BYTES;
      const unsigned int q_stage = q_address + stage * Q_BYTES;
      const unsigned int do_stage = do_address + stage * DO_BYTES;
      const int own_rows = SHARES_KEYS ? own * QUERIES * warpgroup::SLAB_ROW_BYTES : 0;
      const float* const lse_smem = known_smem->lse[stage] + corner.column;
      warpgroup_gradient::Numbers<COLUMNS> lse;
      float s[2][COLUMNS], dp[2][COLUMNS];
      unsigned int weights[2][COLUMNS / 2], ds[2][COLUMNS / 2], allowed[2], kept[2];
      bool nonfinite = false;
      // What is dropped is drawn first, while few registers are in use.
      const auto box = [&] { return span.box_of(tile, known_smem->j0, known_smem->nj); };
      if constexpr (HAS_DROPOUT)
        fragment_gradient::draw_dropout<true, COLUMNS>(p, box(), corner, kept);
      const auto ask = [&] {
        fragment_gradient::evaluate_mask<true, COLUMNS, fragment_tile::MASK_COLUMNS_AT_ONCE>(
            p, box(), tile_class, corner, allowed);
      };
      if (ASKS_FIRST && masked) ask();
      const auto begin_dp = [&] {
        constexpr int STEPS = fragment::whole_columns(D_V) / 16;
        constexpr int EACH = (COLUMNS + STEPS - 1) / STEPS;  // columns of scores beside a step
        warpgroup::mbarrier_wait(full_d_out(*known_smem, stage), parity);
        if constexpr (HAS_SCORE || MIXES_DP) ptx::wgmma_fence();
        const warpgroup::SmemDesc d_out = warpgroup::make_smem_desc(do_stage + own_rows, 0);
        warpgroup::multiply<D_V, BLOCK_Q>(dp, v, d_out, [&](int n) {
          if (!MIXES_DP) return;
          warpgroup_gradient::exponentiate(s, lse, c, n * EACH, (n + 1) * EACH);
        });
        ptx::wgmma_commit();
      };

      // 2 scores
      warpgroup::mbarrier_wait(full(queries, stage), parity);
      if (PACKED && ni < BLOCK_Q) {
        warpgroup::mbarrier_wait(full_d_out(*known_smem, stage), parity);
        warpgroup_gradient::clear_rows<BLOCK_Q, D>(own_q_smem, ni);
        warpgroup_gradient::clear_rows<BLOCK_Q, D_V>(own_do_smem, ni);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(TOGETHER,
                                CONSUMER_THREADS);  // the queries that exist, and no others
      }
      bool careful = false;  // of values that are not finite, and pairs that take no part
      const auto look = [&] {
        if (!NUMBERS_TELL || !masked || known_smem->doubtful[stage] == 0) return;
        warpgroup::mbarrier_wait(full_d_out(*known_smem, stage), parity);
        careful = warpgroup_gradient::is_spoilt(own_q_smem, own_do_smem);
      };
      if constexpr (DEFERS_DQ) look();
      ptx::wgmma_fence();
      warpgroup::multiply<D, BLOCK_Q>(s, k, warpgroup::make_smem_desc(q_stage + own_rows, 0));
      ptx::wgmma_commit();
      if (!ASKS_FIRST && masked) ask();
      if constexpr (!HAS_SCORE) {
        lse = warpgroup_gradient::Numbers<COLUMNS>(lse_smem);
        if constexpr (!MIXES_DP) begin_dp();
      }
      ptx::wgmma_wait<HAS_SCORE || MIXES_DP ? 0 : 1>();
      ptx::fence_accumulator(s);
      if (VOTES && may_hide) nonfinite = !warpgroup_gradient::all_finite(s);
      // 3 score mod
      // 4 mask
      // 5 probabilities and the gradient of the output's weights
      bool hides = masked;
      if constexpr (WEIGHS_AT_ONCE) {
        const bool hidden = fragment_gradient::recompute_modified<true, 0, AT_ONCE>(
            p, given, scale, box(), masked, allowed, s, corner, lse_smem, kept, weights, nullptr);
        hides = ptx::any_lane(hidden) || masked;
        begin_dp();
      } else {
        if constexpr (HAS_SCORE) {
          hides = ptx::any_lane(fragment_gradient::apply_score_mod<true>(p, given, scale, box(), s,
                                                                         corner)) ||
                  masked;
          if (hides) fragment_gradient::mask_infinite(s, masked, allowed);
          lse = warpgroup_gradient::Numbers<COLUMNS>(lse_smem);
        }
        if constexpr (MIXES_DP) begin_dp();
        if constexpr (!MIXES_DP) warpgroup_gradient::exponentiate(s, lse, c, 0, COLUMNS);
        if (hides) warpgroup_gradient::hide_pairs(s, allowed);
        if constexpr (HAS_SCORE) begin_dp();
      }
      if constexpr (!DEFERS_DQ) look();
      const auto delta =
          warpgroup_gradient::delta_from<COLUMNS>(known_smem->delta[stage] + corner.column);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(dp);
      if (VOTES && may_hide && !warpgroup_gradient::all_finite(dp)) nonfinite = true;
      warpgroup_gradient::score_gradients(p, hides, s, dp, delta, kept);
      if constexpr (!WEIGHS_AT_ONCE) warpgroup_gradient::narrow_kept(s, kept, weights);
      char* const own_ds_smem = ds_smem + stage * DS_BYTES;
      // P: where warpgroups share keys, or for what is not finite in place of dS.
      char* const p_smem = own_ds_smem + (SHARES_KEYS ? DS_PLACES * DS_BYTES : 0);
      constexpr bool STORES_DS = ATOMIC_DQ || SHARES_KEYS;
      const auto store = [&] {
        if (OWN_UNITS && unit.is_first()) {  // every warp's
          unit.rescale(warpgroup_unit::largest_of_tile(known_smem->largest[stage], dp), dk);
        } else if constexpr (OWN_UNITS) {
          unit.agree(dk);
        }
        fragment_gradient::narrow(dp, unit.factor, ds);
        if constexpr (OWN_UNITS) {  // too large for the warp's unit, or NaN
          if (ptx::any_lane(!warpgroup_gradient::all_finite(ds))) {
            unit.rescale(fragment_gradient::largest_finite(dp), dk);
            fragment_gradient::narrow(dp, unit.factor, ds);
          }
          if (ptx::lane_index() == 0) known_smem->factors[stage][warp] = unit.factor;
        }
        if constexpr (STORES_DS) {
          warpgroup_gradient::store_words(ds, words_at, ptx::shared_address(own_ds_smem));
        }
      };
      // Of do that is not finite there are products by hand, and no others; and none of queries,
      // whose dS says as much.
      const auto take_nonfinite = [&] {
        warpgroup_gradient::add_nonfinite(dv, corner.row, p_smem,
                                          own_do_smem + share_v.line * SLAB_ROW_BYTES);
        ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // do, read as it came
        warpgroup_gradient::clear_nonfinite(own_q_smem, Q_BYTES);
        warpgroup_gradient::clear_nonfinite(own_do_smem, DO_BYTES);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // both, now finite
      };
      // Two tiles ago it was multiplied for dq.
      if constexpr (DEFERS_DQ) warpgroup::mbarrier_wait(empty(d_scores, tile_number), parity ^ 1);
      if (MASKS && !SHARES_KEYS && may_hide) {
        if constexpr (VOTES) careful = any_thread(nonfinite);
        if (careful) {
          warpgroup_gradient::store_words(weights, words_at, ptx::shared_address(p_smem));
          __syncwarp();  // the warp's keys, which its lanes wrote
          take_nonfinite();
        }
      }

      // 6 accumulate dv and dk
      const auto begin_dk = [&] {
        warpgroup::multiply_add<QUERIES>(dk, ds, lines_of(q_stage, share_k.line));
        ptx::wgmma_commit();
      };
      const auto begin_dv = [&] {
        ptx::wgmma_fence();
        warpgroup::multiply_add<QUERIES>(dv, weights, lines_of(do_stage, share_v.line));
        if constexpr (BEGINS_DK) begin_dk();
      };
      if constexpr (SHARES_KEYS) {
        warpgroup_gradient::store_words(weights, words_at, ptx::shared_address(p_smem));
      }
      if constexpr (DV_FIRST) begin_dv();
      store();
      if constexpr (!SHARES_KEYS && !DV_FIRST) begin_dv();
      if constexpr (STORES_DS) ptx::fence_proxy_async();
      const bool votes = VOTES && SHARES_KEYS && may_hide;
      if (votes) careful = any_thread(nonfinite);
      if constexpr (STORAGE == 0 && !OWN_UNITS) {
        if (any_thread(!warpgroup_gradient::all_finite(ds))) {  // too large for their unit, or NaN
          unit.rescale(warpgroup_unit::largest_of_tile(known_smem->largest[stage], dp), dk);
          store();
          if constexpr (STORES_DS) ptx::fence_proxy_async();
          ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // dS in its new unit
        }
      } else if constexpr (DEFERS_DQ) {
        warpgroup::arrive_warp(full(d_scores, tile_number));
      } else if (STORES_DS && !votes) {
        ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // P and dS
      }
      if (MASKS && SHARES_KEYS && careful) take_nonfinite();
      const bool clears_keys = MASKS && !DEFERS_DQ && spoilt_keys;
      if (clears_keys) warpgroup_gradient::clear_keys_for_a_while(k_smem);
      float* const sum_gmem = span.dq_accum + first_of(tile) * fragment::whole_columns(D);
      float dq[2][COLUMNS_Q];
      const int line = SHARES_KEYS ? share_k.line : TAKES_TURNS ? 0 : own;
      const warpgroup::SmemDesc ds_described = describe_ds(stage);
      const auto add_dq = [&] {
        ptx::fence_accumulator(dq);
        if constexpr (STORAGE == 0) matmul::scale(dq, unit.inverse());
        warpgroup_gradient::add_rows(dq, sum_gmem, line * warpgroup::SLAB_COLUMNS, share_k.begin,
                                     ni);
      };
      if constexpr (!DEFERS_DQ) ptx::wgmma_fence();
      if constexpr (ATOMIC_DQ && !TAKES_TURNS && !DEFERS_DQ) begin_dq(dq, ds_described, line);
      if constexpr (SHARES_KEYS) {
        const warpgroup::SmemDesc p_described =
            warpgroup::make_smem_desc(ptx::shared_address(p_smem), 0);
        warpgroup::multiply_add<BLOCK_Q>(dv, p_described, lines_of(do_stage, share_v.line));
        warpgroup::multiply_add<BLOCK_Q>(dk, ds_described, lines_of(q_stage, share_k.line));
        ptx::wgmma_commit();
      } else if constexpr (!BEGINS_DK) {
        begin_dk();
      }
      if constexpr (DEFERS_DQ) {
        if (deferred_gmem != nullptr && stage != own) add_deferred(0, OwnLines<D>::LINES, false);
        deferred_gmem = sum_gmem;
        deferred_rows = ni;
      } else if constexpr (ATOMIC_DQ && !TAKES_TURNS) {
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
      if (clears_keys) warpgroup_gradient::restore_keys(p, *known_smem, k_smem);
      warpgroup::arrive_warpgroup(empty(queries, stage));
    };
    // Of FULL tiles in a row the last one: before it, what comes next is known.
    int last = HAS_MASK ? -1 : span.end - 1;
    const auto next_tile = [&](int place) {
      if ((HAS_EDGES || !HAS_MASK) && place <= last) return 4 * place + FULL;
      const int tile = span.next_tile(place);
      if (HAS_EDGES && tile != NO_TILE && class_of(tile) == FULL) {
        last = span.last_of_full(place_of(tile));
      }
      return tile;
    };
#pragma unroll 1
    for (int tile = next_tile(span.first); tile != NO_TILE;
         tile = next_tile(place_of(tile) + 1), ++tile_number) {
      if (TWO_STEPS && class_of(tile) == FULL && place_of(tile) < whole) {
        step(tile, warpgroup::Bool<false>());
      } else {
        step(tile, warpgroup::Bool<true>());
      }
    }
    ptx::mbarrier_arrive(empty(told, n));
  }

  if (DEFERS_DQ && deferred_gmem != nullptr) add_deferred(own, own + 1, true);
  // 7 scale and store
  if constexpr (STORAGE == 0) matmul::scale(dk, unit.inverse());
  const layout::Entry& entry = known_smem->entry;
  const int h_kv = known_smem->h_kv, nj = known_smem->nj;
  const long long j0 = known_smem->j0;
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  if constexpr (TMA_STORE) {
    // In place of the warp's own values, which nobody else reads, and then of its own keys; or of
    // both after they were read, where warpgroups share them.
    const long long first = j0 + key_tile * warpgroup::WARPGROUP_ROWS;
    if constexpr (SHARES_KEYS)
      ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // the keys and values
    warpgroup_gradient::tma_store_rows<D_V>(dv, share_v, keep_scale, v_address + key_tile * V_BYTES,
                                            dv_map, warpgroup::TmaHead(p.dv, entry, h_kv), first);
    if constexpr (!SHARES_KEYS) ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // the keys
    warpgroup_gradient::tma_store_rows<D>(dk, share_k, static_cast<float>(p.scale),
                                          k_address + key_tile * K_BYTES, dk_map,
                                          warpgroup::TmaHead(p.dk, entry, h_kv), first);
    if (ptx::lane_index() == 0) ptx::tma_store_wait_read();
  } else {
    const warpgroup_gradient::ResultRows<D> dk_rows(p.dk, p.kind_dk, entry, h_kv, j0, nj, k_smem);
    const warpgroup_gradient::ResultRows<D_V> dv_rows(p.dv, p.kind_dv, entry, h_kv, j0, nj, v_smem);
    ptx::named_barrier_sync(TOGETHER,
                            CONSUMER_THREADS);  // the keys and values, in whose place results go
    dk_rows.put(dk, corner.row, share_k, static_cast<float>(p.scale));
    dv_rows.put(dv, corner.row, share_v, keep_scale);
    ptx::named_barrier_sync(TOGETHER, CONSUMER_THREADS);  // the results, which other threads wrote
    dk_rows.copy_out();
    dv_rows.copy_out();
  }
  tile::count_tiles(p, visited);
}
