// Tiled attention, forward, in 16-bit types by the tensor cores of compute capability 9.0: the twin
// of reference/cpu/forward.py.
//
// A persistent, warp-specialised kernel. The last warpgroup of a block is the producer: one thread
// issues TMA loads, one warp runs the tile scheduler, two warps check v for non-finite values. The
// others are the consumers, each with 64 queries of a work tile. kernels_cu/README.md has a table
// of the barriers between them and a timeline.
//
// Tiles of k and v, the last one first, pass through KV_STAGES stages. While a consumer turns
// scores into weights, the tensor cores multiply the weights of its tile before by v, and then the
// next consumer's scores: the consumers take turns to issue products, which is the ping-pong of
// FlashAttention-3 (Shah et al. 2024). The first tile of a work tile has none before it to overlap
// with; nor have, where the mask has edges, PARTIAL ones, so that the loop over FULL ones holds no
// code for masked pairs. EMPTY tiles are neither loaded nor computed. While the last tile of a work
// tile is computed and its output is stored, the next one's q, k and v are on their way.
//
// Grid: no more blocks than work tiles, of which there are prod(own_size) * heads * blocks, with
// own_size = lead_size; packed: heads * blocks. Shared memory: SharedMemory in forward_storage.cuh.
// BLOCK_Q is 64 times the consumers, BLOCK_KV one of the widths in ptx/wgmma.cuh. After the
// parameters come the tensor maps of q, k, v and, where TMA_STORE, out, and that of a bias in
// tiles.
#include "../common/params.cuh"
#include "../ptx/reciprocal.cuh"
#include "../warp/fragment_softmax.cuh"
#include "../warp/fragment_tile.cuh"
#include "forward_producer.cuh"
#include "half_tiles.cuh"
#include "warpgroup_rows.cuh"

