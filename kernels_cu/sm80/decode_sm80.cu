// Few queries and many keys, in 16-bit types, by the tensor cores of compute capability 8.0 and
// later: the twin of reference/cpu/decode.py.
//
// The sums over keys form a fixed tree (decode/tasks.cuh). A warp computes the softmax of a
// leaf of 64 keys from the start, and merges leaves to nodes; the queries of all heads that share
// keys are the 16 rows of one matrix instruction. Each warp has its own pipeline of STAGES stages
// in shared memory, and meets no other one before its keys are done.
//
// Grid: a share of all units for each block; decode_combine.cu joins their partial results. Or, if
// WHOLE, a task for each block, which joins the leaves of its warps itself.
// Shared memory: the tasks of all warps; of every warp its stages and its queries. The scratch that
// counts units aliases the stages; it is dead before the first copy. Behind them leaves of a WHOLE
// task. BLOCK_Q is 16, BLOCK_KV 64.
#include "../common/params.cuh"
#include "../decode/results.cuh"
#include "../warp/decode_leaf.cuh"

namespace {

using namespace decode_leaf;

constexpr int TASKS_BYTES =
    matmul::round_up(decode::WARPS * static_cast<int>(sizeof(decode::WarpTasks)), 128);
constexpr int WARP_ROOM = (SHARED_BYTES - TASKS_BYTES) / decode::WARPS;
constexpr int ROOM_OF_STAGES = (WARP_ROOM - QUERY_BYTES) / STAGE_BYTES;
constexpr int STAGES = WHOLE && ROOM_OF_STAGES > 3 ? 3 : ROOM_OF_STAGES;
constexpr int WARP_BYTES = QUERY_BYTES + STAGES * STAGE_BYTES;

static_assert(BLOCK_Q == 16 && BLOCK_KV == LEAF, "BLOCK_Q, BLOCK_KV");
static_assert(sizeof(decode::ScheduleStorage) <= decode::WARPS * WARP_BYTES, "SHARED_BYTES");
static_assert(!WHOLE || 16 * decode::ROW * sizeof(accum_t) <= WARP_BYTES, "a leaf has no room");
static_assert(2 <= STAGES && STAGES - 1 <= 2 * STEPS, "a stage belongs to this leaf or the next");

// A leaf's keys and values, step by step: the producer of a warp's pipeline.
struct Producer {
  const Params& p;
  char* stages_smem;
  int stage;  // of the next step to be consumed

  __device__ __forceinline__ char* at(int ahead) const {
    const int n = stage + ahead;
    return stages_smem + (n < STAGES ? n : n - STAGES) * STAGE_BYTES;
  }
  // Begins to copy step N of a leaf, of 2 STEPS, to the stage `ahead` of the next one.
  template <int N>
  __device__ __forceinline__ void copy(const decode::Leaf& leaf, const decode::Task& task,
                                       const decode_rows::LeafPlaces& places, int ahead) const {
    if (leaf.exists) {
      if constexpr (N < STEPS) {
        const decode_rows::Source k{task.k, p.k_page, p.k.row, p.k.col};
        decode_rows::begin_copy<KEY_CODES, N * STEP_KEYS, STEP_KEYS, D>(at(ahead), k, places,
                                                                        leaf.keys);
      } else {
        const decode_rows::Source v{task.v, p.v_page, p.v.row, p.v.col};
        decode_rows::begin_copy<VALUE_CODES, (N - STEPS) * STEP_KEYS, STEP_KEYS, D_V>(
            at(ahead), v, places, leaf.keys);
      }
    }
  }
};

// What the page table says of a warp's first leaf before the grids ahead have ended.
struct EarlyStart {
  decode_rows::LeafEntries entries;

