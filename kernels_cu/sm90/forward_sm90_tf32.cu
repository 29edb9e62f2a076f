// Tiled attention, forward, in float32 by the tensor cores of compute capability 9.0, as three
// products of split numbers: the twin of reference/cpu/forward.py.
//
// A warpgroup has 64 of the block's queries. All threads bring keys and values from global memory
// to registers, and from there, split, to one place each in shared memory: values while the tensor
// cores multiply keys, the next keys while they multiply values. Barriers in shared memory let one
// warpgroup be at its products while the other turns scores into weights.
//
// Grid: prod(own_size) * heads * blocks, with own_size = lead_size; packed: heads * blocks.
// Shared memory: the queries, or the output; keys, values; what a block knows. BLOCK_Q is 64 times
// the warpgroups, BLOCK_KV one of the widths in ptx/wgmma.cuh.
#include "../common/params.cuh"
#include "../sm80/fragment_softmax.cuh"
#include "../sm80/fragment_tile.cuh"
#include "warpgroup_split.cuh"

namespace {

constexpr int COLUMNS = BLOCK_KV / 4;
constexpr int COLUMNS_V = warpgroup_split::columns_of(D_V) / 4;
// Columns of scores that generated code changes together.
constexpr int AT_ONCE = fragment_tile::columns_at_once(COLUMNS);
constexpr int Q_BYTES = fragment::row_bytes(D), V_BYTES = fragment::row_bytes(D_V);
constexpr int HELD_BYTES = BLOCK_Q * matmul::larger(Q_BYTES, V_BYTES);

using Keys = warpgroup_split::Keys<BLOCK_KV, D>;
using Values = warpgroup_split::Values<BLOCK_KV, D_V>;
// Whether registers have room for the queries of a warp's rows.
constexpr bool HOLD_Q = D <= 64 && D_V <= 64 && !MAY_MASK;
using Scores = warpgroup_split::Scores<D, BLOCK_KV, HOLD_Q>;
constexpr int UNITS = matmul::larger(Keys::UNITS, Values::UNITS);

// Barriers of the place of a tile: all of it has come, and has been read.
struct Passing {
  unsigned long long full, empty;
};
// What a block knows lies in shared memory, because registers hold the sums.
struct Known {
  layout::Entry entry;
  fragment_tile::Classes classes;
  Passing keys, values;
  unsigned int spoilt[fragment::WARPS];  // whether a warp brought values that cannot be split
};
constexpr int KNOWN_BYTES = static_cast<int>(sizeof(Known));
constexpr int ARRIVALS =
    fragment::WARPS * warpgroup::ARRIVALS_OF_WARP;  // at each of these barriers

struct alignas(1024) Swizzled {
  char x[1024];
};

// Comes to a barrier that counts warps.
__device__ __forceinline__ void arrive(unsigned long long& barrier) {
  warpgroup::arrive_warp(ptx::shared_address(&barrier));
}
__device__ __forceinline__ void wait(unsigned long long& barrier, int parity) {
  warpgroup::mbarrier_wait(ptx::shared_address(&barrier), parity);
}

static_assert(STORAGE == 2, "float32");
static_assert(fragment::WARP_ROWS == 16 && BLOCK_Q % warpgroup::WARPGROUP_ROWS == 0,
              "BLOCK_Q, THREADS");
static_assert(SHARED_BYTES == HELD_BYTES + 2 * (Keys::BYTES + Values::BYTES) + KNOWN_BYTES,
              "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Swizzled shared_smem[];
  char* const q_smem = shared_smem[0].x;
  char* const keys_smem = q_smem + HELD_BYTES;
  char* const values_smem = keys_smem + 2 * Keys::BYTES;
  Known* const known_smem = reinterpret_cast<Known*>(values_smem + 2 * Values::BYTES);

  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const layout::Entry& entry = known_smem->entry;
  const long long h = work.head, h_kv = layout::divide(h, p.group).quotient;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
  const memory::Rows k = memory::rows(p.k, work.entry, h_kv, true);
  const memory::Rows v = memory::rows(p.v, work.entry, h_kv, true);
  const float scale = static_cast<float>(p.scale);
  // Logits are `unit` times a score; the sign of a negative scale goes to the queries.
  const float unit = HAS_SCORE ? 1.0f : fabs(scale);
  const float c = fmin(unit * fragment_softmax::LOG2_E, number::largest());
  int visited = 0;  // tiles

  // 1 load q
  fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem, memory::rows(p.q, work.entry, h, false), i0,
                                            ni);
  ptx::cp_async_commit();
  Passing &keys_passing = known_smem->keys, &values_passing = known_smem->values;
  if (threadIdx.x == 0) {
    known_smem->entry = work.entry;
    ptx::mbarrier_init(ptx::shared_address(&keys_passing.full), ARRIVALS);
    ptx::mbarrier_init(ptx::shared_address(&keys_passing.empty), ARRIVALS);
    ptx::mbarrier_init(ptx::shared_address(&values_passing.full), ARRIVALS);
    ptx::mbarrier_init(ptx::shared_address(&values_passing.empty), ARRIVALS);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // what is known, and the barriers
  const auto describe = [&](long long j0, int nj) {
    return tile::describe_tile(entry, h, i0, ni, j0, nj);
  };
  fragment_tile::Tile now =
      fragment_tile::next_tile<BLOCK_KV>(p, known_smem->classes, 0, entry.len_k, describe);
  float passing[UNITS][8];  // of keys or values, on their way
#pragma unroll
  for (int u = 0; u < Keys::UNITS; ++u) {
    if (now.rows > 0) {
      Keys::load(passing[u], u, k, now.first, now.rows);
      Keys::store(passing[u], u, keys_smem);
    }
  }
#pragma unroll
  for (int u = 0; u < Values::UNITS; ++u) {
    if (now.rows > 0) Values::load(passing[u], u, v, now.first, now.rows);
  }
  ptx::cp_async_wait<0>();
  if (!HAS_SCORE && scale < 0) fragment::negate_rows<BLOCK_Q, D, Q_BYTES>(q_smem);
  const char* const own_q_smem = q_smem + fragment::warp_row() * Q_BYTES;
  const warpgroup::SmemDesc keys = warpgroup::make_smem_desc(ptx::shared_address(keys_smem), 0);
  const warpgroup::SmemDesc values = warpgroup::make_smem_desc(ptx::shared_address(values_smem), 0);
  float m[2], l[2], acc[2][COLUMNS_V];
  fragment_softmax::init_state(m, l, acc);
  ptx::fence_proxy_async();
  arrive(keys_passing.full);
  __syncthreads();  // the queries, which other threads brought
  Scores q(own_q_smem);
  q.hold();

#pragma unroll 1
  while (now.rows > 0) {
    const TileBox box = describe(now.first, now.rows);
    const bool masked = now.tile_class == PARTIAL || now.rows < BLOCK_KV;
    unsigned int allowed[2];
    if (MAY_MASK && masked) {
      fragment_tile::evaluate_mask<COLUMNS>(p, box, now.tile_class, allowed);
    }
    const int parity = visited % 2;
    ++visited;
    const fragment_tile::Tile next = fragment_tile::next_tile<BLOCK_KV>(
        p, known_smem->classes, now.first + BLOCK_KV, entry.len_k, describe);
    // 2 scores
    float s[2][COLUMNS];
    wait(keys_passing.full, parity);
    q.multiply(s, keys, [&] {
      float spoilt = 0;
      wait(values_passing.empty, parity ^ 1);
#pragma unroll
      for (int u = 0; u < Values::UNITS; ++u) Values::store(passing[u], u, values_smem, spoilt);
      const bool some = ptx::any_lane(spoilt != spoilt);
      if (ptx::lane_index() == 0) {
        known_smem->spoilt[threadIdx.x / ptx::WARP_SIZE] = some ? 1 : 0;
      }
      ptx::fence_proxy_async();
      arrive(values_passing.full);
      if (next.rows == 0) return;
#pragma unroll
      for (int u = 0; u < Keys::UNITS; ++u) {
        Keys::load(passing[u], u, k, next.first, next.rows);
      }
    });
    arrive(keys_passing.empty);
    if (warpgroup_split::any_nan(s)) {
      warpgroup_split::multiply_nan<D>(s, own_q_smem, k, now.first, now.rows);
    }
    // 3 score mod
    bool hides = masked;
    if constexpr (HAS_SCORE) {
      hides = ptx::any_lane(fragment_tile::apply_score_mod<true, AT_ONCE>(
                  p, tile::head_constants_of(p, box), box, s, scale)) ||
              masked;
    }
    // 4 mask
    if (MAY_MASK && masked) fragment_tile::apply_mask(s, allowed);
    if (!MAY_MASK && masked) fragment_tile::mask_missing_keys(s, now.rows);
    // 5 row max
    float m_new[2];
    if (fragment_softmax::row_max(s, m, m_new, c)) {
      // 6 rescale
      fragment_softmax::rescale(m, m_new, l, acc, c);
    }
    fragment_softmax::exponentiate(s, m, l, c, hides);
    if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(p, box, s);
    // 7 accumulate p v
    warpgroup_split::Weights<COLUMNS> weights(s);
    wait(values_passing.full, parity);
    unsigned int spoilt = 0;
#pragma unroll
    for (int w = 0; w < fragment::WARPS; ++w) spoilt |= known_smem->spoilt[w];
    if (spoilt != 0) {
      warpgroup_split::add_nonfinite<D_V>(acc, weights, v, now.first, now.rows);
      warpgroup_split::clear_nonfinite<Values::BYTES>(values_smem);
      ptx::fence_proxy_async();
      __syncthreads();  // the values, now finite
    }
    warpgroup_split::multiply_add<D_V>(acc, weights, values, [&](int part) {
      if (part > 0 || next.rows == 0) return;
      wait(keys_passing.empty, parity);
#pragma unroll
      for (int u = 0; u < Keys::UNITS; ++u) Keys::store(passing[u], u, keys_smem);
      ptx::fence_proxy_async();
      arrive(keys_passing.full);
#pragma unroll
      for (int u = 0; u < Values::UNITS; ++u) {
        Values::load(passing[u], u, v, next.first, next.rows);
      }
    });
    arrive(values_passing.empty);
    now = next;
  }

  fragment_softmax::row_sum(l);
  float weight[2];
  fragment_softmax::join_sink(
      m, l, weight, unit,
      p.sink == nullptr ? -number::infinity() : number::load<float>(p.sink, p.kind_sink, h));
  // 8 normalise
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) weight[r] = l[r] == 0.0f ? 0.0f : keep_scale * weight[r] / l[r];
  __syncthreads();  // the queries, which were read: the output passes there
  char* const out_smem = q_smem + fragment::warp_row() * V_BYTES;
  warpgroup_split::put_rows<D_V>(acc, weight, out_smem);
  __syncwarp();  // the warp's rows, which its lanes wrote
  fragment::copy_out<D_V>(
      p.out, layout::offset(p.out, entry, h, false) + (i0 + fragment::warp_row()) * p.out.row,
      fragment::WARP_ROWS, ni - fragment::warp_row(), ptx::lane_index(), ptx::WARP_SIZE, out_smem);
  // 9 store lse
  const memory::RowStatistic lse = memory::row_statistic(p.lse, entry, h);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = fragment::warp_row() + 8 * r + fragment::lane_row();
    if (p.lse.data != nullptr && ptx::lane_index() % 4 == 0 && row < ni) {
      lse.data[(i0 + row) * lse.row] = l[r] == 0.0f ? -number::infinity() : m[r] + log(l[r]);
    }
  }
  tile::count_tiles(p, visited);
}
