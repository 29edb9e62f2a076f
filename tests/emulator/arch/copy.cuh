// The twin of kernels_cu/arch/copy.cuh in C++: copies land at once, or when they are waited for.
#pragma once

namespace arch {

inline void begin_copy(void* to_smem, const void* from_gmem, bool wanted) {
  emulator::begin_copy(to_smem, wanted ? from_gmem : nullptr, 16);
}

inline void finish_copies() { emulator::finish_copies(); }

}  // namespace arch
