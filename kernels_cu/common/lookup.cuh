// Look-up tables, the arrays that masks and scores read, and the integer arithmetic of their
// expressions that C++ lacks: the twin of the look-up and integer steps of
// reference/cpu/program.py.
#pragma once
#include "../ptx/multiply.cuh"
#include "../ptx/warp.cuh"
#include "number.cuh"

// A range of more elements than this is not searched; its bounds are those of the type.
constexpr long long RANGE_LIMIT = 1024;
constexpr long long SMALLEST_INT = -0x7fffffffffffffffLL - 1;
constexpr long long LARGEST_INT = 0x7fffffffffffffffLL;

namespace lookup {

template <int KIND>
struct Integer;
template <>
struct Integer<KIND_BOOL> {
  using type = unsigned char;
};
template <>
struct Integer<KIND_INT8> {
  using type = signed char;
};
template <>
struct Integer<KIND_UINT8> {
  using type = unsigned char;
};
template <>
struct Integer<KIND_INT16> {
  using type = short;
};
template <>
struct Integer<KIND_UINT16> {
  using type = unsigned short;
};
template <>
struct Integer<KIND_INT32> {
  using type = int;
};
template <>
struct Integer<KIND_UINT32> {
  using type = unsigned int;
};
template <>
struct Integer<KIND_INT64> {
  using type = long long;
};

template <int KIND>
__device__ __forceinline__ long long load_as_int(const char* address) {
  const auto value = *reinterpret_cast<const typename Integer<KIND>::type*>(address);
  return KIND == KIND_BOOL ? value != 0 : value;  // a bool viewed from other bytes may exceed 1
}

// Bytes between element 0 and element `index` of an axis. If indices have 32 bits, strides do, too.
__device__ __forceinline__ long long byte_offset(long long index, long long stride) {
  return index * stride;
}
__device__ __forceinline__ long long byte_offset(int index, long long stride) {
  return ptx::multiply_wide(index, static_cast<int>(stride));
}

template <typename... Index>
__device__ __forceinline__ const char* element_address(const Table& table, Index... index) {
  const char* at = table.data;
  int axis = 0;
  ((at += byte_offset(index, table.strides[axis++])), ...);
  return at;
}

// A rectangle of a table's elements, stored as rows of the last axis.
template <int AXES>
struct Range {
  const Table& table;
  long long first[AXES];
  long long length[AXES];
  long long count;

  // Indices are proven to be in range; bounds may be wider, because floats are rounded outward.
  __device__ __forceinline__ Range(const Table& of, const long long* ends) : table(of), count(1) {
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
      const long long low = ends[axis] > 0 ? ends[axis] : 0;
      const long long end = of.shape[axis] - 1;
      const long long high = ends[AXES + axis] < end ? ends[AXES + axis] : end;
      first[axis] = low;
      length[axis] = high - low + 1;
      count = length[axis] > 0 ? count * length[axis] : 0;
      if (count > RANGE_LIMIT) count = RANGE_LIMIT + 1;  // keeps the product from overflowing
    }
  }