  // Looks a leaf up, and brings its keys to the L2 cache.
  __device__ __forceinline__ void prefetch(const Params& p, const decode::Task& task, int leaf,
                                           decode_rows::LeafPlaces& places) {
    const int first = leaf * LEAF, keys = tile::rows_from(first, task.len_k, LEAF);
    entries.look_up<true>(p, first, keys, task.b);
    places = decode_rows::LeafPlaces(p, entries);
    decode_rows::prefetch_keys({task.k, p.k_page, p.k.row, p.k.col}, places, keys);
  }
};

// Where the leaves of a whole task go: one of each warp to the warp's stages and queries, which are
// not read any more then; more behind those of all warps.
__device__ __forceinline__ decode::Leaves leaves_of(const Params& p, const decode::Task& task,
                                                    char* warps_smem) {
  if constexpr (!WHOLE) return decode::Leaves{};
  if constexpr (decode::WHOLE_NODES) {
    char* const own = warps_smem + decode::task_of_warp() * decode::TASK_WARPS * WARP_BYTES;
    return {reinterpret_cast<accum_t*>(own), WARP_BYTES / static_cast<int>(sizeof(accum_t))};
  }
  if (task.units(p, 0) <= decode::WARPS) {
    return {reinterpret_cast<accum_t*>(warps_smem), WARP_BYTES / static_cast<int>(sizeof(accum_t))};
  }
  return {reinterpret_cast<accum_t*>(warps_smem + decode::WARPS * WARP_BYTES),
          task.rows * decode::ROW};
}

using Scores = accum_t[ROWS][COLUMNS];

// Changes and masks the scores of a leaf. Returns whether the weights have to mark pairs.
__device__ __forceinline__ bool change_scores(const Params& p, const decode::Task& task,
                                              const decode::Leaf& leaf, accum_t scale, bool masked,
                                              const unsigned int (&mask)[ROWS], Scores& s) {
  // 3 score mod
  bool has_masked = masked;
  if constexpr (HAS_SCORE) {
    has_masked =
        decode_scores::apply_score_mod(p, task, leaf, fragment::lane_row(), s, scale) || masked;
  }
  // 4 mask
  if (MAY_MASK && masked) fragment_tile::apply_mask(s, mask);
  if (!MAY_MASK && masked) fragment_tile::mask_missing_keys(s, leaf.keys);
  return has_masked;
}

// A leaf joins its node: merges stand for step 6. `next` is the leaf after it.
__device__ __forceinline__ void join_node(State& node, State& leaf, decode_slots::Nodes& nodes,
                                          const decode::Leaf& now, const decode::Leaf& next,
                                          const decode::Task& task, accum_t c, bool has_second) {
  if constexpr (IN_REGISTERS) {
    decode_slots::merge_leaf(node, leaf, c, has_second);
    if (!now.shares_node(next, 1)) {
      nodes.add(node, 2, now, next, task.rows, c);
      decode_slots::clear(node);
    }
  } else {
    decode_slots::apply_unit(leaf);
    nodes.add(leaf, 1, now, next, task.rows, c);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  char* const warps_smem = reinterpret_cast<char*>(shared_smem) + TASKS_BYTES;
  char* const warp_smem = warps_smem + warp * WARP_BYTES;
  char* const q_smem = warp_smem + STAGES * STAGE_BYTES;

  decode::Schedule schedule(p, reinterpret_cast<decode::ScheduleStorage*>(warps_smem));
  const decode::Workspace workspace(p);
  decode::WarpTasks& tasks_smem = reinterpret_cast<decode::WarpTasks*>(shared_smem)[warp];
  const int share = WHOLE ? decode::warp_of_task() : warp;
  decode::Cursor cursor(p, workspace, tasks_smem, share, decode::TASK_WARPS);
  EarlyStart early{};
  decode_rows::LeafPlaces places{};
  bool guessed = false;
  if constexpr (SHARED) {
    // The grid ahead, of shared keys, has waited for those before it, and writes nothing of this.
    schedule.count_units();
    cursor.begin(schedule);
  } else {
    guessed = cursor.begin_early(schedule, [&](const decode::Task& task, int leaf) {
      early.prefetch(p, task, leaf, places);
    });
  }
  ptx::launch_dependents();
  if constexpr (!decode::EQUAL_TASKS && !WHOLE) {
    __syncthreads();  // what is counted, read by all warps
  }

  const accum_t scale = static_cast<accum_t>(p.scale);
  // Logits are `logit_scale` times a score; a negative scale flips the sign of the scores.
  const accum_t logit_scale = HAS_SCORE ? accum_t(1) : fabs(scale);
  const accum_t c = fmin(logit_scale * number::LOG2_E<accum_t>, number::largest());

  decode::Leaf now = cursor.next(), next = now;
  const auto task_of = [&](const decode::Leaf& leaf) -> const decode::Task& {
    return tasks_smem.task[leaf.place];
  };
  const auto look_up = [&](const decode::Leaf& leaf) {
    decode_rows::LeafEntries looked{};
    if (leaf.exists) looked.look_up<SHARED>(p, leaf.index * LEAF, leaf.keys, task_of(leaf).b);
    return looked;
  };
  decode_rows::LeafPlaces next_places{};
  decode_rows::LeafEntries found{};
  // A mask may skip the first leaf.
  guessed = PAGED && guessed && now.exists && now.index * LEAF == early.entries.first;
  if (guessed) {
    found = early.entries.look_again(p);  // the answers are waited for when keys are on their way
  } else {
    places = decode_rows::LeafPlaces(p, look_up(now));
  }
  Producer producer{p, warp_smem, 0};
  // Starts step N of the leaf `now`, or of the one after it.
  const auto copy_step = [&](auto step, int ahead) {
    constexpr int N = decltype(step)::value;
    if constexpr (N < 2 * STEPS) {
      producer.copy<N>(now, task_of(now), places, ahead);
    } else {
      producer.copy<N - 2 * STEPS>(next, task_of(next), next_places, ahead);
    }
  };
  // The first keys are on their way as early as possible; the queries are in their group.
  int loaded = -1;  // the number of the task whose queries are loaded
  for_steps<0, STAGES - 1>([&](auto step) {
    copy_step(step, decltype(step)::value);
    if (decltype(step)::value == 0 && now.exists) {
      loaded = task_of(now).number;
      decode_rows::begin_queries(p, task_of(now), q_smem);
    }
    ptx::cp_async_commit();
  });
  if (guessed && early.entries.differ(found)) {
    places = decode_rows::LeafPlaces(p, found);
    ptx::cp_async_wait_all();
    __syncwarp();  // the stages, copied by all lanes before they are copied again
    for_steps<0, STAGES - 1>([&](auto step) {
      copy_step(step, decltype(step)::value);
      ptx::cp_async_commit();
    });
  }
  if (now.exists) next = cursor.next();
  decode_rows::LeafEntries next_entries = look_up(next);
  // Waits for the stage of step N, and starts the copy of the step that takes the one before.
  const auto wait_for_step = [&](auto step) {
    ptx::cp_async_wait<STAGES - 2>();
    __syncwarp();  // the stage, copied by all lanes, and the one before, read by all
    copy_step(Step<decltype(step)::value + STAGES - 1>(), STAGES - 1);
    ptx::cp_async_commit();
    char* const stage_smem = producer.at(0);
    producer.stage = producer.stage + 1 < STAGES ? producer.stage + 1 : 0;
    return stage_smem;
  };

  const fragment::Left<D, false> q(q_smem);
  State node;  // of level 1, if it is in registers
  decode_slots::clear(node);
  Scales scales = load_scales(p, now, task_of(now), places);
  Scales next_scales{};
  // The table's answers are waited for when the first keys of the next leaf are copied.
  constexpr bool NEXT_BEHIND_KEYS = STAGES - 1 <= STEPS;
  const auto find_next = [&] {
    next_places = decode_rows::LeafPlaces(p, next_entries);
    next_scales = load_scales(p, next, task_of(next), next_places);
  };
  const decode::Leaves leaves = leaves_of(p, cursor.own_task(), warps_smem);
  decode_slots::Nodes nodes{p, workspace, schedule.level, ~0u, leaves};

#pragma unroll 1
  while (now.exists) {
    const decode::Task& task = task_of(now);
    if constexpr (!NEXT_BEHIND_KEYS) find_next();
    // 1 load q
    if (loaded != task.number) {
      loaded = task.number;
      decode_rows::begin_queries(p, task, q_smem);
      ptx::cp_async_wait_all();
      __syncwarp();  // the queries, copied by all lanes
    }
    const bool has_second = task.rows > BLOCK_Q / 2;  // rows of a thread
    bool masked = now.tile_class == PARTIAL || now.keys < LEAF;
    unsigned int mask[ROWS];
    if (MAY_MASK && masked) decode_scores::evaluate_mask(p, task, now, fragment::lane_row(), mask);
    // 2 scores
    Scores s;
    for_steps<0, STEPS>([&](auto step) {
      constexpr int FIRST = decltype(step)::value * STEP_KEYS / 4;
      accum_t part[ROWS][STEP_KEYS / 4];
      const char* const k_smem = wait_for_step(step);
      if constexpr (K_CODES) {
        fragment_codes::multiply<D, 4 * FIRST>(part, q, q_smem, k_smem, scales.k, has_second);
      } else {
        fragment::multiply(part, q, k_smem);
      }
      place_scores<FIRST>(s, part);
    });
    if (!HAS_SCORE && scale < 0) negate(s);
    const bool has_masked = change_scores(p, task, now, scale, masked, mask, s);
    // 5 row max
    State leaf;
    weigh(s, leaf.row, c, has_masked, has_second);
    const Weights<> p_of_leaf(s);
    if constexpr (NEXT_BEHIND_KEYS) find_next();
    // 7 accumulate p v
    matmul::clear(leaf.o);
    for_steps<STEPS, 2 * STEPS>([&](auto step) {
      constexpr int FIRST = (decltype(step)::value - STEPS) * STEP_KEYS;
      char* const v_smem = wait_for_step(step);
      accumulate<FIRST>(leaf.o, p_of_leaf, v_smem, scales.v, MAY_MASK && has_masked, true,
                        has_second, [] { __syncwarp(); });
    });
    join_node(node, leaf, nodes, now, next, task, c, has_second);
    now = next;
    places = next_places;
    scales = next_scales;
    if (now.exists) {
      next = cursor.next();
      next_entries = look_up(next);
    }
  }
  if constexpr (WHOLE) {
    __syncthreads();  // the leaves of all warps
    decode::write_rows(p, cursor.own_task(), leaves, logit_scale, cursor.level());
  }
  if constexpr (SHARED) ptx::wait_for_grids();  // for the next grid, which waits for this one
}
