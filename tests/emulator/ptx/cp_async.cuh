// The twin of kernels_cu/ptx/cp_async.cuh in C++: copies land at once, or when they are waited for.
#pragma once

namespace ptx {

struct alignas(16) Bytes16 {
  unsigned int x[4];
};

inline void cp_async(void* to_smem, const void* from_gmem, bool wanted) {
  emulator::begin_copy(to_smem, from_gmem, 16, wanted ? 16 : 0);
}

inline void cp_async_partial(unsigned int address, const void* from_gmem, int bytes) {
  void* const to = static_cast<char*>(emulator::shared_memory()) + address;
  emulator::begin_copy(to, from_gmem, 16, static_cast<unsigned int>(bytes));
}

inline void cp_async_once(unsigned int address, const void* from_gmem, int bytes) {
  cp_async_partial(address, from_gmem, bytes);
}

inline void store(void* to_gmem, const Bytes16& bytes) {
  if (reinterpret_cast<unsigned long long>(to_gmem) % 16 != 0) __builtin_trap();
  *static_cast<Bytes16*>(to_gmem) = bytes;
}

inline void cp_async_commit() { emulator::cp_async_commit(); }

template <int PENDING>
inline void cp_async_wait() {
  emulator::cp_async_wait(PENDING);
}

inline void cp_async_wait_all() { emulator::cp_async_wait_all(); }

}  // namespace ptx
