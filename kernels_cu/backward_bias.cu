// The gradient of a bias, summed over the axes along which it was broadcast: the twin of
// reference/backward_bias.py.
//
// One block per tile of the bias, as the bias is stored: it loops over the batch entries, heads and
// blocks that were given this tile, in that order, and recomputes their dS.
//
// Grid: prod(own_size) * bias_heads * ceil(bias_len_q / BLOCK_Q) * ceil(bias_len_k / BLOCK_KV);
// packed: own_size[0] is the bias's first axis, 1 or the number of sequences.
// Shared memory: chunks of the rows of both operands, the tile (and one for dropout), lse and
// delta. BLOCK_Q is a multiple of ROW_THREADS, BLOCK_KV of COLUMN_THREADS and 4.
#include "params.cuh"
#include "primitives/gradient_tile.cuh"

namespace {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int TILE = BLOCK_Q * STRIDE;
constexpr int TILES = HAS_DROPOUT ? 2 : 1;
constexpr int CHUNK_STRIDE = matmul::larger(matmul::odd_stride(matmul::chunk_columns(D)),
                                            matmul::odd_stride(matmul::chunk_columns(D_V)));
constexpr int SHARED_ELEMENTS = (BLOCK_Q + BLOCK_KV) * CHUNK_STRIDE + TILES * TILE + 2 * BLOCK_Q;

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  accum_t* const a_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const b_smem = a_smem + BLOCK_Q * CHUNK_STRIDE;
  accum_t* const tile_smem = b_smem + BLOCK_KV * CHUNK_STRIDE;
  accum_t* const lse_smem = tile_smem + TILES * TILE;
  const gradient_tile::Scratch scratch{tile_smem, tile_smem + (TILES - 1) * TILE, nullptr, lse_smem,
                                       lse_smem + BLOCK_Q};

  const long long q_blocks = (p.bias_len_q + BLOCK_Q - 1) / BLOCK_Q;
  const long long kv_blocks = (p.bias_len_k + BLOCK_KV - 1) / BLOCK_KV;
  const bool one_head = p.bias_heads == 1, one_query = p.bias_len_q == 1;
  const bool one_key = p.bias_len_k == 1;
  long long place = blockIdx.x;
  const long long kv_block = place % kv_blocks;
  place /= kv_blocks;
  const long long q_block = place % q_blocks;
  place /= q_blocks;
  const long long head = place % p.bias_heads;
  const layout::Entry first = layout::first_entry(p, place / p.bias_heads);
  accum_t total[ROWS][COLUMNS];
  matmul::clear(total);

  const long long members = layout::entries_sharing(p);
#pragma unroll 1
  for (long long member = 0; member < members; ++member) {
    const layout::Entry entry = layout::shared_entry(p, first, member);
    const long long i_limit = one_query ? entry.len_q : (q_block + 1) * BLOCK_Q;
    const long long j_limit = one_key ? entry.len_k : (kv_block + 1) * BLOCK_KV;
    const long long i_end = i_limit < entry.len_q ? i_limit : entry.len_q;
    const long long j_end = j_limit < entry.len_k ? j_limit : entry.len_k;
#pragma unroll 1
    for (long long h = one_head ? 0 : head; h < (one_head ? p.heads : head + 1); ++h) {
      const memory::Rows q = memory::rows(p.q, entry, h, false);
      const memory::Rows d_out = memory::rows(p.d_out, entry, h, false);
      const memory::Rows k = memory::rows(p.k, entry, h / p.group, true);
      const memory::Rows v = memory::rows(p.v, entry, h / p.group, true);
#pragma unroll 1
      for (long long i0 = one_query ? 0 : q_block * BLOCK_Q; i0 < i_end; i0 += BLOCK_Q) {
        const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
        __syncthreads();  // lse and delta, which may still be read
        gradient_tile::load_row_numbers(memory::numbers(p.lse, entry, h),
                                        memory::numbers(p.delta, entry, h), i0, ni, scratch);
#pragma unroll 1
        for (long long j0 = one_key ? 0 : kv_block * BLOCK_KV; j0 < j_end; j0 += BLOCK_KV) {
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
          matmul::multiply_both<BLOCK_Q, BLOCK_KV, D_V>(s, d_out, i0, ni, v, j0, nj, a_smem,
                                                        b_smem);
          gradient_tile::score_gradients<false, STRIDE>(p, s, scratch);
          // 6 accumulate dbias
          matmul::add(total, s);
        }
      }
    }
  }

  const long long base = layout::lead_offset(p.dbias, first) + head * p.dbias.head;
  tile::store_cells<STRIDE>(total, tile_smem);
  __syncthreads();  // the tile, which other threads wrote
  // Each thread writes elements of dbias: cells of the tile, or sums of its rows or columns.
  const int rows = one_query ? 1 : BLOCK_Q, columns = one_key ? 1 : BLOCK_KV;
#pragma unroll 1
  for (int n = threadIdx.x; n < rows * columns; n += THREADS) {
    const int row = n / columns, column = n % columns;
    const long long i = one_query ? 0 : q_block * BLOCK_Q + row;
    const long long j = one_key ? 0 : kv_block * BLOCK_KV + column;
    if (i >= p.bias_len_q || j >= p.bias_len_k) continue;
    accum_t sum = 0;
    for (int r = row; r < (one_query ? BLOCK_Q : row + 1); ++r) {
      for (int c = column; c < (one_key ? BLOCK_KV : column + 1); ++c) {
        sum += tile_smem[r * STRIDE + c];
      }
    }
    number::store(p.dbias.data, p.kind_dbias, base + i * p.dbias.row + j * p.dbias.col, sum);
  }
}
