// Tiled attention, forward, by the tensor cores of compute capability 8.0 and later, in 16-bit
// types, float32 (in three products of tf32) and float64: the twin of reference/cpu/forward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 1: a block of queries is resident, blocks of keys and
// values are streamed, and the output is divided by the row sum once, at the end. Products are
// accumulated in the accumulator's type; 16-bit weights are rounded to the storage type before the
// product p v.
//
// Keys and values are streamed through a pipeline of KV_STAGES stages in shared memory, in the
// order keys, values, keys of the next tile and so on: while one stage is multiplied, the next
// KV_STAGES - 1 are being copied.
//
// Of 16-bit heads beyond 256, ROW_SHARERS warps have the same rows: each computes the scores of
// some keys of a tile, and has some columns of the output. Maxima and weights go through shared
// memory.
//
// Grid: prod(own_size) * heads * blocks, with own_size = lead_size; packed: heads * blocks.
// Shared memory: the queries, the stages, the weights of rows that warps share, SharedStorage.
// BLOCK_Q is 16 or 32 times the warps that share no rows, WARP_KEYS a multiple of 16.
#include "../common/params.cuh"
#include "../warp/fragment.cuh"
#include "../warp/fragment_pages.cuh"
#include "../warp/fragment_sharers.cuh"
#include "../warp/fragment_softmax.cuh"
#include "../warp/fragment_tile.cuh"
#include "../warp/fragment_wide.cuh"

