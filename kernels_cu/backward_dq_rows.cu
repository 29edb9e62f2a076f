// dq out of the sums that backward_sm80_dkdv adds up in global memory: rows of the storage type,
// times the scale. fragment_product::add_fragments says how the sums lie.
//
// A thread has 16 columns of a row; neighbours have the 8 rows of a group, then the next columns.
//
// Grid: groups of all places and heads, times the units of a row, THREADS to a block. own_size =
// the lengths of dq's leading axes. Shared memory: none.
#include "params.cuh"
#include "primitives/layout.cuh"

namespace {

constexpr int GROUP = layout::GROUP_ROWS;
constexpr int UNITS = (D + 15) / 16;

struct alignas(16) Floats {
  float x[4];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  const int row = static_cast<int>(thread % GROUP);
  const int unit = static_cast<int>(thread / GROUP % UNITS);
  const long long number = thread / (GROUP * UNITS);
  long long groups = p.blocks * p.heads;
  if constexpr (!PACKED) {
#pragma unroll
    for (int axis = 0; axis < MAX_LEAD; ++axis) groups *= p.own_size[axis];
  }
  if (number >= groups) return;
  const layout::Work work = layout::work_of(p, number, p.heads, false, GROUP, false);
  const long long i = work.block * GROUP + row;
  if (work.idle || i >= work.entry.len_q) return;

  const float* const sum = reinterpret_cast<const float*>(p.dq_sum.data) +
                           layout::grouped_offset(p.dq_sum, work.entry, work.head) +
                           work.block * GROUP * p.dq_sum.row + 128 * unit + 4 * row;
  float value[16];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Floats four = *reinterpret_cast<const Floats*>(sum + 32 * n);
#pragma unroll
    for (int x = 0; x < 4; ++x) value[8 * (n / 2) + 2 * x + n % 2] = four.x[x];
  }
  storage_t* const to = reinterpret_cast<storage_t*>(p.dq.data) +
                        layout::offset(p.dq, work.entry, work.head, false) + i * p.dq.row +
                        16 * unit * p.dq.col;
  const float scale = static_cast<float>(p.scale);
  const bool vectors = p.dq.col == 1 && reinterpret_cast<unsigned long long>(to) % 16 == 0;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    StoredVector stored;
#pragma unroll
    for (int x = 0; x < STORED_VECTOR; ++x) number::narrow(value[8 * n + x] * scale, &stored.x[x]);
    if (vectors && 16 * unit + 8 * n + 8 <= D) {
      reinterpret_cast<StoredVector*>(to)[n] = stored;
    } else {
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        if (16 * unit + 8 * n + x < D) to[(8 * n + x) * p.dq.col] = stored.x[x];
      }
    }
  }
}
