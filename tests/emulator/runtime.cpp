// Threads as fibers: one block at a time, one fiber per thread, each run until it has to wait.
//
// Fibers take turns only where they wait for each other. That is enough to see every order of what
// happens between two barriers that matters, because races.cpp reports accesses whose order no
// barrier decides. Order of turns and of blocks: forward, reverse, or drawn from a seed.
#include "runtime.h"

#include "turns.h"
#include "races.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <sys/mman.h>
#include <vector>
#include <xmmintrin.h>

emulator::Index threadIdx, blockIdx, gridDim;
EMULATOR_EXPORT const emulator::Kernel emulated_kernel;  // of the compiled source, see build.py

// Saves the caller's stack pointer to *from and goes on at `to`. What a function must preserve lies
// on its stack meanwhile.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator {
namespace {

constexpr std::size_t STACK = 256 * 1024, PAGE = 4096;
// Beside shared memory nothing is for many pages, so that races.cpp knows a stray access.
constexpr std::size_t BESIDE = 1 << 20;
constexpr unsigned char POISON = 0xff;  // as bytes of any float type a NaN
constexpr unsigned int FLUSH = 0x8040;  // of the control register: subnormal results and operands

enum class Schedule { FORWARD, REVERSE, RANDOM };

// Threads that wait for each other.
struct Meeting {
  std::vector<int> members;
  std::size_t arrived = 0;
  const char* what = nullptr;
  Where where = {};
  bool any = false;
};

// On its way to shared memory; what is not wanted of its source is zeros.
struct Copy {
  char* to;
  const void* from;
  unsigned int bytes, wanted;
  unsigned int group;
  bool landed;

