// What comes before what: vector clocks of a block's threads, and what they know of other blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace emulator::races {

using Clock = std::uint32_t;

// Of each thread of a block the last of its steps that come before.
using Steps = std::vector<Clock>;

inline void join(Steps& to, const Steps& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  for (std::size_t t = 0; t < from.size(); ++t) to[t] = std::max(to[t], from[t]);
}

// The same of several blocks, by their numbers. Many threads share what they know.
class Blocks {
 public:
  const Steps* of(long long block) const {
    if (steps_ == nullptr) return nullptr;
    const auto found = steps_->find(block);
    return found == steps_->end() ? nullptr : &found->second;
  }

  void join(long long block, const Steps& steps) { races::join(own()[block], steps); }

  void join(const Blocks& other) {
    if (other.steps_ == nullptr || steps_ == other.steps_) return;
    if (steps_ == nullptr) {
      steps_ = other.steps_;
      return;
    }
    std::map<long long, Steps>& mine = own();
    for (const auto& each : *other.steps_) races::join(mine[each.first], each.second);
  }

 private:
  std::map<long long, Steps>& own() {
    if (steps_ == nullptr) {
      steps_ = std::make_shared<std::map<long long, Steps>>();
    } else if (steps_.use_count() > 1) {
      steps_ = std::make_shared<std::map<long long, Steps>>(*steps_);
    }
    return *steps_;
  }

  std::shared_ptr<std::map<long long, Steps>> steps_;
};

// What a thread knows of other blocks, and what they learn from it.
struct Exchange {
  Blocks before;         // what comes before
  Blocks swapped;        // what its swaps have read: a fence makes it come before
  Steps fenced;          // what comes before a fence of its own block: its swaps pass that on,
  Blocks fenced_before;  // and of other blocks

  void join(const Exchange& other) {
    before.join(other.before);
    swapped.join(other.swapped);
    races::join(fenced, other.fenced);
    fenced_before.join(other.fenced_before);
  }
};

// What a thread knew when it let others go on, and they when they did.
struct Clocks {
  Steps steps;
  Exchange exchange;

  void join(const Clocks& other) {
    races::join(steps, other.steps);
    exchange.join(other.exchange);
  }
};

}  // namespace emulator::races
