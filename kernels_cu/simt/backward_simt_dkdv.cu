// Tiled attention, backward, gradients of keys and values on any GPU: the twin of `backward_dkdv`
// in reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2: a block of keys and values is resident, the queries are
// streamed. The sum runs over the batch entries that share the keys, the heads of the group and the
// blocks of queries, in that order. No two blocks write the same element, so the result does not
// depend on the order in which blocks run.
//
// With ATOMIC_DQ the kernel also multiplies dS and the keys, as Algorithm 2 does, and adds the
// product to dq, which is 0 at first, by atomic additions. Their order is that in which blocks run.
//
// Grid: prod(own_size) * heads_kv * blocks; packed: heads_kv * blocks.
// Shared memory: the keys, the values, the tile (and one each for dropout and the score mod's
// derivative), the stage, lse and delta, the current head. BLOCK_KV is a multiple of ROW_THREADS
// and 4, BLOCK_Q of COLUMN_THREADS.
#include "../common/params.cuh"
#include "epilogue.cuh"
#include "../common/gradient_tile.cuh"

namespace {

constexpr int ROWS = BLOCK_KV / ROW_THREADS;
constexpr int COLUMNS = BLOCK_Q / COLUMN_THREADS;
constexpr int WIDTH_K = matmul::padded_columns(D);
constexpr int COLUMNS_K = WIDTH_K / COLUMN_THREADS;
constexpr int COLUMNS_V = matmul::padded_columns(D_V) / COLUMN_THREADS;
constexpr int K_STRIDE = matmul::odd_stride(matmul::held_columns(D));
constexpr int V_STRIDE = matmul::odd_stride(matmul::whole_columns(D_V));
constexpr int STRIDE = matmul::odd_stride(BLOCK_Q);
constexpr int TILE = BLOCK_KV * STRIDE;
constexpr int TILES = 1 + (HAS_DROPOUT ? 1 : 0) + (HAS_DSCORE ? 1 : 0);
constexpr int BUFFER = matmul::larger(matmul::buffer_elements(BLOCK_Q, D, D),
                                      matmul::buffer_elements(BLOCK_Q, D_V, D_V));
constexpr int ROWS_Q = matmul::rows_at_once(BLOCK_Q / ROW_THREADS, COLUMNS_K);
constexpr int PART_Q = ROWS_Q * ROW_THREADS;  // queries whose dq is computed at a time
constexpr bool CHECKS_KEYS = ATOMIC_DQ && MAY_MASK;
constexpr int UNROLL = 2;  // limited by registers

// The head whose queries are streamed. It is in shared memory because the sums fill the registers.
struct Head {
  layout::Entry entry;
  memory::RowStatistic lse, delta;
  long long dq;  // offset of dq's row 0
  long long h;
  long long j0;  // the first key
};
constexpr int SHARED_ELEMENTS = BLOCK_KV * (K_STRIDE + V_STRIDE) + TILES * TILE + 2 * BUFFER +
                                2 * BLOCK_Q + static_cast<int>(sizeof(Head) / sizeof(accum_t));

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_KV, "BLOCK_KV, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_Q && BLOCK_KV % 4 == 0, "BLOCK_Q");
static_assert(!ATOMIC_DQ || BLOCK_Q % PART_Q == 0, "BLOCK_Q, ATOMIC_DQ");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  accum_t* const k_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const v_smem = k_smem + BLOCK_KV * K_STRIDE;
  accum_t* const stage_smem = v_smem + BLOCK_KV * V_STRIDE;
  accum_t* const tile_smem = stage_smem + 2 * BUFFER;
  accum_t* const last_smem = tile_smem + (TILES - 1) * TILE;
  accum_t* const lse_smem = tile_smem + TILES * TILE;
  const gradient_tile::Scratch scratch{tile_smem, HAS_DROPOUT ? tile_smem + TILE : tile_smem,
                                       HAS_DSCORE ? last_smem : nullptr, lse_smem,
                                       lse_smem + BLOCK_Q};

  Head* const head_smem = reinterpret_cast<Head*>(lse_smem + 2 * BLOCK_Q);

  matmul::Stage<BUFFER> stage{stage_smem};
  const unsigned int number = layout::interleave_many_heads(p, blockIdx.x, p.heads_kv);
  const layout::WorkTile work = layout::work_tile_of(p, number, p.heads_kv, true, BLOCK_KV, false);
  if (work.idle) return;
  const int h_kv = static_cast<int>(work.head);
  const long long j0 = work.block * BLOCK_KV;
  const int nj = tile::rows_from(j0, work.entry.len_k, BLOCK_KV);
  unsigned long long visited = 0;
  if (threadIdx.x == 0) {
    head_smem->entry = work.entry;
    head_smem->j0 = j0;
  }

