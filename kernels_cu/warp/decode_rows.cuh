// A warp's rows between global memory and its own stages in shared memory: queries of several
// heads, keys and values of a leaf. The twin of reference/cpu/cache.py for decode_sm80.cu.
#pragma once
#include "../decode/cursor.cuh"
#include "fragment.cuh"
#include "fragment_codes.cuh"
#include "../ptx/prefetch.cuh"

namespace decode_rows {

// What the table says of the rows of a leaf: lane n looks up those of keys n and 32 + n.
struct LeafEntries {
  int first;
  cache::TableEntry at[PAGED ? 2 : 1];

  // Of so many keys of entry b from position `first_key` on. `NOW`: as the table is at this moment.
  template <bool NOW = false>
  __device__ __forceinline__ void look_up(const Params& p, int first_key, int keys, long long b) {
    first = first_key;
    if constexpr (PAGED) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = ptx::lane_index() + half * ptx::WARP_SIZE;
        at[half] = cache::TableEntry{0, 0, NOWHERE};
        if (key < keys) at[half] = cache::look_up<NOW>(p, b, static_cast<long long>(first) + key);
      }
    }
  }
  // What the table says of them now.
  __device__ __forceinline__ LeafEntries look_again(const Params& p) const {
    LeafEntries now = *this;
#pragma unroll
    for (int half = 0; PAGED && half < 2; ++half) {
      if (at[half].index == NOWHERE) continue;
      now.at[half].page = cache::integer<true>(p.table, p.kind_table, at[half].index);
    }
    return now;
  }
  // Whether a lane has other pages. All lanes call it together.
  __device__ __forceinline__ bool differ(const LeafEntries& other) const {
    bool same = true;
#pragma unroll
    for (int half = 0; PAGED && half < 2; ++half) {
      same = same && at[half].page == other.at[half].page;
    }
    return ptx::any_lane(!same);
  }

 private:
  static constexpr long long NOWHERE = -1;
};

// Where the rows of a leaf lie; of a cache in pages lane n knows those of keys n and 32 + n.
struct LeafPlaces {
  int first;
  cache::Place at[PAGED ? 2 : 1];

  LeafPlaces() = default;
  __device__ __forceinline__ LeafPlaces(const Params& p, const LeafEntries& entries)
      : first(entries.first) {
#pragma unroll
    for (int half = 0; PAGED && half < 2; ++half) at[half] = entries.at[half].place(p);
  }
  // Elements before the row of the lane's own key of a half of the leaf. Without pages lanes need
  // none.
  __device__ __forceinline__ long long own(int half, long long page_step,
                                           long long row_step) const {
    return PAGED ? at[PAGED ? half : 0].offset(page_step, row_step) : 0;
  }
  // Elements before the row of a key, given what its half's lanes have. All lanes call it together.
  __device__ __forceinline__ long long of(int key, long long own, long long row_step) const {
    return PAGED ? ptx::shuffle(own, key % ptx::WARP_SIZE) : (first + key) * row_step;
  }
};

// Keys or values of a task; of codes, strides count bytes.
struct Source {
  const storage_t* data;  // row 0 of its head
  long long page, row, col;

  // 16-byte copies are possible: rows are contiguous and begin at 16 bytes.
  __device__ __forceinline__ bool vectors(int whole = STORED_VECTOR) const {
    if constexpr (ALIGNED) return true;
    const long long steps = row | (PAGED ? page : 0);
    return col == 1 && steps % whole == 0 &&
           reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  }
};

// Brings a leaf's keys to the L2 cache, the first that are read. All lanes call it together.
__device__ __forceinline__ void prefetch_keys(const Source& from, const LeafPlaces& places,
                                              int keys) {
  constexpr int RUN = PAGED ? PAGE_ROWS : 16;  // neighbours in memory, if rows are contiguous
  constexpr int STEP = cache::STEP<KEY_CODES>;
  constexpr int BYTES = 2 * fragment_codes::units<KEY_CODES>(D) & ~15;
  if (BYTES == 0 || !from.vectors(16 / STEP)) return;
  // Pieces of one row each are worth it where few warps ask for them.
  constexpr bool MANY_WARPS = decode::WARPS * RESIDENT_BLOCKS > decode::FEW_WARPS;
  if (RUN == 1 ? MANY_WARPS : from.row * STEP != BYTES) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = ptx::lane_index() + half * ptx::WARP_SIZE;
    const long long row =
        PAGED ? places.own(half, from.page, from.row) : (places.first + key) * from.row;
    if (key % RUN != 0 || key >= keys) continue;
    ptx::prefetch_once(reinterpret_cast<const char*>(from.data) + STEP * row,
                       BYTES * tile::smaller(keys - key, RUN));
  }
}

