// Tiled attention, forward, of codes of float8 by the tensor cores of compute capability 9.0: the
// twin of reference/cpu/forward.py.
//
// A persistent, warp-specialised kernel as forward_sm90.cu, with these differences. Two warps of
// the producer transpose values, because wgmma takes codes only with rows along the depth
// (warpgroup_fp8.cuh). Weights are rounded to e4m3. wgmma's sums of codes keep fewer bits than
// float32, so the product of a tile's weights and values is a sum of its own, which is then added
// to the output in float32; this also rescales the output (`absorb`). In its turn, a consumer
// multiplies its weights by v and issues its next scores, while the scores of the others become
// weights; without turns, all would wait for products at the same time.
//
// Scales: those of heads and of queries are factors of the logits (fp8_softmax.cuh). With
// K_SCALE_ROWS scores are multiplied by those of their keys, and with V_SCALE_ROWS weights by those
// of their values before they are rounded; without, the result is multiplied by its head's.
//
// Grid: no more blocks than work tiles, of which there are prod(own_size) * heads * blocks, with
// own_size = lead_size; packed: heads * blocks. Shared memory: SharedMemory in fp8_storage.cuh.
// BLOCK_Q is 64 times the consumers, BLOCK_KV one of the widths in ptx/wgmma_fp8.cuh. After the
// parameters come the tensor maps of q, k, v and, where TMA_STORE, out.
#include "../common/params.cuh"
#include "../ptx/reciprocal.cuh"
#include "../warp/fragment_tile.cuh"
#include "fp8_producer.cuh"
#include "fp8_softmax.cuh"
#include "fp8_storage.cuh"
#include "warpgroup_fp8.cuh"
#include "warpgroup_rows.cuh"

namespace {

using namespace fp8_storage;

constexpr int COLUMNS = BLOCK_KV / 4;                 // scores of a thread in each of its two rows
constexpr int MASK_COLUMNS = MAY_MASK ? COLUMNS : 2;  // for which the mask is evaluated
constexpr int SCORE_COLUMNS = fragment_tile::columns_at_once(COLUMNS);
constexpr int COLUMNS_V = V_ROWS / 4;
constexpr int OUT_SLAB_BYTES = fragment::WARP_ROWS * warpgroup::SLAB_ROW_BYTES;  // of one warp
// The product of a tile's weights and values is computed in parts of so many columns.
constexpr int PART_ROWS = V_ROWS == 128 ? 128 : 64;
constexpr int PARTS = V_ROWS / PART_ROWS, PART_COLUMNS = PART_ROWS / 4;
constexpr int BUFFERS = PARTS < 2 ? PARTS : 2;
// Whether a warp without any pair that takes part computes no weights of a masked tile: where there
// are registers for the question, and tiles have more queries than keys, so that at a diagonal many
// warps have none.
constexpr bool SKIP_EMPTY_WARPS = HAS_EDGES && BLOCK_Q > BLOCK_KV && !HAS_SCORE && !SCALE_ROWS;
// Registers of a thread of the producer and of the consumers. With more than the block was launched
// with in all, setmaxnreg would wait for ever.
constexpr int PRODUCER_REGS = CONSUMERS == 2 ? 40 : 32, CONSUMER_REGS = CONSUMERS == 2 ? 232 : 160;
static_assert(PRODUCER_REGS + CONSUMERS * CONSUMER_REGS <=
                  65536 / THREADS / 8 * 8 * (CONSUMERS + 1),
              "registers");

// Factors of scores that are outside are multiplied by the scores: negative ones, 0, NaN, and those
// whose product with log2 e may not be a normal number.
constexpr float LEAST_FACTOR = 0x1p-120f, LARGEST_FACTOR = 0x1p120f;

// Multiplies weights by the scales of their values, in a unit for each row that depends only on
// keys with weights: the scales of others may be anything, and change no bit. Finds the factors of
// products, which bring them to the unit of the output. Rows come one after the other, and scales
// are read again, because registers have no room for them.
__device__ __forceinline__ void scale_seen(float (&s)[2][COLUMNS], const float (&scales)[BLOCK_KV],
                                           int output_unit, float (&factors)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = 0;
    each_scale<COLUMNS>(scales, [&](int x, float own) {
      if (s[r][x] != 0) largest = fmax(largest, fabs(own));  // which ignores NaN
    });
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      largest = fmax(largest, ptx::shuffle_xor(largest, lanes));
    }
    const int unit = largest > 0 ? Unit::exponent_of(largest) : output_unit;
    const float inverse = Unit::ratio(Unit::ONE, unit);
    factors[r] = Unit::ratio(unit, output_unit);
    __syncwarp();  // the compiler keeps nothing of shared memory across it
    each_scale<COLUMNS>(scales, [&](int x, float own) {
      if (s[r][x] != 0) s[r][x] *= own * inverse;
    });
    __syncwarp();
  }
}

