// The gradient of a bias, or of a learned look-up that pairs read as one: what a block computes.
//
// A block has a tile of the bias, as the bias is stored. It loops over the batch entries, heads and
// blocks that share the tile, in that order, recomputes their dS, and accumulates it in registers.
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
constexpr int SHARED_ELEMENTS = (BLOCK_Q + BLOCK_KV) * CHUNK_STRIDE + TILES * TILE + 2 * BLOCK_Q;

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

// Computes and stores the block's tile.
__device__ __forceinline__ void run(const Params& p) {
  extern __shared__ Vector shared_smem[];
  accum_t* const a_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const b_smem = a_smem + BLOCK_Q * CHUNK_STRIDE;
  accum_t* const tile_smem = b_smem + BLOCK_KV * CHUNK_STRIDE;
  accum_t* const lse_smem = tile_smem + TILES * TILE;
  const gradient_tile::Scratch scratch{tile_smem, tile_smem + (HAS_DROPOUT ? TILE : 0),
                                       HAS_DSCORE ? lse_smem - TILE : nullptr, lse_smem,
                                       lse_smem + BLOCK_Q};

  const bias_tile::BiasTile tile_of_bias(p);
  accum_t total[ROWS][COLUMNS];
  matmul::clear(total);

  const long long heads = tile_of_bias.heads(p);
#pragma unroll 1
  for (long long plane = tile_of_bias.begin_plane; plane < tile_of_bias.end_plane; ++plane) {
    const layout::Quotient at = layout::divide(plane, heads);
    const layout::Entry entry = layout::shared_entry(p, tile_of_bias.first, at.quotient);
    const long long h = tile_of_bias.one_head ? at.remainder : tile_of_bias.head;
    const long long i_limit =
        tile_of_bias.one_query ? entry.len_q : (tile_of_bias.q_block + 1) * BLOCK_Q;
    const long long j_limit =
        tile_of_bias.one_key ? entry.len_k : (tile_of_bias.kv_block + 1) * BLOCK_KV;
    const long long i_end = i_limit < entry.len_q ? i_limit : entry.len_q;
    const long long j_end = j_limit < entry.len_k ? j_limit : entry.len_k;
    const memory::Rows q = memory::rows(p.q, entry, h, false);
    const memory::Rows d_out = memory::rows(p.d_out, entry, h, false);
    const memory::Rows k = memory::rows(p.k, entry, h / p.group, true);
    const memory::Rows v = memory::rows(p.v, entry, h / p.group, true);
#pragma unroll 1
    for (long long i0 = tile_of_bias.one_query ? 0 : tile_of_bias.q_block * BLOCK_Q; i0 < i_end;
         i0 += BLOCK_Q) {
      const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
      __syncthreads();  // lse and delta of the previous queries, which other threads may still
                        // read
      gradient_tile::load_row_statistics(memory::row_statistic(p.lse, entry, h),
                                         memory::row_statistic(p.delta, entry, h), i0, ni, scratch);
#pragma unroll 1
      for (long long j0 = tile_of_bias.one_key ? 0 : tile_of_bias.kv_block * BLOCK_KV; j0 < j_end;
           j0 += BLOCK_KV) {
        const int nj = tile::rows_from(j0, entry.len_k, BLOCK_KV);
        const TileBox box = tile::describe_tile(entry, h, i0, ni, j0, nj);
        const int tile_class = tile::classify_tile(p, box);
        if (tile_class == EMPTY) continue;

        // 2 scores
        accum_t s[ROWS][COLUMNS];
        matmul::multiply_both<BLOCK_Q, BLOCK_KV, D>(s, q, i0, ni, k, j0, nj, a_smem, b_smem);
        // 3 score mod
        // 4 mask
        // 5 probabilities and the gradient of the output's weights
        gradient_tile::probabilities<false, STRIDE>(p, box, tile_class, s, scratch);
        matmul::multiply_both<BLOCK_Q, BLOCK_KV, D_V>(s, d_out, i0, ni, v, j0, nj, a_smem, b_smem);
        gradient_tile::score_gradients<false, STRIDE>(p, s, scratch);
        // 6 accumulate dbias
        if constexpr (HAS_DSCORE) {
          gradient_tile::apply_dscore<STRIDE, ROWS, COLUMNS>(scratch);
          tile::load_cells<STRIDE>(s, tile_smem);
        }
        matmul::add(total, s);
      }
    }
  }

  tile::store_cells<STRIDE>(total, tile_smem);
  __syncthreads();  // the tile, written by other threads
  bias_tile::store<STRIDE>(p, tile_of_bias, tile_smem);
}

}  // namespace bias_sums
