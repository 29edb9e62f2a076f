// What the kernels for warpgroups share: products of 16-bit tiles by wgmma, pipelines of mbarriers,
// and TMA loads of tiles. The twin of reference/cpu/microkernel.py and reference/cpu/accumulate.py
// for the tensor cores of compute capability 9.0.
//
// A tile in shared memory is a sequence of slabs of 64 columns. A row of a slab has 128 bytes,
// whose 16-byte piece c lies at c ^ (row % 8): wgmma's 128-byte swizzle. TMA writes tiles like
// that, and fills with 0 what lies outside of the array. The accumulator of a product lies in
// registers as fragment.cuh says; a thread has two rows of it.
#pragma once
#include "../ptx/barrier.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warp.cuh"
#include "../ptx/wgmma.cuh"
#include "../warp/fragment.cuh"

namespace warpgroup {

constexpr int WARPGROUP_SIZE = 128;
constexpr int WARPGROUP_ROWS = 64;   // of an accumulator
constexpr int SLAB_ROW_BYTES = 128;  // of one row
constexpr int SLAB_COLUMNS = 64;     // of 16 bits each

// A compile-time condition as a function argument.
template <bool X>
struct Bool {
  static constexpr bool value = X;
};

// The index of the warpgroup in its block. A shuffle tells the compiler that lanes agree.
__device__ __forceinline__ int index() {
  return ptx::shuffle(static_cast<int>(threadIdx.x) / WARPGROUP_SIZE, 0);
}

// -- mbarriers ------------------------------------------------------------------------------------

// Waits until a phase of an mbarrier is complete.
__device__ __forceinline__ void mbarrier_wait(unsigned int barrier, int phase) {
  while (!ptx::mbarrier_try_wait(barrier, phase)) {
  }
}

// Arrives at an mbarrier for a warp. One lane does so for all, unless a race checker has to see
// every lane arrive.
constexpr int ARRIVALS_OF_WARP = EACH_LANE_ARRIVES ? ptx::WARP_SIZE : 1;
__device__ __forceinline__ void arrive_synchronised(unsigned int barrier) {
  if (EACH_LANE_ARRIVES || ptx::lane_index() == 0) ptx::mbarrier_arrive(barrier);
}
__device__ __forceinline__ void arrive_warp(unsigned int barrier) {
  __syncwarp();  // what all lanes have read or written
  arrive_synchronised(barrier);
}

// Arrives at an mbarrier for a warpgroup. Nothing orders its threads here: the caller has waited
// for a wgmma group of all of them.
constexpr int ARRIVALS_OF_WARPGROUP = EACH_LANE_ARRIVES ? WARPGROUP_SIZE : 1;
__device__ __forceinline__ void arrive_warpgroup(unsigned int barrier) {
  if (EACH_LANE_ARRIVES || threadIdx.x % WARPGROUP_SIZE == 0) ptx::mbarrier_arrive(barrier);
}

// The mbarriers of a ring of STAGES stages in shared memory, through which one role hands data to
// others. Use n of the ring takes stage n % STAGES. A stage is full when all of its data has
// arrived, and empty when every reader has released it. Count is the type of n.
template <int STAGES, typename Count = int>
struct Pipeline {
  unsigned long long full[STAGES], empty[STAGES];

  __device__ __forceinline__ static int stage_of(Count n) { return n % STAGES; }
  __device__ __forceinline__ static int phase_of(Count n) { return n / STAGES % 2; }

  __device__ __forceinline__ unsigned int full_barrier(Count n) const {
    return ptx::shared_address(&full[stage_of(n)]);
  }
  __device__ __forceinline__ unsigned int empty_barrier(Count n) const {
    return ptx::shared_address(&empty[stage_of(n)]);
  }
  __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals) const {
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
      ptx::mbarrier_init(full_barrier(n), full_arrivals);
      ptx::mbarrier_init(empty_barrier(n), empty_arrivals);
    }
  }
  __device__ __forceinline__ void end() const {
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
      ptx::mbarrier_inval(full_barrier(n));
      ptx::mbarrier_inval(empty_barrier(n));
    }
  }
  // Waits until the data of use n has arrived.
  __device__ __forceinline__ void wait_full(Count n) const {
    mbarrier_wait(full_barrier(n), phase_of(n));
  }
  // Waits until use n may overwrite its stage. The first use of a stage does not wait: the phase
  // before an mbarrier's first one counts as complete.
  __device__ __forceinline__ void wait_empty(Count n) const {
    mbarrier_wait(empty_barrier(n), phase_of(n) ^ 1);
  }
  // Waits until every reader has released use n. That is wait_empty of the stage's next use.
  __device__ __forceinline__ void wait_released(Count n) const {
    mbarrier_wait(empty_barrier(n), phase_of(n));
  }
};

