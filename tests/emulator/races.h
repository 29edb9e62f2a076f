// Which accesses to memory kernels make, and whether barriers order them.
#pragma once

#include "clocks.h"

#include <cstddef>
#include <vector>

namespace emulator::races {

struct Memory {
  char* shared;
  std::size_t shared_bytes;
  std::size_t beside;  // bytes on either side of it that belong to nobody
  char* stacks;
  std::size_t stack_bytes;
};

// `grain` bytes of global memory are checked as one: no thread of the kernel writes fewer.
void begin_launch(const Memory& memory, unsigned int threads, unsigned int grain);
void end_launch();  // keeps no memory: many kernels stay loaded
void begin_block(long long number);

// What these threads did before comes before what they do from now on.
void synchronise(const std::vector<int>& threads);

// A copy by the running thread: from its beginning to its end nobody may touch where it writes.
void begin_copy(void* to, const void* from, std::size_t bytes, std::size_t wanted,
                const void* caller);
void finish_copy(void* to, std::size_t bytes);

// What a thread knows when it lets others go on, and they when they do.
void release(Clocks& to);
void acquire(const Clocks& from);

// The running thread fences, or swaps what lies in a place of global memory.
void fence();
void swap(const void* place, bool writes, const void* caller);

// An access of the running thread to shared memory that no instruction of its own makes.
void access(const void* place, std::size_t bytes, bool writes);

// Matrix instructions of a warpgroup and copies to arrays see what was published since it was
// written, and copies.
void publish();
void read_published(const void* place, std::size_t bytes);

// A copy that others wait for: it comes after what the running thread knows, which is returned.
Clocks begin_transfer(void* to, std::size_t bytes);
void finish_transfer(void* to, std::size_t bytes, const Clocks& begun);

// Given by runtime.cpp.
int current_thread();
[[noreturn]] void fault(long long place, const char* format, ...);

}  // namespace emulator::races
