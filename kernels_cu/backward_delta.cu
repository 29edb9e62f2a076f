// delta = rowsum(do * out) - dlse, before the backward kernels: the twin of
// reference/backward_delta.py, whose gradient of the sink is in backward_sink.cu.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, line 4. A warp works on one row.
//
// Grid: the rows of all entries and heads (packed: total_q * heads), THREADS / 32 to a block.
// own_size = lead_size. Shared memory: none.
#include "params.cuh"
#include "arch/warp.cuh"
#include "primitives/layout.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  constexpr int WARPS = THREADS / arch::WARP_SIZE;
  const int lane = arch::lane_index();
  const long long row = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / arch::WARP_SIZE;
  const long long length = PACKED ? p.total_q : p.len_q;
  const long long i = row % length;
  const long long h = row / length % p.heads;
  const long long place = row / length / p.heads;
  if (place >= (PACKED ? 1 : p.batch)) return;
  layout::Entry entry = {};  // of a packed array: all rows are counted from the first
  if constexpr (!PACKED) entry = layout::first_entry(p, place);

  const storage_t* const out = reinterpret_cast<const storage_t*>(p.out.data) +
                               layout::offset(p.out, entry, h, false) + i * p.out.row;
  const storage_t* const d_out = reinterpret_cast<const storage_t*>(p.d_out.data) +
                                 layout::offset(p.d_out, entry, h, false) + i * p.d_out.row;
  accum_t value = 0;
#pragma unroll 4
  for (int d = lane; d < D_V; d += arch::WARP_SIZE) {
    const accum_t element = number::widen(out[d * p.out.col]);
    const accum_t gradient = number::widen(d_out[d * p.d_out.col]);
    // An empty row's output is 0 whatever its gradient holds.
    if (element != accum_t(0)) value += element * gradient;
  }
#pragma unroll
  for (int lanes = arch::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    value += arch::shuffle_xor(value, lanes);
  }
  if (lane != 0) return;
  if (p.dlse.data != nullptr) {
    value -= reinterpret_cast<const accum_t*>(
        p.dlse.data)[layout::offset(p.dlse, entry, h, false) + i * p.dlse.row];
  }
  reinterpret_cast<accum_t*>(
      p.delta.data)[layout::offset(p.delta, entry, h, false) + i * p.delta.row] = value;
}
