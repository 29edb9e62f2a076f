// What runtime.cpp gives to and asks of warpgroups.cpp: threads that wait for what happens by
// itself.
#pragma once
#include "runtime.h"

#include <cstddef>
#include <functional>

namespace emulator {

constexpr unsigned int WARPGROUP = 128;

namespace turns {

// What a thread waits for: it goes on when that holds.
struct Condition {
  const char* what = nullptr;
  Where where = {};
  std::function<bool()> holds;
};

int current();  // the thread that runs

// The schedule's choice: whether what a thread begins is done at once, and which of several is
// next: the last one begun, or any.
bool at_once();
std::size_t one_of(std::size_t count);

void wait_until(const char* what, Where where, const std::function<bool()>& holds);

// Waits until the whole warpgroup is here; the thread that comes last computes. It orders accesses.
void meet_warpgroup(const char* what, Where where, const std::function<void()>& compute);

}  // namespace turns

// Copies of boxes to arrays: stores.cpp.
namespace stores {

void begin_block();
void check_end();  // the running thread ends

}  // namespace stores

// What happens between two turns.
namespace asynchronous {

void begin_block();
bool proceed();    // lets one copy land; false where none is on its way
void check_end();  // the running thread ends

}  // namespace asynchronous
}  // namespace emulator
