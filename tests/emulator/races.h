// Which accesses to memory kernels make, and whether barriers order them.
#pragma once

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

void begin_launch(const Memory& memory, unsigned int threads);
void begin_block(long long number);

// What these threads did before comes before what they do from now on.
void synchronise(const std::vector<int>& threads);

// A copy by the running thread: from its beginning to its end nobody may touch where it writes.
void begin_copy(void* to, const void* from, std::size_t bytes, std::size_t wanted,
                const void* caller);
void finish_copy(void* to, std::size_t bytes);

// Given by runtime.cpp.
int current_thread();
[[noreturn]] void fault(long long place, const char* format, ...);

}  // namespace emulator::races
