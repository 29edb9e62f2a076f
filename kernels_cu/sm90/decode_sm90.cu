// Many heads that share keys, whose values are columns of the keys (multi-head latent attention),
// in 16-bit types, by the tensor cores of compute capability 9.0: the twin of
// reference/cpu/decode.py.
//
// A persistent, warp-specialised kernel. A block works on one unit at a time (decode/tasks.cuh): 64
// rows, the queries of heads that share keys, and tiles of 64 keys at absolute positions. The last
// warpgroup loads the tiles to two stages of shared memory, each by two of its warps: by TMA if
// that can load keys, but for an entry's last leaf if it is not whole; else by cp.async. The others
// are the consumers, each with half of the columns of o. They take turns to compute the scores and
// the weights of a tile; the other one gets the weights from the last slab of the tile, which has
// no values. Each multiplies the weights by its columns of the keys, which are the values, so that
// nothing else is read; and while one still does, the other one computes the next scores.
//
// A node of level 1, of 512 keys, is one online softmax over its leaves in ascending order: o has
// no room in registers for a leaf's as well as its node's. Masked pairs and EMPTY leaves change no
// bit of it, and neither does it matter which consumer computes a leaf: m, and every lane's part of
// l, pass from one to the other. Larger nodes are merged as everywhere.
//
// Grid: units are dealt to the blocks (decode/tasks.cuh); decode_combine.cu joins their partial
// results. Shared memory: SharedMemory in decode_storage.cuh. BLOCK_Q and BLOCK_KV are 64. After
// the parameters comes the tensor map of keys, which is not read where tma_rows is 0.
#include "../common/params.cuh"
#include "../warp/decode_scores.cuh"
#include "../warp/fragment_softmax.cuh"
#include "decode_producer.cuh"
#include "warpgroup_rows.cuh"

namespace {

using namespace decode_storage;
using decode_scores::COLUMNS;

constexpr int COLUMNS_O = D_V / CONSUMERS / 4;  // of a thread, in each of its two rows
// Registers of a thread of the producers, which find the classes of leaves, and of the consumers.
constexpr int PRODUCER_REGS = HAS_MASK ? 88 : 72, CONSUMER_REGS = HAS_MASK ? 208 : 216;
static_assert(PRODUCER_REGS + CONSUMERS * CONSUMER_REGS <= 65536 / THREADS / 8 * 8 * 3,
              "more than the block was launched with");

// The first row of a thread; the other one is 8 further.
__device__ __forceinline__ int first_row() {
  const int warp = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE;
  return warp * fragment::WARP_ROWS + fragment::lane_row();
}

struct alignas(16) FourColumns {
  float of[4];
};

// What a consumer keeps of its unit while it computes tiles.
struct Unit {
  merge::Statistics row[2];
};

// Multiplies and stores: o of a node becomes the first part of its unit, or joins it in its slot.
// Statistics of the unit stay in registers of both consumers.
__device__ __forceinline__ void store_node(const decode::Workspace& workspace, const float (&m)[2],
                                           const float (&l)[2], const float (&o)[2][COLUMNS_O],
                                           Unit& unit, int slot, int rows, bool opens, float c) {
  // Of 16 columns, a thread has four, which are neighbours in a slot (decode::place_of).
  constexpr int AT_ONCE = 8;  // accesses of 16 bytes, all loaded before the first is stored
  const int first_place = warpgroup::index() * (D_V / CONSUMERS) + 2 * fragment::lane_column();
  float sums[2] = {l[0], l[1]};
  fragment_softmax::row_sum(sums);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const merge::Statistics own{m[r], sums[r]};
    if (opens) unit.row[r] = merge::no_keys();
    const merge::Factors factors = merge::statistics(unit.row[r], own, c);
    if (opens) unit.row[r] = own;
    const int row = first_row() + 8 * r;
    if (row >= rows) continue;
    float* const to = workspace.row(slot, row);
    if (first_place == 0) decode::statistics_of(to) = unit.row[r];
    FourColumns* const columns =
        reinterpret_cast<FourColumns*>(to + decode::STATISTICS + first_place);
    if (opens) {
#pragma unroll
      for (int n = 0; n < COLUMNS_O; n += 4) {
        columns[n] = FourColumns{{o[r][n], o[r][n + 1], o[r][n + 2], o[r][n + 3]}};
      }
    } else {
#pragma unroll
      for (int first = 0; first < COLUMNS_O; first += 4 * AT_ONCE) {
        FourColumns sums[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) sums[n] = columns[first + 4 * n];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            sums[n].of[x] = factors.apply(sums[n].of[x], o[r][first + 4 * n + x]);
          }
          columns[first + 4 * n] = sums[n];
        }
      }
    }
  }
}

