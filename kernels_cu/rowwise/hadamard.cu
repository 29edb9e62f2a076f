// Spreads every row over all of its columns by an orthogonal transform, or undoes it: the twin of
// reference/cpu/hadamard.py. Columns get random signs; then rows are multiplied by a Hadamard
// matrix of order D = FACTOR * POWER, the product of a small one and one of a power of two, by sums
// and differences.
//
// A block transforms BLOCK_Q rows in shared memory, 8 elements a thread at a time.
//
// Grid: all rows, BLOCK_Q to a block. Shared memory: the rows, and the signs of the columns.
#include "../common/params.cuh"
#include "../common/number.cuh"
#include "../common/layout.cuh"
#include "../common/philox.cuh"

namespace {

constexpr int ODD = D / (D & -D);
constexpr int FACTOR = ODD == 1 ? 1 : 4 * ODD;
constexpr int POWER = D / FACTOR;
constexpr int RADIX = 8;
constexpr int WIDTH = D % 8 == 0 ? 8 : 1;  // columns that a thread loads at a time
constexpr bool FUSED = POWER >= RADIX;     // the first steps are done in registers
constexpr int SIGNS = (D + 3) / 4;         // groups of columns whose signs are drawn at a time
static_assert(D == FACTOR * POWER && FACTOR <= MAX_FACTOR, "there is no transform of this size");

// Where element e of the rows is: 8 elements after every 64 are unused, so that threads that are
// 64 apart have other banks.
__host__ __device__ constexpr int place(int e) { return e + e / 64 * 8; }
static_assert(SHARED_BYTES >=
                  (place(BLOCK_Q * D - 1) + 1) * sizeof(accum_t) + SIGNS * sizeof(unsigned int),
              "all rows have room");

// Butterflies of neighbours, of pairs of neighbours, and so on.
template <int R>
__device__ __forceinline__ void butterflies(accum_t (&x)[R]) {
#pragma unroll
  for (int step = 1; step < R; step *= 2) {
#pragma unroll
    for (int n = 0; n < R; ++n) {
      if ((n & step) == 0) {
        const accum_t a = x[n], b = x[n + step];
        x[n] = a + b;
        x[n + step] = a - b;
      }
    }
  }
}

// Steps of R elements that are STEP apart, in all rows.
template <int STEP, int R>
__device__ __forceinline__ void pass(accum_t* tile) {
#pragma unroll 1
  for (int item = threadIdx.x; item < BLOCK_Q * D / R; item += THREADS) {
    const int base = item / STEP * (STEP * R) + item % STEP;
    accum_t x[R];
#pragma unroll
    for (int n = 0; n < R; ++n) x[n] = tile[place(base + n * STEP)];
    butterflies(x);
#pragma unroll
    for (int n = 0; n < R; ++n) tile[place(base + n * STEP)] = x[n];
  }
  __syncthreads();
}

// All steps from STEP on.
template <int STEP>
__device__ __forceinline__ void passes(accum_t* tile) {
  if constexpr (STEP * 8 <= POWER) {
    pass<STEP, 8>(tile);
    passes<STEP * 8>(tile);
  } else if constexpr (STEP * 4 <= POWER) {
    pass<STEP, 4>(tile);
  } else if constexpr (STEP * 2 <= POWER) {
    pass<STEP, 2>(tile);
  }
}

// Multiplies elements that are POWER apart by the small matrix.
__device__ __forceinline__ void multiply(const HadamardParams& p, accum_t* tile) {
#pragma unroll 1
  for (int item = threadIdx.x; item < BLOCK_Q * POWER; item += THREADS) {
    const int base = item / POWER * D + item % POWER;
    accum_t x[FACTOR];
#pragma unroll
    for (int n = 0; n < FACTOR; ++n) x[n] = tile[place(base + n * POWER)];
#pragma unroll 1
    for (int row = 0; row < FACTOR; ++row) {
      const unsigned long long negative = p.factor[row];
      accum_t total = (negative & 1) != 0 ? -x[0] : x[0];
#pragma unroll
      for (int n = 1; n < FACTOR; ++n) {
        total = (negative >> n & 1) != 0 ? total - x[n] : total + x[n];
      }
      tile[place(base + row * POWER)] = total;
    }
  }
  __syncthreads();
}

// Elements between the start of an array and a row.
__device__ __forceinline__ long long offset(const HadamardParams& p, const Operand& operand,
                                            long long row) {
  long long elements = 0;
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    const layout::Quotient rest = layout::divide(row, p.lead_size[axis]);
    elements += rest.remainder * operand.lead[axis];
    row = rest.quotient;
  }
  return elements;
}

