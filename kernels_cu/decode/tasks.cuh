// How few queries and many keys are divided among warps: the twin of reference/cpu/decode_tasks.py.
//
// The keys of an entry are leaves of 64 keys at absolute positions, and 8 neighbouring nodes are
// one node of the next level; this tree is the same whatever is launched. A task is a block of
// rows, the queries of heads that share a key head, and its units are the nodes of one level that
// hold visible leaves. All units of all tasks form one list, and every thread block has an equal
// share of it, as has every warp within a block; or blocks take them in turns. The level depends on
// the amount of work: leaves if there is little, so that every warp has some, and larger nodes if
// these still fill the device, so that fewer results are kept. No bit of a result depends on it.
// Where tasks are few and have few leaves, each has a block (WHOLE).
#pragma once
#include "../common/tile.cuh"
#include "../common/cache.cuh"

namespace decode {

constexpr int LEAF = 64, LOG_LEAF = 6, LOG_CHILDREN = 3, CHILDREN = 1 << LOG_CHILDREN;
constexpr int MOST_ROWS = BLOCK_Q;
constexpr int LEVELS = 4;  // units are nodes of levels 0, leaves, to LEVELS - 1
constexpr int WARPS = THREADS / ptx::WARP_SIZE;
constexpr int FEW_WARPS = 4;  // of a block if an SM has as many leaves at most
// Units of an SM's blocks that keep their warps busy enough, the part of its leaves by which a
// block may have more than others, and most units for each block. Codes need more instructions for
// each byte.
constexpr int FILL = 3, FILL_OF_CODES = 7, EVEN = 24, MOST_UNITS = 64;
// If all of a block works on one unit, this holds instead: the least level, with nodes that are in
// registers, the largest one, whose nodes are in the workspace, and most units for each block.
constexpr bool OF_BLOCKS = MOST_ROWS >= 64;
constexpr int FIRST_OF_BLOCK = 1, LAST_OF_BLOCK = 2, MOST_OF_BLOCK = 16;
constexpr int MOST_COUNTED = 1 << 30;  // units in all: more are too many anyway
// Whether all tasks of an entry have equal units: no mask bounds their keys, and no entry its own
// queries.
constexpr bool EQUAL_TASKS = !HAS_RANGE && !PACKED;
// A block has a task, whose leaves its warps take in turn (WHOLE); or some tasks, whose nodes of
// level 1 a warp each takes (WHOLE_TASKS of a block).
constexpr bool WHOLE_NODES = WHOLE && WHOLE_TASKS > 0;
constexpr int TASK_WARPS = WHOLE_NODES ? WARPS / (WHOLE_NODES ? WHOLE_TASKS : 1) : WARPS;
static_assert(!WHOLE || (!OF_BLOCKS && !PACKED && !SHARED), "WHOLE");
static_assert(!WHOLE || (WHOLE_NODES ? TASK_WARPS * WHOLE_TASKS == WARPS && TASK_WARPS <= CHILDREN
                                     : WARPS == CHILDREN),
              "WHOLE_TASKS");
// The warp's task among those of the block, and the warp among those of its task.
__device__ __forceinline__ int task_of_warp() {
  return WHOLE_NODES ? static_cast<int>(threadIdx.x) / ptx::WARP_SIZE / TASK_WARPS : 0;
}
__device__ __forceinline__ int warp_of_task() {
  return static_cast<int>(threadIdx.x) / ptx::WARP_SIZE % TASK_WARPS;
}
// Entries of which a lane remembers the lengths.
constexpr int REMEMBERED = 4;

// V_PARTS neighbouring blocks are a team, which has the same units: each computes all scores of
// them and its part of the columns of o. A block that is in no whole team has none.
__device__ __forceinline__ int teams() { return static_cast<int>(gridDim.x) / V_PARTS; }
__device__ __forceinline__ int own_team() { return static_cast<int>(blockIdx.x) / V_PARTS; }
__device__ __forceinline__ int part_of_team() { return static_cast<int>(blockIdx.x) % V_PARTS; }

// A task's heads, and the queries of its block.
__device__ __forceinline__ int heads_of_task(const Params& p) {
  return p.group < MOST_ROWS ? p.group : MOST_ROWS;
}
__device__ __forceinline__ int queries_of_task(const Params& p) {
  return MOST_ROWS / heads_of_task(p);
}
__device__ __forceinline__ int head_blocks(const Params& p) {
  return p.group <= MOST_ROWS ? 1 : (p.group + MOST_ROWS - 1) / MOST_ROWS;
}

// The units at a level of leaves `first` to before `last`: one where there is no leaf, too, because
// rows without keys have results.
__device__ __forceinline__ int units_of(int first, int last, int level) {
  if (last <= first) return 1;
  return ((last - 1) >> (LOG_CHILDREN * level)) - (first >> (LOG_CHILDREN * level)) + 1;
}

// Leaves that decode_sm80_shared.cu computes for an entry that holds `leaves`: whole nodes of a
// level at its start, which it has in common with other entries. Shorter entries compute theirs
// themselves.
__device__ __forceinline__ int shared_leaves(const Params& p, int leaves, int level) {
  if constexpr (!SHARED) return 0;
  const int shared = p.shared << LOG_CHILDREN, shift = LOG_CHILDREN * level;
  return leaves > shared ? shared >> shift << shift : 0;
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
    if constexpr (CACHED) return layout::Entry{b, {0, 0, 0, b}, len_q, len_k, start_q, 0};
    return layout::Entry{b, {lead[0], lead[1], lead[2], lead[3]}, len_q, len_k, start_q, 0};
  }
  __device__ __forceinline__ long long head_of(int row) const {
    return head + static_cast<int>(static_cast<unsigned int>(row) % heads);
  }
  __device__ __forceinline__ long long query_of(int row) const {
    return i0 + static_cast<unsigned int>(row) / heads;
  }
  // The leaves at its start that are shared, in whole nodes of a level.
  __device__ __forceinline__ int shared(const Params& p, int level) const {
    return shared_leaves(p, (len_k + LEAF - 1) >> LOG_LEAF, level);
  }
  // The first visible leaf of its units at a level.
  __device__ __forceinline__ int first_leaf(const Params& p, int level) const {
    return SHARED ? matmul::larger(first, shared(p, level)) : first;
  }
  // The node of its first unit at a level, and how many units it has.
  __device__ __forceinline__ int first_node(const Params& p, int level) const {
    return first_leaf(p, level) >> (LOG_CHILDREN * level);
  }
  __device__ __forceinline__ int units(const Params& p, int level) const {
    return heads == 0 ? 0 : units_of(first_leaf(p, level), last, level);
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

// Task `number`; `len_k` is its entry's number of keys where that is known.
__device__ __forceinline__ Task task_of(const Params& p, int number, int len_k = -1) {
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
    if (CACHED && axis == MAX_LEAD - 1) {
      entry.lead[axis] = slice;  // the only axis of a cache
    } else if (!CACHED && p.lead_size[axis] > 1) {
      const Division rest(slice, p.lead_size[axis]);
      entry.lead[axis] = rest.remainder;
      slice = rest.quotient;
    }
  }
  layout::complete(p, entry);
  if constexpr (CACHED) entry.len_k = len_k < 0 ? cache::length<SHARED>(p, entry.b) : len_k;
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
  task.k = reinterpret_cast<const storage_t*>(
      p.k.data + cache::STEP<KEY_CODES> * layout::offset(p.k, entry, head_kv, true));
  task.v = reinterpret_cast<const storage_t*>(
      p.v.data + cache::STEP<VALUE_CODES> * layout::offset(p.v, entry, head_kv, true));
  task.k_scale = task.v_scale = nullptr;
  const auto scales_of = [&](const Operand& scales) {
    return reinterpret_cast<const float*>(scales.data) +
           layout::offset(scales, entry, head_kv, true);
  };
  if constexpr (KEY_CODES != cache::NUMBERS) task.k_scale = scales_of(p.k_scale);
  if constexpr (VALUE_CODES != cache::NUMBERS) task.v_scale = scales_of(p.v_scale);
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

// The level of the units: the largest whose nodes give all blocks work, and nearly equal work; but
// one whose units have room in the workspace. It changes no bit.
__device__ __forceinline__ int choose_level(const unsigned int (&totals)[LEVELS]) {
  constexpr int FIRST = OF_BLOCKS ? FIRST_OF_BLOCK : 0;
  constexpr int LAST = OF_BLOCKS ? LAST_OF_BLOCK : LEVELS - 1;
  constexpr int FEWEST = OF_BLOCKS ? 0 : cache::HAS_CODES ? FILL_OF_CODES : FILL;
  constexpr int MOST = OF_BLOCKS ? MOST_OF_BLOCK : MOST_UNITS;
  const unsigned int blocks = teams(), leaves = (totals[0] + blocks - 1) / blocks;
  int level = FIRST;
#pragma unroll
  for (int n = FIRST + 1; n <= LAST; ++n) {
    const unsigned int most = (totals[n] + blocks - 1) / blocks << (LOG_CHILDREN * n);
    if (totals[n] * RESIDENT_BLOCKS >= FEWEST * blocks && most <= leaves + leaves / EVEN) level = n;
  }
#pragma unroll
  for (int n = FIRST; n < LAST; ++n) {
    if (level == n && totals[n] > MOST * blocks) level = n + 1;
  }
  return level;
}

// Adds units to a count, of which there are as many as `counters`.
__device__ __forceinline__ void count(int& units, long long more, int counters) {
  units = tile::smaller(units + more, MOST_COUNTED / counters);
}

// Sums over the lanes of a warp up to this one. All lanes call it together.
__device__ __forceinline__ int sum_of_lanes(int x) {
  const int lane = ptx::lane_index();
#pragma unroll
  for (int lanes = 1; lanes < ptx::WARP_SIZE; lanes *= 2) {
    const int other = ptx::shuffle(x, (lane - lanes) & 31);
    x += lane >= lanes ? other : 0;
  }
  return x;
}

// What a block's threads tell each other where tasks are unlike.
struct ScheduleStorage {
  int totals[LEVELS][WARPS];  // of each warp's threads
  int sums[THREADS];          // of the threads up to each one, at the level that was chosen
};

// A unit's task, and which of the task's units it is.
struct Found {
  Task task;
  int index;
};

// The units of one level, how blocks share them, and where they are: the list of all units as a
// warp knows it. Where tasks are alike, a lane counts those of some entries, and every warp all of
// them; elsewhere a thread counts those of some tasks, and every block all of them.
class Schedule {
 public:
  int level, total;

  __device__ __forceinline__ Schedule(const Params& p, ScheduleStorage* storage_smem)
      : p_(p), storage_smem_(storage_smem) {}

  // Whether units may be counted before the grids ahead have ended, which may write the lengths:
  // `is_outdated` then tells whether they did.
  __device__ __forceinline__ bool may_be_early() const { return EQUAL_TASKS && remembers(); }
  __device__ __forceinline__ bool is_outdated() const {
    int now[REMEMBERED];
    remember(now);
    bool same = true;
#pragma unroll
    for (int n = 0; n < REMEMBERED; ++n) same = same && now[n] == keys_[n];
    return ptx::any_lane(!same);
  }

  // All threads of the block call it together.
  __device__ __forceinline__ void count_units() {
    const Params& p = p_;
    if constexpr (WHOLE) {  // nothing is divided
      tasks_ = head_blocks(p) * p.heads_kv * static_cast<int>(p.blocks);
      each_ = static_cast<int>((p.batch + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE);
      level = 0;
      if (may_be_early()) remember(keys_);
      return;
    }
    int counts[LEVELS] = {};
    if constexpr (EQUAL_TASKS) {
      tasks_ = head_blocks(p) * p.heads_kv * static_cast<int>(p.blocks);
      each_ = static_cast<int>((p.batch + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE);
      const int begin = ptx::lane_index() * each_;
      const bool knows = remembers();
      if (knows) remember(keys_);
#pragma unroll 1
      for (int b = begin; b < begin + each_ && b < p.batch; ++b) {
        const int leaves = leaves_of(knows ? remembered(b - begin) : keys_of_entry(b));
#pragma unroll
        for (int n = 0; n < LEVELS; ++n) {
          const long long units = units_of(shared_leaves(p, leaves, n), leaves, n);
          count(counts[n], units * tasks_, ptx::WARP_SIZE);
        }
      }
    } else {
      tasks_ = 1;
      each_ = (p.tasks + THREADS - 1) / THREADS;
      const int begin = threadIdx.x * each_;
#pragma unroll 1
      for (int number = begin; number < begin + each_ && number < p.tasks; ++number) {
        const Task task = task_of(p, number);
#pragma unroll
        for (int n = 0; n < LEVELS; ++n) count(counts[n], task.units(p, n), THREADS);
      }
    }
    unsigned int totals[LEVELS] = {};
#pragma unroll
    for (int n = 0; n < LEVELS; ++n) {
      counts[n] = sum_of_lanes(counts[n]);
      totals[n] = ptx::shuffle(counts[n], ptx::WARP_SIZE - 1);
    }
    if constexpr (!EQUAL_TASKS) add_warps(counts, totals);
    level = choose_level(totals);
    sum_ = counts[0];
    total = static_cast<int>(totals[0]);
#pragma unroll
    for (int n = 1; n < LEVELS; ++n) {  // with == the compiler would make it an index in memory
      sum_ = level >= n ? counts[n] : sum_;
      total = level >= n ? static_cast<int>(totals[n]) : total;
    }
    if constexpr (!EQUAL_TASKS) {
      storage_smem_->sums[threadIdx.x] = sum_;
      __syncthreads();  // the sums of all threads
    }
  }

  // Whether blocks take the units in turns instead of having shares. Tasks of an entry read the
  // same keys: where a block would have several, others compute them at the same time, and the keys
  // are read from the chip's memory once. Elsewhere neighbouring units of a task need no other
  // queries.
  __device__ __forceinline__ bool deals_in_turns() const { return OF_BLOCKS && p_.tasks > teams(); }

  // The first unit of a block. The last blocks, which may be the last to begin, have none too many.
  __device__ __forceinline__ int begin(int block) const {
    const Division each(total, teams());
    return block * static_cast<int>(each.quotient) +
           tile::smaller(block, static_cast<int>(each.remainder));
  }

  // Finds a unit's task: among the counted sums, then task by task. All lanes of a warp call it
  // together.
  __device__ __forceinline__ Found find(int unit) const {
    Found found;
    if constexpr (EQUAL_TASKS) {
      const int lane = __ffs(static_cast<int>(ptx::ballot(sum_ > unit))) - 1;
      const int before = ptx::shuffle(sum_, matmul::larger(lane - 1, 0));
      int b = lane * each_, rest = unit - (lane > 0 ? before : 0);
      const bool knows = remembers();
      const auto keys_of = [&](int n) {
        return knows ? ptx::shuffle(remembered(n), lane) : keys_of_entry(b + n);
      };
      int n = 0, keys = keys_of(0), units = units_of_entry(keys);
#pragma unroll 1
      while (rest >= units * tasks_) {
        rest -= units * tasks_;
        keys = keys_of(++n);
        units = units_of_entry(keys);
      }
      b += n;
      const Division at(rest, units);
      found.index = static_cast<int>(at.remainder);
      found.task = task_of(p_, b * tasks_ + static_cast<int>(at.quotient), keys);
      return found;
    } else {
      int low = 0, high = THREADS - 1;  // the first thread whose sum is beyond the unit
      while (low < high) {
        const int middle = (low + high) / 2;
        if (storage_smem_->sums[middle] > unit) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      found.index = unit - (low > 0 ? storage_smem_->sums[low - 1] : 0);
      int number = low * each_;
#pragma unroll 1
      while (true) {
        found.task = task_of(p_, number);
        const int units = found.task.units(p_, level);
        if (found.index < units) return found;
        found.index -= units;
        ++number;
      }
    }
  }

  // The warp's task, if the block has whole ones; without rows where there is none. All lanes of a
  // warp call it together.
  __device__ __forceinline__ Task own_task() const {
    int number = blockIdx.x;
    bool exists = true;
    if constexpr (WHOLE_NODES) {
      const int last = static_cast<int>(p_.batch) * tasks_ - 1;
      number = number * WHOLE_TASKS + task_of_warp();
      exists = number <= last;
      number = exists ? number : last;
    }
    const int b = static_cast<int>(Division(number, tasks_).quotient);
    int keys = 0;
    if (may_be_early()) {
      const Division at(b, each_);
      keys = ptx::shuffle(remembered(static_cast<int>(at.remainder)), at.quotient);
    } else {
      keys = keys_of_entry(b);
    }
    Task task = task_of(p_, number, keys);
    if (!exists) task.heads = task.rows = 0;
    return task;
  }

 private:
  __device__ __forceinline__ bool remembers() const {
    return p_.batch <= REMEMBERED * ptx::WARP_SIZE;
  }
  // The lengths of the lane's entries, all loaded at a time; 0 beyond the last one.
  __device__ __forceinline__ void remember(int (&keys)[REMEMBERED]) const {
    const int begin = ptx::lane_index() * each_;
    cache::lengths(p_, begin, tile::smaller(each_, static_cast<int>(p_.batch) - begin), keys);
  }
  __device__ __forceinline__ int remembered(int n) const {
    int keys = keys_[0];
#pragma unroll
    for (int other = 1; other < REMEMBERED; ++other) keys = n == other ? keys_[other] : keys;
    return keys;
  }
  __device__ __forceinline__ int keys_of_entry(int b) const {
    return static_cast<int>(CACHED ? cache::length<true>(p_, b) : p_.len_k);
  }
  __device__ __forceinline__ static int leaves_of(int keys) {
    return static_cast<int>((static_cast<unsigned int>(keys) + (LEAF - 1)) >> LOG_LEAF);
  }

  __device__ __forceinline__ int units_of_entry(int keys) const {
    const int leaves = leaves_of(keys);
    return units_of(shared_leaves(p_, leaves, level), leaves, level);
  }

  // Adds to a thread's sums those of the warps before its own, and to the totals of its warp those
  // of all others.
  __device__ __forceinline__ void add_warps(int (&sums)[LEVELS],
                                            unsigned int (&totals)[LEVELS]) const {
    const int warp = threadIdx.x / ptx::WARP_SIZE;
#pragma unroll
    for (int n = 0; n < LEVELS; ++n) {
      if (ptx::lane_index() == 0) storage_smem_->totals[n][warp] = static_cast<int>(totals[n]);
      totals[n] = 0;
    }
    __syncthreads();  // the totals of all warps
#pragma unroll
    for (int n = 0; n < LEVELS; ++n) {
#pragma unroll
      for (int other = 0; other < WARPS; ++other) {
        const int of_warp = storage_smem_->totals[n][other];
        sums[n] += other < warp ? of_warp : 0;
        totals[n] += of_warp;
      }
    }
  }

  const Params& p_;
  ScheduleStorage* const storage_smem_;
  int tasks_;             // of an entry, if they are alike
  int each_;              // entries of a lane, or tasks of a thread
  int sum_;               // units of the lanes, or threads, up to this one
  int keys_[REMEMBERED];  // the lengths of the lane's entries, if they are so few
};

}  // namespace decode
