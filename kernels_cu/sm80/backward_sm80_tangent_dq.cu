// Tiled attention, tangent of the gradient of queries in 16-bit types by the tensor cores of
// compute capability 8.0 and later: the twin of `backward_tangent_dq` in
// reference/cpu/backward_tangent.py.
//
// As backward_sm80_dq.cu, with tdq = scale (tdS k + dS tk). A block of queries, do and their
// tangents is resident; keys, values and their tangents are streamed. A warp has 16 queries alone,
// so sums need neither barriers nor atomic additions. A tangent that is not there takes no product.
//
// Grid: prod(own_size) * heads * blocks; packed: heads * blocks.
// Shared memory: the queries and do with their tangents, the stages of keys and values with theirs,
// what each query has one number of, the entry. BLOCK_Q is 16 times the warps, BLOCK_KV a multiple
// of 16.
#include "../common/params.cuh"
#include "../warp/fragment_backward.cuh"
#include "../warp/fragment_tangent_gradient.cuh"
#include "../warp/fragment_tile.cuh"

namespace {

constexpr int ROWS = 2;
constexpr int COLUMNS = BLOCK_KV / 4;
using ShareQ = fragment_product::Share<D, 1>;

constexpr int UNROLL = 4;  // limited by registers

constexpr int Q_BYTES = fragment::row_bytes(D), DO_BYTES = fragment::row_bytes(D_V);
// Bytes from queries, do, keys and values to their tangents.
constexpr int Q_FAR = BLOCK_Q * Q_BYTES, DO_FAR = BLOCK_Q * DO_BYTES;
constexpr int K_FAR = BLOCK_KV * Q_BYTES, V_FAR = BLOCK_KV * DO_BYTES;

// The batch entry whose keys and values are streamed. It is in shared memory because the sums fill
// the registers.
struct StreamedTangents {
  layout::Entry entry;
  memory::Rows k, v, tk, tv;
  fragment_tile::Classes classes;
};
constexpr int NUMBERS_BYTES = 4 * tangent_gradient::ROW_NUMBERS * BLOCK_Q;
constexpr int RESIDENT_BYTES =
    2 * (Q_FAR + DO_FAR) + NUMBERS_BYTES + static_cast<int>(sizeof(StreamedTangents));
constexpr int STAGE_BYTES = 2 * (K_FAR + V_FAR);
constexpr int STAGES = (SHARED_BYTES - RESIDENT_BYTES) / STAGE_BYTES;

static_assert(IS_16_BIT, "16-bit types");
static_assert(BLOCK_Q == 16 * fragment::WARPS && BLOCK_KV % 16 == 0, "BLOCK_Q, BLOCK_KV, THREADS");
static_assert(SHARED_BYTES == RESIDENT_BYTES + STAGES * STAGE_BYTES && (STAGES == 1 || STAGES == 2),
              "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ SecondParams x) {
  const TangentParams& t = x.first;
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  char* const q_smem = reinterpret_cast<char*>(shared_smem);
  char* const do_smem = q_smem + 2 * Q_FAR;
  char* const stages_smem = do_smem + 2 * DO_FAR;
  float* const rows_smem = reinterpret_cast<float*>(stages_smem + STAGES * STAGE_BYTES);
  StreamedTangents* const streamed_smem =
      reinterpret_cast<StreamedTangents*>(rows_smem + tangent_gradient::ROW_NUMBERS * BLOCK_Q);

  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const long long h = work.head, h_kv = h / p.group;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
  const int warp_row = threadIdx.x / ptx::WARP_SIZE * 16;
  const fragment_gradient::Corner corner(warp_row, 0);
  const ShareQ share(0);
  unsigned long long visited = 0;
  if (threadIdx.x == 0) streamed_smem->entry = work.entry;

  // 1 load q
  fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem, memory::rows(p.q, work.entry, h, false), i0,
                                            ni);
  if constexpr (HAS_TQ) {
    fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem + Q_FAR,
                                              memory::rows(t.tq, work.entry, h, false), i0, ni);
  }
  float dq[ROWS][ShareQ::COLUMNS];
  matmul::clear(dq);
  fragment_gradient::DsScale ds_scale;

  const long long members = layout::entries_sharing(p);
