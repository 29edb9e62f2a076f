// Which accesses to memory kernels make, and whether barriers order them.
//
// g++ -fsanitize=thread calls a function of ThreadSanitizer's before every access; here are those
// functions. Every thread has a clock that counts its meetings, and knows of every other thread
// which of its steps came before its own (a vector clock, as in FastTrack: Flanagan & Freund 2009).
// Two accesses to one place by different threads, one of them a write, must be ordered by that.
//
// Of global memory only what a launch writes is remembered, and who has read that. Accesses to it
// by threads of other blocks are ordered by fences and swaps, as the memory model of PTX has it: a
// fence orders what its thread knows before the swaps behind it; a swap reads what was known to
// those before it in the same place; a fence behind that makes it known.
#include "races.h"

#include "runtime.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <unordered_map>

namespace emulator::races {
namespace {

using Address = std::uintptr_t;

constexpr std::size_t GRAIN = 2;        // bytes of shared memory that are checked as one
constexpr Clock IN_FLIGHT = ~Clock(0);  // of a write by a copy that is not finished

struct Step {
  Clock clock = 0;
  int thread = 0;
  long long block = 0;
};

struct Write : Step {
  bool copied = false;   // by a copy that others wait for
  bool swapped = false;  // by compare_and_swap
};

Memory place;
std::size_t threads;
Clock base;                  // no step of the running block is older
std::vector<Clock> known;    // [thread, other]: the other's last step that comes before
std::vector<Write> written;  // per grain of shared memory
Clock* was_read;             // [grain, thread], of zeros; most of its pages are never touched
std::unordered_map<Address, Write> global;
std::unordered_map<Address, std::vector<Step>> readers;  // of what is in `global`, since
std::unordered_map<Address, Blocks> swaps;               // what those told who swapped a place
std::vector<Exchange> exchanges;                         // of each thread
bool exchanging;                                         // whether any of the block knows anything
Address global_low, global_high;
std::size_t global_grain;  // bytes of global memory that are checked as one
long long block_number;
std::vector<Clock> published;  // of each thread, its last step that matrix instructions see

Clock& knows(int thread, std::size_t other) {
  return known[static_cast<std::size_t>(thread) * threads + other];
}

// Where an instruction lies in the library, so that its line can be looked up.
long long offset_of(const void* instruction) {
  Dl_info info;
  if (!dladdr(instruction, &info)) return 0;
  return static_cast<const char*>(instruction) - static_cast<const char*>(info.dli_fbase) - 1;
}

bool is_before(const Step& step, int thread) {
  return step.clock <= knows(thread, static_cast<std::size_t>(step.thread));
}

void not_before(const Write& write, const char* does, std::size_t grain, const void* caller) {
  fault(offset_of(caller), "%s byte %zu of shared memory, which %sthread %d %s", does,
        grain * GRAIN, write.clock == IN_FLIGHT ? "a copy of " : "", write.thread,
        write.clock == IN_FLIGHT ? "has not finished" : "has written with no barrier since");
}

void read_shared(std::size_t first, std::size_t last, int me, const void* caller) {
  for (std::size_t grain = first; grain <= last; ++grain) {
    const Write& write = written[grain];
    if (write.clock <= base) {
      fault(offset_of(caller), "reads byte %zu of shared memory, which no thread has written",
            grain * GRAIN);
    }
    if (!is_before(write, me)) not_before(write, "reads", grain, caller);
    was_read[grain * threads + static_cast<std::size_t>(me)] = knows(me, me);
  }
}

void write_shared(std::size_t first, std::size_t last, int me, const void* caller) {
  for (std::size_t grain = first; grain <= last; ++grain) {
    Write& write = written[grain];
    if (!is_before(write, me)) not_before(write, "writes", grain, caller);
    const Clock* reads = &was_read[grain * threads];
    const Clock* mine = &knows(me, 0);
    bool ordered = true;
    for (std::size_t t = 0; t < threads; ++t) ordered &= reads[t] <= mine[t];
    if (!ordered) {
      std::size_t t = 0;
      while (reads[t] <= mine[t]) ++t;
      fault(offset_of(caller),
            "writes byte %zu of shared memory, which thread %zu has read with no barrier since",
            grain * GRAIN, t);
    }
    write = Write{{knows(me, me), me, block_number}};
  }
}

// The same of a step of any block.
bool is_known(const Step& step, int thread) {
  if (step.block == block_number) return is_before(step, thread);
  const Steps* const before = exchanges[static_cast<std::size_t>(thread)].before.of(step.block);
  return before != nullptr && step.clock <= (*before)[static_cast<std::size_t>(step.thread)];
}

void not_known(const Step& step, const char* does, const char* did, const void* caller) {
  fault(offset_of(caller), "%s global memory that thread %d of block %lld has %s with no %s since",
        does, step.thread, step.block, did,
        step.block == block_number ? "barrier" : "fence_device, compare_and_swap and fence_device");
}

void add_reader(Address at, int me) {
  std::vector<Step>& steps = readers[at];
  const auto is_over = [me](const Step& step) { return is_known(step, me); };
  steps.erase(std::remove_if(steps.begin(), steps.end(), is_over), steps.end());
  steps.push_back({knows(me, me), me, block_number});
}

void check_readers(Address at, int me, const char* does, const void* caller) {
  const auto found = readers.find(at);
  if (found == readers.end()) return;
  for (const Step& step : found->second) {
    if (!is_known(step, me)) not_known(step, does, "read", caller);
  }
  readers.erase(found);
}

void touch_global(Address from, std::size_t bytes, bool writes, int me, const void* caller) {
  const char* const does = writes ? "writes" : "reads";
  const Step now = {knows(me, me), me, block_number};
  const std::size_t grain = global_grain;
  for (Address at = from / grain; at <= (from + bytes - 1) / grain; ++at) {
    const auto found = global.find(at);
    if (found != global.end()) {
      const Write& write = found->second;
      if (write.swapped) {
        fault(
            offset_of(caller),
            "%s global memory that thread %d of block %lld has swapped: only compare_and_swap may "
            "touch it in this launch",
            does, write.thread, write.block);
      }
      if (!is_known(write, me)) not_known(write, does, "written", caller);
      // Whoever knows a thread's write knows what the thread did in the same step.
      const bool at_once =
          write.clock == now.clock && write.thread == me && write.block == block_number;
      if (!writes && !at_once) add_reader(at, me);
    }
    if (writes) {
      if (!readers.empty()) check_readers(at, me, does, caller);
      global[at] = Write{now};
    }
  }
  if (writes) {
    global_low = std::min(global_low, from);
    global_high = std::max(global_high, from + bytes);
  }
}

void touch_swapped(Address from, int me, const void* caller) {
  if (from % 8) fault(offset_of(caller), "swaps 8 bytes where no such number begins");
  if (from - (reinterpret_cast<Address>(place.shared) - place.beside) <
      place.shared_bytes + 2 * place.beside) {
    fault(offset_of(caller), "swaps shared memory: compare_and_swap is for global memory");
  }
  for (Address at = from / global_grain; at < (from + 8) / global_grain; ++at) {
    Write& write = global[at];
    if (write.clock != 0 && !write.swapped && !is_known(write, me)) {
      not_known(write, "swaps", "written", caller);
    }
    check_readers(at, me, "swaps", caller);
    write = Write{{knows(me, me), me, block_number}, false, true};
  }
  global_low = std::min(global_low, from);
  global_high = std::max(global_high, from + 8);
}

void touch(const void* pointer, std::size_t bytes, bool writes, const void* caller) {
  const Address from = reinterpret_cast<Address>(pointer);
  const Address shared = reinterpret_cast<Address>(place.shared);
  const Address offset = from - shared;
  if (offset + place.beside < place.shared_bytes + 2 * place.beside) {
    if (offset >= place.shared_bytes || offset + bytes > place.shared_bytes) {
      fault(offset_of(caller), "%s %zu bytes at byte %lld of %zu of shared memory",
            writes ? "writes" : "reads", bytes, static_cast<long long>(offset), place.shared_bytes);
    }
    const std::size_t first = offset / GRAIN, last = (offset + bytes - 1) / GRAIN;
    (writes ? write_shared : read_shared)(first, last, current_thread(), caller);
    return;
  }
  if (from - reinterpret_cast<Address>(place.stacks) < place.stack_bytes) return;
  if (writes || (from < global_high && from + bytes > global_low)) {
    touch_global(from, bytes, writes, current_thread(), caller);
  }
}

}  // namespace

void begin_launch(const Memory& memory, unsigned int count, unsigned int grain) {
  global_grain = grain;
  place = memory;
  threads = count;
  known.assign(threads * threads, 0);
  written.assign(memory.shared_bytes / GRAIN + 1, Write{});
  was_read = static_cast<Clock*>(std::calloc(written.size() * threads, sizeof(Clock)));
  if (was_read == nullptr) std::abort();
  published.assign(threads, 0);
  exchanges.assign(threads, Exchange{});
  exchanging = false;
  global_low = ~Address(0);
  global_high = 0;
}

void end_launch() {
  std::free(was_read);
  global.clear();
  readers.clear();
  swaps.clear();
}

// Clocks only grow, so that what earlier blocks did comes before and nothing has to be cleared.
void begin_block(long long number) {
  block_number = number;
  base = *std::max_element(known.begin(), known.end());
  std::fill(known.begin(), known.end(), base);
  for (std::size_t t = 0; t < threads; ++t) knows(static_cast<int>(t), t) = base + 1;
  if (exchanging) exchanges.assign(threads, Exchange{});
  exchanging = false;
}

void begin_copy(void* to, const void* from, std::size_t bytes, std::size_t wanted,
                const void* caller) {
  for (const void* each : {static_cast<const void*>(to), from}) {
    if ((each == to || wanted) && reinterpret_cast<std::size_t>(each) % bytes != 0) {
      fault(offset_of(caller), "copies %zu bytes where no vector begins", bytes);
    }
  }
  if (wanted) touch(from, wanted, false, caller);
  touch(to, bytes, true, caller);
  const std::size_t first = (static_cast<char*>(to) - place.shared) / GRAIN;
  for (std::size_t grain = first; grain < first + bytes / GRAIN; ++grain) {
    written[grain].clock = IN_FLIGHT;
  }
}

void finish_copy(void* to, std::size_t bytes) {
  const std::size_t first = (static_cast<char*>(to) - place.shared) / GRAIN;
  for (std::size_t grain = first; grain < first + bytes / GRAIN; ++grain) {
    written[grain].clock =
        knows(written[grain].thread, static_cast<std::size_t>(written[grain].thread));
  }
}

void synchronise(const std::vector<int>& members) {
  std::vector<Clock> latest(threads, 0);
  for (int member : members) {
    for (std::size_t t = 0; t < threads; ++t) latest[t] = std::max(latest[t], knows(member, t));
  }
  for (int member : members) {
    std::copy(latest.begin(), latest.end(), &knows(member, 0));
    ++knows(member, static_cast<std::size_t>(member));
  }
  if (!exchanging) return;
  Exchange all;
  for (int member : members) all.join(exchanges[static_cast<std::size_t>(member)]);
  for (int member : members) exchanges[static_cast<std::size_t>(member)] = all;
}

void release(Clocks& to) {
  const int me = current_thread();
  to.steps.resize(threads, 0);
  for (std::size_t t = 0; t < threads; ++t) to.steps[t] = std::max(to.steps[t], knows(me, t));
  ++knows(me, static_cast<std::size_t>(me));
  if (exchanging) to.exchange.join(exchanges[static_cast<std::size_t>(me)]);
}

void acquire(const Clocks& from) {
  const int me = current_thread();
  const Steps& steps = from.steps;
  for (std::size_t t = 0; t < steps.size(); ++t) knows(me, t) = std::max(knows(me, t), steps[t]);
  if (exchanging) exchanges[static_cast<std::size_t>(me)].join(from.exchange);
}

void fence() {
  const int me = current_thread();
  Exchange& exchange = exchanges[static_cast<std::size_t>(me)];
  Clock* const mine = &knows(me, 0);
  if (const Steps* const own = exchange.swapped.of(block_number)) {
    for (std::size_t t = 0; t < threads; ++t) mine[t] = std::max(mine[t], (*own)[t]);
  }
  exchange.before.join(exchange.swapped);
  exchange.fenced.assign(mine, mine + threads);
  exchange.fenced_before = exchange.before;
  ++knows(me, static_cast<std::size_t>(me));
  exchanging = true;
}

void swap(const void* at, bool writes, const void* caller) {
  const Address place = reinterpret_cast<Address>(at);
  const int me = current_thread();
  touch_swapped(place, me, caller);
  Exchange& exchange = exchanges[static_cast<std::size_t>(me)];
  Blocks& told = swaps[place];
  exchange.swapped.join(told);
  if (writes && !exchange.fenced.empty()) {
    told.join(exchange.fenced_before);
    told.join(block_number, exchange.fenced);
  }
  exchanging = true;
}

void access(const void* at, std::size_t bytes, bool writes) {
  touch(at, bytes, writes, __builtin_return_address(0));
}

void publish() {
  const auto me = static_cast<std::size_t>(current_thread());
  published[me] = knows(current_thread(), me)++;
}

void read_published(const void* at, std::size_t bytes) {
  touch(at, bytes, false, __builtin_return_address(0));
  const std::size_t first = (static_cast<const char*>(at) - place.shared) / GRAIN;
  for (std::size_t grain = first; grain < first + bytes / GRAIN; ++grain) {
    const Write& write = written[grain];
    if (!write.copied && write.clock > published[static_cast<std::size_t>(write.thread)]) {
      fault(0, "reads byte %zu of shared memory, which thread %d has not published", grain * GRAIN,
            write.thread);
    }
  }
}

Clocks begin_transfer(void* to, std::size_t bytes) {
  const std::size_t first = (static_cast<char*>(to) - place.shared) / GRAIN;
  for (std::size_t grain = first; grain < first + bytes / GRAIN; ++grain) {
    const Write& write = written[grain];
    if (!write.copied && write.clock > base &&
        write.clock > published[static_cast<std::size_t>(write.thread)]) {
      fault(0, "copies to byte %zu of shared memory, which thread %d has not published",
            grain * GRAIN, write.thread);
    }
  }
  touch(to, bytes, true, __builtin_return_address(0));
  for (std::size_t grain = first; grain < first + bytes / GRAIN; ++grain) {
    written[grain].clock = IN_FLIGHT;
    written[grain].copied = true;
  }
  Clocks begun;
  release(begun);
  return begun;
}

void finish_transfer(void* to, std::size_t bytes, const Clocks& begun) {
  const std::size_t first = (static_cast<char*>(to) - place.shared) / GRAIN;
  for (std::size_t grain = first; grain < first + bytes / GRAIN; ++grain) {
    written[grain].clock = begun.steps[static_cast<std::size_t>(written[grain].thread)];
  }
}

}  // namespace emulator::races

