// Products of tiles by the four warps of a warpgroup together, and how tiles get to them: the twin
// of reference/cpu/microkernel.py and reference/cpu/accumulate.py for the tensor cores of compute
// capability 9.0.
//
// A tile in shared memory is one slab of 64 columns after the other, each of as many rows of 128
// bytes, whose 16-byte piece c lies at c ^ (row % 8). Copies of boxes leave it like that, and fill
// with 0 what lies outside of the array. A result lies in registers as fragment.cuh says, and a
// thread has two rows of it.
#pragma once
#include "../ptx/barrier.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warp.cuh"
#include "../ptx/wgmma.cuh"
#include "../sm80/fragment.cuh"

namespace warpgroup {

constexpr int WARPGROUP_SIZE = 128;
constexpr int WARPGROUP_ROWS = 64;   // of a result
constexpr int SLAB_ROW_BYTES = 128;  // of a row in a slab
constexpr int SLAB_COLUMNS = 64;     // of 16 bits

// A condition that the compiler knows, as an argument.
template <bool X>
struct Bool {
  static constexpr bool value = X;
};

// Of the warpgroup in its block. A shuffle tells the compiler that lanes agree.
__device__ __forceinline__ int index() {
  return ptx::shuffle(static_cast<int>(threadIdx.x) / WARPGROUP_SIZE, 0);
}

// Waits for the end of a barrier's phase.
__device__ __forceinline__ void mbarrier_wait(unsigned int barrier, int parity) {
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
  }
}

// Says that this warp has come to a barrier in shared memory that counts warps. One lane arrives
// for all, unless a tool wants to see each do so.
constexpr int ARRIVALS_OF_WARP = EACH_LANE_ARRIVES ? ptx::WARP_SIZE : 1;  // arrivals
__device__ __forceinline__ void arrive_warp(unsigned int barrier) {
  __syncwarp();  // what all lanes have read or written
  if (EACH_LANE_ARRIVES || ptx::lane_index() == 0) ptx::mbarrier_arrive(barrier);
}

// The same of this warpgroup, after a product of its warps.
constexpr int ARRIVALS_OF_WARPGROUP = EACH_LANE_ARRIVES ? WARPGROUP_SIZE : 1;
__device__ __forceinline__ void arrive_warpgroup(unsigned int barrier) {
  if (EACH_LANE_ARRIVES || threadIdx.x % WARPGROUP_SIZE == 0) ptx::mbarrier_arrive(barrier);
}

// -- tiles to shared memory -----------------------------------------------------------------------

// One head of an array, as its map has it: where an array repeats itself, the map has one place.
struct TmaHead {
  int head, slow, slower;

  __device__ __forceinline__ TmaHead(const Operand& operand, const layout::Entry& entry,
                                     long long h)
      : head(operand.head != 0 ? static_cast<int>(h) : 0),
        slow(place(operand, entry, MAX_LEAD - 1)),
        slower(place(operand, entry, MAX_LEAD - 2)) {}

  __device__ __forceinline__ static int place(const Operand& operand, const layout::Entry& entry,
                                              int axis) {
    return operand.lead[axis] != 0 ? static_cast<int>(entry.lead[axis]) : 0;
  }
};

// Begins to copy ROWS rows from row `first` on, WIDTH columns wide, for which a barrier waits.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void tma_load_tile(unsigned int to, const ptx::TensorMap& map,
                                              const TmaHead& head, long long first,
                                              unsigned int barrier) {
#pragma unroll
  for (int column = 0; column < WIDTH; column += SLAB_COLUMNS) {
    ptx::tma_load(to + column / SLAB_COLUMNS * ROWS * SLAB_ROW_BYTES, map, barrier, column,
                  static_cast<int>(first), head.head, head.slow, head.slower);
  }
}

// -- products -------------------------------------------------------------------------------------

// An operand in shared memory: the lower half of its description, in units of 16 bytes, which a
// step adds to. `slab` is how far the columns of the next line are, which only operands whose rows
// are as wide as the result are asked for.
using SmemDesc = unsigned int;
__device__ __forceinline__ SmemDesc make_smem_desc(unsigned int address, int slab) {
  return address / 16 | static_cast<unsigned int>(slab / 16) << 16;
}

