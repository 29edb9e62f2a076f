// Which block of which head and batch entry a thread block computes, and the offsets of its rows in
// global memory: the twin of reference/cpu/layout.py.
#pragma once
#include "../ptx/warp.cuh"
#include "long_sequences.cuh"
#include "number.cuh"

namespace layout {

// A batch entry; in packed arrays, a sequence.
struct Entry {
  long long b;               // flat index over the broadcast leading axes
  long long lead[MAX_LEAD];  // its index along each of them
  long long len_q;
  long long len_k;
  long long start_q;  // first packed row; 0 otherwise
  long long start_k;
};

// The part of an output that a thread block computes: a block of rows of one head of one entry.
struct WorkTile {
  Entry entry;
  long long head;
  long long block;
  bool idle;  // packed: block numbers are an upper bound, so this one may not exist
};

__device__ __forceinline__ long long clamp(long long x, long long low, long long high) {
  return x < low ? low : x > high ? high : x;
}

struct Quotient {
  long long quotient, remainder;
};

// Division of non-negative numbers. Most fit in 32 bits, where division is far cheaper.
__device__ __forceinline__ Quotient divide(long long number, long long divisor) {
  if (divisor == 1) return Quotient{number, 0};
  if ((number | divisor) >> 32 == 0) {
    const unsigned int small = static_cast<unsigned int>(number);
    const unsigned int small_divisor = static_cast<unsigned int>(divisor);
    return Quotient{small / small_divisor, small % small_divisor};
  }
  return Quotient{number / divisor, number % divisor};
}

// Fills in an entry whose indices along the leading axes are set. Packed offsets come from the
// device unchecked, so they are clamped to the arrays. Only the queries of a cache are packed.
__device__ __forceinline__ void complete(const Params& p, Entry& entry) {
  entry.b = 0;
#pragma unroll
  for (int axis = 0; axis < MAX_LEAD; ++axis) {
    entry.b = entry.b * p.lead_size[axis] + entry.lead[axis];
  }
  if constexpr (PACKED && CACHED) {
    entry.start_q = clamp(p.offsets_q[entry.b], 0, p.total_q);
    entry.start_k = 0;
    entry.len_q = clamp(p.offsets_q[entry.b + 1], entry.start_q, p.total_q) - entry.start_q;
    entry.len_q = clamp(entry.len_q, 0, p.len_q);
    entry.len_k = p.len_k;
  } else if constexpr (PACKED) {
    entry.start_q = clamp(p.offsets_q[entry.b], 0, p.total_q);
    entry.start_k = clamp(p.offsets_k[entry.b], 0, p.total_k);
    entry.len_q = clamp(p.offsets_q[entry.b + 1], entry.start_q, p.total_q) - entry.start_q;
    entry.len_k = clamp(p.offsets_k[entry.b + 1], entry.start_k, p.total_k) - entry.start_k;
    entry.len_q = clamp(entry.len_q, 0, p.len_q);
    entry.len_k = clamp(entry.len_k, 0, p.len_k);
  } else {
    entry.start_q = 0;
    entry.start_k = 0;
    entry.len_q = p.len_q;
    entry.len_k = p.len_k;
  }
}

// The output of a launch may be broadcast along leading axes (own_size 1), so that several batch
// entries share one slice of it. This is the first entry that shares slice number `slice`.
__device__ __forceinline__ Entry first_entry(const Params& p, long long slice) {
  Entry entry;
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    entry.lead[axis] = 0;
    if (p.own_size[axis] > 1) {
      const Quotient rest = divide(slice, p.own_size[axis]);
      entry.lead[axis] = rest.remainder;
      slice = rest.quotient;
    }
  }
  complete(p, entry);
  return entry;
}

// The slices of the output.
__device__ __forceinline__ long long slices(const Params& p) {
  long long count = 1;
#pragma unroll
  for (int axis = 0; axis < MAX_LEAD; ++axis) count *= p.own_size[axis];
  return count;
}

// How many batch entries share each slice of the output.
__device__ __forceinline__ long long entries_sharing(const Params& p) {
  long long count = 1;
#pragma unroll
  for (int axis = 0; axis < MAX_LEAD; ++axis) {
    if (p.own_size[axis] != p.lead_size[axis]) count *= p.lead_size[axis];
  }
  return count;
}

// Entry `number` of those that share a slice with `first`, in the order of b.
__device__ __forceinline__ Entry shared_entry(const Params& p, const Entry& first,
                                              long long number) {
  Entry entry = first;
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    if (p.own_size[axis] != p.lead_size[axis]) {
      entry.lead[axis] = number % p.lead_size[axis];
      number /= p.lead_size[axis];
    }
  }
  complete(p, entry);
  return entry;
}

// The first block number of packed sequence b. It has at least as many numbers as blocks, and all
// sequences have total / block + batch.
__device__ __forceinline__ long long first_slot(const long long* offsets, long long total,
                                                int block, long long b) {
  return clamp(offsets[b], 0, total) / block + b;
}

