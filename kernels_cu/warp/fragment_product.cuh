// Products of 16-bit operands that are both in shared memory, with results that warps share by
// columns: the twin of reference/cpu/microkernel.py and reference/cpu/accumulate.py for the
// backward.
#pragma once
#include "../ptx/red.cuh"
#include "fragment.cuh"

namespace fragment_product {

// A warp's share of the columns of a result, in units of 16 columns. Warps that share rows own
// adjacent units; if a row has too few units, the last warps are idle. A line of 128 bytes is 4
// units; a share begins where the swizzled addresses of fragment::LaneRow can. With a STEP, the
// number of sharers, a warp has every STEP-th unit, so that shares of wide heads are even.
template <int WIDTH, int SHARERS, int STEP = 1>
struct Share {
  static_assert(STEP == 1 || STEP == SHARERS, "STEP");
  static constexpr int UNITS = fragment::whole_columns(WIDTH) / 16;
  static constexpr int EVEN = (UNITS + SHARERS - 1) / SHARERS;
  static constexpr int EACH =
      EVEN <= 2 || SHARERS == 1 || STEP > 1 ? EVEN : matmul::round_up(EVEN, 4);
  static constexpr int COLUMNS = 4 * EACH;  // of a thread
  int first;                                // the warp's first unit

  __device__ __forceinline__ explicit Share(int sharer)
      : first(STEP > 1 ? sharer : sharer * EACH) {}
  // Unit x of the share; of a thread's element n, the column, and which 8 of a row's columns.
  __device__ __forceinline__ int unit(int x) const { return first + STEP * x; }
  __device__ __forceinline__ int piece(int n) const {
    return 2 * first + n / 2 + 2 * (STEP - 1) * (n / 4);
  }
  __device__ __forceinline__ int column(int n) const {
    const int of_unit = 16 * first + 16 * (STEP - 1) * (n / 4);
    return of_unit + 8 * (n / 2) + fragment::lane_column() + n % 2;
  }
  // Moves the lanes' rows of a right operand to the share, whose unit x is their step `step(x)`.
  template <int BYTES>
  __device__ __forceinline__ void shift(fragment::LaneRow<BYTES>& rows) const {
    rows.address += first / 4 * 128;
    rows.begin ^= first % 4 * 32;
  }
  __device__ __forceinline__ static constexpr int step(int x) { return STEP * x; }
  // Part x of `parts` of the share.
  __device__ __forceinline__ Share part(int x, int parts) const {
    Share share = *this;
    share.first += STEP * (x * EACH / parts);
    return share;
  }
  // Whether unit x of the share exists.
  __device__ __forceinline__ bool has(int x) const {
    return SHARERS * EACH == UNITS || unit(x) < UNITS;
  }
};

// c = a b^T for 8 rows of b, of which 32 columns are loaded at a time.
template <int WIDTH, int UNROLL, int ROWS>
__device__ __forceinline__ void multiply_eight(float (&c)[ROWS][2], const char* a_smem,
                                               const char* b_smem) {
  constexpr int BYTES = fragment::row_bytes(WIDTH), STEPS = fragment::whole_columns(WIDTH) / 16;
  const int lane = ptx::lane_index();
  const auto a = fragment::left_rows<BYTES>(a_smem);
  const fragment::LaneRow<BYTES> b(b_smem, lane % 8, lane / 8);
  // Of an odd number of steps the last is alone: no lane may read beyond its columns.
  const fragment::LaneRow<BYTES> last(b_smem, lane % 8, lane / 8 % 2);
  matmul::clear(c);
#pragma unroll UNROLL / 2
  for (int step = 0; step < STEPS; step += 2) {
    unsigned int right[4];
    ptx::ldmatrix_x4(right, step + 1 < STEPS ? b.at(0, step) : last.at(0, step));
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      if (step + x == STEPS) break;
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) {
        unsigned int left[4];
        ptx::ldmatrix_x4(left, a.at(16 * m, step + x));
        fragment::mma(c[2 * m][0], c[2 * m][1], c[2 * m + 1][0], c[2 * m + 1][1], left,
                      right[2 * x], right[2 * x + 1]);
      }
    }
  }
}

// What a product does between its steps: nothing.
struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