// With the upper half, which is that of all: eight rows lie together, and how they are swizzled.
__device__ __forceinline__ ptx::SmemDesc whole(SmemDesc operand) {
  constexpr unsigned long long EIGHT_ROWS = 8 * SLAB_ROW_BYTES / 16, SWIZZLE_128 = 1ull << 62;
  return EIGHT_ROWS << 32 | SWIZZLE_128 | operand;
}

// c = a b^T for 64 rows a of the warpgroup and KEYS rows b. The caller fences, commits and waits.
// What stands beside step n is done after it began.
template <int WIDTH, int KEYS, int COLUMNS, class Beside>
__device__ __forceinline__ void multiply(float (&c)[2][COLUMNS], SmemDesc a, SmemDesc b,
                                         const Beside& beside) {
#pragma unroll
  for (int step = 0; step < fragment::whole_columns(WIDTH) / 16; ++step) {
    const int line = step / 4 * SLAB_ROW_BYTES / 16, inside = step % 4 * 2;
    const ptx::SmemDesc left = whole(a + (line * WARPGROUP_ROWS + inside));
    const ptx::SmemDesc right = whole(b + (line * KEYS + inside));
    if constexpr (STORAGE == 0) {
      ptx::wgmma_ss_f16(c, left, right, step > 0);
    } else {
      ptx::wgmma_ss_bf16(c, left, right, step > 0);
    }
    beside(step);
  }
}
template <int WIDTH, int KEYS, int COLUMNS>
__device__ __forceinline__ void multiply(float (&c)[2][COLUMNS], SmemDesc a, SmemDesc b) {
  multiply<WIDTH, KEYS>(c, a, b, [](int) {});
}

// c += a b for weights a and DEPTH rows b. The caller fences, commits and waits.
template <int DEPTH, int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&c)[2][COLUMNS],
                                             const unsigned int (&a)[2][DEPTH / 8], SmemDesc b) {
#pragma unroll
  for (int k = 0; k < DEPTH / 8; k += 2) {
    const unsigned int left[4] = {a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]};
    if constexpr (STORAGE == 0) {
      ptx::wgmma_rs_f16(c, left, whole(b + k * 8 * SLAB_ROW_BYTES / 16));
    } else {
      ptx::wgmma_rs_bf16(c, left, whole(b + k * 8 * SLAB_ROW_BYTES / 16));
    }
  }
}

// The same of a in shared memory, whose rows are DEPTH columns long.
template <int DEPTH, int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&c)[2][COLUMNS], SmemDesc a, SmemDesc b) {
#pragma unroll
  for (int k = 0; k < DEPTH / 16; ++k) {
    const ptx::SmemDesc left = whole(a + 2 * k), right = whole(b + k * 16 * SLAB_ROW_BYTES / 16);
    if constexpr (STORAGE == 0) {
      ptx::wgmma_st_f16(c, left, right, true);
    } else {
      ptx::wgmma_st_bf16(c, left, right, true);
    }
  }
}

// c = a^T b for DEPTH rows of a, 64 columns wide, and of b. The rows of b lie by 64, so many bytes
// apart. The caller fences, commits and waits.
template <int DEPTH, int COLUMNS>
__device__ __forceinline__ void multiply_transposed(float (&c)[2][COLUMNS], SmemDesc a, SmemDesc b,
                                                    int apart) {
#pragma unroll
  for (int k = 0; k < DEPTH / 16; ++k) {
    const ptx::SmemDesc left = whole(a + k * 16 * SLAB_ROW_BYTES / 16);
    const ptx::SmemDesc right = whole(b + (k / 4 * apart + k % 4 * 16 * SLAB_ROW_BYTES) / 16);
    if constexpr (STORAGE == 0) {
      ptx::wgmma_tt_f16(c, left, right, k > 0);
    } else {
      ptx::wgmma_tt_bf16(c, left, right, k > 0);
    }
  }
}

}  // namespace warpgroup