// -- the role of a consumer warpgroup -------------------------------------------------------------

// A warpgroup: computes 64 queries of every work tile.
__device__ __forceinline__ void consumer(const Params& p, const SharedMemory& smem,
                                         const ptx::TensorMap& out_map) {
  SharedStorage& shared = *smem.storage;
  const int index = warpgroup::index();
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // once, and kept
  const warpgroup::SmemDesc q = warpgroup::make_smem_desc(smem.q.address(index), 0);
  const unsigned int out_address =  // of the warp's 16 rows
      ptx::shared_address(smem.out) + ptx::shuffle(fragment::warp_row(), 0) * OUT_ROW_BYTES;
  const int next_consumer = index + 1 < CONSUMERS ? index + 1 : 0;
  const auto pass_turn = [&] {
    ptx::named_barrier_arrive(PING_PONG + next_consumer, TWO_CONSUMERS);  // the next turn
  };
  if (next_consumer == 0) pass_turn();  // the first turn is consumer 0's

  // Uses of the pipelines so far: tiles of k and v, work tiles with queries.
  int kv_uses = 0, q_uses = 0;
  float m[2], l[2], acc[2][COLUMNS_V];
  fragment_softmax::init_state(m, l, acc);
  bool more_work = true;
#pragma unroll 1
  for (int w = 0; more_work; ++w) {
    shared.work_pipeline.wait_full(w);
    const ScheduledTile& work = shared.work_tile(w);
    const WorkScales& work_scales = shared.work_scales[WorkPipeline::stage_of(w)];
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
    const HeadConstants head_constants = tile::head_constants_of(p, work.box_of(0));

    // Logits are factors times scores of codes. Scores are multiplied by them or, if that is
    // `direct`, left as they are, and their exponents to the base 2 are c times a score. Factors
    // are read again where they are needed, because registers have no room for them.
    const float* const factors =
        work_scales.logits + fragment::warp_row() + fragment::lane_row();  // of rows 0 and 8
    float c[2];
    bool direct = !HAS_SCORE;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = work.rows > 0 ? factors[8 * r] : 1.0f;
      direct = direct && factor >= LEAST_FACTOR && factor <= LARGEST_FACTOR;
      c[r] = factor * number::LOG2_E<float>;
    }
    direct = !ptx::any_lane(!direct);
    if (!direct) c[0] = c[1] = number::LOG2_E<float>;

    float alpha[2];              // the factor of the output when the weights are multiplied
    float factor_v[2] = {1, 1};  // of products, where weights are not in the output's unit
    float s[2][COLUMNS], part[BUFFERS][2][PART_COLUMNS];
    unsigned int weights[2][COLUMNS / 4];
    unsigned int mask[2];  // bit n of word r: whether pair (r, n) takes part
    // s = q k^T.
    const auto issue_qk = [&](int n) {
      warpgroup_fp8::multiply<D, BLOCK_KV>(s, q, smem.k.desc(KvPipeline::stage_of(n)));
      ptx::wgmma_commit();
    };
    // part = weights v, for some of the columns.
    const auto issue_pv = [&](int n, int x) {
      warpgroup_fp8::multiply_weights(
          part[x % BUFFERS], weights,
          smem.transposed.desc(KvPipeline::stage_of(n)) + x * (PART_ROWS * LINE / 16));
      ptx::wgmma_commit();
    };
    // acc = alpha acc + part.
    const auto absorb = [&](int x, auto has_factor) {
      ptx::fence_accumulator(part[x % BUFFERS]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int column = 0; column < PART_COLUMNS; ++column) {
          float& sum = acc[r][x * PART_COLUMNS + column];
          const float own = part[x % BUFFERS][r][column];
          sum = fma(sum, alpha[r], decltype(has_factor)::value ? own * factor_v[r] : own);
        }
      }
    };
    // acc = alpha acc + weights v, in this consumer's turn. With `has_factor`, which is rare
    // without score changes, products are multiplied by factors.
    const auto accumulate_pv = [&](int n, bool has_factor) {
      using warpgroup::Bool;
      ptx::named_barrier_sync(PING_PONG + index, TWO_CONSUMERS);
      ptx::wgmma_fence();
      issue_pv(n, 0);
      if (V_SCALE_ROWS && has_factor) {
#pragma unroll
        for (int x = 0; x < PARTS; ++x) {
          ptx::wgmma_wait<0>();
          absorb(x, Bool<true>());
          ptx::wgmma_fence();
          if (x + 1 < PARTS) issue_pv(n, x + 1);
        }
      } else {
#pragma unroll
        for (int x = 1; x < PARTS; ++x) {
          ptx::wgmma_fence();
          issue_pv(n, x);
          ptx::wgmma_wait<1>();
          absorb(x - 1, Bool<false>());
        }
        ptx::wgmma_wait<0>();
        absorb(PARTS - 1, Bool<false>());
      }
      warpgroup::arrive_warpgroup(shared.transposed_pipeline.empty_barrier(n));
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
      if constexpr (K_SCALE_ROWS) {
        each_scale<COLUMNS>(shared.scales[KvPipeline::stage_of(n)].k, [&](int x, float own) {
          s[0][x] *= own;
          s[1][x] *= own;
        });
      }
      if (!direct) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float factor = factors[8 * r];
#pragma unroll
          for (int x = 0; x < COLUMNS; ++x) s[r][x] *= factor;
        }
      }
      bool hides = false;
      if constexpr (HAS_SCORE) {
        const bool hidden =
            fragment_tile::apply_score_mod<decltype(keys_end)::value, SCORE_COLUMNS>(
                p, head_constants, work.box_of(tile), s, scale);
        hides = ptx::any_lane(hidden) || masked;
      }
      if constexpr (MAY_MASK) {
        if (masked) fragment_tile::apply_mask(s, mask);
      } else {
        if (masked) fragment_tile::mask_missing_keys(s, work.rows_in(tile));
      }
      return hides;
    };
    // Turns the scores of a tile into weights.
    const auto weigh = [&](int n, int tile, bool masked, bool hides) {
      fp8_softmax::raise_max(s, m, l, alpha, c);
      fp8_softmax::exponentiate(s, m, l, c, hides);
      if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(p, work.box_of(tile), s);
      if constexpr (V_SCALE_ROWS) {
        const RowScales& scales = shared.scales[KvPipeline::stage_of(n)];
        const ValueUnits& units = shared.v_units[KvPipeline::stage_of(n)];
        if (HAS_SCORE || masked) {
          scale_seen(s, scales.v, units.output, factor_v);
        } else {
          each_scale<COLUMNS>(scales.v_of_tile, [&](int x, float own) {
            s[0][x] *= own;
            s[1][x] *= own;
          });
          factor_v[0] = factor_v[1] = units.factor;
        }
        alpha[0] *= units.rescale;
        alpha[1] *= units.rescale;
      }
      warpgroup_fp8::narrow(s, weights);
    };
    // If a masked tile has NaN or infinities, which is rare, adds their products to the output one
    // by one, without pairs that take no part, and sets them to 0 in v.
    const auto repair_nonfinite = [&](int n, int tile) {
      const unsigned int (&has_nonfinite)[2] = shared.has_nonfinite[KvPipeline::stage_of(n)];
      if ((has_nonfinite[0] | has_nonfinite[1]) == 0) return;
      char* const tile_smem = smem.transposed.stage(KvPipeline::stage_of(n));
      const int keys = work.rows_in(tile) - fragment::lane_column();
      const auto takes_part = [&](int r, int column, unsigned int weight) {
        if constexpr (HAS_SCORE) return weight != 0x80;
        if constexpr (HAS_MASK) return (mask[r] >> column & 1) != 0;
        return fragment_tile::Pairs::key_of(column) < keys;
      };
      warpgroup_fp8::add_nonfinite(acc, weights, tile_smem, takes_part);
      ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);  // v, read as it came
      warpgroup_fp8::clear_nonfinite<BLOCK_KV, V_ROWS, CONSUMER_THREADS>(tile_smem, threadIdx.x);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);  // v, now finite
    };

    const int first_kv_use = kv_uses;
    const bool has_tiles = !HAS_MASK && !ENDS_ON_DEVICE || next > TileRef::NONE;
    if (has_tiles) {
      warpgroup::mbarrier_wait(shared.q_full_barrier(index), q_uses % 2);
      ++q_uses;
    }
    // Computes the next tile; `find_next` looks up the one after it, while scores are multiplied.
    const auto compute_tile = [&](int tile, bool masked, auto first, const auto& find_next) {
      const int n = kv_uses;
      // 2 scores
      shared.k_pipeline.wait_full(n);
      ptx::wgmma_fence();
      issue_qk(n);
      if (!decltype(first)::value || n != first_kv_use) pass_turn();
      find_next();
      const bool sees = evaluate_mask(tile, masked) || !SKIP_EMPTY_WARPS;
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(s);
      warpgroup::arrive_warpgroup(shared.k_pipeline.empty_barrier(n));
      if (next <= TileRef::NONE) warpgroup::arrive_warpgroup(shared.q_empty_barrier(index));
      if (!SKIP_EMPTY_WARPS || !decltype(first)::value || sees) {
        // 3 score mod
        // 4 mask
        const bool hides = change_scores(n, tile, masked, first);
        // 5 row max
        weigh(n, tile, masked, hides);
      } else {
        alpha[0] = alpha[1] = 1;
#pragma unroll
        for (int x = 0; x < COLUMNS / 4; ++x) weights[0][x] = weights[1][x] = 0;
      }
      // A branch, across which the compiler moves no exponentials: in the turn they would hold up
      // the others.
      shared.transposed_pipeline.wait_full(n);
      if (HAS_SCORE || (CHECK_FINITE && masked)) repair_nonfinite(n, tile);
      // 6 rescale
      // 7 accumulate p v
      const bool has_factor =
          HAS_SCORE || masked ||
          (V_SCALE_ROWS && ptx::shuffle(shared.v_units[KvPipeline::stage_of(n)].factor, 0) != 1);
      accumulate_pv(n, has_factor);
      ++kv_uses;
    };

    bool more_tiles = has_tiles;
