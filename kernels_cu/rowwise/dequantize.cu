// Turns codes of float8 into numbers of the storage type, x = scale * code rounded once. `lanes`
// neighbouring lanes of a warp have a row, 8 columns a lane at a time.
//
// Grid: the rows, THREADS / lanes to a block. Shared memory: none.
#include "../common/params.cuh"
#include "../ptx/warp.cuh"
#include "../common/number.cuh"
#include "../common/code.cuh"
#include "../common/layout.cuh"

namespace {

constexpr int CHUNK = 8;  // columns of a lane, at a time

template <int FORMAT>
__device__ __forceinline__ void dequantize(const QuantizeParams& p) {
  const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  const layout::Quotient by_row = layout::divide(thread, p.lanes);
  if (by_row.quotient >= p.rows) return;
  long long row = by_row.quotient, x = 0, codes = 0, scale = 0;
#pragma unroll
  for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
    const layout::Quotient rest = layout::divide(row, p.lead_size[axis]);
    x += rest.remainder * p.x.lead[axis];
    codes += rest.remainder * p.codes.lead[axis];
    scale += rest.remainder * p.scale.lead[axis];
    row = rest.quotient;
  }
  const float factor = reinterpret_cast<const float*>(p.scale.data)[scale];
  const unsigned char* const from = reinterpret_cast<const unsigned char*>(p.codes.data) + codes;
  storage_t* const to = reinterpret_cast<storage_t*>(p.x.data) + x;
#pragma unroll 1
  for (long long c = by_row.remainder * CHUNK; c < p.columns; c += p.lanes * CHUNK) {
#pragma unroll
    for (int n = 0; n < CHUNK; ++n) {
      if (c + n < p.columns) {
        const float value = code::value<FORMAT>(from[(c + n) * p.codes.col]);
        number::narrow(code::product(value, factor), to + (c + n) * p.x.col);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ QuantizeParams p) {
  if (p.format == code::E4M3) {
    dequantize<code::E4M3>(p);
  } else {
    dequantize<code::E5M2>(p);
  }
}
