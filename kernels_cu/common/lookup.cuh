// Arrays that masks and scores read, and the arithmetic of their expressions that C++ does not
// have: the twin of the reading and integer steps of reference/cpu/program.py.
#pragma once
#include "../ptx/multiply.cuh"
#include "../ptx/warp.cuh"
#include "number.cuh"

// A range of more elements than this is not looked at: its bounds are those of the type.
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
__device__ __forceinline__ long long load_as_int(const char* place) {
  const auto value = *reinterpret_cast<const typename Integer<KIND>::type*>(place);
  return KIND == KIND_BOOL ? value != 0 : value;  // a view of other bytes as bool holds more than 1
}

// How many bytes an element lies from the first one. Where indices have 32 bits, so have strides.
__device__ __forceinline__ long long apart(long long index, long long stride) {
  return index * stride;
}
__device__ __forceinline__ long long apart(int index, long long stride) {
  return ptx::multiply_wide(index, static_cast<int>(stride));
}

template <typename... Index>
__device__ __forceinline__ const char* place(const Table& table, Index... index) {
  const char* at = table.data;
  int axis = 0;
  ((at += apart(index, table.strides[axis++])), ...);
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

  // How many rows there are, none where there are too many elements; and where one begins.
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

__device__ __forceinline__ void take_in(IntEnds& found, long long value) {
  found.low = value < found.low ? value : found.low;
  found.high = value > found.high ? value : found.high;
}

// Takes in what lies side by side from a 16-byte boundary to another: every `step`-th piece of 16
// bytes from number `own` on, a few at a time.
template <int KIND, typename Wide>
__device__ __forceinline__ void take_pieces(const char* row, int length, int own, int step,
                                            Wide& low, Wide& high) {
  using T = typename Integer<KIND>::type;
  constexpr int EACH = 16 / sizeof(T), AT_ONCE = 4;
  struct alignas(16) Piece {
    T x[EACH];
  };
  const int pieces = length / EACH;
#pragma unroll 1
  for (int from = own; from < pieces; from += AT_ONCE * step) {
    Piece some[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int at = from + n * step;
      some[n] = reinterpret_cast<const Piece*>(row)[at < pieces ? at : from];
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
      for (int x = 0; x < EACH; ++x) {
        const T value = some[n].x[x];
        const Wide one = static_cast<Wide>(KIND == KIND_BOOL ? value != 0 : value);
        low = one < low ? one : low;
        high = one > high ? one : high;
      }
    }
  }
}

// The extremes of a row of every lane: its place and length, which is 1 at least. Often all lanes
// have the same row, a tile's queries, for many tiles of keys: then they share it. Else each reads
// its own, if it can by pieces of 16 bytes; or so many lanes look at the row of one of them, and
// then at the next one's, as neighbours read neighbours. All lanes of the warp call it together.
template <int KIND>
__device__ __forceinline__ IntEnds row_extremes(const char* own, int own_length, long long stride) {
  using T = typename Integer<KIND>::type;
  using Wide = decltype(T() + T());
  constexpr Wide LEAST = Wide(-1) < Wide(0) ? Wide(1) << (8 * sizeof(Wide) - 1) : Wide(0);
  constexpr int TOGETHER = ptx::WARP_SIZE < 8 ? ptx::WARP_SIZE : 8;
  constexpr int AT_ONCE = 32 / sizeof(Wide);  // as many as registers go
  const auto place = reinterpret_cast<unsigned long long>(own);
  const unsigned long long first = ptx::shuffle(place, 0);
  const int first_length = ptx::shuffle(own_length, 0);
  const bool same = !ptx::any_lane(place != first || own_length != first_length);
  const bool whole = (place | static_cast<unsigned long long>(own_length) * sizeof(T)) % 16 == 0;
  const bool by_pieces = !ptx::any_lane(!whole || stride != sizeof(T));
  const int lane = ptx::lane_index(), group = lane / TOGETHER * TOGETHER;
  IntEnds found{0, 0};
#pragma unroll 1
  for (int n = 0; n < (same || by_pieces ? 1 : TOGETHER); ++n) {
    Wide low = ~LEAST, high = LEAST;
    if (by_pieces) {
      take_pieces<KIND>(own, own_length, same ? lane - group : 0, same ? TOGETHER : 1, low, high);
    } else {
      const auto* const row = reinterpret_cast<const char*>(ptx::shuffle(place, group + n));
      const int length = ptx::shuffle(own_length, group + n);
#pragma unroll 1
      for (int from = lane - group; from < length; from += AT_ONCE * TOGETHER) {
        Wide some[AT_ONCE];
#pragma unroll
        for (int x = 0; x < AT_ONCE; ++x) {
          const int at = from + x * TOGETHER;
          some[x] = static_cast<Wide>(load_as_int<KIND>(row + (at < length ? at : from) * stride));
        }
#pragma unroll
        for (int x = 0; x < AT_ONCE; ++x) {
          low = some[x] < low ? some[x] : low;
          high = some[x] > high ? some[x] : high;
        }
      }
    }
    if (same || !by_pieces) {
#pragma unroll
      for (int lanes = TOGETHER / 2; lanes > 0; lanes /= 2) {
        const Wide least = ptx::shuffle_xor(low, lanes), most = ptx::shuffle_xor(high, lanes);
        low = least < low ? least : low;
        high = most > high ? most : high;
      }
    }
    if (same || by_pieces || lane == group + n) found = IntEnds{low, high};
  }
  return found;
}

// The smallest and the largest integer of a range; the ends of their type where there are too many
// to look at. All lanes of the warp call it together.
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
  IntEnds found{LARGEST_INT, SMALLEST_INT};
#pragma unroll 1
  for (int n = 0; n < range.rows(); ++n) {
    const char* at = range.row(n);
#pragma unroll 1
    for (int x = 0; x < columns; ++x, at += stride) take_in(found, load_as_int<KIND>(at));
  }
  return found;
}