// -- tiles in shared memory -----------------------------------------------------------------------

// An operand in shared memory: the lower half of its wgmma descriptor, in units of 16 bytes, to
// which offsets are added. `slab` is the distance in bytes between slabs; it counts only for an
// operand whose rows run along the accumulator's columns.
using SmemDesc = unsigned int;
__device__ __forceinline__ SmemDesc make_smem_desc(unsigned int address, int slab) {
  return address / 16 | static_cast<unsigned int>(slab / 16) << 16;
}

// STAGES tiles of ROWS rows, one after the other, whose rows have ROW_BYTES bytes in all slabs.
template <int ROWS, int ROW_BYTES, int STAGES>
struct SmemTile {
  static constexpr int BYTES = ROWS * ROW_BYTES;
  static constexpr int SLAB_BYTES = ROWS * SLAB_ROW_BYTES;  // between slabs
  char* begin;

  __device__ __forceinline__ char* stage(int n) const { return begin + n * BYTES; }
  __device__ __forceinline__ char* end() const { return begin + STAGES * BYTES; }
  __device__ __forceinline__ unsigned int address(int n) const {
    return ptx::shared_address(begin) + n * BYTES;
  }
  // As an operand whose rows run along the depth, or along the accumulator's columns.
  __device__ __forceinline__ SmemDesc desc(int n) const {
    return make_smem_desc(ptx::shared_address(begin), 0) + n * (BYTES / 16);
  }
  __device__ __forceinline__ SmemDesc column_desc(int n) const {
    return make_smem_desc(ptx::shared_address(begin), SLAB_BYTES) + n * (BYTES / 16);
  }
};

// The last tensor maps of a kernel's parameters: that of what it stores last, and of a bias in
// tiles.
template <int MAPS>
struct MapsAtTheEnd {
  ptx::TensorMap map[MAPS];
  __device__ __forceinline__ const ptx::TensorMap& stored() const { return map[0]; }
  __device__ __forceinline__ const ptx::TensorMap& bias() const { return map[MAPS - 1]; }
};
using LastMaps = MapsAtTheEnd<HAS_BIAS_TILES ? 2 : 1>;

// -- TMA loads ------------------------------------------------------------------------------------

// The coordinates of one head of an array in its tensor map, in which an axis along which the array
// is broadcast has length 1.
struct TmaHead {
  int head, slow, slower;

  __device__ __forceinline__ TmaHead(const Operand& operand, const layout::Entry& entry,
                                     long long h)
      : head(operand.head != 0 ? static_cast<int>(h) : 0),
        slow(coordinate(operand, entry, MAX_LEAD - 1)),
        slower(coordinate(operand, entry, MAX_LEAD - 2)) {}

  __device__ __forceinline__ static int coordinate(const Operand& operand,
                                                   const layout::Entry& entry, int axis) {
    return operand.lead[axis] != 0 ? static_cast<int>(entry.lead[axis]) : 0;
  }
};

// Issues the TMA loads of a tile: ROWS rows from row `first` on, WIDTH columns from `first_column`
// on. Its bytes count at an mbarrier.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void tma_load_tile(unsigned int to, const ptx::TensorMap& map,
                                              const TmaHead& head, long long first,
                                              unsigned int barrier, int first_column = 0) {
#pragma unroll
  for (int column = 0; column < WIDTH; column += SLAB_COLUMNS) {
    ptx::tma_load(to + column / SLAB_COLUMNS * ROWS * SLAB_ROW_BYTES, map, barrier,
                  first_column + column, static_cast<int>(first), head.head, head.slow,
                  head.slower);
  }
}

// -- products -------------------------------------------------------------------------------------

// The whole descriptor. All operands have the same upper half: groups of eight rows, and the
// 128-byte swizzle.
__device__ __forceinline__ ptx::SmemDesc wgmma_desc(SmemDesc operand) {
  constexpr unsigned long long EIGHT_ROWS = 8 * SLAB_ROW_BYTES / 16, SWIZZLE_128 = 1ull << 62;
  return EIGHT_ROWS << 32 | SWIZZLE_128 | operand;
}

// The columns of a product whose right operand has WIDTH columns in slabs: one of the widths in
// ptx/wgmma.cuh. With the left operand in registers, fewer than 64 take no less time, but fewer
// registers.
__device__ constexpr int product_columns(int width) {
  if (width <= 96) return width <= 32 ? 32 : matmul::round_up(width, 16);
  return width <= 128 ? 128 : width <= 160 ? 160 : matmul::round_up(width, SLAB_COLUMNS);
}

