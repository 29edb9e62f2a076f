// Tiled attention, forward, in 16-bit types by the tensor cores of compute capability 9.0: the twin
// of reference/cpu/forward.py.
//
// The last warpgroup of a block copies, by one thread, and tells what comes next, by one warp; the
// others compute: each has 64 queries of the block. Keys and values of one tile after the other,
// the last first, pass through STAGES places each. While a warpgroup turns scores into weights, the
// tensor cores multiply the weights of its tile before by their values, and then the next
// warpgroup's scores: the warpgroups take turns to begin their products (FlashAttention-3: Shah et
// al. 2024). The first tile has none before it; nor have, where a mask has edges, PARTIAL ones, so
// that the loop over FULL ones holds no code for hiding pairs.
//
// Tiles without a pair that takes part are neither copied nor computed. Of tiles that have some
// that take no part, two more warps of the last warpgroup look whether all values are finite.
//
// A block works on one job after the other, a job being a block of a head's queries: while the last
// tile of one is computed and its results are written, the next one's queries, keys and values are
// on their way.
//
// Results pass through shared memory where there is room, from which boxes are copied to the array.
//
// Grid: no more blocks than jobs, of which there are prod(own_size) * heads * blocks, with own_size
// = lead_size; packed: heads * blocks. Shared memory: the queries; keys, values; the results, if
// there is room; what a block knows. BLOCK_Q is 64 times the warpgroups that compute, BLOCK_KV one
// of the widths in ptx/wgmma.cuh. Behind the parameters come the maps of q, k, v and, where
// TMA_STORE, out.
#include "../common/params.cuh"
#include "../ptx/reciprocal.cuh"
#include "../sm80/fragment_softmax.cuh"
#include "../sm80/fragment_tile.cuh"
#include "warpgroup.cuh"
#include "tile_scheduler.cuh"
#include "warpgroup_rows.cuh"

namespace {

constexpr int COLUMNS = BLOCK_KV / 4;
constexpr int ASKED = MAY_MASK ? COLUMNS : 2;  // columns for which the mask is asked
constexpr int AT_ONCE = fragment_tile::columns_at_once(COLUMNS);
constexpr int COLUMNS_V = matmul::round_up(D_V, warpgroup::SLAB_COLUMNS) / 4;
constexpr int Q_BYTES = fragment::row_bytes(D), V_BYTES = fragment::row_bytes(D_V);
constexpr int CONSUMERS = BLOCK_Q / warpgroup::WARPGROUP_ROWS;
constexpr int HELD_BYTES = warpgroup::WARPGROUP_ROWS * Q_BYTES;  // a warpgroup's queries
constexpr int KEYS_BYTES = BLOCK_KV * Q_BYTES, VALUES_BYTES = BLOCK_KV * V_BYTES;
// Places of keys, and of values, and of queries: small ones leave room for more, unless what a
// score reads is to lie in the cache that shared memory takes its room from.
constexpr bool SMALL = D <= 64 && D_V <= 64 && !HAS_SCORE;
constexpr int STAGES = SMALL ? 4 : 2, Q_PLACES = SMALL ? 2 : 1;
constexpr int JOBS = 3;  // that are known at a time: the last, this and the next one
// Of a masked tile, the halves of its columns are looked at where registers and time allow it.
constexpr bool HALVES = HAS_EDGES && !HAS_SCORE && D_V <= 64 && CONSUMERS == 2;
// Whether a warp that sees nothing of a masked tile makes no weights. One of ranges sees some.
constexpr bool SKIPS = HAS_EDGES && !HAS_RANGE && !HAS_SCORE;
// Narrow output of short rows is multiplied sooner than it is asked whether a maximum grew.
constexpr bool RESCALES_ALWAYS = D_V <= 64 && CONSUMERS == 2;
// Whether a tile may have keys that take no part, and yet are there: their values may be anything.
constexpr bool LOOKS = MAY_MASK || PACKED;
constexpr int LOOKING = LOOKS ? 2 : 0;  // warps, of the warpgroup that copies
constexpr int LOOKERS = LOOKING * warpgroup::ARRIVALS_OF_WARP;    // arrivals
constexpr int COMPUTING = CONSUMERS * warpgroup::WARPGROUP_SIZE;  // threads
// Registers of a thread that copies and of one that computes: as many in all as at the start, or
// some wait for them for ever.
constexpr int KEPT = CONSUMERS == 2 ? 40 : 32, TAKEN = CONSUMERS == 2 ? 232 : 160;

// Barriers of the places that tiles pass through: what is there has come, and has been read.
struct Passing {
  unsigned long long full[STAGES], empty[STAGES];
};
// What a block knows lies in shared memory, because registers hold the sums.
struct Known {
  tile_scheduler::ScheduledTile jobs[JOBS];
  tile_scheduler::TileScheduler scheduler;
  Passing keys, values;
  // Of each place of each warpgroup's queries: they have come, and have been read.
  unsigned long long queries_full[3 * Q_PLACES], queries_empty[3 * Q_PLACES];
  // Of jobs: what they are is known, and nobody needs that any more.
  unsigned long long told[JOBS], done[JOBS];
  // That values were looked at, of tiles for which this matters: whether each warp saw some that
  // are not finite.
  unsigned long long looked_at[STAGES];
  unsigned int nonfinite[STAGES][2];
};
constexpr int KNOWN_BYTES = static_cast<int>(sizeof(Known));
constexpr int RESULTS_BYTES = BLOCK_Q * V_BYTES;
constexpr int BOX_BYTES = fragment::WARP_ROWS * warpgroup::SLAB_ROW_BYTES;
constexpr int LEAST_BYTES =
    Q_PLACES * CONSUMERS * HELD_BYTES + STAGES * (KEYS_BYTES + VALUES_BYTES) + KNOWN_BYTES;

struct alignas(1024) Swizzled {
  char x[1024];
};

static_assert(STORAGE < 2, "16-bit types");
static_assert(THREADS == (CONSUMERS + 1) * warpgroup::WARPGROUP_SIZE && fragment::WARP_ROWS == 16,
              "BLOCK_Q, THREADS");
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "BLOCK_Q");
static_assert(KEPT + CONSUMERS * TAKEN <= 65536 / THREADS / 8 * 8 * (CONSUMERS + 1), "registers");
static_assert(SHARED_BYTES == LEAST_BYTES + RESULTS_BYTES ||
                  (SHARED_BYTES == LEAST_BYTES && !TMA_STORE),
              "SHARED_BYTES");

