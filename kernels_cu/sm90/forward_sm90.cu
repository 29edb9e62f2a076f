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
// own_size = lead_size; packed: heads * blocks. Shared memory: SharedStorage in
// forward_storage.cuh. BLOCK_Q is 64 times the consumers, BLOCK_KV one of the widths in
// ptx/wgmma.cuh. Behind the parameters come the tensor maps of q, k, v and, where TMA_STORE, out.
#include "../common/params.cuh"
#include "../ptx/reciprocal.cuh"
#include "../sm80/fragment_softmax.cuh"
#include "../sm80/fragment_tile.cuh"
#include "forward_storage.cuh"
#include "tile_scheduler.cuh"
#include "warpgroup.cuh"
#include "warpgroup_rows.cuh"

namespace {

using namespace forward_storage;
using tile_scheduler::TileScheduler;
using tile_scheduler::TileWalk;
using tile_scheduler::WorkTile;

constexpr int COLUMNS = BLOCK_KV / 4;                 // scores of a thread in each of its two rows
constexpr int MASK_COLUMNS = MAY_MASK ? COLUMNS : 2;  // for which the mask is evaluated
constexpr int SCORE_COLUMNS = fragment_tile::columns_at_once(COLUMNS);
constexpr int COLUMNS_V = matmul::round_up(D_V, warpgroup::SLAB_COLUMNS) / 4;
constexpr int OUT_SLAB_BYTES = fragment::WARP_ROWS * warpgroup::SLAB_ROW_BYTES;  // of one warp
// Whether halves of a masked tile's columns are skipped in which no pair takes part: where there
// are registers for the question, and it costs less than it saves.
constexpr bool HALF_TILES = HAS_EDGES && !HAS_SCORE && D_V <= 64 && CONSUMERS == 2;
// Whether a warp without any pair that takes part computes no weights of a masked tile. With a mask
// of ranges, there is hardly such a warp.
constexpr bool SKIP_EMPTY_WARPS = HAS_EDGES && !HAS_RANGE && !HAS_SCORE;
// The narrow output of short rows is rescaled in less time than it takes to vote whether it must
// be.
constexpr bool ALWAYS_RESCALE = D_V <= 64 && CONSUMERS == 2;
// Registers of a thread of the producer and of the consumers. With more than the block was launched
// with in all, setmaxnreg would wait for ever.
constexpr int PRODUCER_REGS = CONSUMERS == 2 ? 40 : 32, CONSUMER_REGS = CONSUMERS == 2 ? 232 : 160;
static_assert(PRODUCER_REGS + CONSUMERS * CONSUMER_REGS <=
                  65536 / THREADS / 8 * 8 * (CONSUMERS + 1),
              "registers");

// -- roles of the producer warpgroup --------------------------------------------------------------

// One warp: publishes the block's work tiles.
__device__ __forceinline__ void scheduler_warp(const Params& p, SharedStorage& smem) {
  TileScheduler& scheduler = smem.scheduler;
  if (ptx::lane_index() == 0) scheduler = TileScheduler(p);
  __syncwarp();  // the scheduler, which lane 0 wrote
#pragma unroll 1
  for (int w = 0; w < scheduler.rounds; ++w) {
    smem.work_pipeline.wait_empty(w);
    tile_scheduler::publish_work_tile(p, scheduler, w, smem.work_tile(w));
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(smem.work_pipeline.full_barrier(w));
  }
}

// Two warps: check whether all values of each masked tile are finite.
__device__ __forceinline__ void finite_check_warps(SharedStorage& smem) {
  constexpr int CHECKERS = CHECKER_WARPS * ptx::WARP_SIZE;
  const int thread = threadIdx.x % warpgroup::WARPGROUP_SIZE - 2 * ptx::WARP_SIZE;
  int n = 0, checks = 0;
#pragma unroll 1
  for (int w = 0; smem.has_work(w); ++w) {
    smem.work_pipeline.wait_full(w);
    const WorkTile& work = smem.work_tile(w);
#pragma unroll 1
    for (int tile = work.last_tile(); tile >= 0; ++n, tile = work.tile_before(tile)) {
      smem.v_pipeline.wait_full(n);
      if (HAS_SCORE || work.is_masked(tile)) {
        const bool finite = warpgroup_rows::finite_rows<V_TILE_BYTES, CHECKERS>(
            smem.v[KvPipeline::stage_of(n)], thread);
        const bool has_nonfinite = ptx::any_lane(!finite);
        if (ptx::lane_index() == 0) {
          smem.has_nonfinite[KvPipeline::stage_of(checks)][thread / ptx::WARP_SIZE] =
              has_nonfinite ? 1 : 0;
        }
        warpgroup::arrive_warp(smem.finite_checked_barrier(checks));
        ++checks;
      }
      warpgroup::arrive_warp(smem.v_pipeline.empty_barrier(n));
    }
    warpgroup::arrive_warp(smem.work_pipeline.empty_barrier(w));
  }
}

// One thread: issues the TMA loads of every work tile.
__device__ __forceinline__ void producer(SharedStorage& smem, const ptx::TensorMap& q_map,
                                         const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  const unsigned int q_address = ptx::shared_address(smem.q);
  const unsigned int k_address = ptx::shared_address(smem.k);
  const unsigned int v_address = ptx::shared_address(smem.v);
  int n = 0, q_uses = 0;
#pragma unroll 1
  for (int w = 0; smem.has_work(w); ++w) {
    smem.work_pipeline.wait_full(w);
    const WorkTile& work = smem.work_tile(w);
    const int last = work.last_tile();
#pragma unroll 1
    for (int tile = last; tile >= 0; ++n, tile = work.tile_before(tile)) {
      const int stage = KvPipeline::stage_of(n);
      const int first_row = work.first_row_k + tile * BLOCK_KV;
      smem.k_pipeline.wait_empty(n);
      ptx::mbarrier_arrive_expect_tx(smem.k_pipeline.full_barrier(n), K_TILE_BYTES);
      warpgroup::tma_load_tile<BLOCK_KV, D>(k_address + stage * K_TILE_BYTES, k_map, work.k,
                                            first_row, smem.k_pipeline.full_barrier(n));
      if (tile == last) {
        // 1 load q
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; ++c) {
          const QPipeline& q_pipeline = smem.q_pipelines[c];
          q_pipeline.wait_empty(q_uses);
          ptx::mbarrier_arrive_expect_tx(q_pipeline.full_barrier(q_uses), Q_TILE_BYTES);
          warpgroup::tma_load_tile<warpgroup::WARPGROUP_ROWS, D>(
              q_address + (QPipeline::stage_of(q_uses) * CONSUMERS + c) * Q_TILE_BYTES, q_map,
              work.q, work.first_row_q + c * warpgroup::WARPGROUP_ROWS,
              q_pipeline.full_barrier(q_uses));
        }
        ++q_uses;
      }
      smem.v_pipeline.wait_empty(n);
      ptx::mbarrier_arrive_expect_tx(smem.v_pipeline.full_barrier(n), V_TILE_BYTES);
      warpgroup::tma_load_tile<BLOCK_KV, D_V>(v_address + stage * V_TILE_BYTES, v_map, work.v,
                                              first_row, smem.v_pipeline.full_barrier(n));
    }
    ptx::mbarrier_arrive(smem.work_pipeline.empty_barrier(w));
  }
}

