// Products of tiles by scalar instructions, operands in shared memory, results in registers: the
// twin of reference/cpu/microkernel.py and reference/cpu/accumulate.py.
//
// The threads of a block form a grid of ROW_THREADS x COLUMN_THREADS. A thread owns the elements of
// a result at rows row_thread + ROW_THREADS * r: neighbouring threads own neighbouring rows, so
// that the 16-byte reads of a warp fall on different banks. Reads are vectors along the
// contraction, which is contiguous in both operands of `multiply`.
#pragma once
#include "../ptx/warp.cuh"
#include "memory.cuh"

// A row of the thread grid lies in one warp, so that row maxima need no shared memory. With few
// threads in a row, a thread has several columns also of narrow results. Where there are none, D_V
// is 0.
constexpr int LARGEST_HEAD = D > D_V ? D : D_V;
constexpr bool IS_NARROW = D_V > 0 && LARGEST_HEAD <= 32 && sizeof(accum_t) == 4;
constexpr int COLUMN_THREADS = LARGEST_HEAD > 256 ? 32 : IS_NARROW ? 8 : 16;
constexpr int ROW_THREADS = THREADS / COLUMN_THREADS;
constexpr int ROWS_PER_WARP = ptx::WARP_SIZE / COLUMN_THREADS;
// Bits of a lane's number that tell its column thread; the others tell its row thread.
constexpr int COLUMN_LANES = IS_NARROW ? 0b11010 : ptx::WARP_SIZE - ROWS_PER_WARP;

namespace matmul {

__device__ constexpr int larger(int x, int y) { return x > y ? x : y; }
__device__ constexpr int round_up(int x, int step) { return (x + step - 1) / step * step; }

// `multiply` streams its operands through shared memory in chunks of columns of at most 128 bytes:
// their number, and the columns of one.
constexpr int CHUNK_LIMIT = 128 / static_cast<int>(sizeof(accum_t));
__device__ constexpr int chunks(int width) { return (width + CHUNK_LIMIT - 1) / CHUNK_LIMIT; }
__device__ constexpr int chunk_columns(int width) {
  const int whole = width % STORED_VECTOR == 0 ? STORED_VECTOR : VECTOR;
  return round_up((width + chunks(width) - 1) / chunks(width), whole);
}

// Columns in shared memory of an operand that is resident there: all chunks.
__device__ constexpr int whole_columns(int width) { return chunks(width) * chunk_columns(width); }

// The row stride of a tile that is read by vectors: an odd number of vectors, so that the rows of
// eight threads begin on different banks.
__device__ constexpr int odd_stride(int columns) {
  return round_up(columns, VECTOR) + (round_up(columns, VECTOR) / VECTOR % 2 == 0 ? VECTOR : 0);
}

// Adjacent columns of a result that a thread owns: a vector of them, or fewer where that leaves
// fewer threads without work.
__device__ constexpr int run_of(int width) {
  int best = VECTOR;
  for (int run = VECTOR; run > 0; run /= 2) {
    const int step = COLUMN_THREADS * run;
    if (round_up(width, step) < round_up(width, COLUMN_THREADS * best)) best = run;
  }
  return best;
}

// Columns of a result, padded to whole rows of the thread grid.
__device__ constexpr int padded_columns(int width) {
  return round_up(width, COLUMN_THREADS * run_of(width));
}

// Columns in shared memory of an operand that is resident there and also the right factor of a
// product.
__device__ constexpr int held_columns(int width) {
  return larger(whole_columns(width), padded_columns(width));
}

// Rows of the streamed operand of `accumulate` that fit into `elements` of shared memory.
__device__ constexpr int stage_rows(int rows, int width, int elements) {
  while (rows > VECTOR && rows % (2 * VECTOR) == 0 && rows * padded_columns(width) > elements) {
    rows /= 2;
  }
  return rows;
}

// Elements of one of the stage's two buffers: a chunk of `rows` rows of `width` columns for
// `multiply`, or a few whole rows of `wide` columns for `accumulate`.
__device__ constexpr int buffer_elements(int rows, int width, int wide) {
  const int chunk = rows * odd_stride(chunk_columns(width));
  const int whole = stage_rows(rows, wide, chunk) * padded_columns(wide);
  return larger(chunk, whole);
}

// The double buffer through which operands are streamed: while the block multiplies what is in one
// buffer, the next rows are copied to the other.
//
// A product may fill the next buffer at once: the product before it ended in the other buffer, and
// passed a barrier after it had read this one.
template <int BUFFER>
struct Stage {
  accum_t* stage_smem;
  int offset = 0;