__device__ __forceinline__ bool has_vectors(const storage_t* data, long long col) {
  return WIDTH == 8 && col == 1 &&
         reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
}

__device__ __forceinline__ void load(const storage_t* from, long long col,
                                     accum_t (&values)[WIDTH]) {
  if constexpr (WIDTH == 8) {
    if (has_vectors(from, col)) {
#pragma unroll
      for (int n = 0; n < WIDTH; n += STORED_VECTOR) {
        const StoredVector stored = *reinterpret_cast<const StoredVector*>(from + n);
#pragma unroll
        for (int m = 0; m < STORED_VECTOR; ++m) values[n + m] = number::widen(stored.x[m]);
      }
      return;
    }
  }
#pragma unroll
  for (int n = 0; n < WIDTH; ++n) values[n] = number::widen(from[n * col]);
}

__device__ __forceinline__ void store(storage_t* to, long long col,
                                      const accum_t (&values)[WIDTH]) {
  if constexpr (WIDTH == 8) {
    if (has_vectors(to, col)) {
#pragma unroll
      for (int n = 0; n < WIDTH; n += STORED_VECTOR) {
        StoredVector stored;
#pragma unroll
        for (int m = 0; m < STORED_VECTOR; ++m) number::narrow(values[n + m], &stored.x[m]);
        *reinterpret_cast<StoredVector*>(to + n) = stored;
      }
      return;
    }
  }
#pragma unroll
  for (int n = 0; n < WIDTH; ++n) number::narrow(values[n], &to[n * col]);
}

// Gives columns from c on their signs.
__device__ __forceinline__ void flip(const unsigned int* signs, int c, accum_t (&x)[WIDTH]) {
#pragma unroll
  for (int n = 0; n < WIDTH; ++n) {
    if ((signs[(c + n) / 4] >> (c + n) % 4 & 1) != 0) x[n] = -x[n];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ HadamardParams p) {
  extern __shared__ Vector shared_smem[];
  accum_t* const tile = reinterpret_cast<accum_t*>(shared_smem);
  unsigned int* const signs = reinterpret_cast<unsigned int*>(tile + place(BLOCK_Q * D - 1) + 1);
  const philox::Key key = philox::split_seed(p.seed);
#pragma unroll 1
  for (int group = threadIdx.x; group < SIGNS; group += THREADS) {
    // Counters that no pair of dropout has: there is no such head.
    const philox::Words drawn = philox::words(key, static_cast<unsigned int>(group), 0, ~0ull);
    unsigned int negative = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) negative |= drawn.word[n] >> 31 << n;
    signs[group] = negative;
  }
  __syncthreads();

  const long long first = static_cast<long long>(blockIdx.x) * BLOCK_Q;
#pragma unroll 1
  for (int item = threadIdx.x; item < BLOCK_Q * D / WIDTH; item += THREADS) {
    const int c = item % (D / WIDTH) * WIDTH;
    const long long row = first + item / (D / WIDTH);
    accum_t values[WIDTH] = {};
    if (row < p.rows) {
      const storage_t* data = reinterpret_cast<const storage_t*>(p.x.data);
      load(data + offset(p, p.x, row) + c * p.x.col, p.x.col, values);
      if (p.inverse == 0) flip(signs, c, values);
      if constexpr (FUSED) butterflies(values);
    }
#pragma unroll
    for (int n = 0; n < WIDTH; ++n) tile[place(item * WIDTH) + n] = values[n];
  }
  __syncthreads();
  passes<FUSED ? RADIX : 1>(tile);
  if constexpr (FACTOR > 1) multiply(p, tile);

#pragma unroll 1
  for (int item = threadIdx.x; item < BLOCK_Q * D / WIDTH; item += THREADS) {
    const int c = item % (D / WIDTH) * WIDTH;
    const long long row = first + item / (D / WIDTH);
    if (row >= p.rows) return;
    accum_t values[WIDTH];
#pragma unroll
    for (int n = 0; n < WIDTH; ++n) {
      values[n] = tile[place(item * WIDTH) + n] * static_cast<accum_t>(p.scale);
    }
    if (p.inverse != 0) flip(signs, c, values);
    storage_t* data = reinterpret_cast<storage_t*>(p.out.data);
    store(data + offset(p, p.out, row) + c * p.out.col, p.out.col, values);
  }
}
