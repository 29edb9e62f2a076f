// Many heads that share keys, whose values are columns of the keys (multi-head latent attention),
// in 16-bit types, by the tensor cores of compute capability 9.0: the twin of
// reference/cpu/decode.py.
//
// A persistent, warp-specialised kernel. A block works on one unit at a time (decode/tasks.cuh): 64
// rows, the queries of heads that share keys, and tiles of 64 keys at absolute positions. The last
// warpgroup loads the tiles to two stages of shared memory, each by two of its warps: by TMA if
// that can load keys, but for an entry's last leaf if it is not whole; else by cp.async. The others
// are the consumers, each with half of the columns of o. They take turns to compute the scores and
// the weights of a tile; the other one reads the weights from the last slab of the tile, which has
// no values. Each multiplies the weights by its columns of the keys, which are the values, so that
// nothing else is read.
//
// Two tiles of a node are a turn. The scores of the second one are multiplied while the first
// consumer finds its weights, and values of the first one while the second consumer does:
//
//   consumer 0   scores 0 |  weights 0  | values 0 | ........................ | values 1 |
//   consumer 1            | scores 1 ...| values 0 (its weights meanwhile)    | values 1 |
//
// A node of level 1, of 512 keys, is one online softmax over its leaves in ascending order: o has
// no room in registers for a leaf's as well as its node's. Masked pairs and EMPTY leaves change no
// bit of it, and neither does it matter which consumer computes a leaf: m, and every lane's part of
// l, pass from one to the other. Larger nodes are merged as everywhere.
//
// Where nodes are few, V_PARTS neighbouring blocks are a team: each computes all scores of a unit,
// and a part of the columns of o. Slabs of keys that have no values of the block's columns are
// loaded again as soon as scores are computed. No bit depends on it.
//
// Grid: units are dealt to the blocks (decode/tasks.cuh); decode_combine.cu joins their partial
// results. Shared memory: SharedMemory in decode_storage.cuh. BLOCK_Q and BLOCK_KV are 64. After
// the parameters comes the tensor map of keys, which is not read where tma_rows is 0.
#include "../common/params.cuh"
#include "../ptx/prefetch.cuh"
#include "../warp/decode_scores.cuh"
#include "../warp/fragment_softmax.cuh"
#include "decode_producer.cuh"
#include "warpgroup_rows.cuh"