  __device__ __forceinline__ accum_t* next() {
    offset = BUFFER - offset;
    return stage_smem + offset;
  }
};

// Adjacent lanes share a column thread, every other lane a row thread: 16-byte reads are served
// half a warp at a time, in one transaction if lanes next to each other, or next but one, read the
// same address.
__device__ __forceinline__ int row_thread() {
  const int lane = threadIdx.x % ptx::WARP_SIZE;
  const int row = IS_NARROW ? lane % 2 + lane / 4 % 2 * 2 : lane % ROWS_PER_WARP;
  return threadIdx.x / ptx::WARP_SIZE * ROWS_PER_WARP + row;
}
__device__ __forceinline__ int column_thread() {
  const int lane = threadIdx.x % ptx::WARP_SIZE;
  return IS_NARROW ? lane / 2 % 2 + lane / 8 * 2 : lane / ROWS_PER_WARP;
}

// c += a b^T for tiles of DEPTH columns. The thread's columns of c are column_thread +
// COLUMN_THREADS * n, of which the first USED are computed. UNROLL vectors of each row are in
// flight.
template <int DEPTH, int A_STRIDE, int B_STRIDE, int UNROLL, int USED, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(accum_t (&c)[ROWS][COLUMNS], const accum_t* a_smem,
                                         const accum_t* b_smem) {
  a_smem += row_thread() * A_STRIDE;
  b_smem += column_thread() * B_STRIDE;
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH; k += VECTOR) {
    Vector a[ROWS], b[USED];
#pragma unroll
    for (int n = 0; n < USED; ++n) {
      b[n] = *reinterpret_cast<const Vector*>(b_smem + n * COLUMN_THREADS * B_STRIDE + k);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      a[r] = *reinterpret_cast<const Vector*>(a_smem + r * ROW_THREADS * A_STRIDE + k);
    }
#pragma unroll
    for (int x = 0; x < VECTOR; ++x) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < USED; ++n) c[r][n] += a[r].x[x] * b[n].x[x];
      }
    }
  }
}

// The weight of a masked pair is -0.0, which no other pair has. It adds nothing to a product; where
// the other factor is NaN or infinite, it tells masked pairs from weights that are merely 0.
__device__ __forceinline__ accum_t masked_weight() { return -accum_t(0); }
__device__ __forceinline__ bool is_unmasked(float weight) {
  return __float_as_uint(weight) != 0x80000000u;
}
__device__ __forceinline__ bool is_unmasked(double weight) {
  return __double_as_longlong(weight) != -0x7fffffffffffffffLL - 1;
}

// Column `n` of a thread's columns in a result of WIDTH columns.
template <int WIDTH>
__device__ __forceinline__ int result_column(int n) {
  constexpr int RUN = run_of(WIDTH);
  return (n / RUN * COLUMN_THREADS + column_thread()) * RUN + n % RUN;
}

// c += a b for DEPTH columns of a and rows of b. The thread's columns of c are those of
// result_column. UNROLL vectors of each row of a are in flight.
template <int DEPTH, int A_STRIDE, int WIDTH, int UNROLL, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add(accum_t (&c)[ROWS][COLUMNS], const accum_t* a_smem,
                                             const accum_t* b_smem) {
  constexpr int RUN = run_of(WIDTH);
  struct alignas(RUN * sizeof(accum_t)) Run {
    accum_t x[RUN];
  };
  a_smem += row_thread() * A_STRIDE;
  b_smem += column_thread() * RUN;
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH; k += VECTOR) {
    Vector a[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      a[r] = *reinterpret_cast<const Vector*>(a_smem + r * ROW_THREADS * A_STRIDE + k);
    }
#pragma unroll
    for (int x = 0; x < VECTOR; ++x) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n += RUN) {
        const Run b = *reinterpret_cast<const Run*>(b_smem + (k + x) * padded_columns(WIDTH) +
                                                    n * COLUMN_THREADS);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
          for (int y = 0; y < RUN; ++y) c[r][n + y] += a[r].x[x] * b.x[y];
        }
      }
    }
  }
}

// The same if b has non-finite elements: masked pairs are skipped.
template <int DEPTH, int A_STRIDE, int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add_unmasked(accum_t (&c)[ROWS][COLUMNS],
                                                      const accum_t* a_smem,
                                                      const accum_t* b_smem) {
  a_smem += row_thread() * A_STRIDE;
#pragma unroll 1
  for (int k = 0; k < DEPTH; ++k) {
    accum_t a[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) a[r] = a_smem[r * ROW_THREADS * A_STRIDE + k];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const accum_t b = b_smem[k * padded_columns(WIDTH) + result_column<WIDTH>(n)];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (is_unmasked(a[r])) c[r][n] += a[r] * b;
      }
    }
  }
}