// The packed sequence to which block number `slot` belongs.
__device__ __forceinline__ long long sequence_of(const Params& p, const long long* offsets,
                                                 long long total, int block, long long slot) {
  long long low = 0, high = p.batch - 1;
  while (low < high) {
    const long long middle = (low + high + 1) / 2;
    if (first_slot(offsets, total, block, middle) <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The same by the lanes of a warp, which call it together: each step asks for 32 sequences.
// Launches have fewer than 2^31 blocks, and so many rows that TMA can load.
__device__ __forceinline__ int sequence_of_by_warp(const Params& p, const long long* offsets,
                                                   long long total, int block, int slot) {
  int low = 0, high = static_cast<int>(p.batch) - 1;
#pragma unroll 1
  while (low < high) {
    const int step = (high - low + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE;
    const int b = low + step * (ptx::lane_index() + 1), known = b < high ? b : high;
    const int first = static_cast<int>(clamp(offsets[known], 0, total)) / block + known;
    low += step * __popc(ptx::ballot(b <= high && first <= slot));
    high = high < low + step - 1 ? high : low + step - 1;
  }
  return low;
}

// A packed sequence and a block of its rows.
struct BlockOfSequence {
  long long b, block;
};

// Those of block number `slot`. With COUNTS, all lanes of a warp call it together; and if there are
// as many blocks as all sequences would have if they were as long as the longest one, nothing is
// searched.
template <bool COUNTS>
__device__ __forceinline__ BlockOfSequence block_of_sequence(const Params& p, bool of_keys,
                                                             int block, long long slot) {
  const long long* offsets = of_keys ? p.offsets_k : p.offsets_q;
  const long long total = of_keys ? p.total_k : p.total_q;
  long long b = 0;
  if constexpr (COUNTS) {
    const long long each = ((of_keys ? p.len_k : p.len_q) + block - 1) / block;
    if (p.blocks == p.batch * each) {
      const Quotient by_sequence = divide(slot, each);
      return BlockOfSequence{by_sequence.quotient, by_sequence.remainder};
    }
    b = sequence_of_by_warp(p, offsets, total, block, static_cast<int>(slot));
  } else {
    b = sequence_of(p, offsets, total, block, slot);
  }
  return BlockOfSequence{b, slot - first_slot(offsets, total, block, b)};
}

// Where ONLY_LONG: those of block number `slot` among the blocks of sequences that are listed; no
// block if it is beyond them. All lanes of a warp call it together.
__device__ __forceinline__ BlockOfSequence block_of_long(const Params& p, bool of_keys, int block,
                                                         long long slot) {
  using namespace long_sequences;
  if (slot >= blocks(p, of_keys, block)) return BlockOfSequence{0, -1};
  const int count = list(p)[COUNT];
  const int* const first_row = first_rows(p, of_keys);
  int low = 0, high = count - 1;
#pragma unroll 1
  while (low < high) {
    const int step = (high - low + ptx::WARP_SIZE - 1) / ptx::WARP_SIZE;
    const int n = low + step * (ptx::lane_index() + 1), known = n < high ? n : high;
    const int first = first_row[known] / block + known;
    low += step * __popc(ptx::ballot(n <= high && first <= slot));
    high = high < low + step - 1 ? high : low + step - 1;
  }
  return BlockOfSequence{numbers(p)[low], slot - (first_row[low] / block + low)};
}

// The work tile of thread block `number`, for an output of `heads` heads. With `last_first`, blocks
// of rows are assigned in descending order: under a causal mask the last queries see most keys.
// COUNTS: whether the grid is one of cupyflash/gpu/kernels/grid.py that counts blocks of packed
// sequences by the longest one, where that gives fewer.
template <bool COUNTS = false>
__device__ __forceinline__ WorkTile work_tile_of(const Params& p, long long number, int heads,
                                                 bool of_keys, int block, bool last_first) {
  WorkTile work;
  const Quotient by_block = divide(number, p.blocks);
  const long long slot = last_first ? p.blocks - 1 - by_block.remainder : by_block.remainder;
  const Quotient by_head = divide(by_block.quotient, heads);
  work.head = by_head.remainder;
  if constexpr (PACKED) {
    const BlockOfSequence own = ONLY_LONG ? block_of_long(p, of_keys, block, slot)
                                          : block_of_sequence<COUNTS>(p, of_keys, block, slot);
    work.entry = first_entry(p, own.b);
    work.block = own.block;
  } else {
    work.entry = first_entry(p, by_head.quotient);
    work.block = slot;
  }
  const long long length = of_keys ? work.entry.len_k : work.entry.len_q;
  work.idle = work.block < 0 || work.block * block >= length;
  return work;
}

// Head-interleaved order: permutes block numbers so that groups of `most` heads are interleaved,
// first all their first blocks of rows, then all their second ones. Under a causal mask the work of
// a head falls from its first block of keys to its last, so the long blocks start first and no SM
// is idle at the end.
__device__ __forceinline__ unsigned int interleave_heads(const Params& p, unsigned int number,
                                                         unsigned int heads, unsigned int most) {
  if constexpr (!PACKED) {
#pragma unroll
    for (int axis = 0; axis < MAX_LEAD; ++axis) {
      heads *= static_cast<unsigned int>(p.own_size[axis]);
    }
  }
  const unsigned int blocks = static_cast<unsigned int>(p.blocks);
  const unsigned int first = number / (blocks * most) * most;
  const unsigned int interleaved = heads - first < most ? heads - first : most;
  const unsigned int rank = number - first * blocks;
  return (first + rank % interleaved) * blocks + rank / interleaved;
}

// The same under a mask, for kernels that multiply with scalar instructions. These take so long for
// a tile that its rows need not be in L2, so that many heads are interleaved.
__device__ __forceinline__ unsigned int interleave_many_heads(const Params& p, unsigned int number,
                                                              int heads) {
  constexpr unsigned int MOST_HEADS = 64;
  if (!HAS_MASK || PACKED) return number;
  return interleave_heads(p, number, static_cast<unsigned int>(heads), MOST_HEADS);
}

// A part of a sum of `count` terms, of p.tasks parts that as many blocks compute at the same time.
// Parts are the slowest axis of a launch's blocks, and of what they write, which has no gaps.
struct PartOfSum {
  long long number, begin, end;  // its terms

  __device__ __forceinline__ PartOfSum(const Params& p, long long number, long long count)
      : number(number) {
    const long long each = (count + p.tasks - 1) / p.tasks;
    begin = clamp(number * each, 0, count);
    end = clamp(begin + each, 0, count);
  }
};

// Where HAS_PARTS: the part of thread block `number` of a launch for blocks of keys.
__device__ __forceinline__ long long part_of_keys(const Params& p, unsigned int number) {
  return divide(number, p.blocks * p.heads_kv * slices(p)).quotient;
}

// The elements between the start of dk or dv and a part of it.
__device__ __forceinline__ long long part_offset(const Params& p, const Operand& operand,
                                                 long long part) {
  if constexpr (!HAS_PARTS) return 0;
  return part * slices(p) * p.heads_kv * operand.head;
}

// How many heads fill a GPU with their blocks.
__device__ __forceinline__ unsigned int heads_in_flight(const Params& p) {
  constexpr unsigned int BLOCKS = 256;
  const unsigned int blocks = static_cast<unsigned int>(p.blocks);
  return blocks < BLOCKS ? BLOCKS / blocks : 1;
}

// Head-interleaved order for blocks of keys. Blocks add to dq in global memory, and the sums of all
// heads in flight should stay in L2: so at most 16 heads are interleaved, and without a mask none.
__device__ __forceinline__ unsigned int interleave_heads(const Params& p, unsigned int number) {
  constexpr unsigned int MOST_HEADS = 16;
  if (!HAS_MASK) return number;
  const unsigned int heads = static_cast<unsigned int>(p.heads_kv), most = heads_in_flight(p);
  const unsigned int parts = HAS_PARTS ? static_cast<unsigned int>(p.tasks) : 1;
  return interleave_heads(p, number, heads * parts, most < MOST_HEADS ? most : MOST_HEADS);
}

// Elements between the start of an array and an entry's slice of the leading axes.
__device__ __forceinline__ long long lead_offset(const Operand& operand, const Entry& entry) {
  long long elements = 0;
#pragma unroll
  for (int axis = 0; axis < MAX_LEAD; ++axis) elements += entry.lead[axis] * operand.lead[axis];
  return elements;
}

// Elements between the start of an array and row 0 of an entry's head.
__device__ __forceinline__ long long offset(const Operand& operand, const Entry& entry,
                                            long long head, bool of_keys) {
  long long elements = head * operand.head;
  if (PACKED && !(CACHED && of_keys)) {
    elements += (of_keys ? entry.start_k : entry.start_q) * operand.row;
  } else {
    elements += lead_offset(operand, entry);
  }
  return elements;
}

// The float32 sums of dq are stored in groups of 8 rows; in a packed array every sequence begins
// with a new group.
constexpr int GROUP_ROWS = 8;

// `offset` for those sums: elements to the group of row 0.
__device__ __forceinline__ long long grouped_offset(const Operand& operand, const Entry& entry,
                                                    long long head) {
  long long elements = head * operand.head;
  if constexpr (PACKED) {
    elements += (entry.start_q / GROUP_ROWS + entry.b) * GROUP_ROWS * operand.row;
  } else {
    elements += lead_offset(operand, entry);
  }
  return elements;
}

}  // namespace layout
