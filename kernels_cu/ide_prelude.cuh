// What an editor needs to read these files; no kernel includes it, and nothing is compiled with it.
//
// A kernel is compiled after a prelude that cupyflash/gpu/source.py generates for each
// specialisation. This is one with the same names, which a test compares, and with the values of
// one specialisation, and after it what CUDA's compiler has built in. Assertions about the values
// are for real ones: they are not checked here.
#pragma once

#ifndef IDE_STORAGE  // by .clangd, for files that need another one
#define IDE_STORAGE 1
#endif
#ifndef IDE_CODES
#define IDE_CODES -1
#endif

constexpr int STORAGE = IDE_STORAGE;
constexpr int D = 64;
constexpr int D_V = 64;
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 64;
constexpr int THREADS = 256;
constexpr int SHARED_BYTES = 65536;
constexpr int RESIDENT_BLOCKS = 1;
constexpr bool WHOLE = false;
constexpr int WHOLE_TASKS = 0;
constexpr bool ONE_TILE = false;
constexpr int ROW_SHARERS = 1;
constexpr int V_PARTS = 2;
constexpr int BIAS_STAGES = 1;
constexpr bool PACKED = false;
constexpr bool CACHED = true;
constexpr bool PAGED = true;
constexpr int PAGE_ROWS = 1;
constexpr bool HAS_MASK = true;
constexpr bool HAS_RANGE = false;
constexpr bool HAS_EDGES = false;
constexpr bool HAS_SCORE = true;
constexpr bool HAS_DSCORE = true;
constexpr bool HAS_TBIAS = true;
constexpr bool HAS_CURVE = true;
constexpr bool SCORE_READS = false;
constexpr int NUM_INTS = 1;
constexpr int NUM_FLOATS = 1;
constexpr int NUM_TABLES = 1;
constexpr int NUM_HEAD_CONSTANTS = 1;
constexpr int MASK_STEPS = 1;
constexpr int MASK_BLOCK = 64;
constexpr int SCORE_STEPS = 1;
constexpr int BIAS_KIND = 9;
constexpr bool HAS_DROPOUT = true;
constexpr bool COUNT_TILES = true;
constexpr bool ATOMIC_DQ = true;
constexpr bool WHOLE_DQ = false;
constexpr bool ONLY_SHORT = false;
constexpr bool ONLY_LONG = false;
constexpr bool ADJACENT_DQ = false;
constexpr bool HAS_PARTS = false;
constexpr bool TMA_STORE = true;
constexpr bool HAS_ORIGINS = false;
constexpr bool WIDE_RESULT = false;
constexpr bool RESUMES = false;
constexpr bool K_SCALE_ROWS = false;
constexpr bool V_SCALE_ROWS = false;
constexpr bool HAS_LISTS = false;
constexpr bool HAS_SINGLES = false;
constexpr bool ALIGNED = false;
constexpr bool SHARED = false;
constexpr int TEAM = 1;
constexpr bool HAS_TQ = true;
constexpr bool HAS_TK = true;
constexpr bool HAS_TV = true;
constexpr bool HAS_TDO = true;
constexpr int KEY_CODES = IDE_CODES;
constexpr int VALUE_CODES = IDE_CODES;
constexpr bool EACH_LANE_ARRIVES = false;
#define KERNEL_NAME kernel
#define static_assert(...)

#ifdef __clang__
// -- what CUDA's compiler has built in, as far as kernels use it ----------------------------------

// Constants are computed by functions that are __device__, which clang allows only on the host.
#define __device__ __attribute__((host)) __attribute__((device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __grid_constant__ __attribute__((grid_constant))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))

struct dim3 {
  unsigned int x, y, z;
};
extern const __attribute__((device)) dim3 threadIdx, blockIdx, blockDim, gridDim;

__device__ void __syncthreads();
__device__ int __syncthreads_or(int condition);
__device__ void __syncwarp(unsigned int mask = 0xffffffffu);
template <typename T>
__device__ T __shfl_sync(unsigned int mask, T value, int lane);
template <typename T>
__device__ T __shfl_xor_sync(unsigned int mask, T value, int lanes);
__device__ unsigned int __ballot_sync(unsigned int mask, int condition);
__device__ int __any_sync(unsigned int mask, int condition);
__device__ unsigned long long atomicAdd(unsigned long long* place, unsigned long long value);
__device__ unsigned long long __cvta_generic_to_global(const void* place);
__device__ unsigned long long __cvta_generic_to_shared(const void* place);

__device__ int __clz(int x);
__device__ int __ffs(int x);
__device__ long long __mul64hi(long long x, long long y);
__device__ unsigned long long __umul64hi(unsigned long long x, unsigned long long y);
__device__ unsigned int __umulhi(unsigned int x, unsigned int y);
__device__ float __fadd_rn(float x, float y);
__device__ float __fmul_rn(float x, float y);
__device__ float __fdiv_rn(float x, float y);
__device__ double __dadd_rn(double x, double y);
__device__ double __dmul_rn(double x, double y);
__device__ double __ddiv_rn(double x, double y);
__device__ float __double2float_rz(double x);
__device__ long long __double_as_longlong(double x);
__device__ double __longlong_as_double(long long x);
__device__ unsigned int __float_as_uint(float x);
__device__ float __uint_as_float(unsigned int x);

#define OF_BOTH_TYPES(NAME)       \
  __device__ float NAME(float x); \
  __device__ double NAME(double x);
#define OF_TWO_NUMBERS(NAME)               \
  __device__ float NAME(float x, float y); \
  __device__ double NAME(double x, double y);
OF_BOTH_TYPES(ceil)
OF_BOTH_TYPES(exp)
OF_BOTH_TYPES(exp2)
OF_BOTH_TYPES(fabs)
OF_BOTH_TYPES(floor)
OF_BOTH_TYPES(log)
OF_BOTH_TYPES(rint)
OF_BOTH_TYPES(sqrt)
OF_BOTH_TYPES(tanh)
OF_TWO_NUMBERS(copysign)
OF_TWO_NUMBERS(fmax)
OF_TWO_NUMBERS(fmin)
__device__ float fma(float x, float y, float z);
__device__ double fma(double x, double y, double z);
#undef OF_BOTH_TYPES
#undef OF_TWO_NUMBERS
#endif

#ifndef IDE_READS_PARAMS  // a header that is read by itself has what each kernel includes first
#include "common/params.cuh"
#endif
