// Which tiles of queries one block of keys alone sees, of lists of tiles of keys: see
// common/single_tiles.cuh. Each warp writes one word: it looks at the same word of all rows.
//
// Grid: a block, which is a warp, for each word of the lists' rows.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../common/tile.cuh"
#include "../common/single_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  using namespace tile_lists;
  const Table& lists = tile_lists::table(p);
  const int rows = static_cast<int>(lists.shape[ROWS]);
  const unsigned int words = static_cast<unsigned int>(lists.shape[WORDS]);
  const unsigned int heads = static_cast<unsigned int>(lists.shape[HEADS]);
  const int word = static_cast<int>(blockIdx.x % words);
  const long long b = blockIdx.x / words / heads, h = blockIdx.x / words % heads * lists.shape[EACH];
  ptx::wait_for_grids();  // the lists
  ptx::launch_dependents();
  unsigned int some = 0, more = 0;  // tiles that one row, or several, have
#pragma unroll 8
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += THREADS) {
    const unsigned int nonempty = tile_lists::words_of(p, b, h, row)[word].nonempty;
    more |= some & nonempty;
    some |= nonempty;
  }
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    const unsigned int other = ptx::shuffle_xor(some, lanes);
    more |= ptx::shuffle_xor(more, lanes) | (some & other);
    some |= other;
  }
  if (ptx::lane_index() == 0) {
    const_cast<unsigned int*>(single_tiles::words_of(p, b, h))[word] = some & ~more;
  }
}
