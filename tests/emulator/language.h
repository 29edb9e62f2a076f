// What CUDA's compiler knows by itself, for g++: put before the text of a kernel. Only what kernels
// use is here; whatever else they come to use does not compile until it is written.
#pragma once
#include "runtime.h"

// __shared__ is missing on purpose: build.py replaces the one declaration that kernels have.
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

// Where the caller of a function stands; the last parameter of each that waits.
#define EMULATOR_WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_WHERE) {
  emulator::meet_block("__syncthreads", {file, line}, false);
}

inline int __syncthreads_or(int condition, EMULATOR_WHERE) {
  return emulator::meet_block("__syncthreads_or", {file, line}, condition != 0);
}

inline void __syncwarp(unsigned int mask = emulator::WHOLE_WARP, EMULATOR_WHERE) {
  emulator::meet_warp("__syncwarp", {file, line}, mask, true, 0, threadIdx.x % emulator::WARP);
}

namespace emulator {

template <typename To, typename From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a type as wide");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Shuffles order no accesses to memory.
template <typename T>
T shuffle(const char* what, Where where, unsigned int mask, T value, unsigned int source) {
  unsigned long long bits = 0;
  static_assert(sizeof(T) <= sizeof(bits), "shuffles move at most 8 bytes");
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = meet_warp(what, where, mask, false, bits, source);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned int mask, T value, int lane, EMULATOR_WHERE) {
  const unsigned int source = static_cast<unsigned int>(lane) % emulator::WARP;
  return emulator::shuffle("__shfl_sync", {file, line}, mask, value, source);
}

template <typename T>
T __shfl_xor_sync(unsigned int mask, T value, int lanes, EMULATOR_WHERE) {
  const unsigned int source = (threadIdx.x ^ static_cast<unsigned int>(lanes)) % emulator::WARP;
  return emulator::shuffle("__shfl_xor_sync", {file, line}, mask, value, source);
}

inline unsigned int __ballot_sync(unsigned int mask, int condition, EMULATOR_WHERE) {
  return emulator::vote("__ballot_sync", {file, line}, mask, condition != 0);
}

inline int __any_sync(unsigned int mask, int condition, EMULATOR_WHERE) {
  return emulator::vote("__any_sync", {file, line}, mask, condition != 0) != 0;
}

inline int __all_sync(unsigned int mask, int condition, EMULATOR_WHERE) {
  return emulator::vote("__all_sync", {file, line}, mask, condition != 0) == mask;
}

inline unsigned long long atomicAdd(unsigned long long* place, unsigned long long value) {
  return emulator::add_at_once(place, value);
}

// -- numbers --------------------------------------------------------------------------------------

inline unsigned int __float_as_uint(float x) { return emulator::same_bits<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return emulator::same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator::same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator::same_bits<double>(x); }

// Rounds toward zero: a float one step nearer to zero where the nearest one lies beyond x.
inline float __double2float_rz(double x) {
  const float nearest = static_cast<float>(x);
  const bool beyond = __builtin_fabs(static_cast<double>(nearest)) > __builtin_fabs(x);
  return beyond ? __uint_as_float(__float_as_uint(nearest) - 1u) : nearest;
}

// Kernels are compiled without contraction, so every product is rounded.
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __ddiv_rn(double x, double y) { return x / y; }

inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(x)); }
inline int __popc(unsigned int x) { return __builtin_popcount(x); }

inline long long __mul64hi(long long x, long long y) {
  return static_cast<long long>((static_cast<__int128>(x) * y) >> 64);
}

extern "C" {
double exp(double) noexcept;
double log(double) noexcept;
double tanh(double) noexcept;
double exp2(double) noexcept;
double erf(double) noexcept;
double sqrt(double) noexcept;
double sin(double) noexcept;
double cos(double) noexcept;
double pow(double, double) noexcept;
double floor(double) noexcept;
double fabs(double) noexcept;
double fmax(double, double) noexcept;
double fmin(double, double) noexcept;
double fma(double, double, double) noexcept;
}
inline float exp(float x) { return __builtin_expf(x); }
inline float log(float x) { return __builtin_logf(x); }
inline float tanh(float x) { return __builtin_tanhf(x); }
inline float exp2(float x) { return __builtin_exp2f(x); }
inline float erf(float x) { return __builtin_erff(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float sin(float x) { return __builtin_sinf(x); }
inline float cos(float x) { return __builtin_cosf(x); }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float floor(float x) { return __builtin_floorf(x); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float copysign(float x, float y) { return __builtin_copysignf(x, y); }
inline float fmax(float x, float y) { return __builtin_fmaxf(x, y); }
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float fmin(float x, float y) { return __builtin_fminf(x, y); }

// -- the kernel, as the runtime takes it ----------------------------------------------------------

namespace emulator {

template <auto KERNEL>
struct Entry;

template <typename T>
T copied(const char* from) {
  T to;
  __builtin_memcpy(&to, from, sizeof(T));
  return to;
}

// Behind its parameters a kernel may take maps of arrays.
template <typename Params, typename... Maps, void (*KERNEL)(Params, Maps...)>
struct Entry<KERNEL> {
  static constexpr unsigned int SIZE = sizeof(Params) + (0 + ... + sizeof(Maps));
  static void run(const void* params) {
    const char* next = static_cast<const char*>(params) + sizeof(Params);
    const auto map = [&](unsigned int bytes) { return (next += bytes) - bytes; };
    // In braces what is given is evaluated in the order of the text.
    Entry{*static_cast<const Params*>(params), copied<Maps>(map(sizeof(Maps)))...};
  }
  Entry(const Params& params, const Maps&... maps) { KERNEL(params, maps...); }
};

}  // namespace emulator
