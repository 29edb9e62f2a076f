// Tiled attention, backward, gradients of keys and values in float64 by the tensor cores of compute
// capability 8.0 and later: the twin of `backward_dkdv` in reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2: a block of keys and values is resident, the queries are
// streamed. The sum runs over the batch entries that share the keys, the heads of the group and the
// blocks of queries, in that order. No two blocks write the same element, so the result does not
// depend on the order in which blocks run. With ATOMIC_DQ the kernel also multiplies dS and the
// keys, and adds the product to dq, which is 0 at first, by atomic additions in the order in which
// blocks run.
//
// A warp computes the scores of its keys with its share of a tile's queries, and writes P and dS to
// shared memory. For dk and dv it has some keys, all of the tile's queries and a share of the
// columns.
//
// This is not backward_sm80_dkdv.cu with another element type; what they share is in
// fragment_backward.cuh. Shared memory holds one tile, so the next one is copied during the product
// for dq. P and dS always go through shared memory, because a lane's elements of a result are not
// those that the instruction takes of a left operand. Results are stored from registers, without
// rounding. dS needs no scale, so there is no vote on one, and NaN and infinities are skipped when
// operands are loaded instead of being cleared in shared memory.
//
// Grid: prod(own_size) * heads_kv * blocks; packed: heads_kv * blocks.
// Shared memory: the keys, the values, P, dS, a tile of queries and do, lse and delta, the head.
// What BLOCK_KV and BLOCK_Q may be is asserted below.
#include "../common/params.cuh"
#include "../warp/fragment_backward.cuh"
#include "../warp/fragment_f64.cuh"
#include "../warp/fragment_f64_gradient.cuh"
#include "../warp/fragment_tile.cuh"