  void land() {
    if (!landed) {
      if (wanted) std::memcpy(to, from, wanted);
      std::memset(to + wanted, 0, bytes - wanted);
    }
    landed = true;
  }
};

struct Fiber {
  std::vector<Copy> copies;  // that it has not waited for
  unsigned int groups = 0;   // of copies, that it has made
  void* brought = nullptr;   // to a meeting of a warp
  void* stack_pointer = nullptr;
  Meeting* at = nullptr;   // where it waits
  turns::Condition until;  // or for what
  bool done = false;
  unsigned long long given = 0, got = 0;
  unsigned int source = 0;
};

// What Python reads after a fault: the same layout as in machine.py.
struct Report {
  long long block;
  int thread;
  long long place;  // of an instruction, from the library's first byte; 0 where there is none
  char text[1000];
};

std::vector<Fiber> fibers;                           // of the block, by the number of the thread
std::vector<std::map<unsigned int, Meeting>> warps;  // of each, by the mask of lanes
std::vector<Meeting> warpgroups;
Meeting block;
Schedule schedule;
std::mt19937_64 randomness;
int current;  // the thread that runs
void* scheduler_stack;
char* stacks;
char* shared;
const void* params;
Report* report;
bool failed;

void leave() { emulator_switch(&fibers[current].stack_pointer, scheduler_stack); }

void describe(long long place, const char* format, std::va_list rest) {
  report->block = blockIdx.x;
  report->thread = current;
  report->place = place;
  std::vsnprintf(report->text, sizeof(report->text), format, rest);
  failed = true;
}

void fault_of(const char* format, ...) {
  std::va_list rest;
  va_start(rest, format);
  describe(0, format, rest);
  va_end(rest);
}

// Ends the launch: a fiber that failed never goes on.
[[noreturn]] void stop() {
  leave();
  std::abort();
}

std::string text_of(const char* what, Where where) {
  return std::string(what) + " (" + where.file + ":" + std::to_string(where.line) + ")";
}

// Counts the running thread in. Who is not the last leaves, and comes back when all go on; who is
// the last gets true, and lets them go on by `complete`.
bool arrive(Meeting& meeting, const char* what, Where where) {
  for (int t : meeting.members) {
    if (fibers[t].done) {
      fault_of("waits at %s for thread %d, which has ended", text_of(what, where).c_str(), t);
      stop();
    }
  }
  if (meeting.arrived == 0) {
    meeting.what = what;
    meeting.where = where;
  } else if (meeting.where.line != where.line || std::strcmp(meeting.what, what) != 0 ||
             std::strcmp(meeting.where.file, where.file) != 0) {
    const auto other = std::find_if(meeting.members.begin(), meeting.members.end(),
                                    [&](int t) { return fibers[t].at == &meeting; });
    fault_of("waits at %s while thread %d waits at %s", text_of(what, where).c_str(), *other,
             text_of(meeting.what, meeting.where).c_str());
    stop();
  }
  fibers[current].at = &meeting;
  if (++meeting.arrived == meeting.members.size()) return true;
  leave();
  return false;
}

// Lets all go on; the schedule says who is first.
void complete(Meeting& meeting) {
  for (int t : meeting.members) fibers[t].at = nullptr;
  meeting.arrived = 0;
  leave();
}

void check_end(const Meeting& meeting) {
  const auto& members = meeting.members;
  if (meeting.arrived && std::find(members.begin(), members.end(), current) != members.end()) {
    fault_of("ended while other threads wait for it at %s",
             text_of(meeting.what, meeting.where).c_str());
    stop();
  }
}

void begin() {
  emulated_kernel.run(params);
  if (!fibers[current].copies.empty()) {
    fault_of("ended before its copies were finished");
    stop();
  }
  asynchronous::check_end();
  fibers[current].done = true;
  check_end(block);
  for (const Meeting& each : warpgroups) check_end(each);
  for (const auto& each : warps[current / WARP]) check_end(each.second);
  leave();
}

// Gives every fiber an empty stack, on which a switch finds six registers and the way to `begin`.
void prepare_fibers() {
  for (std::size_t t = 0; t < fibers.size(); ++t) {
    void** top = reinterpret_cast<void**>(stacks + (t + 1) * STACK);
    *--top = nullptr;  // whither `begin` would return, where a call leaves it
    *--top = reinterpret_cast<void*>(begin);
    for (int n = 0; n < 6; ++n) *--top = nullptr;
    fibers[t] = Fiber{};
    fibers[t].stack_pointer = top;
  }
}

// Where a thread waits, "" where it does not.
std::string waits_at(const Fiber& fiber) {
  if (fiber.at != nullptr) return text_of(fiber.at->what, fiber.at->where);
  return fiber.until.holds ? text_of(fiber.until.what, fiber.until.where) : "";
}

// "threads 0-31 wait at __syncthreads (x.cu:7); threads 32, 33 ..."
std::string waiting() {
  std::string text;
  for (std::size_t t = 0; t < fibers.size();) {
    const std::string place = waits_at(fibers[t]);
    std::size_t last = t;
    while (last + 1 < fibers.size() && waits_at(fibers[last + 1]) == place) ++last;
    if (!place.empty()) {
      text += (text.empty() ? "threads " : "; threads ") + std::to_string(t) + "-" +
              std::to_string(last) + " wait at " + place;
    }
    t = last + 1;
  }
  return text;
}

bool can_run(Fiber& fiber) {
  if (fiber.done || fiber.at != nullptr) return false;
  if (!fiber.until.holds) return true;
  if (!fiber.until.holds()) return false;
  fiber.until.holds = nullptr;
  return true;
}

void run_block() {
  prepare_fibers();
  for (auto& warp : warps) warp.clear();
  for (Meeting& warpgroup : warpgroups) warpgroup.arrived = 0;
  block.arrived = 0;
  asynchronous::begin_block();
  std::memset(shared, POISON, emulated_kernel.shared_bytes);
  races::begin_block(blockIdx.x);
  std::vector<int> order(fibers.size());
  std::iota(order.begin(), order.end(), 0);
  if (schedule == Schedule::REVERSE) std::reverse(order.begin(), order.end());
  for (;;) {
    if (schedule == Schedule::RANDOM) std::shuffle(order.begin(), order.end(), randomness);
    bool ran = false;
    std::size_t ended = 0;
    for (int t : order) {
      ended += fibers[t].done;
      if (!can_run(fibers[t])) continue;
      ran = true;
      current = t;
      threadIdx.x = static_cast<unsigned int>(t);
      emulator_switch(&scheduler_stack, fibers[t].stack_pointer);
      if (failed) return;
    }
    if (ended == fibers.size()) return;
    if (schedule == Schedule::RANDOM && randomness() % 2 == 0) ran |= asynchronous::proceed();
    if (!ran && !asynchronous::proceed()) {
      const auto first = std::find_if(fibers.begin(), fibers.end(),
                                      [](const Fiber& f) { return !waits_at(f).empty(); });
      current = static_cast<int>(first - fibers.begin());
      fault_of("deadlock: %s", waiting().c_str());
      return;
    }
  }
}

void* map(std::size_t bytes) {
  void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) {
    std::perror("mmap");
    std::abort();
  }
  return place;
}