namespace {

using namespace forward_storage;

constexpr int COLUMNS = BLOCK_KV / 4;                 // scores of a thread in each of its two rows
constexpr int MASK_COLUMNS = MAY_MASK ? COLUMNS : 2;  // for which the mask is evaluated
constexpr int SCORE_COLUMNS = fragment_tile::columns_at_once(COLUMNS);
constexpr int COLUMNS_V = warpgroup::product_columns(V_COLUMNS) / 4;
constexpr int OUT_SLAB_BYTES = fragment::WARP_ROWS * warpgroup::SLAB_ROW_BYTES;  // of one warp
// Whether the softmax of a masked tile treats halves of its columns apart: where there are
// registers for the question what a warp sees of them, and it costs less than it saves.
constexpr bool HALF_TILES =
    HAS_EDGES && !CHANGES_SCORES && (D_V <= 64 || ONE_TILE) && CONSUMERS == 2;
// Whether a warp without any pair that takes part computes no weights of a masked tile. With a mask
// of ranges, hardly any warp is like that.
constexpr bool SKIP_EMPTY_WARPS = HAS_EDGES && !HAS_RANGE && !CHANGES_SCORES;
// To rescale the narrow output of short rows takes less time than the vote whether it is necessary.
constexpr bool ALWAYS_RESCALE = D_V <= 64 && CONSUMERS == 2;
// Whether the sums of rows end while the last product is computed: where there are registers for
// that. With one tile, the product would begin later by as much.
constexpr bool SUMS_EARLY = !ONE_TILE && !CHANGES_SCORES && !RESUMES;
// Registers of a thread of the producer and of the consumers. With more than the block was launched
// with in all, setmaxnreg would wait for ever.
constexpr int LAUNCH_REGS = 65536 / (THREADS * RESIDENT_BLOCKS) / 8 * 8;
constexpr int PRODUCER_REGS = CONSUMERS == 3 ? 32 : 40;
constexpr int SHARED_REGS = (LAUNCH_REGS * (CONSUMERS + 1) - PRODUCER_REGS) / CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGS = SHARED_REGS < 240 ? SHARED_REGS : 240;
static_assert(PRODUCER_REGS + CONSUMERS * CONSUMER_REGS <= LAUNCH_REGS * (CONSUMERS + 1),
              "registers");

// -- the role of a consumer warpgroup -------------------------------------------------------------

// A warpgroup: computes 64 queries of every work tile. This is one body, with lambdas for its
// parts: as functions that share structs, the same steps took 1 to 4 % longer. On a GPU of compute
// capability 9.0, this measures a change again, before and after it:
//
//     cupyflash bench --shape 4,32,4096,128 --shape 2,32,8192,64 --pass forward --variant full \
//         --variant causal --only cupyflash
__device__ __forceinline__ void consumer(const Params& p, const SharedMemory& smem,
                                         const ptx::TensorMap& out_map) {
  SharedStorage& shared = *smem.storage;
  const int index = warpgroup::index();
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // once, and kept
  // Logits are `logit_scale` times a score. A negative scale flips the sign of q; a zero scale
  // zeroes q, so that 0 * inf cannot occur.
  const float logit_scale = CHANGES_SCORES ? 1.0f : fabs(scale);
  const float c =
      logit_scale == 0 ? 1.0f : fmin(logit_scale * number::LOG2_E<float>, number::largest_float());
  const unsigned int out_address =  // of the warp's 16 rows
      ptx::shared_address(smem.out) + ptx::shuffle(fragment::warp_row(), 0) * V_ROW_BYTES;
  const int next_consumer = index + 1 < CONSUMERS ? index + 1 : 0;
  if (next_consumer == 0) {
    ptx::named_barrier_arrive(PING_PONG, TWO_CONSUMERS);  // the first turn is consumer 0's
  }

  // Uses of the pipelines so far: tiles of k and v, finite checks, work tiles with queries.
  int kv_uses = 0, checks = 0, q_uses = 0;
  bool more_work = true;
#pragma unroll 1
  for (int w = 0; more_work; ++w) {
    float m[2], l[2], acc[2][COLUMNS_V];
    fragment_softmax::init_sums(m, l);
    if constexpr (!ONE_TILE) matmul::clear(acc);
    shared.work_pipeline.wait_full(w);
    const ScheduledTile& work = shared.work_tile(w);
    // The next tile; where that is FULL and the mask has edges, the first tile of its run.
    TileRef next = uniform(work.first_tile);
    int run = ptx::shuffle(work.first_run, 0);
    const auto advance = [&](int tile) {
      next = work.ref_of(work.tile_before(tile));
      if constexpr (HAS_MASK) next = uniform(next);
      if (HAS_EDGES && next > TileRef::NONE && kind_of(next) == UNMASKED) {
        run = ptx::shuffle(work.run_from(index_of(next)), 0);
      }
    };
    const int q_slot = index + (Q_STAGES == 1 ? 0 : ptx::shuffle(first_q_slot(q_uses), 0));
    const HeadConstants head_constants = tile::head_constants_of(p, work.box_of(0));

    float m_new[2], alpha[2], s[2][COLUMNS];
    unsigned int weights[2][COLUMNS / 2];
    unsigned int mask[2];  // bit n of word r: whether pair (r, n) takes part
    // s = q k^T.
    const auto issue_qk = [&](int n) {
      warpgroup::multiply<D, BLOCK_KV>(s, smem.q.desc(q_slot),
                                       smem.k.desc(KvPipeline::stage_of(n)));
      ptx::wgmma_commit();
    };
    // acc += weights v, or acc = weights v unless `add`.
    const auto issue_pv = [&](int n, bool add) {
      warpgroup::multiply_add<BLOCK_KV>(acc, weights, smem.v.column_desc(KvPipeline::stage_of(n)),
                                        add);
      ptx::wgmma_commit();
    };
    // Evaluates the mask of a masked tile. Returns whether any pair of the warp takes part.
    const auto evaluate_mask = [&](int tile, bool masked) {
      if (MAY_MASK && masked) {
        return fragment_tile::evaluate_mask<MASK_COLUMNS, fragment_tile::MASK_COLUMNS_AT_ONCE>(
            p, work.box_of(tile),
            HAS_RANGE ? PARTIAL : warpgroup_tile::class_of(work.classes, tile), mask);
      }
      return true;
    };
    // Changes the scores, and gives pairs that take no part the score -inf. Returns whether the
    // weights have to mark these pairs: nothing else marks those that a score change hides.
    // `keys_end`: whether keys may end in the tile, which is possible in the first one only.
    const auto change_scores = [&](int n, int tile, bool masked, auto keys_end) {
      bool hides = false;
      if constexpr (HAS_SCORE) {
        const bool hidden =
            fragment_tile::apply_score_mod<decltype(keys_end)::value, SCORE_COLUMNS>(
                p, head_constants, work.box_of(tile), s, scale);
        hides = ptx::any_lane(hidden) || masked;
      }
      if constexpr (HAS_BIAS_TILES) {
        using bias_tiles::Pipeline;
        const bias_tiles::Reader reader(p, smem.bias, Pipeline::stage_of(n), index);
        hides = fragment_tile::add_bias(s, HAS_SCORE ? 1.0f : scale, reader) || hides || masked;
      }
      if constexpr (MAY_MASK) {
        if (masked) fragment_tile::apply_mask(s, mask);
      } else {
        if (masked) fragment_tile::mask_missing_keys(s, work.rows_in(tile));
      }
      return hides;
    };
    // The weights of a half of the tile's columns become words of two, or these become 0.
    constexpr int HALF = COLUMNS / 2;
    const auto narrow_half = [&](int half) {
#pragma unroll
      for (int n = 0; n < HALF; n += 2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          weights[r][(half * HALF + n) / 2] =
              number::narrow_pair(s[r][half * HALF + n], s[r][half * HALF + n + 1]);
        }
      }
    };
    const auto clear_half = [&](int half) {
      float none[2][2] = {};
      ptx::fence_accumulator(none);  // else the compiler clears always, before it computes
      const unsigned int word = number::narrow_pair(none[0][0], none[0][1]);
#pragma unroll
      for (int n = 0; n < HALF; ++n) {
        if constexpr (HAS_DROPOUT) s[0][half * HALF + n] = s[1][half * HALF + n] = none[0][0];
        weights[n % 2][(half * HALF + n) / 2] = word;
      }
    };
    const auto row_max = [&] { return fragment_softmax::row_max<!ALWAYS_RESCALE>(s, m, m_new, c); };
    // Waits for the finite check of a tile. If it found NaN or infinities, which is rare, adds
    // their products to the output one by one, without pairs that take no part, and sets them to 0
    // in v. Returns whether it found any.
    const auto repair_nonfinite = [&](int n, int tile) {
      const bool found = shared.checks.found_nonfinite(checks);
      ++checks;
      if (!found) return false;
      if constexpr (ONE_TILE) matmul::clear(acc);
      char* const tile_smem = smem.v.stage(KvPipeline::stage_of(n));
      const int keys = work.rows_in(tile) - fragment::lane_column();
      const auto takes_part = [&](int r, int column, storage_t weight) {
        if constexpr (CHANGES_SCORES) return weight != 0x8000;
        if constexpr (HAS_MASK) return (mask[r] >> column & 1) != 0;
        return fragment_tile::Pairs::key_of(column) < keys;
      };
      warpgroup_rows::add_nonfinite(acc, weights, tile_smem, takes_part);
      ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);  // v, read as it came
      warpgroup_rows::clear_nonfinite<VTiles::BYTES, CONSUMER_THREADS>(tile_smem, threadIdx.x);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);  // v, now finite
      return true;
    };

    // Ends the sums of the rows, and finds what the output is multiplied by.
    float weight[2];
    const auto end_sums = [&] {
      fragment_softmax::row_sum(l);
      fragment_softmax::join_sink(m, l, weight, logit_scale,
                                  p.sink == nullptr
                                      ? -number::infinity()
                                      : number::load<float>(p.sink, p.kind_sink, work.head));
      const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        weight[r] = l[r] == 0.0f ? 0.0f : keep_scale * weight[r] * ptx::reciprocal(l[r]);
      }
    };

    const int first_kv_use = kv_uses;
    const bool has_tiles = !HAS_MASK && !ENDS_ON_DEVICE || next > TileRef::NONE;
    if (has_tiles) {
      warpgroup::mbarrier_wait(shared.q_full_barrier(q_slot), q_phase_of(q_uses));
      ++q_uses;
      if (!CHANGES_SCORES && !(scale > 0)) {
        warpgroup_rows::apply_sign<QTiles::BYTES, warpgroup::WARPGROUP_SIZE>(
            smem.q.stage(q_slot), threadIdx.x % warpgroup::WARPGROUP_SIZE, scale);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(
            CONSUMER_Q + index,
            warpgroup::WARPGROUP_SIZE);  // the consumer's queries, with the sign
      }
    }
    // The product of one tile is the output, and only without it the output is 0.
    if (ONE_TILE && !has_tiles) {
      matmul::clear(acc);
      ptx::fence_accumulator(acc);  // else the compiler selects 0 or not for every work tile
    }
    bool more_tiles = has_tiles;
