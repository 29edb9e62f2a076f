// delta = rowsum(do * out) - dlse and its tangent, tdelta = rowsum(tdo * out + do * tout) - tdlse,
// before the kernels of tangents of gradients: the twin of
// reference/cpu/backward_tangent_delta.py. With WIDE_RESULT, tout has the accumulator's type, and
// is also rounded.
//
// A warp sums a row, neighbouring lanes neighbouring elements. Where an element of out or of tout
// is 0, its factor does not matter: an empty row adds nothing, whatever its do contains.
//
// Grid: blocks of BLOCK_Q rows of all entries and heads; packed: of total_q rows of all heads.
// own_size = lead_size. Shared memory: none.
#include "../common/params.cuh"
#include "../ptx/warp.cuh"
#include "../common/layout.cuh"

namespace {

// An array's rows, from the first of a block on.
template <typename T>
struct BlockRows {
  T* data;
  long long row, step;

  __device__ __forceinline__ BlockRows(const Operand& operand, const layout::Entry& entry,
                                       long long h, long long i0)
      : data(reinterpret_cast<T*>(operand.data) + layout::offset(operand, entry, h, false) +
             i0 * operand.row),
        row(operand.row),
        step(operand.col) {}
  __device__ __forceinline__ T* at(int i, int column) const {
    return data + i * row + column * step;
  }
};

__device__ __forceinline__ accum_t product(accum_t out, accum_t gradient) {
  return out == accum_t(0) ? accum_t(0) : out * gradient;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ SecondParams x) {
  const TangentParams& t = x.first;
  const Params& p = t.call;
  const long long length = PACKED ? p.total_q : p.len_q;
  const long long head_of_batch = blockIdx.x / p.blocks;
  const long long h = head_of_batch % p.heads;
  const long long i0 = blockIdx.x % p.blocks * BLOCK_Q;
  layout::Entry entry = {};  // packed: rows are counted from the first of all sequences
  if constexpr (!PACKED) entry = layout::first_entry(p, head_of_batch / p.heads);
  const BlockRows<const storage_t> out(p.out, entry, h, i0), d_out(p.d_out, entry, h, i0),
      tdo(HAS_TDO ? x.tdo : p.d_out, entry, h, i0);
  const BlockRows<const result_t> tout(t.tout, entry, h, i0);
  const BlockRows<storage_t> rounded(x.tout_rounded, entry, h, i0);
  const BlockRows<accum_t> delta(p.delta, entry, h, i0), tdelta(x.tdelta, entry, h, i0);
  const BlockRows<const accum_t> dlse(p.dlse, entry, h, i0), tdlse(x.tdlse, entry, h, i0);
  const int valid = length - i0 < BLOCK_Q ? static_cast<int>(length - i0) : BLOCK_Q;
  const int lane = threadIdx.x % ptx::WARP_SIZE;
#pragma unroll 1
  for (int i = threadIdx.x / ptx::WARP_SIZE; i < valid; i += THREADS / ptx::WARP_SIZE) {
    accum_t sum = 0, tangent = 0;
#pragma unroll 2
    for (int column = lane; column < D_V; column += ptx::WARP_SIZE) {
      const accum_t o = number::widen(*out.at(i, column));
      const accum_t gradient = number::widen(*d_out.at(i, column));
      accum_t moved;
      if constexpr (WIDE_RESULT) {
        moved = *tout.at(i, column);
        number::narrow(moved, rounded.at(i, column));
      } else {
        moved = number::widen(*tout.at(i, column));
      }
      sum += product(o, gradient);
      tangent += product(moved, gradient);
      if constexpr (HAS_TDO) tangent += product(o, number::widen(*tdo.at(i, column)));
    }
#pragma unroll
    for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
      sum += ptx::shuffle_xor(sum, lanes);
      tangent += ptx::shuffle_xor(tangent, lanes);
    }
    if (lane != 0) continue;
    if (p.dlse.data != nullptr) sum -= *dlse.at(i, 0);
    if (x.tdlse.data != nullptr) tangent -= *tdlse.at(i, 0);
    *delta.at(i, 0) = sum;
    *tdelta.at(i, 0) = tangent;
  }
}
