// Tiled attention, backward, gradient of the queries in 16-bit types by the tensor cores of compute
// capability 8.0 and later: the twin of `backward_dq` in reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, with the loops exchanged: a block of queries is
// resident, the keys and values are streamed, and dq needs no atomic additions. The sum runs over
// the batch entries that share the queries and the blocks of keys, in that order. Products are
// accumulated in float32; dS is rounded to the storage type before its product, of which it is the
// left operand in registers.
//
// With two STAGES, the next tile is copied while one is multiplied.
//
// Of heads beyond 256, ROW_SHARERS warps have the same rows: each computes dS of some keys of a
// tile, and has some columns of dq; then dS goes through shared memory.
//
// Grid: prod(own_size) * heads * blocks; packed: heads * blocks.
// Shared memory: the queries, do, the stages of keys and values, lse and delta, dS of rows that
// warps share, the entry. BLOCK_Q is 16 or 32 times the warps that share no rows, WARP_KEYS a
// multiple of 16, or 8 for wide heads.
#include "../common/params.cuh"
#include "../warp/fragment_backward.cuh"
#include "../warp/fragment_gradient_ds.cuh"
#include "../warp/fragment_product.cuh"
#include "../warp/fragment_sharers.cuh"
#include "../warp/fragment_tile.cuh"