// c = a b^T for rows that begin at a_smem and b_smem. UNROLL steps of 16 columns are in flight, as
// in the products below. `between` is called after each of them.
template <int WIDTH, int UNROLL, int ROWS, int COLUMNS, class Between = Nothing>
__device__ __forceinline__ void multiply(float (&c)[ROWS][COLUMNS], const char* a_smem,
                                         const char* b_smem, const Between& between = Between()) {
  if constexpr (COLUMNS == 2) {
    multiply_eight<WIDTH, UNROLL>(c, a_smem, b_smem);
    return;
  }
  constexpr int BYTES = fragment::row_bytes(WIDTH);
  const auto a = fragment::left_rows<BYTES>(a_smem);
  const auto b = fragment::right_rows<BYTES>(b_smem);
  matmul::clear(c);
#pragma unroll UNROLL
  for (int step = 0; step < fragment::whole_columns(WIDTH) / 16; ++step) {
    unsigned int left[ROWS / 2][4];
#pragma unroll
    for (int m = 0; m < ROWS / 2; ++m) ptx::ldmatrix_x4(left[m], a.at(16 * m, step));
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      unsigned int right[4];
      ptx::ldmatrix_x4(right, b.at(4 * n, step));
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) fragment::multiply_step(c, m, n, left[m], right);
    }
    between(step);
  }
}

// c += a b for rows of DEPTH weights that begin at a_smem, A_BYTES apart, and DEPTH rows of b. The
// columns of c are the warp's share. `between` is called after each of DEPTH / 16 steps.
template <int WIDTH, int DEPTH, int A_BYTES, int UNROLL, int SHARERS, int STEP, int ROWS,
          int COLUMNS, class Between>
__device__ __forceinline__ void multiply_add(float (&c)[ROWS][COLUMNS], const char* a_smem,
                                             const char* b_smem,
                                             const Share<WIDTH, SHARERS, STEP>& share,
                                             const Between& between) {
  const auto a = fragment::left_rows<A_BYTES>(a_smem);
  auto b = fragment::left_rows<fragment::row_bytes(WIDTH)>(b_smem);
  share.shift(b);
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH / 16; ++k) {
    unsigned int left[ROWS / 2][4];
#pragma unroll
    for (int m = 0; m < ROWS / 2; ++m) ptx::ldmatrix_x4(left[m], a.at(16 * m, k));
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      if (!share.has(n / 4)) break;
      unsigned int right[4];
      ptx::ldmatrix_x4_trans(right, b.at(16 * k, share.step(n / 4)));
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) fragment::multiply_step(c, m, n, left[m], right);
    }
    between(k);
  }
}

__device__ __forceinline__ storage_t element(const char* row_smem) {
  return *reinterpret_cast<const storage_t*>(row_smem);
}

// c += a b for the non-finite elements of b alone, skipping masked pairs, which have the weight of
// one in `weights_smem`; the main product then runs with zeros in their place.
template <int WIDTH, int DEPTH, int A_BYTES, int SHARERS, int STEP, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_nonfinite(float (&c)[ROWS][COLUMNS], const char* a_smem,
                                              const char* weights_smem, const char* b_smem,
                                              const Share<WIDTH, SHARERS, STEP>& share) {
#pragma unroll 1
  for (int x = 0; x < COLUMNS / 4; ++x) {
#pragma unroll 1
    for (int k = 0; share.has(x) && k < DEPTH; ++k) {
      const int row = fragment::lane_row();
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = 16 * share.unit(x) + 8 * (n / 2) + fragment::lane_column() + n % 2;
        const int at = fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(k, column / 8);
        const float value = number::widen(element(b_smem + at + column % 8 * 2));
        if (number::is_finite(value)) continue;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int pair = fragment::swizzled_offset<A_BYTES>(8 * r + row, k / 8) + k % 8 * 2;
          const bool unmasked = element(weights_smem + pair) != fragment::MASKED;
          if (unmasked) c[r][n] += number::widen(element(a_smem + pair)) * value;
        }
      }
    }
    fragment::rotate<4>(c);
  }
}

