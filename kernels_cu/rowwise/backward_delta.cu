// delta = rowsum(do * out) - dlse, before the backward kernels: the twin of
// reference/cpu/backward_delta.py, whose gradient of the sink is in backward_sink.cu. The kernel
// also sets to 0 the float32 sums of dq to which the next one adds, if there are any.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, line 4. 4, 8, 16 or 32 lanes read a row, 16 bytes each
// if strides and alignment allow it.
//
// Grid: blocks of BLOCK_Q rows of all entries and heads; packed: of total_q rows of all heads.
// own_size = lead_size. Shared memory: none.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../ptx/warp.cuh"
#include "../common/layout.cuh"

namespace {

constexpr int PIECES = (D_V + STORED_VECTOR - 1) / STORED_VECTOR;
constexpr int LANES = PIECES <= 4 ? 4 : PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;  // of a row
constexpr int AT_ONCE = THREADS / LANES;
// Rows that a lane loads before it adds the first of them. More would cost occupancy.
constexpr int AHEAD = 2;
// Blocks that share an SM, where as many registers are enough: each waits for memory.
constexpr int RESIDENT = IS_16_BIT ? 8 : 1;
static_assert(BLOCK_Q % (AT_ONCE * AHEAD) == 0, "BLOCK_Q");

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
template <bool VECTORS>
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

// Sets to 0 a block's share of a head's sums of dq, which are neighbours in memory. Of entries that
// share their sums, the first one does so.
__device__ __forceinline__ void clear_sums(const Params& p, const layout::Entry& entry, long long h,
                                           long long block) {
  struct alignas(16) Floats {
    float x[4];
  };
#pragma unroll
  for (int axis = 0; axis < MAX_LEAD; ++axis) {
    if (p.dq_accum.lead[axis] == 0 && entry.lead[axis] != 0) return;
  }
  Floats* const sums = reinterpret_cast<Floats*>(reinterpret_cast<float*>(p.dq_accum.data) +
                                                 layout::grouped_offset(p.dq_accum, entry, h));
  const long long count = p.dq_accum.head / 4;
  const long long each = layout::divide(count + p.blocks - 1, p.blocks).quotient;
  const long long end = count - block * each < each ? count : (block + 1) * each;
#pragma unroll 4
  for (long long n = block * each + threadIdx.x; n < end; n += THREADS) sums[n] = Floats{};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    KERNEL_NAME(const __grid_constant__ Params p) {
  const long long length = PACKED ? p.total_q : p.len_q;
  const long long head_of_batch = blockIdx.x / p.blocks;
  const long long h = head_of_batch % p.heads;
  const long long block = blockIdx.x % p.blocks, i0 = block * BLOCK_Q;
  layout::Entry entry = {};  // packed: rows are counted from the first of all sequences
  if constexpr (!PACKED) entry = layout::first_entry(p, head_of_batch / p.heads);
  ptx::wait_for_grids();
  ptx::launch_dependents();
  if (IS_16_BIT && p.dq_accum.data != nullptr) clear_sums(p, entry, h, block);
  const GlobalRows out(p.out, layout::offset(p.out, entry, h, false) + i0 * p.out.row);
  const GlobalRows d_out(p.d_out, layout::offset(p.d_out, entry, h, false) + i0 * p.d_out.row);
  const accum_t* const dlse = reinterpret_cast<const accum_t*>(p.dlse.data) +
                              layout::offset(p.dlse, entry, h, false) + i0 * p.dlse.row;
  accum_t* const delta = reinterpret_cast<accum_t*>(p.delta.data) +
                         layout::offset(p.delta, entry, h, false) + i0 * p.delta.row;
  const int valid = length - i0 < BLOCK_Q ? static_cast<int>(length - i0) : BLOCK_Q;
  // The same for all lanes of a warp, which add up together.
  const int rows = (valid + AT_ONCE * AHEAD - 1) / (AT_ONCE * AHEAD) * (AT_ONCE * AHEAD);
  const bool vectors = out.by_vectors() && d_out.by_vectors(),
             skip_zero_outputs = p.sink != nullptr;
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
      if (row >= valid || threadIdx.x % LANES != 0) continue;
      if (p.dlse.data != nullptr) value[n] -= dlse[row * p.dlse.row];
      delta[row * p.delta.row] = value[n];
    }
  }
}
