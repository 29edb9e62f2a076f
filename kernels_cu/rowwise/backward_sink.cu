// The gradient of the sink, after backward_delta: the twin of `backward_sink` in
// reference/cpu/backward_delta.py.
//
// dsink[h] is the sum over batch and queries of p_sink * (dlse - rowsum(do * out)), which is
// -p_sink * delta. One block sums a head's rows in a fixed order.
//
// Grid: heads. THREADS is a power of two. own_size = lead_size. Shared memory: THREADS numbers.
#include "../common/params.cuh"
#include "../common/softmax.cuh"

static_assert(SHARED_BYTES == THREADS * sizeof(accum_t), "SHARED_BYTES");

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  accum_t* const sums_smem = reinterpret_cast<accum_t*>(shared_smem);
  const long long h = blockIdx.x;
  const accum_t sink = number::load<accum_t>(p.sink, p.kind_sink, h);
  const accum_t* const lse = reinterpret_cast<const accum_t*>(p.lse.data);
  const accum_t* const delta = reinterpret_cast<const accum_t*>(p.delta.data);
  layout::Entry entry = {};  // packed: rows are counted from the first of all sequences
  const long long first = PACKED ? layout::clamp(p.offsets_q[0], 0, p.total_q) : 0;
  const long long last =
      PACKED ? layout::clamp(p.offsets_q[p.batch], 0, p.total_q) : p.batch * p.len_q;

  accum_t total = 0;
#pragma unroll 1
  for (long long n = first + threadIdx.x; n < last; n += THREADS) {
    long long i = n;
    if constexpr (!PACKED) {
      entry = layout::first_entry(p, n / p.len_q);
      i = n % p.len_q;
    }
    const accum_t row_lse = lse[layout::offset(p.lse, entry, h, false) + i * p.lse.row];
    if (sink == -number::infinity() || row_lse == -number::infinity()) continue;
    const accum_t below = sink - row_lse > accum_t(0) ? accum_t(0) : sink - row_lse;
    total -= softmax::exponential(below) *
             delta[layout::offset(p.delta, entry, h, false) + i * p.delta.row];
  }
  sums_smem[threadIdx.x] = total;
#pragma unroll 1
  for (int step = THREADS / 2; step > 0; step /= 2) {
    __syncthreads();  // the partial sums, written by other threads
    if (static_cast<int>(threadIdx.x) < step)
      sums_smem[threadIdx.x] += sums_smem[threadIdx.x + step];
  }
  if (threadIdx.x == 0) number::store(p.dsink, p.kind_dsink, h, sums_smem[0]);
}
