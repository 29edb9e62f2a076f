// Statistics of weights or logits over all pairs of one distance i - j, on any GPU: the twin of
// `reduce_queries` in reference/cpu/reduce.py along distances.
//
// A thread block owns a diagonal of tiles: to each block of keys belong the queries that are
// `shift` blocks of queries further on. It walks along it in the order of keys. The distances of
// neighbouring diagonals overlap; a diagonal writes its own to as many rows of the result as may
// have the same distance, and these are joined in order afterwards.
//
// Grid: prod(own_size) * heads * blocks, with own_size = lead_size; blocks is the number of
// diagonals. Shared memory: chunks of rows of both operands, a tile of values (and one of logits),
// the queries' log-sum-exps. BLOCK_Q is a multiple of ROW_THREADS, BLOCK_KV of BLOCK_Q and of
// COLUMN_THREADS and 4.
#include "../common/params.cuh"
#include "pair_values.cuh"

namespace {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int TILE = BLOCK_Q * STRIDE;
constexpr int TILES = HAS_DSCORE ? 2 : 1;
constexpr int CHUNK_STRIDE = matmul::odd_stride(matmul::chunk_columns(D));
constexpr int SHARED_ELEMENTS = (BLOCK_Q + BLOCK_KV) * CHUNK_STRIDE + TILES * TILE + BLOCK_Q;
constexpr int DISTANCES = BLOCK_Q + BLOCK_KV - 1;  // of a tile
constexpr int OWN = (DISTANCES + THREADS - 1) / THREADS;

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(BLOCK_KV % BLOCK_Q == 0, "tiles of a diagonal begin with the first query");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ ReduceParams t) {
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  accum_t* const a_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const b_smem = a_smem + BLOCK_Q * CHUNK_STRIDE;
  accum_t* const tile_smem = b_smem + BLOCK_KV * CHUNK_STRIDE;
  accum_t* const value_smem = tile_smem + (TILES - 1) * TILE;
  accum_t* const lse_smem = tile_smem + TILES * TILE;

  const pair_values::Owner own = pair_values::owner_of(p, blockIdx.x);
  const layout::Entry& entry = own.entry;
  const long long h = own.h;
  const memory::Rows q = memory::rows(p.q, entry, h, false);
  const memory::Rows k = memory::rows(p.k, entry, h / p.group, true);
  const memory::RowStatistic of_rows = memory::row_statistic(p.lse, entry, h);
  // The first query of a tile, less its first key.
  const long long shift = own.place * BLOCK_Q - (entry.len_k - 1) / BLOCK_KV * BLOCK_KV;

  accum_t taken[OWN];
#pragma unroll
  for (int x = 0; x < OWN; ++x) taken[x] = pair_values::of_none(t.by);
#pragma unroll 1
  for (long long j0 = 0; j0 < entry.len_k; j0 += BLOCK_KV) {
    const long long i0 = j0 + shift;
    if (i0 < 0) continue;
    if (i0 >= entry.len_q) break;
    const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
    const int nj = tile::rows_from(j0, entry.len_k, BLOCK_KV);
    const TileBox box = tile::describe_tile(entry, h, i0, ni, j0, nj);
    const int tile_class = tile::classify_tile(p, box);
    if (tile_class == EMPTY) continue;

    // 1 load q and lse
    // Both operands pass through chunks, whose barriers protect these numbers, too.
    for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
      lse_smem[i] = pair_values::usable_lse(p, of_rows, i0 + i, i < ni);
    }

    // 2 scores
    accum_t s[ROWS][COLUMNS];
    matmul::multiply_both<BLOCK_Q, BLOCK_KV, D>(s, q, i0, ni, k, j0, nj, a_smem, b_smem);
    // 3 score mod
    // 4 mask
    // 5 values
    pair_values::evaluate<false, STRIDE, false>(
        t, box, tile_class, s, tile_smem, value_smem,
        [&](int r, int n) { return lse_smem[gradient_tile::query_of<false>(r, n)]; });
    tile::store_cells<STRIDE>(s, tile_smem);
    __syncthreads();  // values, written by other threads; the barriers of the next product keep
                      // others from overwriting what this thread reads

    // 6 take values
#pragma unroll
    for (int x = 0; x < OWN; ++x) {
      const int distance = threadIdx.x + x * THREADS - (BLOCK_KV - 1);
      const int last = BLOCK_KV + distance < BLOCK_Q ? BLOCK_KV + distance : BLOCK_Q;
#pragma unroll 1
      for (int i = distance > 0 ? distance : 0; i < last; ++i) {
        taken[x] = pair_values::take(t.by, taken[x], tile_smem[i * STRIDE + i - distance]);
      }
    }
  }

  // 7 store
  accum_t* const found =
      reinterpret_cast<accum_t*>(t.found.data) + layout::offset(t.found, entry, h, false);
#pragma unroll
  for (int x = 0; x < OWN; ++x) {
    const int distance = threadIdx.x + x * THREADS - (BLOCK_KV - 1);
    if (distance >= BLOCK_Q) continue;
    // Distances of a diagonal's first block of queries are in row 0, those of blocks before it in
    // the rows after.
    const int row = distance < 0 ? (BLOCK_Q - 1 - distance) / BLOCK_Q : 0;
    const long long place = shift + distance + entry.len_k - 1;
    if (place >= 0 && place < entry.len_q + entry.len_k - 1) {
      found[row * t.found.row + place * t.found.col] = taken[x];
    }
  }
}