// -- the role of a consumer warpgroup -------------------------------------------------------------

// What a consumer keeps from work tile to work tile.
struct ConsumerState {
  const Params& p;
  SharedStorage& smem;
  const int index;
  const float scale;
  // Logits are `unit` times a score; the sign of a negative scale goes to the queries, and so does
  // a scale of 0, lest it meets a score of -inf.
  const float unit, c;
  const warpgroup::SmemDesc q, k, v;
  const unsigned int out_address;  // of the warp's 16 rows
  // Uses of the pipelines so far: tiles of k and v, finite checks, work tiles with queries.
  int kv_uses = 0, checks = 0, q_uses = 0;
  float m[2], l[2], acc[2][COLUMNS_V];

  __device__ __forceinline__ ConsumerState(const Params& p, SharedStorage& smem)
      : p(p),
        smem(smem),
        index(warpgroup::index()),
        scale(ptx::shuffle(static_cast<float>(p.scale), 0)),  // once, and kept
        unit(HAS_SCORE ? 1.0f : fabs(scale)),
        c(unit == 0 ? 1.0f : fmin(unit * tile::LOG2_E, number::largest_float())),
        q(warpgroup::make_smem_desc(ptx::shared_address(smem.q), 0)),
        k(warpgroup::make_smem_desc(ptx::shared_address(smem.k), 0)),
        v(warpgroup::make_smem_desc(ptx::shared_address(smem.v),
                                    BLOCK_KV * warpgroup::SLAB_ROW_BYTES)),
        out_address(smem.out_address() + ptx::shuffle(fragment::warp_row(), 0) * V_ROW_BYTES) {
    fragment_softmax::init_state(m, l, acc);
  }

  __device__ __forceinline__ int next_consumer() const {
    return index + 1 < CONSUMERS ? index + 1 : 0;
  }
};

