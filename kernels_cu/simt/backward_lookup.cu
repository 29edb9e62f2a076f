// The gradient of a learned look-up on any GPU, which pairs read by their batch entry, head, query
// or key alone: the twin of reference/cpu/backward_lookup.py.
//
// It is that of a bias, broadcast along the axes by which nobody reads, with dS multiplied by the
// derivative of the changed score by what a pair reads, in place of the slope.
//
// Grid, blocks, their order and their parts: as of backward_bias.cu. Shared memory: the same, and a
// tile for the derivative.
#include "../common/params.cuh"
#include "../common/bias_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  bias_sums::run(p);
}
