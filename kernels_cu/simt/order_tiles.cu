// The order in which work tiles are dealt, the longest first: of the rows of lists of tiles, see
// common/tile_lists.cuh. A row with as many tiles as an earlier one comes before it.
//
// Grid: a block for each list, that of an entry and a head. A row takes as long as it has tiles;
// one that is not FULL counts as a quarter more.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../common/tile.cuh"

namespace {

__device__ __forceinline__ int cost_of(const tile_lists::ClassWord* words, int count) {
  int cost = 0;
#pragma unroll 4
  for (int n = 0; n < count; ++n) {
    cost += 5 * __popc(words[n].nonempty) - __popc(words[n].full);
  }
  return cost;
}

static_assert(SHARED_BYTES == THREADS * sizeof(int), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  using namespace tile_lists;
  extern __shared__ int costs_smem[];  // of a row for each thread
  const Table& lists = table(p);
  const int rows = static_cast<int>(lists.shape[ROWS]),
            words = static_cast<int>(lists.shape[WORDS]);
  const unsigned int heads = static_cast<unsigned int>(lists.shape[HEADS]);
  const long long b = blockIdx.x / heads, h = blockIdx.x % heads * lists.shape[EACH];
  const int thread = static_cast<int>(threadIdx.x);
  ptx::wait_for_grids();  // the lists
  ptx::launch_dependents();
  const auto cost = [&](int row) {
    return row < rows ? cost_of(words_of(p, b, h, row), words) : -1;
  };
#pragma unroll 1
  for (int first = 0; first < rows; first += THREADS) {
    const int row = first + thread, own = cost(row);
    int rank = 0;
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += THREADS) {
      __syncthreads();  // costs that other threads may still read
      costs_smem[thread] = cost(begin + thread);
      __syncthreads();  // the costs of all threads' rows
      const int count = tile::smaller(rows - begin, THREADS);
#pragma unroll 4
      for (int n = 0; n < count; ++n) {
        const int other = costs_smem[n];
        rank += other > own || (other == own && begin + n > row) ? 1 : 0;
      }
    }
    if (row < rows) const_cast<int*>(order_of(p, b, h))[rank] = row;
  }
}