// The lanes of a warp that copy a row of `WIDTH` columns 16 bytes each, and the rows at a time.
template <int WIDTH>
struct Lanes {
  static constexpr int PIECES = fragment::whole_columns(WIDTH) / STORED_VECTOR;
  static constexpr int EACH = fragment::lanes_for(PIECES);
  static constexpr int AT_ONCE = ptx::WARP_SIZE / EACH;
  static constexpr int ROW_BYTES = fragment::row_bytes(WIDTH);

  int row = ptx::lane_index() / EACH, piece = ptx::lane_index() % EACH;
  int offset = fragment::swizzled_offset<ROW_BYTES>(row, piece);

  // The offset of the lane's piece `first` rows further: AT_ONCE divides it, so that no bit of
  // `row` is one of it.
  __device__ __forceinline__ int at(int first) const {
    return (offset ^ (first % 8 << 4)) + first * ROW_BYTES;
  }
  __device__ __forceinline__ int bytes() const {
    const int left = static_cast<int>(sizeof(storage_t)) * (WIDTH - STORED_VECTOR * piece);
    return left < 0 ? 0 : left < 16 ? left : 16;
  }
};

// The copies of `begin_copy`, one after the other, of rows that are copied 16 bytes at a time.
// `own` is what the lane has of the half of the leaf in which the rows lie.
template <int FIRST, int KEYS, int WIDTH, int ROW = 0>
__device__ __forceinline__ void copy_vectors(unsigned int stage_address, const Source& from,
                                             const storage_t* source, const LeafPlaces& places,
                                             const Lanes<WIDTH>& lanes, int bytes, int left,
                                             long long own = 0) {
  if constexpr (ROW < KEYS) {
    if constexpr (PAGED) {  // as many rows as are copied at a time lie in one half of the leaf
      constexpr int KEY = FIRST + ROW;
      if (ROW == 0 || KEY % ptx::WARP_SIZE == 0) {
        own = places.own(KEY / ptx::WARP_SIZE, from.page, from.row);
      }
      if (ROW == 0 || KEY % PAGE_ROWS == 0) {
        source =
            from.data + places.of(KEY + lanes.row, own, from.row) + STORED_VECTOR * lanes.piece;
      }
    }
    if (Lanes<WIDTH>::EACH == Lanes<WIDTH>::PIECES || lanes.piece < Lanes<WIDTH>::PIECES) {
      ptx::cp_async_once(stage_address + lanes.at(ROW), source, ROW < left ? bytes : 0);
    }
    constexpr int AT_ONCE = Lanes<WIDTH>::AT_ONCE;
    copy_vectors<FIRST, KEYS, WIDTH, ROW + AT_ONCE>(
        stage_address, from, source + AT_ONCE * from.row, places, lanes, bytes, left, own);
  }
}

// begin_copy of codes: of their bytes, two to an element.
template <int CODES, int FIRST, int KEYS, int WIDTH>
__device__ __forceinline__ void begin_copy_of_codes(char* stage_smem, const Source& from,
                                                    const LeafPlaces& places, int valid) {
  constexpr int UNITS = fragment_codes::units<CODES>(WIDTH);
  constexpr int BYTES = WIDTH * fragment_codes::BITS<CODES> / 8;
  if (BYTES % 2 == 0 && from.vectors(sizeof(StoredVector))) {
    const Source halved{from.data, from.page / 2, from.row / 2, 1};
    const Lanes<UNITS> lanes;
    const storage_t* const source =
        halved.data + (places.first + FIRST + lanes.row) * halved.row + STORED_VECTOR * lanes.piece;
    copy_vectors<FIRST, KEYS, UNITS>(ptx::shared_address(stage_smem), halved, source, places, lanes,
                                     lanes.bytes(), valid - FIRST - lanes.row);
    return;
  }
  constexpr int WHOLE = fragment::whole_columns(UNITS);
  const long long own[2] = {places.own(0, from.page, from.row), places.own(1, from.page, from.row)};
#pragma unroll 1
  for (int row = 0; row < KEYS; ++row) {
    const int key = FIRST + row;
    const char* const source = reinterpret_cast<const char*>(from.data) +
                               places.of(key, own[key < ptx::WARP_SIZE ? 0 : 1], from.row);
#pragma unroll 1
    for (int n = ptx::lane_index(); n < WHOLE; n += ptx::WARP_SIZE) {
      const int at = fragment::swizzled_offset<fragment::row_bytes(UNITS)>(row, n / STORED_VECTOR);
      unsigned int unit = 0;
#pragma unroll
      for (int byte = 0; byte < 2; ++byte) {
        if (key >= valid || 2 * n + byte >= BYTES) continue;
        unit |= static_cast<unsigned char>(source[(2 * n + byte) * from.col]) << 8 * byte;
      }
      reinterpret_cast<unsigned short*>(stage_smem + at)[n % STORED_VECTOR] =
          static_cast<unsigned short>(unit);
    }
  }
}

