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
#include "../common/row_products.cuh"
#include "../common/tile_lists.cuh"

namespace {

// Rows that a lane loads before it adds the first of them. More would cost occupancy.
constexpr int AHEAD = 2;
// Blocks that share an SM, where as many registers are enough: each waits for memory.
constexpr int RESIDENT = IS_16_BIT ? 8 : 1;
static_assert(BLOCK_Q % (row_products::AT_ONCE * AHEAD) == 0, "BLOCK_Q");

struct alignas(16) Floats {
  float x[4];
};

// Sets to 0 a block's share of a head's sums of dq, which are neighbours in memory. Of entries that
// share their sums, the first one does so.
__device__ __forceinline__ void clear_sums(const Params& p, const layout::Entry& entry, long long h,
                                           long long block) {
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

// Whether there are queries whose dq is summed.
__device__ __forceinline__ bool has_sums(const Params& p) {
  if constexpr (!ONLY_LONG) return true;
  return long_sequences::list(p)[long_sequences::COUNT] > 0;
}

// Where HAS_SINGLES: sets to 0 the sums of the block's rows, of tiles whose dq is not stored. The
// shuffle has the compiler compute these rows again, as it has no registers to keep them.
__device__ __forceinline__ void clear_shared_tiles(const Params& p) {
  const unsigned int number = ptx::shuffle(blockIdx.x, 0);
  const unsigned int blocks = static_cast<unsigned int>(p.blocks), of_batch = number / blocks;
  const long long h = of_batch % static_cast<unsigned int>(p.heads);
  const long long i0 = static_cast<long long>(number % blocks) * BLOCK_Q;
  const layout::Entry entry = layout::first_entry(p, of_batch / static_cast<unsigned int>(p.heads));
  Floats* const sums = reinterpret_cast<Floats*>(reinterpret_cast<float*>(p.dq_accum.data) +
                                                 layout::grouped_offset(p.dq_accum, entry, h));
  const unsigned int* const singles = tile_lists::singles_of(p, entry.b, h);
  const long long row = p.dq_accum.row / 4, all = p.dq_accum.head / 4;
  const int queries = tile_lists::single_queries(p);  // BLOCK_Q is a multiple
#pragma unroll 1
  for (long long i = i0; i < i0 + BLOCK_Q && i < p.len_q; i += queries) {
    if (tile_lists::is_single(p, singles, i)) continue;
    const long long end = (i + queries) * row < all ? (i + queries) * row : all;
#pragma unroll 4
    for (long long n = i * row + threadIdx.x; n < end; n += THREADS) sums[n] = Floats{};
  }
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
  const auto begin = [] {
    ptx::wait_for_grids();
    ptx::launch_dependents();
  };
  if constexpr (!HAS_SINGLES) begin();
  if (!HAS_SINGLES && IS_16_BIT && p.dq_accum.data != nullptr && has_sums(p)) {
    clear_sums(p, entry, h, block);
  }
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
  if constexpr (HAS_SINGLES) {
    // Only now: do and out were written before the lists, and delta's last reader ended before.
    begin();
    clear_shared_tiles(p);
  }
}
