// Tiled attention with its derivative along a direction, on any GPU: the twin of
// reference/cpu/forward_tangent.py.
//
// One pass over keys and values computes out, the log-sum-exp, and the tangents of both: see
// common/tangent.cuh. What a direction does not have (HAS_TQ, HAS_TK, HAS_TV, HAS_TBIAS) takes no
// product.
//
// Grid: as forward_simt.cu. Shared memory: the queries and their tangents, a tile of weights and
// one of weighted tangents, the stage, a number of each query.
#include "../common/params.cuh"
#include "epilogue.cuh"
#include "../common/matmul_tangent.cuh"
#include "../common/tangent.cuh"

namespace {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int COLUMNS_V = matmul::padded_columns(D_V) / COLUMN_THREADS;
constexpr int Q_STRIDE = matmul::odd_stride(matmul::whole_columns(D));
constexpr int P_STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int BUFFER = matmul::buffer_elements(BLOCK_KV, D, D_V);
constexpr int SHARED_ELEMENTS = 2 * BLOCK_Q * (Q_STRIDE + P_STRIDE) + 2 * BUFFER + BLOCK_Q;
constexpr int UNROLL = 1;  // limited by registers

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");
static_assert(ROWS <= 32, "a bit for each row of a thread");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ TangentParams t) {
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  accum_t* const q_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const tq_smem = q_smem + BLOCK_Q * Q_STRIDE;
  accum_t* const p_smem = tq_smem + BLOCK_Q * Q_STRIDE;
  accum_t* const t_smem = p_smem + BLOCK_Q * P_STRIDE;
  accum_t* const stage_smem = t_smem + BLOCK_Q * P_STRIDE;
  accum_t* const ref_smem = stage_smem + 2 * BUFFER;

  matmul::Stage<BUFFER> stage{stage_smem};
  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const layout::Entry& entry = work.entry;
  const long long h = work.head, h_kv = h / p.group;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
  const memory::Rows k = memory::rows(p.k, entry, h_kv, true);
  const memory::Rows v = memory::rows(p.v, entry, h_kv, true);
  const memory::Rows tk = memory::rows(HAS_TK ? t.tk : p.k, entry, h_kv, true);
  const memory::Rows tv = memory::rows(HAS_TV ? t.tv : p.v, entry, h_kv, true);
  unsigned long long visited = 0;

  // 1 load q
  memory::load_rows<BLOCK_Q, matmul::whole_columns(D), Q_STRIDE, D>(
      q_smem, memory::rows(p.q, entry, h, false), i0, ni);
  if constexpr (HAS_TQ) {
    memory::load_rows<BLOCK_Q, matmul::whole_columns(D), Q_STRIDE, D>(
        tq_smem, memory::rows(t.tq, entry, h, false), i0, ni);
  }
  accum_t m[ROWS], l[ROWS], sum[ROWS], acc[ROWS][COLUMNS_V], w[ROWS][COLUMNS_V];
  const accum_t sink =
      p.sink == nullptr ? -number::infinity() : number::load<accum_t>(p.sink, p.kind_sink, h);
  const accum_t tsink =
      t.tsink == nullptr ? accum_t(0) : number::load<accum_t>(t.tsink, t.kind_tsink, h);
  softmax::init_state(m, l, acc, sink);
  matmul::clear(w);
  unsigned int seen = 0;  // rows that have a ref
  if (matmul::column_thread() == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) ref_smem[matmul::row_thread() + ROW_THREADS * r] = 0;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = l[r] == accum_t(0) ? accum_t(0) : tsink;
  }

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
    if constexpr (HAS_TQ) {
      matmul::multiply_rows_twice<BLOCK_KV, D, Q_STRIDE, UNROLL>(s, q_smem, ts, tq_smem, k, j0, nj,
                                                                 stage);
    } else {
      matmul::multiply_rows<BLOCK_KV, D, Q_STRIDE, UNROLL>(s, q_smem, k, j0, nj, stage);
    }
    if constexpr (HAS_TK) {
      matmul::multiply_rows<BLOCK_KV, D, Q_STRIDE, UNROLL, true>(ts, q_smem, tk, j0, nj, stage);
    }
    matmul::scale(s, static_cast<accum_t>(p.scale));
    // 3 score mod
    // 4 mask
    tile::apply_score_and_mask<false, P_STRIDE>(p, box, tile_class, s, p_smem,
                                                HAS_DSCORE ? t_smem : nullptr);
    matmul::scale(ts, static_cast<accum_t>(p.scale));
    tangent::of_logits<false, P_STRIDE>(p, box, s, ts, t_smem, t_smem);
    // 5 row max
    accum_t m_new[ROWS];
    if (softmax::row_max(s, m, m_new)) {
      // 6 rescale
      tangent::rescale(m, m_new, l, sum, acc, w);
    }
    accum_t before[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) before[r] = l[r];
    softmax::exponentiate(s, m, l);
    tangent::weigh(s, ts, before, sum, ref_smem, seen);
    tile::store_cells<P_STRIDE>(s, p_smem);
    tile::store_cells<P_STRIDE>(ts, t_smem);
    // 7 accumulate p v
    if constexpr (HAS_DROPOUT) {
      __syncthreads();  // both tiles, written by other threads
      tile::apply_dropout<false, P_STRIDE>(p, box, p_smem, p_smem);
      tile::apply_dropout<false, P_STRIDE>(p, box, t_smem, t_smem);
    }
    matmul::accumulate_twice<BLOCK_KV, D_V, P_STRIDE, MAY_MASK>(acc, p_smem, w, t_smem, v, j0, nj,
                                                                stage);
    if constexpr (HAS_TV) {
      matmul::accumulate<BLOCK_KV, D_V, P_STRIDE, MAY_MASK>(w, p_smem, tv, j0, nj, stage);
    }
  }

  softmax::row_sum(l);
  softmax::row_sum(sum);
  // 8 normalise
  accum_t inverse[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    inverse[r] = l[r] == accum_t(0) ? accum_t(0) : accum_t(1) / l[r];
    sum[r] *= inverse[r];
#pragma unroll
    for (int n = 0; n < COLUMNS_V; ++n) w[r][n] -= sum[r] * acc[r][n];
  }
  epilogue::store_as<D_V, result_t>(acc, p.out, layout::offset(p.out, entry, h, false), i0, ni,
                                    inverse);
  epilogue::store_as<D_V, result_t>(w, t.tout, layout::offset(t.tout, entry, h, false), i0, ni,
                                    inverse);
  // 9 store lse
  if (p.lse.data != nullptr && matmul::column_thread() == 0) {
    const memory::RowStatistic lse = memory::row_statistic(p.lse, entry, h);
    const memory::RowStatistic tlse = memory::row_statistic(t.tlse, entry, h);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = matmul::row_thread() + ROW_THREADS * r;
      if (row < ni) {
        lse.data[(i0 + row) * lse.row] =
            l[r] == accum_t(0) ? -number::infinity() : m[r] + log(l[r]);
        tlse.data[(i0 + row) * tlse.row] = ref_smem[row] + sum[r];
      }
    }
  }
  tile::count_tiles(p, visited);
}