// Sets non-finite elements to 0.
__device__ __forceinline__ void clear_pair(unsigned int& pair) {
  const unsigned int carried = (pair & fragment::EXPONENTS) + fragment::LAST;
  if (carried & 0x8000u) pair &= 0xffff0000u;
  if (carried & 0x80000000u) pair &= 0x0000ffffu;
}

// c += a^T b for DEPTH rows of weights that begin at a_smem, A_BYTES apart, and DEPTH rows of b.
// The rows of c are columns of a, from 16 `first` on.
template <int WIDTH, int DEPTH, int A_BYTES, int UNROLL, bool ONLY_FINITE, int SHARERS, int STEP,
          int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add_transposed(float (&c)[ROWS][COLUMNS],
                                                        const char* a_smem, int first,
                                                        const char* b_smem,
                                                        const Share<WIDTH, SHARERS, STEP>& share) {
  auto a = fragment::right_rows<A_BYTES>(a_smem);
  a.address += first / 4 * 128;
  a.begin ^= first % 4 * 32;
  auto b = fragment::left_rows<fragment::row_bytes(WIDTH)>(b_smem);
  share.shift(b);
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH / 16; ++k) {
    unsigned int left[ROWS / 2][4];
#pragma unroll
    for (int m = 0; m < ROWS / 2; ++m) ptx::ldmatrix_x4_trans(left[m], a.at(16 * k, m));
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      if (!share.has(n / 4)) break;
      unsigned int right[4];
      ptx::ldmatrix_x4_trans(right, b.at(16 * k, share.step(n / 4)));
      if constexpr (ONLY_FINITE) {
#pragma unroll
        for (int x = 0; x < 4; ++x) clear_pair(right[x]);
      }
#pragma unroll
      for (int m = 0; m < ROWS / 2; ++m) fragment::multiply_step(c, m, n, left[m], right);
    }
  }
}

// -- results --------------------------------------------------------------------------------------

// Stores a warp's share of a result of WIDTH columns as elements of the accumulator's type, to rows
// of which row 0 of the block goes to `offset`; `valid` rows exist.
template <int WIDTH, int SHARERS, int STEP, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_wide_rows(const float (&result)[ROWS][COLUMNS],
                                                const Share<WIDTH, SHARERS, STEP>& share,
                                                int warp_row, const Operand& to, long long offset,
                                                int valid) {
  float* const data = reinterpret_cast<float*>(to.data) + offset;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = warp_row + 8 * r + fragment::lane_row();
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = share.column(n);
      if (row < valid && column < WIDTH) data[row * to.row + column * to.col] = result[r][n];
    }
  }
}

// Writes a warp's share of a result of WIDTH columns to rows in shared memory, as elements of the
// storage type.
template <int WIDTH, int SHARERS, int STEP, int ROWS, int COLUMNS>
__device__ __forceinline__ void stage_rows(const float (&result)[ROWS][COLUMNS],
                                           const Share<WIDTH, SHARERS, STEP>& share, int warp_row,
                                           char* rows_smem) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 2) {
    if (!share.has(n / 4)) break;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = warp_row + 8 * r + fragment::lane_row();
      const int at = fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(row, share.piece(n));
      *reinterpret_cast<unsigned int*>(rows_smem + at + 2 * fragment::lane_column()) =
          number::narrow_pair(result[r][n], result[r][n + 1]);
    }
  }
}