namespace {

using namespace decode_storage;
using decode_scores::COLUMNS;

constexpr int COLUMNS_O = OWN_COLUMNS / 4;  // of a thread, in each of its two rows
// Whether consumer 1 multiplies keys of a tile beside weights of the one before. Code of masks and
// scores needs the registers.
constexpr bool OVERLAPS = !HAS_MASK && !HAS_SCORE;
// Registers of a thread of the producers, which find the classes of leaves, and of each consumer.
constexpr int PRODUCER_REGS = HAS_MASK ? 88 : 80, FIRST_REGS = 208;
constexpr int SECOND_REGS = HAS_MASK ? 208 : 216;
static_assert(PRODUCER_REGS + FIRST_REGS + SECOND_REGS <= 65536 / THREADS / 8 * 8 * 3,
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
  // Of 16 columns, a thread has four, which are neighbours in a slot (decode::place_of), and which
  // those of the warp's other threads follow.
  constexpr int AT_ONCE = 8;  // accesses of 16 bytes, all loaded before the first is stored
  constexpr int STEP = decode::PIECE_STEP / 4;
  const int first_place =
      decode::place_of(first_column(warpgroup::index()) + fragment::lane_column());
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
        columns[n / 4 * STEP] = FourColumns{{o[r][n], o[r][n + 1], o[r][n + 2], o[r][n + 3]}};
      }
    } else {
#pragma unroll
      for (int first = 0; first < COLUMNS_O; first += 4 * AT_ONCE) {
        FourColumns sums[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) sums[n] = columns[(first / 4 + n) * STEP];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            sums[n].of[x] = factors.apply(sums[n].of[x], o[r][first + 4 * n + x]);
          }
          columns[(first / 4 + n) * STEP] = sums[n];
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
  constexpr int BYTES = OWN_SLABS * SLAB_BYTES;
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

// A warpgroup: computes half of the columns of o of every unit, and the scores and weights of every
// other tile. Tiles n and n + 1 are a turn; consumer 0 computes the first one.
template <int INDEX>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Params& p, const SharedMemory& smem)
      : p_(p),
        smem_(smem),
        shared_(*smem.storage),
        workspace_(p),
        scale_(static_cast<float>(p.scale)),
        // Logits are `logit_scale` times a score; a negative scale flips the sign of the scores.
        c_(fmin((HAS_SCORE ? 1.0f : fabs(scale_)) * number::LOG2_E<accum_t>, number::largest())) {
    fragment_softmax::init_state(m_, l_, o_);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int n = 0;;) {
      TileFacts tile = find(n);
      if (!tile.exists()) return;
      if constexpr (INDEX == 0) {
        begin_scores(n);
        find_weights<0>(n, tile);
        multiply_values<true>(n++, tile);
        if (!tile.ends()) {
          tile = find(n);
          receive_weights(n);
          multiply_values<false>(n++, tile);
        } else {
          end_turn();
        }
      } else {
        ptx::named_barrier_sync(TURN, BOTH_CONSUMERS);  // the other scores are multiplied first
        if (tile.ends()) {
          receive_weights(n);
          end_turn();
          multiply_values<false>(n++, tile);
          store(tile);
          continue;
        }
        if constexpr (OVERLAPS) {
          begin_scores(n + 1);
          receive_weights(n);
          begin_values<false>(n, tile);
          if (V_PARTS > 1) end_values(n);  // they are few: the next keys may come earlier
          tile = find(n + 1);
          find_weights<V_PARTS == 1 ? 1 : 0>(n + 1, tile);
          if (V_PARTS == 1) end_values(n);
        } else {
          receive_weights(n);
          multiply_values<false>(n, tile);
          tile = find(n + 1);
          begin_scores(n + 1);
          find_weights<0>(n + 1, tile);
        }
        multiply_values<true>(n + 1, tile);
        n += 2;
      }
      if (tile.ends()) store(tile);
    }
  }

 private:
  // Waits for a tile's first part, and reads what is told of it. A shuffle tells the compiler that
  // lanes agree.
  __device__ __forceinline__ TileFacts find(int n) const {
    shared_.pipeline.wait_full(n);
    TileFacts tile = shared_.tile(n).facts;
    tile.flags = ptx::shuffle(tile.flags, 0);
    return tile;
  }

  // Ends a turn of one tile: its weights were received before others take their places.
  __device__ __forceinline__ static void end_turn() {
    ptx::named_barrier_sync(ALONE, BOTH_CONSUMERS);
  }

  // The description of a tile, which lanes agree on: a shuffle tells the compiler, which then keeps
  // it in uniform registers.
  __device__ __forceinline__ static warpgroup::SmemDesc uniform(const char* tile_smem, int step) {
    return ptx::shuffle(warpgroup::make_smem_desc(ptx::shared_address(tile_smem), step), 0);
  }

  // Issues the products of scores.
  __device__ __forceinline__ void begin_scores(int n) {
    // 2 scores
    const warpgroup::SmemDesc q = smem_.q.desc(0);
    const warpgroup::SmemDesc k = uniform(smem_.stage(n), 0);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      shared_.wait_part(n, part);
      ptx::wgmma_fence();
      warpgroup::multiply<PART_SLABS * warpgroup::SLAB_COLUMNS, LEAF>(
          s_, q + part * PART_SLABS * SLAB_BYTES / 16, k + part * PART_SLABS * SLAB_BYTES / 16,
          [](int) {}, part > 0);
    }
    ptx::wgmma_commit();
    if (INDEX == 0) ptx::named_barrier_arrive(TURN, BOTH_CONSUMERS);
  }

  // Turns the scores of tile n into weights, and hands these to the other consumer. PENDING groups
  // of products were issued after the scores.
  template <int PENDING>
  __device__ __forceinline__ void find_weights(int n, const TileFacts& tile) {
    const StagedTile& staged = shared_.tile(n);
    if (tile.begins()) {
      m_[0] = m_[1] = -number::infinity();
      l_[0] = l_[1] = 0;
    }
    unsigned int mask[2];
    if (MAY_MASK && tile.masked()) {
      decode_scores::evaluate_mask(p_, staged.task, staged.leaf, first_row(), mask);
    }
    ptx::wgmma_wait<PENDING>();
    ptx::fence_accumulator(s_);
    warpgroup::arrive_warp(shared_.scored_barrier(n));
    if (!HAS_SCORE && scale_ < 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int x = 0; x < COLUMNS; ++x) s_[r][x] = -s_[r][x];
      }
    }
    // 3 score mod
    bool has_masked = tile.masked();
    if constexpr (HAS_SCORE) {
      has_masked =
          decode_scores::apply_score_mod(p_, staged.task, staged.leaf, first_row(), s_, scale_) ||
          has_masked;
    }
    // 4 mask
    if (MAY_MASK && tile.masked()) fragment_tile::apply_mask(s_, mask);
    if (!MAY_MASK && tile.masked()) fragment_tile::mask_missing_keys(s_, staged.leaf.keys);
    // 5 row max
    float m_new[2];
    fragment_softmax::row_max(s_, m_, m_new, c_);
    fragment_softmax::raise_max(m_, m_new, l_, alpha_, c_);
    fragment_softmax::exponentiate(s_, m_, l_, c_, has_masked);
    fragment::narrow(s_, weights_);
    RowState& rows = shared_.rows;
    const int thread = threadIdx.x % warpgroup::WARPGROUP_SIZE;
    rows.m[thread] = TwoRows{{m_[0], m_[1]}};
    rows.l[thread] = TwoRows{{l_[0], l_[1]}};
    rows.alpha[thread] = TwoRows{{alpha_[0], alpha_[1]}};
    const int lane = ptx::lane_index(),
              rows_of_warp = thread / ptx::WARP_SIZE * fragment::WARP_ROWS;
    const unsigned int row_address = ptx::shared_address(smem_.weights(n)) +
                                     (rows_of_warp + lane % 16) * warpgroup::SLAB_ROW_BYTES;