#pragma unroll 1
  for (long long member = 0; member < members; ++member) {
    __syncthreads();  // the previous entry and its last tile, which other threads may still read
    if (threadIdx.x == 0) {
      const layout::Entry entry = layout::shared_entry(p, streamed_smem->entry, member);
      *streamed_smem = StreamedTangents{entry,
                                        memory::rows(p.k, entry, h_kv, true),
                                        memory::rows(p.v, entry, h_kv, true),
                                        memory::rows(HAS_TK ? t.tk : p.k, entry, h_kv, true),
                                        memory::rows(HAS_TV ? t.tv : p.v, entry, h_kv, true),
                                        {}};
    }
    __syncthreads();  // the new entry, written by thread 0
    const layout::Entry& entry = streamed_smem->entry;
    const auto load_tile = [&](const fragment_tile::Tile& tile, int stage) {
      char* const k_smem = stages_smem + stage * STAGE_BYTES;
      char* const v_smem = k_smem + 2 * K_FAR;
      const StreamedTangents& from = *streamed_smem;
      fragment::begin_rows<BLOCK_KV, D, Q_BYTES>(k_smem, from.k, tile.first, tile.rows);
      fragment::begin_rows<BLOCK_KV, D_V, DO_BYTES>(v_smem, from.v, tile.first, tile.rows);
      if constexpr (HAS_TK) {
        fragment::begin_rows<BLOCK_KV, D, Q_BYTES>(k_smem + K_FAR, from.tk, tile.first, tile.rows);
      }
      if constexpr (HAS_TV) {
        fragment::begin_rows<BLOCK_KV, D_V, DO_BYTES>(v_smem + V_FAR, from.tv, tile.first,
                                                      tile.rows);
      }
    };
    const auto describe = [&](long long j0, int nj) {
      return tile::describe_tile(entry, h, i0, ni, j0, nj);
    };
    fragment_tile::Tile now =
        fragment_tile::next_tile<BLOCK_KV>(p, streamed_smem->classes, 0, entry.len_k, describe);
    if (now.rows == 0) continue;
    fragment::begin_rows<BLOCK_Q, D_V, DO_BYTES>(do_smem, memory::rows(p.d_out, entry, h, false),
                                                 i0, ni);
    if constexpr (HAS_TDO) {
      fragment::begin_rows<BLOCK_Q, D_V, DO_BYTES>(do_smem + DO_FAR,
                                                   memory::rows(x.tdo, entry, h, false), i0, ni);
    }
    load_tile(now, 0);
    fragment_tangent_gradient::RowNumbers numbers;
    numbers.load(tangent_gradient::statistics_of(x, entry, h), i0, ni);
    numbers.store(rows_smem);
    int stage = 0;
#pragma unroll 1
    while (now.rows > 0) {
      const TileBox box = describe(now.first, now.rows);
      const bool masked = now.tile_class == PARTIAL || now.rows < BLOCK_KV;
      char* const k_smem = stages_smem + stage * STAGE_BYTES;
      const char* const v_smem = k_smem + 2 * K_FAR;
      ++visited;

      ptx::cp_async_wait_all();
      bool has_nonfinite = false;
      // Protects the tile, copied by all threads, and the previous stage, read by all.
      if (HAS_SCORE || (HAS_MASK && masked)) {
        bool finite = fragment::finite_rows<BLOCK_KV, D, Q_BYTES>(k_smem);
        if constexpr (HAS_TK) {
          finite = fragment::finite_rows<BLOCK_KV, D, Q_BYTES>(k_smem + K_FAR) && finite;
        }
        has_nonfinite = ptx::barrier_or(!finite);
      } else {
        __syncthreads();  // as above
      }
      const fragment_tile::Tile next = fragment_tile::next_tile<BLOCK_KV>(
          p, streamed_smem->classes, now.first + BLOCK_KV, entry.len_k, describe);
      if (STAGES == 2 && next.rows > 0) load_tile(next, 1 - stage);
      unsigned int kept[ROWS] = {};
      if constexpr (HAS_DROPOUT) {
        fragment_gradient::draw_dropout<false, COLUMNS>(p, box, corner, kept);
      }

      // 2 scores
      float s[ROWS][COLUMNS], ts[ROWS][COLUMNS];
      fragment_tangent_gradient::multiply<D, HAS_TQ, HAS_TK, Q_FAR, K_FAR, UNROLL>(
          s, ts, q_smem + warp_row * Q_BYTES, k_smem);
      // 3 score mod
      // 4 mask
      // 5 probabilities and the gradient of the output's weights
      fragment_tangent_gradient::Slopes<ROWS, COLUMNS> slopes;
      fragment_tangent_gradient::probabilities<false>(p, box, now.tile_class, masked, s, ts, corner,
                                                      rows_smem + corner.row, slopes);
      float ds[ROWS][COLUMNS], tds[ROWS][COLUMNS];
      fragment_tangent_gradient::multiply<D_V, HAS_TDO, HAS_TV, DO_FAR, V_FAR, UNROLL>(
          ds, tds, do_smem + warp_row * DO_BYTES, v_smem);
      fragment_tangent_gradient::score_gradients<false>(p, masked, s, ts, rows_smem + corner.row,
                                                        kept, slopes, ds, tds);
      // 6 accumulate dq
      fragment_tangent_gradient::fit(ds, tds, dq, ds_scale);
      unsigned int words[ROWS][COLUMNS / 2];
      fragment_gradient::narrow(tds, ds_scale.factor, words);
      fragment_tangent_gradient::multiply_add<D>(dq, words, k_smem, has_nonfinite);
      if constexpr (HAS_TK) {
        fragment_gradient::narrow(ds, ds_scale.factor, words);
        fragment_tangent_gradient::multiply_add<D>(dq, words, k_smem + K_FAR, has_nonfinite);
      }
      if (STAGES == 1 && next.rows > 0) {
        __syncthreads();  // the tile, read by all warps
        load_tile(next, 0);
      }
      stage = STAGES == 1 ? 0 : 1 - stage;
      now = next;
    }
  }

  // 7 scale and store
  ptx::cp_async_wait_all();
  __syncthreads();  // the queries, read by all warps: the result takes their memory
  matmul::scale(dq, ds_scale.inverse());
  fragment_product::store_rows<BLOCK_Q>(dq, share, warp_row, p.dq,
                                        p.kind_dq != number::STORAGE_KIND,
                                        layout::offset(p.dq, streamed_smem->entry, h, false), i0,
                                        ni, static_cast<float>(p.scale), q_smem);
  tile::count_tiles(p, visited);
}
