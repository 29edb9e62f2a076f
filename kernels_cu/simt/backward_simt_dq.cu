// Tiled attention, backward, gradient of the queries on any GPU: the twin of `backward_dq` in
// reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, with the loops exchanged: a block of queries is
// resident, the keys and values are streamed, and dq needs no atomic additions. The sum runs over
// the batch entries that share the queries and the blocks of keys, in that order.
//
// Grid: prod(own_size) * heads * blocks; packed: heads * blocks.
// Shared memory: the queries, do, the tile (and one each for dropout and the score mod's
// derivative), the stage, lse and delta. BLOCK_Q is a multiple of ROW_THREADS, BLOCK_KV of
// COLUMN_THREADS and 4.
#include "../common/params.cuh"
#include "epilogue.cuh"
#include "../common/gradient_tile.cuh"

namespace {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int COLUMNS_Q = matmul::padded_columns(D) / COLUMN_THREADS;
constexpr int Q_STRIDE = matmul::odd_stride(matmul::whole_columns(D));
constexpr int DO_STRIDE = matmul::odd_stride(matmul::whole_columns(D_V));
constexpr int STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int TILE = BLOCK_Q * STRIDE;
constexpr int TILES = 1 + (HAS_DROPOUT ? 1 : 0) + (HAS_DSCORE ? 1 : 0);
constexpr int BUFFER = matmul::larger(matmul::buffer_elements(BLOCK_KV, D, D),
                                      matmul::buffer_elements(BLOCK_KV, D_V, D));
constexpr int SHARED_ELEMENTS =
    BLOCK_Q * (Q_STRIDE + DO_STRIDE) + TILES * TILE + 2 * BUFFER + 2 * BLOCK_Q;
constexpr int UNROLL = 4;  // limited by registers

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  accum_t* const q_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const do_smem = q_smem + BLOCK_Q * Q_STRIDE;
  accum_t* const stage_smem = do_smem + BLOCK_Q * DO_STRIDE;
  accum_t* const tile_smem = stage_smem + 2 * BUFFER;
  accum_t* const last_smem = tile_smem + (TILES - 1) * TILE;
  accum_t* const lse_smem = tile_smem + TILES * TILE;
  const gradient_tile::Scratch scratch{tile_smem, HAS_DROPOUT ? tile_smem + TILE : tile_smem,
                                       HAS_DSCORE ? last_smem : nullptr, lse_smem,
                                       lse_smem + BLOCK_Q};

  matmul::Stage<BUFFER> stage{stage_smem};
  const unsigned int number = layout::interleave_many_heads(p, blockIdx.x, p.heads);
  const layout::WorkTile work = layout::work_tile_of(p, number, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const long long h = work.head, h_kv = h / p.group;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
  unsigned long long visited = 0;

  // 1 load q
  memory::load_rows<BLOCK_Q, matmul::whole_columns(D), Q_STRIDE, D>(
      q_smem, memory::rows(p.q, work.entry, h, false), i0, ni);
  accum_t dq[ROWS][COLUMNS_Q];
  matmul::clear(dq);

  const long long members = layout::entries_sharing(p);
#pragma unroll 1
  for (long long member = 0; member < members; ++member) {
    const layout::Entry entry = layout::shared_entry(p, work.entry, member);
    const memory::Rows k = memory::rows(p.k, entry, h_kv, true);
    const memory::Rows v = memory::rows(p.v, entry, h_kv, true);
    __syncthreads();  // do, lse and delta of the previous entry, which other threads may still use
    memory::load_rows<BLOCK_Q, matmul::whole_columns(D_V), DO_STRIDE, D_V>(
        do_smem, memory::rows(p.d_out, entry, h, false), i0, ni);
    gradient_tile::load_row_statistics(memory::row_statistic(p.lse, entry, h),
                                       memory::row_statistic(p.delta, entry, h), i0, ni, scratch);
#pragma unroll 1
    for (long long j0 = 0; j0 < entry.len_k; j0 += BLOCK_KV) {
      const int nj = tile::rows_from(j0, entry.len_k, BLOCK_KV);
      const TileBox box = tile::describe_tile(entry, h, i0, ni, j0, nj);
      const int tile_class = tile::classify_tile(p, box);
      if (tile_class == EMPTY) continue;
      ++visited;

      // 2 scores
      accum_t s[ROWS][COLUMNS];
      matmul::multiply_rows<BLOCK_KV, D, Q_STRIDE, UNROLL>(s, q_smem, k, j0, nj, stage);
      // 3 score mod
      // 4 mask
      // 5 probabilities and the gradient of the output's weights
      gradient_tile::probabilities<false, STRIDE>(p, box, tile_class, s, scratch);
      matmul::multiply_rows<BLOCK_KV, D_V, DO_STRIDE, UNROLL>(s, do_smem, v, j0, nj, stage);
      gradient_tile::score_gradients<false, STRIDE>(p, s, scratch);
      // 6 accumulate dq
      if constexpr (HAS_DSCORE) gradient_tile::apply_dscore<STRIDE, ROWS, COLUMNS>(scratch);
      matmul::accumulate<BLOCK_KV, D, STRIDE, MAY_MASK>(dq, scratch.tile_smem, k, j0, nj, stage);
    }
  }

  // 7 scale and store
  epilogue::store_rows<D>(dq, p.dq, p.kind_dq != number::STORAGE_KIND,
                          layout::offset(p.dq, work.entry, h, false), i0, ni,
                          static_cast<accum_t>(p.scale));
  tile::count_tiles(p, visited);
}
