// The keys that many entries share, for the queries of all of them, in 16-bit types, by the tensor
// cores of compute capability 8.0 and later: the twin of reference/cpu/decode.py.
//
// The arithmetic is that of decode_sm80.cu, leaf by leaf, so that a node has the bits that it would
// have if every entry read its keys by itself. But the 16 rows of a matrix instruction are those of
// several entries, and a team of warps, with 16 rows each, reads the same keys: it has a ring of
// stages in shared memory, and each of its warps copies a part of every step. One barrier of the
// team for each step says that the step is copied, and that the one before is read.
//
// Grid: as many blocks as the device has SMs, whose teams share the units (decode/shared.cuh).
// decode_sm80.cu computes the other keys of every entry, and decode_combine.cu joins both.
// Shared memory: the stages of all warps, and their queries. BLOCK_Q is 16, BLOCK_KV 64.
#include "../common/params.cuh"
#include "../decode/shared.cuh"
#include "../warp/decode_leaf.cuh"
#include "../ptx/barrier.cuh"

namespace {

using namespace decode_leaf;
using decode::CHILDREN;
using decode::SharedRows;
using decode::SharedUnit;

constexpr int STAGES = (SHARED_BYTES / decode::WARPS - QUERY_BYTES) / STAGE_BYTES;  // of a warp
constexpr int RING = TEAM * STAGES;                                                 // of a team
constexpr int AHEAD = RING - 1;  // steps that are copied before they are needed
constexpr int LEAF_STEPS = 2 * STEPS;

static_assert(BLOCK_Q == 16 && BLOCK_KV == LEAF, "BLOCK_Q, BLOCK_KV");
static_assert(SHARED_BYTES == decode::WARPS * (QUERY_BYTES + STAGES * STAGE_BYTES), "SHARED_BYTES");
static_assert(STAGES >= 2 && decode::TEAMS * TEAM == decode::WARPS, "STAGES, TEAM");

// What a warp copies of its team's units, one step of a leaf after the other: its share of each.
struct Producer {
  const Params& p;
  char* stages_smem;
  int index, distance, units;
  int unit, leaf, stage;                  // of the next step
  decode_rows::LeafPlaces places;         // of its leaf
  decode_rows::LeafEntries next_entries;  // of the leaf after it
  decode_rows::Source k, v;

  __device__ __forceinline__ Producer(const Params& p, char* stages_smem, int index, int unit,
                                      int distance, int units)
      : p(p),
        stages_smem(stages_smem),
        index(index),
        distance(distance),
        units(units),
        unit(unit),
        leaf(0),
        stage(0) {
    begin_unit();
    look_up(unit, 0);
  }

  // Starts the copy of step N of a leaf, of LEAF_STEPS. All lanes call it together.
  template <int N>
  __device__ __forceinline__ void copy() {
    if constexpr (N == 0) places = decode_rows::LeafPlaces(p, next_entries);
    char* const stage_smem = stages_smem + stage * STAGE_BYTES;
    if (unit < units) {
      if constexpr (N < STEPS) {
        decode_rows::begin_copy_of_share<KEY_CODES, N * STEP_KEYS, STEP_KEYS, D, TEAM>(
            stage_smem, k, places, index);
      } else {
        decode_rows::begin_copy_of_share<VALUE_CODES, (N - STEPS) * STEP_KEYS, STEP_KEYS, D_V,
                                         TEAM>(stage_smem, v, places, index);
      }
    }
    ptx::cp_async_commit();
    stage = stage + 1 < RING ? stage + 1 : 0;
    if constexpr (N == 0) {
      look_up(leaf < CHILDREN - 1 ? unit : unit + distance, (leaf + 1) % CHILDREN);
    }
    if constexpr (N == LEAF_STEPS - 1) {
      leaf = (leaf + 1) % CHILDREN;
      if (leaf > 0) return;
      unit += distance;
      begin_unit();
    }
  }

 private:
  __device__ __forceinline__ void begin_unit() {
    if (unit >= units) return;
    const SharedUnit keys(p, unit);
    k = decode_rows::Source{keys.k, p.k_page, p.k.row, p.k.col};
    v = decode_rows::Source{keys.v, p.v_page, p.v.row, p.v.col};
  }
  // Looks up the rows of the next leaf, which are the same for all entries.
  __device__ __forceinline__ void look_up(int of_unit, int n) {
    next_entries = decode_rows::LeafEntries{};
    if (of_unit >= units) return;
    const SharedUnit keys(p, of_unit);
    next_entries.look_up(p, static_cast<int>(keys.leaf(n).first_key()), LEAF, 0);
  }
};

struct ReadyStep {
  char* stage_smem;
  bool holds;  // a condition, for any warp of the team
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  const int warp = threadIdx.x / ptx::WARP_SIZE, team = warp / TEAM, index = warp % TEAM;
  char* const all_smem = reinterpret_cast<char*>(shared_smem);
  char* const stages_smem = all_smem + team * RING * STAGE_BYTES;
  char* const q_smem = all_smem + decode::WARPS * STAGES * STAGE_BYTES + warp * QUERY_BYTES;

  ptx::wait_for_grids();
  ptx::launch_dependents();
  const decode::Workspace workspace(p);
  const int units = decode::shared_units(p), distance = gridDim.x * decode::TEAMS;
  const int first_unit = team * gridDim.x + blockIdx.x;