  // The number of rows, 0 if there are too many elements; and the address of one.
  __device__ __forceinline__ int rows() const {
    if constexpr (AXES == 1) return count > 0 ? 1 : 0;
    if (count == 0 || count > RANGE_LIMIT) return 0;
    return static_cast<int>(count) / static_cast<int>(length[AXES - 1]);
  }
  __device__ __forceinline__ const char* row(int number) const {
    const char* at = table.data + first[AXES - 1] * table.strides[AXES - 1];
#pragma unroll
    for (int axis = AXES - 2; axis >= 0; --axis) {
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

__device__ __forceinline__ void extend(IntEnds& extremes, long long value) {
  extremes.low = value < extremes.low ? value : extremes.low;
  extremes.high = value > extremes.high ? value : extremes.high;
}

// Extends the extremes by an aligned row of 16-byte vectors: by every `step`-th vector from number
// `first` on, a few loads at a time.
template <int KIND, typename Wide>
__device__ __forceinline__ void extend_by_vectors(const char* row, int length, int first, int step,
                                                  Wide& low, Wide& high) {
  using T = typename Integer<KIND>::type;
  constexpr int EACH = 16 / sizeof(T), AT_ONCE = 2;
  struct alignas(16) Vector16 {
    T x[EACH];
  };
  const int vectors = length / EACH;
#pragma unroll 1
  for (int from = first; from < vectors; from += AT_ONCE * step) {
    Vector16 loaded[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int at = from + n * step;
      loaded[n] = reinterpret_cast<const Vector16*>(row)[at < vectors ? at : from];
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
      for (int x = 0; x < EACH; ++x) {
        const T value = loaded[n].x[x];
        const Wide one = static_cast<Wide>(KIND == KIND_BOOL ? value != 0 : value);
        low = one < low ? one : low;
        high = one > high ? one : high;
      }
    }
  }
}

// The extremes of each lane's row, given by address and length, at least 1. All lanes may have the
// same row (often a tile's queries, for many tiles of keys) and share the work; else groups of 8
// lanes read the row of one lane after the other together, so that neighbouring lanes load
// neighbouring elements, 16 bytes at a time where rows are aligned. All lanes of the warp call it
// together.
template <int KIND>
__device__ __forceinline__ IntEnds row_extremes(const char* lane_row, int lane_length,
                                                long long stride) {
  using T = typename Integer<KIND>::type;
  using Wide = decltype(T() + T());
  constexpr Wide LEAST = Wide(-1) < Wide(0) ? Wide(1) << (8 * sizeof(Wide) - 1) : Wide(0);
  constexpr int TOGETHER = ptx::WARP_SIZE < 8 ? ptx::WARP_SIZE : 8;
  constexpr int AT_ONCE = 32 / sizeof(Wide);  // loads in flight, limited by registers
  const auto address = reinterpret_cast<unsigned long long>(lane_row);
  const unsigned long long first = ptx::shuffle(address, 0);
  const int first_length = ptx::shuffle(lane_length, 0);
  const bool same = !ptx::any_lane(address != first || lane_length != first_length);
  const bool whole = (address | static_cast<unsigned long long>(lane_length) * sizeof(T)) % 16 == 0;
  const bool by_vectors = !ptx::any_lane(!whole || stride != sizeof(T));
  const int lane = ptx::lane_index(), group = lane / TOGETHER * TOGETHER;
  IntEnds extremes{0, 0};
#pragma unroll 1
  for (int n = 0; n < (same ? 1 : TOGETHER); ++n) {
    Wide low = ~LEAST, high = LEAST;
    const int reader = same ? lane : group + n;
    const auto* const row = reinterpret_cast<const char*>(ptx::shuffle(address, reader));
    const int length = ptx::shuffle(lane_length, reader);
    if (by_vectors) {
      extend_by_vectors<KIND>(row, length, lane - group, TOGETHER, low, high);
    } else {
#pragma unroll 1
      for (int from = lane - group; from < length; from += AT_ONCE * TOGETHER) {
        Wide loaded[AT_ONCE];
#pragma unroll
        for (int x = 0; x < AT_ONCE; ++x) {
          const int at = from + x * TOGETHER;
          loaded[x] =
              static_cast<Wide>(load_as_int<KIND>(row + (at < length ? at : from) * stride));
        }
#pragma unroll
        for (int x = 0; x < AT_ONCE; ++x) {
          low = loaded[x] < low ? loaded[x] : low;
          high = loaded[x] > high ? loaded[x] : high;
        }
      }
    }
#pragma unroll
    for (int lanes = TOGETHER / 2; lanes > 0; lanes /= 2) {
      const Wide least = ptx::shuffle_xor(low, lanes), most = ptx::shuffle_xor(high, lanes);
      low = least < low ? least : low;
      high = most > high ? most : high;
    }
    if (same || lane == group + n) extremes = IntEnds{low, high};
  }
  return extremes;
}

// The smallest and the largest integer of a range; those of the type if there are too many elements
// to search. All lanes of the warp call it together.
template <int KIND, int AXES>
__device__ __forceinline__ IntEnds int_extremes(const Table& table, const long long* ends) {
  const Range<AXES> range(table, ends);
  const long long stride = table.strides[AXES - 1];
  const int columns = static_cast<int>(range.length[AXES - 1]);
  if (!ptx::any_lane(range.count > RANGE_LIMIT || range.rows() != 1)) {
    return row_extremes<KIND>(range.row(0), columns, stride);
  }
  if (range.count > RANGE_LIMIT) {
    return KIND == KIND_BOOL ? IntEnds{0, 1} : IntEnds{SMALLEST_INT, LARGEST_INT};
  }
  IntEnds extremes{LARGEST_INT, SMALLEST_INT};
#pragma unroll 1
  for (int n = 0; n < range.rows(); ++n) {
    const char* at = range.row(n);
#pragma unroll 1
    for (int x = 0; x < columns; ++x, at += stride) extend(extremes, load_as_int<KIND>(at));
  }
  return extremes;
}

// The extremes of a range of floats; NaN if an element is, or if there are too many to search.
template <typename T, int KIND, int AXES>
__device__ __forceinline__ FloatEnds<T> float_extremes(const Table& table, const long long* ends) {
  const Range<AXES> range(table, ends);
  const T infinite = static_cast<T>(number::infinity());
  const T unknown = infinite - infinite;
  if (range.count > RANGE_LIMIT) return FloatEnds<T>{unknown, unknown};
  FloatEnds<T> extremes{infinite, -infinite};
#pragma unroll 1
  for (int n = 0; n < range.rows(); ++n) {
    const char* at = range.row(n);
#pragma unroll 1
    for (int x = 0; x < range.length[AXES - 1]; ++x, at += table.strides[AXES - 1]) {
      const T value = number::load<T>(at, KIND, 0);
      if (value != value) return FloatEnds<T>{value, value};
      extremes.low = value < extremes.low ? value : extremes.low;
      extremes.high = value > extremes.high ? value : extremes.high;
    }
  }
  return extremes;
}

// Rows of more elements than this in all are not searched for a tile, and not for all numbers of a
// range of more than a word has bits.
constexpr long long CONTAINS_LIMIT = 16384;
constexpr int MOST_CONTAINED = 64;

// Whether rows have all, or any, of a range of numbers.
struct Contained {
  bool all, any;
};

// The rows of the last axis between two indices of each other axis, which are positions' and so in
// range; the ends of the last axis are those of the numbers.
template <int KIND, int AXES>
__device__ __forceinline__ Contained contained(const Table& table, const long long* ends) {
  const long long low = ends[AXES - 1], wanted = ends[2 * AXES - 1] - low + 1;
  const int columns = static_cast<int>(table.shape[AXES - 1]);
  const long long stride = table.strides[AXES - 1];
  long long rows = 1;
#pragma unroll
  for (int axis = 0; axis < AXES - 1; ++axis) rows *= ends[AXES + axis] - ends[axis] + 1;
  if (rows * columns > CONTAINS_LIMIT) return Contained{false, true};
  const bool countable = wanted <= MOST_CONTAINED;
  const unsigned long long full = countable ? ~0ULL >> (MOST_CONTAINED - wanted) : 0;
  Contained found{countable, false};
#pragma unroll 1
  for (int n = 0; n < static_cast<int>(rows); ++n) {
    const char* at = table.data;
    int rest = n;
#pragma unroll
    for (int axis = AXES - 2; axis >= 0; --axis) {
      const int size = static_cast<int>(ends[AXES + axis] - ends[axis]) + 1;
      at += (ends[axis] + rest % size) * table.strides[axis];
      rest /= size;
    }
    unsigned long long bits = 0;
#pragma unroll 4
    for (int x = 0; x < columns; ++x, at += stride) {
      const long long number = load_as_int<KIND>(at) - low;
      const bool inside = number >= 0 && number < wanted;
      found.any = found.any || inside;
      bits |= inside ? 1ULL << (number & 63) : 0;
    }
    found.all = found.all && bits == full;
  }
  return found;
}

}  // namespace lookup

// Called by generated code. There is one index per axis; for a range, all first ones, then all last
// ones.

template <int KIND, typename... Index>
__device__ __forceinline__ long long lookup_int(const Table& table, Index... index) {
  return lookup::load_as_int<KIND>(lookup::element_address(table, index...));
}

template <typename T, int KIND, typename... Index>
__device__ __forceinline__ T lookup_float(const Table& table, Index... index) {
  return number::load<T>(lookup::element_address(table, index...), KIND, 0);
}

template <int KIND, typename... End>
__device__ __forceinline__ lookup::Contained rows_contain(const Table& table, End... end) {
  const long long ends[] = {static_cast<long long>(end)...};
  return lookup::contained<KIND, sizeof...(End) / 2>(table, ends);
}

// Whether the row of the last axis at some indices has a number, which comes after them.
template <int KIND, typename... Index>
__device__ __forceinline__ bool row_contains(const Table& table, Index... index) {
  constexpr int AXES = sizeof...(Index);
  const long long at[] = {static_cast<long long>(index)...};
  const char* row = table.data;
#pragma unroll
  for (int axis = 0; axis < AXES - 1; ++axis) row += at[axis] * table.strides[axis];
  const int columns = static_cast<int>(table.shape[AXES - 1]);
  const long long stride = table.strides[AXES - 1];
  bool found = false;
#pragma unroll 4
  for (int x = 0; x < columns; ++x, row += stride) {
    found = found || lookup::load_as_int<KIND>(row) == at[AXES - 1];
  }
  return found;
}

template <int KIND, typename... End>
__device__ __forceinline__ lookup::IntEnds range_int(const Table& table, End... end) {
  const long long ends[] = {static_cast<long long>(end)...};
  return lookup::int_extremes<KIND, sizeof...(End) / 2>(table, ends);
}

template <typename T, int KIND, typename... End>
__device__ __forceinline__ lookup::FloatEnds<T> range_float(const Table& table, End... end) {
  const long long ends[] = {static_cast<long long>(end)...};
  return lookup::float_extremes<T, KIND, sizeof...(End) / 2>(table, ends);
}

// Division of non-negative integers, bit by bit if they are long: the compiler's division is a
// function, and around a call it does not overlap wgmma instructions.
__device__ __forceinline__ unsigned long long divide_bits(unsigned long long x,
                                                          unsigned long long y) {
  if ((x | y) >> 32 == 0) return static_cast<unsigned int>(x) / static_cast<unsigned int>(y);
  unsigned long long quotient = 0, rest = 0;
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    rest = rest << 1 | (x >> bit & 1);
    quotient <<= 1;
    if (rest >= y) {
      rest -= y;
      quotient |= 1;
    }
  }
  return quotient;
}

// Division as in Python: rounded down, so that the remainder has the divisor's sign.
__device__ __forceinline__ long long floor_divide_long(long long x, long long y) {
  const auto magnitude = [](long long of) {
    const auto bits = static_cast<unsigned long long>(of);
    return of < 0 ? 0 - bits : bits;
  };
  const unsigned long long dividend = magnitude(x), divisor = magnitude(y);
  const unsigned long long quotient = divide_bits(dividend, divisor);
  const bool negative = (x < 0) != (y < 0);
  const unsigned long long up = negative && quotient * divisor != dividend ? 1 : 0;
  return static_cast<long long>(negative ? 0 - quotient - up : quotient);
}

template <typename X, typename Y>
__device__ __forceinline__ auto floor_divide(X x, Y y) {
  if constexpr (sizeof(x + y) == sizeof(int)) {
    const int quotient = x / y;
    return quotient - (quotient * y != x && (x < 0) != (y < 0) ? 1 : 0);
  } else {
    return floor_divide_long(x, y);
  }
}

template <typename X, typename Y>
__device__ __forceinline__ auto remainder(X x, Y y) {
  return x - floor_divide(x, y) * y;
}

// Shifts, by other numbers of bits than an integer has as in NumPy.
__device__ __forceinline__ long long left_shift(long long x, long long bits) {
  const auto moved = static_cast<unsigned long long>(x) << (bits & 63);
  return (bits & ~63LL) == 0 ? static_cast<long long>(moved) : 0;
}

template <typename X, typename Bits>
__device__ __forceinline__ X right_shift(X x, Bits bits) {
  constexpr int LAST = 8 * sizeof(X) - 1;
  return x >> (bits >= 0 && bits <= LAST ? static_cast<int>(bits) : LAST);
}

// The smaller and the larger of two numbers; NaN if either is, as in NumPy.
template <typename T>
__device__ __forceinline__ T minimum(T x, T y) {
  return x < y || x != x ? x : y;
}

template <typename T>
__device__ __forceinline__ T maximum(T x, T y) {
  return x > y || x != x ? x : y;
}

// The floor as the nearest 64-bit integer; the smallest one for NaN.
template <typename T>
__device__ __forceinline__ long long floor_to_int(T x) {
  const T edge = static_cast<T>(9223372036854775808.0);
  if (x >= -edge && x < edge) return static_cast<long long>(floor(x));
  return x > T(0) ? LARGEST_INT : SMALLEST_INT;
}