#pragma unroll 1
    while (more_tiles) {
      // The first tile, and with a mask that has edges each PARTIAL one: no product of the tile
      // before overlaps with its softmax.
      // 2 scores
      shared.k_pipeline.wait_full(kv_uses);
      ptx::wgmma_fence();
      issue_qk(kv_uses);
      const int first = index_of(next);
      const bool first_masked = HAS_MASK ? kind_of(next) != UNMASKED : work.is_masked(first);
      if constexpr (ONE_TILE) {
        next = TileRef::NONE;
      } else if (HAS_MASK && kv_uses == first_kv_use) {
        next = uniform(work.second_tile);
        if constexpr (HAS_EDGES) run = ptx::shuffle(work.second_run, 0);
      } else {
        advance(first);
      }
      bool sees = evaluate_mask(first, first_masked) || !SKIP_EMPTY_WARPS;
      if constexpr (ONE_TILE) {  // of short rows, many warps have none
        sees = sees && ptx::shuffle(fragment::warp_row(), 0) < work.rows;
      }
      half_tiles::Halves halves;
      if (HALF_TILES && first_masked) halves.find<COLUMNS>(mask);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(s);
      warpgroup::arrive_warpgroup(shared.k_pipeline.empty_barrier(kv_uses));
      if (next <= TileRef::NONE) warpgroup::arrive_warpgroup(shared.q_empty_barrier(q_slot));
      bias_tiles::wait(*smem.bias_pipeline, kv_uses);
      if (sees) {
        // 3 score mod
        // 4 mask
        bool hides = false;
        if constexpr (!HALF_TILES) {
          hides = change_scores(kv_uses, first, first_masked, warpgroup::Bool<true>());
        }
        // 5 row max
        bool grew = false;
        if constexpr (ONE_TILE && HALF_TILES) {
          half_tiles::masked_row_max(s, mask, halves, m);  // a row's first maximum always moves
        } else if constexpr (HALF_TILES) {
          m_new[0] = m[0];
          m_new[1] = m[1];
          half_tiles::masked_row_max(s, mask, halves, m_new);
          grew = fragment_softmax::choose_max<!ALWAYS_RESCALE>(m, m_new, c);
        } else {
          grew = row_max();
        }
        // 6 rescale
        if (grew) fragment_softmax::raise_max(m, m_new, l, alpha, c);
        if (HAS_EDGES && kv_uses != first_kv_use && grew) fragment_softmax::scale_rows(acc, alpha);
        if constexpr (HALF_TILES) {
          half_tiles::exponentiate(s, halves, m, l, c, narrow_half, clear_half);
        } else {
          fragment_softmax::exponentiate(s, m, l, c, hides);
        }
        if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(p, work.box_of(first), s);
        if (HAS_DROPOUT || !HALF_TILES) fragment::narrow(s, weights);
      } else {
        clear_half(0);
        clear_half(1);
      }
      bias_tiles::release(*smem.bias_pipeline, kv_uses);
      bool adds = !ONE_TILE;
      if (CHANGES_SCORES || (CHECK_FINITE && first_masked)) {
        adds = repair_nonfinite(kv_uses, first) || adds;
      }

      ++kv_uses;
      // The other tiles: the scores of each are issued with the output of the tile before, which
      // the tensor cores multiply while the scores become weights.
#pragma unroll 1
      for (; !ONE_TILE && next > TileRef::NONE && !(HAS_EDGES && kind_of(next) != UNMASKED);
           ++kv_uses) {
        const int n = kv_uses;
        const int tile = index_of(next);
        const bool masked = !HAS_EDGES && MAY_MASK && kind_of(next) != UNMASKED;
        shared.k_pipeline.wait_full(n);
        ptx::named_barrier_sync(PING_PONG + index, TWO_CONSUMERS);  // this consumer's turn
        ptx::wgmma_fence();
        issue_qk(n);
        // 7 accumulate p v
        shared.v_pipeline.wait_full(n - 1);
        ptx::wgmma_fence();  // again: the compiler sees a branch after the first
        issue_pv(n - 1, true);
        ptx::named_barrier_arrive(PING_PONG + next_consumer, TWO_CONSUMERS);  // the next turn
        if (HAS_EDGES && tile > run) {
          next = tile_before(next);
        } else {
          advance(tile);
        }
        evaluate_mask(tile, masked);
        ptx::wgmma_wait<1>();  // the scores
        ptx::fence_accumulator(s);
        warpgroup::arrive_warpgroup(shared.k_pipeline.empty_barrier(n));
        if (next <= TileRef::NONE) warpgroup::arrive_warpgroup(shared.q_empty_barrier(q_slot));
        bias_tiles::wait(*smem.bias_pipeline, n);
        const bool hides = change_scores(n, tile, masked, warpgroup::Bool<false>());
        bias_tiles::release(*smem.bias_pipeline, n);
        const bool grew = row_max() || ALWAYS_RESCALE;
        if (grew) fragment_softmax::raise_max(m, m_new, l, alpha, c);
        fragment_softmax::exponentiate(s, m, l, c, hides);
        if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(p, work.box_of(tile), s);
        ptx::wgmma_wait<0>();  // the output, and the weights that it was multiplied with
        ptx::fence_accumulator(acc);
        warpgroup::arrive_warpgroup(shared.v_pipeline.empty_barrier(n - 1));
        fragment::narrow(s, weights);
        if (grew) fragment_softmax::scale_rows(acc, alpha);
        if (CHANGES_SCORES || (CHECK_FINITE && masked)) repair_nonfinite(n, tile);
      }
      // The output of the last tile, with nothing left to overlap with.
      shared.v_pipeline.wait_full(kv_uses - 1);
      ptx::wgmma_fence();
      issue_pv(kv_uses - 1, adds);
      more_tiles = HAS_EDGES && next > TileRef::NONE;
      if (SUMS_EARLY && !more_tiles) end_sums();
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(acc);
      warpgroup::arrive_warpgroup(shared.v_pipeline.empty_barrier(kv_uses - 1));
    }
    if (!SUMS_EARLY || !has_tiles) end_sums();

    if constexpr (RESUMES) {
      fragment::resume<D_V>(acc, weight, m, l, p, work.entry, work.head,
                            work.first + fragment::warp_row(), work.rows - fragment::warp_row(),
                            [](int n) { return fragment::pair_column(n); });
    }
    // 8 normalise
    unsigned int out[2][COLUMNS_V / 2];
    if constexpr (!WIDE_RESULT) warpgroup_rows::narrow_rows(acc, weight, out);
    more_work = shared.has_work(w + 1);  // asked where registers are free, before the stores
    if constexpr (WIDE_RESULT) {
      fragment::store_wide<V_COLUMNS>(acc, weight, p.out,
                                      layout::offset(p.out, work.entry, work.head, false) +
                                          (work.first + fragment::warp_row()) * p.out.row +
                                          work.first_column() * p.out.col,
                                      work.rows - fragment::warp_row(), work.columns());
    } else if constexpr (TMA_STORE) {
      if (ptx::shuffle(fragment::warp_row(), 0) < work.rows) {
        warpgroup_rows::tma_store_wait();
        warpgroup_rows::tma_store_rows<D_V, OUT_SLAB_BYTES>(
            out, out_address, out_map, work.out, work.first_row_q + fragment::warp_row());
      }
    } else {
      warpgroup_rows::store_rows<V_COLUMNS>(out, p.out,
                                            layout::offset(p.out, work.entry, work.head, false) +
                                                work.first * p.out.row +
                                                work.first_column() * p.out.col,
                                            work.rows, work.columns());
    }
    // 9 store lse
    if (p.lse.data != nullptr && work.has_rows()) {
      const memory::RowStatistic to = memory::row_statistic(p.lse, work.entry, work.head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = fragment::warp_row() + 8 * r + fragment::lane_row();
        if (ptx::lane_index() % 4 == 0 && row < work.rows) {
          to.data[(work.first + row) * to.row] =
              l[r] == 0.0f ? -number::infinity() : m[r] + log(l[r]);
        }
      }
    }
    if (work.has_rows()) tile::count_tiles(p, kv_uses - first_kv_use);
    warpgroup::arrive_warp(shared.work_pipeline.empty_barrier(w));
  }
  if (index == 0) {
    ptx::named_barrier_sync(PING_PONG, TWO_CONSUMERS);  // the last turn, which nobody takes
  }
  // Shared memory outlives the stores that read it.
  if (TMA_STORE && ptx::lane_index() == 0) ptx::tma_store_wait_read();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ ptx::TensorMap v_map,
                const __grid_constant__ warpgroup::LastMaps out_map) {
  extern __shared__ Aligned shared_smem[];
  const SharedMemory smem(shared_smem[0].x);
  if constexpr (ONLY_LONG) {  // a block has a first work tile, or ends
    const unsigned int blocks = long_sequences::blocks(p, false, BLOCK_Q);
    if (blockIdx.x >= static_cast<unsigned int>(p.heads * V_PARTS) * blocks) return;
  }
  if (threadIdx.x == 0) {
    if constexpr (HAS_BIAS_TILES) bias_tiles::init(*smem.bias_pipeline);
    smem.storage->init_barriers();
  }
  __syncthreads();  // the mbarriers, initialised

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    const int warp = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE;
    if (warp == 1) {
      tile_scheduler::publish_work_tiles(p, *smem.storage, [](int) {});
    } else if (warp > 1) {
      if constexpr (CHECK_FINITE) {
        finite_check::check_values<VTiles::BYTES>(
            *smem.storage, warp, [&](int n) { return smem.v.stage(KvPipeline::stage_of(n)); });
      }
    } else if (PAGED || threadIdx.x % warpgroup::WARPGROUP_SIZE == 0) {
      forward_producer::producer(p, smem, q_map, k_map, v_map, out_map);
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGS>();
    consumer(p, smem, out_map.stored());
  }
}
