// Converts numbers to codes with a scale for each group of columns, or for many rows: the twin of
// reference/cpu/quantize.py. `lanes` neighbouring lanes of a warp convert a group, 8 columns a lane
// at a time.
//
// Rows that share a scale have three launches: one for each scale, with a group of no columns, sets
// it to the least one; every row then raises it to its own (RAISE); every row is converted (SHARE).
// The scale of the largest magnitude is the largest scale, and positive numbers compare as their
// bits do: infinity is larger than all numbers, and NaN larger than infinity.
//
// Grid: the groups of all rows, THREADS / lanes to a block. Shared memory: none.
#include "../common/params.cuh"
#include "../ptx/red.cuh"
#include "../ptx/warp.cuh"
#include "../common/number.cuh"
#include "../common/code.cuh"
#include "../common/layout.cuh"

namespace {

constexpr int CHUNK = 8;             // columns of a lane, at a time
constexpr int RAISE = 1, SHARE = 2;  // `sharing` where rows share a scale, as in gpu/rowwise.py

// Where a group is, in elements of its arrays.
struct Group {
  const storage_t* x;
  unsigned char* codes;
  float* scale;
  long long col;        // of x
  long long code_step;  // from a byte of codes to the next
};

__device__ __forceinline__ Group group_of(const QuantizeParams& p, long long index,
                                          long long bytes) {
  const layout::Quotient by_row = layout::divide(index, p.groups);
  const long long group = by_row.remainder;
  long long row = by_row.quotient, x = 0, codes = 0, scale = 0;
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    const layout::Quotient rest = layout::divide(row, p.lead_size[axis]);
    x += rest.remainder * p.x.lead[axis];
    codes += rest.remainder * p.codes.lead[axis];
    scale += rest.remainder * p.scale.lead[axis];
    row = rest.quotient;
  }
  return Group{reinterpret_cast<const storage_t*>(p.x.data) + x + group * p.columns * p.x.col,
               reinterpret_cast<unsigned char*>(p.codes.data) + codes + group * bytes * p.codes.col,
               reinterpret_cast<float*>(p.scale.data) + scale + group * p.scale.col, p.x.col,
               p.codes.col};
}

template <typename T>
__device__ __forceinline__ bool is_aligned(const void* address) {
  return reinterpret_cast<unsigned long long>(address) % sizeof(T) == 0;
}

// Loads columns from c on; those that are not there are 0.
__device__ __forceinline__ void load(const Group& group, long long c, long long columns,
                                     accum_t (&values)[CHUNK]) {
  const storage_t* from = group.x + c * group.col;
  if (group.col == 1 && c + CHUNK <= columns && is_aligned<StoredVector>(from)) {
#pragma unroll
    for (int n = 0; n < CHUNK; n += STORED_VECTOR) {
      const StoredVector stored = *reinterpret_cast<const StoredVector*>(from + n);
#pragma unroll
      for (int m = 0; m < STORED_VECTOR; ++m) values[n + m] = number::widen(stored.x[m]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < CHUNK; ++n) {
      values[n] = c + n < columns ? number::widen(from[n * group.col]) : accum_t(0);
    }
  }
}

__device__ __forceinline__ code::word_t largest_of(const accum_t (&values)[CHUNK],
                                                   code::word_t largest) {
#pragma unroll
  for (int n = 0; n < CHUNK; ++n) {
    const code::word_t size = code::magnitude(values[n]);
    largest = size > largest ? size : largest;
  }
  return largest;
}

// Stores the codes of columns from c on.
template <int FORMAT>
__device__ __forceinline__ void store(const Group& group, long long c, long long columns,
                                      const accum_t (&values)[CHUNK],
                                      const code::Inverse& inverse) {
  constexpr int IN_BYTE = 8 / code::Format<FORMAT>::BITS, BYTES = CHUNK / IN_BYTE;
  struct alignas(BYTES) Chunk {
    unsigned char x[BYTES];
  };
  Chunk chunk;
#pragma unroll
  for (int n = 0; n < BYTES; ++n) {
    unsigned int byte = 0;
#pragma unroll
    for (int m = 0; m < IN_BYTE; ++m) {  // the first one in the low bits
      byte |= code::encode<FORMAT>(values[n * IN_BYTE + m], inverse)
              << m * code::Format<FORMAT>::BITS;
    }
    chunk.x[n] = static_cast<unsigned char>(byte);
  }
  unsigned char* to = group.codes + c / IN_BYTE * group.code_step;
  if (group.code_step == 1 && c + CHUNK <= columns && is_aligned<Chunk>(to)) {
    *reinterpret_cast<Chunk*>(to) = chunk;
  } else {
#pragma unroll
    for (int n = 0; n < BYTES; ++n) {
      if (c + n * IN_BYTE < columns) to[n * group.code_step] = chunk.x[n];
    }
  }
}

template <int FORMAT>
__device__ __forceinline__ void quantize(const QuantizeParams& p) {
  const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  const layout::Quotient by_group = layout::divide(thread, p.lanes);
  const bool is_group = by_group.quotient < p.rows;
  const long long columns = is_group ? p.columns : 0;
  const int step = p.lanes * CHUNK, own = static_cast<int>(by_group.remainder) * CHUNK;
  const Group group =
      group_of(p, is_group ? by_group.quotient : 0, p.columns * code::Format<FORMAT>::BITS / 8);

  accum_t first[CHUNK];  // most groups have no more
  load(group, own, columns, first);
  code::word_t largest = largest_of(first, 0);
#pragma unroll 1
  for (long long c = own + step; c < columns; c += step) {
    accum_t values[CHUNK];
    load(group, c, columns, values);
    largest = largest_of(values, largest);
  }
#pragma unroll 1
  for (int lanes = p.lanes / 2; lanes > 0; lanes /= 2) {
    const code::word_t other = ptx::shuffle_xor(largest, lanes);
    largest = other > largest ? other : largest;
  }

  const bool tells = is_group && own == 0;
  float scale;
  if (p.sharing == SHARE) {
    scale = *group.scale;
  } else {
    scale = code::scale_of<FORMAT>(largest);
    if (p.sharing == RAISE) {
      const unsigned int word = __float_as_uint(scale);
      // The number that is there may be an old one, which others have raised since.
      if (tells && __float_as_uint(*group.scale) < word) {
        ptx::red_max(reinterpret_cast<unsigned int*>(group.scale), word);
      }
      return;
    }
    if (tells) *group.scale = scale;
  }
  const code::Inverse inverse(scale);
  store<FORMAT>(group, own, columns, first, inverse);
#pragma unroll 1
  for (long long c = own + step; c < columns; c += step) {
    accum_t values[CHUNK];
    load(group, c, columns, values);
    store<FORMAT>(group, c, columns, values, inverse);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ QuantizeParams p) {
  if (p.format == code::INT8) {
    quantize<code::INT8>(p);
  } else if (p.format == code::E4M3) {
    quantize<code::E4M3>(p);
  } else if (p.format == code::E5M2) {
    quantize<code::E5M2>(p);
  } else {
    quantize<code::INT4>(p);
  }
}
