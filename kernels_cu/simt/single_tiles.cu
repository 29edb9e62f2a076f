// Which tiles of queries one block of keys alone sees, of lists of tiles of keys, see
// common/tile_lists.cuh. Each warp writes one word: it reads the same word of all rows.
//
// Grid: a block, which is a warp, for each word of the lists' rows.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../ptx/warp.cuh"
#include "../common/tile_lists.cuh"

static_assert(THREADS == ptx::WARP_SIZE, "THREADS");

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  using namespace tile_lists;
  const Table& lists = table(p);
  const int rows = static_cast<int>(lists.shape[ROWS]);
  const unsigned int words = static_cast<unsigned int>(lists.shape[WORDS]);
  const unsigned int heads = static_cast<unsigned int>(lists.shape[HEADS]);
  const unsigned int word = blockIdx.x % words;
  const long long b = blockIdx.x / words / heads,
                  h = blockIdx.x / words % heads * lists.shape[EACH];
  // The next grid, backward_delta.cu, reads what was written before the lists, and then waits, too.
  ptx::launch_dependents();
  ptx::wait_for_grids();               // the lists
  unsigned int some = 0, several = 0;  // tiles that one row of those read has, and more of them
#pragma unroll 8
  for (int row = ptx::lane_index(); row < rows; row += ptx::WARP_SIZE) {
    const unsigned int nonempty = words_of(p, b, h, row)[word].nonempty;
    several |= some & nonempty;
    some |= nonempty;
  }
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    const unsigned int other = ptx::shuffle_xor(some, lanes);
    several |= ptx::shuffle_xor(several, lanes) | (some & other);
    some |= other;
  }
  if (ptx::lane_index() == 0) {
    const_cast<unsigned int*>(singles_of(p, b, h))[word] = some & ~several;
  }
}
