// Tiled attention, backward, gradient of the queries in float64 by the tensor cores of compute
// capability 8.0 and later: the twin of `backward_dq` in reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, with the loops exchanged: a block of queries is
// resident, the keys and values are streamed, and dq needs no atomic additions. The sum runs over
// the batch entries that share the queries and the blocks of keys, in that order.
//
// A warp computes the scores of its queries with its share of a tile's keys, and writes dS to
// shared memory. For dq it has some queries, all of the tile's keys and a share of the columns.
//
// This is not backward_sm80_dq.cu with another element type; what they share is in
// fragment_backward.cuh. Shared memory holds one tile: its keys are copied during the product do v,
// which therefore comes first, and the next tile's values during the other products. dS goes
// through shared memory, because a lane's elements of a result are not those that the instruction
// takes of a left operand, and the result is stored from registers.
//
// Grid: prod(own_size) * heads * blocks; packed: heads * blocks.
// Shared memory: the queries, do, dS, the keys and values of a tile, lse and delta, the entry. What
// BLOCK_Q and BLOCK_KV may be is asserted below.
#include "../common/params.cuh"
#include "../warp/fragment_backward.cuh"
#include "../warp/fragment_f64.cuh"
#include "../warp/fragment_f64_gradient.cuh"
#include "../warp/fragment_tile.cuh"

namespace {

using fragment::WARPS;
using fragment_backward::StreamedEntry;

// For the scores a warp has some keys of its queries.
constexpr int WARP_QUERIES = BLOCK_Q > 16 * WARPS ? 32 : 16;
constexpr int SHARERS = WARPS * WARP_QUERIES / BLOCK_Q;
constexpr int WARP_KEYS = BLOCK_KV / SHARERS;
constexpr int ROWS = WARP_QUERIES / 8;
constexpr int COLUMNS = WARP_KEYS / 4;
// For dq it has some queries and a share of the columns.
constexpr int SUM_QUERIES = fragment_f64::warp_rows(BLOCK_Q, D / 8);
constexpr int SUM_SHARERS = WARPS * SUM_QUERIES / BLOCK_Q;
using ShareQ = fragment_f64::WideShare<D, SUM_SHARERS>;

// Limited by registers.
constexpr int UNROLL_SCORES = 16, UNROLL_SUMS = 4;

constexpr int Q_BYTES = fragment::row_bytes(D), DO_BYTES = fragment::row_bytes(D_V);
constexpr int DS_BYTES = fragment::row_bytes(BLOCK_KV);
constexpr int ALL_BYTES = (BLOCK_Q + BLOCK_KV) * (Q_BYTES + DO_BYTES) +
                          BLOCK_Q * (DS_BYTES + 2 * static_cast<int>(sizeof(double))) +
                          static_cast<int>(sizeof(StreamedEntry));

static_assert(IS_FLOAT64, "float64");
static_assert(SHARERS * BLOCK_Q == WARPS * WARP_QUERIES, "BLOCK_Q, THREADS");
static_assert(WARP_KEYS % 8 == 0 && SHARERS * WARP_KEYS == BLOCK_KV, "BLOCK_KV, THREADS");
static_assert(SUM_SHARERS * BLOCK_Q == WARPS * SUM_QUERIES, "BLOCK_Q, THREADS");
static_assert(SHARED_BYTES == ALL_BYTES, "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  char* const q_smem = reinterpret_cast<char*>(shared_smem);
  char* const do_smem = q_smem + BLOCK_Q * Q_BYTES;
  char* const ds_smem = do_smem + BLOCK_Q * DO_BYTES;
  char* const k_smem = ds_smem + BLOCK_Q * DS_BYTES;
  char* const v_smem = k_smem + BLOCK_KV * Q_BYTES;
  double* const lse_smem = reinterpret_cast<double*>(v_smem + BLOCK_KV * DO_BYTES);
  StreamedEntry* const streamed_smem = reinterpret_cast<StreamedEntry*>(lse_smem + 2 * BLOCK_Q);

  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const long long h = work.head, h_kv = layout::divide(h, p.group).quotient;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const int warp_query = warp / SHARERS * WARP_QUERIES;
  const int warp_key = warp % SHARERS * WARP_KEYS;
  const fragment_gradient::Corner corner(warp_query, warp_key);
  const int sum_query = warp / SUM_SHARERS * SUM_QUERIES;
  const ShareQ share(warp % SUM_SHARERS);
  unsigned long long visited = 0;
  if (threadIdx.x == 0) streamed_smem->entry = work.entry;

  // 1 load q
  fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem, memory::rows(p.q, work.entry, h, false), i0,
                                            ni);
  double dq[SUM_QUERIES / 8][ShareQ::COLUMNS];
  matmul::clear(dq);

