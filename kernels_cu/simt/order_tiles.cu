// The order in which work tiles are dealt, the longest first: of the rows of lists of tiles, see
// common/tile_lists.cuh. A row with as many tiles as an earlier one comes before it.
//
// Grid: a block for each list, that of an entry and a head. A row takes as long as it has tiles;
// one that is not FULL counts as a quarter more.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../common/tile.cuh"

namespace {

constexpr int AT_ONCE = SHARED_BYTES / sizeof(int);  // costs in shared memory
static_assert(AT_ONCE > 0 && SHARED_BYTES % sizeof(int) == 0, "SHARED_BYTES");

// The cost of a row, of whose words `sharers` neighbouring lanes read one in turn. All lanes of the
// warp call it together.
__device__ __forceinline__ int cost_of(const tile_lists::ClassWord* words, int count, int part,
                                       int sharers) {
  int cost = 0;
#pragma unroll 4
  for (int n = part; n < count; n += sharers) {
    cost += 5 * __popc(words[n].nonempty) - __popc(words[n].full);
  }
#pragma unroll 1
  for (int lanes = sharers / 2; lanes > 0; lanes /= 2) cost += ptx::shuffle_xor(cost, lanes);
  return cost;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  using namespace tile_lists;
  extern __shared__ int costs_smem[];
  const Table& lists = table(p);
  const int rows = static_cast<int>(lists.shape[ROWS]),
            words = static_cast<int>(lists.shape[WORDS]);
  const unsigned int heads = static_cast<unsigned int>(lists.shape[HEADS]);
  const long long b = blockIdx.x / heads, h = blockIdx.x % heads * lists.shape[EACH];
  // Of few rows, neighbouring lanes share each.
  int sharers = 1;
#pragma unroll 1
  while (sharers < ptx::WARP_SIZE && 2 * sharers * rows <= THREADS) sharers *= 2;
  const int rows_at_once = THREADS / sharers;
  const int thread = static_cast<int>(threadIdx.x), part = thread % sharers;
  ptx::wait_for_grids();  // the lists
  ptx::launch_dependents();
  const auto cost = [&](int row) {
    const int own = cost_of(words_of(p, b, h, tile::smaller(row, rows - 1)), words, part, sharers);
    return row < rows ? own : -1;
  };
#pragma unroll 1
  for (int first = 0; first < rows; first += rows_at_once) {
    const int row = first + thread / sharers, own = cost(row);
    int rank = 0;
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += AT_ONCE) {
      const int count = tile::smaller(rows - begin, AT_ONCE);
      if (first == 0 || rows > AT_ONCE) {
        __syncthreads();  // costs that other threads may still read
#pragma unroll 1
        for (int n = 0; n < count; n += rows_at_once) {
          const int at = n + thread / sharers, found = cost(begin + at);
          if (part == 0 && at < count) costs_smem[at] = found;
        }
        __syncthreads();  // the costs of all threads' rows
      }
#pragma unroll 4
      for (int n = part; n < count; n += sharers) {
        const int other = costs_smem[n];
        rank += other > own || (other == own && begin + n > row) ? 1 : 0;
      }
    }
#pragma unroll 1
    for (int lanes = sharers / 2; lanes > 0; lanes /= 2) rank += ptx::shuffle_xor(rank, lanes);
    if (part == 0 && row < rows) const_cast<int*>(order_of(p, b, h))[rank] = row;
  }
}