namespace {

using fragment_backward::StreamedEntry;

constexpr int ROWS = 2 * fragment::M_TILES;
constexpr int COLUMNS = fragment::WARP_KEYS / 4;
using ShareQ = fragment_product::Share<D, ROW_SHARERS, ROW_SHARERS>;

constexpr int UNROLL = 4;  // limited by registers

constexpr int Q_BYTES = fragment::row_bytes(D), DO_BYTES = fragment::row_bytes(D_V);
constexpr bool SHARES = ROW_SHARERS > 1;
using fragment_sharers::P_BYTES;
// dS of rows that warps share, and the largest of each warp.
constexpr int SHARED_DS_BYTES = SHARES ? BLOCK_Q * P_BYTES + 4 * fragment::WARPS : 0;
constexpr int RESIDENT_BYTES =
    BLOCK_Q * (Q_BYTES + DO_BYTES + 8) + SHARED_DS_BYTES + static_cast<int>(sizeof(StreamedEntry));
constexpr int STAGE_BYTES = BLOCK_KV * (Q_BYTES + DO_BYTES);
constexpr int STAGES = (SHARED_BYTES - RESIDENT_BYTES) / STAGE_BYTES;

static_assert(IS_16_BIT, "16-bit types");
static_assert(fragment::WARP_ROWS * fragment::WARPS == BLOCK_Q * ROW_SHARERS && ROWS <= 4,
              "BLOCK_Q, THREADS");
static_assert(fragment::WARP_KEYS % (SHARES ? 8 : 16) == 0 && BLOCK_KV % 16 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == RESIDENT_BYTES + STAGES * STAGE_BYTES && (STAGES == 1 || STAGES == 2),
              "SHARED_BYTES");

// -- roles ----------------------------------------------------------------------------------------

// Scales dS for float16: all warps that share rows have one scale.
__device__ __forceinline__ void scale_ds(const float (&ds)[ROWS][COLUMNS],
                                         float (&dq)[ROWS][ShareQ::COLUMNS], float* largest_smem,
                                         fragment_gradient::DsScale& ds_scale) {
  if constexpr (SHARES) {
    float largest = fragment_gradient::largest_finite(ds);
    const int warp = threadIdx.x / ptx::WARP_SIZE;
    if (ptx::lane_index() == 0) largest_smem[warp] = largest;
    fragment_sharers::wait();  // the largest |dS| of the warps that share the rows
#pragma unroll
    for (int n = 0; n < ROW_SHARERS; ++n) {
      largest = fmax(largest, largest_smem[warp / ROW_SHARERS * ROW_SHARERS + n]);
    }
    if (largest > ds_scale.largest) ds_scale.rescale(largest, dq);
  } else if (ptx::any_lane(fragment_gradient::largest_of(ds) > ds_scale.largest)) {
    const float largest = fragment_gradient::largest_finite(ds);
    if (largest > ds_scale.largest) ds_scale.rescale(largest, dq);
  }
}

// dq += dS k, of dS in registers, or in shared memory if warps share rows.
template <bool FROM_SHARED, int WORDS>
__device__ __forceinline__ void accumulate_dq(float (&dq)[ROWS][ShareQ::COLUMNS],
                                              unsigned int (&ds)[ROWS][WORDS], const char* ds_rows,
                                              const char* k_smem, const ShareQ& share) {
  if constexpr (FROM_SHARED) {
    fragment_product::multiply_add<D, BLOCK_KV, P_BYTES, 2>(dq, ds_rows, k_smem, share, [](int) {});
  } else {
    fragment::multiply_add<D>(dq, ds, k_smem);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  char* const q_smem = reinterpret_cast<char*>(shared_smem);
  char* const do_smem = q_smem + BLOCK_Q * Q_BYTES;
  char* const stages_smem = do_smem + BLOCK_Q * DO_BYTES;
  float* const lse_smem = reinterpret_cast<float*>(stages_smem + STAGES * STAGE_BYTES);
  char* const ds_smem = reinterpret_cast<char*>(lse_smem + 2 * BLOCK_Q);
  StreamedEntry* const streamed_smem = reinterpret_cast<StreamedEntry*>(ds_smem + SHARED_DS_BYTES);
  float* const largest_smem = reinterpret_cast<float*>(ds_smem + BLOCK_Q * P_BYTES);

  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const long long h = work.head, h_kv = h / p.group;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
  const int warp_row = fragment::warp_row();
  const fragment_gradient::Corner corner(warp_row, fragment::warp_key());
  const ShareQ share(fragment_sharers::sharer());
  const char* const ds_rows = ds_smem + warp_row * P_BYTES;
  unsigned long long visited = 0;
  if (threadIdx.x == 0) streamed_smem->entry = work.entry;

  // 1 load q
  fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem, memory::rows(p.q, work.entry, h, false), i0,
                                            ni);
  float dq[ROWS][ShareQ::COLUMNS];
  matmul::clear(dq);
  fragment_gradient::DsScale ds_scale;

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
    const auto load_tile = [&](const fragment_tile::Tile& tile, int stage) {
      char* const k_smem = stages_smem + stage * STAGE_BYTES;
      fragment::begin_rows<BLOCK_KV, D, Q_BYTES>(k_smem, streamed_smem->k, tile.first, tile.rows);
      fragment::begin_rows<BLOCK_KV, D_V, DO_BYTES>(k_smem + BLOCK_KV * Q_BYTES, streamed_smem->v,
                                                    tile.first, tile.rows);
    };
    const auto describe = [&](long long j0, int nj) {
      return tile::describe_tile(entry, h, i0, ni, j0, nj);
    };
    fragment_tile::Tile now =
        fragment_tile::next_tile<BLOCK_KV>(p, streamed_smem->classes, 0, entry.len_k, describe);
    if (now.rows == 0) continue;
    fragment::begin_rows<BLOCK_Q, D_V, DO_BYTES>(do_smem, memory::rows(p.d_out, entry, h, false),
                                                 i0, ni);
    load_tile(now, 0);
    fragment_gradient::RowStatistics statistics;
    statistics.load(memory::row_statistic(p.lse, entry, h),
                    memory::row_statistic(p.delta, entry, h), i0, ni);
    statistics.store(lse_smem, lse_smem + BLOCK_Q);
    int stage = 0;
#pragma unroll 1
    while (now.rows > 0) {
      const TileBox box = describe(now.first, now.rows);
      const bool masked = now.tile_class == PARTIAL || now.rows < BLOCK_KV;
      char* const k_smem = stages_smem + stage * STAGE_BYTES;
      const char* const v_smem = k_smem + BLOCK_KV * Q_BYTES;
      ++visited;

      ptx::cp_async_wait_all();
      bool has_nonfinite = false;
      // Protects the tile, copied by all threads, and the previous stage, read by all.
      if (HAS_SCORE || (HAS_MASK && masked)) {
        has_nonfinite = ptx::barrier_or(!fragment::finite_rows<BLOCK_KV, D, Q_BYTES>(k_smem));
      } else {
        __syncthreads();  // as above
      }
      const fragment_tile::Tile next = fragment_tile::next_tile<BLOCK_KV>(
          p, streamed_smem->classes, now.first + BLOCK_KV, entry.len_k, describe);
      if (STAGES == 2 && next.rows > 0) load_tile(next, 1 - stage);
      unsigned int kept[ROWS];
      if constexpr (HAS_DROPOUT)
        fragment_gradient::draw_dropout<false, COLUMNS>(p, box, corner, kept);

      // 2 scores
      float s[ROWS][COLUMNS];
      fragment_product::multiply<D, UNROLL>(s, q_smem + warp_row * Q_BYTES,
                                            k_smem + fragment::warp_key() * Q_BYTES);
      // 3 score mod
      // 4 mask
      // 5 probabilities and the gradient of the output's weights
      unsigned int ds[ROWS][COLUMNS / 2];
      const bool has_masked = fragment_gradient::recompute_probabilities<false, 0>(
          p, box, now.tile_class, masked, s, corner, lse_smem + corner.row, kept, ds, nullptr);
      float dp[ROWS][COLUMNS];
      fragment_product::multiply<D_V, UNROLL>(dp, do_smem + warp_row * DO_BYTES,
                                              v_smem + fragment::warp_key() * DO_BYTES);
      const fragment_gradient::PerQuery<false, ROWS, COLUMNS> delta(lse_smem + BLOCK_Q +
                                                                    corner.row);
      fragment_gradient::score_gradients<false>(p, has_masked, s, dp, delta, kept, s);
      // 6 accumulate dq
      if constexpr (fragment::Mma::SCALES_DS) scale_ds(s, dq, largest_smem, ds_scale);
      fragment_gradient::narrow(s, ds_scale.factor, ds);
      if constexpr (SHARES) {
        fragment_sharers::put_weights(ds, ds_smem);
        fragment_sharers::wait();  // dS, written by the warps that share the rows
      }
      if (has_nonfinite) {
        if constexpr (SHARES) {
          fragment_product::add_nonfinite<D, BLOCK_KV, P_BYTES>(dq, ds_rows, ds_rows, k_smem,
                                                                share);
        } else {
          fragment::add_nonfinite<D>(dq, ds, k_smem);
        }
        __syncthreads();  // the keys, read by all warps as they were copied
        fragment::clear_nonfinite<BLOCK_KV, D, Q_BYTES>(k_smem);
        __syncthreads();  // the keys, made finite by all threads
      }
      accumulate_dq<SHARES>(dq, ds, ds_rows, k_smem, share);
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
