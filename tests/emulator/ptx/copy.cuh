// The twin of kernels_cu/ptx/copy.cuh in C++: copies land at once, or when they are waited for.
#pragma once

namespace ptx {

struct alignas(16) Bytes16 {
  unsigned int x[4];
};

inline void begin_copy(void* to_smem, const void* from_gmem, bool wanted) {
  emulator::begin_copy(to_smem, from_gmem, 16, wanted ? 16 : 0);
}

inline void begin_part_copy(unsigned int address, const void* from_gmem, int bytes) {
  void* const to = static_cast<char*>(emulator::shared_memory()) + address;
  emulator::begin_copy(to, from_gmem, 16, static_cast<unsigned int>(bytes));
}

inline void store(void* to_gmem, const Bytes16& bytes) {
  if (reinterpret_cast<unsigned long long>(to_gmem) % 16 != 0) __builtin_trap();
  *static_cast<Bytes16*>(to_gmem) = bytes;
}

inline void commit_copies() { emulator::commit_copies(); }

template <int PENDING>
inline void wait_copies() {
  emulator::wait_copies(PENDING);
}

inline void finish_copies() { emulator::finish_copies(); }

}  // namespace ptx
