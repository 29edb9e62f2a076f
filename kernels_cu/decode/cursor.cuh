// The visible leaves of a warp's units, one after the other: the twin of
// reference/cpu/decode.py.
#pragma once
#include "workspace.cuh"

namespace decode {

// A leaf of a unit. A unit without visible leaves has one without keys, because it has a result.
struct Leaf {
  int unit;  // its slot
  int index, keys, tile_class;
  int place;  // of its task among the warp's two
  bool exists;

  __device__ __forceinline__ long long first_key() const {
    return static_cast<long long>(index) << LOG_LEAF;
  }
  // Whether another leaf of the warp belongs to the same node of a level.
  __device__ __forceinline__ bool shares_node(const Leaf& other, int level) const {
    const int shift = LOG_CHILDREN * level;
    return other.exists && other.unit == unit && other.index >> shift == index >> shift;
  }
};

// The tasks of the leaf that a warp works on and of the next one, in shared memory.
struct WarpTasks {
  Task task[2];
};

class Cursor {
 public:
  // All lanes of a warp call its functions together. The block's units are divided into `shares`;
  // of warps with the same share one keeps records of tasks.
  __device__ __forceinline__ Cursor(const Params& p, const Workspace& workspace,
                                    WarpTasks& tasks_smem, int share = threadIdx.x / ptx::WARP_SIZE,
                                    int shares = WARPS, bool keeps_records = true)
      : p_(p),
        workspace_(workspace),
        tasks_smem_(tasks_smem),
        share_(share),
        shares_(shares),
        keeps_records_(keeps_records) {}

  // Begins with the warp's first unit.
  __device__ __forceinline__ void begin(const Schedule& schedule) {
    begin_unrecorded(schedule);
    record_first();
  }
  // The same in two steps. Between them is the first leaf, at most.
  __device__ __forceinline__ void begin_unrecorded(const Schedule& schedule) {
    find_first(schedule);
  }
  __device__ __forceinline__ void record_first() const {
    if (unit_ < end_) keep_record();
  }

  // Waits for the grids ahead, and counts units and begins: before the wait, if the schedule may be
  // early, and again if those grids changed the lengths. `prefetch(task, leaf)` is called before
  // the wait with the first leaf. Returns whether it still is the first one, of the same keys.
  template <class Prefetch>
  __device__ __forceinline__ bool begin_early(Schedule& schedule, const Prefetch& prefetch) {
    bool early = schedule.may_be_early(), same = true;
    if (!early) ptx::wait_for_grids();
#pragma unroll 1
    do {
      schedule.count_units();
      find_first(schedule);
      if (!early) {
        same = false;
        break;
      }
      if (unit_ < end_) prefetch(tasks_smem_.task[place_], leaf_);
      ptx::wait_for_grids();
      early = false;
    } while (schedule.is_outdated());
    if (unit_ < end_) keep_record();
    return same;
  }

  // The level of the warp's units.
  __device__ __forceinline__ int level() const { return level_; }
  // The warp's task, if the block has whole ones.
  __device__ __forceinline__ const Task& own_task() const { return tasks_smem_.task[place_]; }

  __device__ __forceinline__ Leaf next() {
#pragma unroll 1
    while (unit_ < end_) {
      const Task& task = tasks_smem_.task[place_];
      const int tile_class = leaf_ < leaf_end_ ? find_class(task) : EMPTY;
      if (tile_class != EMPTY) {
        yielded_ = true;
        const long long first = static_cast<long long>(leaf_) << LOG_LEAF;
        const int keys = tile::rows_from(first, task.len_k, LEAF);
        return Leaf{unit_, leaf_++, keys, tile_class, place_, true};
      }
      if (leaf_ < leaf_end_) continue;
      if (!yielded_) {
        yielded_ = true;
        return Leaf{unit_, leaf_begin_, 0, PARTIAL, place_, true};
      }
      if constexpr (WHOLE) {
        unit_ = index_ += shares_;
        if (unit_ < end_) begin_unit();
        continue;
      }
      unit_ += step_;
      if (unit_ >= end_) break;
      if (OF_BLOCKS && step_ > 1) {
        begin_found(schedule_->find(unit_));
      } else if (++index_ == task.units(p_, level_)) {
        index_ = 0;
        int number = task.number;
        Task following;
#pragma unroll 1
        do {
          following = task_of(p_, ++number);
        } while (following.heads == 0);
        begin_task(following);
      }
      begin_unit();
      keep_record();
    }
    return Leaf{unit_, 0, 0, EMPTY, place_, false};
  }