namespace {

constexpr int ROWS = 2 * fragment::M_TILES;
using ResultRows = fragment_sharers::ResultRows<D_V, ROW_SHARERS>;
constexpr int COLUMNS = fragment::WARP_KEYS / 4;
constexpr int COLUMNS_V = ResultRows::COLUMNS;
constexpr int Q_BYTES = fragment::row_bytes(D), V_BYTES = fragment::row_bytes(D_V);
constexpr int RESIDENT_BYTES = BLOCK_Q * matmul::larger(Q_BYTES, V_BYTES);
constexpr int STAGE_BYTES = BLOCK_KV * matmul::larger(Q_BYTES, V_BYTES);

// In shared memory because the sums fill the registers.
struct SharedStorage {
  layout::Entry entry;
  fragment_tile::Classes classes;
};
constexpr int SHARED_STORAGE_BYTES = static_cast<int>(sizeof(SharedStorage));
constexpr int HELD_BYTES = RESIDENT_BYTES + ResultRows::BYTES + SHARED_STORAGE_BYTES;
constexpr int KV_STAGES = (SHARED_BYTES - HELD_BYTES) / STAGE_BYTES;
// Whether the queries of a warp's rows fit into its registers.
constexpr bool Q_IN_REGISTERS =
    !fragment::WIDE && ROWS * (COLUMNS + COLUMNS_V + fragment::whole_columns(D) / 8) <= 160;

static_assert(fragment::WARP_ROWS * fragment::WARPS == BLOCK_Q * ROW_SHARERS && ROWS <= 4,
              "BLOCK_Q, THREADS");
static_assert(fragment::WARP_KEYS % 16 == 0 && (ROW_SHARERS == 1 || !fragment::WIDE), "BLOCK_KV");
static_assert(SHARED_BYTES == HELD_BYTES + KV_STAGES * STAGE_BYTES, "SHARED_BYTES");
static_assert(KV_STAGES == 2 || KV_STAGES == 3, "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  char* const q_smem = reinterpret_cast<char*>(shared_smem);
  char* const stages_smem = q_smem + RESIDENT_BYTES;
  char* const rows_smem = stages_smem + KV_STAGES * STAGE_BYTES;
  SharedStorage* const storage_smem =
      reinterpret_cast<SharedStorage*>(rows_smem + ResultRows::BYTES);
  const ResultRows rows(rows_smem);

  const layout::WorkTile work = cache::work_tile_of(p, blockIdx.x);
  if (work.idle) return;
  const layout::Entry& entry = storage_smem->entry;
  const long long h = work.head, h_kv = layout::divide(h, p.group).quotient;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
  const memory::Rows k = memory::rows(p.k, work.entry, h_kv, true);
  const memory::Rows v = memory::rows(p.v, work.entry, h_kv, true);
  const accum_t scale = static_cast<accum_t>(p.scale);
  // Logits are `logit_scale` times a score; queries are negated if the scale is negative.
  const accum_t logit_scale = HAS_SCORE ? accum_t(1) : fabs(scale);
  const accum_t c = fmin(logit_scale * number::LOG2_E<accum_t>, number::largest());
  unsigned long long visited = 0;

  // 1 load q
  fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem, memory::rows(p.q, work.entry, h, false), i0,
                                            ni);
  ptx::cp_async_commit();
  if (threadIdx.x == 0) storage_smem->entry = work.entry;
  __syncthreads();  // the entry in SharedStorage, written by thread 0
  const auto describe = [&](long long j0, int nj) {
    return tile::describe_tile(entry, h, i0, ni, j0, nj);
  };
  fragment_tile::Tile now =
      fragment_tile::next_tile<BLOCK_KV>(p, storage_smem->classes, 0, entry.len_k, describe);
  int stage = 0;  // the stage of the next product's operand
  const auto stage_smem = [&](int ahead) {
    const int n = stage + ahead;
    return stages_smem + (n < KV_STAGES ? n : n - KV_STAGES) * STAGE_BYTES;
  };
  const auto copy_keys = [&](const fragment_tile::Tile& tile, int ahead) {
    if (tile.rows > 0) {
      fragment::begin_keys<BLOCK_KV, D, Q_BYTES>(stage_smem(ahead), p, entry.b, k, p.k_page,
                                                 tile.first, tile.rows);
    }
    ptx::cp_async_commit();
  };
  const auto copy_values = [&](const fragment_tile::Tile& tile, int ahead) {
    if (tile.rows > 0) {
      fragment::begin_keys<BLOCK_KV, D_V, V_BYTES>(stage_smem(ahead), p, entry.b, v, p.v_page,
                                                   tile.first, tile.rows);
    }
    ptx::cp_async_commit();
  };
  copy_keys(now, 0);
  if constexpr (KV_STAGES == 3) copy_values(now, 1);
  fragment::Left<D, Q_IN_REGISTERS> q(q_smem + fragment::warp_row() * Q_BYTES);
  ptx::cp_async_wait<KV_STAGES - 1>();
  if (!HAS_SCORE && scale < 0) fragment::negate_rows<BLOCK_Q, D, Q_BYTES>(q_smem);
  if constexpr (Q_IN_REGISTERS) {
    __syncthreads();  // the queries, copied by all threads
    q.load_registers();
  }
  accum_t m[ROWS], l[ROWS], acc[ROWS][COLUMNS_V];
  fragment_softmax::init_state(m, l, acc);

#pragma unroll 1
  while (now.rows > 0) {
    const TileBox box = describe(now.first, now.rows);
    const bool masked = now.tile_class == PARTIAL || now.rows < BLOCK_KV;
    unsigned int mask[ROWS];
    bool active = true;  // whether the warp has an unmasked pair
    if (MAY_MASK && masked) {
      active = fragment_tile::evaluate_mask<COLUMNS>(p, box, now.tile_class, mask);
      if constexpr (ROW_SHARERS > 1) active = true;  // others that have the rows may have one
    }
    ++visited;

    ptx::cp_async_wait<KV_STAGES - 2>();
    __syncthreads();  // the keys, copied by all threads, and the previous stage, read by all
    if constexpr (KV_STAGES == 2) copy_values(now, 1);
    fragment::word_t weights[ROWS][COLUMNS / fragment::PER_WORD];
    if (active) {
      // 2 scores
      accum_t s[ROWS][COLUMNS];
      fragment::multiply(s, q, stage_smem(0) + fragment::warp_key() * Q_BYTES);
      // 3 score mod
      bool has_masked = masked;
      if constexpr (HAS_SCORE) {
        has_masked = ptx::any_lane(fragment_tile::apply_score_mod<true>(
                         p, tile::head_constants_of(p, box), box, s, scale)) ||
                     masked;
      }
      // 4 mask
      if (MAY_MASK && masked) fragment_tile::apply_mask(s, mask);
      if (!MAY_MASK && masked) fragment_tile::mask_missing_keys(s, now.rows);
      // 5 row max
      accum_t m_new[ROWS];
      if (rows.row_max(s, m, m_new, c)) {
        // 6 rescale
        fragment_softmax::rescale(m, m_new, l, acc, c);
      }
      fragment_softmax::exponentiate(s, m, l, c, has_masked);
      if constexpr (HAS_DROPOUT) fragment_tile::apply_dropout(p, box, s);
      fragment::narrow(s, weights);
      rows.put(weights);
    }
    // 7 accumulate p v
    const fragment_tile::Tile next = fragment_tile::next_tile<BLOCK_KV>(
        p, storage_smem->classes, now.first + BLOCK_KV, entry.len_k, describe);
    if constexpr (KV_STAGES == 3) copy_keys(next, 2);
    stage = stage + 1 < KV_STAGES ? stage + 1 : 0;
    ptx::cp_async_wait<KV_STAGES - 2>();
    bool has_nonfinite = false;
    // Protects the values, copied by all threads, and the previous stage, read by all.
    if (fragment::Mma::SPLIT_CAN_FAIL || HAS_SCORE || (MAY_MASK && masked)) {
      has_nonfinite =
          ptx::barrier_or(!fragment::finite_rows<BLOCK_KV, D_V, V_BYTES>(stage_smem(0)));
    } else {
      __syncthreads();  // as above
    }
    if constexpr (KV_STAGES == 3) {
      copy_values(next, 2);
    } else {
      copy_keys(next, 1);
    }
    if (has_nonfinite) {
      if (active) rows.add_nonfinite(acc, weights, stage_smem(0));
      __syncthreads();  // the values, read by all warps as they were copied
      fragment::clear_nonfinite<BLOCK_KV, D_V, V_BYTES>(stage_smem(0));
      __syncthreads();  // the values, made finite by all threads
    }
    if (active) rows.multiply_add(acc, weights, stage_smem(0));
    stage = stage + 1 < KV_STAGES ? stage + 1 : 0;
    now = next;
  }

