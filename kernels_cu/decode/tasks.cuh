// How few queries and many keys are divided among warps: the twin of reference/cpu/decode_tasks.py.
//
// The keys of an entry are leaves of 64 keys at absolute positions, and 8 neighbouring nodes are
// one node of the next level; this tree is the same whatever is launched. A task is a block of
// rows, the queries of heads that share a key head, and its units are the nodes of one level that
// hold visible leaves. All units of all tasks form one list, and every thread block has an equal
// share of it, as has every warp within a block. The level depends on the amount of work: leaves if
// there is little, so that every warp has some, and larger nodes if these still fill the device, so
// that fewer results are kept. No bit of a result depends on it.
#pragma once
#include "../common/tile.cuh"
#include "../common/cache.cuh"

namespace decode {

constexpr int LEAF = 64, LOG_LEAF = 6, LOG_CHILDREN = 3, CHILDREN = 1 << LOG_CHILDREN;
constexpr int MOST_ROWS = BLOCK_Q;
constexpr int LEVELS = 4;  // units are nodes of levels 0, leaves, to LEVELS - 1
constexpr int WARPS = THREADS / ptx::WARP_SIZE;
// Units of a block that keep its warps busy enough, the part of its leaves by which a block may
// have more than others, and most units for each block. Codes need more instructions for each byte.
constexpr int FILL = 3, FILL_OF_CODES = 7, EVEN = 24, MOST_UNITS = 64;
// If all of a block works on one unit, this holds instead: the least level, with nodes that are in
// registers, the largest one, whose nodes are in the workspace, and most units for each block.
constexpr bool OF_BLOCKS = MOST_ROWS >= 64;
constexpr int FIRST_OF_BLOCK = 1, LAST_OF_BLOCK = 2, MOST_OF_BLOCK = 16;
constexpr int MOST_OF_THREAD = 1 << 22;  // units that a thread counts: more are too many anyway

// A task's heads, and the queries of its block.
__device__ __forceinline__ int heads_of_task(const Params& p) {
  return p.group < MOST_ROWS ? p.group : MOST_ROWS;
}
__device__ __forceinline__ int queries_of_task(const Params& p) {
  return MOST_ROWS / heads_of_task(p);
}
__device__ __forceinline__ int head_blocks(const Params& p) {
  const int heads = heads_of_task(p);
  return (p.group + heads - 1) / heads;
}

// Row r of a task is query i0 + r / heads of head `head` + r % heads.
struct Task {
  const storage_t *k, *v;          // row 0 of its head's keys and values, or of page 0
  const float *k_scale, *v_scale;  // theirs, if they are codes
  long long start_q;               // of its entry, as the next ones
  int b, lead[MAX_LEAD], len_q, len_k;
  int number, i0, head, heads, rows;  // no heads: no such task, as packed sequences may have
  int first, last;                    // visible leaves: from `first` to before `last`

  __device__ __forceinline__ layout::Entry entry() const {
    return layout::Entry{b, {lead[0], lead[1], lead[2], lead[3]}, len_q, len_k, start_q, 0};
  }
  __device__ __forceinline__ long long head_of(int row) const {
    return head + static_cast<int>(static_cast<unsigned int>(row) % heads);
  }
  __device__ __forceinline__ long long query_of(int row) const {
    return i0 + static_cast<unsigned int>(row) / heads;
  }
  __device__ __forceinline__ int first_node(int level) const {
    return first >> (LOG_CHILDREN * level);
  }
  // Its units at a level: one where it has no leaf, too, because its rows have results.
  __device__ __forceinline__ int units(int level) const {
    if (heads == 0) return 0;
    if (last <= first) return 1;
    return ((last - 1) >> (LOG_CHILDREN * level)) - first_node(level) + 1;
  }
};
static_assert(MAX_LEAD == 4, "Task::entry");

// The site of a row and a key.
__device__ __forceinline__ Site site_of(const Task& task, int row, long long j) {
  return Site{task.b,     task.head_of(row), task.query_of(row), j,
              task.len_q, task.len_k,        task.start_q,       0};
}

// Quotient and remainder of a task's number, which has 31 bits.
struct Division {
  unsigned int quotient, remainder;

