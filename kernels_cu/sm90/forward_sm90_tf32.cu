// Tiled attention, forward, in float32 by the tensor cores of compute capability 9.0, as three TF32
// products of split numbers: the twin of reference/cpu/forward.py.
//
// Each warpgroup has 64 of the block's queries, and there is no producer: all threads load tiles of
// k and v from global memory to registers, split them, and store them to one stage each in shared
// memory. They store v while the tensor cores multiply q and k, and the next k while these multiply
// the weights and v. The two pipelines let one warpgroup issue products while the other turns
// scores into weights. kernels_cu/README.md has a table of the barriers.
//
// Grid: prod(own_size) * heads * blocks, with own_size = lead_size; packed: heads * blocks. Shared
// memory: the queries, and in their place the output at the end; k, v; SharedStorage. BLOCK_Q is 64
// times the warpgroups, BLOCK_KV one of the widths in ptx/wgmma.cuh.
#include "../common/params.cuh"
#include "../warp/fragment_softmax.cuh"
#include "../warp/fragment_tile.cuh"
#include "warpgroup_tf32x3.cuh"

namespace {

constexpr int COLUMNS = BLOCK_KV / 4;
constexpr int COLUMNS_V = warpgroup_tf32x3::columns_of(D_V) / 4;
// Columns of scores that generated code changes together.
constexpr int SCORE_COLUMNS = fragment_tile::columns_at_once(COLUMNS);
constexpr int Q_ROW_BYTES = fragment::row_bytes(D), V_ROW_BYTES = fragment::row_bytes(D_V);
constexpr int Q_OR_OUT_BYTES = BLOCK_Q * matmul::larger(Q_ROW_BYTES, V_ROW_BYTES);

using Keys = warpgroup_tf32x3::Keys<BLOCK_KV, D>;
using Values = warpgroup_tf32x3::Values<BLOCK_KV, D_V>;
// Whether a warp keeps its queries, split, in registers: where these have room for them.
constexpr bool HOLD_Q = D <= 64 && D_V <= 64 && !MAY_MASK;
using Scores = warpgroup_tf32x3::Scores<D, BLOCK_KV, HOLD_Q>;
constexpr int UNITS = matmul::larger(Keys::UNITS, Values::UNITS);

// What registers have no room for: they hold the sums.
struct SharedStorage {
  layout::Entry entry;
  fragment_tile::Classes classes;
  warpgroup::Pipeline<1> k_pipeline, v_pipeline;
  unsigned int has_nonfinite[fragment::WARPS];  // among the values that a warp split
};
constexpr int SHARED_STORAGE_BYTES = static_cast<int>(sizeof(SharedStorage));
// At each mbarrier every warp arrives.
constexpr int ARRIVALS = fragment::WARPS * warpgroup::ARRIVALS_OF_WARP;

// wgmma needs tiles that begin at multiples of 1024 bytes.
struct alignas(1024) Aligned {
  char x[1024];
};

static_assert(IS_FLOAT32, "float32");
static_assert(fragment::WARP_ROWS == 16 && BLOCK_Q % warpgroup::WARPGROUP_ROWS == 0,
              "BLOCK_Q, THREADS");
static_assert(SHARED_BYTES ==
                  Q_OR_OUT_BYTES + 2 * (Keys::BYTES + Values::BYTES) + SHARED_STORAGE_BYTES,
              "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Aligned shared_smem[];
  char* const q_smem = shared_smem[0].x;
  char* const k_smem = q_smem + Q_OR_OUT_BYTES;
  char* const v_smem = k_smem + 2 * Keys::BYTES;
  SharedStorage* const smem = reinterpret_cast<SharedStorage*>(v_smem + 2 * Values::BYTES);

  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const layout::Entry& entry = smem->entry;
  const long long h = work.head, h_kv = layout::divide(h, p.group).quotient;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
  const memory::Rows k = memory::rows(p.k, work.entry, h_kv, true);
  const memory::Rows v = memory::rows(p.v, work.entry, h_kv, true);
  const float scale = static_cast<float>(p.scale);
  // Logits are `logit_scale` times a score. A negative scale flips the sign of q.
  const float logit_scale = HAS_SCORE ? 1.0f : fabs(scale);
  const float c = fmin(logit_scale * number::LOG2_E<accum_t>, number::largest());
  int visited = 0;  // tiles

  // 1 load q
  fragment::begin_rows<BLOCK_Q, D, Q_ROW_BYTES>(q_smem, memory::rows(p.q, work.entry, h, false), i0,
                                                ni);
  ptx::cp_async_commit();
  warpgroup::Pipeline<1>&k_pipeline = smem->k_pipeline, &v_pipeline = smem->v_pipeline;
  if (threadIdx.x == 0) {
    smem->entry = work.entry;
    k_pipeline.init(ARRIVALS, ARRIVALS);
    v_pipeline.init(ARRIVALS, ARRIVALS);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the entry, and the mbarriers, initialised
  const auto describe = [&](long long j0, int nj) {
    return tile::describe_tile(entry, h, i0, ni, j0, nj);
  };
  fragment_tile::Tile now =
      fragment_tile::next_tile<BLOCK_KV>(p, smem->classes, 0, entry.len_k, describe);
  float staged[UNITS][8];  // of k or v, on their way to shared memory
#pragma unroll
  for (int u = 0; u < Keys::UNITS; ++u) {
    if (now.rows > 0) {
      Keys::load(staged[u], u, k, now.first, now.rows);
      Keys::store(staged[u], u, k_smem);
    }
  }
#pragma unroll
  for (int u = 0; u < Values::UNITS; ++u) {
    if (now.rows > 0) Values::load(staged[u], u, v, now.first, now.rows);
  }
  ptx::cp_async_wait<0>();
  if (!HAS_SCORE && scale < 0) fragment::negate_rows<BLOCK_Q, D, Q_ROW_BYTES>(q_smem);
  const char* const warp_q_smem = q_smem + fragment::warp_row() * Q_ROW_BYTES;
  const warpgroup::SmemDesc k_desc = warpgroup::make_smem_desc(ptx::shared_address(k_smem), 0);
  const warpgroup::SmemDesc v_desc = warpgroup::make_smem_desc(ptx::shared_address(v_smem), 0);
  float m[2], l[2], acc[2][COLUMNS_V];
  fragment_softmax::init_state(m, l, acc);
  ptx::fence_proxy_async();
  warpgroup::arrive_warp(k_pipeline.full_barrier(0));
  __syncthreads();  // the queries, which other threads loaded
  Scores q(warp_q_smem);
  q.hold();

#pragma unroll 1
  while (now.rows > 0) {
    const TileBox box = describe(now.first, now.rows);
    const bool masked = now.tile_class == PARTIAL || now.rows < BLOCK_KV;
    unsigned int mask[2];
    if (MAY_MASK && masked) {
      fragment_tile::evaluate_mask<COLUMNS>(p, box, now.tile_class, mask);
    }
    const int n = visited;
    ++visited;
    const fragment_tile::Tile next = fragment_tile::next_tile<BLOCK_KV>(
        p, smem->classes, now.first + BLOCK_KV, entry.len_k, describe);
    // 2 scores
    float s[2][COLUMNS];
    k_pipeline.wait_full(n);
    q.multiply(s, k_desc, [&] {
      float nonfinite = 0;
      v_pipeline.wait_empty(n);
#pragma unroll
      for (int u = 0; u < Values::UNITS; ++u) Values::store(staged[u], u, v_smem, nonfinite);
      const bool has_nonfinite = ptx::any_lane(nonfinite != nonfinite);
      if (ptx::lane_index() == 0) {
        smem->has_nonfinite[threadIdx.x / ptx::WARP_SIZE] = has_nonfinite ? 1 : 0;
      }
      ptx::fence_proxy_async();
      warpgroup::arrive_warp(v_pipeline.full_barrier(n));
      if (next.rows == 0) return;
#pragma unroll
      for (int u = 0; u < Keys::UNITS; ++u) {
        Keys::load(staged[u], u, k, next.first, next.rows);
      }
    });
    warpgroup::arrive_warp(k_pipeline.empty_barrier(n));
    if (warpgroup_tf32x3::any_nan(s)) {
      warpgroup_tf32x3::multiply_nan<D>(s, warp_q_smem, k, now.first, now.rows);
    }
    // 3 score mod
    bool hides = masked;
    if constexpr (HAS_SCORE) {
      hides = ptx::any_lane(fragment_tile::apply_score_mod<true, SCORE_COLUMNS>(
                  p, tile::head_constants_of(p, box), box, s, scale)) ||
              masked;
    }
    // 4 mask
    if (MAY_MASK && masked) fragment_tile::apply_mask(s, mask);
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
    warpgroup_tf32x3::Weights<COLUMNS> weights(s);
    v_pipeline.wait_full(n);
    unsigned int has_nonfinite = 0;
#pragma unroll
    for (int w = 0; w < fragment::WARPS; ++w) has_nonfinite |= smem->has_nonfinite[w];
    if (has_nonfinite != 0) {
      warpgroup_tf32x3::add_nonfinite<D_V>(acc, weights, v, now.first, now.rows);
      warpgroup_tf32x3::clear_nonfinite<Values::BYTES>(v_smem);
      ptx::fence_proxy_async();
      __syncthreads();  // v, now finite
    }
    warpgroup_tf32x3::multiply_add<D_V>(acc, weights, v_desc, [&](int part) {
      if (part > 0 || next.rows == 0) return;
      k_pipeline.wait_released(n);
#pragma unroll
      for (int u = 0; u < Keys::UNITS; ++u) Keys::store(staged[u], u, k_smem);
      ptx::fence_proxy_async();
      warpgroup::arrive_warp(k_pipeline.full_barrier(n + 1));
#pragma unroll
      for (int u = 0; u < Values::UNITS; ++u) {
        Values::load(staged[u], u, v, next.first, next.rows);
      }
    });
    warpgroup::arrive_warp(v_pipeline.empty_barrier(n));
    now = next;
  }

  fragment_softmax::row_sum(l);
  float weight[2];
  fragment_softmax::join_sink(
      m, l, weight, logit_scale,
      p.sink == nullptr ? -number::infinity() : number::load<float>(p.sink, p.kind_sink, h));
  // 8 normalise
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) weight[r] = l[r] == 0.0f ? 0.0f : keep_scale * weight[r] / l[r];
  if constexpr (RESUMES) {
    fragment::resume<D_V>(acc, weight, m, l, p, entry, h, i0 + fragment::warp_row(),
                          ni - fragment::warp_row(),
                          [](int n) { return fragment::pair_column(n); });
  }
  __syncthreads();  // the queries, which were read: the output takes their place
  char* const out_smem = q_smem + fragment::warp_row() * V_ROW_BYTES;
  warpgroup_tf32x3::put_rows<D_V>(acc, weight, out_smem);
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