// Loads the scales of a leaf's rows, the first of which are at `scales`: lane n has those of keys n
// and 32 + n. Beyond its keys they are 0 and are not read.
template <int GROUPS>
__device__ __forceinline__ fragment_codes::RowScales<GROUPS> load_scales(const float* scales,
                                                                         const Operand& steps,
                                                                         long long page_step,
                                                                         const decode::Leaf& leaf,
                                                                         const LeafPlaces& places) {
  fragment_codes::RowScales<GROUPS> made;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = ptx::lane_index() + half * ptx::WARP_SIZE;
    const float* const row = scales + (PAGED ? places.own(half, page_step, steps.row)
                                             : (places.first + key) * steps.row);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      made.of[half][group] = key < leaf.keys ? row[group * steps.col] : 0.0f;
    }
  }
  return made;
}

// Starts the copy of KEYS rows of a leaf, from row FIRST on, to a stage. What lies beyond `valid`
// rows and WIDTH columns becomes 0 and is not read.
template <int CODES, int FIRST, int KEYS, int WIDTH>
__device__ __forceinline__ void begin_copy(char* stage_smem, const Source& from,
                                           const LeafPlaces& places, int valid) {
  if constexpr (CODES != cache::NUMBERS) {
    begin_copy_of_codes<CODES, FIRST, KEYS, WIDTH>(stage_smem, from, places, valid);
    return;
  }
  if (from.vectors()) {
    const Lanes<WIDTH> lanes;
    const storage_t* const source =
        from.data + (places.first + FIRST + lanes.row) * from.row + STORED_VECTOR * lanes.piece;
    copy_vectors<FIRST, KEYS, WIDTH>(ptx::shared_address(stage_smem), from, source, places, lanes,
                                     lanes.bytes(), valid - FIRST - lanes.row);
    return;
  }
  constexpr int COLUMNS = fragment::whole_columns(WIDTH);
  const long long own[2] = {places.own(0, from.page, from.row), places.own(1, from.page, from.row)};
#pragma unroll 1
  for (int row = 0; row < KEYS; ++row) {
    const int key = FIRST + row;
    const storage_t* const source =
        from.data + places.of(key, own[key < ptx::WARP_SIZE ? 0 : 1], from.row);
#pragma unroll 1
    for (int column = ptx::lane_index(); column < COLUMNS; column += ptx::WARP_SIZE) {
      const int offset =
          fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(row, column / STORED_VECTOR);
      reinterpret_cast<storage_t*>(stage_smem + offset)[column % STORED_VECTOR] =
          key < valid && column < WIDTH ? source[column * from.col] : storage_t(0);
    }
  }
}

// Starts the copy of a warp's share of KEYS rows of a leaf, from row FIRST on, to a stage that
// SHARERS warps copy together. All of the rows exist, and the warp is number `sharer`.
template <int CODES, int FIRST, int KEYS, int WIDTH, int SHARERS>
__device__ __forceinline__ void begin_copy_of_share(char* stage_smem, const Source& from,
                                                    const LeafPlaces& places, int sharer) {
  constexpr int UNITS = fragment_codes::units<CODES>(WIDTH);  // of codes, two to an element
  constexpr int EACH = CODES == cache::NUMBERS ? 1 : 2;
  constexpr bool IS_WHOLE = WIDTH * fragment_codes::BITS<CODES> % 16 == 0;
  using Row = Lanes<UNITS>;
  constexpr int TIMES = KEYS / Row::AT_ONCE;
  if (!IS_WHOLE || !from.vectors(EACH * STORED_VECTOR)) {
    if (sharer == 0) begin_copy<CODES, FIRST, KEYS, WIDTH>(stage_smem, from, places, decode::LEAF);
    return;
  }
  const Row lanes;
  const unsigned int stage_address = ptx::shared_address(stage_smem);
  const long long row_step = from.row / EACH, page_step = from.page / EACH;
  const long long own[2] = {places.own(0, page_step, row_step), places.own(1, page_step, row_step)};
  const bool has_piece = Row::EACH == Row::PIECES || lanes.piece < Row::PIECES;
#pragma unroll
  for (int n = 0; n < TIMES; n += SHARERS) {
    const int row = (n + sharer) * Row::AT_ONCE, key = FIRST + row;
    if (TIMES % SHARERS != 0 && n + sharer >= TIMES) break;
    const storage_t* const source =
        from.data + places.of(key + lanes.row, own[key < ptx::WARP_SIZE ? 0 : 1], row_step) +
        STORED_VECTOR * lanes.piece;
    if (has_piece) ptx::cp_async_once(stage_address + lanes.at(row), source, lanes.bytes());
  }
}