// Adjacent rows of a result of multiply_transposed that a thread owns.
__device__ constexpr int row_run(int rows) {
  int run = VECTOR;
  while (rows % run != 0) run /= 2;
  return run;
}

// How many of a thread's rows of that result are computed at a time, limited by registers.
__device__ constexpr int rows_at_once(int rows, int columns) {
  while (rows % 2 == 0 && rows * columns > 32) rows /= 2;
  return rows;
}

// Row `r` of a thread's ROWS rows of that result.
template <int ROWS>
__device__ __forceinline__ int result_row(int r) {
  constexpr int RUN = row_run(ROWS);
  return (r / RUN * ROW_THREADS + row_thread()) * RUN + r % RUN;
}

// c += a^T b for DEPTH rows of a and b. The thread's rows of c are those of result_row, its columns
// those of result_column. The elements of c are visited back and forth, so that every multiply-add
// needs a new element of one factor only.
template <int DEPTH, int A_STRIDE, int B_STRIDE, int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_transposed(accum_t (&c)[ROWS][COLUMNS],
                                                    const accum_t* a_smem, const accum_t* b_smem) {
  constexpr int RUN_A = row_run(ROWS), RUN_B = run_of(WIDTH);
  struct alignas(RUN_A * sizeof(accum_t)) RunA {
    accum_t x[RUN_A];
  };
  struct alignas(RUN_B * sizeof(accum_t)) RunB {
    accum_t x[RUN_B];
  };
#pragma unroll 4
  for (int k = 0; k < DEPTH; ++k) {
    RunA a[ROWS / RUN_A];
    RunB b[COLUMNS / RUN_B];
#pragma unroll
    for (int r = 0; r < ROWS; r += RUN_A) {
      a[r / RUN_A] = *reinterpret_cast<const RunA*>(a_smem + k * A_STRIDE + result_row<ROWS>(r));
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n += RUN_B) {
      b[n / RUN_B] =
          *reinterpret_cast<const RunB*>(b_smem + k * B_STRIDE + result_column<WIDTH>(n));
    }
#pragma unroll
    for (int step = 0; step < ROWS * COLUMNS; ++step) {
      const bool by_rows = COLUMNS < ROWS;
      const int outer = step / (by_rows ? COLUMNS : ROWS),
                inner = step % (by_rows ? COLUMNS : ROWS);
      const int back_and_forth = outer % 2 == 0 ? inner : (by_rows ? COLUMNS : ROWS) - 1 - inner;
      const int r = by_rows ? outer : back_and_forth, n = by_rows ? back_and_forth : outer;
      c[r][n] += a[r / RUN_A].x[r % RUN_A] * b[n / RUN_B].x[n % RUN_B];
    }
  }
}

// The same if b has non-finite elements: masked pairs are skipped.
template <int DEPTH, int A_STRIDE, int B_STRIDE, int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_transposed_unmasked(accum_t (&c)[ROWS][COLUMNS],
                                                             const accum_t* a_smem,
                                                             const accum_t* b_smem) {
#pragma unroll 1
  for (int k = 0; k < DEPTH; ++k) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const accum_t b = b_smem[k * B_STRIDE + result_column<WIDTH>(n)];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const accum_t weight = a_smem[k * A_STRIDE + result_row<ROWS>(r)];
        if (is_unmasked(weight)) c[r][n] += weight * b;
      }
    }
  }
}

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void clear(accum_t (&c)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) c[r][n] = 0;
  }
}

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void add(accum_t (&c)[ROWS][COLUMNS],
                                    const accum_t (&b)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) c[r][n] += b[r][n];
  }
}

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void scale(accum_t (&c)[ROWS][COLUMNS], accum_t factor) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) c[r][n] *= factor;
  }
}

