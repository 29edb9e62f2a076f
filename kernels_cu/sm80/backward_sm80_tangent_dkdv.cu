// Tiled attention, tangents of the gradients of keys and values in 16-bit types by the tensor cores
// of compute capability 8.0 and later: the twin of `backward_tangent_dkdv` in
// reference/cpu/backward_tangent.py.
//
// As backward_sm80_dkdv.cu, with
//
//   tdk = scale (tdS^T q + dS^T tq)     tdv = (Z tP)^T do + (Z P)^T tdo
//
// A block of keys and values and their tangents is resident; queries, do and their tangents are
// streamed. A warp has 16 keys alone and works on PART_QUERIES of a tile at a time, so sums need
// neither barriers nor atomic additions, and the order of each is fixed. A tangent that is not
// there takes no product.
//
// Grid: prod(own_size) * heads_kv * blocks; packed: heads_kv * blocks.
// Shared memory: the keys and values with their tangents, the stages of queries and do with theirs
// and of what each query has one number of, the head. BLOCK_KV is 16 times the warps, BLOCK_Q a
// multiple of 16.
#include "../common/params.cuh"
#include "../warp/fragment_tangent_gradient.cuh"
#include "../warp/fragment_tile.cuh"

namespace {

constexpr int ROWS = 2;
constexpr int PART_QUERIES = BLOCK_Q % 32 == 0 && !HAS_SCORE ? 32 : 16;  // limited by registers
constexpr int COLUMNS = PART_QUERIES / 4;
using ShareK = fragment_product::Share<D, 1>;
using ShareV = fragment_product::Share<D_V, 1>;

constexpr int UNROLL = 2;  // limited by registers

constexpr int K_BYTES = fragment::row_bytes(D), V_BYTES = fragment::row_bytes(D_V);
// Bytes from keys, values, queries and do to their tangents.
constexpr int K_FAR = BLOCK_KV * K_BYTES, V_FAR = BLOCK_KV * V_BYTES;
constexpr int Q_FAR = BLOCK_Q * K_BYTES, DO_FAR = BLOCK_Q * V_BYTES;

// The head whose queries are streamed. It is in shared memory because the sums fill the registers.
struct Head {
  layout::Entry entry;
  memory::Rows q, d_out, tq, tdo;
  tangent_gradient::Statistics of_rows;
  long long h;
  long long j0;  // the block's first key
  fragment_tile::Classes classes;
};
constexpr int RESIDENT_BYTES = 2 * (K_FAR + V_FAR) + static_cast<int>(sizeof(Head));
constexpr int OPERANDS_BYTES = 2 * (Q_FAR + DO_FAR);
constexpr int STAGE_BYTES = OPERANDS_BYTES + 4 * tangent_gradient::ROW_NUMBERS * BLOCK_Q;
constexpr int STAGES = (SHARED_BYTES - RESIDENT_BYTES) / STAGE_BYTES;

static_assert(IS_16_BIT, "16-bit types");
static_assert(BLOCK_KV == 16 * fragment::WARPS && BLOCK_Q % 16 == 0, "BLOCK_KV, BLOCK_Q, THREADS");
static_assert(SHARED_BYTES == RESIDENT_BYTES + STAGES * STAGE_BYTES && (STAGES == 1 || STAGES == 2),
              "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ SecondParams x) {
  const TangentParams& t = x.first;
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  char* const k_smem = reinterpret_cast<char*>(shared_smem);
  char* const v_smem = k_smem + 2 * K_FAR;
  char* const stages_smem = v_smem + 2 * V_FAR;
  Head* const head_smem = reinterpret_cast<Head*>(stages_smem + STAGES * STAGE_BYTES);

  const layout::WorkTile work =
      layout::work_tile_of(p, blockIdx.x, p.heads_kv, true, BLOCK_KV, false);
  if (work.idle) return;
  const int h_kv = static_cast<int>(work.head);
  const long long j0 = work.block * BLOCK_KV;
  const int nj = tile::rows_from(j0, work.entry.len_k, BLOCK_KV);
  const int warp_key = threadIdx.x / ptx::WARP_SIZE * 16;
  const ShareK share_k(0);
  const ShareV share_v(0);
  unsigned long long visited = 0;
  if (threadIdx.x == 0) {
    head_smem->entry = work.entry;
    head_smem->j0 = j0;
  }
  fragment::begin_rows<BLOCK_KV, D, K_BYTES>(k_smem, memory::rows(p.k, work.entry, h_kv, true), j0,
                                             nj);
  fragment::begin_rows<BLOCK_KV, D_V, V_BYTES>(v_smem, memory::rows(p.v, work.entry, h_kv, true),
                                               j0, nj);
  if constexpr (HAS_TK) {
    fragment::begin_rows<BLOCK_KV, D, K_BYTES>(k_smem + K_FAR,
                                               memory::rows(t.tk, work.entry, h_kv, true), j0, nj);
  }
  if constexpr (HAS_TV) {
    fragment::begin_rows<BLOCK_KV, D_V, V_BYTES>(
        v_smem + V_FAR, memory::rows(t.tv, work.entry, h_kv, true), j0, nj);
  }
  float dk[ROWS][ShareK::COLUMNS], dv[ROWS][ShareV::COLUMNS];
  matmul::clear(dk);
  matmul::clear(dv);
  fragment_gradient::DsScale ds_scale, p_scale;

  const int members = static_cast<int>(layout::entries_sharing(p));
#pragma unroll 1
  for (int member = 0; member < members; ++member) {
#pragma unroll 1
    for (int n = 0; n < p.group; ++n) {
      __syncthreads();  // the previous head and its last tile, which other threads may still read
      if (threadIdx.x == 0) {
        const long long h = h_kv * p.group + n;
        const layout::Entry entry = layout::shared_entry(p, head_smem->entry, member);
        *head_smem = Head{entry,
                          memory::rows(p.q, entry, h, false),
                          memory::rows(p.d_out, entry, h, false),
                          memory::rows(HAS_TQ ? t.tq : p.q, entry, h, false),
                          memory::rows(HAS_TDO ? x.tdo : p.d_out, entry, h, false),
                          tangent_gradient::statistics_of(x, entry, h),
                          h,
                          head_smem->j0,
                          {}};
      }
      __syncthreads();  // the new head, written by thread 0
      fragment_tangent_gradient::RowNumbers numbers;
      const auto rows_of = [&](int stage) {
        return reinterpret_cast<float*>(stages_smem + stage * STAGE_BYTES + OPERANDS_BYTES);
      };
      const auto load_tile = [&](const fragment_tile::Tile& tile, int stage) {
        char* const q_smem = stages_smem + stage * STAGE_BYTES;
        char* const do_smem = q_smem + 2 * Q_FAR;
        const Head& from = *head_smem;
        fragment::begin_rows<BLOCK_Q, D, K_BYTES>(q_smem, from.q, tile.first, tile.rows);
        fragment::begin_rows<BLOCK_Q, D_V, V_BYTES>(do_smem, from.d_out, tile.first, tile.rows);
        if constexpr (HAS_TQ) {
          fragment::begin_rows<BLOCK_Q, D, K_BYTES>(q_smem + Q_FAR, from.tq, tile.first, tile.rows);
        }
        if constexpr (HAS_TDO) {
          fragment::begin_rows<BLOCK_Q, D_V, V_BYTES>(do_smem + DO_FAR, from.tdo, tile.first,
                                                      tile.rows);
        }
        numbers.load(from.of_rows, tile.first, tile.rows);
      };
      const auto describe = [&](long long i0, int ni) {
        return tile::describe_tile(head_smem->entry, head_smem->h, i0, ni, head_smem->j0, nj);
      };
      const auto tile_from = [&](long long first) {
        return fragment_tile::next_tile<BLOCK_Q>(p, head_smem->classes, first,
                                                 head_smem->entry.len_q, describe);
      };
      fragment_tile::Tile now = tile_from(0);
      if (now.rows == 0) continue;
      load_tile(now, 0);
      numbers.store(rows_of(0));
      int stage = 0;
#pragma unroll 1
      while (now.rows > 0) {
        // The weight of a missing query is 0 (lse = inf), unless the score mod made its logit
        // infinite.
        const bool ends = HAS_SCORE && now.rows < BLOCK_Q;
        const bool masked = now.tile_class == PARTIAL || nj < BLOCK_KV || ends;
        const char* const q_smem = stages_smem + stage * STAGE_BYTES;
        const char* const do_smem = q_smem + 2 * Q_FAR;
        ++visited;

        ptx::cp_async_wait_all();
        bool has_nonfinite = false;
        // Protects the tile, copied by all threads, and the previous stage, read by all.
        if (HAS_SCORE || (HAS_MASK && masked)) {
          bool finite = fragment::finite_rows<BLOCK_Q, D, K_BYTES>(q_smem) &&
                        fragment::finite_rows<BLOCK_Q, D_V, V_BYTES>(do_smem);
          if constexpr (HAS_TQ) {
            finite = fragment::finite_rows<BLOCK_Q, D, K_BYTES>(q_smem + Q_FAR) && finite;
          }
          if constexpr (HAS_TDO) {
            finite = fragment::finite_rows<BLOCK_Q, D_V, V_BYTES>(do_smem + DO_FAR) && finite;
          }
          has_nonfinite = ptx::barrier_or(!finite);
        } else {
          __syncthreads();  // as above
        }
        const fragment_tile::Tile next = tile_from(now.first + BLOCK_Q);
        if (STAGES == 2 && next.rows > 0) load_tile(next, 1 - stage);

#pragma unroll 1
        for (int query = 0; query < BLOCK_Q; query += PART_QUERIES) {
          const fragment_gradient::Corner corner(warp_key, query);
          const float* const rows_smem = rows_of(stage) + corner.column;
          const TileBox box = describe(now.first, now.rows);
          unsigned int kept[ROWS] = {};
          if constexpr (HAS_DROPOUT) {
            fragment_gradient::draw_dropout<true, COLUMNS>(p, box, corner, kept);
          }
          // 2 scores
          float s[ROWS][COLUMNS], ts[ROWS][COLUMNS];
          fragment_tangent_gradient::multiply<D, HAS_TK, HAS_TQ, K_FAR, Q_FAR, UNROLL>(
              s, ts, k_smem + warp_key * K_BYTES, q_smem + query * K_BYTES);
          // 3 score mod
          // 4 mask
          // 5 probabilities and the gradient of the output's weights
          fragment_tangent_gradient::Slopes<ROWS, COLUMNS> slopes;
          fragment_tangent_gradient::probabilities<true>(p, box, now.tile_class, masked, s, ts,
                                                         corner, rows_smem, slopes);
          // 6 accumulate dv and dk
          // dv comes first, so that its weights leave their registers.
          unsigned int words[ROWS][COLUMNS / 2];
          {
            float dropped[ROWS][COLUMNS], weights[ROWS][COLUMNS];
            fragment_tangent_gradient::drop(ts, kept, dropped);
            fragment_tangent_gradient::drop(s, kept, weights);
            const char* const part_smem = do_smem + query * V_BYTES;
            if constexpr (HAS_TDO) {
              fragment_tangent_gradient::fit(dropped, weights, dv, p_scale);
              fragment_gradient::narrow(weights, p_scale.factor, words);
              fragment_tangent_gradient::multiply_add<D_V>(dv, words, part_smem + DO_FAR,
                                                           has_nonfinite);
            } else {
              fragment_tangent_gradient::fit(dropped, dropped, dv, p_scale);
            }
            fragment_gradient::narrow(dropped, p_scale.factor, words);
            fragment_tangent_gradient::multiply_add<D_V>(dv, words, part_smem, has_nonfinite);
          }
          float ds[ROWS][COLUMNS], tds[ROWS][COLUMNS];
          fragment_tangent_gradient::multiply<D_V, HAS_TV, HAS_TDO, V_FAR, DO_FAR, UNROLL>(
              ds, tds, v_smem + warp_key * V_BYTES, do_smem + query * V_BYTES);
          fragment_tangent_gradient::score_gradients<true>(p, masked, s, ts, rows_smem, kept,
                                                           slopes, ds, tds);
          fragment_tangent_gradient::fit(ds, tds, dk, ds_scale);
          fragment_gradient::narrow(tds, ds_scale.factor, words);
          const char* const part_smem = q_smem + query * K_BYTES;
          fragment_tangent_gradient::multiply_add<D>(dk, words, part_smem, has_nonfinite);
          if constexpr (HAS_TQ) {
            fragment_gradient::narrow(ds, ds_scale.factor, words);
            fragment_tangent_gradient::multiply_add<D>(dk, words, part_smem + Q_FAR, has_nonfinite);
          }
        }
        if (next.rows > 0) {
          if constexpr (STAGES == 1) {
            __syncthreads();  // the tile, read by all warps
            load_tile(next, 0);
          } else {
            stage = 1 - stage;
          }
          // With two stages, nobody reads this one before the next barrier.
          numbers.store(rows_of(stage));
        }
        now = next;
      }
    }
  }

  // 7 scale and store
  ptx::cp_async_wait_all();
  __syncthreads();  // the keys and values, read by all warps: the results take their memory
  matmul::scale(dk, ds_scale.inverse());
  matmul::scale(dv, p_scale.inverse());
  fragment_product::store_rows<BLOCK_KV>(dk, share_k, warp_key, p.dk,
                                         p.kind_dk != number::STORAGE_KIND,
                                         layout::offset(p.dk, head_smem->entry, h_kv, true),
                                         head_smem->j0, nj, static_cast<float>(p.scale), k_smem);
  fragment_product::store_rows<BLOCK_KV>(
      dv, share_v, warp_key, p.dv, p.kind_dv != number::STORAGE_KIND,
      layout::offset(p.dv, head_smem->entry, h_kv, true), head_smem->j0, nj,
      HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f, v_smem);
  tile::count_tiles(p, visited);
}
