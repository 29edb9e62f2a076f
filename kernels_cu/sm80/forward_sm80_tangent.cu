// Tiled attention with its derivative along a direction, by the tensor cores of compute capability
// 8.0 and later, in 16-bit types: the twin of reference/cpu/forward_tangent.py.
//
// As forward_sm80.cu, with the sums of common/tangent.cuh. Products are accumulated in float32;
// weights and weighted tangents are rounded to the storage type before their products with values.
// Tangents lie beside their arrays in shared memory, so that a fragment of q, k, v or of the
// weights is loaded once for two products. What a direction does not have (HAS_TQ, HAS_TK, HAS_TV,
// HAS_TBIAS) takes no product.
//
// Keys and values are streamed through two stages, in the order keys, values, keys of the next tile
// and so on: while one stage is multiplied, the next is being copied.
//
// Two results are as many sums as those of a head twice as wide in forward_sm80.cu: of heads beyond
// 128, ROW_SHARERS warps have the same rows.
//
// Grid: as forward_simt.cu. Shared memory: the queries and their tangents, the stages, weights and
// weighted tangents of rows that warps share, SharedStorage. BLOCK_Q is 16 or 32 times the warps
// that share no rows, WARP_KEYS a multiple of 16.
#include "../common/params.cuh"
#include "../warp/fragment_tangent.cuh"
#include "../warp/fragment_tile.cuh"

namespace {

using fragment_tangent::COLUMNS;
using fragment_tangent::COLUMNS_V;
using fragment_tangent::HAS_SCORES;
using fragment_tangent::Q_BYTES;
using fragment_tangent::ROWS;
using fragment_tangent::V_BYTES;

// In shared memory because the sums fill the registers.
struct SharedStorage {
  layout::Entry entry;
  memory::Rows k, v, tk, tv;
  long long head, first;  // the first query
  // Logits are `logit_scale` times a score, and so are their tangents; queries and their tangents
  // are negated if the scale is negative. c = logit_scale * log2 e.
  float logit_scale, c;
  fragment_tile::Classes classes;
};
constexpr int RESIDENT_BYTES = 2 * fragment_tangent::QUERIES_BYTES;
constexpr int STAGE_BYTES = 2 * fragment_tangent::KEYS_BYTES;

static_assert(fragment::WARP_ROWS * fragment::WARPS == BLOCK_Q * ROW_SHARERS && ROWS <= 4,
              "BLOCK_Q, THREADS");
static_assert(fragment::WARP_KEYS % 16 == 0 && ROWS * COLUMNS <= 32, "BLOCK_KV");
static_assert(SHARED_BYTES == RESIDENT_BYTES + 2 * STAGE_BYTES + 2 * fragment_tangent::Rows::BYTES +
                                  static_cast<int>(sizeof(SharedStorage)),
              "SHARED_BYTES");
static_assert(!WIDE_RESULT && !RESUMES, "results of the storage type over all keys");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ TangentParams t) {
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  char* const q_smem = reinterpret_cast<char*>(shared_smem);
  char* const tq_smem = q_smem + fragment_tangent::QUERIES_BYTES;
  char* const stages_smem = q_smem + RESIDENT_BYTES;
  char* const rows_smem = stages_smem + 2 * STAGE_BYTES;
  SharedStorage* const storage_smem =
      reinterpret_cast<SharedStorage*>(rows_smem + 2 * fragment_tangent::Rows::BYTES);
  const fragment_tangent::Rows rows(rows_smem),
      tangent_rows(rows_smem + fragment_tangent::Rows::BYTES);

  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const layout::Entry& entry = storage_smem->entry;
  const float scale = static_cast<float>(p.scale);
  unsigned long long visited = 0;

  // 1 load q
  {
    const long long h = work.head, i0 = work.block * BLOCK_Q;
    const int ni = tile::rows_from(i0, work.entry.len_q, BLOCK_Q);
    fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem, memory::rows(p.q, work.entry, h, false), i0,
                                              ni);
    if constexpr (HAS_TQ) {
      fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(tq_smem, memory::rows(t.tq, work.entry, h, false),
                                                i0, ni);
    }
  }
  ptx::cp_async_commit();
  if (threadIdx.x == 0) {
    const long long h_kv = layout::divide(work.head, p.group).quotient;
    storage_smem->entry = work.entry;
    storage_smem->head = work.head;
    storage_smem->logit_scale = HAS_SCORE ? 1.0f : fabs(scale);
    storage_smem->c = fmin(storage_smem->logit_scale * number::LOG2_E<float>, number::largest());
    storage_smem->first = work.block * BLOCK_Q;
    storage_smem->k = memory::rows(p.k, work.entry, h_kv, true);
    storage_smem->v = memory::rows(p.v, work.entry, h_kv, true);
    if constexpr (HAS_TK) storage_smem->tk = memory::rows(t.tk, work.entry, h_kv, true);
    if constexpr (HAS_TV) storage_smem->tv = memory::rows(t.tv, work.entry, h_kv, true);
  }
  __syncthreads();  // SharedStorage, written by thread 0
  const auto describe = [&](long long j0, int nj) {
    const long long i0 = storage_smem->first;
    const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
    return tile::describe_tile(entry, storage_smem->head, i0, ni, j0, nj);
  };
  const auto copy_keys = [&](const fragment_tile::Tile& tile, char* to_smem) {
    if (tile.rows > 0) {
      fragment::begin_rows<BLOCK_KV, D, Q_BYTES>(to_smem, storage_smem->k, tile.first, tile.rows);
      if constexpr (HAS_TK) {
        fragment::begin_rows<BLOCK_KV, D, Q_BYTES>(to_smem + fragment_tangent::KEYS_BYTES,
                                                   storage_smem->tk, tile.first, tile.rows);
      }
    }
    ptx::cp_async_commit();
  };
  const auto copy_values = [&](const fragment_tile::Tile& tile, char* to_smem) {
    fragment::begin_rows<BLOCK_KV, D_V, V_BYTES>(to_smem, storage_smem->v, tile.first, tile.rows);
    if constexpr (HAS_TV) {
      fragment::begin_rows<BLOCK_KV, D_V, V_BYTES>(to_smem + fragment_tangent::KEYS_BYTES,
                                                   storage_smem->tv, tile.first, tile.rows);
    }
    ptx::cp_async_commit();
  };
  const auto find_tile = [&](long long first) {
    return fragment_tile::next_tile<BLOCK_KV>(p, storage_smem->classes, first, entry.len_k,
                                              describe);
  };
  // A tile in one register: twice its number, and whether it is masked pair by pair; or -1.
  const auto code_of = [](const fragment_tile::Tile& tile) {
    if (tile.rows == 0) return -1;
    return static_cast<int>(tile.first / BLOCK_KV) * 2 + (tile.tile_class == PARTIAL ? 1 : 0);
  };
  const auto tile_of = [&](int code) {
    const long long first = static_cast<long long>(code / 2) * BLOCK_KV;
    return fragment_tile::Tile{first, tile::rows_from(first, entry.len_k, BLOCK_KV),
                               code % 2 != 0 ? PARTIAL : FULL};
  };
  const fragment_tile::Tile tile_0 = find_tile(0);
  int code = code_of(tile_0);
  char* const k_smem = stages_smem;
  char* const v_smem = stages_smem + STAGE_BYTES;
  copy_keys(tile_0, k_smem);
  ptx::cp_async_wait<1>();
  if (!HAS_SCORE && scale < 0) {
    fragment::negate_rows<BLOCK_Q, D, Q_BYTES>(q_smem);
    if constexpr (HAS_TQ) fragment::negate_rows<BLOCK_Q, D, Q_BYTES>(tq_smem);
  }
  float m[ROWS], l[ROWS], sum[ROWS], ref[ROWS], acc[ROWS][COLUMNS_V], w[ROWS][COLUMNS_V];
  fragment_softmax::init_state(m, l, acc);
  matmul::clear(w);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = 0;
    ref[r] = fragment_tangent::no_reference();
  }