 private:
  __device__ __forceinline__ void find_first(const Schedule& schedule) {
    level_ = schedule.level;
    if constexpr (WHOLE) {
      begin_task(schedule.own_task());
      // Leaves if every warp has one at most, and else nodes.
      if constexpr (WHOLE_NODES) level_ = own_task().units(p_, 0) > TASK_WARPS ? 1 : 0;
      const int units = own_task().units(p_, level_);
      unit_ = index_ = tile::smaller(share_, units);
      end_ = units;
      if (unit_ < end_) begin_unit();
      return;
    }
    schedule_ = &schedule;
    if (schedule.deals_in_turns()) {
      unit_ = own_team();
      end_ = schedule.total;
      step_ = teams();
    } else {
      const int team = own_team();
      const int begin = schedule.begin(team), all = schedule.begin(team + 1) - begin;
      unit_ = begin + all * share_ / shares_;
      end_ = begin + all * (share_ + 1) / shares_;
    }
    if (V_PARTS > 1 && own_team() >= teams()) unit_ = end_;
    if (unit_ >= end_) return;
    begin_found(schedule.find(unit_));
    begin_unit();
  }

  __device__ __forceinline__ void begin_found(const Found& found) {
    index_ = found.index;
    begin_task(found.task);
  }

  __device__ __forceinline__ void begin_task(const Task& task) {
    place_ ^= 1;
    __syncwarp();  // the task that had this place, read by all lanes
    if (ptx::lane_index() == 0) tasks_smem_.task[place_] = task;
    __syncwarp();  // the task, written by one lane
    classified_ = 0;
  }

  __device__ __forceinline__ void begin_unit() {
    const Task& task = tasks_smem_.task[place_];
    const int shift = LOG_CHILDREN * level_, node = task.first_node(p_, level_) + index_;
    leaf_begin_ = matmul::larger(node << shift, task.first);
    leaf_end_ = tile::smaller((static_cast<long long>(node) + 1) << shift, task.last);
    leaf_ = leaf_begin_;
    yielded_ = false;
  }

  // Keeps the record of a task that begins.
  __device__ __forceinline__ void keep_record() const {
    if constexpr (WHOLE) return;
    if (keeps_records_ && index_ == 0 && ptx::lane_index() == 0) {
      const Task& task = tasks_smem_.task[place_];
      workspace_.records[task.number] =
          TaskRecord{unit_, task.units(p_, level_), task.first_node(p_, level_), level_};
    }
  }

  // Moves to the next leaf that is not EMPTY, and returns its class; or to the unit's end, or to
  // leaves that have no class yet.
  __device__ __forceinline__ int find_class(const Task& task) {
    if constexpr (!HAS_MASK) return FULL;
    if (leaf_ >= classified_) classify(task);
    const int place = leaf_ - classified_ + ptx::WARP_SIZE;
    const unsigned int some = some_ >> place;
    leaf_ = some == 0 ? classified_ : leaf_ + __ffs(static_cast<int>(some)) - 1;
    if (leaf_ >= leaf_end_) leaf_ = leaf_end_;
    if (some == 0 || leaf_ == leaf_end_) return EMPTY;
    return full_ >> (leaf_ - classified_ + ptx::WARP_SIZE) & 1 ? FULL : PARTIAL;
  }

  // Finds the classes of 32 leaves, one by each lane, over all heads of the task. Beyond the last
  // leaf, lanes classify the last one, because all of them must take part.
  __device__ __forceinline__ void classify(const Task& task) {
    const int mine = tile::smaller(leaf_ + ptx::lane_index(), task.last - 1);
    const long long first = static_cast<long long>(mine) << LOG_LEAF;
    const int keys = tile::rows_from(first, task.len_k, LEAF);
    bool some = false, full = true;
#pragma unroll 1
    for (int n = 0; n < task.heads; ++n) {
      const int queries = task.rows / task.heads;
      const int found = tile::classify_tile(
          p_, tile::describe_tile(task.entry(), task.head + n, task.i0, queries, first, keys));
      some = some || found != EMPTY;
      full = full && found == FULL;
    }
    some_ = ptx::ballot(some);
    full_ = ptx::ballot(full);
    classified_ = leaf_ + ptx::WARP_SIZE;
  }

  const Params& p_;
  const Workspace& workspace_;
  WarpTasks& tasks_smem_;
  const Schedule* schedule_ = nullptr;
  int unit_ = 0, end_ = 0,
      step_ = 1;  // its unit's slot, the end of the warp's, from one to the next
  int level_ = 0, index_ = 0, place_ = 0;
  int share_, shares_;
  int leaf_ = 0, leaf_begin_ = 0, leaf_end_ = 0;
  int classified_ = 0;  // leaves before this one have bits, the last 32 of them
  unsigned int some_ = 0, full_ = 0;
  bool yielded_ = false, keeps_records_;
};

}  // namespace decode