// Streams B_ROWS rows of b, of which `valid` exist from `first` on, through the stage by chunks of
// columns. `multiply` is called with each chunk's first column and where the chunk is.
template <int B_ROWS, int WIDTH, int BUFFER, class Multiply>
__device__ __forceinline__ void for_each_chunk(const memory::Rows& b, long long first, int valid,
                                               Stage<BUFFER>& stage, const Multiply& multiply) {
  constexpr int CHUNK = chunk_columns(WIDTH);
  constexpr int STRIDE = odd_stride(CHUNK);
  accum_t* chunk_smem = stage.next();
  memory::begin_rows<B_ROWS, CHUNK, STRIDE, WIDTH>(chunk_smem, b, first, valid, 0);
#pragma unroll 1
  for (int column = 0; column < WIDTH; column += CHUNK) {
    const accum_t* const filled_smem = chunk_smem;
    memory::finish_rows<B_ROWS, CHUNK, STRIDE, WIDTH, false>(chunk_smem, b, first, valid, column);
    __syncthreads();  // the chunk, filled by all threads, and the other buffer, read by all; before
                      // the first chunk also the rows of a, written by other threads
    if (column + CHUNK < WIDTH) {
      chunk_smem = stage.next();
      memory::begin_rows<B_ROWS, CHUNK, STRIDE, WIDTH>(chunk_smem, b, first, valid, column + CHUNK);
    }
    multiply(column, filled_smem);
  }
}

// c = a b^T, or c += a b^T if it ADDS. a is resident in shared memory, its rows A_STRIDE apart;
// rows of b are streamed. If it HALVES, c is computed for the first half of these alone where no
// other row is valid.
template <int B_ROWS, int WIDTH, int A_STRIDE, int UNROLL, bool ADDS = false, bool HALVES = false,
          int ROWS, int COLUMNS, int BUFFER>
__device__ __forceinline__ void multiply_rows(accum_t (&c)[ROWS][COLUMNS], const accum_t* a_smem,
                                              const memory::Rows& b, long long first, int valid,
                                              Stage<BUFFER>& stage) {
  constexpr int CHUNK = chunk_columns(WIDTH);
  constexpr int STRIDE = odd_stride(CHUNK);
  if constexpr (!ADDS) clear(c);
  for_each_chunk<B_ROWS, WIDTH>(
      b, first, valid, stage, [&](int column, const accum_t* filled_smem) {
        constexpr int USED = HALVES ? COLUMNS / 2 : COLUMNS;
        if (HALVES && valid <= B_ROWS / 2) {
          multiply<CHUNK, A_STRIDE, STRIDE, UNROLL, USED>(c, a_smem + column, filled_smem);
        } else {
          multiply<CHUNK, A_STRIDE, STRIDE, UNROLL, COLUMNS>(c, a_smem + column, filled_smem);
        }
      });
}

// Begins the copy of a chunk of columns of both operands, from `column` on.
template <int A_ROWS, int B_ROWS, int WIDTH>
__device__ __forceinline__ void begin_both(const memory::Rows& a, long long first_a, int valid_a,
                                           const memory::Rows& b, long long first_b, int valid_b,
                                           accum_t* a_smem, accum_t* b_smem, int column = 0) {
  constexpr int CHUNK = chunk_columns(WIDTH);
  constexpr int STRIDE = odd_stride(CHUNK);
  memory::begin_rows<A_ROWS, CHUNK, STRIDE, WIDTH>(a_smem, a, first_a, valid_a, column);
  memory::begin_rows<B_ROWS, CHUNK, STRIDE, WIDTH>(b_smem, b, first_b, valid_b, column);
}

// Completes it, with the same arguments.
template <int A_ROWS, int B_ROWS, int WIDTH>
__device__ __forceinline__ void finish_both(const memory::Rows& a, long long first_a, int valid_a,
                                            const memory::Rows& b, long long first_b, int valid_b,
                                            accum_t* a_smem, accum_t* b_smem, int column = 0) {
  constexpr int CHUNK = chunk_columns(WIDTH);
  constexpr int STRIDE = odd_stride(CHUNK);
  memory::finish_rows<A_ROWS, CHUNK, STRIDE, WIDTH, false>(a_smem, a, first_a, valid_a, column);
  memory::finish_rows<B_ROWS, CHUNK, STRIDE, WIDTH, false>(b_smem, b, first_b, valid_b, column);
}

// c = a b^T of operands that are one chunk each.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_one(accum_t (&c)[ROWS][COLUMNS], const accum_t* a_smem,
                                             const accum_t* b_smem) {
  constexpr int CHUNK = chunk_columns(WIDTH);
  constexpr int STRIDE = odd_stride(CHUNK);
  clear(c);
  multiply<CHUNK, STRIDE, STRIDE, 2, COLUMNS>(c, a_smem, b_smem);
}