#pragma unroll 1
  while (code >= 0) {
    const fragment_tile::Tile now = tile_of(code);
    const TileBox box = describe(now.first, now.rows);
    const bool masked = now.tile_class == PARTIAL || now.rows < BLOCK_KV;
    unsigned int mask = 0;  // of all rows: bit n of row r is bit r COLUMNS + n
    bool active = true;     // whether the warp has an unmasked pair
    if (MAY_MASK && masked) {
      unsigned int of_row[ROWS];
      active = fragment_tile::evaluate_mask<COLUMNS>(p, box, now.tile_class, of_row);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) mask |= (of_row[r] & ((1u << COLUMNS) - 1)) << r * COLUMNS;
      if constexpr (ROW_SHARERS > 1) active = true;  // others that have the rows may have one
    }
    ++visited;

    ptx::cp_async_wait<0>();
    __syncthreads();  // the keys, copied by all threads, and the previous values, read by all
    copy_values(now, v_smem);
    fragment_tangent::Weights weights;
    float inverse[ROWS];
    bool scaled = false;
    if (active) {
      // 2 scores
      float s[ROWS][COLUMNS], ts[ROWS][COLUMNS];
      fragment_tangent::multiply(s, ts, q_smem + fragment::warp_row() * Q_BYTES,
                                 k_smem + fragment::warp_key() * Q_BYTES);
      // 3 score mod
      bool has_masked = masked;
      if constexpr (HAS_SCORE) {
        has_masked = ptx::any_lane(fragment_tangent::apply_score_mod(
                         p, tile::head_constants_of(p, box), box, s, ts, scale)) ||
                     masked;
      }
      // 4 mask
      if (MAY_MASK && masked) {
        unsigned int of_row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) of_row[r] = mask >> r * COLUMNS;
        fragment_tile::apply_mask(s, of_row);
      }
      if (!MAY_MASK && masked) fragment_tile::mask_missing_keys(s, tile_of(code).rows);
      // 5 row max
      const float c = storage_smem->c, logit_scale = storage_smem->logit_scale;
      float m_new[ROWS];
      if (rows.row_max(s, m, m_new, c)) {
        // 6 rescale
        fragment_tangent::rescale(m, m_new, l, sum, acc, w, c);
      }
      fragment_softmax::exponentiate(s, m, l, c, has_masked);
      if constexpr (HAS_SCORES) {
        if (fragment_tangent::lack_references(ref)) {
          fragment_tangent::find_references(s, ts, logit_scale, ref, rows, tangent_rows);
        }
        fragment_tangent::weigh(s, ts, logit_scale, ref, sum, has_masked);
      }
      if constexpr (HAS_DROPOUT) {
        fragment_tile::apply_dropout(p, box, s);
        if constexpr (HAS_SCORES) fragment_tangent::drop(s, ts);
      }
      fragment::narrow(s, weights.p);
      rows.put(weights.p);
      if constexpr (HAS_SCORES) {
        if constexpr (IS_FLOAT16) scaled = fragment_tangent::fit_float16(ts, inverse, tangent_rows);
        fragment::narrow(ts, weights.t);
        tangent_rows.put(weights.t);
      }
    }
    // 7 accumulate p v
    const fragment_tile::Tile next = find_tile(tile_of(code).first + BLOCK_KV);
    code = code_of(next);
    ptx::cp_async_wait<0>();
    bool has_nonfinite = false;
    // Protects the values, copied by all threads, the keys, read by all, and shared rows of
    // weights.
    if (HAS_SCORE || (MAY_MASK && masked)) {
      bool finite = fragment::finite_rows<BLOCK_KV, D_V, V_BYTES>(v_smem);
      if constexpr (HAS_TV) {
        finite =
            fragment::finite_rows<BLOCK_KV, D_V, V_BYTES>(v_smem + fragment_tangent::KEYS_BYTES) &&
            finite;
      }
      has_nonfinite = ptx::barrier_or(!finite);
    } else {
      __syncthreads();  // as above
    }
    copy_keys(next, k_smem);
    if (has_nonfinite) {
      char* const tv_smem = v_smem + fragment_tangent::KEYS_BYTES;
      if (active) {
        rows.add_nonfinite(acc, weights.p, v_smem);
        if constexpr (HAS_SCORES) tangent_rows.add_nonfinite(w, weights.t, v_smem);
        if constexpr (HAS_TV) rows.add_nonfinite(w, weights.p, tv_smem);
      }
      __syncthreads();  // the values, read by all warps as they were copied
      fragment::clear_nonfinite<BLOCK_KV, D_V, V_BYTES>(v_smem);
      if constexpr (HAS_TV) fragment::clear_nonfinite<BLOCK_KV, D_V, V_BYTES>(tv_smem);
      __syncthreads();  // the values, made finite by all threads
    }
    if (scaled) {
      fragment_tangent::multiply_add_scaled(acc, w, weights, rows, tangent_rows, inverse, v_smem);
    } else if (active) {
      fragment_tangent::multiply_add(acc, w, weights, rows, tangent_rows, v_smem);
    }
  }

  rows.row_sum(l);
  tangent_rows.row_sum(sum);
  const long long h = storage_smem->head, i0 = storage_smem->first;
  const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
  const float sink =
      p.sink == nullptr ? -number::infinity() : number::load<float>(p.sink, p.kind_sink, h);
  const float tsink = t.tsink == nullptr ? 0.0f : number::load<float>(t.tsink, t.kind_tsink, h);
  float weight[ROWS];
  fragment_softmax::join_sink(m, l, weight, storage_smem->logit_scale, sink);
  fragment_tangent::join_sink(sum, m, weight, ref, sink, tsink);
  // 8 normalise
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float of_sum = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
    sum[r] *= of_sum;
    weight[r] *= keep_scale * of_sum;
#pragma unroll
    for (int n = 0; n < COLUMNS_V; ++n) w[r][n] -= sum[r] * acc[r][n];
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // the queries, copied by all threads to where the results go
  rows.store(
      acc, weight, p.out, [&] { return layout::offset(p.out, entry, h, false); }, i0, ni, q_smem);
  rows.store(
      w, weight, t.tout, [&] { return layout::offset(t.tout, entry, h, false); }, i0, ni, tq_smem);
  // 9 store lse
  const bool is_first = ROW_SHARERS == 1 || fragment_sharers::sharer() == 0;
  const memory::RowStatistic lse = memory::row_statistic(p.lse, entry, h);
  const memory::RowStatistic tlse = memory::row_statistic(t.tlse, entry, h);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = fragment::warp_row() + 8 * r + fragment::lane_row();
    if (p.lse.data != nullptr && ptx::lane_index() % 4 == 0 && row < ni && is_first) {
      lse.data[(i0 + row) * lse.row] = l[r] == 0.0f ? -number::infinity() : m[r] + log(l[r]);
      tlse.data[(i0 + row) * tlse.row] = ref[r] + sum[r];
    }
  }
  tile::count_tiles(p, visited);
}