  const accum_t scale = static_cast<accum_t>(p.scale);
  // Logits are `logit_scale` times a score; a negative scale flips the sign of the scores.
  const accum_t logit_scale = HAS_SCORE ? accum_t(1) : fabs(scale);
  const accum_t c = fmin(logit_scale * number::LOG2_E<accum_t>, number::largest());

  Producer producer{p, stages_smem, index, first_unit, distance, units};
#pragma unroll 1
  for (int n = 0; n < AHEAD / LEAF_STEPS; ++n) {
    for_steps<0, LEAF_STEPS>([&](auto step) { producer.copy<decltype(step)::value>(); });
  }
  for_steps<0, AHEAD % LEAF_STEPS>([&](auto step) { producer.copy<decltype(step)::value>(); });
  // A barrier of the team; returns whether the condition holds for any of its warps.
  const auto meet = [&](bool condition) {
    if constexpr (TEAM == 1) {
      __syncwarp();
    } else if constexpr (MAY_MASK) {
      return ptx::named_barrier_or(1 + team, TEAM * ptx::WARP_SIZE, condition);
    } else {
      ptx::named_barrier_sync(1 + team, TEAM * ptx::WARP_SIZE);
    }
    return condition;
  };
  int stage = 0;  // of the next step
  // Waits for step N of a leaf, and starts the copy of the step that takes the stage before. The
  // condition is as in `meet`.
  const auto wait_for_step = [&](auto step, bool condition) {
    ptx::cp_async_wait<AHEAD - 1>();
    const bool holds = meet(condition);  // the step, copied, and the one before, read by all warps
    producer.copy<(decltype(step)::value + AHEAD) % LEAF_STEPS>();
    char* const stage_smem = stages_smem + stage * STAGE_BYTES;
    stage = stage + 1 < RING ? stage + 1 : 0;
    return ReadyStep{stage_smem, holds};
  };

  const fragment::Left<D, false> q(q_smem);
#pragma unroll 1
  for (int unit = first_unit; unit < units; unit += distance) {
    const SharedUnit keys(p, unit);
    const SharedRows rows(p, keys.head_kv, keys.tile + index);
    const bool has_rows = rows.rows > 0;
    // 1 load q
    unsigned int full = ~0u;
    if (has_rows) {
      decode_rows::begin_queries<false>(p, rows, q_smem, p.q.lead[MAX_LEAD - 1]);
      full = decode::full_leaves(rows, keys.node);
    }
    __syncwarp();  // the queries, copied by all lanes
    const auto place = [&](int row) {
      return row < rows.rows ? rows.place(workspace, keys.node, row) : nullptr;
    };
    State node;  // if it is in registers
    decode_slots::clear(node);
#pragma unroll 1
    for (int n = 0; n < CHILDREN; ++n) {
      const bool masked = (full >> n & 1) == 0;
      const decode::Leaf now = keys.leaf(n, masked ? PARTIAL : FULL);
      Scales scales{};
      if constexpr (cache::HAS_CODES) {
        decode_rows::LeafEntries entries;
        entries.look_up(p, static_cast<int>(now.first_key()), LEAF, 0);
        scales = load_scales(p, now, keys, decode_rows::LeafPlaces(p, entries));
      }
      unsigned int mask[ROWS];
      if (HAS_MASK && masked) {
        decode_scores::evaluate_mask(p, rows, now, fragment::lane_row(), mask);
      }
      // 2 scores
      accum_t s[ROWS][COLUMNS];
      for_steps<0, STEPS>([&](auto step) {
        constexpr int FIRST = decltype(step)::value * STEP_KEYS / 4;
        accum_t part[ROWS][STEP_KEYS / 4];
        const char* const k_smem = wait_for_step(step, false).stage_smem;
        if (!has_rows) {
          matmul::clear(part);
        } else if constexpr (K_CODES) {
          fragment_codes::multiply<D, 4 * FIRST>(part, q, q_smem, k_smem, scales.k, true);
        } else {
          fragment::multiply(part, q, k_smem);
        }
        place_scores<FIRST>(s, part);
      });
      if (!HAS_SCORE && scale < 0) negate(s);
      // 3 score mod
      bool has_masked = masked;
      if (HAS_SCORE && has_rows) {
        has_masked =
            decode_scores::apply_score_mod(p, rows, now, fragment::lane_row(), s, scale) || masked;
      }
      // 4 mask
      if (HAS_MASK && masked) fragment_tile::apply_mask(s, mask);
      // 5 row max
      State leaf;
      weigh(s, leaf.row, c, has_masked, true);
      const Weights<> p_of_leaf(s);
      // 7 accumulate p v
      matmul::clear(leaf.o);
      for_steps<STEPS, LEAF_STEPS>([&](auto step) {
        constexpr int FIRST = (decltype(step)::value - STEPS) * STEP_KEYS;
        const ReadyStep ready = wait_for_step(step, MAY_MASK && has_masked);
        if (!has_rows && !ready.holds) return;
        accumulate<FIRST>(leaf.o, p_of_leaf, ready.stage_smem, scales.v, ready.holds, index == 0,
                          true, [&] { meet(false); });
      });
      // The leaf joins its node: merges stand for step 6.
      if constexpr (IN_REGISTERS) {
        decode_slots::merge_leaf(node, leaf, c, true);
        if (n == CHILDREN - 1) decode_slots::store_rows(place, node);
      } else {
        decode_slots::apply_unit(leaf);
        if (n == 0) {
          decode_slots::store_rows(place, leaf);
          __syncwarp();  // the rows, written by all lanes
        } else {
          decode_slots::merge_into_rows(place, leaf, c);
        }
      }
    }
  }
}
