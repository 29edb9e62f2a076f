// The postprocessing of dq: rounds the float32 sums that backward_sm80_dkdv or backward_sm90_dkdv
// accumulated in global memory, times the scale, to rows of the storage type. The layout of the
// sums is that of fragment_product.cuh with ADJACENT_DQ (p.dq_accum.col is 1) or without (it is
// 32).
//
// A thread converts 16 columns of a row at a time. Neighbouring threads have the 8 rows of a group,
// then the next 16 columns.
//
// Grid: blocks of BLOCK_Q rows of all entries and heads, as of backward_simt_dq. own_size: the
// lengths of dq's leading axes. Shared memory: none.
#include "../common/params.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/grid.cuh"
#include "../common/layout.cuh"
#include "../common/tile_lists.cuh"

namespace {

constexpr int GROUP = layout::GROUP_ROWS;
constexpr int UNITS = (D + 15) / 16;
static_assert(IS_16_BIT, "16-bit types");
static_assert(BLOCK_Q % GROUP == 0, "BLOCK_Q");

struct alignas(16) Floats {
  float x[4];
};

// Converts a block of rows.
__device__ __forceinline__ void convert(const Params& p, const layout::WorkTile& work) {
  const long long i0 = work.block * BLOCK_Q, length = work.entry.len_q;
  const unsigned int* singles = nullptr;
  if constexpr (HAS_SINGLES) {  // tiles whose dq has been stored
    singles = tile_lists::singles_of(p, work.entry.b, work.head);
    bool stored = true;
#pragma unroll 1
    for (long long i = i0; i < i0 + BLOCK_Q && i < length; i += tile_lists::single_queries(p)) {
      stored = stored && tile_lists::is_single(p, singles, i);
    }
    if (stored) return;
  }
  const float* const sums = reinterpret_cast<const float*>(p.dq_accum.data) +
                            layout::grouped_offset(p.dq_accum, work.entry, work.head) +
                            i0 * p.dq_accum.row;
  result_t* const rows = reinterpret_cast<result_t*>(p.dq.data) +
                         layout::offset(p.dq, work.entry, work.head, false) + i0 * p.dq.row;
  const float scale = static_cast<float>(p.scale);
#pragma unroll 2
  for (int n = threadIdx.x; n < BLOCK_Q * UNITS; n += THREADS) {
    const int unit = n / GROUP % UNITS, row = n / (GROUP * UNITS) * GROUP + n % GROUP;
    if (i0 + row >= length) continue;
    if (HAS_SINGLES && tile_lists::is_single(p, singles, i0 + row)) continue;
    // The units of 16 columns of a group follow each other, then comes the next group. Four lanes
    // accumulated a row, four numbers each, which are adjacent or 32 apart.
    const bool adjacent = p.dq_accum.col == 1;
    const float* const sum = sums + n / GROUP * 128 + n % GROUP * (adjacent ? 16 : 4);
    float value[16];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const Floats four = *reinterpret_cast<const Floats*>(sum + m * (adjacent ? 4 : 32));
#pragma unroll
      for (int x = 0; x < 4; ++x) value[4 * m + x] = four.x[x];
    }
    // Value x of vector m is number x of lane m where a lane's numbers are adjacent, else number m
    // of lane x.
    const auto column = [&](int column_of_unit) {
      const int lane = column_of_unit % 8 / 2, number = column_of_unit / 8 * 2 + column_of_unit % 2;
      return adjacent ? value[4 * lane + number] : value[4 * number + lane];
    };
    result_t* const to = rows + row * p.dq.row + 16 * unit * p.dq.col;
    const bool vectors = p.dq.col == 1 && reinterpret_cast<unsigned long long>(to) % 16 == 0;
    if constexpr (WIDE_RESULT) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        Floats four;
#pragma unroll
        for (int x = 0; x < 4; ++x) four.x[x] = column(4 * m + x) * scale;
        if (vectors && 16 * unit + 4 * m + 4 <= D) {
          *reinterpret_cast<Floats*>(to + 4 * m) = four;
        } else {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            if (16 * unit + 4 * m + x < D) to[(4 * m + x) * p.dq.col] = four.x[x];
          }
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::Bytes16 words;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          words.x[x] =
              number::narrow_pair(column(8 * m + 2 * x) * scale, column(8 * m + 2 * x + 1) * scale);
        }
        if (vectors && 16 * unit + 8 * m + 8 <= D) {
          ptx::store(to + 8 * m, words);
        } else {
#pragma unroll
          for (int x = 0; x < 8; ++x) {
            const auto stored = static_cast<storage_t>(words.x[x / 2] >> 16 * (x % 2));
            if (16 * unit + 8 * m + x < D) to[(8 * m + x) * p.dq.col] = stored;
          }
        }
      }
    }
  }
}

__device__ __forceinline__ layout::WorkTile work_tile(const Params& p, long long number) {
  return layout::work_tile_of(p, number, p.heads, false, BLOCK_Q, false);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  layout::WorkTile own = {};
  if constexpr (!ONLY_LONG) own = work_tile(p, blockIdx.x);
  ptx::wait_for_grids();  // the sums
  ptx::launch_dependents();
  if constexpr (ONLY_LONG) {
    const long_sequences::Turns turns(p, p.heads, false, BLOCK_Q);
#pragma unroll 1
    for (unsigned int n = blockIdx.x; n < turns.count; n += gridDim.x) {
      const layout::WorkTile work = work_tile(p, turns.place(p, n));
      if (!work.idle) convert(p, work);
    }
  } else {
    if (!own.idle) convert(p, own);
  }
}