// Stores the block's result of WIDTH columns, times a factor: as elements of the storage type by
// way of shared memory, or if `wide` as the accumulator's. Row 0 of the block is row `first` of the
// entry's head; `valid` rows exist. The warp's rows begin at `warp_row`. No thread may still use
// rows_smem when this is called.
template <int BLOCK_ROWS, int WIDTH, int SHARERS, int STEP, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(float (&result)[ROWS][COLUMNS],
                                           const Share<WIDTH, SHARERS, STEP>& share, int warp_row,
                                           const Operand& to, bool wide, long long offset,
                                           long long first, int valid, float factor,
                                           char* rows_smem) {
  constexpr int BYTES = fragment::row_bytes(WIDTH);
  matmul::scale(result, factor);
  if (wide) {
    store_wide_rows(result, share, warp_row, to, offset + first * to.row, valid);
    return;
  }
  stage_rows(result, share, warp_row, rows_smem);
  __syncthreads();  // the result, written by all warps
  storage_t* const data = reinterpret_cast<storage_t*>(to.data) + offset + first * to.row;
  const bool vectors = to.col == 1 && to.row % STORED_VECTOR == 0 &&
                       reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  constexpr int PIECES = (WIDTH + 7) / 8;
#pragma unroll 1
  for (int n = threadIdx.x; n < BLOCK_ROWS * PIECES; n += THREADS) {
    const int row = n / PIECES, piece = n % PIECES;
    if (row >= valid) break;
    const auto stored = *reinterpret_cast<const StoredVector*>(
        rows_smem + fragment::swizzled_offset<BYTES>(row, piece));
    storage_t* const target = data + row * to.row + 8 * piece * to.col;
    if (vectors && 8 * piece + 8 <= WIDTH) {
      *reinterpret_cast<StoredVector*>(target) = stored;
    } else {
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        if (8 * piece + x < WIDTH) target[x * to.col] = stored.x[x];
      }
    }
  }
}

// Where WHOLE_DQ: row `row` of a head of dq, whose row 0 is at `row_gmem`. A number has 16 bits or,
// if pieces of a call are summed later, the accumulator's type.
__device__ __forceinline__ int dq_bytes(const Params& p) {
  return p.kind_dq == number::STORAGE_KIND ? sizeof(storage_t) : sizeof(float);
}
__device__ __forceinline__ char* dq_row(const Params& p, char* row_gmem, long long row) {
  return row_gmem + row * p.dq.row * dq_bytes(p);
}

// Stores two neighbouring columns of a row of dq from column `column` on, an even one.
template <int CODE = STORAGE>
__device__ __forceinline__ void store_pair(const Params& p, char* row_gmem, int row, int column,
                                           float low, float high) {
  char* const to = dq_row(p, row_gmem, row);
  if (p.kind_dq != number::STORAGE_KIND) {
    float* const wide = reinterpret_cast<float*>(to);
    if (column < D) wide[column * p.dq.col] = low;
    if (column + 1 < D) wide[(column + 1) * p.dq.col] = high;
    return;
  }
  storage_t* const data = reinterpret_cast<storage_t*>(to) + column * p.dq.col;
  const unsigned int pair = number::narrow_pair<CODE>(low, high);
  if (column + 1 < D && p.dq.col == 1 && reinterpret_cast<unsigned long long>(data) % 4 == 0) {
    *reinterpret_cast<unsigned int*>(data) = pair;
    return;
  }
  if (column < D) data[0] = static_cast<storage_t>(pair);
  if (column + 1 < D) data[p.dq.col] = static_cast<storage_t>(pair >> 16);
}

// Sets rows of dq from `first` up to `end` to 0: their queries see no keys. By THREAD_COUNT
// threads.
template <int THREAD_COUNT>
__device__ __forceinline__ void clear_dq(const Params& p, char* row_gmem, long long first,
                                         long long end) {
#pragma unroll 1
  for (long long row = first + threadIdx.x / 32; row < end; row += THREAD_COUNT / 32) {
#pragma unroll 1
    for (int column = 2 * ptx::lane_index(); column < D; column += 64) {
      store_pair(p, dq_row(p, row_gmem, row), 0, column, 0.0f, 0.0f);
    }
  }
}

// Stores part `step` of `steps` of a warp's share of a tile's dq, times the scale, to rows that
// begin at row_gmem; `valid` rows exist from there on.
template <int WIDTH, int SHARERS, int STEP, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_fragments(const Params& p,
                                                const float (&result)[ROWS][COLUMNS],
                                                const Share<WIDTH, SHARERS, STEP>& share,
                                                char* row_gmem, int valid, int step, int steps) {
  const float scale = static_cast<float>(p.scale);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      if ((r * COLUMNS + n) * steps / (ROWS * COLUMNS) != step) continue;
      const int row = 8 * r + fragment::lane_row();
      if (row < valid && share.has(n / 4)) {
        store_pair(p, row_gmem, row, share.column(n), result[r][n] * scale,
                   result[r][n + 1] * scale);
      }
    }
  }
}