  __device__ __forceinline__ Division(unsigned int number, long long divisor) {
    const unsigned int by = static_cast<unsigned int>(divisor);
    quotient = by == 1 ? number : number / by;
    remainder = number - quotient * by;
  }
};

__device__ __forceinline__ Task task_of(const Params& p, int number) {
  Task task;
  layout::Entry entry;
  const int heads = heads_of_task(p), queries = queries_of_task(p);
  const Division by_block(number, p.blocks);
  const Division by_part(by_block.quotient, head_blocks(p));
  const Division by_head(by_part.quotient, p.heads_kv);
  const int head_kv = static_cast<int>(by_head.remainder);
  const int part = static_cast<int>(by_part.remainder) * heads;
  long long block = by_block.remainder;
  unsigned int slice = by_head.quotient;
  if constexpr (PACKED) {
    slice =
        static_cast<unsigned int>(layout::sequence_of(p, p.offsets_q, p.total_q, queries, block));
    block -= layout::clamp(p.offsets_q[slice], 0, p.total_q) / queries + slice;
  }
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    entry.lead[axis] = 0;
    if (p.lead_size[axis] > 1) {
      const Division rest(slice, p.lead_size[axis]);
      entry.lead[axis] = rest.remainder;
      slice = rest.quotient;
    }
  }
  layout::complete(p, entry);
  if constexpr (CACHED) entry.len_k = cache::length(p, entry.b);
  task.b = static_cast<int>(entry.b);
  task.start_q = entry.start_q;
  task.len_q = static_cast<int>(entry.len_q);
  task.len_k = static_cast<int>(entry.len_k);
#pragma unroll
  for (int axis = 0; axis < MAX_LEAD; ++axis) task.lead[axis] = static_cast<int>(entry.lead[axis]);
  task.number = number;
  task.head = head_kv * p.group + part;
  task.i0 = static_cast<int>(block) * queries;
  bool idle = block < 0 || task.i0 >= task.len_q;
  if constexpr (PACKED) idle = idle || !cache::has_few_rows(p, task.len_q);
  task.heads = idle ? 0 : tile::smaller(p.group - part, heads);
  task.rows = tile::smaller(task.len_q - task.i0, queries) * task.heads;
  constexpr int STEP = CODES == cache::NUMBERS ? sizeof(storage_t) : 1;  // bytes
  task.k = reinterpret_cast<const storage_t*>(p.k.data +
                                              STEP * layout::offset(p.k, entry, head_kv, true));
  task.v = reinterpret_cast<const storage_t*>(p.v.data +
                                              STEP * layout::offset(p.v, entry, head_kv, true));
  task.k_scale = task.v_scale = nullptr;
  if constexpr (CODES != cache::NUMBERS) {
    const auto scales_of = [&](const Operand& scales) {
      return reinterpret_cast<const float*>(scales.data) +
             layout::offset(scales, entry, head_kv, true);
    };
    task.k_scale = scales_of(p.k_scale);
    task.v_scale = scales_of(p.v_scale);
  }
  task.first = task.last = 0;
  long long begin = 0, end = task.len_k;
  if constexpr (HAS_RANGE) {
    long long low = end, high = -1;
#pragma unroll 1
    for (int row = 0; row < task.rows; ++row) {
      const KeyRange range = mask_range(p, site_of(task, row, 0));
      if (range.low > range.high) continue;
      low = range.low < low ? range.low : low;
      high = range.high > high ? range.high : high;
    }
    begin = low > 0 ? low : 0;
    end = high < end ? high + 1 : end;
  }
  if (begin < end) {
    task.first = static_cast<int>(begin >> LOG_LEAF);
    task.last = static_cast<int>((end + LEAF - 1) >> LOG_LEAF);
  }
  return task;
}

// Units of the tasks of threads 0 to t, at the level that was chosen: in shared memory.
struct Schedule {
  int totals[LEVELS][WARPS];  // of each warp's threads
  int sums[THREADS];
  int level;

  __device__ __forceinline__ int total() const { return sums[THREADS - 1]; }
};

// Every thread counts the units of its tasks: those from t * each on.
__device__ __forceinline__ int tasks_of_thread(const Params& p) {
  return (p.tasks + THREADS - 1) / THREADS;
}

