// Tiled attention with its derivative along a direction, in 16-bit types by the tensor cores of
// compute capability 9.0: the twin of reference/cpu/forward_tangent.py.
//
// A persistent, warp-specialised kernel with the roles of forward_sm90.cu, and the sums of
// common/tangent.cuh. Each of the two consumers has 64 queries of a work tile, and computes three
// products of scores and three of outputs in turn with the other one: while one turns scores and
// their tangents into weights, the tensor cores multiply for the other. Two results and two tiles
// of scores fill a consumer's registers, so that within one nothing overlaps. What a direction does
// not have (HAS_TQ, HAS_TK, HAS_TV, HAS_TBIAS) takes no product, and is not loaded.
// kernels_cu/README.md has a table of the barriers.
//
// Grid: as forward_sm90.cu. Shared memory: SharedMemory in tangent_storage.cuh. BLOCK_Q is 128,
// BLOCK_KV one of the widths in ptx/wgmma.cuh. After the parameters come the tensor maps of q, k, v
// and of their tangents.
#include "../common/params.cuh"
#include "../ptx/reciprocal.cuh"
#include "../warp/fragment_softmax.cuh"
#include "tangent_producer.cuh"

namespace {

using namespace tangent_storage;

constexpr int COLUMNS = fragment_tangent::COLUMNS;    // scores of a thread in each of its two rows
constexpr int MASK_COLUMNS = MAY_MASK ? COLUMNS : 2;  // for which the mask is evaluated
constexpr int SCORE_COLUMNS = 4;                      // that generated code changes together
constexpr int COLUMNS_V = warpgroup::product_columns(D_V) / 4;
// Registers of a thread of the producer and of the consumers. Where results and scores fill the
// registers of these, the producer keeps the fewest.
constexpr int LAUNCH_REGS = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER_REGS = 4 * (COLUMNS + COLUMNS_V) <= 176 ? 40 : 24;
constexpr int CONSUMER_REGS = (LAUNCH_REGS * (CONSUMERS + 1) - PRODUCER_REGS) / CONSUMERS / 8 * 8;

using fragment_tangent::HAS_SCORES;

// -- the role of a consumer warpgroup -------------------------------------------------------------

// A warpgroup: computes 64 queries of every work tile.
__device__ __forceinline__ void consumer(const TangentParams& t, const SharedMemory& smem) {
  const Params& p = t.call;
  SharedStorage& shared = *smem.storage;
  const int index = warpgroup::index();
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // once, and kept
  // Logits are `logit_scale` times a score, and so are their tangents. A negative scale flips the
  // sign of q and of its tangents; a zero scale zeroes them, so that 0 * inf cannot occur.
  const float logit_scale = CHANGES_SCORES ? 1.0f : fabs(scale);
  const float c =
      logit_scale == 0 ? 1.0f : fmin(logit_scale * number::LOG2_E<float>, number::largest_float());
  const fragment_tangent::Rows rows(nullptr);  // a warp has its rows alone
  const warpgroup::SmemDesc q_desc = smem.q.desc(2 * index), tq_desc = smem.q.desc(2 * index + 1);
  const int next_consumer = index + 1 < CONSUMERS ? index + 1 : 0;
  if (next_consumer == 0) {
    ptx::named_barrier_arrive(PING_PONG, TWO_CONSUMERS);  // the first turn is consumer 0's
  }
  const auto take_turn = [&] { ptx::named_barrier_sync(PING_PONG + index, TWO_CONSUMERS); };
  const auto pass_turn = [&] {
    ptx::named_barrier_arrive(PING_PONG + next_consumer, TWO_CONSUMERS);
  };

  // Uses of the pipelines so far: tiles of k and v, finite checks, work tiles with queries.
  int kv_uses = 0, checks = 0, q_uses = 0;
  bool more_work = true;
#pragma unroll 1
  for (int n_work = 0; more_work; ++n_work) {
    shared.work_pipeline.wait_full(n_work);
    const ScheduledTile& work = shared.work_tile(n_work);
    const HeadConstants head_constants = tile::head_constants_of(p, work.box_of(0));
    int tile = ptx::shuffle(work.last_tile(), 0);
    const int first_kv_use = kv_uses;
    float m[2], l[2], sum[2], ref[2], acc[2][COLUMNS_V], w[2][COLUMNS_V];
    float s[2][COLUMNS], ts[2][COLUMNS];
    fragment_softmax::init_state(m, l, acc);
    matmul::clear(w);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = 0;
      ref[r] = fragment_tangent::no_reference();
    }

    // s = q k^T and ts = tq k^T + q tk^T.
    const auto issue_scores = [&](int n) {
      const warpgroup::SmemDesc k = smem.k.desc(2 * KvPipeline::stage_of(n));
      const warpgroup::SmemDesc tk = k + KTiles::BYTES / 16;
      ptx::wgmma_fence();
      warpgroup::multiply<D, BLOCK_KV>(s, q_desc, k);
      if constexpr (HAS_TQ) warpgroup::multiply<D, BLOCK_KV>(ts, tq_desc, k);
      if constexpr (HAS_TK) {
        warpgroup::multiply<D, BLOCK_KV>(ts, q_desc, tk, [](int) {}, HAS_TQ);
      }
      ptx::wgmma_commit();
    };
    // acc += p v and w += t v + p tv, and waits for them. `scaled`: rows of t were multiplied by
    // powers of two, of which `inverse` has the inverses.
    const auto multiply_values = [&](int n, const fragment_tangent::Weights& weights, bool scaled,
                                     const float (&inverse)[2]) {
      const warpgroup::SmemDesc v = smem.v.column_desc(2 * KvPipeline::stage_of(n));
      const warpgroup::SmemDesc tv = v + VTiles::BYTES / 16;
      if constexpr (IS_FLOAT16 && HAS_SCORES) {
        if (scaled) {
          const float factor[2] = {1.0f / inverse[0], 1.0f / inverse[1]};
          fragment_softmax::scale_rows(w, factor);
        }
        ptx::wgmma_fence();
        warpgroup::multiply_add<BLOCK_KV>(w, weights.t, v);
        ptx::wgmma_commit();
        warpgroup::multiply_add<BLOCK_KV>(acc, weights.p, v);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::fence_accumulator(w);
        if (scaled) fragment_softmax::scale_rows(w, inverse);
        if constexpr (HAS_TV) {
          ptx::wgmma_fence();
          warpgroup::multiply_add<BLOCK_KV>(w, weights.p, tv);
          ptx::wgmma_commit();
        }
      } else {
        ptx::wgmma_fence();
        warpgroup::multiply_add<BLOCK_KV>(acc, weights.p, v);
        if constexpr (HAS_SCORES) warpgroup::multiply_add<BLOCK_KV>(w, weights.t, v);
        if constexpr (HAS_TV) warpgroup::multiply_add<BLOCK_KV>(w, weights.p, tv);
        ptx::wgmma_commit();
      }
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(acc);
      ptx::fence_accumulator(w);
    };
    unsigned int mask[2];  // bit n of word r: whether pair (r, n) takes part
    // Waits for the finite check of a tile. If it found NaN or infinities, which is rare, adds
    // their products to the sums one by one, without pairs that take no part, and sets them to 0.
    const auto repair_nonfinite = [&](int n, int keys, fragment_tangent::Weights& weights) {
      const bool found = shared.checks.found_nonfinite(checks);
      ++checks;
      if (!found) return;
      char* const v_smem = smem.v.stage(2 * KvPipeline::stage_of(n));
      const int columns = keys - fragment::lane_column();
      const auto takes_part = [&](int r, int column, storage_t weight) {
        if constexpr (CHANGES_SCORES) return weight != fragment::MASKED;
        if constexpr (HAS_MASK) return (mask[r] >> column & 1) != 0;
        return fragment_tile::Pairs::key_of(column) < columns;
      };
      warpgroup_rows::add_nonfinite(acc, weights.p, v_smem, takes_part);
      if constexpr (HAS_SCORES) {
        warpgroup_rows::add_nonfinite(w, weights.t, v_smem, takes_part);
      }
      if constexpr (HAS_TV) {
        warpgroup_rows::add_nonfinite(w, weights.p, v_smem + VTiles::BYTES, takes_part);
      }
      ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);  // values, read as they came
      warpgroup_rows::clear_nonfinite<V_ARRIVING, CONSUMER_THREADS>(v_smem, threadIdx.x);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);  // values, now finite
    };

    if (tile >= 0) {
      warpgroup::mbarrier_wait(shared.q_full_barrier(index), q_uses % 2);
      ++q_uses;
      if (!CHANGES_SCORES && !(scale > 0)) {
        warpgroup_rows::apply_sign<Q_ARRIVING, warpgroup::WARPGROUP_SIZE>(
            smem.q.stage(2 * index), threadIdx.x % warpgroup::WARPGROUP_SIZE, scale);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(
            CONSUMER_Q + index,
            warpgroup::WARPGROUP_SIZE);  // the consumer's queries, with the sign
      }
      // 2 scores
      shared.k_pipeline.wait_full(kv_uses);
      take_turn();
      issue_scores(kv_uses);
      pass_turn();
#pragma unroll 1
      while (true) {
        const int n = kv_uses;
        const bool masked = ptx::shuffle(work.is_masked(tile) ? 1 : 0, 0) != 0;
        const int keys = work.rows_in(tile);
        const int next = ptx::shuffle(work.tile_before(tile), 0);
        if (MAY_MASK && masked) {
          fragment_tile::evaluate_mask<MASK_COLUMNS, fragment_tile::MASK_COLUMNS_AT_ONCE>(
              p, work.box_of(tile),
              HAS_RANGE ? PARTIAL : warpgroup_tile::class_of(work.classes, tile), mask);
        }
        ptx::wgmma_wait<0>();
        ptx::fence_accumulator(s);
        if constexpr (fragment_tangent::HAS_PRODUCT) {
          ptx::fence_accumulator(ts);
        } else if constexpr (HAS_SCORES) {
          matmul::clear(ts);
        }
        warpgroup::arrive_warpgroup(shared.k_pipeline.empty_barrier(n));
        if (next < 0) warpgroup::arrive_warpgroup(shared.q_empty_barrier(index));
        // 3 score mod
        bool hides = masked;
        if constexpr (HAS_SCORE) {
          hides = ptx::any_lane(fragment_tangent::apply_score_mod<SCORE_COLUMNS>(
                      p, head_constants, work.box_of(tile), s, ts, scale)) ||
                  masked;
        }
        // 4 mask
        if (MAY_MASK && masked) fragment_tile::apply_mask(s, mask);
        if (!MAY_MASK && masked) fragment_tile::mask_missing_keys(s, keys);
        // 5 row max
        float m_new[2];
        if (fragment_softmax::row_max(s, m, m_new, c)) {
          // 6 rescale
          fragment_tangent::rescale(m, m_new, l, sum, acc, w, c);
        }
        fragment_softmax::exponentiate(s, m, l, c, hides);
        fragment_tangent::Weights weights;
        float inverse[2] = {1, 1};
        bool scaled = false;
        if constexpr (HAS_SCORES) {
          if (fragment_tangent::lack_references(ref)) {
            fragment_tangent::find_references(s, ts, logit_scale, ref, rows, rows);
          }
          fragment_tangent::weigh(s, ts, logit_scale, ref, sum, hides);
        }
        if constexpr (HAS_DROPOUT) {
          fragment_tile::apply_dropout(p, work.box_of(tile), s);
          if constexpr (HAS_SCORES) fragment_tangent::drop(s, ts);
        }
        fragment::narrow(s, weights.p);
        if constexpr (HAS_SCORES) {
          if constexpr (IS_FLOAT16) scaled = fragment_tangent::fit_float16(ts, inverse, rows);
          fragment::narrow(ts, weights.t);
        }
        if (CHANGES_SCORES || (CHECK_FINITE && masked)) repair_nonfinite(n, keys, weights);
        // 7 accumulate p v
        shared.v_pipeline.wait_full(n);
        if (next >= 0) shared.k_pipeline.wait_full(n + 1);
        take_turn();
        multiply_values(n, weights, scaled, inverse);
        warpgroup::arrive_warpgroup(shared.v_pipeline.empty_barrier(n));
        ++kv_uses;
        tile = next;
        if (next < 0) {
          pass_turn();
          break;
        }
        issue_scores(kv_uses);
        pass_turn();
      }
    }

    fragment_softmax::row_sum(l);
    fragment_softmax::row_sum(sum);
    const float sink = p.sink == nullptr ? -number::infinity()
                                         : number::load<float>(p.sink, p.kind_sink, work.head);
    const float tsink =
        t.tsink == nullptr ? 0.0f : number::load<float>(t.tsink, t.kind_tsink, work.head);
    float weight[2];
    fragment_softmax::join_sink(m, l, weight, logit_scale, sink);
    fragment_tangent::join_sink(sum, m, weight, ref, sink, tsink);
    // 8 normalise
    const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_sum = l[r] == 0.0f ? 0.0f : ptx::reciprocal(l[r]);
      sum[r] *= of_sum;
      weight[r] *= keep_scale * of_sum;
