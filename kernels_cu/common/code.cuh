// Codes of 8 and 4 bits with a scale, x = scale * code: the twin of reference/cpu/quantize.py.
//
// Every step is one operation that IEEE 754 defines, on normal numbers only, so that a CPU has the
// same bits: kernels are compiled with -ftz=true, which would flush others to zero.
#pragma once
#include "number.cuh"

namespace code {

constexpr int INT8 = 0, E4M3 = 1, E5M2 = 2, INT4 = 3;  // as in cupyflash/problem/quantize.py

template <int FORMAT>
struct Format {
  static_assert(FORMAT < 0, "this number is no format");
};
template <>
struct Format<INT8> {
  static constexpr int BITS = 8, LARGEST = 127, FRACTION = 0, BIAS = 0;
};
template <>
struct Format<E4M3> {
  static constexpr int BITS = 8, LARGEST = 448, FRACTION = 3, BIAS = 7;
  static constexpr unsigned int SPECIAL = 0x7f;  // from this magnitude on, codes are not finite
};
template <>
struct Format<E5M2> {
  static constexpr int BITS = 8, LARGEST = 57344, FRACTION = 2, BIAS = 15;
  static constexpr unsigned int SPECIAL = 0x7c;
};
template <>
struct Format<INT4> {
  static constexpr int BITS = 4, LARGEST = 7, FRACTION = 0, BIAS = 0;
};

constexpr unsigned int NAN_CODE = 0x7f;  // of the formats with a fraction

// The accumulator's numbers as bits: sign, exponent, fraction.
template <typename T>
struct Word {
  using type = unsigned int;
  static constexpr int FRACTION = 23, BIAS = 127;
};
template <>
struct Word<double> {
  using type = unsigned long long;
  static constexpr int FRACTION = 52, BIAS = 1023;
};
using word_t = Word<accum_t>::type;
constexpr int FRACTION = Word<accum_t>::FRACTION, BIAS = Word<accum_t>::BIAS;
constexpr int SIGN_BIT = 8 * sizeof(word_t) - 1;
constexpr word_t INFINITE = static_cast<word_t>(2 * BIAS + 1) << FRACTION;

__device__ __forceinline__ unsigned int word_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ unsigned long long word_of(double x) {
  return static_cast<unsigned long long>(__double_as_longlong(x));
}
__device__ __forceinline__ float number_of(unsigned int word) { return __uint_as_float(word); }
__device__ __forceinline__ double number_of(unsigned long long word) {
  return __longlong_as_double(static_cast<long long>(word));
}

__device__ __forceinline__ accum_t power_of_two(int exponent) {
  return number_of(static_cast<word_t>(BIAS + exponent) << FRACTION);
}

__device__ __forceinline__ float product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double product(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ float quotient(float x, float y) { return __fdiv_rn(x, y); }
__device__ __forceinline__ double quotient(double x, double y) { return __ddiv_rn(x, y); }
__device__ __forceinline__ float sum(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double sum(double x, double y) { return __dadd_rn(x, y); }

// The magnitude of x as bits, which compare as magnitudes do: infinity is larger than all numbers,
// and NaN larger than infinity.
__device__ __forceinline__ word_t magnitude(accum_t x) {
  return word_of(x) & ~(static_cast<word_t>(1) << SIGN_BIT);
}

// Numbers whose scale or largest magnitude is this small are multiplied by 2^LIFT while they are
// converted, so that no float32 on the way is subnormal. The smallest scale is 2^LEAST.
constexpr int LEAST = -126, LIFT = 100, LIFTED_BELOW = -60;

// x * 2^LIFT, also of a subnormal x: its bits are a whole number of units of 2^-149.
__device__ __forceinline__ float lift(float x) {
  constexpr unsigned int RAISED = static_cast<unsigned int>(LIFT) << 23;
  const unsigned int word = __float_as_uint(x), sign = word & 0x80000000u, size = word ^ sign;
  const float unit = __uint_as_float(static_cast<unsigned int>(127 + LIFT - 149) << 23);
  const float lifted =
      size >> 23 == 0 ? __fmul_rn(static_cast<float>(size), unit) : __uint_as_float(size + RAISED);
  return __uint_as_float(__float_as_uint(lifted) | sign);
}
// float64 does not need it: the smallest scale is far above its subnormal numbers.
__device__ __forceinline__ double lift(double x) { return x; }

// The scale of numbers whose largest magnitude is `largest`, as bits.
template <int FORMAT>
__device__ __forceinline__ float scale_of(word_t largest) {
  if (largest > INFINITE) return number::bits_to_float(0x7fc00000u);
  const bool lifted = !IS_FLOAT64 && largest < word_of(power_of_two(LIFTED_BELOW));
  const accum_t x = number_of(largest), lifted_x = lifted ? lift(x) : x;
  const accum_t least = power_of_two(lifted ? LEAST + LIFT : LEAST);
  const accum_t ratio = quotient(lifted_x, static_cast<accum_t>(Format<FORMAT>::LARGEST));
  const float scale = static_cast<float>(ratio > least ? ratio : least);
  const unsigned int lowered = __float_as_uint(scale) - (static_cast<unsigned int>(LIFT) << 23);
  return lifted ? __uint_as_float(lowered) : scale;
}

// What numbers with a scale are multiplied by.
struct Inverse {
  accum_t value;
  bool lifted;

  __device__ __forceinline__ explicit Inverse(float scale)
      : lifted(!IS_FLOAT64 && scale < power_of_two(LIFTED_BELOW)) {
    const accum_t wide = scale;
    value = quotient(accum_t(1), lifted ? lift(wide) : wide);
  }
};

// The code of x, rounded to nearest even.
template <int FORMAT>
__device__ __forceinline__ unsigned int encode(accum_t x, const Inverse& inverse) {
  using F = Format<FORMAT>;
  constexpr unsigned int MASK = (1u << F::BITS) - 1;
  constexpr int SHIFT = FRACTION - F::FRACTION;
  if (inverse.value != inverse.value) return F::FRACTION > 0 ? NAN_CODE : 0;
  const word_t sign = word_of(x) >> SIGN_BIT << SIGN_BIT;
  const accum_t multiple = magnitude(x) == INFINITE
                               ? number_of(word_of(accum_t(F::LARGEST)) | sign)
                               : product(inverse.lifted ? lift(x) : x, inverse.value);
  if constexpr (F::FRACTION == 0) {
    // A number this large has units in its last bit, so the sum has the integer in its last bits.
    constexpr word_t UNITS =
        static_cast<word_t>(BIAS + FRACTION) << FRACTION | static_cast<word_t>(1) << (FRACTION - 1);
    return static_cast<unsigned int>(word_of(sum(multiple, number_of(UNITS)))) & MASK;
  } else {
    const word_t size = magnitude(multiple);
    const unsigned int negative = static_cast<unsigned int>(sign >> (SIGN_BIT - 7));
    if (size < word_of(power_of_two(1 - F::BIAS))) {  // in units of the smallest code
      const accum_t units = power_of_two(SHIFT + 1 - F::BIAS);
      return negative | (static_cast<unsigned int>(word_of(sum(number_of(size), units))) & 0x7f);
    }
    const word_t half = (static_cast<word_t>(1) << (SHIFT - 1)) - 1 + (size >> SHIFT & 1);
    constexpr word_t OFFSET = static_cast<word_t>(BIAS - F::BIAS) << F::FRACTION;
    return negative | static_cast<unsigned int>(((size + half) >> SHIFT) - OFFSET);
  }
}

// The number that a code in the low bits of `bits` means, without its scale.
template <int FORMAT>
__device__ __forceinline__ float value(unsigned int bits) {
  using F = Format<FORMAT>;
  if constexpr (F::FRACTION == 0) {
    constexpr int UNUSED = 32 - F::BITS;
    return static_cast<float>(static_cast<int>(bits << UNUSED) >> UNUSED);
  } else {
    const unsigned int size = bits & 0x7f, sign = (bits & 0x80) << 24;
    const unsigned int moved = size << (23 - F::FRACTION);
    unsigned int word = moved + (static_cast<unsigned int>(127 - F::BIAS) << 23);
    if (size < 1u << F::FRACTION) {  // subnormal: in units of the smallest code
      constexpr int UNIT = 127 + 1 - F::BIAS - F::FRACTION;
      word = __float_as_uint(__fmul_rn(static_cast<float>(size),
                                       __uint_as_float(static_cast<unsigned int>(UNIT) << 23)));
    }
    if (size >= F::SPECIAL) word = moved | 0x7f800000u;
    return __uint_as_float(word | sign);
  }
}

}  // namespace code