namespace {

using fragment::WARPS;
using fragment_backward::Head;

// For the scores a warp has some queries of its keys.
constexpr int WARP_KEYS = BLOCK_KV > 16 * WARPS ? 32 : 16;
constexpr int SHARERS = WARPS * WARP_KEYS / BLOCK_KV;
constexpr int WARP_QUERIES = BLOCK_Q / SHARERS;
constexpr int ROWS = WARP_KEYS / 8;
constexpr int COLUMNS = WARP_QUERIES / 4;
// For dk and dv it has some keys and a share of the columns, for dq some queries.
constexpr int SUM_KEYS = fragment_f64::warp_rows(BLOCK_KV, matmul::larger(D, D_V) / 8);
constexpr int SUM_SHARERS = WARPS * SUM_KEYS / BLOCK_KV;
constexpr int SUM_ROWS = SUM_KEYS / 8;
using ShareK = fragment_f64::WideShare<D, SUM_SHARERS>;
using ShareV = fragment_f64::WideShare<D_V, SUM_SHARERS>;
constexpr int DQ_QUERIES = fragment_f64::warp_rows(BLOCK_Q, D / 8);
constexpr int DQ_SHARERS = WARPS * DQ_QUERIES / BLOCK_Q;
using ShareQ = fragment_f64::WideShare<D, DQ_SHARERS>;

// Limited by registers.
constexpr int UNROLL_SCORES = 16, UNROLL_SUMS = 2, UNROLL_DQ = 1;

constexpr int K_BYTES = fragment::row_bytes(D), V_BYTES = fragment::row_bytes(D_V);
constexpr int P_BYTES = fragment::row_bytes(BLOCK_Q);
constexpr int TILE_BYTES = BLOCK_KV * P_BYTES;
constexpr int ALL_BYTES = (BLOCK_KV + BLOCK_Q) * (K_BYTES + V_BYTES) + 2 * TILE_BYTES +
                          2 * BLOCK_Q * static_cast<int>(sizeof(double)) +
                          static_cast<int>(sizeof(Head));

static_assert(IS_FLOAT64, "float64");
static_assert(SHARERS * BLOCK_KV == WARPS * WARP_KEYS, "BLOCK_KV, THREADS");
static_assert(WARP_QUERIES % 16 == 0 && SHARERS * WARP_QUERIES == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(DQ_SHARERS * BLOCK_Q == WARPS * DQ_QUERIES, "BLOCK_Q, THREADS");
static_assert(SHARED_BYTES == ALL_BYTES, "SHARED_BYTES");

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
  double* const lse_smem = reinterpret_cast<double*>(do_smem + BLOCK_Q * V_BYTES);
  Head* const head_smem = reinterpret_cast<Head*>(lse_smem + 2 * BLOCK_Q);

  const layout::WorkTile work = layout::work_tile_of(p, layout::interleave_heads(p, blockIdx.x),
                                                     p.heads_kv, true, BLOCK_KV, false);
  if (work.idle) return;
  const int h_kv = static_cast<int>(work.head);
  const long long j0 = work.block * BLOCK_KV;
  const int nj = tile::rows_from(j0, work.entry.len_k, BLOCK_KV);
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const int warp_key = warp / SHARERS * WARP_KEYS;
  const int warp_query = warp % SHARERS * WARP_QUERIES;
  const fragment_gradient::Corner corner(warp_key, warp_query);
  const int sum_key = warp / SUM_SHARERS * SUM_KEYS;
  const ShareK share_k(warp % SUM_SHARERS);
  const ShareV share_v(warp % SUM_SHARERS);
  unsigned long long visited = 0;
  fragment_backward::load_keys_and_values<K_BYTES, V_BYTES>(p, work, h_kv, j0, nj, k_smem, v_smem,
                                                            head_smem);
  double dk[SUM_ROWS][ShareK::COLUMNS], dv[SUM_ROWS][ShareV::COLUMNS];
  matmul::clear(dk);
  matmul::clear(dv);

  const bool finite_keys = fragment_backward::are_keys_finite<K_BYTES>(k_smem);

  const long long members = layout::entries_sharing(p);
#pragma unroll 1
  for (int member = 0; member < members; ++member) {
#pragma unroll 1
    for (int n = 0; n < p.group; ++n) {
      __syncthreads();  // the previous head and its last tile, which other threads may still read
      if (threadIdx.x == 0) {
        const long long h = h_kv * p.group + n;
        const layout::Entry entry = layout::shared_entry(p, head_smem->entry, member);
        *head_smem = fragment_backward::head_of(p, entry, h, head_smem->j0);
      }
      __syncthreads();  // the new head, written by thread 0
      fragment_gradient::RowStatistics statistics;
      const auto load_tile = [&](const fragment_tile::Tile& tile) {
        fragment::begin_rows<BLOCK_Q, D, K_BYTES>(q_smem, head_smem->q, tile.first, tile.rows);
        fragment::begin_rows<BLOCK_Q, D_V, V_BYTES>(do_smem, head_smem->d_out, tile.first,
                                                    tile.rows);
        statistics.load(head_smem->lse, head_smem->delta, tile.first, tile.rows);
      };
      const auto describe = [&](long long i0, int ni) {
        return tile::describe_tile(head_smem->entry, head_smem->h, i0, ni, head_smem->j0, nj);
      };
      fragment_tile::Tile now = fragment_tile::next_tile<BLOCK_Q>(p, head_smem->classes, 0,
                                                                  head_smem->entry.len_q, describe);
      if (now.rows == 0) continue;
      load_tile(now);
#pragma unroll 1
      while (now.rows > 0) {
        const bool masked = HAS_SCORE || now.tile_class == PARTIAL || nj < BLOCK_KV;
        const double* const lane_lse_smem = lse_smem + corner.column;
        ++visited;

        statistics.store(lse_smem, lse_smem + BLOCK_Q);
        ptx::cp_async_wait_all();
        // Protects the tile, copied by all threads, lse and delta; P and dS, read by all.
        __syncthreads();
        const fragment_tile::Tile next = fragment_tile::next_tile<BLOCK_Q>(
            p, head_smem->classes, now.first + BLOCK_Q, head_smem->entry.len_q, describe);

        // 2 scores
        double s[ROWS][COLUMNS];
        fragment_f64::multiply<D, UNROLL_SCORES>(s, k_smem + warp_key * K_BYTES,
                                                 q_smem + warp_query * K_BYTES);
        const TileBox box = describe(now.first, now.rows);
        unsigned int kept[ROWS];
        if constexpr (HAS_DROPOUT)
          fragment_gradient::draw_dropout<true, COLUMNS>(p, box, corner, kept);
        // 3 score mod
        // 4 mask
        // 5 probabilities and the gradient of the output's weights
        fragment_f64_gradient::recompute_probabilities<true, P_BYTES>(
            p, box, now.tile_class, masked, s, corner, lane_lse_smem, kept, p_smem);
        double dp[ROWS][COLUMNS];
        fragment_f64::multiply<D_V, UNROLL_SCORES>(dp, v_smem + warp_key * V_BYTES,
                                                   do_smem + warp_query * V_BYTES);
        fragment_f64_gradient::score_gradients<true>(p, masked, s, dp, lane_lse_smem + BLOCK_Q,
                                                     kept);
        fragment_f64_gradient::store_tile<P_BYTES>(s, corner, ds_smem);
        bool has_nonfinite = false;
        // Protects P and dS, written by all warps.
        if (MAY_MASK && masked) {
          has_nonfinite =
              ptx::barrier_or(!(finite_keys && fragment::finite_rows<BLOCK_Q, D, K_BYTES>(q_smem) &&
                                fragment::finite_rows<BLOCK_Q, D_V, V_BYTES>(do_smem)));
        } else {
          __syncthreads();  // as above
        }
        // 6 accumulate dv and dk
        if (has_nonfinite) {
          fragment_f64::add_nonfinite<D_V, BLOCK_Q, P_BYTES, false>(dv, p_smem, p_smem, sum_key,
                                                                    do_smem, share_v);
          fragment_f64::add_nonfinite<D, BLOCK_Q, P_BYTES, false>(dk, ds_smem, p_smem, sum_key,
                                                                  q_smem, share_k);
          fragment_f64::multiply_add<D_V, BLOCK_Q, P_BYTES, 1, true>(dv, p_smem + sum_key * P_BYTES,
                                                                     do_smem, share_v);
          fragment_f64::multiply_add<D, BLOCK_Q, P_BYTES, 1, true>(dk, ds_smem + sum_key * P_BYTES,
                                                                   q_smem, share_k);
        } else {
          fragment_f64::multiply_add<D_V, BLOCK_Q, P_BYTES, UNROLL_SUMS>(
              dv, p_smem + sum_key * P_BYTES, do_smem, share_v);
          fragment_f64::multiply_add<D, BLOCK_Q, P_BYTES, UNROLL_SUMS>(
              dk, ds_smem + sum_key * P_BYTES, q_smem, share_k);
        }
        if (next.rows > 0) {
          __syncthreads();  // the tile, read by all warps
          load_tile(next);
        }
        if constexpr (ATOMIC_DQ) {
          const int warp_row = warp / DQ_SHARERS * DQ_QUERIES;
          const ShareQ share_q(warp % DQ_SHARERS);
          double dq[DQ_QUERIES / 8][ShareQ::COLUMNS];
          matmul::clear(dq);
          if (has_nonfinite) {
            fragment_f64::add_nonfinite<D, BLOCK_KV, P_BYTES, true>(dq, ds_smem, p_smem, warp_row,
                                                                    k_smem, share_q);
            fragment_f64::multiply_add_transposed<D, BLOCK_KV, P_BYTES, 1, true>(
                dq, ds_smem, warp_row, k_smem, share_q);
          } else {
            fragment_f64::multiply_add_transposed<D, BLOCK_KV, P_BYTES, UNROLL_DQ>(
                dq, ds_smem, warp_row, k_smem, share_q);
          }
          fragment_f64::store_rows<true>(dq, share_q, p.dq,
                                         head_smem->dq + (now.first + warp_row) * p.dq.row,
                                         now.rows - warp_row, p.scale);
        }
        now = next;
      }
    }
  }

  // 7 scale and store
  const layout::Entry& entry = head_smem->entry;
  const auto rows_of = [&](const Operand& to) {
    return reinterpret_cast<double*>(to.data) + layout::offset(to, entry, h_kv, true) +
           (head_smem->j0 + sum_key) * to.row;
  };
  ptx::cp_async_wait_all();
  fragment_f64::store_rows<false>(dk, share_k, p.dk, rows_of(p.dk), nj - sum_key, p.scale);
  fragment_f64::store_rows<false>(dv, share_v, p.dv, rows_of(p.dv), nj - sum_key,
                                  HAS_DROPOUT ? p.keep_scale : 1.0);
  tile::count_tiles(p, visited);
}
