// The twin of kernels_cu/ptx/barrier.cuh in C++.
#pragma once

namespace ptx {

inline void mbarrier_init(unsigned int barrier, int arrivals, EMULATOR_WHERE) {
  emulator::mbarrier_init("mbarrier_init", {file, line}, barrier, arrivals);
}

inline void mbarrier_inval(unsigned int barrier, EMULATOR_WHERE) {
  emulator::mbarrier_inval("mbarrier_inval", {file, line}, barrier);
}

inline void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }

inline void mbarrier_arrive(unsigned int barrier, EMULATOR_WHERE) {
  emulator::arrive("mbarrier_arrive", {file, line}, barrier, 0);
}

inline void mbarrier_arrive_expect_tx(unsigned int barrier, int bytes, EMULATOR_WHERE) {
  emulator::arrive("mbarrier_arrive_expect_tx", {file, line}, barrier, bytes);
}

// Waits until the answer is yes.
inline bool mbarrier_try_wait(unsigned int barrier, int parity, EMULATOR_WHERE) {
  emulator::wait_phase("mbarrier_try_wait", {file, line}, barrier, parity);
  return true;
}

inline void named_barrier_sync(int number, int threads, EMULATOR_WHERE) {
  emulator::named_barrier_sync("named_barrier_sync", {file, line}, number, threads, true);
}

inline bool named_barrier_or(int number, int threads, bool condition, EMULATOR_WHERE) {
  return emulator::named_barrier_or("named_barrier_or", {file, line}, number, threads, condition);
}

inline void named_barrier_arrive(int number, int threads, EMULATOR_WHERE) {
  emulator::named_barrier_sync("named_barrier_arrive", {file, line}, number, threads, false);
}

inline void fence_proxy_async() { emulator::fence_proxy_async(); }

}  // namespace ptx
