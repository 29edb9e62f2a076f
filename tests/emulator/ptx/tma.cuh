// The twin of kernels_cu/ptx/tma.cuh in C++.
#pragma once

namespace ptx {

// As emulator/calls.py writes it.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

inline void tma_load(unsigned int to, const TensorMap& map, unsigned int barrier, int c0, int c1,
                     int c2, int c3, int c4, EMULATOR_WHERE) {
  const int first[5] = {c0, c1, c2, c3, c4};
  emulator::tma_load("tma_load", {file, line}, to, map.words, barrier, first);
}

inline void tma_load_once(unsigned int to, const TensorMap& map, unsigned int barrier, int c0,
                          int c1, int c2, int c3, int c4, EMULATOR_WHERE) {
  const int first[5] = {c0, c1, c2, c3, c4};
  emulator::tma_load("tma_load_once", {file, line}, to, map.words, barrier, first);
}

inline void tma_store(const TensorMap& map, unsigned int from, int c0, int c1, int c2, int c3,
                      int c4, EMULATOR_WHERE) {
  const int first[5] = {c0, c1, c2, c3, c4};
  emulator::tma_store("tma_store", {file, line}, map.words, from, first);
}

inline void tma_store_commit() { emulator::tma_store_commit(); }

inline void tma_store_wait_read(EMULATOR_WHERE) {
  emulator::tma_store_wait_read("tma_store_wait_read", {file, line});
}

}  // namespace ptx
