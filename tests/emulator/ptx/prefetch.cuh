// The twin of kernels_cu/ptx/prefetch.cuh in C++.
#pragma once

namespace ptx {

inline void prefetch_once(const void*, int) {}
inline void prefetch_map(const void*) {}

}  // namespace ptx