// The same, where both operands are streamed through shared memory by chunks of columns.
template <int A_ROWS, int B_ROWS, int WIDTH, bool ADDS = false, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_both(accum_t (&c)[ROWS][COLUMNS], const memory::Rows& a,
                                              long long first_a, int valid_a, const memory::Rows& b,
                                              long long first_b, int valid_b, accum_t* a_smem,
                                              accum_t* b_smem) {
  constexpr int CHUNK = chunk_columns(WIDTH);
  constexpr int STRIDE = odd_stride(CHUNK);
  if constexpr (!ADDS) clear(c);
#pragma unroll 1
  for (int column = 0; column < WIDTH; column += CHUNK) {
    __syncthreads();  // both chunks, which other threads may still read
    begin_both<A_ROWS, B_ROWS, WIDTH>(a, first_a, valid_a, b, first_b, valid_b, a_smem, b_smem,
                                      column);
    finish_both<A_ROWS, B_ROWS, WIDTH>(a, first_a, valid_a, b, first_b, valid_b, a_smem, b_smem,
                                       column);
    __syncthreads();  // both chunks, filled by all threads
    multiply<CHUNK, STRIDE, STRIDE, 2, COLUMNS>(c, a_smem, b_smem);
  }
}

// The same of rows of global memory, through the two buffers of the stage: for operands that are
// not resident where others are.
template <int A_ROWS, int B_ROWS, int WIDTH, bool ADDS, int ROWS, int COLUMNS, int BUFFER>
__device__ __forceinline__ void multiply_streamed(accum_t (&c)[ROWS][COLUMNS],
                                                  const memory::Rows& a, long long first_a,
                                                  int valid_a, const memory::Rows& b,
                                                  long long first_b, int valid_b,
                                                  const Stage<BUFFER>& stage) {
  multiply_both<A_ROWS, B_ROWS, WIDTH, ADDS>(c, a, first_a, valid_a, b, first_b, valid_b,
                                             stage.stage_smem, stage.stage_smem + BUFFER);
  __syncthreads();  // both buffers, which other threads may still read
}

// Streams B_ROWS rows of b, of which `valid` exist from `first` on, through the stage, STEP rows at
// a time. `multiply` is called with the first row's number, where the rows are, and whether any
// number there is not finite, which is looked for if pairs may be masked.
template <int B_ROWS, int WIDTH, int STEP, bool MAY_MASK, int BUFFER, class Multiply>
__device__ __forceinline__ void for_each_rows(const memory::Rows& b, long long first, int valid,
                                              Stage<BUFFER>& stage, const Multiply& multiply) {
  constexpr int STRIDE = padded_columns(WIDTH);
  accum_t* rows_smem = stage.next();
  memory::begin_rows<STEP, STRIDE, STRIDE, WIDTH>(rows_smem, b, first, valid, 0);
#pragma unroll 1
  for (int k = 0; k < B_ROWS && k < valid; k += STEP) {
    const accum_t* const filled_smem = rows_smem;
    const bool finite = memory::finish_rows<STEP, STRIDE, STRIDE, WIDTH, MAY_MASK>(
        rows_smem, b, first + k, valid - k, 0);
    bool has_nonfinite = false;
    // Protects the rows, filled by all threads, and the other buffer, read by all; before the first
    // rows also the tile of weights, written by other threads.
    if constexpr (MAY_MASK) {
      has_nonfinite = ptx::barrier_or(!finite);
    } else {
      __syncthreads();  // as above
    }
    if (k + STEP < B_ROWS && k + STEP < valid) {
      rows_smem = stage.next();
      memory::begin_rows<STEP, STRIDE, STRIDE, WIDTH>(rows_smem, b, first + k + STEP,
                                                      valid - k - STEP, 0);
    }
    multiply(k, filled_smem, has_nonfinite);
  }
}

// c += a b. The tile a of weights is in shared memory; rows of b are streamed.
template <int B_ROWS, int WIDTH, int A_STRIDE, bool MAY_MASK, int UNROLL = 2, int ROWS, int COLUMNS,
          int BUFFER>
__device__ __forceinline__ void accumulate(accum_t (&c)[ROWS][COLUMNS], const accum_t* a_smem,
                                           const memory::Rows& b, long long first, int valid,
                                           Stage<BUFFER>& stage) {
  constexpr int STEP = stage_rows(B_ROWS, WIDTH, BUFFER);
  for_each_rows<B_ROWS, WIDTH, STEP, MAY_MASK>(
      b, first, valid, stage, [&](int k, const accum_t* filled_smem, bool has_nonfinite) {
        if (has_nonfinite) {
          multiply_add_unmasked<STEP, A_STRIDE, WIDTH>(c, a_smem + k, filled_smem);
        } else {
          multiply_add<STEP, A_STRIDE, WIDTH, UNROLL>(c, a_smem + k, filled_smem);
        }
      });
}

}  // namespace matmul
