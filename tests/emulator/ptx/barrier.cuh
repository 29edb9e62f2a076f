// The twin of kernels_cu/ptx/barrier.cuh in C++.
#pragma once

namespace ptx {

inline void init_barrier(unsigned int barrier, int arrivals, EMULATOR_WHERE) {
  emulator::init_barrier("init_barrier", {file, line}, barrier, arrivals);
}

inline void publish_barriers() { emulator::publish_barriers(); }

inline void arrive(unsigned int barrier, EMULATOR_WHERE) {
  emulator::arrive("arrive", {file, line}, barrier, 0);
}

inline void arrive_expecting(unsigned int barrier, int bytes, EMULATOR_WHERE) {
  emulator::arrive("arrive_expecting", {file, line}, barrier, bytes);
}

// Waits until the answer is yes.
inline bool try_wait(unsigned int barrier, int parity, EMULATOR_WHERE) {
  emulator::wait_phase("try_wait", {file, line}, barrier, parity);
  return true;
}

inline void meet_at(int number, int threads, EMULATOR_WHERE) {
  emulator::meet_at("meet_at", {file, line}, number, threads, true);
}

inline bool any_at(int number, int threads, bool condition, EMULATOR_WHERE) {
  return emulator::any_at("any_at", {file, line}, number, threads, condition);
}

inline void arrive_at(int number, int threads, EMULATOR_WHERE) {
  emulator::meet_at("arrive_at", {file, line}, number, threads, false);
}

inline void publish_shared() { emulator::publish_shared(); }

}  // namespace ptx