__device__ __forceinline__ int stage_of(int n) { return n % STAGES; }
__device__ __forceinline__ int parity_of(int n) { return n / STAGES % 2; }
__device__ __forceinline__ int q_place_of(int n) { return n % Q_PLACES * CONSUMERS; }
__device__ __forceinline__ int q_parity_of(int n) { return n / Q_PLACES % 2; }
__device__ __forceinline__ int parity_of_job(int j) { return j / JOBS % 2; }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ ptx::TensorMap v_map,
                const __grid_constant__ ptx::TensorMap out_map) {
  extern __shared__ Swizzled shared_smem[];
  char* const q_smem = shared_smem[0].x;
  char* const keys_smem = q_smem + Q_PLACES * CONSUMERS * HELD_BYTES;
  char* const values_smem = keys_smem + STAGES * KEYS_BYTES;
  char* const results_smem = values_smem + STAGES * VALUES_BYTES;
  Known* const known_smem =
      reinterpret_cast<Known*>(results_smem + (TMA_STORE ? RESULTS_BYTES : 0));
  const unsigned int q_address = ptx::shared_address(q_smem);
  const unsigned int keys_address = ptx::shared_address(keys_smem);
  const unsigned int values_address = ptx::shared_address(values_smem);
  Passing &keys = known_smem->keys, &values = known_smem->values;
  const auto full = [](Passing& of, int n) { return ptx::shared_address(&of.full[stage_of(n)]); };
  const auto empty = [](Passing& of, int n) { return ptx::shared_address(&of.empty[stage_of(n)]); };
  const auto looked_at = [known_smem](int n) {
    return ptx::shared_address(&known_smem->looked_at[stage_of(n)]);
  };
  const auto queries_full = [known_smem](int n) {
    return ptx::shared_address(&known_smem->queries_full[n]);
  };
  const auto queries_empty = [known_smem](int n) {
    return ptx::shared_address(&known_smem->queries_empty[n]);
  };
  const auto told = [known_smem](int j) {
    return ptx::shared_address(&known_smem->told[j % JOBS]);
  };
  const auto done = [known_smem](int j) {
    return ptx::shared_address(&known_smem->done[j % JOBS]);
  };
  // Every block has a first job, and how many it has is told with that: until then nobody waits.
  const auto has_job = [known_smem](int j) { return j == 0 || j < known_smem->scheduler.rounds; };

  if (threadIdx.x == 0) {
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
      ptx::mbarrier_init(full(keys, n), 1);
      ptx::mbarrier_init(full(values, n), 1);
      ptx::mbarrier_init(empty(keys, n), CONSUMERS * warpgroup::ARRIVALS_OF_WARPGROUP);
      ptx::mbarrier_init(empty(values, n), CONSUMERS * warpgroup::ARRIVALS_OF_WARPGROUP + LOOKERS);
      if constexpr (LOOKS) ptx::mbarrier_init(looked_at(n), LOOKERS);
    }
#pragma unroll
    for (int n = 0; n < Q_PLACES * CONSUMERS; ++n) {
      ptx::mbarrier_init(queries_full(n), 1);
      ptx::mbarrier_init(queries_empty(n), warpgroup::ARRIVALS_OF_WARPGROUP);
    }
#pragma unroll
    for (int j = 0; j < JOBS; ++j) {
      ptx::mbarrier_init(told(j), 1);
      ptx::mbarrier_init(done(j),
                         COMPUTING / ptx::WARP_SIZE * warpgroup::ARRIVALS_OF_WARP + 1 + LOOKERS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<KEPT>();
    const int warp = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE;
    if (warp == 1) {
      tile_scheduler::TileScheduler& scheduler = known_smem->scheduler;
      if (ptx::lane_index() == 0) scheduler = tile_scheduler::TileScheduler(p);
      __syncwarp();  // the rounds
#pragma unroll 1
      for (int j = 0; j < scheduler.rounds; ++j) {
        warpgroup::mbarrier_wait(done(j), parity_of_job(j) ^ 1);
        tile_scheduler::publish_work_tile(p, scheduler, j, known_smem->jobs[j % JOBS]);
        if (ptx::lane_index() == 0) ptx::mbarrier_arrive(told(j));
      }
      return;
    }
    if (warp > 1) {
      if (!LOOKS) return;
      const int own = threadIdx.x % warpgroup::WARPGROUP_SIZE - 2 * ptx::WARP_SIZE;
      int n = 0, looked = 0;
#pragma unroll 1
      for (int j = 0; has_job(j); ++j) {
        warpgroup::mbarrier_wait(told(j), parity_of_job(j));
        const tile_scheduler::ScheduledTile& job = known_smem->jobs[j % JOBS];
#pragma unroll 1
        for (int now = job.last_tile(); now >= 0; ++n, now = job.tile_before(now)) {
          warpgroup::mbarrier_wait(full(values, n), parity_of(n));
          if (HAS_SCORE || job.is_masked(now)) {
            const bool finite = warpgroup_rows::finite_rows<VALUES_BYTES, LOOKING * ptx::WARP_SIZE>(
                values_smem + stage_of(n) * VALUES_BYTES, own);
            const bool some = ptx::any_lane(!finite);
            if (ptx::lane_index() == 0) {
              known_smem->nonfinite[stage_of(looked)][warp - 2] = some ? 1 : 0;
            }
            warpgroup::arrive_warp(looked_at(looked));
            ++looked;
          }
          warpgroup::arrive_warp(empty(values, n));
        }
        warpgroup::arrive_warp(done(j));
      }
      return;
    }
    if (threadIdx.x % warpgroup::WARPGROUP_SIZE != 0) return;
    int n = 0, times = 0;  // that queries were copied
#pragma unroll 1
    for (int j = 0; has_job(j); ++j) {
      warpgroup::mbarrier_wait(told(j), parity_of_job(j));
      const tile_scheduler::ScheduledTile& job = known_smem->jobs[j % JOBS];
      const int last = job.last_tile();
#pragma unroll 1
      for (int now = last; now >= 0; ++n, now = job.tile_before(now)) {
        const int first = job.first_row_k + now * BLOCK_KV;
        warpgroup::mbarrier_wait(empty(keys, n), parity_of(n) ^ 1);
        ptx::mbarrier_arrive_expect_tx(full(keys, n), KEYS_BYTES);
        warpgroup::tma_load_tile<BLOCK_KV, D>(keys_address + stage_of(n) * KEYS_BYTES, k_map, job.k,
                                              first, full(keys, n));
        if (now == last) {
          // 1 load q
#pragma unroll 1
          for (int x = 0; x < CONSUMERS; ++x) {
            const int to = q_place_of(times) + x;
            warpgroup::mbarrier_wait(queries_empty(to), q_parity_of(times) ^ 1);
            ptx::mbarrier_arrive_expect_tx(queries_full(to), warpgroup::WARPGROUP_ROWS * Q_BYTES);
            warpgroup::tma_load_tile<warpgroup::WARPGROUP_ROWS, D>(
                q_address + to * HELD_BYTES, q_map, job.q,
                job.first_row_q + x * warpgroup::WARPGROUP_ROWS, queries_full(to));
          }
          ++times;
        }
        warpgroup::mbarrier_wait(empty(values, n), parity_of(n) ^ 1);
        ptx::mbarrier_arrive_expect_tx(full(values, n), VALUES_BYTES);
        warpgroup::tma_load_tile<BLOCK_KV, D_V>(values_address + stage_of(n) * VALUES_BYTES, v_map,
                                                job.v, first, full(values, n));
      }
      ptx::mbarrier_arrive(done(j));
    }
    return;
  }

  ptx::setmaxnreg_inc<TAKEN>();
  const int own = warpgroup::index();
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // once, and kept
  // Logits are `unit` times a score; the sign of a negative scale goes to the queries, and so does
  // a scale of 0, lest it meets a score of -inf.
  const float unit = HAS_SCORE ? 1.0f : fabs(scale);
  const float c = unit == 0 ? 1.0f : fmin(unit * tile::LOG2_E, number::largest_float());
  const warpgroup::SmemDesc q = warpgroup::make_smem_desc(q_address, 0);
  const warpgroup::SmemDesc k = warpgroup::make_smem_desc(keys_address, 0);
  const warpgroup::SmemDesc v =
      warpgroup::make_smem_desc(values_address, BLOCK_KV * warpgroup::SLAB_ROW_BYTES);
  const unsigned int results_address =  // the warp's own
      ptx::shared_address(results_smem) + ptx::shuffle(fragment::warp_row(), 0) * V_BYTES;
  const int next = own + 1 < CONSUMERS ? own + 1 : 0;
  // Turns are barriers 1 and on: whose it is, and who had the one before. Then come those of one
  // warpgroup, and one of all that compute.
  constexpr int BOTH = 2 * warpgroup::WARPGROUP_SIZE;
  constexpr int OWN = 1 + CONSUMERS, ALL = OWN + CONSUMERS;
  if (next == 0) ptx::named_barrier_arrive(1, BOTH);

  int steps = 0, looked = 0, times = 0;  // tiles, those that were looked at, and queries that came
  float m[2], l[2], acc[2][COLUMNS_V];
  fragment_softmax::init_state(m, l, acc);
  bool more_jobs = true;
#pragma unroll 1
  for (int j = 0; more_jobs; ++j) {
    warpgroup::mbarrier_wait(told(j), parity_of_job(j));
    const tile_scheduler::ScheduledTile& job = known_smem->jobs[j % JOBS];
    // The code of the next tile, and of FULL ones in a row the first. A shuffle tells the compiler
    // that lanes agree, without which it puts products in a row.
    int following = ptx::shuffle(job.first_code, 0), run = ptx::shuffle(job.first_run, 0);
    const auto go_on = [&](int below) {
      following = job.code_of(job.tile_before(below));
      if constexpr (HAS_MASK) following = ptx::shuffle(following, 0);
      if (HAS_EDGES && following >= 0 && following % 2 == 0) {
        run = ptx::shuffle(job.run_from(following / 2), 0);
      }
    };
    // The place of its queries.
    const int place = own + (Q_PLACES == 1 ? 0 : ptx::shuffle(q_place_of(times), 0));
    const HeadConstants given = tile::head_constants_of(p, job.box_of(0));

    float m_new[2], alpha[2], s[2][COLUMNS];
    unsigned int weights[2][COLUMNS / 2], allowed[2];
    const auto begin_scores = [&](int n) {
      warpgroup::multiply<D, BLOCK_KV>(s, q + place * (HELD_BYTES / 16),
                                       k + stage_of(n) * (KEYS_BYTES / 16));
      ptx::wgmma_commit();
    };
    const auto begin_output = [&](int n) {
      warpgroup::multiply_add<BLOCK_KV>(acc, weights, v + stage_of(n) * (VALUES_BYTES / 16));
      ptx::wgmma_commit();
    };
    // Whether the warp has a pair that takes part.
    const auto find_pairs = [&](int tile, bool masked) {
      if (MAY_MASK && masked) {
        return fragment_tile::evaluate_mask<ASKED, fragment_tile::MASK_COLUMNS_AT_ONCE>(
            p, job.box_of(tile), HAS_RANGE ? PARTIAL : warpgroup_tile::class_of(job.classes, tile),
            allowed);
      }
      return true;
    };
    // Whether weights are to tell which pairs take part: those that a score hides are not known
    // otherwise. Keys end in a job's first tile, if in any.
    const auto change_scores = [&](int tile, bool masked, auto keys_end) {
      bool hides = false;
      if constexpr (HAS_SCORE) {
        const bool hidden = fragment_tile::apply_score_mod<decltype(keys_end)::value, AT_ONCE>(
            p, given, job.box_of(tile), s, scale);
        hides = ptx::any_lane(hidden) || masked;
      }
      if constexpr (MAY_MASK) {
        if (masked) fragment_tile::apply_mask(s, allowed);
      } else {
        if (masked) fragment_tile::mask_missing_keys(s, job.rows_in(tile));
      }
      return hides;
    };
    // Adds what is not finite of a tile with pairs that take no part, and makes it 0.
    const auto take_nonfinite = [&](int n, int tile) {
      warpgroup::mbarrier_wait(looked_at(looked), parity_of(looked));  // which is after they came
      const unsigned int (&found)[2] = known_smem->nonfinite[stage_of(looked)];
      ++looked;
      if ((found[0] | found[1]) == 0) return;
      char* const tile_smem = values_smem + stage_of(n) * VALUES_BYTES;
      const int keys = job.rows_in(tile) - fragment::lane_column();
      const auto takes_part = [&](int r, int column, storage_t weight) {
        if constexpr (HAS_SCORE) return weight != 0x8000;
        if constexpr (HAS_MASK) return (allowed[r] >> column & 1) != 0;
        return fragment_tile::Pairs::key_of(column) < keys;
      };
      warpgroup_rows::add_nonfinite(acc, weights, tile_smem, takes_part);
      ptx::named_barrier_sync(ALL, COMPUTING);  // the values, which are read as they came
      warpgroup_rows::clear_nonfinite<VALUES_BYTES, COMPUTING>(tile_smem, threadIdx.x);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(ALL, COMPUTING);  // the values, now finite
    };
    const auto find_max = [&] {
      return fragment_softmax::row_max<!RESCALES_ALWAYS>(s, m, m_new, c);
    };
    const int before = steps;

    const bool has_tiles = !HAS_MASK && !PACKED || following >= 0;
    if (has_tiles) {
      warpgroup::mbarrier_wait(queries_full(place), q_parity_of(times));
      ++times;
      if (!HAS_SCORE && !(scale > 0)) {
        warpgroup_rows::turn_rows<warpgroup::WARPGROUP_ROWS * Q_BYTES, warpgroup::WARPGROUP_SIZE>(
            q_smem + place * HELD_BYTES, threadIdx.x % warpgroup::WARPGROUP_SIZE, scale);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(OWN + own,
                                warpgroup::WARPGROUP_SIZE);  // the warpgroup's queries, now turned
      }
    }
    // Where a mask has edges, PARTIAL tiles are begun here, each after the end of what was before.
    bool more = has_tiles;
#pragma unroll 1
    while (more) {
      // 2 scores
      warpgroup::mbarrier_wait(full(keys, steps), parity_of(steps));
      ptx::wgmma_fence();
      begin_scores(steps);
      const int now = following / 2;
      const bool masked = HAS_MASK ? following % 2 != 0 : job.is_masked(now);
      if (HAS_MASK && steps == before) {
        following = ptx::shuffle(job.second_code, 0);
        if constexpr (HAS_EDGES) run = ptx::shuffle(job.second_run, 0);
      } else {
        go_on(now);
      }
      const bool sees = find_pairs(now, masked) || !SKIPS;
      bool takes_part[2] = {true, true};
      if (HALVES && masked) fragment_tile::find_active_halves<COLUMNS>(allowed, takes_part);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(s);
      warpgroup::arrive_warpgroup(empty(keys, steps));
      if (following < 0) warpgroup::arrive_warpgroup(queries_empty(place));
      if (sees) {
        // 3 score mod
        // 4 mask
        const bool hides = change_scores(now, masked, warpgroup::Bool<true>());
        // 5 row max
        const bool grew = find_max();
        // 6 rescale
        if (grew) fragment_softmax::raise_max(m, m_new, l, alpha, c);
        if (HAS_EDGES && steps != before && grew) fragment_softmax::scale_rows(acc, alpha);
        if constexpr (HALVES) {
          fragment_softmax::exponentiate_halves(s, m, l, c, takes_part);
        } else {
          fragment_softmax::exponentiate(s, m, l, c, hides);
        }
        if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(p, job.box_of(now), s);
        fragment::narrow(s, weights);
      } else {
#pragma unroll
        for (int n = 0; n < COLUMNS / 2; ++n) weights[0][n] = weights[1][n] = 0;
      }
      if (HAS_SCORE || (LOOKS && masked)) take_nonfinite(steps, now);

      ++steps;
#pragma unroll 1
      for (; following >= 0 && !(HAS_EDGES && following % 2 != 0); ++steps) {
        const int n = steps;
        const int now = following / 2;
        const bool masked = !HAS_EDGES && MAY_MASK && following % 2 != 0;
        warpgroup::mbarrier_wait(full(keys, n), parity_of(n));
        ptx::named_barrier_sync(1 + own, BOTH);  // this warpgroup's turn to begin products
        ptx::wgmma_fence();
        begin_scores(n);
        // 7 accumulate p v
        warpgroup::mbarrier_wait(full(values, n - 1), parity_of(n - 1));
        ptx::wgmma_fence();  // again: the compiler sees a branch behind the first
        begin_output(n - 1);
        ptx::named_barrier_arrive(1 + next, BOTH);  // the next one's turn
        if (HAS_EDGES && now > run) {
          following -= 2;
        } else {
          go_on(now);
        }
        find_pairs(now, masked);
        ptx::wgmma_wait<1>();
        ptx::fence_accumulator(s);
        warpgroup::arrive_warpgroup(empty(keys, n));
        if (following < 0) warpgroup::arrive_warpgroup(queries_empty(place));
        const bool hides = change_scores(now, masked, warpgroup::Bool<false>());
        const bool grew = find_max() || RESCALES_ALWAYS;
        if (grew) fragment_softmax::raise_max(m, m_new, l, alpha, c);
        fragment_softmax::exponentiate(s, m, l, c, hides);
        if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(p, job.box_of(now), s);
        ptx::wgmma_wait<0>();
        ptx::fence_accumulator(acc);
        warpgroup::arrive_warpgroup(empty(values, n - 1));
        fragment::narrow(s, weights);
        if (grew) fragment_softmax::scale_rows(acc, alpha);
        if (HAS_SCORE || (LOOKS && masked)) take_nonfinite(n, now);
      }
      warpgroup::mbarrier_wait(full(values, steps - 1), parity_of(steps - 1));
      ptx::wgmma_fence();
      begin_output(steps - 1);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(acc);
      warpgroup::arrive_warpgroup(empty(values, steps - 1));
      more = HAS_EDGES && following >= 0;
    }

    fragment_softmax::row_sum(l);
    float weight[2];
    fragment_softmax::join_sink(m, l, weight, unit,
                                p.sink == nullptr
                                    ? -number::infinity()
                                    : number::load<float>(p.sink, p.kind_sink, job.head));
    // 8 normalise
    const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] = l[r] == 0.0f ? 0.0f : keep_scale * weight[r] * ptx::reciprocal(l[r]);
    }
    unsigned int out[2][COLUMNS_V / 2];
    warpgroup_rows::narrow_rows(acc, weight, out);
    more_jobs = has_job(j + 1);  // asked where registers are free, and before it must be known
    if constexpr (TMA_STORE) {
      if (job.rows > 0) {
        warpgroup_rows::tma_store_wait();
        warpgroup_rows::tma_store_rows<D_V, BOX_BYTES>(out, results_address, out_map, job.out,
                                                       job.first_row_q + fragment::warp_row());
      }
    } else {
      warpgroup_rows::store_rows<D_V>(
          out, p.out, layout::offset(p.out, job.entry, job.head, false) + job.first * p.out.row,
          job.rows);
    }
    // 9 store lse
    if (p.lse.data != nullptr) {
      const memory::RowStatistic to = memory::row_statistic(p.lse, job.entry, job.head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = fragment::warp_row() + 8 * r + fragment::lane_row();
        if (ptx::lane_index() % 4 == 0 && row < job.rows) {
          to.data[(job.first + row) * to.row] =
              l[r] == 0.0f ? -number::infinity() : m[r] + log(l[r]);
        }
      }
    }
    fragment_softmax::init_state(m, l, acc);
    tile::count_tiles(p, steps - before);
    warpgroup::arrive_warp(done(j));
  }
  if (own == 0) ptx::named_barrier_sync(1, BOTH);  // the turn that nobody takes
  if (TMA_STORE && ptx::lane_index() == 0) ptx::tma_store_wait_read();
}