  bool finite_keys = memory::load_rows<BLOCK_KV, matmul::held_columns(D), K_STRIDE, D, CHECKS_KEYS>(
      k_smem, memory::rows(p.k, work.entry, h_kv, true), j0, nj);
  memory::load_rows<BLOCK_KV, matmul::whole_columns(D_V), V_STRIDE, D_V>(
      v_smem, memory::rows(p.v, work.entry, h_kv, true), j0, nj);
  accum_t dk[ROWS][COLUMNS_K], dv[ROWS][COLUMNS_V];
  matmul::clear(dk);
  matmul::clear(dv);

  const int members = static_cast<int>(layout::entries_sharing(p));
#pragma unroll 1
  for (int member = 0; member < members; ++member) {
#pragma unroll 1
    for (int n = 0; n < p.group; ++n) {
      __syncthreads();  // the previous head, which other threads may still read
      if (threadIdx.x == 0) {
        const long long h = h_kv * p.group + n;
        const layout::Entry entry = layout::shared_entry(p, head_smem->entry, member);
        *head_smem = Head{entry,
                          memory::row_statistic(p.lse, entry, h),
                          memory::row_statistic(p.delta, entry, h),
                          layout::offset(p.dq, entry, h, false),
                          h,
                          head_smem->j0};
      }
      // Protects the new head, and tells all threads whether all keys are finite.
      if constexpr (CHECKS_KEYS) {
        finite_keys = !ptx::barrier_or(!finite_keys);
      } else {
        __syncthreads();  // as above
      }
      const memory::Rows q = memory::rows(p.q, head_smem->entry, head_smem->h, false);
      const memory::Rows d_out = memory::rows(p.d_out, head_smem->entry, head_smem->h, false);
#pragma unroll 1
      for (long long i0 = 0; i0 < head_smem->entry.len_q; i0 += BLOCK_Q) {
        const int ni = tile::rows_from(i0, head_smem->entry.len_q, BLOCK_Q);
        const TileBox box =
            tile::describe_tile(head_smem->entry, head_smem->h, i0, ni, head_smem->j0, nj);
        const int tile_class = tile::classify_tile(p, box);
        if (tile_class == EMPTY) continue;
        ++visited;
        // Other threads read the previous lse and delta before the barriers of `accumulate`.
        gradient_tile::load_row_statistics(head_smem->lse, head_smem->delta, i0, ni, scratch);

        // 2 scores
        accum_t s[ROWS][COLUMNS];
        matmul::multiply_rows<BLOCK_Q, D, K_STRIDE, UNROLL>(s, k_smem, q, i0, ni, stage);
        // 3 score mod
        // 4 mask
        // 5 probabilities and the gradient of the output's weights
        gradient_tile::probabilities<true, STRIDE>(p, box, tile_class, s, scratch);
        // 6 accumulate dv and dk
        // dv comes first, because dS takes the place of p.
        matmul::accumulate<BLOCK_Q, D_V, STRIDE, MAY_MASK>(dv, scratch.dropped_smem, d_out, i0, ni,
                                                           stage);
        matmul::multiply_rows<BLOCK_Q, D_V, V_STRIDE, UNROLL>(s, v_smem, d_out, i0, ni, stage);
        gradient_tile::score_gradients<true, STRIDE>(p, s, scratch);
        if constexpr (HAS_DSCORE) gradient_tile::apply_dscore<STRIDE, ROWS, COLUMNS>(scratch);
        matmul::accumulate<BLOCK_Q, D, STRIDE, MAY_MASK>(dk, scratch.tile_smem, q, i0, ni, stage);
        if constexpr (ATOMIC_DQ) {
#pragma unroll 1
          for (int i = 0; i < ni; i += PART_Q) {
            accum_t dq[ROWS_Q][COLUMNS_K];
            const accum_t* const ds_smem = scratch.tile_smem + i;
            matmul::clear(dq);
            if (finite_keys) {
              matmul::multiply_transposed<BLOCK_KV, STRIDE, K_STRIDE, WIDTH_K>(dq, ds_smem, k_smem);
            } else {
              matmul::multiply_transposed_unmasked<BLOCK_KV, STRIDE, K_STRIDE, WIDTH_K>(dq, ds_smem,
                                                                                        k_smem);
            }
            epilogue::add_rows<D>(dq, p.dq, head_smem->dq, i0 + i, ni - i,
                                  static_cast<accum_t>(p.scale));
          }
        }
      }
    }
  }

  // 7 scale and store
  epilogue::store_rows<D>(dk, p.dk, p.kind_dk != number::STORAGE_KIND,
                          layout::offset(p.dk, head_smem->entry, h_kv, true), head_smem->j0, nj,
                          static_cast<accum_t>(p.scale));
  epilogue::store_rows<D_V>(dv, p.dv, p.kind_dv != number::STORAGE_KIND,
                            layout::offset(p.dv, head_smem->entry, h_kv, true), head_smem->j0, nj,
                            accum_t(1));
  tile::count_tiles(p, visited);
}