#pragma unroll
    for (int x = 0; x < COLUMNS / 2; x += 2) {
      const unsigned int from[4] = {weights_[0][x], weights_[1][x], weights_[0][x + 1],
                                    weights_[1][x + 1]};
      ptx::stmatrix_x4(row_address + 16 * ((x + lane / 16) ^ lane % 8), from);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive(WEIGHTS + INDEX, BOTH_CONSUMERS);
  }

  // Waits for the weights of tile n, which the other consumer finds.
  __device__ __forceinline__ void receive_weights(int n) {
#pragma unroll
    for (int part = 1; part < PARTS; ++part) shared_.wait_part(n, part);
    ptx::named_barrier_sync(WEIGHTS + (1 - INDEX), BOTH_CONSUMERS);
    const RowState& rows = shared_.rows;
    const int thread = threadIdx.x % warpgroup::WARPGROUP_SIZE;
    const TwoRows m = rows.m[thread], l = rows.l[thread], alpha = rows.alpha[thread];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_[r] = m.of[r];
      l_[r] = l.of[r];
      alpha_[r] = alpha.of[r];
    }
  }

  // Loads the weights of tile n that the other consumer found.
  __device__ __forceinline__ void load_weights(int n) {
    const char* const weights_smem = smem_.weights(n);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + 8 * r;
#pragma unroll
      for (int x = 0; x < COLUMNS / 2; ++x) {
        weights_[r][x] = *reinterpret_cast<const unsigned int*>(
            weights_smem + row * warpgroup::SLAB_ROW_BYTES + ((x ^ row % 8) << 4) +
            2 * fragment::lane_column());
      }
    }
  }

  // Issues the product for the consumer's columns, of its OWN weights, which are in registers, or
  // of the other consumer's.
  template <bool OWN>
  __device__ __forceinline__ void begin_values(int n, const TileFacts& tile) {
    // 7 accumulate p v
    bool adds = !tile.begins();
    // The node rescales its sums; elsewhere merges stand for that.
    if (ptx::any_lane(alpha_[0] != 1.0f || alpha_[1] != 1.0f)) {
      fragment_softmax::scale_rows(o_, alpha_);
    }
    char* const values_smem = smem_.stage(n) + first_slab(INDEX) * SLAB_BYTES;
    if (HAS_SCORE || (MAY_MASK && tile.masked())) {
      if (!OWN) load_weights(n);
      if (!adds) matmul::clear(o_);
      adds = true;
      repair_nonfinite(o_, weights_, values_smem);
    }
    if (V_PARTS > 1 && OWN) {  // products of weights in registers with fewer columns always add
      if (!adds) matmul::clear(o_);
      adds = true;
    }
    const warpgroup::SmemDesc values = uniform(values_smem, SLAB_BYTES);
    ptx::wgmma_fence();
    if constexpr (OWN) {
      warpgroup::multiply_add<LEAF>(o_, weights_, values, adds);
    } else {
      const warpgroup::SmemDesc weights = uniform(smem_.weights(n), 0);
      warpgroup::multiply_add<LEAF>(o_, weights, values, adds);
    }
    ptx::wgmma_commit();
  }

  // Waits for all products, and lets go of the consumer's half of tile n.
  __device__ __forceinline__ void end_values(int n) {
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(o_);
    warpgroup::arrive_warp(shared_.half_barrier(n, INDEX));
  }

  template <bool OWN>
  __device__ __forceinline__ void multiply_values(int n, const TileFacts& tile) {
    begin_values<OWN>(n, tile);
    end_values(n);
  }

  __device__ __forceinline__ void store(const TileFacts& tile) {
    store_node(workspace_, m_, l_, o_, unit_, tile.unit, tile.rows, tile.opens(), c_);
  }

  const Params& p_;
  const SharedMemory& smem_;
  SharedStorage& shared_;
  const decode::Workspace workspace_;
  const float scale_, c_;
  float m_[2], l_[2], alpha_[2], o_[2][COLUMNS_O], s_[2][COLUMNS];
  unsigned int weights_[2][COLUMNS / 2];
  Unit unit_;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap k_map) {
  extern __shared__ Aligned shared_smem[];
  const SharedMemory smem(shared_smem[0].x);
  if (threadIdx.x == 0) smem.storage->init_barriers();
  if (threadIdx.x == BOTH_CONSUMERS && p.tma_rows > 0) ptx::prefetch_map(&k_map);
  decode::Schedule schedule(p, &smem.storage->schedule);
  ptx::wait_for_grids();
  ptx::launch_dependents();
  schedule.count_units();
  __syncthreads();  // the barriers, initialised by one thread
  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    decode_producer::producer(p, smem, schedule, k_map);
  } else if (warpgroup::index() == 0) {
    ptx::setmaxnreg_inc<FIRST_REGS>();
    Consumer<0>(p, smem).run();
  } else {
    ptx::setmaxnreg_inc<SECOND_REGS>();
    Consumer<1>(p, smem).run();
  }
}
