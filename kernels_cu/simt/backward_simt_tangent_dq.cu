// Tiled attention, tangent of the gradient of queries on any GPU: the twin of `backward_tangent_dq`
// in reference/cpu/backward_tangent.py.
//
// As backward_simt_dq.cu, with tdq = scale (tdS k + dS tk). A tangent that is not there takes no
// product.
//
// Grid: prod(own_size) * heads * blocks; packed: heads * blocks.
// Shared memory: the queries and do, with their tangents if these have room, the tiles (and one for
// dropout), what each query has one number of, the stage. BLOCK_Q is a multiple of ROW_THREADS,
// BLOCK_KV of COLUMN_THREADS and 4.
#include "../common/params.cuh"
#include "epilogue.cuh"
#include "../common/matmul_tangent.cuh"
#include "../common/tangent_gradient.cuh"

namespace {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int COLUMNS_Q = matmul::padded_columns(D) / COLUMN_THREADS;
constexpr int Q_STRIDE = matmul::odd_stride(matmul::whole_columns(D));
constexpr int DO_STRIDE = matmul::odd_stride(matmul::whole_columns(D_V));
constexpr int STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int TILE = BLOCK_Q * STRIDE;
constexpr int TILES = HAS_DROPOUT ? 5 : 4;
constexpr int BUFFER = matmul::larger(matmul::buffer_elements(BLOCK_KV, D, D),
                                      matmul::buffer_elements(BLOCK_KV, D_V, D));
constexpr int CHUNK = BLOCK_Q * matmul::larger(matmul::odd_stride(matmul::chunk_columns(D)),
                                               matmul::odd_stride(matmul::chunk_columns(D_V)));
constexpr int HELD = BLOCK_Q * (Q_STRIDE + DO_STRIDE);
constexpr int OTHERS = TILES * TILE + tangent_gradient::ROW_NUMBERS * BLOCK_Q;
// Tangents of the queries and of do are resident, too, or pass through the stage with each tile.
constexpr int SHARED_ELEMENTS = 2 * HELD + 2 * BUFFER + OTHERS;
constexpr bool HOLDS = SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t);
constexpr int STAGE = HOLDS ? BUFFER : matmul::larger(BUFFER, CHUNK);
constexpr int UNROLL = 2;  // limited by registers

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(HOLDS || SHARED_BYTES == (HELD + 2 * STAGE + OTHERS) * sizeof(accum_t),
              "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ SecondParams x) {
  const TangentParams& t = x.first;
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  accum_t* const q_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const do_smem = q_smem + BLOCK_Q * Q_STRIDE;
  accum_t* const tq_smem = q_smem + HELD;
  accum_t* const tdo_smem = do_smem + HELD;
  accum_t* const stage_smem = q_smem + (HOLDS ? 2 : 1) * HELD;
  const tangent_gradient::TangentScratch scratch =
      tangent_gradient::scratch_at<TILE>(stage_smem + 2 * STAGE);

  matmul::Stage<STAGE> stage{stage_smem};
  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const long long h = work.head, h_kv = h / p.group;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
  unsigned long long visited = 0;

  // 1 load q
  memory::load_rows<BLOCK_Q, matmul::whole_columns(D), Q_STRIDE, D>(
      q_smem, memory::rows(p.q, work.entry, h, false), i0, ni);
  if constexpr (HAS_TQ && HOLDS) {
    memory::load_rows<BLOCK_Q, matmul::whole_columns(D), Q_STRIDE, D>(
        tq_smem, memory::rows(t.tq, work.entry, h, false), i0, ni);
  }
  accum_t dq[ROWS][COLUMNS_Q];
  matmul::clear(dq);

  const long long members = layout::entries_sharing(p);
#pragma unroll 1
  for (long long member = 0; member < members; ++member) {
    const layout::Entry entry = layout::shared_entry(p, work.entry, member);
    const memory::Rows k = memory::rows(p.k, entry, h_kv, true);
    const memory::Rows v = memory::rows(p.v, entry, h_kv, true);
    const memory::Rows tk = memory::rows(HAS_TK ? t.tk : p.k, entry, h_kv, true);
    const memory::Rows tv = memory::rows(HAS_TV ? t.tv : p.v, entry, h_kv, true);
    // do and the numbers of the previous entry's queries, which other threads may still use
    __syncthreads();
    memory::load_rows<BLOCK_Q, matmul::whole_columns(D_V), DO_STRIDE, D_V>(
        do_smem, memory::rows(p.d_out, entry, h, false), i0, ni);
    if constexpr (HAS_TDO && HOLDS) {
      memory::load_rows<BLOCK_Q, matmul::whole_columns(D_V), DO_STRIDE, D_V>(
          tdo_smem, memory::rows(x.tdo, entry, h, false), i0, ni);
    }
    tangent_gradient::load_statistics(tangent_gradient::statistics_of(x, entry, h), i0, ni,
                                      scratch);
#pragma unroll 1
    for (long long j0 = 0; j0 < entry.len_k; j0 += BLOCK_KV) {
      const int nj = tile::rows_from(j0, entry.len_k, BLOCK_KV);
      const TileBox box = tile::describe_tile(entry, h, i0, ni, j0, nj);
      const int tile_class = tile::classify_tile(p, box);
      if (tile_class == EMPTY) continue;
      ++visited;

      // 2 scores
      accum_t s[ROWS][COLUMNS], ts[ROWS][COLUMNS];
      matmul::clear(ts);
      if constexpr (HAS_TQ && HOLDS) {
        matmul::multiply_rows_twice<BLOCK_KV, D, Q_STRIDE, UNROLL>(s, q_smem, ts, tq_smem, k, j0,
                                                                   nj, stage);
      } else {
        matmul::multiply_rows<BLOCK_KV, D, Q_STRIDE, UNROLL>(s, q_smem, k, j0, nj, stage);
      }
      if constexpr (HAS_TQ && !HOLDS) {
        const memory::Rows tq = memory::rows(t.tq, work.entry, h, false);
        matmul::multiply_streamed<BLOCK_Q, BLOCK_KV, D, true>(ts, tq, i0, ni, k, j0, nj, stage);
      }
      if constexpr (HAS_TK) {
        matmul::multiply_rows<BLOCK_KV, D, Q_STRIDE, UNROLL, true>(ts, q_smem, tk, j0, nj, stage);
      }
      // 3 score mod
      // 4 mask
      // 5 probabilities and the gradient of the output's weights
      tangent_gradient::probabilities<false, STRIDE>(p, box, tile_class, s, ts, scratch);
      matmul::clear(ts);
      if constexpr (HAS_TDO && HOLDS) {
        matmul::multiply_rows_twice<BLOCK_KV, D_V, DO_STRIDE, UNROLL>(s, do_smem, ts, tdo_smem, v,
                                                                      j0, nj, stage);
      } else {
        matmul::multiply_rows<BLOCK_KV, D_V, DO_STRIDE, UNROLL>(s, do_smem, v, j0, nj, stage);
      }
      if constexpr (HAS_TDO && !HOLDS) {
        const memory::Rows tdo = memory::rows(x.tdo, entry, h, false);
        matmul::multiply_streamed<BLOCK_Q, BLOCK_KV, D_V, true>(ts, tdo, i0, ni, v, j0, nj, stage);
      }
      if constexpr (HAS_TV) {
        matmul::multiply_rows<BLOCK_KV, D_V, DO_STRIDE, UNROLL, true>(ts, do_smem, tv, j0, nj,
                                                                      stage);
      }
      tangent_gradient::logit_gradients<false, STRIDE>(p, s, ts, scratch);
      tangent_gradient::score_gradients<STRIDE>(s, ts, scratch);
      // 6 accumulate dq
      matmul::accumulate<BLOCK_KV, D, STRIDE, MAY_MASK>(dq, scratch.tds_smem, k, j0, nj, stage);
      if constexpr (HAS_TK) {
        matmul::accumulate<BLOCK_KV, D, STRIDE, MAY_MASK>(dq, scratch.ds_smem, tk, j0, nj, stage);
      }
    }
  }

  // 7 scale and store
  epilogue::store_rows<D>(dq, p.dq, p.kind_dq != number::STORAGE_KIND,
                          layout::offset(p.dq, work.entry, h, false), i0, ni,
                          static_cast<accum_t>(p.scale));
  tile::count_tiles(p, visited);
}
