// The twin of kernels_cu/ptx/tensor_copy.cuh in C++.
#pragma once

namespace ptx {

// As emulator/calls.py writes it.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

inline void begin_box_copy(unsigned int to, const TensorMap& map, unsigned int barrier, int c0,
                           int c1, int c2, int c3, int c4, EMULATOR_WHERE) {
  const int first[5] = {c0, c1, c2, c3, c4};
  emulator::begin_box_copy("begin_box_copy", {file, line}, to, map.words, barrier, first);
}

inline void begin_box_store(const TensorMap& map, unsigned int from, int c0, int c1, int c2, int c3,
                            int c4, EMULATOR_WHERE) {
  const int first[5] = {c0, c1, c2, c3, c4};
  emulator::begin_box_store("begin_box_store", {file, line}, map.words, from, first);
}

inline void commit_stores() { emulator::commit_stores(); }

inline void wait_stores_read(EMULATOR_WHERE) {
  emulator::wait_stores_read("wait_stores_read", {file, line});
}

}  // namespace ptx