// Row `row` of a task's queries; the first one where there is none.
__device__ __forceinline__ const storage_t* query_row(const Params& p, const decode::Task& task,
                                                      int row) {
  const int held = row < task.rows ? row : 0;
  return reinterpret_cast<const storage_t*>(p.q.data) +
         layout::offset(p.q, task.entry(), task.head_of(held), false) +
         task.query_of(held) * p.q.row;
}

// Starts the copy of a warp's queries, of one task or of several, to 16 rows of shared memory that
// only this warp uses. Rows that do not exist become 0. `entries` is the distance of the entries,
// if there are several. Without ASYNC they are there after a barrier of the warp. All lanes call it
// together.
template <bool ASYNC = KEY_CODES == cache::NUMBERS, class Rows>
__device__ __forceinline__ void begin_queries(const Params& p, const Rows& task, char* q_smem,
                                              long long entries = 0) {
  using Row = Lanes<fragment_codes::columns<KEY_CODES>(D)>;
  const Row lanes;
  const storage_t* const first = query_row(p, task, 0);
  const long long steps = p.q.row | p.q.head | entries;
  const bool vectors = Source{first, 0, steps, p.q.col}.vectors() && D % 8 == 0;
  const bool has_piece = lanes.piece < Row::PIECES;
  // Lane n finds row n, because that takes many instructions.
  const long long own = reinterpret_cast<long long>(query_row(p, task, ptx::lane_index() % 16));
  const auto source = [&](int row) {
    const long long found = ptx::shuffle(own, row);
    const bool exists = row < task.rows && has_piece && STORED_VECTOR * lanes.piece < D;
    return exists ? reinterpret_cast<const storage_t*>(found) + STORED_VECTOR * lanes.piece
                  : nullptr;
  };
  __syncwarp();  // the queries before, read by all lanes
  if (vectors && ASYNC) {
#pragma unroll 1
    for (int step = 0; step < 16; step += Row::AT_ONCE) {
      const storage_t* const piece = source(step + lanes.row);
      if (!has_piece) continue;
      ptx::cp_async(q_smem + lanes.at(step), piece == nullptr ? first : piece, piece != nullptr);
    }
  } else if (vectors) {
    constexpr int STEPS = 16 / Row::AT_ONCE;
    StoredVector pieces[STEPS];  // all on their way before the first is stored
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const storage_t* const piece = source(step * Row::AT_ONCE + lanes.row);
      pieces[step] = StoredVector{};
      if (piece != nullptr) pieces[step] = *reinterpret_cast<const StoredVector*>(piece);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (!has_piece) continue;
      if constexpr (KEY_CODES == cache::NUMBERS) {
        *reinterpret_cast<StoredVector*>(q_smem + lanes.at(step * Row::AT_ONCE)) = pieces[step];
        continue;
      }
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        const int column = fragment_codes::query_column(STORED_VECTOR * lanes.piece + x);
        const int at = fragment::swizzled_offset<Row::ROW_BYTES>(step * Row::AT_ONCE + lanes.row,
                                                                 column / STORED_VECTOR);
        reinterpret_cast<storage_t*>(q_smem + at)[column % STORED_VECTOR] = pieces[step].x[x];
      }
    }
  } else {
    constexpr int COLUMNS = fragment_codes::columns<KEY_CODES>(D);
#pragma unroll 1
    for (int n = ptx::lane_index(); n < 16 * COLUMNS; n += ptx::WARP_SIZE) {
      const int row = n / COLUMNS, column = n % COLUMNS, to = fragment_codes::query_column(column);
      const int at = fragment::swizzled_offset<Row::ROW_BYTES>(row, to / STORED_VECTOR);
      reinterpret_cast<storage_t*>(q_smem + at)[to % STORED_VECTOR] =
          row < task.rows && column < D ? query_row(p, task, row)[column * p.q.col] : storage_t(0);
    }
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
