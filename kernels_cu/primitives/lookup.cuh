// Arrays that masks and scores read, and the arithmetic of their expressions that C++ does not
// have: the twin of the reading and integer steps of reference/program.py.
#pragma once
#include "../arch/warp.cuh"
#include "number.cuh"

// A range of more elements than this is not looked at: its bounds are those of the type.
constexpr long long RANGE_LIMIT = 1024;
constexpr long long SMALLEST_INT = -0x7fffffffffffffffLL - 1;
constexpr long long LARGEST_INT = 0x7fffffffffffffffLL;

namespace lookup {

__device__ __forceinline__ long long load_as_int(const char* place, int kind) {
  switch (kind) {
    case KIND_BOOL:
      return *place != 0;  // a view of other bytes as bool holds more than 1
    case KIND_INT8:
      return *reinterpret_cast<const signed char*>(place);
    case KIND_UINT8:
      return *reinterpret_cast<const unsigned char*>(place);
    case KIND_INT16:
      return *reinterpret_cast<const short*>(place);
    case KIND_UINT16:
      return *reinterpret_cast<const unsigned short*>(place);
    case KIND_INT32:
      return *reinterpret_cast<const int*>(place);
    case KIND_UINT32:
      return *reinterpret_cast<const unsigned int*>(place);
    default:
      return *reinterpret_cast<const long long*>(place);
  }
}

template <typename... Index>
__device__ __forceinline__ const char* place(const Table& table, Index... index) {
  const long long indices[] = {0, static_cast<long long>(index)...};
  const char* at = table.data;
#pragma unroll
  for (int axis = 0; axis < static_cast<int>(sizeof...(Index)); ++axis) {
    at += indices[axis + 1] * table.strides[axis];
  }
  return at;
}

// A rectangle of a table's elements, in rows of the last axis.
template <int AXES>
struct Range {
  const Table& table;
  long long first[AXES];
  long long length[AXES];
  long long count;

  // Indices are proven in range; their bounds may be wider, where floats were rounded outward.
  __device__ __forceinline__ Range(const Table& of, const long long* ends) : table(of), count(1) {
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
      const long long low = ends[axis] > 0 ? ends[axis] : 0;
      const long long end = of.shape[axis] - 1;
      const long long high = ends[AXES + axis] < end ? ends[AXES + axis] : end;
      first[axis] = low;
      length[axis] = high - low + 1;
      count = length[axis] > 0 ? count * length[axis] : 0;
      if (count > RANGE_LIMIT) count = RANGE_LIMIT + 1;  // so that the product stays small
    }
  }

  __device__ __forceinline__ const char* element(int number) const {
    const char* at = table.data;
#pragma unroll
    for (int axis = AXES - 1; axis >= 0; --axis) {
      const int size = static_cast<int>(length[axis]);
      at += (first[axis] + number % size) * table.strides[axis];
      number /= size;
    }
    return at;
  }
};

struct IntEnds {
  long long low;
  long long high;
};

template <typename T>
struct FloatEnds {
  T low;
  T high;
};

// The lanes of a warp share the elements, so all of them call this together.
template <int AXES>
__device__ __forceinline__ IntEnds int_extremes(const Table& table, const long long* ends) {
  const Range<AXES> range(table, ends);
  if (range.count > RANGE_LIMIT) {
    return table.kind == KIND_BOOL ? IntEnds{0, 1} : IntEnds{SMALLEST_INT, LARGEST_INT};
  }
  IntEnds found{LARGEST_INT, SMALLEST_INT};
#pragma unroll 1
  for (int n = arch::lane_index(); n < range.count; n += arch::WARP_SIZE) {
    const long long value = load_as_int(range.element(n), table.kind);
    found.low = value < found.low ? value : found.low;
    found.high = value > found.high ? value : found.high;
  }
#pragma unroll
  for (int lanes = arch::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    const long long low = arch::shuffle_xor(found.low, lanes);
    const long long high = arch::shuffle_xor(found.high, lanes);
    found.low = low < found.low ? low : found.low;
    found.high = high > found.high ? high : found.high;
  }
  return found;
}