// If values of the consumer's columns are not finite, which is rare, adds their products to o one
// by one, without pairs that take no part, and sets them to 0.
__device__ __forceinline__ void repair_nonfinite(float (&o)[2][COLUMNS_O],
                                                 unsigned int (&weights)[2][COLUMNS / 2],
                                                 char* values_smem) {
  constexpr int BYTES = SLABS_V / CONSUMERS * SLAB_BYTES;
  const int thread = threadIdx.x % warpgroup::WARPGROUP_SIZE;
  const int barrier = REPAIR + warpgroup::index();
  const bool finite =
      warpgroup_rows::finite_rows<BYTES, warpgroup::WARPGROUP_SIZE>(values_smem, thread);
  if (!ptx::named_barrier_or(barrier, warpgroup::WARPGROUP_SIZE, !finite)) return;
  warpgroup_rows::add_nonfinite<COLUMNS / 2>(
      o, weights, values_smem,
      [](int, int, storage_t weight) { return weight != fragment::MASKED; });
  ptx::named_barrier_sync(barrier, warpgroup::WARPGROUP_SIZE);  // the values, read by all threads
  warpgroup_rows::clear_nonfinite<BYTES, warpgroup::WARPGROUP_SIZE>(values_smem, thread);
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(barrier, warpgroup::WARPGROUP_SIZE);  // the values, made finite
}

