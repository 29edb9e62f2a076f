// The tangent of the sink's gradient, after backward_tangent_delta: the twin of
// `backward_tangent_sink` in reference/cpu/backward_tangent_delta.py.
//
// It is the sum over batch and queries of p_sink * ((mu - tsink) * delta - tdelta), where mu is the
// tangent of the log-sum-exp. One block sums a head's rows in a fixed order.
//
// Grid: heads. THREADS is a power of two. own_size = lead_size. Shared memory: THREADS numbers.
#include "../common/params.cuh"
#include "../common/softmax.cuh"

static_assert(SHARED_BYTES == THREADS * sizeof(accum_t), "SHARED_BYTES");

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ SecondParams x) {
  const TangentParams& t = x.first;
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  accum_t* const sums_smem = reinterpret_cast<accum_t*>(shared_smem);
  const long long h = blockIdx.x;
  const accum_t sink = number::load<accum_t>(p.sink, p.kind_sink, h);
  const accum_t tsink =
      t.tsink == nullptr ? accum_t(0) : number::load<accum_t>(t.tsink, t.kind_tsink, h);
  layout::Entry entry = {};  // packed: rows are counted from the first of all sequences
  const long long first = PACKED ? layout::clamp(p.offsets_q[0], 0, p.total_q) : 0;
  const long long last =
      PACKED ? layout::clamp(p.offsets_q[p.batch], 0, p.total_q) : p.batch * p.len_q;
  // A number of the row i.
  const auto number_of = [&](const Operand& operand, long long i) {
    const memory::RowStatistic rows = memory::row_statistic(operand, entry, h);
    return rows.data[i * rows.row];
  };

  accum_t total = 0;
#pragma unroll 1
  for (long long n = first + threadIdx.x; n < last; n += THREADS) {
    long long i = n;
    if constexpr (!PACKED) {
      entry = layout::first_entry(p, n / p.len_q);
      i = n % p.len_q;
    }
    const accum_t lse = number_of(p.lse, i);
    if (sink == -number::infinity() || lse == -number::infinity()) continue;
    const accum_t below = sink - lse > accum_t(0) ? accum_t(0) : sink - lse;
    const accum_t moved = tsink - number_of(t.tlse, i);
    total -= softmax::exponential(below) * (moved * number_of(p.delta, i) + number_of(x.tdelta, i));
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
