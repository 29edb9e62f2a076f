// A warp's rows between global memory and its own stages in shared memory: queries of several heads,
// keys and values of a leaf. The twin of reference/cpu/memory.py for decode_sm80.cu.
#pragma once
#include "../common/decode_cursor.cuh"
#include "fragment.cuh"

namespace decode_rows {

// Where the rows of a leaf lie; of a cache in pages lane n knows those of keys n and 32 + n.
struct LeafPlaces {
  int first;
  cache::Place at[PAGED ? 2 : 1];

  __device__ __forceinline__ LeafPlaces(const Params& p, const decode::Leaf& leaf, long long b)
      : first(static_cast<int>(leaf.first_key())) {
    if constexpr (PAGED) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = ptx::lane_index() + half * ptx::WARP_SIZE;
        at[half] = key < leaf.keys ? cache::place(p, b, leaf.first_key() + key) : cache::Place{0, 0};
      }
    }
  }
  // The place of a row of half HALF of the leaf. All lanes call it together.
  template <int HALF>
  __device__ __forceinline__ cache::Place of(int row) const {
    if constexpr (PAGED) {
      const int lane = row % ptx::WARP_SIZE;
      return cache::Place{ptx::shuffle(at[HALF].page, lane), ptx::shuffle(at[HALF].row, lane)};
    } else {
      return cache::Place{0, first + row};
    }
  }
};

// Keys or values of a head of an entry.
struct Source {
  memory::Rows rows;
  long long page;

  __device__ __forceinline__ Source(const Operand& operand, const decode::Task& task,
                                    long long page_step)
      : rows(memory::rows(operand, task.entry, task.head_kv, true)), page(page_step) {
    rows.vectors = rows.vectors && page % STORED_VECTOR == 0;
  }
};

// Starts the copy of KEYS rows of a leaf, from row FIRST on, to a stage. What lies beyond `valid`
// rows and WIDTH columns becomes 0 and is not read. STEP counts
// the rows that were copied before.
template <int FIRST, int KEYS, int WIDTH, int STEP = 0>
__device__ __forceinline__ void begin_copy(char* stage_smem, const Source& from,
                                           const LeafPlaces& places, int valid) {
  constexpr int PIECES = fragment::whole_columns(WIDTH) / STORED_VECTOR;
  constexpr int LANES = fragment::lanes_for(PIECES), AT_ONCE = ptx::WARP_SIZE / LANES;
  if constexpr (STEP * AT_ONCE < KEYS) {
    const int row = STEP * AT_ONCE + ptx::lane_index() / LANES, piece = ptx::lane_index() % LANES;
    // As many rows as are copied at a time lie in one half of the leaf.
    const cache::Place at =
        places.of<(FIRST + STEP * AT_ONCE) / ptx::WARP_SIZE>(FIRST + row);
    if (LANES == PIECES || piece < PIECES) {
      const storage_t* const source = from.rows.data + at.offset(from.page, from.rows.row) +
                                      STORED_VECTOR * piece * from.rows.col;
      const int left = WIDTH - STORED_VECTOR * piece;
      const int columns = FIRST + row < valid ? left < STORED_VECTOR ? left : STORED_VECTOR : 0;
      char* const target_smem =
          stage_smem + fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(row, piece);
      if (from.rows.vectors) {
        ptx::cp_async_partial(ptx::shared_address(target_smem), source,
                              columns < 0 ? 0 : static_cast<int>(sizeof(storage_t)) * columns);
      } else {
#pragma unroll 1
        for (int x = 0; x < STORED_VECTOR; ++x) {
          reinterpret_cast<storage_t*>(target_smem)[x] =
              x < columns ? source[x * from.rows.col] : storage_t(0);
        }
      }
    }
    begin_copy<FIRST, KEYS, WIDTH, STEP + 1>(stage_smem, from, places, valid);
  }
}

// Element `column` of a task's query row, 0 where there is none; negated by `sign`.
__device__ __forceinline__ storage_t query(const Params& p, const decode::Task& task, int row,
                                           int column, storage_t sign) {
  if (row >= task.rows || column >= D) return 0;
  const storage_t* const data =
      reinterpret_cast<const storage_t*>(p.q.data) +
      layout::offset(p.q, task.entry, task.head_of(row), false) +
      task.query_of(row) * p.q.row + column * p.q.col;
  return *data ^ sign;
}

// Loads a task's queries as the left operand of a product.
__device__ __forceinline__ void load_queries(const Params& p, const decode::Task& task,
                                             storage_t sign, fragment::Left<D, true>& q) {
#pragma unroll
  for (int step = 0; step < fragment::whole_columns(D) / 16; ++step) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int row = fragment::lane_row() + x % 2 * 8;
      const int column = 16 * step + fragment::lane_column() + x / 2 * 8;
      const unsigned int low = query(p, task, row, column, sign);
      const unsigned int high = query(p, task, row, column + 1, sign);
      q.registers[step][0][x] = low | high << 16;
    }
  }
}

// The same through shared memory that only this warp uses, 16 rows.
__device__ __forceinline__ void load_queries(const Params& p, const decode::Task& task,
                                             storage_t sign, char* q_smem) {
  constexpr int WIDTH = fragment::whole_columns(D);
  __syncwarp();  // the queries before, read by all lanes
#pragma unroll 1
  for (int n = ptx::lane_index(); n < 16 * WIDTH; n += ptx::WARP_SIZE) {
    const int row = n / WIDTH, column = n % WIDTH;
    const int at = fragment::swizzled_offset<fragment::row_bytes(D)>(row, column / STORED_VECTOR);
    reinterpret_cast<storage_t*>(q_smem + at)[column % STORED_VECTOR] =
        query(p, task, row, column, sign);
  }
  __syncwarp();  // the queries, written by all lanes
}

// The words of a stage's rows that a lane looks at.
template <int KEYS, int WIDTH, class Function>
__device__ __forceinline__ void for_words(char* stage_smem, const Function& function) {
  constexpr int WORDS = fragment::whole_columns(WIDTH) / 2;
#pragma unroll 4
  for (int n = ptx::lane_index(); n < KEYS * WORDS; n += ptx::WARP_SIZE) {
    const int row = n / WORDS, word = n % WORDS;
    const int at = fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(row, word / 4);
    function(reinterpret_cast<unsigned int*>(stage_smem + at)[word % 4]);
  }
}

// Whether all elements of a stage are finite. All lanes call it together.
template <int KEYS, int WIDTH>
__device__ __forceinline__ bool is_finite(char* stage_smem) {
  unsigned int carried = 0;
  for_words<KEYS, WIDTH>(stage_smem, [&](unsigned int word) {
    carried |= (word & fragment::EXPONENTS) + fragment::LAST;
  });
  return !ptx::any_lane((carried & fragment::SIGNS) != 0);
}

// Sets to 0 what is not finite.
template <int KEYS, int WIDTH>
__device__ __forceinline__ void clear_nonfinite(char* stage_smem) {
  for_words<KEYS, WIDTH>(stage_smem, [](unsigned int& word) {
    const unsigned int carried = (word & fragment::EXPONENTS) + fragment::LAST;
    if (carried & 0x8000u) word &= 0xffff0000u;
    if (carried & 0x80000000u) word &= 0x0000ffffu;
  });
}

}  // namespace decode_rows