// A stack per thread, each above a page that must not be touched.
void allocate() {
  const unsigned int threads = emulated_kernel.threads;
  fibers.resize(threads);
  warps.resize((threads + WARP - 1) / WARP);
  warpgroups.assign(threads / WARPGROUP, Meeting{});
  for (unsigned int t = 0; t < threads / WARPGROUP * WARPGROUP; ++t) {
    warpgroups[t / WARPGROUP].members.push_back(static_cast<int>(t));
  }
  block.members.resize(threads);
  std::iota(block.members.begin(), block.members.end(), 0);
  stacks = static_cast<char*>(map(threads * STACK));
  for (unsigned int t = 0; t < threads; ++t) mprotect(stacks + t * STACK, PAGE, PROT_NONE);
#ifdef EMULATOR_HEAP
  // AddressSanitizer knows the ends of what malloc gave.
  void* made = nullptr;
  if (posix_memalign(&made, 1024, emulated_kernel.shared_bytes) != 0) std::abort();
  shared = static_cast<char*>(made);
#else
  shared = static_cast<char*>(map(2 * BESIDE + emulated_kernel.shared_bytes)) + BESIDE;
#endif
  races::Memory memory = {shared, emulated_kernel.shared_bytes, BESIDE, stacks, threads * STACK};
  races::begin_launch(memory, threads, emulated_kernel.grain);
}

// Many kernels stay loaded, and a process may have only so many pieces of memory.
void release() {
  races::end_launch();
  munmap(stacks, emulated_kernel.threads * STACK);
#ifdef EMULATOR_HEAP
  std::free(shared);
#else
  munmap(shared - BESIDE, 2 * BESIDE + emulated_kernel.shared_bytes);
#endif
}

// Where the lanes of `mask` in the running thread's warp wait for each other.
Meeting& warp_meeting(const char* what, Where where, unsigned int mask) {
  if (!(mask >> static_cast<unsigned int>(current) % WARP & 1)) {
    fault_of("calls %s with mask %#x, which lacks itself", text_of(what, where).c_str(), mask);
    stop();
  }
  Meeting& meeting = warps[current / WARP][mask];
  if (meeting.members.empty()) {
    const int first = current / static_cast<int>(WARP) * static_cast<int>(WARP);
    for (unsigned int l = 0; l < WARP; ++l) {
      if (mask >> l & 1) meeting.members.push_back(first + static_cast<int>(l));
    }
    if (meeting.members.back() >= static_cast<int>(fibers.size())) {
      fault_of("calls %s with mask %#x, but the block has %zu threads",
               text_of(what, where).c_str(), mask, fibers.size());
      stop();
    }
  }
  return meeting;
}

}  // namespace

namespace races {

int current_thread() { return current; }

void fault(long long place, const char* format, ...) {
  std::va_list rest;
  va_start(rest, format);
  describe(place, format, rest);
  va_end(rest);
  stop();
}

}  // namespace races

namespace turns {

int current() { return emulator::current; }

bool at_once() {
  return schedule == Schedule::RANDOM ? randomness() % 2 == 0 : schedule == Schedule::REVERSE;
}

std::size_t one_of(std::size_t count) {
  return schedule == Schedule::RANDOM ? randomness() % count : count - 1;
}

void wait_until(const char* what, Where where, const std::function<bool()>& holds) {
  fibers[emulator::current].until = {what, where, holds};
  leave();
}

void meet_warpgroup(const char* what, Where where, const std::function<void()>& compute) {
  const unsigned int own = static_cast<unsigned int>(emulator::current) / WARPGROUP;
  if (own >= warpgroups.size()) races::fault(0, "calls %s outside of whole warpgroups", what);
  if (!arrive(warpgroups[own], what, where)) return;
  compute();
  races::synchronise(warpgroups[own].members);
  complete(warpgroups[own]);
}

}  // namespace turns

void* shared_memory() { return shared; }

bool meet_block(const char* what, Where where, bool condition) {
  if (block.arrived == 0) block.any = false;
  block.any = block.any || condition;
  if (arrive(block, what, where)) {
    races::synchronise(block.members);
    for (Fiber& each : fibers) each.got = block.any;
    complete(block);
  }
  return fibers[current].got != 0;
}

