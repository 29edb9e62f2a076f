// Copies of boxes from shared memory to arrays, which a thread of compute capability 9.0 begins.
//
// A copy reads shared memory at once, or as late as it can: when its thread waits for it. What it
// reads has to be published then, and the same as when it was begun: what lies in the array;
// columns and rows of a box beyond that may be anything.
#include "boxes.h"
#include "races.h"
#include "turns.h"

#include <cstring>
#include <map>
#include <vector>

namespace emulator {
namespace {

using races::fault;
using turns::current;

struct Store {
  Map map;
  unsigned int from;
  int first[5];
  std::vector<char> bytes;  // as they were when it was begun
  bool committed;
};

std::map<int, std::vector<Store>> stores_of;  // a thread

char* shared_at(unsigned int address) { return static_cast<char*>(shared_memory()) + address; }

void read(const Store& store) {
  store.map.visit_box(store.first, [&](unsigned int place, unsigned long long to) {
    if (to && place % 16 == 0) races::read_published(shared_at(store.from) + place, 16);
  });
}

void land(const char* what, Where where, const Store& store) {
  read(store);
  store.map.visit_box(store.first, [&](unsigned int place, unsigned long long to) {
    if (!to) return;
    if (std::memcmp(&store.bytes[place], shared_at(store.from) + place, 2) != 0) {
      fault(0, "%s (%s:%d): what is copied from %u was written to meanwhile", what, where.file,
            where.line, store.from);
    }
    std::memcpy(reinterpret_cast<void*>(to), &store.bytes[place], 2);
  });
}

}  // namespace

void tma_store(const char* what, Where where, const unsigned long long* words, unsigned int from,
               const int (&first)[5]) {
  Store store = {{}, from, {}, {}, false};
  std::memcpy(&store.map, words, sizeof(store.map));
  std::memcpy(store.first, first, sizeof(store.first));
  if (from % 1024) {
    fault(0, "%s (%s:%d): eight rows do not begin at %u", what, where.file, where.line, from);
  }
  store.bytes.resize(store.map.rows * 128);
  read(store);
  std::memcpy(store.bytes.data(), shared_at(from), store.bytes.size());
  if (turns::at_once()) {
    land(what, where, store);
    store.bytes.clear();
  }
  stores_of[current()].push_back(std::move(store));
}

void tma_store_commit() {
  for (Store& store : stores_of[current()]) store.committed = true;
}

void tma_store_wait_read(const char* what, Where where) {
  std::vector<Store> left;
  for (Store& store : stores_of[current()]) {
    if (!store.committed) {
      left.push_back(std::move(store));
    } else if (!store.bytes.empty()) {
      land(what, where, store);
    }
  }
  stores_of[current()] = std::move(left);
}

namespace stores {

void begin_block() { stores_of.clear(); }

void check_end() {
  if (!stores_of[current()].empty()) fault(0, "ended before its copies had read shared memory");
}

}  // namespace stores
}  // namespace emulator
