// Element types: how they are stored, and the accumulator's type, in which everything is computed.
#pragma once
#include "../ptx/convert.cuh"

// The element trait: one specialisation for each type, numbered as in cupyflash/arrays/dtypes.py.
// A STORAGE without one does not compile.
template <int CODE>
struct Element {
  static_assert(CODE < 0, "STORAGE is no element type: give it a specialisation of Element");
};
template <>
struct Element<0> {               // float16
  using stored = unsigned short;  // bits
  using accumulated = float;
  static constexpr int KIND = KIND_FLOAT16;
};
template <>
struct Element<1> {               // bfloat16
  using stored = unsigned short;  // bits
  using accumulated = float;
  static constexpr int KIND = KIND_BFLOAT16;
};
template <>
struct Element<2> {  // float32
  using stored = float;
  using accumulated = float;
  static constexpr int KIND = KIND_FLOAT32;
};
template <>
struct Element<3> {  // float64
  using stored = double;
  using accumulated = double;
  static constexpr int KIND = KIND_FLOAT64;
};
using storage_t = Element<STORAGE>::stored;
using accum_t = Element<STORAGE>::accumulated;

// The type of out in the forward, and of dq: the accumulator's if those of other keys will join it.
template <bool WIDE>
struct Result {
  using type = storage_t;
};
template <>
struct Result<true> {
  using type = accum_t;
};
using result_t = Result<WIDE_RESULT>::type;

constexpr bool IS_FLOAT16 = STORAGE == 0, IS_BFLOAT16 = STORAGE == 1;
constexpr bool IS_FLOAT32 = STORAGE == 2, IS_FLOAT64 = STORAGE == 3;
constexpr bool IS_16_BIT = IS_FLOAT16 || IS_BFLOAT16;

// Stands in the last else of every choice by element type, so that a new type does not compile
// until that choice names it.
template <int CODE = STORAGE>
__device__ __forceinline__ void unknown_element() {
  static_assert(CODE < 0, "this function does not know the element type STORAGE");
}

// Elements in 16 bytes, the widest access to memory.
constexpr int VECTOR = 16 / sizeof(accum_t);
constexpr int STORED_VECTOR = 16 / sizeof(storage_t);

struct alignas(16) Vector {
  accum_t x[VECTOR];
};

struct alignas(16) StoredVector {
  storage_t x[STORED_VECTOR];
};

namespace number {

__device__ __forceinline__ float bits_to_float(unsigned int bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float bfloat_to_float(unsigned short bits) {
  return bits_to_float(static_cast<unsigned int>(bits) << 16);
}

// Rounds to nearest even. A NaN stays NaN: rounding its payload might give infinity.
__device__ __forceinline__ unsigned short float_to_bfloat(float value) {
  const unsigned int bits = __float_as_uint(value);
  const unsigned int rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return static_cast<unsigned short>((value != value ? bits | 0x400000u : rounded) >> 16);
}

// Rounds to float first, to odd, so that the second rounding sees what the first one dropped.
__device__ __forceinline__ unsigned short double_to_bfloat(double value) {
  const float toward_zero = __double2float_rz(value);
  const bool inexact = static_cast<double>(toward_zero) != value && value == value;
  return float_to_bfloat(bits_to_float(__float_as_uint(toward_zero) | (inexact ? 1u : 0u)));
}

__device__ __forceinline__ accum_t widen(storage_t stored) {
  if constexpr (IS_FLOAT16) {
    return ptx::half_to_float(stored);
  } else if constexpr (IS_BFLOAT16) {
    return bfloat_to_float(stored);
  } else if constexpr (IS_FLOAT32 || IS_FLOAT64) {
    return stored;
  } else {
    unknown_element();
  }
}

__device__ __forceinline__ bool is_finite(accum_t x) { return x - x == accum_t(0); }

__device__ __forceinline__ accum_t infinity() {
  return static_cast<accum_t>(bits_to_float(0x7f800000u));
}

// By which exponents to the base e become exponents to the base 2.
template <typename T>
constexpr T LOG2_E = static_cast<T>(1.4426950408889634);

__device__ __forceinline__ float largest_float() { return bits_to_float(0x7f7fffffu); }

// The largest finite number of a type.
__device__ __forceinline__ float largest_like(float) { return largest_float(); }
__device__ __forceinline__ double largest_like(double) { return 0x1.fffffffffffffp1023; }
__device__ __forceinline__ accum_t largest() { return largest_like(accum_t()); }

__device__ __forceinline__ unsigned short to_half(float value) { return ptx::float_to_half(value); }
__device__ __forceinline__ unsigned short to_half(double value) {
  return ptx::double_to_half(value);
}
__device__ __forceinline__ unsigned short to_bfloat(float value) { return float_to_bfloat(value); }
__device__ __forceinline__ unsigned short to_bfloat(double value) {
  return double_to_bfloat(value);
}

// Rounds a value to the storage type, or keeps it in the accumulator's.
template <typename T>
__device__ __forceinline__ void narrow(accum_t value, T* to) {
  if constexpr (sizeof(T) == sizeof(accum_t)) {
    *to = value;
  } else if constexpr (IS_FLOAT16) {
    *to = to_half(value);
  } else if constexpr (IS_BFLOAT16) {
    *to = to_bfloat(value);
  } else {
    unknown_element<STORAGE + 0 * sizeof(T)>();
  }
}

// Rounds two numbers to a 16-bit storage type and packs them, the first in the lower half.
template <int CODE = STORAGE>
__device__ __forceinline__ unsigned int narrow_pair(float low, float high) {
  if constexpr (IS_FLOAT16) {
    return ptx::floats_to_halves(low, high);
  } else if constexpr (IS_BFLOAT16) {
    return ptx::floats_to_bfloats(low, high);
  } else {
    unknown_element<CODE>();
  }
}

// Rounds a value to one of the four floating kinds and stores it at `index`.
__device__ __forceinline__ void store(char* data, int kind, long long index, accum_t value) {
  if (kind == KIND_FLOAT16) {
    reinterpret_cast<unsigned short*>(data)[index] = to_half(value);
  } else if (kind == KIND_BFLOAT16) {
    reinterpret_cast<unsigned short*>(data)[index] = to_bfloat(value);
  } else if (kind == KIND_FLOAT32) {
    reinterpret_cast<float*>(data)[index] = static_cast<float>(value);
  } else {
    reinterpret_cast<double*>(data)[index] = value;
  }
}

// Loads element `index` of one of the four floating kinds.
template <typename T>
__device__ __forceinline__ T load(const char* data, int kind, long long index) {
  if (kind == KIND_FLOAT16) {
    return ptx::half_to_float(reinterpret_cast<const unsigned short*>(data)[index]);
  }
  if (kind == KIND_BFLOAT16) {
    return bfloat_to_float(reinterpret_cast<const unsigned short*>(data)[index]);
  }
  if (kind == KIND_FLOAT32) return static_cast<T>(reinterpret_cast<const float*>(data)[index]);
  return static_cast<T>(reinterpret_cast<const double*>(data)[index]);
}

constexpr int STORAGE_KIND = Element<STORAGE>::KIND;

}  // namespace number