// NaN where one of the elements is, or where there are too many to look at.
template <typename T, int KIND, int AXES>
__device__ __forceinline__ FloatEnds<T> float_extremes(const Table& table, const long long* ends) {
  const Range<AXES> range(table, ends);
  const T infinite = static_cast<T>(number::infinity());
  const T unknown = infinite - infinite;
  if (range.count > RANGE_LIMIT) return FloatEnds<T>{unknown, unknown};
  FloatEnds<T> found{infinite, -infinite};
#pragma unroll 1
  for (int n = 0; n < range.rows(); ++n) {
    const char* at = range.row(n);
#pragma unroll 1
    for (int x = 0; x < range.length[AXES - 1]; ++x, at += table.strides[AXES - 1]) {
      const T value = number::load<T>(at, KIND, 0);
      if (value != value) return FloatEnds<T>{value, value};
      found.low = value < found.low ? value : found.low;
      found.high = value > found.high ? value : found.high;
    }
  }
  return found;
}

}  // namespace lookup

// What generated code calls. Indices come one per axis, ranges as all first and then all last ones.

template <int KIND, typename... Index>
__device__ __forceinline__ long long lookup_int(const Table& table, Index... index) {
  return lookup::load_as_int<KIND>(lookup::place(table, index...));
}

template <typename T, int KIND, typename... Index>
__device__ __forceinline__ T lookup_float(const Table& table, Index... index) {
  return number::load<T>(lookup::place(table, index...), KIND, 0);
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

// Divides numbers that are not negative. A loop over bits where they are long: the compiler's own
// division is a function, and around calls products of warpgroups do not overlap.
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

// Division as Python has it: rounded down, the remainder with the divisor's sign.
__device__ __forceinline__ long long floor_divide_long(long long x, long long y) {
  const auto magnitude = [](long long of) {
    const auto bits = static_cast<unsigned long long>(of);
    return of < 0 ? 0 - bits : bits;
  };
  const unsigned long long own = magnitude(x), by = magnitude(y);
  const unsigned long long quotient = divide_bits(own, by);
  const bool negative = (x < 0) != (y < 0);
  const unsigned long long up = negative && quotient * by != own ? 1 : 0;
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
