// The gradient of a bias, or of a learned look-up that pairs read as one: what a block computes.
//
// A block has a tile of the bias, as the bias is stored. It loops over the tiles of scores that
// share it, or over its part of them, recomputes their dS, and accumulates it in registers.
// With HAS_DSCORE, dS is multiplied by the derivative of the changed score by what a pair reads.
#pragma once
#include "bias_tile.cuh"

namespace bias_sums {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int TILE = BLOCK_Q * STRIDE;
constexpr int TILES = 1 + (HAS_DROPOUT ? 1 : 0) + (HAS_DSCORE ? 1 : 0);
constexpr int CHUNK_STRIDE = matmul::larger(matmul::odd_stride(matmul::chunk_columns(D)),
                                            matmul::odd_stride(matmul::chunk_columns(D_V)));
// Operands of both products are loaded at once where each is one chunk and leaves room.
constexpr bool AT_ONCE = matmul::chunks(D) == 1 && matmul::chunks(D_V) == 1 && TILES == 1;
constexpr int OPERANDS = (AT_ONCE ? 2 : 1) * (BLOCK_Q + BLOCK_KV) * CHUNK_STRIDE;
constexpr int SHARED_ELEMENTS = OPERANDS + TILES * TILE + 2 * BLOCK_Q;

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

// Computes and stores the block's tile.
__device__ __forceinline__ void run(const Params& p) {
  extern __shared__ Vector shared_smem[];
  accum_t* const a_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const b_smem = a_smem + BLOCK_Q * CHUNK_STRIDE;
  accum_t* const tile_smem = a_smem + OPERANDS;
  accum_t* const do_smem = AT_ONCE ? b_smem + BLOCK_KV * CHUNK_STRIDE : a_smem;
  accum_t* const v_smem = AT_ONCE ? do_smem + BLOCK_Q * CHUNK_STRIDE : b_smem;
  accum_t* const lse_smem = tile_smem + TILES * TILE;
  const gradient_tile::Scratch scratch{tile_smem, tile_smem + (HAS_DROPOUT ? TILE : 0),
                                       HAS_DSCORE ? lse_smem - TILE : nullptr, lse_smem,
                                       lse_smem + BLOCK_Q};

  const bias_tile::BiasTile tile_of_bias(p);
  accum_t total[ROWS][COLUMNS];
  matmul::clear(total);

  memory::Rows q, k, d_out, v;
  const auto begin = [&](const layout::Entry& entry, long long h, long long i0, int ni) {
    q = memory::rows(p.q, entry, h, false);
    d_out = memory::rows(p.d_out, entry, h, false);
    k = memory::rows(p.k, entry, h / p.group, true);
    v = memory::rows(p.v, entry, h / p.group, true);
    __syncthreads();  // lse and delta of the previous queries, which other threads may still read
    gradient_tile::load_row_statistics(memory::row_statistic(p.lse, entry, h),
                                       memory::row_statistic(p.delta, entry, h), i0, ni, scratch);
  };
  const auto add = [&](const TileBox& box, int tile_class, long long i0, int ni, long long j0,
                       int nj) {
    // 2 scores
    accum_t s[ROWS][COLUMNS];
    if constexpr (AT_ONCE) {
      __syncthreads();  // the previous operands, which other threads may still read
      matmul::begin_both<BLOCK_Q, BLOCK_KV, D>(q, i0, ni, k, j0, nj, a_smem, b_smem);
      matmul::begin_both<BLOCK_Q, BLOCK_KV, D_V>(d_out, i0, ni, v, j0, nj, do_smem, v_smem);
      matmul::finish_both<BLOCK_Q, BLOCK_KV, D>(q, i0, ni, k, j0, nj, a_smem, b_smem);
      matmul::finish_both<BLOCK_Q, BLOCK_KV, D_V>(d_out, i0, ni, v, j0, nj, do_smem, v_smem);
      __syncthreads();  // the operands, filled by all threads
      matmul::multiply_one<D>(s, a_smem, b_smem);
    } else {
      matmul::multiply_both<BLOCK_Q, BLOCK_KV, D>(s, q, i0, ni, k, j0, nj, a_smem, b_smem);
    }
    // 3 score mod
    // 4 mask
    // 5 probabilities and the gradient of the output's weights
    gradient_tile::probabilities<false, STRIDE>(p, box, tile_class, s, scratch);
    if constexpr (AT_ONCE) {
      matmul::multiply_one<D_V>(s, do_smem, v_smem);
    } else {
      matmul::multiply_both<BLOCK_Q, BLOCK_KV, D_V>(s, d_out, i0, ni, v, j0, nj, a_smem, b_smem);
    }
    gradient_tile::score_gradients<false, STRIDE>(p, s, scratch);
    // 6 accumulate dbias
    if constexpr (HAS_DSCORE) {
      gradient_tile::apply_dscore<STRIDE, ROWS, COLUMNS>(scratch);
      tile::load_cells<STRIDE>(s, tile_smem);
    }
    matmul::add(total, s);
  };
  bias_tile::for_each_tile(p, tile_of_bias, begin, add);

  tile::store_cells<STRIDE>(total, tile_smem);
  __syncthreads();  // the tile, written by other threads
  bias_tile::store<STRIDE>(p, tile_of_bias, tile_smem);
}

}  // namespace bias_sums