// A consumer's 64 queries of one work tile.
struct Attention {
  ConsumerState& state;
  const WorkTile& work;
  TileWalk walk;
  const QPipeline& q_pipeline;
  const int q_use, q_stage;
  const HeadConstants given;
  const int first_kv_use;
  float m_new[2], alpha[2], s[2][COLUMNS];
  unsigned int weights[2][COLUMNS / 2];
  unsigned int mask[2];  // bit n of word r: whether pair (r, n) takes part

  __device__ __forceinline__ Attention(ConsumerState& state, const WorkTile& work)
      : state(state),
        work(work),
        walk(work),
        q_pipeline(state.smem.q_pipelines[state.index]),
        q_use(state.q_uses),
        q_stage(Q_STAGES == 1 ? 0 : ptx::shuffle(QPipeline::stage_of(q_use), 0)),
        given(tile::head_constants_of(state.p, work.box_of(0))),
        first_kv_use(state.kv_uses) {}

  __device__ __forceinline__ void compute() {
    const bool has_tiles = !HAS_MASK && !PACKED || walk.has_next();
    if (has_tiles) wait_queries();
    bool more = has_tiles;
#pragma unroll 1
    while (more) {
      first_tile();
      ++state.kv_uses;
#pragma unroll 1
      for (; walk.has_next() && !(HAS_EDGES && walk.next_has_mask()); ++state.kv_uses) {
        overlapped_tile();
      }
      last_output();
      more = HAS_EDGES && walk.has_next();
    }
  }

  // Waits for the queries, and gives them the sign of the scale.
  __device__ __forceinline__ void wait_queries() {
    q_pipeline.wait_full(q_use);
    ++state.q_uses;
    if (!HAS_SCORE && !(state.scale > 0)) {
      warpgroup_rows::turn_rows<Q_TILE_BYTES, warpgroup::WARPGROUP_SIZE>(
          state.smem.q[q_stage][state.index], threadIdx.x % warpgroup::WARPGROUP_SIZE, state.scale);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(CONSUMER_Q + state.index,
                              warpgroup::WARPGROUP_SIZE);  // the consumer's queries, with the sign
    }
  }

  // -- one tile of keys

  // The first tile, and with a mask that has edges each PARTIAL one: no product of the tile before
  // overlaps with its softmax.
  __device__ __forceinline__ void first_tile() {
    const int n = state.kv_uses;
    // 2 scores
    state.smem.k_pipeline.wait_full(n);
    ptx::wgmma_fence();
    issue_qk(n);
    const int tile = walk.next();
    const bool masked = HAS_MASK ? walk.next_has_mask() : work.is_masked(tile);
    if (HAS_MASK && n == first_kv_use) {
      walk.advance_to_second();
    } else {
      walk.advance(tile);
    }
    const bool sees = find_pairs(tile, masked) || !SKIP_EMPTY_WARPS;
    bool half_sees[2] = {true, true};
    if (HALF_TILES && masked) fragment_tile::find_active_halves<COLUMNS>(mask, half_sees);
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(s);
    warpgroup::arrive_warpgroup(state.smem.k_pipeline.empty_barrier(n));
    if (!walk.has_next()) warpgroup::arrive_warpgroup(q_pipeline.empty_barrier(q_use));
    if (sees) {
      softmax(tile, masked, half_sees, n != first_kv_use);
    } else {
#pragma unroll
      for (int x = 0; x < COLUMNS / 2; ++x) weights[0][x] = weights[1][x] = 0;
    }
    if (HAS_SCORE || (CHECK_FINITE && masked)) repair_nonfinite(n, tile);
  }

  // Makes the scores of a first tile into weights.
  __device__ __forceinline__ void softmax(int tile, bool masked, const bool (&half_sees)[2],
                                          bool has_output) {
    // 3 score mod
    // 4 mask
    const bool hides = change_scores<true>(tile, masked);
    // 5 row max
    const bool grew = row_max();
    // 6 rescale
    if (grew) fragment_softmax::raise_max(state.m, m_new, state.l, alpha, state.c);
    if (HAS_EDGES && has_output && grew) fragment_softmax::scale_rows(state.acc, alpha);
    if constexpr (HALF_TILES) {
      fragment_softmax::exponentiate_halves(s, state.m, state.l, state.c, half_sees);
    } else {
      fragment_softmax::exponentiate(s, state.m, state.l, state.c, hides);
    }
    if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(state.p, work.box_of(tile), s);
    fragment::narrow(s, weights);
  }

