// delta = rowsum(do * out) - dlse, before the backward kernels: the twin of
// reference/backward_delta.py, whose gradient of the sink is in backward_sink.cu.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, line 4. 8 lanes or more read a row, 16 bytes each where
// it lies so.
//
// Grid: blocks of BLOCK_Q rows of all entries and heads; packed: of total_q rows of all heads.
// own_size = lead_size. Shared memory: none.
#include "params.cuh"
#include "arch/warp.cuh"
#include "primitives/layout.cuh"

namespace {

constexpr int PIECES = (D_V + STORED_VECTOR - 1) / STORED_VECTOR;
constexpr int LANES = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;  // of a row
constexpr int AT_ONCE = THREADS / LANES;
static_assert(BLOCK_Q % AT_ONCE == 0, "BLOCK_Q");

// A lane's share of the sum over a row; neighbouring elements are `out_step` and `step` apart. The
// order of the sum does not depend on how the row lies. Where there is a sink, outputs of 0 are
// left out: an empty row has no part in the sink's gradient, whatever its do holds.
__device__ __forceinline__ accum_t lane_sum(const storage_t* out, const storage_t* d_out,
                                            long long out_step, long long step, bool skips) {
  const bool aligned =
      (reinterpret_cast<unsigned long long>(out) | reinterpret_cast<unsigned long long>(d_out)) %
          sizeof(StoredVector) ==
      0;
  const bool vectors = D_V % STORED_VECTOR == 0 && aligned && out_step == 1 && step == 1;
  accum_t value = 0;
#pragma unroll 2
  for (int piece = threadIdx.x % LANES; piece < PIECES; piece += LANES) {
    StoredVector a, b;
    if (vectors) {
      a = reinterpret_cast<const StoredVector*>(out)[piece];
      b = reinterpret_cast<const StoredVector*>(d_out)[piece];
    } else {
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        const int d = piece * STORED_VECTOR + x;
        a.x[x] = d < D_V ? out[d * out_step] : storage_t(0);
        b.x[x] = d < D_V ? d_out[d * step] : storage_t(0);
      }
    }
#pragma unroll
    for (int x = 0; x < STORED_VECTOR; ++x) {
      const accum_t element = number::widen(a.x[x]), gradient = number::widen(b.x[x]);
      if (!skips || element != accum_t(0)) value += element * gradient;
    }
  }
  return value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  const long long length = PACKED ? p.total_q : p.len_q;
  const long long number = blockIdx.x / p.blocks;
  const long long h = number % p.heads;
  const long long i0 = blockIdx.x % p.blocks * BLOCK_Q;
  layout::Entry entry = {};  // of a packed array: all rows are counted from the first
  if constexpr (!PACKED) entry = layout::first_entry(p, number / p.heads);
  const storage_t* const out = reinterpret_cast<const storage_t*>(p.out.data) +
                               layout::offset(p.out, entry, h, false) + i0 * p.out.row;
  const storage_t* const d_out = reinterpret_cast<const storage_t*>(p.d_out.data) +
                                 layout::offset(p.d_out, entry, h, false) + i0 * p.d_out.row;
  const accum_t* const dlse = reinterpret_cast<const accum_t*>(p.dlse.data) +
                              layout::offset(p.dlse, entry, h, false) + i0 * p.dlse.row;
  accum_t* const delta = reinterpret_cast<accum_t*>(p.delta.data) +
                         layout::offset(p.delta, entry, h, false) + i0 * p.delta.row;
#pragma unroll 2
  for (int step = 0; step < BLOCK_Q; step += AT_ONCE) {
    const int row = step + threadIdx.x / LANES;
    const bool exists = i0 + row < length;
    accum_t value = 0;
    if (exists) {
      value = lane_sum(out + row * p.out.row, d_out + row * p.d_out.row, p.out.col, p.d_out.col,
                       p.sink != nullptr);
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) value += arch::shuffle_xor(value, lanes);
    if (!exists || threadIdx.x % LANES != 0) continue;
    if (p.dlse.data != nullptr) value -= dlse[row * p.dlse.row];
    delta[row * p.delta.row] = value;
  }
}
