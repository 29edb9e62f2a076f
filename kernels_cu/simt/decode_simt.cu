// Few queries and many keys, in every type and on any GPU: the twin of reference/cpu/decode.py.
//
// The sums over keys form a fixed tree (decode/tasks.cuh). A warp computes the softmax of a
// leaf of 64 keys from the start: LANES lanes share the product of a query and a key, and all lanes
// the columns of the output. Every product is a scalar multiply-add in the accumulator's type.
// Nodes are merged in the slots of the workspace.
//
// Grid: a share of all units for each block; decode_combine.cu joins their partial results. Or, if
// WHOLE, a task for each block, which joins the leaves of its warps itself.
// Shared memory: SharedStorage. The leaves of a WHOLE task alias the queries and weights of warps.
// BLOCK_KV is 64.
#include "../common/params.cuh"
#include "../common/cache_row.cuh"
#include "../common/softmax.cuh"
#include "../decode/cursor.cuh"
#include "../decode/results.cuh"

namespace {

using decode::LEAF;
constexpr int ROWS = BLOCK_Q;
constexpr int LANES = 8, KEYS_AT_ONCE = ptx::WARP_SIZE / LANES;
constexpr int COLUMNS_V = (D_V + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE;  // of a lane

struct WarpStorage {
  accum_t q[ROWS][D];
  accum_t p[ROWS][LEAF];
};
struct SharedStorage {
  decode::WarpTasks tasks[decode::WARPS];
  WarpStorage warps[decode::WARPS];
  decode::ScheduleStorage schedule;
};

static_assert(BLOCK_KV == LEAF, "BLOCK_KV");
static_assert(!WHOLE || decode::ROW <= D + LEAF, "a leaf has no room");
static_assert(SHARED_BYTES == sizeof(SharedStorage), "SHARED_BYTES");

// A warp's rows of a leaf: their statistics, and a lane's columns of o.
struct State {
  merge::Statistics row[ROWS];
  accum_t o[ROWS][COLUMNS_V];
};

__device__ __forceinline__ accum_t warp_max(accum_t x) {
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    const accum_t other = ptx::shuffle_xor(x, lanes);
    x = other > x ? other : x;
  }
  return x;
}

template <int OVER>
__device__ __forceinline__ accum_t sum_over(accum_t x) {
#pragma unroll
  for (int lanes = OVER / 2; lanes > 0; lanes /= 2) x += ptx::shuffle_xor(x, lanes);
  return x;
}

// Merges a state into a slot, or stores it there if the slot is `fresh`.
__device__ __forceinline__ void merge_into_slot(const decode::Workspace& workspace, long long slot,
                                                const State& state, int rows, bool fresh,
                                                accum_t c) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r >= rows) break;
    accum_t* const to = workspace.row(slot, r);
    merge::Statistics own = fresh ? merge::no_keys() : decode::statistics_of(to);
    const merge::Factors factors = merge::statistics(own, state.row[r], c);
    accum_t* const sums = to + decode::STATISTICS;
#pragma unroll
    for (int n = 0; n < COLUMNS_V; ++n) {
      const int column = ptx::lane_index() + n * ptx::WARP_SIZE;
      if (column < D_V) {
        sums[column] = factors.apply(fresh ? accum_t(0) : sums[column], state.o[r][n]);
      }
    }
    __syncwarp();  // the statistics, read by all lanes
    if (ptx::lane_index() == 0) decode::statistics_of(to) = own;
  }
  __syncwarp();  // the slot, written by all lanes
}

// Stores the leaf of a warp that has one.
__device__ __forceinline__ void store_leaf(accum_t* leaf_smem, const State& leaf, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r >= rows) break;
    accum_t* const to = leaf_smem + r * decode::ROW;
    if (ptx::lane_index() == 0) decode::statistics_of(to) = leaf.row[r];
#pragma unroll
    for (int n = 0; n < COLUMNS_V; ++n) {
      const int column = ptx::lane_index() + n * ptx::WARP_SIZE;
      if (column < D_V) to[decode::STATISTICS + column] = leaf.o[r][n];
    }
  }
}

__device__ __forceinline__ void load_slot(const decode::Workspace& workspace, long long slot,
                                          State& state, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r >= rows) break;
    accum_t* const from = workspace.row(slot, r);
    state.row[r] = decode::statistics_of(from);
#pragma unroll
    for (int n = 0; n < COLUMNS_V; ++n) {
      const int column = ptx::lane_index() + n * ptx::WARP_SIZE;
      if (column < D_V) state.o[r][n] = from[decode::STATISTICS + column];
    }
  }
  __syncwarp();  // the slot, read by all lanes before it is written again
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  SharedStorage* const storage_smem = reinterpret_cast<SharedStorage*>(shared_smem);
  const int warp = threadIdx.x / ptx::WARP_SIZE, lane = ptx::lane_index();
  WarpStorage& own_smem = storage_smem->warps[warp];

  decode::Schedule schedule(p, &storage_smem->schedule);
  const decode::Workspace workspace(p);
  decode::WarpTasks& tasks_smem = storage_smem->tasks[warp];
  decode::Cursor cursor(p, workspace, tasks_smem);
  cursor.begin_early(schedule, [](const decode::Task&, int) {});
  ptx::launch_dependents();

  // The leaves of a whole task.
  const decode::Leaves leaves{reinterpret_cast<accum_t*>(storage_smem->warps),
                              static_cast<int>(sizeof(WarpStorage) / sizeof(accum_t))};
  const accum_t scale = static_cast<accum_t>(p.scale);
  constexpr accum_t C = static_cast<accum_t>(1.4426950408889634);  // scores are logits here
  unsigned int fresh = ~0u;  // bit n: nothing is in the node of level n
  int loaded = -1;           // the number of the task with loaded queries
  decode::Leaf now = cursor.next();

