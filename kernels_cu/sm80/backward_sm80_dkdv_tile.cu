// Tiled attention, backward, of heads whose queries and keys are one tile each, in 16-bit types by
// the tensor cores of compute capability 8.0 and later: the twin of `backward_delta`,
// `backward_dkdv` and `backward_dq` in reference/cpu, in one launch.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, of which both loops have one step. A block has a head
// of queries and its keys, which no other head and no other batch entry shares: it computes delta,
// and dq, dk and dv are whole after one product each. There are masks, but neither score changes
// nor a bias nor dropout. All sums have the order that they have in backward_delta.cu and
// backward_sm80_dkdv.cu, and so the same bits.
//
// So small a block takes the time of one instruction after the other, more than that of products
// or of memory: everything that it reads is asked for before anything is waited for, and each of
// eight warps has a small share of the tile.
//
// Grid: prod(own_size) * heads_kv. Shared memory: the keys, the values, P, dS, the queries, do, lse
// and delta, a number of each warp.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../common/row_products.cuh"
#include "../warp/fragment_gradient_ds.cuh"
#include "../warp/fragment_tile.cuh"
#include "dkdv_dq.cuh"
#include "dkdv_tile.cuh"

namespace {

using namespace dkdv_dq;
using namespace dkdv_tile;

static_assert(WHOLE_DQ && !PACKED && !HAS_LISTS && !HAS_PARTS, "one tile of dense rows");
static_assert(!HAS_SCORE && !HAS_DROPOUT, "weights as they are");
static_assert(!P_IN_REGISTERS && STAGES == 1 && !LATE && DQ_PARTS == 1, "BLOCK_Q, THREADS");

// Rows whose out and do a lane loads before it adds the first of them.
constexpr int AHEAD = BLOCK_Q / row_products::AT_ONCE;

// Starts the copies of a head's q and do, and writes lse and delta = rowsum(do * out) - dlse to
// shared memory; delta also to global memory, where other kernels read it. Empty and missing rows
// get lse = inf, which makes p = 0.
__device__ __forceinline__ void load_queries(const Params& p, const layout::Entry& entry,
                                             long long h, int ni, char* q_smem, char* do_smem,
                                             float* lse_smem, float* delta_smem) {
  fragment::begin_rows<BLOCK_Q, D, K_BYTES>(q_smem, memory::rows(p.q, entry, h, false), 0, ni);
  fragment::begin_rows<BLOCK_Q, D_V, V_BYTES>(do_smem, memory::rows(p.d_out, entry, h, false), 0,
                                              ni);
  const memory::RowStatistic rows_lse = memory::row_statistic(p.lse, entry, h);
  const memory::RowStatistic rows_dlse = memory::row_statistic(p.dlse, entry, h);
  const memory::RowStatistic rows_delta = memory::row_statistic(p.delta, entry, h);
  const int i = threadIdx.x;
  float lse = number::infinity();
  if (i < ni) lse = rows_lse.data[i * rows_lse.row];
  const row_products::GlobalRows out(p.out, layout::offset(p.out, entry, h, false));
  const row_products::GlobalRows d_out(p.d_out, layout::offset(p.d_out, entry, h, false));
  row_products::for_each_row<AHEAD>(out, d_out, ni, p.sink != nullptr, [&](int row, float delta) {
    if (p.dlse.data != nullptr) delta -= rows_dlse.data[row * rows_dlse.row];
    if (p.delta.data != nullptr) rows_delta.data[row * rows_delta.row] = delta;
    delta_smem[row] = delta;
  });
  if (i < BLOCK_Q) {
    lse_smem[i] = lse == -number::infinity() ? number::infinity() : lse;
    if (i >= ni) delta_smem[i] = 0;
  }
}

// Stores rows of a result, which are staged in shared memory unless they are `wide`.
template <int WIDTH>
__device__ __forceinline__ void copy_results(const Operand& to, bool wide, long long offset,
                                             int valid, const char* rows_smem) {
  if (wide) return;
  fragment::copy_out<WIDTH>(to, offset, valid, valid, threadIdx.x, THREADS, rows_smem);
}

// Stores a warp's share of a result if it is `wide`, or else stages it.
template <int WIDTH, int SHARERS, int STEP, int ROWS_OF, int COLUMNS_OF>
__device__ __forceinline__ void stage_results(
    const float (&result)[ROWS_OF][COLUMNS_OF],
    const fragment_product::Share<WIDTH, SHARERS, STEP>& share, int warp_row, const Operand& to,
    bool wide, long long offset, int valid, char* rows_smem) {
  if (wide) {
    fragment_product::store_wide_rows(result, share, warp_row, to, offset, valid);
  } else {
    fragment_product::stage_rows(result, share, warp_row, rows_smem);
  }
}

// Whether all elements of the keys, q and do that this thread copied are finite.
__device__ __forceinline__ bool is_tile_finite(const char* k_smem, const char* q_smem,
                                               const char* do_smem) {
  return fragment::finite_rows<BLOCK_KV, D, K_BYTES>(k_smem) &&
         fragment::finite_rows<BLOCK_Q, D, K_BYTES>(q_smem) &&
         fragment::finite_rows<BLOCK_Q, D_V, V_BYTES>(do_smem);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  char* const k_smem = reinterpret_cast<char*>(shared_smem);
  char* const v_smem = k_smem + BLOCK_KV * K_BYTES;
  char* const p_smem = v_smem + BLOCK_KV * V_BYTES;
  char* const ds_smem = p_smem + TILE_BYTES;
  char* const q_smem = ds_smem + TILE_BYTES;
  char* const do_smem = q_smem + BLOCK_Q * K_BYTES;
  float* const lse_smem = reinterpret_cast<float*>(q_smem + STAGE_BYTES);
  float* const delta_smem = lse_smem + BLOCK_Q;
  float* const largest_smem = delta_smem + BLOCK_Q;

  const layout::WorkTile work =
      layout::work_tile_of(p, blockIdx.x, p.heads_kv, true, BLOCK_KV, false);
  const int h = static_cast<int>(work.head);
  const int ni = static_cast<int>(p.len_q), nj = static_cast<int>(p.len_k);
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const int warp_key = warp / SHARERS * WARP_KEYS;
  const int warp_query = warp % SHARERS * WARP_QUERIES;
  const int sum_key = warp / SUM_SHARERS * SUM_KEYS;
  const ShareK share_k(warp % SUM_SHARERS);
  const ShareV share_v(warp % SUM_SHARERS);
  const ShareQ share_q(warp % DQ_SHARERS);
  ptx::wait_for_grids();
  ptx::launch_dependents();

  fragment::begin_rows<BLOCK_KV, D, K_BYTES>(k_smem, memory::rows(p.k, work.entry, h, true), 0, nj);
  fragment::begin_rows<BLOCK_KV, D_V, V_BYTES>(v_smem, memory::rows(p.v, work.entry, h, true), 0,
                                               nj);
  load_queries(p, work.entry, h, ni, q_smem, do_smem, lse_smem, delta_smem);
  const long long offset_dq = layout::offset(p.dq, work.entry, h, false);
  const bool wide_dq = p.kind_dq != number::STORAGE_KIND;
  const TileBox box = tile::describe_tile(work.entry, h, 0, ni, 0, nj);
  const int tile_class = ni > 0 ? tile::classify_tile(p, box) : EMPTY;
  Dk dk;
  Dv dv;
  matmul::clear(dk);
  matmul::clear(dv);
  bool has_staged_dq = false;  // which is still to be copied out
  ptx::cp_async_wait_all();
  __syncthreads();  // the tile, lse and delta, written by all threads
  char* const dq_gmem = p.dq.data + offset_dq * fragment_product::dq_bytes(p);
  if (tile_class == EMPTY) {
    fragment_product::clear_dq<THREADS>(p, dq_gmem, 0, ni);
  } else {
    // The weight of a missing query is 0: its lse is inf.
    const bool masked = tile_class == PARTIAL || nj < BLOCK_KV;
    const bool may_hide = HAS_MASK && masked;

    // 2 scores
    const fragment_gradient::Corner corner(warp_key, warp_query);
    const float* const lane_lse_smem = lse_smem + corner.column;
    float s[ROWS][COLUMNS];
    fragment_product::multiply<D, UNROLL>(s, k_smem + warp_key * K_BYTES,
                                          q_smem + warp_query * K_BYTES);
    // 3 score mod
    // 4 mask
    // 5 probabilities and the gradient of the output's weights
    const unsigned int kept[ROWS] = {};  // no weight is dropped
    unsigned int weights[ROWS][COLUMNS / 2], ds[ROWS][COLUMNS / 2];
    fragment_gradient::recompute_probabilities<true, P_BYTES>(p, box, tile_class, masked, s, corner,
                                                              lane_lse_smem, kept, weights, p_smem);
    float dp[ROWS][COLUMNS];
    fragment_product::multiply<D_V, UNROLL>(dp, v_smem + warp_key * V_BYTES,
                                            do_smem + warp_query * V_BYTES);
    const fragment_gradient::PerQuery<true, ROWS, COLUMNS> delta(lane_lse_smem + BLOCK_Q);
    fragment_gradient::score_gradients<true>(p, masked, s, dp, delta, kept, s);
    bool has_nonfinite = may_hide && !is_tile_finite(k_smem, q_smem, do_smem);
    fragment_gradient::DsScale ds_scale;
    const auto store = [&] {
      fragment_gradient::narrow(s, ds_scale.factor, ds);
      fragment_gradient::store_words<P_BYTES>(ds, corner, ds_smem);
    };
    store();
    if constexpr (fragment::Mma::SCALES_DS) {
      const bool exceeds = fragment_gradient::largest_of(s) > ds_scale.largest;
      // Protects largest_smem, read by all; and P and dS, written by all warps.
      if (ptx::barrier_or(exceeds || has_nonfinite)) {
        has_nonfinite = may_hide;  // the vote does not say which
        rescale_ds(s, dk, 0, warp_key, warp_query, largest_smem, ds_smem, ds_scale);
        store();
        __syncthreads();  // dS, written again by all warps
      } else {
        has_nonfinite = false;
      }
    } else if (may_hide) {
      has_nonfinite = ptx::barrier_or(has_nonfinite);  // P and dS, written by all warps
    } else {
      __syncthreads();  // as above
    }

    // 6 accumulate dv and dk
    const char* const p_rows = p_smem + sum_key * P_BYTES;
    const char* const ds_rows = ds_smem + sum_key * P_BYTES;
    if (has_nonfinite) {
      repair_nonfinite(dk, dv, share_k, share_v, p_rows, ds_rows, q_smem, do_smem);
    }
    Dq dq;
    multiply_dq(dq, 0, ds_smem, k_smem, has_nonfinite, ds_scale);
    constexpr int STEPS = BLOCK_Q / 16;
    const fragment_product::Nothing nothing;
    fragment_product::multiply_add<D_V, BLOCK_Q, P_BYTES, STEPS>(dv, p_rows, do_smem, share_v,
                                                                 nothing);
    fragment_product::multiply_add<D, BLOCK_Q, P_BYTES, STEPS>(dk, ds_rows, q_smem, share_k,
                                                               nothing);
    matmul::scale(dk, ds_scale.inverse());
    __syncthreads();  // the tile and dS, read by all warps
    matmul::scale(dq, static_cast<float>(p.scale));
    stage_results(dq, share_q, warp / DQ_SHARERS * DQ_QUERIES, p.dq, wide_dq, offset_dq, ni,
                  q_smem);
    has_staged_dq = !has_nonfinite;
    if (has_nonfinite) {
      __syncthreads();  // dq, written by all warps
      copy_results<D>(p.dq, wide_dq, offset_dq, ni, q_smem);
      __syncthreads();  // dq, copied out by all threads
      fragment_product::add_fragments_nonfinite<D, BLOCK_KV, P_BYTES>(
          p, ds_smem, p_smem, k_smem, reinterpret_cast<float*>(dq_gmem), ni, ds_scale.inverse());
      __syncthreads();  // the keys, read by all threads
    }
  }

  // 7 scale and store
  matmul::scale(dk, static_cast<float>(p.scale));
  const bool wide_dk = p.kind_dk != number::STORAGE_KIND;
  const bool wide_dv = p.kind_dv != number::STORAGE_KIND;
  const long long offset_dk = layout::offset(p.dk, work.entry, h, true);
  const long long offset_dv = layout::offset(p.dv, work.entry, h, true);
  // The results take the memory of the keys and values.
  stage_results(dk, share_k, sum_key, p.dk, wide_dk, offset_dk, nj, k_smem);
  stage_results(dv, share_v, sum_key, p.dv, wide_dv, offset_dv, nj, v_smem);
  __syncthreads();  // the results, written by all warps
  if (has_staged_dq) copy_results<D>(p.dq, wide_dq, offset_dq, ni, q_smem);
  copy_results<D>(p.dk, wide_dk, offset_dk, nj, k_smem);
  copy_results<D_V>(p.dv, wide_dv, offset_dv, nj, v_smem);
  tile::count_tiles(p, tile_class == EMPTY ? 0 : 1);
}