unsigned long long meet_warp(const char* what, Where where, unsigned int mask, bool orders,
                             unsigned long long given, unsigned int source) {
  const int first = current / static_cast<int>(WARP) * static_cast<int>(WARP);
  Meeting& meeting = warp_meeting(what, where, mask);
  if (!(mask >> source & 1)) {
    fault_of("reads lane %u by %s, whose mask is %#x", source, text_of(what, where).c_str(), mask);
    stop();
  }
  fibers[current].given = given;
  fibers[current].source = source;
  if (arrive(meeting, what, where)) {
    for (int t : meeting.members) fibers[t].got = fibers[first + fibers[t].source].given;
    if (orders) races::synchronise(meeting.members);
    complete(meeting);
  }
  return fibers[current].got;
}

void meet_lanes(const char* what, Where where, void* brought, void (*compute)(void* const* all)) {
  const int first = current / static_cast<int>(WARP) * static_cast<int>(WARP);
  Meeting& meeting = warp_meeting(what, where, WHOLE_WARP);
  fibers[current].brought = brought;
  if (arrive(meeting, what, where)) {
    void* all[WARP];
    for (unsigned int l = 0; l < WARP; ++l) all[l] = fibers[first + static_cast<int>(l)].brought;
    compute(all);
    complete(meeting);
  }
}

unsigned int vote(const char* what, Where where, unsigned int mask, bool condition) {
  Meeting& meeting = warp_meeting(what, where, mask);
  fibers[current].given = condition;
  if (arrive(meeting, what, where)) {
    unsigned long long found = 0;
    for (int t : meeting.members) found |= fibers[t].given << static_cast<unsigned int>(t) % WARP;
    for (int t : meeting.members) fibers[t].got = found;
    complete(meeting);
  }
  return static_cast<unsigned int>(fibers[current].got);
}

void begin_copy(void* to, const void* from, unsigned int bytes, unsigned int wanted) {
  Fiber& me = fibers[current];
  races::begin_copy(to, from, bytes, wanted, __builtin_return_address(0));
  me.copies.push_back({static_cast<char*>(to), from, bytes, wanted, me.groups, false});
  if (turns::at_once()) me.copies.back().land();
}

void cp_async_commit() { ++fibers[current].groups; }

void cp_async_wait(unsigned int pending) {
  Fiber& me = fibers[current];
  const auto waited = [&](const Copy& copy) { return copy.group + pending < me.groups; };
  const auto rest = std::stable_partition(me.copies.begin(), me.copies.end(), waited);
  if (schedule == Schedule::RANDOM) std::shuffle(me.copies.begin(), rest, randomness);
  for (auto copy = me.copies.begin(); copy != rest; ++copy) {
    copy->land();
    races::finish_copy(copy->to, copy->bytes);
  }
  me.copies.erase(me.copies.begin(), rest);
}

void cp_async_wait_all() {
  cp_async_commit();
  cp_async_wait(0);
}

namespace {
struct LateWrite {
  void* to;
  std::vector<char> bytes;
};
std::vector<LateWrite> late_writes;
}  // namespace

void end_grids() {
  for (const LateWrite& write : late_writes) {
    std::memcpy(write.to, write.bytes.data(), write.bytes.size());
  }
  late_writes.clear();
}

}  // namespace emulator

// Runs every block; returns whether there was no fault.
EMULATOR_EXPORT bool emulator_launch(const void* given, long long blocks, int order_of_turns,
                                     unsigned long long seed, emulator::Report* to) {
  using namespace emulator;
  allocate();
  params = given;
  report = to;
  failed = false;
  randomness.seed(seed);
  schedule = static_cast<Schedule>(order_of_turns);
  std::vector<long long> order(static_cast<std::size_t>(blocks));
  std::iota(order.begin(), order.end(), 0LL);
  if (schedule == Schedule::REVERSE) std::reverse(order.begin(), order.end());
  if (schedule == Schedule::RANDOM) std::shuffle(order.begin(), order.end(), randomness);
  const unsigned int control = _mm_getcsr();
  if (emulated_kernel.flush_subnormals) _mm_setcsr(control | FLUSH);
  gridDim.x = static_cast<unsigned int>(blocks);
  for (long long number : order) {
    blockIdx.x = static_cast<unsigned int>(number);
    run_block();
    if (failed) break;
  }
  _mm_setcsr(control);
  release();
  return !failed;
}

// What the grid ahead of the next one writes late.
EMULATOR_EXPORT void emulator_write_late(void* to, const char* from, unsigned long long size) {
  emulator::late_writes.push_back({to, {from, from + size}});
}
