// Tiled attention, forward, on any GPU: the twin of reference/cpu/forward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 1: a block of queries is resident, blocks of keys and
// values are streamed, and the output is divided by the row sum once, at the end. Every product is
// a scalar multiply-add in the accumulator's type.
//
// Grid: prod(own_size) * heads * blocks, with own_size = lead_size; packed: heads * blocks.
// Shared memory: the queries, a tile of weights, the stage. BLOCK_Q is a multiple of ROW_THREADS,
// BLOCK_KV of COLUMN_THREADS and of 4.
#include "../common/params.cuh"
#include "epilogue.cuh"
#include "../common/softmax.cuh"

namespace {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int COLUMNS_V = matmul::padded_columns(D_V) / COLUMN_THREADS;
constexpr int Q_STRIDE = matmul::odd_stride(matmul::whole_columns(D));
constexpr int P_STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int BUFFER = matmul::buffer_elements(BLOCK_KV, D, D_V);
constexpr int SHARED_ELEMENTS = BLOCK_Q * Q_STRIDE + BLOCK_Q * P_STRIDE + 2 * BUFFER;
// Of heads of 128 columns, two take 2 % less time under a mask, and 1 % more without.
constexpr int UNROLL = HAS_MASK && D > 64 && sizeof(accum_t) == 4 ? 2 : 1;
constexpr bool HALVES = tile::HALVES_KEYS && COLUMNS % 2 == 0;

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  accum_t* const q_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const p_smem = q_smem + BLOCK_Q * Q_STRIDE;
  accum_t* const stage_smem = p_smem + BLOCK_Q * P_STRIDE;

  matmul::Stage<BUFFER> stage{stage_smem};
  const unsigned int number = layout::interleave_many_heads(p, blockIdx.x, p.heads);
  const layout::WorkTile work = layout::work_tile_of(p, number, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const layout::Entry& entry = work.entry;
  const long long h = work.head, h_kv = h / p.group;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
  const memory::Rows k = memory::rows(p.k, entry, h_kv, true);
  const memory::Rows v = memory::rows(p.v, entry, h_kv, true);
  const accum_t scale = static_cast<accum_t>(p.scale);
  unsigned long long visited = 0;

  // 1 load q
  memory::load_rows<BLOCK_Q, matmul::whole_columns(D), Q_STRIDE, D>(
      q_smem, memory::rows(p.q, entry, h, false), i0, ni);
  accum_t m[ROWS], l[ROWS], acc[ROWS][COLUMNS_V];
  const accum_t sink =
      p.sink == nullptr ? -number::infinity() : number::load<accum_t>(p.sink, p.kind_sink, h);
  softmax::init_state(m, l, acc, sink);

#pragma unroll 1
  for (long long j0 = 0; j0 < entry.len_k; j0 += BLOCK_KV) {
    const int nj = tile::rows_from(j0, entry.len_k, BLOCK_KV);
    const TileBox box = tile::describe_tile(entry, h, i0, ni, j0, nj);
    const int tile_class = tile::classify_tile(p, box);
    if (tile_class == EMPTY) continue;
    ++visited;
    const int keys = tile::keys_of(p, box, tile_class, nj);

    // 2 scores
    accum_t s[ROWS][COLUMNS];
    matmul::multiply_rows<BLOCK_KV, D, Q_STRIDE, UNROLL, false, HALVES>(s, q_smem, k, j0, keys,
                                                                        stage);
    matmul::scale(s, scale);
    // 3 score mod
    // 4 mask
    tile::apply_score_and_mask<false, P_STRIDE>(p, box, tile_class, s, p_smem, nullptr);
    // 5 row max
    accum_t m_new[ROWS];
    if (softmax::row_max(s, m, m_new)) {
      // 6 rescale
      softmax::rescale(m, m_new, l, acc);
    }
    softmax::exponentiate(s, m, l);
    tile::store_cells<P_STRIDE>(s, p_smem);
    // 7 accumulate p v
    if constexpr (HAS_DROPOUT) {
      __syncthreads();  // the weights, written by other threads
      tile::apply_dropout<false, P_STRIDE>(p, box, p_smem, p_smem);
    }
    matmul::accumulate<BLOCK_KV, D_V, P_STRIDE, MAY_MASK, 2 * UNROLL>(acc, p_smem, v, j0, keys,
                                                                      stage);
  }

  softmax::row_sum(l);
  // 8 normalise
  accum_t inverse[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) inverse[r] = l[r] == accum_t(0) ? accum_t(0) : accum_t(1) / l[r];
  if constexpr (RESUMES) epilogue::resume<D_V>(acc, inverse, m, l, p, entry, h, i0, ni);
  epilogue::store_as<D_V, result_t>(acc, p.out, layout::offset(p.out, entry, h, false), i0, ni,
                                    inverse);
  // 9 store lse
  const memory::RowStatistic lse = memory::row_statistic(p.lse, entry, h);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = matmul::row_thread() + ROW_THREADS * r;
    if (p.lse.data != nullptr && matmul::column_thread() == 0 && row < ni) {
      lse.data[(i0 + row) * lse.row] = l[r] == accum_t(0) ? -number::infinity() : m[r] + log(l[r]);
    }
  }
  tile::count_tiles(p, visited);
}
