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
#include "../common/row_products.cuh"
#include "../common/single_tiles.cuh"

namespace {

// Rows that a lane loads before it adds the first of them. More would cost occupancy.
constexpr int AHEAD = 2;
// Blocks that share an SM, where as many registers are enough: each waits for memory.
constexpr int RESIDENT = IS_16_BIT ? 8 : 1;
static_assert(BLOCK_Q % (row_products::AT_ONCE * AHEAD) == 0, "BLOCK_Q");

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
  if constexpr (HAS_LISTS) {
    // Tiles whose dq is stored have no sums; rows of a group lie together.
    const int row = static_cast<int>(p.dq_accum.row), group = layout::GROUP_ROWS;
    const int first = static_cast<int>(block * each) * 4 / (row * group) * group;
    const int last = (static_cast<int>(end) * 4 + row * group - 1) / (row * group) * group;
    const int rows = last < p.len_q ? last : static_cast<int>(p.len_q);
    const unsigned int* const words = single_tiles::words_of(p, entry.b, h);
    if (block * each >= end || single_tiles::are_single(p, words, first, rows)) return;
  }
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
  const row_products::GlobalRows out(p.out,
                                     layout::offset(p.out, entry, h, false) + i0 * p.out.row);
  const row_products::GlobalRows d_out(p.d_out,
                                       layout::offset(p.d_out, entry, h, false) + i0 * p.d_out.row);
  const accum_t* const dlse = reinterpret_cast<const accum_t*>(p.dlse.data) +
                              layout::offset(p.dlse, entry, h, false) + i0 * p.dlse.row;
  accum_t* const delta = reinterpret_cast<accum_t*>(p.delta.data) +
                         layout::offset(p.delta, entry, h, false) + i0 * p.delta.row;
  const int valid = length - i0 < BLOCK_Q ? static_cast<int>(length - i0) : BLOCK_Q;
  row_products::for_each_row<AHEAD>(out, d_out, valid, p.sink != nullptr,
                                    [&](int row, accum_t value) {
                                      if (p.dlse.data != nullptr) value -= dlse[row * p.dlse.row];
                                      delta[row * p.delta.row] = value;
                                    });
}