  rows.row_sum(l);
  accum_t weight[ROWS];
  fragment_softmax::join_sink(
      m, l, weight, logit_scale,
      p.sink == nullptr ? -number::infinity() : number::load<accum_t>(p.sink, p.kind_sink, h));
  // 8 normalise
  const accum_t keep_scale = HAS_DROPOUT ? static_cast<accum_t>(p.keep_scale) : accum_t(1);
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    weight[r] = l[r] == accum_t(0) ? accum_t(0) : keep_scale * weight[r] / l[r];
  if constexpr (RESUMES) {
    fragment::resume<D_V>(acc, weight, m, l, p, entry, h, i0 + fragment::warp_row(),
                          ni - fragment::warp_row(), [&](int n) { return rows.column(n); });
    if constexpr (ROW_SHARERS > 1) {
      fragment_sharers::wait();  // the lse before, read by all warps that have the rows
    }
  }
  if constexpr (WIDE_RESULT) {
    ptx::cp_async_wait<0>();
  } else if (visited == 0) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the queries, copied by all threads to where the output goes
  }
  rows.store(
      acc, weight, p.out, [&] { return layout::offset(p.out, entry, h, false); }, i0, ni, q_smem);
  // 9 store lse
  const bool is_first = ROW_SHARERS == 1 || fragment_sharers::sharer() == 0;
  const memory::RowStatistic lse = memory::row_statistic(p.lse, entry, h);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = fragment::warp_row() + 8 * r + fragment::lane_row();
    if (p.lse.data != nullptr && ptx::lane_index() % 4 == 0 && row < ni && is_first) {
      lse.data[(i0 + row) * lse.row] = l[r] == accum_t(0) ? -number::infinity() : m[r] + log(l[r]);
    }
  }
  tile::count_tiles(p, visited);
}
