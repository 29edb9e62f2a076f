// Tiled attention, tangents of the gradients of keys and values on any GPU: the twin of
// `backward_tangent_dkdv` in reference/cpu/backward_tangent.py.
//
// As backward_simt_dkdv.cu, with
//
//   tdk = scale (tdS^T q + dS^T tq)     tdv = (Z tP)^T do + (Z P)^T tdo
//
// of which a tangent that is not there (HAS_TQ, HAS_TK, HAS_TV, HAS_TDO) takes no product. Every
// element of these is one sum in a fixed order. With ATOMIC_DQ the kernel also computes the tangent
// of dq, which is 0 at first, by atomic additions in the order in which blocks run.
//
// Grid: prod(own_size) * heads_kv * blocks; packed: heads_kv * blocks.
// Shared memory: the keys and the values, with their tangents if these have room, the tiles (and
// one for dropout), what each query has one number of, the stage, the current head. BLOCK_KV is a
// multiple of ROW_THREADS and 4, BLOCK_Q of COLUMN_THREADS.
#include "../common/params.cuh"
#include "epilogue.cuh"
#include "../common/matmul_tangent.cuh"
#include "../common/tangent_gradient.cuh"

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
constexpr int TILES = HAS_DROPOUT ? 5 : 4;
constexpr int BUFFER = matmul::larger(matmul::buffer_elements(BLOCK_Q, D, D),
                                      matmul::buffer_elements(BLOCK_Q, D_V, D_V));
constexpr int CHUNK = BLOCK_KV * matmul::larger(matmul::odd_stride(matmul::chunk_columns(D)),
                                                matmul::odd_stride(matmul::chunk_columns(D_V)));
constexpr int ROWS_Q = matmul::rows_at_once(BLOCK_Q / ROW_THREADS, COLUMNS_K);
constexpr int PART_Q = ROWS_Q * ROW_THREADS;  // queries whose dq is computed at a time
constexpr bool CHECKS_KEYS = ATOMIC_DQ && MAY_MASK;
constexpr int UNROLL = 1;  // limited by registers

// The head whose queries are streamed. It is in shared memory because the sums fill the registers.
struct Head {
  layout::Entry entry;
  tangent_gradient::Statistics of_rows;
  long long dq;  // offset of dq's row 0
  long long h;
  long long j0;  // the first key
};
constexpr int HELD = BLOCK_KV * (K_STRIDE + V_STRIDE);
constexpr int OTHERS = TILES * TILE + tangent_gradient::ROW_NUMBERS * BLOCK_Q +
                       static_cast<int>(sizeof(Head) / sizeof(accum_t));
// Tangents of the keys and values are resident, too, or pass through the stage with each tile.
constexpr int SHARED_ELEMENTS = 2 * HELD + 2 * BUFFER + OTHERS;
constexpr bool HOLDS = SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t);
constexpr int STAGE = HOLDS ? BUFFER : matmul::larger(BUFFER, CHUNK);

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_KV, "BLOCK_KV, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_Q && BLOCK_KV % 4 == 0, "BLOCK_Q");
static_assert(!ATOMIC_DQ || BLOCK_Q % PART_Q == 0, "BLOCK_Q, ATOMIC_DQ");
static_assert(HOLDS || SHARED_BYTES == (HELD + 2 * STAGE + OTHERS) * sizeof(accum_t),
              "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ SecondParams x) {
  const TangentParams& t = x.first;
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  accum_t* const k_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const v_smem = k_smem + BLOCK_KV * K_STRIDE;
  accum_t* const tk_smem = k_smem + HELD;
  accum_t* const tv_smem = v_smem + HELD;
  accum_t* const stage_smem = k_smem + (HOLDS ? 2 : 1) * HELD;
  accum_t* const tiles_smem = stage_smem + 2 * STAGE;
  const tangent_gradient::TangentScratch scratch = tangent_gradient::scratch_at<TILE>(tiles_smem);
  Head* const head_smem = reinterpret_cast<Head*>(scratch.tdelta_smem + BLOCK_Q);

  matmul::Stage<STAGE> stage{stage_smem};
  const layout::WorkTile work =
      layout::work_tile_of(p, blockIdx.x, p.heads_kv, true, BLOCK_KV, false);
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
  if constexpr (HAS_TK && HOLDS) {
    finite_keys = memory::load_rows<BLOCK_KV, matmul::held_columns(D), K_STRIDE, D, CHECKS_KEYS>(
                      tk_smem, memory::rows(t.tk, work.entry, h_kv, true), j0, nj) &&
                  finite_keys;
  }
  if constexpr (HAS_TV && HOLDS) {
    memory::load_rows<BLOCK_KV, matmul::whole_columns(D_V), V_STRIDE, D_V>(
        tv_smem, memory::rows(t.tv, work.entry, h_kv, true), j0, nj);
  }
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
        *head_smem = Head{entry, tangent_gradient::statistics_of(x, entry, h),
                          layout::offset(p.dq, entry, h, false), h, head_smem->j0};
      }
      // Protects the new head, and tells all threads whether all resident keys are finite.
      if constexpr (CHECKS_KEYS) {
        finite_keys = !ptx::barrier_or(!finite_keys);
      } else {
        __syncthreads();  // as above
      }
      const layout::Entry& entry = head_smem->entry;
      const memory::Rows q = memory::rows(p.q, entry, head_smem->h, false);
      const memory::Rows d_out = memory::rows(p.d_out, entry, head_smem->h, false);
      const memory::Rows tq = memory::rows(HAS_TQ ? t.tq : p.q, entry, head_smem->h, false);
      const memory::Rows tdo = memory::rows(HAS_TDO ? x.tdo : p.d_out, entry, head_smem->h, false);
