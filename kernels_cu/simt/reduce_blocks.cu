// Statistics of weights or logits over queries, or over blocks of queries and keys, on any GPU: the
// twin of `reduce_queries` in reference/cpu/reduce.py.
//
// A thread block owns numbers of the result: those of some keys, or of some blocks of keys, and of
// one block of queries, which may be all. Keys are resident, and the queries are streamed in their
// order, so that every sum has one order.
//
// Grid: prod(own_size) * heads * blocks, with own_size = lead_size; blocks is the number of owners
// of a head. Shared memory: the keys, a tile of logits (and one of an expression's values), the
// stage, two sets of the queries' log-sum-exps, what is taken for each key. BLOCK_KV is a multiple
// of ROW_THREADS and 4, BLOCK_Q of COLUMN_THREADS.
#include "../common/params.cuh"
#include "pair_values.cuh"

namespace {

constexpr int ROWS = BLOCK_KV / ROW_THREADS;
constexpr int COLUMNS = BLOCK_Q / COLUMN_THREADS;
constexpr int K_STRIDE = matmul::odd_stride(matmul::whole_columns(D));
constexpr int STRIDE = matmul::odd_stride(BLOCK_Q);
constexpr int TILE = BLOCK_KV * STRIDE;
constexpr int TILES = HAS_DSCORE ? 2 : 1;
constexpr int BUFFER = BLOCK_Q * matmul::odd_stride(matmul::chunk_columns(D));
constexpr int SHARED_ELEMENTS =
    BLOCK_KV * K_STRIDE + TILES * TILE + 2 * BUFFER + 2 * BLOCK_Q + BLOCK_KV;
constexpr int UNROLL = 1;  // limited by registers

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_KV, "BLOCK_KV, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_Q && BLOCK_KV % 4 == 0, "BLOCK_Q");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ ReduceParams t) {
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  accum_t* const k_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const tile_smem = k_smem + BLOCK_KV * K_STRIDE;
  accum_t* const value_smem = tile_smem + (TILES - 1) * TILE;
  accum_t* const stage_smem = tile_smem + TILES * TILE;
  accum_t* const lse_smem = stage_smem + 2 * BUFFER;
  accum_t* const taken_smem = lse_smem + 2 * BLOCK_Q;

  matmul::Stage<BUFFER> stage{stage_smem};
  const pair_values::Owner own = pair_values::owner_of(p, blockIdx.x);
  const layout::Entry& entry = own.entry;
  const long long h = own.h;
  const layout::Quotient place = layout::divide(own.place, t.owners_k);
  const memory::Rows q = memory::rows(p.q, entry, h, false);
  const memory::Rows k = memory::rows(p.k, entry, h / p.group, true);
  const memory::RowStatistic of_rows = memory::row_statistic(p.lse, entry, h);

  const pair_values::OwnerRange range = pair_values::range_of(t, entry, place);
  accum_t* const found = reinterpret_cast<accum_t*>(t.found.data) +
                         layout::offset(t.found, entry, h, false) + place.quotient * t.found.row;

#pragma unroll 1
  for (long long j0 = range.j_begin; j0 < range.j_end; j0 += BLOCK_KV) {
    const int nj = tile::rows_from(j0, range.j_end, BLOCK_KV);
    __syncthreads();  // what was taken for keys, which other threads may still read
    memory::load_rows<BLOCK_KV, matmul::whole_columns(D), K_STRIDE, D>(k_smem, k, j0, nj);
    accum_t taken[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) taken[r] = pair_values::of_none(t.by);

    int turn = 0;  // of the two sets of log-sum-exps
#pragma unroll 1
    for (long long i0 = range.i_begin; i0 < range.i_end; i0 += BLOCK_Q) {
      const int ni = tile::rows_from(i0, range.i_end, BLOCK_Q);
      const TileBox box = tile::describe_tile(entry, h, i0, ni, j0, nj);
      const int tile_class = tile::classify_tile(p, box);
      if (tile_class == EMPTY) continue;
      // 1 load q and lse
      // Queries pass through the stage. Other threads may still read the set before, and no longer
      // the one before that.
      turn = BLOCK_Q - turn;
      const accum_t* const lse = lse_smem + turn;
      for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
        lse_smem[turn + i] = pair_values::usable_lse(p, of_rows, i0 + i, i < ni);
      }

      // 2 scores
      accum_t s[ROWS][COLUMNS];
      matmul::multiply_rows<BLOCK_Q, D, K_STRIDE, UNROLL>(s, k_smem, q, i0, ni, stage);
      // 3 score mod
      // 4 mask
      // 5 values
      pair_values::evaluate<true, STRIDE, false>(
          t, box, tile_class, s, tile_smem, value_smem,
          [&](int r, int n) { return lse[gradient_tile::query_of<true>(r, n)]; });
      // 6 take values
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) taken[r] = pair_values::take(t.by, taken[r], s[r][n]);
      }
    }

    // 7 store
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const accum_t value = pair_values::take_over_columns(t.by, taken[r]);
      if (matmul::column_thread() == 0) taken_smem[matmul::row_thread() + ROW_THREADS * r] = value;
    }
    __syncthreads();  // what is taken for each key, written by other threads
    pair_values::store_blocks(t, t.by, found, j0, j0 == range.j_begin, nj, taken_smem);
  }
}
