// delta = rowsum(do * out) - dlse, before the backward kernels: the twin of
// reference/backward_delta.py, whose gradient of the sink is in backward_sink.cu.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, line 4. A warp works on four rows, of which it has one,
// two or four at a time: 8 lanes or more read one, 16 bytes each where it lies so.
//
// Grid: the rows of all entries and heads (packed: total_q * heads), THREADS / 8 to a block.
// own_size = lead_size. Shared memory: none.
#include "params.cuh"
#include "arch/warp.cuh"
#include "primitives/layout.cuh"

namespace {

constexpr int WARP_ROWS = 4;
constexpr int PIECES = (D_V + STORED_VECTOR - 1) / STORED_VECTOR;
constexpr int LANES = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;  // of a row
constexpr int AT_ONCE = arch::WARP_SIZE / LANES;

// A lane's share of the sum over a row; neighbouring elements are `step` and `out_step` apart.
__device__ __forceinline__ accum_t row_sum(const storage_t* out, const storage_t* d_out,
                                           long long out_step, long long step) {
  const int lane = arch::lane_index() % LANES;
  accum_t value = 0;
  // An empty row's output is 0 whatever its gradient holds.
  const auto add = [&](storage_t x, storage_t y) {
    const accum_t element = number::widen(x), gradient = number::widen(y);
    if (element != accum_t(0)) value += element * gradient;
  };
  const bool aligned =
      (reinterpret_cast<unsigned long long>(out) | reinterpret_cast<unsigned long long>(d_out)) %
          sizeof(StoredVector) ==
      0;
  if (D_V % STORED_VECTOR == 0 && aligned && out_step == 1 && step == 1) {
#pragma unroll 2
    for (int piece = lane; piece < PIECES; piece += LANES) {
      const auto a = reinterpret_cast<const StoredVector*>(out)[piece];
      const auto b = reinterpret_cast<const StoredVector*>(d_out)[piece];
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) add(a.x[x], b.x[x]);
    }
  } else {
#pragma unroll 4
    for (int d = lane; d < D_V; d += LANES) add(out[d * out_step], d_out[d * step]);
  }
  return value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  constexpr int WARPS = THREADS / arch::WARP_SIZE;
  const long long warp = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / arch::WARP_SIZE;
  const long long length = PACKED ? p.total_q : p.len_q;
#pragma unroll
  for (int first = 0; first < WARP_ROWS; first += AT_ONCE) {
    const long long row = warp * WARP_ROWS + first + arch::lane_index() / LANES;
    const long long i = row % length;
    const long long h = row / length % p.heads;
    const long long place = row / length / p.heads;
    const bool exists = place < (PACKED ? 1 : p.batch);
    layout::Entry entry = {};  // of a packed array: all rows are counted from the first
    accum_t value = 0;
    if (exists) {
      if constexpr (!PACKED) entry = layout::first_entry(p, place);
      value = row_sum(reinterpret_cast<const storage_t*>(p.out.data) +
                          layout::offset(p.out, entry, h, false) + i * p.out.row,
                      reinterpret_cast<const storage_t*>(p.d_out.data) +
                          layout::offset(p.d_out, entry, h, false) + i * p.d_out.row,
                      p.out.col, p.d_out.col);
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) value += arch::shuffle_xor(value, lanes);
    if (!exists || arch::lane_index() % LANES != 0) continue;
    if (p.dlse.data != nullptr) {
      value -= reinterpret_cast<const accum_t*>(
          p.dlse.data)[layout::offset(p.dlse, entry, h, false) + i * p.dlse.row];
    }
    reinterpret_cast<accum_t*>(
        p.delta.data)[layout::offset(p.delta, entry, h, false) + i * p.delta.row] = value;
  }
}
