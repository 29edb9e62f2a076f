// Rows of a cache as numbers: its elements, or codes with their scales, each product rounded once:
// the twin of reference/cpu/codes.py.
#pragma once
#include "cache.cuh"
#include "code.cuh"

namespace cache {

constexpr int INT4_GROUP = 32;  // columns that share a scale, where a row has several

// Keys or values.
struct Side {
  const Operand& rows;
  const Operand& scales;
  long long page, scale_page;  // elements between pages
};
__device__ __forceinline__ Side keys(const Params& p) {
  return Side{p.k, p.k_scale, p.k_page, p.k_scale_page};
}
__device__ __forceinline__ Side values(const Params& p) {
  return Side{p.v, p.v_scale, p.v_page, p.v_scale_page};
}

template <int FORMAT>
struct CachedRow {
  const unsigned char* bytes;
  const float* scales;
  long long col, group;

  __device__ __forceinline__ accum_t operator[](int d) const {
    constexpr int BITS = code::Format<FORMAT>::BITS, IN_BYTE = 8 / BITS;
    const unsigned int byte = bytes[d / IN_BYTE * col];
    const float scale = scales[IN_BYTE > 1 ? d / INT4_GROUP * group : 0];
    return code::product(scale, code::value<FORMAT>(byte >> d % IN_BYTE * BITS));
  }
};
template <>
struct CachedRow<NUMBERS> {
  const storage_t* elements;
  long long col;

  __device__ __forceinline__ accum_t operator[](int d) const {
    return number::widen(elements[d * col]);
  }
};

// The rows of a head of an entry.
template <int FORMAT>
class Head {
 public:
  __device__ __forceinline__ Head(const Side& side, const storage_t* const&,
                                  const layout::Entry& entry, long long head)
      : side_(side),
        bytes_(reinterpret_cast<const unsigned char*>(side.rows.data) +
               layout::offset(side.rows, entry, head, true)),
        scales_(reinterpret_cast<const float*>(side.scales.data) +
                layout::offset(side.scales, entry, head, true)) {}

  __device__ __forceinline__ CachedRow<FORMAT> row(const Place& at) const {
    return CachedRow<FORMAT>{bytes_ + at.offset(side_.page, side_.rows.row),
                             scales_ + at.offset(side_.scale_page, side_.scales.row),
                             side_.rows.col, side_.scales.col};
  }

 private:
  const Side side_;
  const unsigned char* bytes_;
  const float* scales_;
};
template <>
class Head<NUMBERS> {
 public:
  // `first` is row 0, or that of page 0; it may stay in shared memory, since registers are few.
  __device__ __forceinline__ Head(const Side& side, const storage_t* const& first,
                                  const layout::Entry&, long long)
      : side_(side), first_(first) {}

  __device__ __forceinline__ CachedRow<NUMBERS> row(const Place& at) const {
    return CachedRow<NUMBERS>{first_ + at.offset(side_.page, side_.rows.row), side_.rows.col};
  }

 private:
  const Side side_;
  const storage_t* const& first_;
};

}  // namespace cache