// Issues c = a b^T, or c += where `add`, for 64 rows of a and KEYS rows of b, WIDTH columns each.
// The caller fences, commits and waits. `beside(n)` runs after step n was issued, and overlaps with
// it.
template <int WIDTH, int KEYS, int COLUMNS, class Beside>
__device__ __forceinline__ void multiply(float (&c)[2][COLUMNS], SmemDesc a, SmemDesc b,
                                         const Beside& beside, bool add = false) {
#pragma unroll
  for (int step = 0; step < fragment::whole_columns(WIDTH) / 16; ++step) {
    const int line = step / 4 * SLAB_ROW_BYTES / 16, inside = step % 4 * 2;
    const ptx::SmemDesc left = wgmma_desc(a + (line * WARPGROUP_ROWS + inside));
    const ptx::SmemDesc right = wgmma_desc(b + (line * KEYS + inside));
    if constexpr (IS_FLOAT16) {
      ptx::wgmma_ss_f16(c, left, right, add || step > 0);
    } else if constexpr (IS_BFLOAT16) {
      ptx::wgmma_ss_bf16(c, left, right, add || step > 0);
    } else {
      unknown_element();
    }
    beside(step);
  }
}
template <int WIDTH, int KEYS, int COLUMNS>
__device__ __forceinline__ void multiply(float (&c)[2][COLUMNS], SmemDesc a, SmemDesc b) {
  multiply<WIDTH, KEYS>(c, a, b, [](int) {});
}

// Issues c += a b for weights a in registers and DEPTH rows of b, or c = a b unless `add`. The
// caller fences, commits and waits.
template <int DEPTH, int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&c)[2][COLUMNS],
                                             const unsigned int (&a)[2][DEPTH / 8], SmemDesc b,
                                             bool add = true) {
#pragma unroll
  for (int k = 0; k < DEPTH / 8; k += 2) {
    const unsigned int left[4] = {a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]};
    if constexpr (COLUMNS == 80) {  // more than an instruction has
      constexpr int LAST = 192 / SLAB_COLUMNS * DEPTH * SLAB_ROW_BYTES / 16;
      const SmemDesc first = b + k * 8 * SLAB_ROW_BYTES / 16;
      if constexpr (IS_FLOAT16) {
        ptx::wgmma_rs_f16_first(c, left, wgmma_desc(first), add || k > 0);
        ptx::wgmma_rs_f16_last(c, left, wgmma_desc(first + LAST), add || k > 0);
      } else {
        ptx::wgmma_rs_bf16_first(c, left, wgmma_desc(first), add || k > 0);
        ptx::wgmma_rs_bf16_last(c, left, wgmma_desc(first + LAST), add || k > 0);
      }
    } else if constexpr (IS_FLOAT16) {
      ptx::wgmma_rs_f16(c, left, wgmma_desc(b + k * 8 * SLAB_ROW_BYTES / 16), add || k > 0);
    } else if constexpr (IS_BFLOAT16) {
      ptx::wgmma_rs_bf16(c, left, wgmma_desc(b + k * 8 * SLAB_ROW_BYTES / 16), add || k > 0);
    } else {
      unknown_element();
    }
  }
}

// The same for a in shared memory, whose rows have DEPTH columns; c = a b unless `add`.
template <int DEPTH, int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&c)[2][COLUMNS], SmemDesc a, SmemDesc b,
                                             bool add = true) {
#pragma unroll
  for (int k = 0; k < DEPTH / 16; ++k) {
    const ptx::SmemDesc left = wgmma_desc(a + 2 * k),
                        right = wgmma_desc(b + k * 16 * SLAB_ROW_BYTES / 16);
    if constexpr (IS_FLOAT16) {
      ptx::wgmma_st_f16(c, left, right, add || k > 0);
    } else if constexpr (IS_BFLOAT16) {
      ptx::wgmma_st_bf16(c, left, right, add || k > 0);
    } else {
      unknown_element();
    }
  }
}

// Issues c = a^T b for DEPTH rows of a, 64 columns wide, and of b. Each 64 rows of b are a tile,
// `stride` bytes after the one before. The caller fences, commits and waits.
template <int DEPTH, int COLUMNS>
__device__ __forceinline__ void multiply_transposed(float (&c)[2][COLUMNS], SmemDesc a, SmemDesc b,
                                                    int stride) {
#pragma unroll
  for (int k = 0; k < DEPTH / 16; ++k) {
    const ptx::SmemDesc left = wgmma_desc(a + k * 16 * SLAB_ROW_BYTES / 16);
    const ptx::SmemDesc right = wgmma_desc(b + (k / 4 * stride + k % 4 * 16 * SLAB_ROW_BYTES) / 16);
    if constexpr (IS_FLOAT16) {
      ptx::wgmma_tt_f16(c, left, right, k > 0);
    } else if constexpr (IS_BFLOAT16) {
      ptx::wgmma_tt_bf16(c, left, right, k > 0);
    } else {
      unknown_element();
    }
  }
}

}  // namespace warpgroup
