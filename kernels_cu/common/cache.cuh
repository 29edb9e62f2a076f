// Where the keys and values of a cache lie: the twin of reference/cpu/cache.py.
//
// Position j of batch entry b is a row of k and v itself, or one of page table[b, j / page].
// Lengths and page numbers come from the device unchecked. What is read is clamped to the arrays; a
// write to what is not there is left out, since it must not go to another entry's page.
#pragma once
#include "layout.cuh"

namespace cache {

constexpr int NUMBERS = -1;  // KEY_CODES or VALUE_CODES of keys or values that are no codes
constexpr bool HAS_CODES = KEY_CODES != NUMBERS || VALUE_CODES != NUMBERS;
// Bytes of an element: strides of codes count bytes.
template <int CODES>
constexpr int STEP = CODES == NUMBERS ? sizeof(storage_t) : 1;

// Element `index` of an array of 32-bit or 64-bit integers. `NOW`: as it is in global memory at
// this moment, whatever this multiprocessor has read before.
template <bool NOW = false>
__device__ __forceinline__ long long integer(const char* data, int kind, long long index) {
  if constexpr (NOW) {
    if (kind == KIND_INT32) return reinterpret_cast<const volatile int*>(data)[index];
    return reinterpret_cast<const volatile long long*>(data)[index];
  }
  if (kind == KIND_INT32) return reinterpret_cast<const int*>(data)[index];
  return reinterpret_cast<const long long*>(data)[index];
}

// How many positions of an entry are held.
template <bool NOW = false>
__device__ __forceinline__ long long length(const Params& p, long long b) {
  if (p.lengths == nullptr) return p.len_k;
  return layout::clamp(integer<NOW>(p.lengths, p.kind_lengths, b * p.length_step), 0, p.len_k);
}

// `length<true>` of `count` entries from b on, and 0 beyond them. All are on their way before the
// first one is used.
template <class Integer, int MOST>
__device__ __forceinline__ void load_lengths(const Params& p, long long b, int count,
                                             long long (&held)[MOST]) {
  const volatile Integer* const first =
      reinterpret_cast<const volatile Integer*>(p.lengths) + b * p.length_step;
  Integer loaded[MOST] = {};
#pragma unroll
  for (int n = 0; n < MOST; ++n) {
    if (n < count) loaded[n] = first[n * p.length_step];
  }
#pragma unroll
  for (int n = 0; n < MOST; ++n) held[n] = layout::clamp(loaded[n], 0, p.len_k);
}
template <int MOST>
__device__ __forceinline__ void lengths(const Params& p, long long b, int count,
                                        int (&keys)[MOST]) {
  long long held[MOST];
#pragma unroll
  for (int n = 0; n < MOST; ++n) held[n] = p.len_k;
  if (CACHED && p.lengths != nullptr) {
    if (p.kind_lengths == KIND_INT32) {
      load_lengths<int>(p, b, count, held);
    } else {
      load_lengths<long long>(p, b, count, held);
    }
  }
#pragma unroll
  for (int n = 0; n < MOST; ++n) keys[n] = n < count ? static_cast<int>(held[n]) : 0;
}

// A position's page, and its row there; without a table page 0 and the position.
struct Place {
  int page, row;

  // Elements between row 0 of page 0 and this row, of an array whose pages are `page_step` apart.
  __device__ __forceinline__ long long offset(long long page_step, long long row_step) const {
    return page * page_step + row * row_step;
  }
};

// What the table says of a position, which may be no page at all, and its row there.
struct TableEntry {
  long long page;
  int row;
  long long index;  // of the table's element

  __device__ __forceinline__ Place place(const Params& p) const {
    return Place{static_cast<int>(layout::clamp(page, 0, p.pages - 1)), row};
  }
};

template <bool NOW = false>
__device__ __forceinline__ TableEntry look_up(const Params& p, long long b, long long position) {
  const unsigned int j = static_cast<unsigned int>(position);
  if constexpr (!PAGED) return TableEntry{0, static_cast<int>(j), 0};
  const unsigned int size = static_cast<unsigned int>(p.page_size);
  // Sizes are powers of two as a rule, and a division takes 20 instructions.
  const bool shifts = (size & (size - 1)) == 0;
  const unsigned int number = shifts ? j >> (31 - __clz(static_cast<int>(size))) : j / size;
  const long long index = b * p.table_batch + number * p.table_step;
  return TableEntry{integer<NOW>(p.table, p.kind_table, index), static_cast<int>(j - number * size),
                    index};
}
__device__ __forceinline__ Place place(const Params& p, long long b, long long position) {
  const TableEntry entry = look_up(p, b, position);
  return PAGED ? entry.place(p) : Place{0, entry.row};
}

// Whether an entry of packed queries is one of a decode kernel, which has those with few.
__device__ __forceinline__ bool has_few_rows(const Params& p, long long len_q) {
  return len_q * p.group <= p.few_rows;
}

// The work tile of thread block `number` of a forward kernel; `layout::work_tile_of`, with what the
// device knows of a cache.
template <bool COUNTS = false>
__device__ __forceinline__ layout::WorkTile work_tile_of(const Params& p, long long number) {
  layout::WorkTile work = layout::work_tile_of<COUNTS>(p, number, p.heads, false, BLOCK_Q, true);
  if constexpr (CACHED) {
    work.entry.len_k = length(p, work.entry.b);
    if constexpr (PACKED) work.idle = work.idle || has_few_rows(p, work.entry.len_q);
  }
  return work;
}

// `length` of an entry that is written, as it came, within bounds in which sums do not overflow.
__device__ __forceinline__ long long written_length(const AppendParams& p, long long b) {
  constexpr long long MOST = 1ll << 48;
  if (p.lengths.data == nullptr) return p.length;
  return layout::clamp(integer(p.lengths.data, p.kind_lengths, b * p.lengths.row), -MOST, MOST);
}

// `place` of a position that is written; page -1 where the cache has no room for it. Without a
// table an entry is a page.
__device__ __forceinline__ Place written_place(const AppendParams& p, long long b,
                                               long long position) {
  if (position < 0 || position >= p.capacity) return Place{-1, 0};
  const layout::Quotient at = layout::divide(position, p.page_size);
  long long page = b;
  if (p.table.data != nullptr) {
    page = integer(p.table.data, p.kind_table, b * p.table.row + at.quotient * p.table.col);
  }
  if (page < 0 || page >= p.pages) return Place{-1, 0};
  return Place{static_cast<int>(page), static_cast<int>(at.remainder)};
}

}  // namespace cache