#pragma unroll 1
  while (now.exists) {
    const decode::Task& task = tasks_smem.task[now.place];
    // 1 load q
    if (loaded != task.number) {
      loaded = task.number;
      __syncwarp();  // the queries before, read by all lanes
#pragma unroll 1
      for (int n = lane; n < ROWS * D; n += ptx::WARP_SIZE) {
        const int r = n / D;
        accum_t element = 0;
        if (r < task.rows) {
          const storage_t* const row = reinterpret_cast<const storage_t*>(p.q.data) +
                                       layout::offset(p.q, task.entry(), task.head_of(r), false) +
                                       task.query_of(r) * p.q.row;
          element = number::widen(row[n % D * p.q.col]);
        }
        own_smem.q[r][n % D] = element;
      }
      __syncwarp();  // the queries, written by all lanes
    }
    // 2 scores
    const cache::Head<KEY_CODES> keys(cache::keys(p), task.k, task.entry(), task.head / p.group);
#pragma unroll 1
    for (int first = 0; first < LEAF; first += KEYS_AT_ONCE) {
      const int key = first + lane / LANES;
      const bool exists = key < now.keys;
      accum_t s[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) s[r] = 0;
      if (exists) {
        const cache::Place at = cache::place(p, task.b, now.first_key() + key);
        const cache::CachedRow<KEY_CODES> row = keys.row(at);
#pragma unroll 4
        for (int d = lane % LANES; d < D; d += LANES) {
          const accum_t element = row[d];
#pragma unroll
          for (int r = 0; r < ROWS; ++r) s[r] = fma(own_smem.q[r][d], element, s[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        accum_t score = sum_over<LANES>(s[r]) * scale;
        if (lane % LANES == 0) {
          // 3 score mod
          // 4 mask
          const bool is_pair = exists && r < task.rows;
          if (is_pair && (HAS_SCORE || (HAS_MASK && now.tile_class == PARTIAL))) {
            accum_t* const no_slope = nullptr;
            score = tile::modify_score(p, decode::site_of(task, r, now.first_key() + key),
                                       now.tile_class == PARTIAL, score, no_slope);
          }
          own_smem.p[r][key] = is_pair ? score : -number::infinity();
        }
      }
    }
    __syncwarp();  // the scores, written by some lanes
    // 5 row max
    State leaf;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const accum_t low = own_smem.p[r][lane], high = own_smem.p[r][lane + ptx::WARP_SIZE];
      accum_t m = -number::infinity();
      m = low > m ? low : m;
      m = high > m ? high : m;
      m = warp_max(m);
      const accum_t safe = m != -number::infinity() ? m : accum_t(0);
      const accum_t weights[2] = {softmax::exponential(low - safe),
                                  softmax::exponential(high - safe)};
      const bool masked[2] = {low == -number::infinity(), high == -number::infinity()};
      const accum_t l = sum_over<ptx::WARP_SIZE>((masked[0] ? accum_t(0) : weights[0]) +
                                                 (masked[1] ? accum_t(0) : weights[1]));
      leaf.row[r] = merge::Statistics{m, l};
      __syncwarp();  // the scores, read by all lanes
      own_smem.p[r][lane] = masked[0] ? -accum_t(0) : weights[0];
      own_smem.p[r][lane + ptx::WARP_SIZE] = masked[1] ? -accum_t(0) : weights[1];
    }
    __syncwarp();  // the weights, written by all lanes
    // 7 accumulate p v
    const cache::Head<VALUE_CODES> values(cache::values(p), task.v, task.entry(),
                                          task.head / p.group);
    matmul::clear(leaf.o);
#pragma unroll 2
    for (int key = 0; key < now.keys; ++key) {
      const cache::Place at = cache::place(p, task.b, now.first_key() + key);
      const cache::CachedRow<VALUE_CODES> row = values.row(at);
#pragma unroll
      for (int n = 0; n < COLUMNS_V; ++n) {
        const int column = lane + n * ptx::WARP_SIZE;
        if (column >= D_V) break;
        const accum_t element = row[column];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const accum_t weight = own_smem.p[r][key];
          if (matmul::is_unmasked(weight)) leaf.o[r][n] = fma(weight, element, leaf.o[r][n]);
        }
      }
    }
    // The leaf joins its node: merges stand for step 6.
    const decode::Leaf next = cursor.next();
    if constexpr (WHOLE) {  // it is the only one
      __syncwarp();         // the weights, read by all lanes
      store_leaf(leaves.row(now.unit, 0), leaf, task.rows);
      break;
    }
#pragma unroll 1
    for (int level = 1;; ++level) {
      const bool is_unit = level >= schedule.level;
      const long long slot = is_unit ? now.unit : workspace.held(p, level);
      merge_into_slot(workspace, slot, leaf, task.rows, (fresh >> level & 1) != 0, C);
      fresh &= ~(1u << level);
      if (is_unit || now.shares_node(next, level)) break;
      load_slot(workspace, slot, leaf, task.rows);
      fresh |= 1u << level;
    }
    if (!next.exists || next.unit != now.unit) fresh = ~0u;
    now = next;
  }
  if constexpr (WHOLE) {
    __syncthreads();  // the leaves of all warps
    decode::write_rows(p, cursor.own_task(), leaves, accum_t(1));
  }
}
