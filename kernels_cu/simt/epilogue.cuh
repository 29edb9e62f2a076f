// The epilogue of SIMT kernels: a block of results from registers to global memory.
#pragma once
#include "../ptx/red.cuh"
#include "../common/join.cuh"
#include "../common/matmul.cuh"

namespace epilogue {

// Stores a thread's part of a result of WIDTH columns, its rows times `factor`, as elements of type
// T. Row 0 of the block is row `first` of the entry's head; `valid` rows exist.
template <int WIDTH, typename T, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_as(const accum_t (&result)[ROWS][COLUMNS], const Operand& to,
                                         long long offset, long long first, int valid,
                                         const accum_t (&factor)[ROWS]) {
  constexpr int RUN = matmul::run_of(WIDTH);
  T* target = reinterpret_cast<T*>(to.data) + offset + (first + matmul::row_thread()) * to.row +
              matmul::result_column<WIDTH>(0) * to.col;
#pragma unroll
  for (int r = 0; r < ROWS; ++r, target += ROW_THREADS * to.row) {
    if (matmul::row_thread() + ROW_THREADS * r >= valid) break;
    T* element = target;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (matmul::result_column<WIDTH>(n) < WIDTH)
        number::narrow(result[r][n] * factor[r], element);
      element += ((n + 1) % RUN == 0 ? RUN * (COLUMN_THREADS - 1) + 1 : 1) * to.col;
    }
  }
}

// The keys of a result, of which a thread has a part, join those before them. `acc` times `inverse`
// is the result over the keys here, with row maxima m and sums l; afterwards it is that over all
// keys. Row 0 of the block is row `first` of the head; `valid` rows exist.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void resume(accum_t (&acc)[ROWS][COLUMNS], accum_t (&inverse)[ROWS],
                                       accum_t (&m)[ROWS], accum_t (&l)[ROWS], const Params& p,
                                       const layout::Entry& entry, long long head, long long first,
                                       int valid) {
  const Operand& before = p.out_before;
  const memory::RowStatistic lse = memory::row_statistic(p.lse_before, entry, head);
  const accum_t* const data = reinterpret_cast<const accum_t*>(before.data) +
                              layout::offset(before, entry, head, false) + first * before.row;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = matmul::row_thread() + ROW_THREADS * r;
    const accum_t own = l[r] == accum_t(0) ? -number::infinity() : m[r] + log(l[r]);
    const accum_t lse_before =
        row < valid ? lse.data[(first + row) * lse.row] : -number::infinity();
    const bool has_before = lse_before != -number::infinity();
    const join::Joined joined(own, lse_before);
    accum_t held[COLUMNS];  // all loaded before the first is used: the result may go there
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = matmul::result_column<WIDTH>(n);
      const bool exists = has_before && column < WIDTH;
      held[n] = exists ? data[row * before.row + column * before.col] : accum_t(0);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) acc[r][n] = joined.mean(acc[r][n] * inverse[r], held[n]);
    inverse[r] = 1;
    m[r] = joined.lse;
    l[r] = joined.lse == -number::infinity() ? accum_t(0) : accum_t(1);
  }
  __syncwarp();  // the lse before, read by all lanes of its row
}

// store_as the storage type or, if `wide`, the accumulator's.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const accum_t (&result)[ROWS][COLUMNS],
                                           const Operand& to, bool wide, long long offset,
                                           long long first, int valid, accum_t factor) {
  accum_t factors[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) factors[r] = factor;
  if constexpr (sizeof(storage_t) < sizeof(accum_t)) {
    if (wide) {
      store_as<WIDTH, accum_t>(result, to, offset, first, valid, factors);
      return;
    }
  }
  store_as<WIDTH, storage_t>(result, to, offset, first, valid, factors);
}

// Adds a thread's part of a result of matmul::multiply_transposed, times `factor`, to an array of
// the accumulator's type, atomically because other blocks do, too. The arguments are those of
// store_as.
template <int WIDTH, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_rows(const accum_t (&result)[ROWS][COLUMNS], const Operand& to,
                                         long long offset, long long first, int valid,
                                         accum_t factor) {
  constexpr int RUN = matmul::run_of(WIDTH);
  accum_t* const data = reinterpret_cast<accum_t*>(to.data) + offset + first * to.row;
  if constexpr (RUN == 4 && WIDTH % RUN == 0) {
    if (to.col == 1 && to.row % RUN == 0 && reinterpret_cast<unsigned long long>(data) % 16 == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = matmul::result_row<ROWS>(r);
        accum_t* const target = data + row * to.row + matmul::result_column<WIDTH>(0);
        if (row < valid) {
#pragma unroll
          for (int n = 0; n < COLUMNS; n += RUN) {
            if (WIDTH % (RUN * COLUMN_THREADS) == 0 || matmul::result_column<WIDTH>(n) < WIDTH) {
              ptx::red_add_v4(target + n * COLUMN_THREADS, result[r][n] * factor,
                              result[r][n + 1] * factor, result[r][n + 2] * factor,
                              result[r][n + 3] * factor);
            }
          }
        }
      }
      return;
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = matmul::result_row<ROWS>(r);
    accum_t* const target = data + row * to.row;
    if (row < valid) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const int column = matmul::result_column<WIDTH>(n);
        if (column < WIDTH) ptx::red_add(target + column * to.col, result[r][n] * factor);
      }
    }
  }
}

}  // namespace epilogue