#pragma unroll
      for (int n = 0; n < COLUMNS_V; ++n) w[r][n] -= sum[r] * acc[r][n];
    }
    more_work = shared.has_work(n_work + 1);
    const auto store = [&](const float (&result)[2][COLUMNS_V], const Operand& to) {
      unsigned int words[2][COLUMNS_V / 2];
      warpgroup_rows::narrow_rows(result, weight, words);
      warpgroup_rows::store_rows<D_V>(
          words, to, layout::offset(to, work.entry, work.head, false) + work.first * to.row,
          work.rows);
    };
    store(acc, p.out);
    store(w, t.tout);
    // 9 store lse
    if (p.lse.data != nullptr) {
      const memory::RowStatistic lse = memory::row_statistic(p.lse, work.entry, work.head);
      const memory::RowStatistic tlse = memory::row_statistic(t.tlse, work.entry, work.head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = fragment::warp_row() + 8 * r + fragment::lane_row();
        if (ptx::lane_index() % 4 == 0 && row < work.rows) {
          lse.data[(work.first + row) * lse.row] =
              l[r] == 0.0f ? -number::infinity() : m[r] + log(l[r]);
          tlse.data[(work.first + row) * tlse.row] = ref[r] + sum[r];
        }
      }
    }
    tile::count_tiles(p, kv_uses - first_kv_use);
    warpgroup::arrive_warp(shared.work_pipeline.empty_barrier(n_work));
  }
  if (index == 0) take_turn();  // the last turn, which nobody takes
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS) KERNEL_NAME(
    const __grid_constant__ TangentParams t, const __grid_constant__ ptx::TensorMap q_map,
    const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
    const __grid_constant__ ptx::TensorMap tq_map, const __grid_constant__ ptx::TensorMap tk_map,
    const __grid_constant__ ptx::TensorMap tv_map) {
  extern __shared__ Aligned shared_smem[];
  const SharedMemory smem(shared_smem[0].x);
  if (threadIdx.x == 0) smem.storage->init_barriers();
  __syncthreads();  // the mbarriers, initialised

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    const int warp = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE;
    if (warp == 1) {
      const auto add_heads = [&](int w) {
        if (ptx::lane_index() != 0) return;
        const ScheduledTile& work = smem.storage->work_tile(w);
        TangentHeads& heads = smem.storage->heads_of(w);
        const long long h_kv = layout::divide(work.head, t.call.group).quotient;
        heads.q = warpgroup::TmaHead(t.tq, work.entry, work.head);
        heads.k = warpgroup::TmaHead(t.tk, work.entry, h_kv);
        heads.v = warpgroup::TmaHead(t.tv, work.entry, h_kv);
      };
      tile_scheduler::publish_work_tiles(t.call, *smem.storage, add_heads);
    } else if (warp > 1) {
      if constexpr (CHECK_FINITE) {
        finite_check::check_values<V_ARRIVING>(
            *smem.storage, warp, [&](int n) { return smem.v.stage(2 * KvPipeline::stage_of(n)); });
      }
    } else if (threadIdx.x % warpgroup::WARPGROUP_SIZE == 0) {
      tangent_producer::producer(
          smem, tangent_producer::Maps{q_map, k_map, v_map, tq_map, tk_map, tv_map});
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGS>();
    consumer(t, smem);
  }
}
