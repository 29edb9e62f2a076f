// The tangent of a bias's gradient on any GPU: the twin of `add_to_bias` in
// reference/cpu/bias_gradient.py, as `backward_tangent_dkdv` calls it.
//
// As backward_bias.cu: one block per tile of the bias, as the bias is stored, or a part of it, sums
// what the tiles of scores make of it that share the tile.
//
// Grid, parts and own_size: as backward_bias.cu. Shared memory: chunks of rows of both operands,
// tiles of probabilities, of their tangents and of derivatives of the score mod (and one for
// dropout), what each query has one number of.
#include "../common/params.cuh"
#include "../common/bias_tile.cuh"
#include "../common/tangent_gradient.cuh"

namespace {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int TILE = BLOCK_Q * STRIDE;
constexpr int TILES = HAS_DROPOUT ? 4 : 3;
constexpr int CHUNK_STRIDE = matmul::larger(matmul::odd_stride(matmul::chunk_columns(D)),
                                            matmul::odd_stride(matmul::chunk_columns(D_V)));
constexpr int SHARED_ELEMENTS =
    (BLOCK_Q + BLOCK_KV) * CHUNK_STRIDE + TILES * TILE + tangent_gradient::ROW_NUMBERS * BLOCK_Q;

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ SecondParams x) {
  const TangentParams& t = x.first;
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  accum_t* const a_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const b_smem = a_smem + BLOCK_Q * CHUNK_STRIDE;
  accum_t* const tiles_smem = b_smem + BLOCK_KV * CHUNK_STRIDE;
  accum_t* const rows_smem = tiles_smem + TILES * TILE;
  const tangent_gradient::TangentScratch scratch{tiles_smem,
                                                 HAS_DROPOUT ? tiles_smem + 3 * TILE : tiles_smem,
                                                 tiles_smem + TILE,
                                                 tiles_smem + 2 * TILE,
                                                 nullptr,
                                                 rows_smem,
                                                 rows_smem + BLOCK_Q,
                                                 rows_smem + 2 * BLOCK_Q,
                                                 rows_smem + 3 * BLOCK_Q};

  const bias_tile::BiasTile tile_of_bias(p);
  accum_t total[ROWS][COLUMNS];
  matmul::clear(total);

  memory::Rows q, k, d_out, v, tq, tk, tdo, tv;
  const auto begin = [&](const layout::Entry& entry, long long h, long long i0, int ni) {
    const long long h_kv = h / p.group;
    q = memory::rows(p.q, entry, h, false);
    d_out = memory::rows(p.d_out, entry, h, false);
    k = memory::rows(p.k, entry, h_kv, true);
    v = memory::rows(p.v, entry, h_kv, true);
    tq = memory::rows(HAS_TQ ? t.tq : p.q, entry, h, false);
    tdo = memory::rows(HAS_TDO ? x.tdo : p.d_out, entry, h, false);
    tk = memory::rows(HAS_TK ? t.tk : p.k, entry, h_kv, true);
    tv = memory::rows(HAS_TV ? t.tv : p.v, entry, h_kv, true);
    __syncthreads();  // the numbers of previous queries, which other threads may still read
    tangent_gradient::load_statistics(tangent_gradient::statistics_of(x, entry, h), i0, ni,
                                      scratch);
  };
  const auto add = [&](const TileBox& box, int tile_class, long long i0, int ni, long long j0,
                       int nj) {
    // 2 scores
    accum_t s[ROWS][COLUMNS], ts[ROWS][COLUMNS];
    matmul::clear(ts);
    if constexpr (HAS_TQ) {
      matmul::multiply_both<BLOCK_Q, BLOCK_KV, D>(ts, tq, i0, ni, k, j0, nj, a_smem, b_smem);
    }
    if constexpr (HAS_TK) {
      matmul::multiply_both<BLOCK_Q, BLOCK_KV, D, true>(ts, q, i0, ni, tk, j0, nj, a_smem, b_smem);
    }
    matmul::multiply_both<BLOCK_Q, BLOCK_KV, D>(s, q, i0, ni, k, j0, nj, a_smem, b_smem);
    // 3 score mod
    // 4 mask
    // 5 probabilities and the gradient of the output's weights
    tangent_gradient::probabilities<false, STRIDE>(p, box, tile_class, s, ts, scratch);
    matmul::clear(ts);
    if constexpr (HAS_TDO) {
      matmul::multiply_both<BLOCK_Q, BLOCK_KV, D_V>(ts, tdo, i0, ni, v, j0, nj, a_smem, b_smem);
    }
    if constexpr (HAS_TV) {
      matmul::multiply_both<BLOCK_Q, BLOCK_KV, D_V, true>(ts, d_out, i0, ni, tv, j0, nj, a_smem,
                                                          b_smem);
    }
    matmul::multiply_both<BLOCK_Q, BLOCK_KV, D_V>(s, d_out, i0, ni, v, j0, nj, a_smem, b_smem);
    tangent_gradient::logit_gradients<false, STRIDE>(p, s, ts, scratch);
    // 6 accumulate dbias
    matmul::add(total, ts);
  };
  bias_tile::for_each_tile(p, tile_of_bias, begin, add);

  tile::store_cells<STRIDE>(total, tiles_smem);
  __syncthreads();  // the tile, written by other threads
  bias_tile::store<STRIDE>(p, tile_of_bias, tiles_smem);
}