namespace emulator {

unsigned long long add_at_once(unsigned long long* place, unsigned long long value) {
  const unsigned long long before = *place;
  *place += value;
  return before;
}

void add_at_once(float* place, float value) { *place += value; }

void add_at_once(double* place, double value) { *place += value; }

void raise_at_once(unsigned int* place, unsigned int value) {
  if (*place < value) *place = value;
}

void fence_device() { races::fence(); }

unsigned long long compare_and_swap(unsigned long long* place, unsigned long long expected,
                                    unsigned long long desired) {
  const unsigned long long before = *place;
  races::swap(place, before == expected, __builtin_return_address(0));
  if (before == expected) *place = desired;
  return before;
}

}  // namespace emulator

using emulator::races::touch;

#define ACCESSES(BYTES)                                                                       \
  void __tsan_read##BYTES(void* at) { touch(at, BYTES, false, __builtin_return_address(0)); } \
  void __tsan_write##BYTES(void* at) { touch(at, BYTES, true, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##BYTES(void* at) {                                               \
    touch(at, BYTES, false, __builtin_return_address(0));                                     \
  }                                                                                           \
  void __tsan_unaligned_write##BYTES(void* at) {                                              \
    touch(at, BYTES, true, __builtin_return_address(0));                                      \
  }

extern "C" {
void __tsan_init() {}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* at, std::size_t bytes) {
  touch(at, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* at, std::size_t bytes) {
  touch(at, bytes, true, __builtin_return_address(0));
}
}
