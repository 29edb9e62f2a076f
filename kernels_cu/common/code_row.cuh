// New rows of a cache as codes, with the scales and the bits of quantize.cu. A warp has a row.
#pragma once
#include "cache_row.cuh"
#include "rotary.cuh"

namespace code {

// Where the codes of a row and its scales belong.
struct Target {
  unsigned char* bytes;
  float* scales;
  long long col, group;
};

__device__ __forceinline__ Target target(const Operand& rows, const Operand& scales,
                                         const cache::Place& at, long long head) {
  const long long row = at.page * rows.lead[MAX_LEAD - 1] + head * rows.head + at.row * rows.row;
  const long long scale =
      at.page * scales.lead[MAX_LEAD - 1] + head * scales.head + at.row * scales.row;
  return Target{reinterpret_cast<unsigned char*>(rows.data) + row,
                reinterpret_cast<float*>(scales.data) + scale, rows.col, scales.col};
}

// An element of a row whose first columns are rotated, rounded as `rotary::copy_row` does.
__device__ __forceinline__ accum_t rotated(const rotary::Row& from, const rotary::Angles& by,
                                           int column) {
  if (column >= 2 * by.pairs) return number::widen(from.data[column * from.col]);
  const int pair = by.interleaved ? column / 2 : column < by.pairs ? column : column - by.pairs;
  const int low = by.interleaved ? 2 * pair : pair;
  const int high = by.interleaved ? low + 1 : low + by.pairs;
  storage_t first = from.data[low * from.col], second = from.data[high * from.col];
  rotary::rotate(first, second, rotary::number_of(by.cos, by.wide, pair * by.cos_col),
                 rotary::number_of(by.sin, by.wide, pair * by.sin_col), by.inverse);
  return number::widen(column == low ? first : second);
}

// Writes a row as codes, if the cache has some. All lanes of the warp call it.
template <int FORMAT>
__device__ __forceinline__ bool put(const Target& to, const rotary::Row& from, int columns,
                                    const rotary::Angles& by) {
  if constexpr (FORMAT == cache::NUMBERS) {
    return false;
  } else {
    constexpr int BITS = Format<FORMAT>::BITS, IN_BYTE = 8 / BITS;
    const int lane = ptx::lane_index(), group = to.group == 0 ? columns : cache::INT4_GROUP;
    float* scales = to.scales;
#pragma unroll 1
    for (int begin = 0; begin < columns; begin += group) {
      word_t largest = 0;
#pragma unroll 1
      for (int n = lane; n < group; n += ptx::WARP_SIZE) {
        const word_t size = magnitude(rotated(from, by, begin + n));
        largest = size > largest ? size : largest;
      }
#pragma unroll 1
      for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
        const word_t other = ptx::shuffle_xor(largest, lanes);
        largest = other > largest ? other : largest;
      }
      const float scale = scale_of<FORMAT>(largest);
      if (lane == 0) *scales = scale;
      const Inverse inverse(scale);
      scales += to.group;
#pragma unroll 1
      for (int n = lane; n < group / IN_BYTE; n += ptx::WARP_SIZE) {
        unsigned int byte = 0;
#pragma unroll
        for (int m = 0; m < IN_BYTE; ++m) {  // the first one in the low bits
          byte |= encode<FORMAT>(rotated(from, by, begin + n * IN_BYTE + m), inverse) << m * BITS;
        }
        to.bytes[(begin / IN_BYTE + n) * to.col] = static_cast<unsigned char>(byte);
      }
    }
    return true;
  }
}

}  // namespace code