#pragma unroll 1
    while (more_tiles) {
      // The first tile, and with a mask that has edges each PARTIAL one.
      const int begin = index_of(next);
      const bool masked = HAS_MASK ? kind_of(next) != UNMASKED : work.is_masked(begin);
      compute_tile(begin, masked, warpgroup::Bool<true>(), [&] {
        if (HAS_MASK && kv_uses == first_kv_use) {
          next = uniform(work.second_tile);
          if constexpr (HAS_EDGES) run = ptx::shuffle(work.second_run, 0);
        } else {
          advance(begin);
        }
      });
      // The others.
#pragma unroll 1
      while (next > TileRef::NONE && !(HAS_EDGES && kind_of(next) != UNMASKED)) {
        const int tile = index_of(next);
        const bool partial = !HAS_EDGES && MAY_MASK && kind_of(next) != UNMASKED;
        compute_tile(tile, partial, warpgroup::Bool<false>(), [&] {
          if (HAS_EDGES && tile > run) {
            next = tile_before(next);
          } else {
            advance(tile);
          }
        });
      }
      more_tiles = HAS_EDGES && next > TileRef::NONE;
    }
    if (has_tiles) pass_turn();

    fragment_softmax::row_sum(l);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (direct && m[r] != -number::infinity()) m[r] *= factors[8 * r];
      l[r] *= fp8_softmax::UNSHIFTED;
    }
    float weight[2];
    fragment_softmax::join_sink(m, l, weight, 1.0f,
                                p.sink == nullptr
                                    ? -number::infinity()
                                    : number::load<float>(p.sink, p.kind_sink, work.head));
    // 8 normalise
    float common = fp8_softmax::UNSHIFTED;
    if constexpr (HAS_DROPOUT) common *= static_cast<float>(p.keep_scale);
    if (!V_SCALE_ROWS && work.rows > 0) common *= work_scales.result;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] = l[r] == 0.0f ? 0.0f : common * weight[r] * ptx::reciprocal(l[r]);
    }
    more_work = shared.has_work(w + 1);  // asked where registers are free, before the stores
    if constexpr (WIDE_RESULT) {
      fragment::store_wide<D_V>(acc, weight, p.out,
                                layout::offset(p.out, work.entry, work.head, false) +
                                    (work.first + fragment::warp_row()) * p.out.row,
                                work.rows - fragment::warp_row());
    } else {
      unsigned int out[2][COLUMNS_V / 2];
      warpgroup_rows::narrow_rows(acc, weight, out);
      if constexpr (TMA_STORE) {
        if (ptx::shuffle(fragment::warp_row(), 0) < work.rows) {
          warpgroup_rows::tma_store_wait();
          warpgroup_rows::tma_store_rows<D_V, OUT_SLAB_BYTES>(
              out, out_address, out_map, work.out, work.first_row_q + fragment::warp_row());
        }
      } else {
        warpgroup_rows::store_rows<D_V>(
            out, p.out,
            layout::offset(p.out, work.entry, work.head, false) + work.first * p.out.row,
            work.rows);
      }
    }
    // 9 store lse
    if (p.lse.data != nullptr) {
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
    fragment_softmax::init_state(m, l, acc);
    tile::count_tiles(p, kv_uses - first_kv_use);
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
                const __grid_constant__ ptx::TensorMap out_map) {
  extern __shared__ Aligned shared_smem[];
  const SharedMemory smem(shared_smem[0].x);
  if (threadIdx.x == 0) smem.storage->init_barriers();
  __syncthreads();  // the mbarriers, initialised

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    const int warp = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE;
    if (warp == 1) {
      fp8_producer::publish_work_tiles(p, *smem.storage);
    } else if (warp > 1) {
      fp8_producer::transposer_warps(smem, warp - 2);
    } else {
      fp8_producer::producer(p, smem, q_map, k_map, v_map);
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGS>();
    consumer(p, smem, out_map);
  }
}