// The level of the units: the largest whose nodes give all blocks work, and nearly equal work; but
// one whose units have room in the workspace. It changes no bit.
__device__ __forceinline__ int choose_level(const unsigned int (&totals)[LEVELS]) {
  constexpr int FIRST = OF_BLOCKS ? FIRST_OF_BLOCK : 0;
  constexpr int LAST = OF_BLOCKS ? LAST_OF_BLOCK : LEVELS - 1;
  constexpr int FEWEST = OF_BLOCKS ? 0 : CODES == cache::NUMBERS ? FILL : FILL_OF_CODES;
  constexpr int MOST = OF_BLOCKS ? MOST_OF_BLOCK : MOST_UNITS;
  const unsigned int blocks = gridDim.x, leaves = (totals[0] + blocks - 1) / blocks;
  int level = FIRST;
#pragma unroll
  for (int n = FIRST + 1; n <= LAST; ++n) {
    const unsigned int most = (totals[n] + blocks - 1) / blocks << (LOG_CHILDREN * n);
    if (totals[n] >= FEWEST * blocks && most <= leaves + leaves / EVEN) level = n;
  }
#pragma unroll
  for (int n = FIRST; n < LAST; ++n) {
    if (level == n && totals[n] > MOST * blocks) level = n + 1;
  }
  return level;
}

// Chooses the level and counts all units. All threads of the block call it together.
__device__ __forceinline__ void count_units(const Params& p, Schedule* schedule_smem) {
  const int each = tasks_of_thread(p), begin = threadIdx.x * each;
  const int lane = ptx::lane_index(), warp = threadIdx.x / ptx::WARP_SIZE;
  int counts[LEVELS] = {};
#pragma unroll 1
  for (int n = begin; n < begin + each && n < p.tasks; ++n) {
    const Task task = task_of(p, n);
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
      counts[level] =
          tile::smaller(static_cast<long long>(counts[level]) + task.units(level), MOST_OF_THREAD);
    }
  }
  int sums[LEVELS];  // over the warp's threads up to this one
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    sums[level] = counts[level];
#pragma unroll
    for (int lanes = 1; lanes < ptx::WARP_SIZE; lanes *= 2) {
      const int other = ptx::shuffle(sums[level], (lane - lanes) & 31);
      sums[level] += lane >= lanes ? other : 0;
    }
    if (lane == ptx::WARP_SIZE - 1) schedule_smem->totals[level][warp] = sums[level];
  }
  __syncthreads();  // the totals of all warps
  unsigned int totals[LEVELS] = {};
  int before[LEVELS] = {};  // of the warps before this one
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
#pragma unroll
    for (int n = 0; n < WARPS; ++n) {
      const int total = schedule_smem->totals[level][n];
      before[level] += n < warp ? total : 0;
      totals[level] += total;
    }
  }
  const int level = choose_level(totals);
  int sum = 0;
#pragma unroll
  for (int n = 0; n < LEVELS; ++n) sum = n == level ? before[n] + sums[n] : sum;
  schedule_smem->sums[threadIdx.x] = sum;
  if (threadIdx.x == 0) schedule_smem->level = level;
  __syncthreads();  // the sums of all threads
}

// The units of one level, and how blocks share them.
struct Units {
  int level, total;

  __device__ __forceinline__ explicit Units(const Schedule& schedule)
      : level(schedule.level), total(schedule.total()) {}
  // The first unit of a block.
  __device__ __forceinline__ int begin(int block) const {
    return static_cast<int>(static_cast<long long>(block) * total / gridDim.x);
  }
};

// A unit's task, and which of the task's units it is.
struct Found {
  Task task;
  int index;
};

// Finds a unit's task: among the threads' sums, then task by task.
__device__ __forceinline__ Found find_unit(const Params& p, const Schedule& schedule, int unit) {
  int low = 0, high = THREADS - 1;  // the first thread whose sum is beyond the unit
  while (low < high) {
    const int middle = (low + high) / 2;
    if (schedule.sums[middle] > unit) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  Found found;
  found.index = unit - (low > 0 ? schedule.sums[low - 1] : 0);
  int number = low * tasks_of_thread(p);
#pragma unroll 1
  while (true) {
    found.task = task_of(p, number);
    const int units = found.task.units(schedule.level);
    if (found.index < units) return found;
    found.index -= units;
    ++number;
  }
}

}  // namespace decode