  // Any other tile: its products are issued with those for the output of the tile before, which go
  // on while its scores become weights.
  __device__ __forceinline__ void overlapped_tile() {
    const int n = state.kv_uses;
    const int tile = walk.next();
    const bool masked = !HAS_EDGES && MAY_MASK && walk.next_has_mask();
    state.smem.k_pipeline.wait_full(n);
    ptx::named_barrier_sync(PING_PONG + state.index, TWO_CONSUMERS);  // this consumer's turn
    ptx::wgmma_fence();
    issue_qk(n);
    // 7 accumulate p v
    state.smem.v_pipeline.wait_full(n - 1);
    ptx::wgmma_fence();  // again: the compiler sees a branch behind the first
    issue_pv(n - 1);
    ptx::named_barrier_arrive(PING_PONG + state.next_consumer(), TWO_CONSUMERS);  // the next turn
    walk.advance_in_run(tile);
    find_pairs(tile, masked);
    ptx::wgmma_wait<1>();  // the scores
    ptx::fence_accumulator(s);
    warpgroup::arrive_warpgroup(state.smem.k_pipeline.empty_barrier(n));
    if (!walk.has_next()) warpgroup::arrive_warpgroup(q_pipeline.empty_barrier(q_use));
    const bool hides = change_scores<false>(tile, masked);
    const bool grew = row_max() || ALWAYS_RESCALE;
    if (grew) fragment_softmax::raise_max(state.m, m_new, state.l, alpha, state.c);
    fragment_softmax::exponentiate(s, state.m, state.l, state.c, hides);
    if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(state.p, work.box_of(tile), s);
    ptx::wgmma_wait<0>();  // the output, and the weights that it was multiplied with
    ptx::fence_accumulator(state.acc);
    warpgroup::arrive_warpgroup(state.smem.v_pipeline.empty_barrier(n - 1));
    fragment::narrow(s, weights);
    if (grew) fragment_softmax::scale_rows(state.acc, alpha);
    if (HAS_SCORE || (CHECK_FINITE && masked)) repair_nonfinite(n, tile);
  }

  // The output of the last tile: nothing is left to overlap with.
  __device__ __forceinline__ void last_output() {
    const int n = state.kv_uses - 1;
    state.smem.v_pipeline.wait_full(n);
    ptx::wgmma_fence();
    issue_pv(n);
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(state.acc);
    warpgroup::arrive_warpgroup(state.smem.v_pipeline.empty_barrier(n));
  }

  // -- parts of it

  // s = q k^T.
  __device__ __forceinline__ void issue_qk(int n) {
    warpgroup::multiply<D, BLOCK_KV>(
        s, state.q + (q_stage * CONSUMERS + state.index) * (Q_TILE_BYTES / 16),
        state.k + KvPipeline::stage_of(n) * (K_TILE_BYTES / 16));
    ptx::wgmma_commit();
  }
  // acc += weights v.
  __device__ __forceinline__ void issue_pv(int n) {
    warpgroup::multiply_add<BLOCK_KV>(state.acc, weights,
                                      state.v + KvPipeline::stage_of(n) * (V_TILE_BYTES / 16));
    ptx::wgmma_commit();
  }

  // Evaluates the mask of a masked tile. Returns whether any pair of the warp takes part.
  __device__ __forceinline__ bool find_pairs(int tile, bool masked) {
    if (MAY_MASK && masked) {
      return fragment_tile::evaluate_mask<MASK_COLUMNS, fragment_tile::MASK_COLUMNS_AT_ONCE>(
          state.p, work.box_of(tile),
          HAS_RANGE ? PARTIAL : warpgroup_tile::class_of(work.classes, tile), mask);
    }
    return true;
  }

  // Changes the scores, and gives pairs that take no part the score -inf. Returns whether the
  // weights have to tell which pairs these are: of those that a score change hides, nothing else
  // does. KEYS_END: whether keys may end in the tile, as they do in the first one alone.
  template <bool KEYS_END>
  __device__ __forceinline__ bool change_scores(int tile, bool masked) {
    bool hides = false;
    if constexpr (HAS_SCORE) {
      const bool hidden = fragment_tile::apply_score_mod<KEYS_END, SCORE_COLUMNS>(
          state.p, given, work.box_of(tile), s, state.scale);
      hides = ptx::any_lane(hidden) || masked;
    }
    if constexpr (MAY_MASK) {
      if (masked) fragment_tile::apply_mask(s, mask);
    } else {
      if (masked) fragment_tile::mask_missing_keys(s, work.rows_in(tile));
    }
    return hides;
  }

  __device__ __forceinline__ bool row_max() {
    return fragment_softmax::row_max<!ALWAYS_RESCALE>(s, state.m, m_new, state.c);
  }