// A warpgroup: computes half of the columns of o of every unit, and the weights of every other
// tile.
__device__ __forceinline__ void consumer(const Params& p, const SharedMemory& smem) {
  SharedStorage& shared = *smem.storage;
  const int index = warpgroup::index();
  const int thread = threadIdx.x % warpgroup::WARPGROUP_SIZE;
  const decode::Workspace workspace(p);
  const float scale = static_cast<float>(p.scale);
  // Logits are `logit_scale` times a score; a negative scale flips the sign of the scores.
  const float logit_scale = HAS_SCORE ? 1.0f : fabs(scale);
  const float c = fmin(logit_scale * number::LOG2_E<accum_t>, number::largest());
  const warpgroup::SmemDesc q = smem.q.desc(0);
  const int first_value = index * (SLABS_V / CONSUMERS) * SLAB_BYTES;

  float m[2], l[2], o[2][COLUMNS_O];
  fragment_softmax::init_state(m, l, o);
  Unit unit;
  TwoRows* const m_smem = &shared.rows.m[thread];
  TwoRows* const l_smem = &shared.rows.l[thread];
  TwoRows* const alpha_smem = &shared.rows.alpha[thread];

#pragma unroll 1
  for (int n = 0;; ++n) {
    shared.pipeline.wait_full(n);
    const StagedTile& tile = shared.tile(n);
    // Shuffles tell the compiler that lanes agree.
    if (ptx::shuffle(tile.leaf.exists ? 1 : 0, 0) == 0) return;
    char* const stage_smem = smem.stage(n);
    const decode::Leaf leaf = tile.leaf;
    const int rows = tile.task.rows;
    const bool ends = ptx::shuffle(tile.ends ? 1 : 0, 0) != 0;
    const bool opens = ptx::shuffle(tile.opens ? 1 : 0, 0) != 0;
    const bool masked =
        ptx::shuffle(leaf.tile_class == PARTIAL || leaf.keys < LEAF ? 1 : 0, 0) != 0;
    Weights& weights_smem = *reinterpret_cast<Weights*>(stage_smem + (SLABS - 1) * SLAB_BYTES);
    unsigned int weights[2][COLUMNS / 2];
    float alpha[2];
    const bool computes = ptx::shuffle(n % CONSUMERS, 0) == index;
    if (computes) {
      // 2 scores
      float s[2][COLUMNS];
      const warpgroup::SmemDesc k = warpgroup::make_smem_desc(ptx::shared_address(stage_smem), 0);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        if (part > 0) shared.wait_part(n, part);
        ptx::wgmma_fence();
        warpgroup::multiply<PART_SLABS * warpgroup::SLAB_COLUMNS, LEAF>(
            s, q + part * PART_SLABS * SLAB_BYTES / 16, k + part * PART_SLABS * SLAB_BYTES / 16,
            [](int) {}, part > 0);
      }
      ptx::wgmma_commit();
      if (tile.begins) {
        m[0] = m[1] = -number::infinity();
        l[0] = l[1] = 0;
      } else {
        const TwoRows m_before = *m_smem, l_before = *l_smem;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          m[r] = m_before.of[r];
          l[r] = l_before.of[r];
        }
      }
      unsigned int mask[2];
      if (MAY_MASK && masked) decode_scores::evaluate_mask(p, tile.task, leaf, first_row(), mask);
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(s);
      if (!HAS_SCORE && scale < 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int x = 0; x < COLUMNS; ++x) s[r][x] = -s[r][x];
        }
      }
      // 3 score mod
      bool has_masked = masked;
      if constexpr (HAS_SCORE) {
        has_masked =
            decode_scores::apply_score_mod(p, tile.task, leaf, first_row(), s, scale) || masked;
      }
      // 4 mask
      if (MAY_MASK && masked) fragment_tile::apply_mask(s, mask);
      if (!MAY_MASK && masked) fragment_tile::mask_missing_keys(s, leaf.keys);
      // 5 row max
      float m_new[2];
      fragment_softmax::row_max(s, m, m_new, c);
      fragment_softmax::raise_max(m, m_new, l, alpha, c);
      fragment_softmax::exponentiate(s, m, l, c, has_masked);
      fragment::narrow(s, weights);
      *m_smem = TwoRows{{m[0], m[1]}};
      *l_smem = TwoRows{{l[0], l[1]}};
      *alpha_smem = TwoRows{{alpha[0], alpha[1]}};
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        weights_smem.of[x][thread] = ptx::Bytes16{
            {weights[0][2 * x], weights[0][2 * x + 1], weights[1][2 * x], weights[1][2 * x + 1]}};
      }
      ptx::named_barrier_arrive(WEIGHTS + index, BOTH_CONSUMERS);
    } else {
#pragma unroll
      for (int part = 1; part < PARTS; ++part) shared.wait_part(n, part);
      ptx::named_barrier_sync(WEIGHTS + (1 - index), BOTH_CONSUMERS);
      const TwoRows m_other = *m_smem, l_other = *l_smem, alpha_other = *alpha_smem;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        m[r] = m_other.of[r];
        l[r] = l_other.of[r];
        alpha[r] = alpha_other.of[r];
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const ptx::Bytes16 four = weights_smem.of[x][thread];
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          weights[0][2 * x + y] = four.x[y];
          weights[1][2 * x + y] = four.x[2 + y];
        }
      }
    }
    // The node rescales its sums; elsewhere merges stand for that.
    if (ptx::any_lane(alpha[0] != 1.0f || alpha[1] != 1.0f)) {
      fragment_softmax::scale_rows(o, alpha);
    }
    // 7 accumulate p v
    if (HAS_SCORE || (MAY_MASK && masked)) {
      repair_nonfinite(o, weights, stage_smem + first_value);
    }
    ptx::wgmma_fence();
    warpgroup::multiply_add<LEAF>(
        o, weights,
        warpgroup::make_smem_desc(ptx::shared_address(stage_smem + first_value), SLAB_BYTES));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(o);
    ptx::fence_proxy_async();  // weights, before TMA writes to their place
    warpgroup::arrive_warp(shared.pipeline.empty_barrier(n));
    if (ends) {
      store_node(workspace, m, l, o, unit, leaf.unit, rows, opens, c);
      matmul::clear(o);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap k_map) {
  extern __shared__ Aligned shared_smem[];
  const SharedMemory smem(shared_smem[0].x);
  if (threadIdx.x == 0) smem.storage->init_barriers();
  decode::Schedule schedule(p, &smem.storage->schedule);
  schedule.count_units();
  __syncthreads();  // the barriers, initialised by one thread
  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    decode_producer::producer(p, smem, schedule, k_map);
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGS>();
    consumer(p, smem);
  }
}