// The layout of the float32 sums of dq that blocks add to is that of the fragments: 16 columns of a
// group of 8 rows are 128 numbers. Element n of a thread's four is number 32 n + lane, so that 32
// lanes add to adjacent numbers; with ADJACENT_DQ it is 4 lane + n, so that one instruction adds
// all four. The units of 16 columns of a group follow each other, then comes the next group.
template <int WIDTH>
constexpr int GROUP_SIZE = 8 * fragment::whole_columns(WIDTH);
constexpr int LANE_STEP = ADJACENT_DQ ? 4 : 1, ELEMENT_STEP = ADJACENT_DQ ? 1 : ptx::WARP_SIZE;

// Where the sum of element (row, column) lies.
template <int WIDTH>
__device__ __forceinline__ int sum_offset(int row, int column) {
  const int lane = row % 8 * 4 + column % 8 / 2, element = column / 8 % 2 * 2 + column % 2;
  return row / 8 * GROUP_SIZE<WIDTH> + column / 16 * 128 + lane * LANE_STEP +
         element * ELEMENT_STEP;
}

// Atomically adds a thread's four elements of a unit; to_gmem is the sum of the first one.
__device__ __forceinline__ void add_four(float* to_gmem, const float* four) {
  if constexpr (ADJACENT_DQ) {
    ptx::red_add_v4(to_gmem, four[0], four[1], four[2], four[3]);
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) ptx::red_add(to_gmem + n * ELEMENT_STEP, four[n]);
  }
}

// Atomically adds part `step` of `steps` of a warp's share of a result of WIDTH columns to those
// sums. to_gmem is the group of the warp's first row; `valid` rows exist from there on.
template <int WIDTH, int SHARERS, int STEP, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_fragments(const float (&result)[ROWS][COLUMNS],
                                              const Share<WIDTH, SHARERS, STEP>& share,
                                              float* to_gmem, int valid, int step, int steps) {
  float* const lane_gmem = to_gmem + 128 * share.first + ptx::lane_index() * LANE_STEP;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (steps == 1 && 8 * r >= valid) break;
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      if ((r * COLUMNS + n) * steps / (ROWS * COLUMNS) != step) continue;
      if ((steps == 1 || 8 * r < valid) && share.has(n / 4)) {
        add_four(lane_gmem + r * GROUP_SIZE<WIDTH> + 128 * share.step(n / 4), &result[r][n]);
      }
    }
  }
}

// Atomically adds the block's product a^T b of DEPTH rows of weights, A_BYTES apart, and DEPTH rows
// of b, times a factor, for the non-finite elements of b alone, skipping masked pairs, which have
// the weight of one in `weights_smem`. Each thread adds numbers one by one. Where WHOLE_DQ, they
// are added to rows of dq that the block's threads have stored.
template <int WIDTH, int DEPTH, int A_BYTES>
__device__ __forceinline__ void add_fragments_nonfinite(const Params& p, const char* a_smem,
                                                        const char* weights_smem,
                                                        const char* b_smem, float* to_gmem,
                                                        int valid, float factor) {
#pragma unroll 1
  for (int n = threadIdx.x; n < valid * WIDTH; n += THREADS) {
    const int row = n / WIDTH, column = n % WIDTH;
    float sum = 0;
#pragma unroll 1
    for (int k = 0; k < DEPTH; ++k) {
      const int pair = fragment::swizzled_offset<A_BYTES>(k, row / 8) + row % 8 * 2;
      const int at =
          fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(k, column / 8) + column % 8 * 2;
      const float value = number::widen(element(b_smem + at));
      if (number::is_finite(value) || element(weights_smem + pair) == fragment::MASKED) continue;
      sum += number::widen(element(a_smem + pair)) * value;
    }
    if constexpr (WHOLE_DQ) {
      if (sum == 0.0f) continue;
      char* const to = dq_row(p, reinterpret_cast<char*>(to_gmem), row);
      const long long index = column * p.dq.col;
      const float before = number::load<float>(to, p.kind_dq, index);
      number::store(to, p.kind_dq, index, before + sum * factor * static_cast<float>(p.scale));
    } else {
      if (sum != 0.0f) ptx::red_add(to_gmem + sum_offset<WIDTH>(row, column), sum * factor);
    }
  }
}

}  // namespace fragment_product
