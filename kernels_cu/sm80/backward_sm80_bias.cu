// The gradient of a bias in 16-bit types by the tensor cores of compute capability 8.0 and later,
// summed over the axes along which it was broadcast: the twin of reference/cpu/backward_bias.py.
//
// One block per tile of the bias, as the bias is stored: it loops over the batch entries, heads and
// blocks that were given this tile, in that order, and recomputes their dS, which it adds up in
// float32 as it lies in registers.
//
// The operands of one tile are in shared memory. When a product has read its own, those of the next
// tile begin to come while the block goes on.
//
// Grid: prod(own_size) * bias_heads * ceil(bias_len_q / BLOCK_Q) * ceil(bias_len_k / BLOCK_KV);
// packed: own_size[0] is the bias's first axis, 1 or the number of sequences.
// Shared memory: queries, keys, do and values, in whose place the sums go at the end; what is known
// of two tiles. A warp has 16 or 32 queries and a multiple of 16 keys of a tile.
#include "../common/params.cuh"
#include "fragment_bias.cuh"
#include "fragment_product.cuh"

namespace {

using fragment::WARPS;
using fragment_bias::Known;
using fragment_bias::Passing;

constexpr int WARP_QUERIES = BLOCK_Q % 32 == 0 && BLOCK_Q <= 32 * WARPS ? 32 : 16;
constexpr int SHARERS = WARPS * WARP_QUERIES / BLOCK_Q;  // warps with the same queries
constexpr int WARP_KEYS = BLOCK_KV / SHARERS;
constexpr int ROWS = WARP_QUERIES / 8;
constexpr int COLUMNS = WARP_KEYS / 4;

constexpr int UNROLL = D <= 64 && D_V <= 64 ? 2 : 4;  // as far as registers go

constexpr int Q_BYTES = fragment::row_bytes(D), DO_BYTES = fragment::row_bytes(D_V);
constexpr int TILE_BYTES = (BLOCK_Q + BLOCK_KV) * (Q_BYTES + DO_BYTES);

static_assert(STORAGE < 2, "16-bit types");
static_assert(SHARERS * BLOCK_Q == WARPS * WARP_QUERIES, "BLOCK_Q, THREADS");
static_assert(WARP_KEYS % 16 == 0 && SHARERS * WARP_KEYS == BLOCK_KV, "BLOCK_KV, THREADS");
static_assert(BLOCK_Q * fragment_bias::STRIDE * 4 <= TILE_BYTES, "BLOCK_Q, BLOCK_KV");
static_assert(SHARED_BYTES == TILE_BYTES + sizeof(Known), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  char* const q_smem = reinterpret_cast<char*>(shared_smem);
  char* const k_smem = q_smem + BLOCK_Q * Q_BYTES;
  char* const do_smem = k_smem + BLOCK_KV * Q_BYTES;
  char* const v_smem = do_smem + BLOCK_Q * DO_BYTES;
  Known* const known_smem = reinterpret_cast<Known*>(v_smem + BLOCK_KV * DO_BYTES);

  if (threadIdx.x == 0) known_smem->own = bias_tile::BiasTile(p);
  __syncthreads();  // which tile of the bias it is
  const fragment_bias::Tiles tiles(p, *known_smem);
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const int warp_query = warp / SHARERS * WARP_QUERIES, warp_key = warp % SHARERS * WARP_KEYS;
  const fragment_gradient::Corner corner(warp_query, warp_key);
  fragment_gradient::RowStatistics numbers;
  const auto begin_scores = [&](const Passing& next) {
    fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem, next.rows[0], next.at.i0, next.at.ni);
    fragment::begin_rows<BLOCK_KV, D, Q_BYTES>(k_smem, next.rows[1], next.at.j0, next.at.nj);
    numbers.load(next.lse, next.delta, next.at.i0, next.at.ni);
  };
  const auto begin_gradients = [&](const Passing& next) {
    fragment::begin_rows<BLOCK_Q, D_V, DO_BYTES>(do_smem, next.rows[2], next.at.i0, next.at.ni);
    fragment::begin_rows<BLOCK_KV, D_V, DO_BYTES>(v_smem, next.rows[3], next.at.j0, next.at.nj);
  };

  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // once, and kept
  float total[ROWS][COLUMNS];
  matmul::clear(total);
  int slot = 0;
  fragment_tile::Tile now = tiles.next_from(0);
  tiles.tell(now, slot);
  __syncthreads();  // what is known of the tile
  if (now.rows > 0) {
    begin_scores(known_smem->passing[slot]);
    numbers.store(known_smem->lse[slot], known_smem->delta[slot]);
    ptx::cp_async_commit();
    begin_gradients(known_smem->passing[slot]);
  }
  ptx::cp_async_commit();
#pragma unroll 1
  while (now.rows > 0) {
    const Passing &passing = known_smem->passing[slot], &coming = known_smem->passing[1 - slot];
    const fragment_tile::Tile next = tiles.next_from(now.first + 1);
    tiles.tell(next, 1 - slot);
    // What hangs on places only comes first, while few registers are in use.
    const TileBox box = passing.at.box();
    const bool masked = passing.masked();
    const HeadConstants given = tile::head_constants_of(p, box);
    unsigned int kept[ROWS], allowed[ROWS];
    if constexpr (HAS_DROPOUT)
      fragment_gradient::draw_dropout<false, COLUMNS>(p, box, corner, kept);
    if (masked) {
      fragment_gradient::evaluate_mask<false, COLUMNS>(p, box, passing.tile_class, corner, allowed);
    }
    ptx::cp_async_wait<1>();
    __syncthreads();  // queries, keys, lse and delta, which other threads brought
    // 2 scores
    float s[ROWS][COLUMNS];
    fragment_product::multiply<D, UNROLL>(s, q_smem + warp_query * Q_BYTES,
                                          k_smem + warp_key * Q_BYTES);
    __syncthreads();  // queries and keys, which were read; what is known of the next tile
    if (next.rows > 0) begin_scores(coming);
    ptx::cp_async_commit();
    const bool hides = fragment_bias::weigh(p, given, scale, box, masked, allowed, s, corner,
                                            known_smem->lse[slot] + corner.row, [] {});
    ptx::cp_async_wait<1>();
    __syncthreads();  // do and values, which other threads brought
    float dp[ROWS][COLUMNS];
    fragment_product::multiply<D_V, UNROLL>(dp, do_smem + warp_query * DO_BYTES,
                                            v_smem + warp_key * DO_BYTES);
    if (next.rows > 0) numbers.store(known_smem->lse[1 - slot], known_smem->delta[1 - slot]);
    __syncthreads();  // do and values, which were read
    if (next.rows > 0) begin_gradients(coming);
    ptx::cp_async_commit();
    const fragment_gradient::PerQuery<false, ROWS, COLUMNS> delta(known_smem->delta[slot] +
                                                                  corner.row);
    fragment_gradient::score_gradients<false>(p, hides, s, dp, delta, kept, s);
    // 6 accumulate dbias
    matmul::add(total, s);
    slot = 1 - slot;
    now = next;
  }

  float* const sums_smem = reinterpret_cast<float*>(shared_smem);
  fragment_bias::put_sums(total, corner, sums_smem);
  __syncthreads();  // the sums, which other threads wrote
  bias_tile::store<fragment_bias::STRIDE>(p, known_smem->own, sums_smem);
}