  const long long members = layout::entries_sharing(p);
#pragma unroll 1
  for (long long member = 0; member < members; ++member) {
    __syncthreads();  // the previous entry and its last tile, which other threads may still read
    if (threadIdx.x == 0) {
      const layout::Entry entry = layout::shared_entry(p, streamed_smem->entry, member);
      *streamed_smem = StreamedEntry{
          entry, memory::rows(p.k, entry, h_kv, true), memory::rows(p.v, entry, h_kv, true), {}};
    }
    __syncthreads();  // the new entry, written by thread 0
    const layout::Entry& entry = streamed_smem->entry;
    const auto load_values = [&](const fragment_tile::Tile& tile) {
      fragment::begin_rows<BLOCK_KV, D_V, DO_BYTES>(v_smem, streamed_smem->v, tile.first,
                                                    tile.rows);
    };
    const auto describe = [&](long long j0, int nj) {
      return tile::describe_tile(entry, h, i0, ni, j0, nj);
    };
    fragment_tile::Tile now =
        fragment_tile::next_tile<BLOCK_KV>(p, streamed_smem->classes, 0, entry.len_k, describe);
    if (now.rows == 0) continue;
    fragment::begin_rows<BLOCK_Q, D_V, DO_BYTES>(do_smem, memory::rows(p.d_out, entry, h, false),
                                                 i0, ni);
    load_values(now);
    fragment_gradient::RowStatistics statistics;
    statistics.load(memory::row_statistic(p.lse, entry, h),
                    memory::row_statistic(p.delta, entry, h), i0, ni);
    statistics.store(lse_smem, lse_smem + BLOCK_Q);
#pragma unroll 1
    while (now.rows > 0) {
      const TileBox box = describe(now.first, now.rows);
      const bool masked = HAS_SCORE || now.tile_class == PARTIAL || now.rows < BLOCK_KV;
      const double* const lane_lse_smem = lse_smem + corner.row;
      ++visited;

      ptx::cp_async_wait_all();
      // Protects the values, copied by all threads, and the previous keys and dS, read by all.
      __syncthreads();
      fragment::begin_rows<BLOCK_KV, D, Q_BYTES>(k_smem, streamed_smem->k, now.first, now.rows);
      double dp[ROWS][COLUMNS];
      fragment_f64::multiply<D_V, UNROLL_SCORES>(dp, do_smem + warp_query * DO_BYTES,
                                                 v_smem + warp_key * DO_BYTES);
      ptx::cp_async_wait_all();
      bool has_nonfinite = false;
      // Protects the keys, copied by all threads, and the values, read by all.
      if (MAY_MASK && masked) {
        has_nonfinite = ptx::barrier_or(!fragment::finite_rows<BLOCK_KV, D, Q_BYTES>(k_smem));
      } else {
        __syncthreads();  // as above
      }
      const fragment_tile::Tile next = fragment_tile::next_tile<BLOCK_KV>(
          p, streamed_smem->classes, now.first + BLOCK_KV, entry.len_k, describe);
      if (next.rows > 0) load_values(next);
      unsigned int kept[ROWS];
      if constexpr (HAS_DROPOUT)
        fragment_gradient::draw_dropout<false, COLUMNS>(p, box, corner, kept);

      // 2 scores
      double s[ROWS][COLUMNS];
      fragment_f64::multiply<D, UNROLL_SCORES>(s, q_smem + warp_query * Q_BYTES,
                                               k_smem + warp_key * Q_BYTES);
      // 3 score mod
      // 4 mask
      // 5 probabilities and the gradient of the output's weights
      fragment_f64_gradient::recompute_probabilities<false, 0>(
          p, box, now.tile_class, masked, s, corner, lane_lse_smem, kept, nullptr);
      fragment_f64_gradient::score_gradients<false>(p, masked, s, dp, lane_lse_smem + BLOCK_Q,
                                                    kept);
      fragment_f64_gradient::store_tile<DS_BYTES>(s, corner, ds_smem);
      __syncthreads();  // dS, written by all warps
      // 6 accumulate dq
      if (has_nonfinite) {
        fragment_f64::add_nonfinite<D, BLOCK_KV, DS_BYTES, false>(dq, ds_smem, ds_smem, sum_query,
                                                                  k_smem, share);
        fragment_f64::multiply_add<D, BLOCK_KV, DS_BYTES, 1, true>(
            dq, ds_smem + sum_query * DS_BYTES, k_smem, share);
      } else {
        fragment_f64::multiply_add<D, BLOCK_KV, DS_BYTES, UNROLL_SUMS>(
            dq, ds_smem + sum_query * DS_BYTES, k_smem, share);
      }
      now = next;
    }
  }

  // 7 scale and store
  ptx::cp_async_wait_all();
  double* const rows_gmem = reinterpret_cast<double*>(p.dq.data) +
                            layout::offset(p.dq, streamed_smem->entry, h, false) +
                            (i0 + sum_query) * p.dq.row;
  fragment_f64::store_rows<false>(dq, share, p.dq, rows_gmem, ni - sum_query, p.scale);
  tile::count_tiles(p, visited);
}