// NaN where one of the elements is, or where there are too many to look at.
template <typename T, int AXES>
__device__ __forceinline__ FloatEnds<T> float_extremes(const Table& table, const long long* ends) {
  const Range<AXES> range(table, ends);
  const T infinite = static_cast<T>(number::infinity());
  const T unknown = infinite - infinite;
  if (range.count > RANGE_LIMIT) return FloatEnds<T>{unknown, unknown};
  FloatEnds<T> found{infinite, -infinite};
#pragma unroll 1
  for (int n = arch::lane_index(); n < range.count; n += arch::WARP_SIZE) {
    const T value = number::load<T>(range.element(n), table.kind, 0);
    found.low = value < found.low || value != value ? value : found.low;
    found.high = value > found.high || value != value ? value : found.high;
    if (value != value) break;
  }
#pragma unroll
  for (int lanes = arch::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    const T low = arch::shuffle_xor(found.low, lanes);
    const T high = arch::shuffle_xor(found.high, lanes);
    found.low = low < found.low || low != low ? low : found.low;
    found.high = high > found.high || high != high ? high : found.high;
  }
  return found;
}

}  // namespace lookup

// What generated code calls. Indices come one per axis, ranges as all first and then all last ones.

template <typename... Index>
__device__ __forceinline__ long long lookup_int(const Table& table, Index... index) {
  return lookup::load_as_int(lookup::place(table, index...), table.kind);
}

template <typename T, typename... Index>
__device__ __forceinline__ T lookup_float(const Table& table, Index... index) {
  return number::load<T>(lookup::place(table, index...), table.kind, 0);
}

template <typename... End>
__device__ __forceinline__ long long range_minimum_int(const Table& table, End... end) {
  const long long ends[] = {static_cast<long long>(end)...};
  return lookup::int_extremes<sizeof...(End) / 2>(table, ends).low;
}

template <typename... End>
__device__ __forceinline__ long long range_maximum_int(const Table& table, End... end) {
  const long long ends[] = {static_cast<long long>(end)...};
  return lookup::int_extremes<sizeof...(End) / 2>(table, ends).high;
}

template <typename T, typename... End>
__device__ __forceinline__ T range_minimum_float(const Table& table, End... end) {
  const long long ends[] = {static_cast<long long>(end)...};
  return lookup::float_extremes<T, sizeof...(End) / 2>(table, ends).low;
}

template <typename T, typename... End>
__device__ __forceinline__ T range_maximum_float(const Table& table, End... end) {
  const long long ends[] = {static_cast<long long>(end)...};
  return lookup::float_extremes<T, sizeof...(End) / 2>(table, ends).high;
}

// Division as Python has it: rounded down, the remainder with the divisor's sign. A function of its
// own, because it is long, and stands in a mask and in its class several times.
__device__ __noinline__ long long floor_divide(long long x, long long y) {
  if (static_cast<unsigned long long>(x | y) >> 32 == 0) {  // 32-bit division is far cheaper
    return static_cast<unsigned int>(x) / static_cast<unsigned int>(y);
  }
  const long long quotient = x / y;
  return quotient - (quotient * y != x && (x < 0) != (y < 0) ? 1 : 0);
}

__device__ __forceinline__ long long remainder(long long x, long long y) {
  return x - floor_divide(x, y) * y;
}

// The smaller and the larger of two numbers; NaN where either is, as in NumPy.
template <typename T>
__device__ __forceinline__ T minimum(T x, T y) {
  return x < y || x != x ? x : y;
}

template <typename T>
__device__ __forceinline__ T maximum(T x, T y) {
  return x > y || x != x ? x : y;
}

// The floor as an integer: the nearest one that 64 bits hold, the smallest for NaN.
template <typename T>
__device__ __forceinline__ long long floor_to_int(T x) {
  const T edge = static_cast<T>(9223372036854775808.0);
  if (x >= -edge && x < edge) return static_cast<long long>(floor(x));
  return x > T(0) ? LARGEST_INT : SMALLEST_INT;
}
