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

// The copies of `begin_copy`, one after the other, of rows that are copied 16 bytes at a time.
template <int FIRST, int KEYS, int WIDTH, int ROW = 0>
__device__ __forceinline__ void copy_vectors(unsigned int stage_address, const Source& from,
                                             const LeafPlaces& places, int valid) {
  constexpr int PIECES = fragment::whole_columns(WIDTH) / STORED_VECTOR;
  constexpr int LANES = fragment::lanes_for(PIECES), AT_ONCE = ptx::WARP_SIZE / LANES;
  if constexpr (ROW < KEYS) {
    const int row = ROW + ptx::lane_index() / LANES, piece = ptx::lane_index() % LANES;
    // As many rows as are copied at a time lie in one half of the leaf.
    const cache::Place at = places.of<(FIRST + ROW) / ptx::WARP_SIZE>(FIRST + row);
    if (LANES == PIECES || piece < PIECES) {
      const storage_t* const source =
          from.rows.data + at.offset(from.page, from.rows.row) + STORED_VECTOR * piece;
      const int left = static_cast<int>(sizeof(storage_t)) * (WIDTH - STORED_VECTOR * piece);
      const int bytes = left < 0 ? 0 : left < 16 ? left : 16;
      const int offset = fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(row, piece);
      ptx::cp_async_partial(stage_address + offset, source, FIRST + row < valid ? bytes : 0);
    }
    copy_vectors<FIRST, KEYS, WIDTH, ROW + AT_ONCE>(stage_address, from, places, valid);
  }
}

// Starts the copy of KEYS rows of a leaf, from row FIRST on, to a stage. What lies beyond `valid`
// rows and WIDTH columns becomes 0 and is not read.
template <int FIRST, int KEYS, int WIDTH>
__device__ __forceinline__ void begin_copy(char* stage_smem, const Source& from,
                                           const LeafPlaces& places, int valid) {
  if (from.rows.vectors) {
    copy_vectors<FIRST, KEYS, WIDTH>(ptx::shared_address(stage_smem), from, places, valid);
    return;
  }
  constexpr int COLUMNS = fragment::whole_columns(WIDTH);
#pragma unroll 1
  for (int row = 0; row < KEYS; ++row) {
    const cache::Place at = FIRST + row < ptx::WARP_SIZE ? places.of<0>(FIRST + row)
                                                         : places.of<1>(FIRST + row);
    const storage_t* const source = from.rows.data + at.offset(from.page, from.rows.row);
#pragma unroll 1
    for (int column = ptx::lane_index(); column < COLUMNS; column += ptx::WARP_SIZE) {
      const int offset = fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(
          row, column / STORED_VECTOR);
      reinterpret_cast<storage_t*>(stage_smem + offset)[column % STORED_VECTOR] =
          FIRST + row < valid && column < WIDTH ? source[column * from.rows.col] : storage_t(0);
    }
  }
}

// A row of a task's queries.
struct QueryRow {
  const storage_t* data;  // null: there is no such row

  __device__ __forceinline__ QueryRow(const Params& p, const decode::Task& task, int row)
      : data(nullptr) {
    if (row < task.rows) {
      data = reinterpret_cast<const storage_t*>(p.q.data) +
             layout::offset(p.q, task.entry, task.head_of(row), false) +
             task.query_of(row) * p.q.row;
    }
  }
  // Two elements from `column` on, each times the sign whose bit `sign` is.
  __device__ __forceinline__ unsigned int pair(int column, long long step,
                                               unsigned int sign) const {
    unsigned int low = 0, high = 0;
    if (data != nullptr && column < D) low = data[column * step] ^ sign;
    if (data != nullptr && column + 1 < D) high = data[(column + 1) * step] ^ sign;
    return low | high << 16;
  }
};

// Loads a task's queries as the left operand of a product: into registers, or into 16 rows of shared
// memory that only this warp uses.
template <bool IN_REGISTERS>
__device__ __forceinline__ void load_queries(const Params& p, const decode::Task& task,
                                             unsigned int sign, fragment::Left<D, IN_REGISTERS>& q,
                                             char* q_smem) {
  if constexpr (IN_REGISTERS) {
    const QueryRow rows[2] = {QueryRow(p, task, fragment::lane_row()),
                              QueryRow(p, task, fragment::lane_row() + 8)};
#pragma unroll
    for (int step = 0; step < fragment::whole_columns(D) / 16; ++step) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int column = 16 * step + fragment::lane_column() + x / 2 * 8;
        q.registers[step][0][x] = rows[x % 2].pair(column, p.q.col, sign);
      }
    }
  } else {
    constexpr int PAIRS = fragment::whole_columns(D) / 2;
    __syncwarp();  // the queries before, read by all lanes
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const QueryRow from(p, task, row);
#pragma unroll 1
      for (int pair = ptx::lane_index(); pair < PAIRS; pair += ptx::WARP_SIZE) {
        const int at = fragment::swizzled_offset<fragment::row_bytes(D)>(row, pair / 4);
        reinterpret_cast<unsigned int*>(q_smem + at)[pair % 4] =
            from.pair(2 * pair, p.q.col, sign);
      }
    }
    __syncwarp();  // the queries, written by all lanes
  }
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