  // Waits for the finite check of a tile. If it found NaN or infinities, which is rare, adds what
  // they are to the output one by one, without pairs that take no part, and makes them 0 in v.
  __device__ __forceinline__ void repair_nonfinite(int n, int tile) {
    warpgroup::mbarrier_wait(state.smem.finite_checked_barrier(state.checks),
                             KvPipeline::phase_of(state.checks));
    const unsigned int (&has_nonfinite)[2] =
        state.smem.has_nonfinite[KvPipeline::stage_of(state.checks)];
    ++state.checks;
    if ((has_nonfinite[0] | has_nonfinite[1]) == 0) return;
    char* const v_smem = state.smem.v[KvPipeline::stage_of(n)];
    const int keys = work.rows_in(tile) - fragment::lane_column();
    const auto takes_part = [&](int r, int column, storage_t weight) {
      if constexpr (HAS_SCORE) return weight != 0x8000;
      if constexpr (HAS_MASK) return (mask[r] >> column & 1) != 0;
      return fragment_tile::Pairs::key_of(column) < keys;
    };
    warpgroup_rows::add_nonfinite(state.acc, weights, v_smem, takes_part);
    ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);  // v, read as it came
    warpgroup_rows::clear_nonfinite<V_TILE_BYTES, CONSUMER_THREADS>(v_smem, threadIdx.x);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);  // v, now finite
  }

  // -- the results

  // Normalises the output, stores it and lse, and begins anew. Returns whether the block has work
  // tile `next`: that is asked where registers are free again, before the stores.
  __device__ __forceinline__ bool epilogue(int next, const ptx::TensorMap& out_map) {
    const Params& p = state.p;
    fragment_softmax::row_sum(state.l);
    float weight[2];
    fragment_softmax::join_sink(state.m, state.l, weight, state.unit,
                                p.sink == nullptr
                                    ? -number::infinity()
                                    : number::load<float>(p.sink, p.kind_sink, work.head));
    // 8 normalise
    const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] = state.l[r] == 0.0f ? 0.0f : keep_scale * weight[r] * ptx::reciprocal(state.l[r]);
    }
    unsigned int out[2][COLUMNS_V / 2];
    warpgroup_rows::narrow_rows(state.acc, weight, out);
    const bool has_next = state.smem.has_work(next);
    store_out(out, out_map);
    // 9 store lse
    warpgroup_rows::store_lse(p, work.entry, work.head, work.first, work.rows, state.m, state.l);
    fragment_softmax::init_state(state.m, state.l, state.acc);
    tile::count_tiles(p, state.kv_uses - first_kv_use);
    return has_next;
  }

  __device__ __forceinline__ void store_out(unsigned int (&out)[2][COLUMNS_V / 2],
                                            const ptx::TensorMap& out_map) const {
    if constexpr (TMA_STORE) {
      if (work.rows > 0) {
        warpgroup_rows::tma_store_wait();
        warpgroup_rows::tma_store_rows<D_V, OUT_SLAB_BYTES>(
            out, state.out_address, out_map, work.out, work.first_row_q + fragment::warp_row());
      }
    } else {
      const Operand& to = state.p.out;
      warpgroup_rows::store_rows<D_V>(
          out, to, layout::offset(to, work.entry, work.head, false) + work.first * to.row,
          work.rows);
    }
  }
};

// A warpgroup: computes 64 queries of every work tile.
__device__ __forceinline__ void consumer(const Params& p, SharedStorage& smem,
                                         const ptx::TensorMap& out_map) {
  ConsumerState state(p, smem);
  if (state.next_consumer() == 0) {
    ptx::named_barrier_arrive(PING_PONG, TWO_CONSUMERS);  // the first turn is consumer 0's
  }
  bool more = true;
#pragma unroll 1
  for (int w = 0; more; ++w) {
    smem.work_pipeline.wait_full(w);
    Attention attention(state, smem.work_tile(w));
    attention.compute();
    more = attention.epilogue(w + 1, out_map);
    warpgroup::arrive_warp(smem.work_pipeline.empty_barrier(w));
  }
  if (state.index == 0) {
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
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_smem[0].x);
  if (threadIdx.x == 0) smem.init_barriers();
  __syncthreads();  // the mbarriers, initialised

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    const int warp = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE;
    if (warp == 1) {
      scheduler_warp(p, smem);
    } else if (warp > 1) {
      if (CHECK_FINITE) finite_check_warps(smem);
    } else if (threadIdx.x % warpgroup::WARPGROUP_SIZE == 0) {
      producer(smem, q_map, k_map, v_map);
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGS>();
    consumer(p, smem, out_map);
  }
}