#pragma unroll 1
      for (long long i0 = 0; i0 < head_smem->entry.len_q; i0 += BLOCK_Q) {
        const int ni = tile::rows_from(i0, head_smem->entry.len_q, BLOCK_Q);
        const TileBox box =
            tile::describe_tile(head_smem->entry, head_smem->h, i0, ni, head_smem->j0, nj);
        const int tile_class = tile::classify_tile(p, box);
        if (tile_class == EMPTY) continue;
        ++visited;
        // Other threads read the previous numbers before the barriers of `accumulate`.
        tangent_gradient::load_statistics(head_smem->of_rows, i0, ni, scratch);

        // 2 scores
        accum_t s[ROWS][COLUMNS], ts[ROWS][COLUMNS];
        matmul::clear(ts);
        if constexpr (HAS_TQ) {
          matmul::multiply_rows<BLOCK_Q, D, K_STRIDE, UNROLL>(ts, k_smem, tq, i0, ni, stage);
        }
        if constexpr (HAS_TK && HOLDS) {
          matmul::multiply_rows_twice<BLOCK_Q, D, K_STRIDE, UNROLL>(s, k_smem, ts, tk_smem, q, i0,
                                                                    ni, stage);
        } else {
          matmul::multiply_rows<BLOCK_Q, D, K_STRIDE, UNROLL>(s, k_smem, q, i0, ni, stage);
        }
        if constexpr (HAS_TK && !HOLDS) {
          const memory::Rows tk = memory::rows(t.tk, head_smem->entry, h_kv, true);
          matmul::multiply_streamed<BLOCK_KV, BLOCK_Q, D, true>(ts, tk, head_smem->j0, nj, q, i0,
                                                                ni, stage);
        }
        // 3 score mod
        // 4 mask
        // 5 probabilities and the gradient of the output's weights
        tangent_gradient::probabilities<true, STRIDE>(p, box, tile_class, s, ts, scratch);
        matmul::clear(ts);
        if constexpr (HAS_TDO) {
          matmul::multiply_rows<BLOCK_Q, D_V, V_STRIDE, UNROLL>(ts, v_smem, tdo, i0, ni, stage);
        }
        if constexpr (HAS_TV && HOLDS) {
          matmul::multiply_rows_twice<BLOCK_Q, D_V, V_STRIDE, UNROLL>(s, v_smem, ts, tv_smem, d_out,
                                                                      i0, ni, stage);
        } else {
          matmul::multiply_rows<BLOCK_Q, D_V, V_STRIDE, UNROLL>(s, v_smem, d_out, i0, ni, stage);
        }
        if constexpr (HAS_TV && !HOLDS) {
          const memory::Rows tv = memory::rows(t.tv, head_smem->entry, h_kv, true);
          matmul::multiply_streamed<BLOCK_KV, BLOCK_Q, D_V, true>(ts, tv, head_smem->j0, nj, d_out,
                                                                  i0, ni, stage);
        }
        tangent_gradient::logit_gradients<true, STRIDE>(p, s, ts, scratch);
        tangent_gradient::score_gradients<STRIDE>(s, ts, scratch);
        // 6 accumulate dv and dk
        matmul::accumulate<BLOCK_Q, D_V, STRIDE, MAY_MASK>(dv, scratch.tp_smem, d_out, i0, ni,
                                                           stage);
        if constexpr (HAS_TDO) {
          matmul::accumulate<BLOCK_Q, D_V, STRIDE, MAY_MASK>(dv, scratch.dropped_smem, tdo, i0, ni,
                                                             stage);
        }
        matmul::accumulate<BLOCK_Q, D, STRIDE, MAY_MASK>(dk, scratch.tds_smem, q, i0, ni, stage);
        if constexpr (HAS_TQ) {
          matmul::accumulate<BLOCK_Q, D, STRIDE, MAY_MASK>(dk, scratch.ds_smem, tq, i0, ni, stage);
        }
        if constexpr (ATOMIC_DQ) {
#pragma unroll 1
          for (int i = 0; i < ni; i += PART_Q) {
            accum_t dq[ROWS_Q][COLUMNS_K];
            matmul::clear(dq);
            const auto add = [&](const accum_t* weights_smem, const accum_t* keys_smem) {
              if (finite_keys) {
                matmul::multiply_transposed<BLOCK_KV, STRIDE, K_STRIDE, WIDTH_K>(
                    dq, weights_smem + i, keys_smem);
              } else {
                matmul::multiply_transposed_unmasked<BLOCK_KV, STRIDE, K_STRIDE, WIDTH_K>(
                    dq, weights_smem + i, keys_smem);
              }
            };
            add(scratch.tds_smem, k_smem);
            if constexpr (HAS_TK && HOLDS) add(scratch.ds_smem, tk_smem);
            if constexpr (HAS_TK && !HOLDS) {
              const memory::Rows tk = memory::rows(t.tk, head_smem->entry, h_kv, true);
              matmul::accumulate_transposed<BLOCK_KV, D, STRIDE, MAY_MASK>(
                  dq, scratch.ds_smem + i, tk, head_smem->j0, nj, stage);
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
