// Lists packed sequences that are not short, see common/long_sequences.cuh, in their order.
//
// Grid: one block, whose threads have a sequence each at a time. Shared memory: two sums of a
// thread.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../ptx/warp.cuh"
#include "../common/layout.cuh"
#include "../common/long_sequences.cuh"

namespace {

// Of the sequences up to a thread's own: how many are long, and their rows.
struct Sums {
  int count, rows_q, rows_k;
};
static_assert(SHARED_BYTES == 2 * THREADS * sizeof(Sums), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  using namespace long_sequences;
  extern __shared__ Sums sums_smem[];
  ptx::wait_for_grids();  // the offsets
  ptx::launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), batch = static_cast<int>(p.batch);
  int* const to = const_cast<int*>(list(p));
  Sums before = {0, 0, 0};  // of the rounds before
#pragma unroll 1
  for (int first = 0; first < batch; first += THREADS) {
    const int b = first + thread;
    const bool is_long = b < batch && !is_short(p, b);
    Sums own = {0, 0, 0};
    if (is_long) {
      own = {1, static_cast<int>(rows_of(p.offsets_q, p.total_q, b)),
             static_cast<int>(rows_of(p.offsets_k, p.total_k, b))};
    }
    Sums all = own;
    int side = 0;
    sums_smem[thread] = all;
#pragma unroll 1
    for (int step = 1; step < THREADS; step *= 2) {
      __syncthreads();  // the sums of the last step
      if (thread >= step) {
        const Sums other = sums_smem[side * THREADS + thread - step];
        all = {all.count + other.count, all.rows_q + other.rows_q, all.rows_k + other.rows_k};
      }
      side ^= 1;
      sums_smem[side * THREADS + thread] = all;
    }
    __syncthreads();  // the last sums
    if (is_long) {
      const int n = before.count + all.count - 1;
      const_cast<int*>(numbers(p))[n] = b;
      const_cast<int*>(first_rows(p, false))[n] = before.rows_q + all.rows_q - own.rows_q;
      const_cast<int*>(first_rows(p, true))[n] = before.rows_k + all.rows_k - own.rows_k;
    }
    const Sums last = sums_smem[side * THREADS + THREADS - 1];
    before = {before.count + last.count, before.rows_q + last.rows_q, before.rows_k + last.rows_k};
    __syncthreads();  // the sums, which the next round overwrites
  }
  if (thread == 0) {
    to[COUNT] = before.count;
    to[ROWS_Q] = before.rows_q;
    to[ROWS_K] = before.rows_k;
    *taken(p) = 0;
  }
}
