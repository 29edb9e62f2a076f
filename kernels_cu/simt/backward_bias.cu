// The gradient of a bias on any GPU, summed over the axes along which the bias was broadcast: the
// twin of reference/cpu/bias_gradient.py.
//
// One block per tile of the bias: see common/bias_sums.cuh. If many share few tiles, several blocks
// have a part each, which backward_sums adds up in order.
//
// Grid: parts * prod(own_size) * bias_heads * ceil(bias_len_q / BLOCK_Q) *
// ceil(bias_len_k / BLOCK_KV); packed: own_size[0] is the bias's first axis, 1 or the number of
// sequences.
// Shared memory: chunks of rows of both operands, the tile (and one for dropout), lse and delta.
// BLOCK_Q is a multiple of ROW_THREADS, BLOCK_KV of COLUMN_THREADS and 4.
#include "../common/params.cuh"
#include "../common/bias_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  bias_sums::run(p);
}
