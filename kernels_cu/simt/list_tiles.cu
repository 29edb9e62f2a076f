// The lists of the tiles that a mask leaves, see common/tile_lists.cuh. Each warp writes one word:
// the classes of 32 neighbouring tiles, one by each lane.
//
// Grid: a warp for each word. BLOCK_Q and BLOCK_KV are those of the kernel that reads the lists.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../common/tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  using namespace tile_lists;
  ptx::wait_for_grids();  // arrays of the mask, and who reads lists at this place
  ptx::launch_dependents();
  const Table& lists = table(p);
  const unsigned int words = static_cast<unsigned int>(lists.shape[WORDS]);
  const unsigned int rows = static_cast<unsigned int>(lists.shape[ROWS]);
  const unsigned int heads = static_cast<unsigned int>(lists.shape[HEADS]);
  const unsigned int number = (blockIdx.x * THREADS + threadIdx.x) / ptx::WARP_SIZE;
  // Warps of a block have the same tiles in neighbouring rows, whose look-ups they read together.
  const unsigned int row = number % rows, word = number / rows % words;
  const unsigned int list = number / words / rows % heads, b = number / words / rows / heads;
  if (b >= lists.shape[ENTRIES]) return;  // a whole warp

  const long long h = list * lists.shape[EACH];  // the first head that has it
  const bool of_keys = lists.shape[OF_KEYS] != 0;
  const long long length = of_keys ? p.len_k : p.len_q, along = of_keys ? p.len_q : p.len_k;
  const int block = of_keys ? BLOCK_KV : BLOCK_Q;
  const long long unit = static_cast<long long>(of_keys ? BLOCK_Q : BLOCK_KV)
                         << static_cast<int>(lists.shape[SHIFT]);
  // Lanes beyond the last tile classify that one again: generated code runs for whole warps.
  const long long tile = static_cast<long long>(word) * TILES + ptx::lane_index();
  const long long last = (along - 1) / unit;
  const long long first = static_cast<long long>(row) * block;
  const long long start = (tile < last ? tile : last) * unit;
  const long long end = (first + block < length ? first + block : length) - 1;
  const long long stop = (start + unit < along ? start + unit : along) - 1;
  const TileBox box = of_keys ? TileBox{b, h, start, stop, first, end, p.len_q, p.len_k, 0, 0}
                              : TileBox{b, h, first, end, start, stop, p.len_q, p.len_k, 0, 0};
  const int found = tile::classify_tile(p, box);
  const unsigned int nonempty = ptx::ballot(tile <= last && found != EMPTY);
  const unsigned int full = ptx::ballot(tile <= last && found == FULL);
  if (ptx::lane_index() == 0) {
    const_cast<ClassWord*>(words_of(p, b, h, static_cast<int>(row)))[word] =
        ClassWord{nonempty, full};
  }
}
