// Combines attention over disjoint sets of keys: the twin of reference/cpu/combine.py.
//
// From (out, lse) of each set, it computes the result of one call over all keys:
// lse = log sum exp(lse_n) and out = sum exp(lse_n - lse) out_n. Each part is multiplied by its
// normalised weight before the sum, and no element of the sum is larger than the parts' largest, so
// that finite parts have a finite mean. A set without keys has lse = -inf and is skipped, so (0,
// -inf) is the neutral element. A warp computes ROWS neighbouring rows of a head.
//
// Grid: the groups of ROWS rows of all entries and heads, THREADS / 32 to a block. Shared memory:
// none.
#include "../common/params.cuh"
#include "../ptx/warp.cuh"
#include "../common/layout.cuh"
#include "../common/join.cuh"

namespace {

constexpr int ROWS = 4;
constexpr int COLUMNS = 4;  // of a thread, at a time: neighbours
constexpr int ACCUM_KIND = sizeof(accum_t) == sizeof(float) ? KIND_FLOAT32 : KIND_FLOAT64;

// The columns of a thread, as they lie in memory.
template <class T>
struct alignas(COLUMNS * sizeof(T) < 16 ? COLUMNS * sizeof(T) : 16) Columns {
  T x[COLUMNS];
};

// Whether a thread's columns, from `first` on, are all there, and can be read or written at once.
template <class T>
__device__ __forceinline__ bool at_once(const Operand& operand, const T* first, long long left) {
  return operand.col == 1 && left >= COLUMNS &&
         reinterpret_cast<unsigned long long>(first) % alignof(Columns<T>) == 0;
}

// Loads a thread's columns of a row, of which `left` exist.
__device__ __forceinline__ void load_columns(const Operand& part, int kind, long long index,
                                             long long left, accum_t (&elements)[COLUMNS]) {
  if (kind == ACCUM_KIND) {
    const accum_t* const from = reinterpret_cast<const accum_t*>(part.data) + index;
    if (at_once(part, from, left)) {
      const Columns<accum_t> columns = *reinterpret_cast<const Columns<accum_t>*>(from);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) elements[c] = columns.x[c];
      return;
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    elements[c] = c < left ? number::load<accum_t>(part.data, kind, index + c * part.col) : 0;
  }
}

// Rounds and stores a thread's columns of a row, of which `left` exist.
__device__ __forceinline__ void store_columns(const Operand& out, int kind, long long index,
                                              long long left, const accum_t (&elements)[COLUMNS]) {
  if (kind == number::STORAGE_KIND) {
    storage_t* const to = reinterpret_cast<storage_t*>(out.data) + index;
    if (at_once(out, to, left)) {
      Columns<storage_t> columns;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) number::narrow(elements[c], &columns.x[c]);
      *reinterpret_cast<Columns<storage_t>*>(to) = columns;
      return;
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    if (c < left) number::store(out.data, kind, index + c * out.col, elements[c]);
  }
}

// The indices of the first of a warp's rows in the arrays of a call.
struct Row {
  long long lead[MAX_LEAD];
  long long head;
  long long i;
};

__device__ __forceinline__ long long offset(const Operand& operand, const Row& row) {
  long long elements = row.head * operand.head + row.i * operand.row;
#pragma unroll
  for (int axis = 0; axis < MAX_LEAD; ++axis) elements += row.lead[axis] * operand.lead[axis];
  return elements;
}

// Loads the lse of a warp's rows, of which `rows` exist; -inf for the others. NaN for +inf, which
// is the log-sum-exp of no numbers.
__device__ __forceinline__ void load_lse(const Operand& operand, const Row& row, int rows,
                                         accum_t (&lse)[ROWS]) {
  const accum_t* const from = reinterpret_cast<const accum_t*>(operand.data) + offset(operand, row);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    lse[r] = r < rows ? from[r * operand.row] : -number::infinity();
    if (lse[r] == number::infinity()) lse[r] -= lse[r];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ CombineParams p) {
  constexpr int WARPS = THREADS / ptx::WARP_SIZE;
  const int lane = ptx::lane_index();
  long long index = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / ptx::WARP_SIZE;
  Row row;
  const auto take = [&](long long size) {
    const layout::Quotient at = layout::divide(index, size);
    index = at.quotient;
    return at.remainder;
  };
  row.i = ROWS * take((p.rows + ROWS - 1) / ROWS);
  row.head = take(p.heads);
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) row.lead[axis] = take(p.lead_size[axis]);
  if (index > 0) return;
  const int rows = static_cast<int>(p.rows - row.i < ROWS ? p.rows - row.i : ROWS);

  accum_t lse[ROWS], m[ROWS], l[ROWS], inverse[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m[r] = -number::infinity();
    l[r] = 0;
  }
#pragma unroll 1
  for (int n = 0; n < p.parts; ++n) {
    load_lse(p.lses[n], row, rows, lse);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m[r] = join::larger(m[r], lse[r]);
  }
#pragma unroll 1
  for (int n = 0; n < p.parts; ++n) {
    load_lse(p.lses[n], row, rows, lse);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) l[r] += join::weight(lse[r], m[r]);
  }
  // Where no set has keys, infinite and unused.
#pragma unroll
  for (int r = 0; r < ROWS; ++r) inverse[r] = accum_t(1) / l[r];

  const long long target = offset(p.out, row);
#pragma unroll 1
  for (long long first = COLUMNS * lane; first < p.columns; first += COLUMNS * ptx::WARP_SIZE) {
    const long long left = p.columns - first;
    accum_t sums[ROWS][COLUMNS] = {}, most[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int n = 0; n < p.parts; ++n) {
      const Operand& part = p.outs[n];
      const long long source = offset(part, row) + first * part.col;
      accum_t elements[ROWS][COLUMNS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (r < rows) load_columns(part, p.kinds[n], source + r * part.row, left, elements[r]);
      }
      load_lse(p.lses[n], row, rows, lse);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (lse[r] == -number::infinity()) continue;  // its output may be anything
        const accum_t factor = join::weight(lse[r], m[r]) * inverse[r];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          sums[r][c] += factor * elements[r][c];
          const accum_t size = fabs(elements[r][c]);
          most[r][c] = size > most[r][c] ? size : most[r][c];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r >= rows) break;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) sums[r][c] = join::bounded(sums[r][c], most[r][c]);
      store_columns(p.out, p.kind_out, target + r * p.out.row + first * p.out.col, left, sums[r]);
    }
  }
  if (lane < rows) {
    accum_t result = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) result = lane == r ? m[r] + log(l[r]) : result;
    reinterpret_cast<accum_t*>(p.lse.data)[offset(p.lse, row) + lane * p.lse.row] = result;
  }
}
