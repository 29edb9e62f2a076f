// Sums of a row's products of do and out, which delta is made of: the order of a sum depends on
// nothing but the row's width, so that all kernels that compute delta have the same bits.
#pragma once
#include "../ptx/warp.cuh"
#include "layout.cuh"

namespace row_products {

constexpr int PIECES = (D_V + STORED_VECTOR - 1) / STORED_VECTOR;
constexpr int LANES = PIECES <= 4 ? 4 : PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;  // of a row
constexpr int AT_ONCE = THREADS / LANES;

// A block's rows of an array in global memory; neighbouring elements of a row are `step` apart.
struct GlobalRows {
  const storage_t* data;
  long long row, step;

  __device__ __forceinline__ GlobalRows(const Operand& operand, long long from)
      : data(reinterpret_cast<const storage_t*>(operand.data) + from),
        row(operand.row),
        step(operand.col) {}

  __device__ __forceinline__ bool by_vectors() const {
    const bool aligned = reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
    return D_V % STORED_VECTOR == 0 && aligned && step == 1 && row % STORED_VECTOR == 0;
  }
  template <bool VECTORS>
  __device__ __forceinline__ StoredVector piece(int number, int index) const {
    const storage_t* const row_gmem = data + number * row;
    if constexpr (VECTORS) return reinterpret_cast<const StoredVector*>(row_gmem)[index];
    StoredVector loaded;
#pragma unroll
    for (int x = 0; x < STORED_VECTOR; ++x) {
      const int d = index * STORED_VECTOR + x;
      loaded.x[x] = d < D_V ? row_gmem[d * step] : storage_t(0);
    }
    return loaded;
  }
};

// A lane's partial sums of AHEAD rows from row `first` on, or of the last that exists. The order of
// a sum does not depend on strides. If there is a sink, outputs of 0 are skipped: an empty row adds
// nothing to the sink's gradient, whatever its do contains.
template <bool VECTORS, int AHEAD>
__device__ __forceinline__ void sum_rows(accum_t (&value)[AHEAD], const GlobalRows& out,
                                         const GlobalRows& d_out, int first, int valid,
                                         bool skip_zero_outputs) {
#pragma unroll
  for (int n = 0; n < AHEAD; ++n) value[n] = 0;
#pragma unroll 1
  for (int index = threadIdx.x % LANES; index < PIECES; index += LANES) {
    StoredVector a[AHEAD], b[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
      const int row = first + n * AT_ONCE, last = valid - 1;
      a[n] = out.piece<VECTORS>(row < last ? row : last, index);
      b[n] = d_out.piece<VECTORS>(row < last ? row : last, index);
    }
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        const accum_t element = number::widen(a[n].x[x]), gradient = number::widen(b[n].x[x]);
        if (!skip_zero_outputs || element != accum_t(0)) value[n] += element * gradient;
      }
    }
  }
}

// Calls `use` with each of `valid` rows of a block and its sum, in one lane. A lane loads AHEAD
// rows before it adds the first of them. All threads of the block call this together.
template <int AHEAD, class Use>
__device__ __forceinline__ void for_each_row(const GlobalRows& out, const GlobalRows& d_out,
                                             int valid, bool skip_zero_outputs, const Use& use) {
  // The same for all lanes of a warp, which add up together.
  const int rows = (valid + AT_ONCE * AHEAD - 1) / (AT_ONCE * AHEAD) * (AT_ONCE * AHEAD);
  const bool vectors = out.by_vectors() && d_out.by_vectors();
#pragma unroll 1
  for (int first = threadIdx.x / LANES; first < rows; first += AT_ONCE * AHEAD) {
    accum_t value[AHEAD];
    if (vectors) {
      sum_rows<true>(value, out, d_out, first, valid, skip_zero_outputs);
    } else {
      sum_rows<false>(value, out, d_out, first, valid, skip_zero_outputs);
    }
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
#pragma unroll
      for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
        value[n] += ptx::shuffle_xor(value[n], lanes);
      }
      const int row = first + n * AT_ONCE;
      if (row < valid && threadIdx.x % LANES == 0) use(row, value[n]);
    }
  }
}

}  // namespace row_products
