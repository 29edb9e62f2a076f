// The gradient of a bias in 16-bit types by the tensor cores of compute capability 9.0, summed over
// the axes along which it was broadcast: the twin of reference/cpu/backward_bias.py.
//
// As backward_sm80_bias.cu, but for the products: a warpgroup has 64 of a tile's queries and all of
// its keys, and while the tensor cores multiply do and values, it makes scores into probabilities.
// All threads bring rows by copies of 16 bytes, for which any strides will do.
//
// Grid: as there.
// Shared memory: queries, keys, do and values, or at the end the sums; what is known of two tiles.
// BLOCK_Q is 64 times the warpgroups, BLOCK_KV one of the widths in ptx/wgmma.cuh.
#include "../common/params.cuh"
#include "../sm80/fragment_bias.cuh"
#include "warpgroup_rows.cuh"

namespace {

using fragment_bias::Known;
using fragment_bias::Passing;

constexpr int ROWS = 2;
constexpr int COLUMNS = BLOCK_KV / 4;

constexpr int Q_BYTES = fragment::row_bytes(D), DO_BYTES = fragment::row_bytes(D_V);
constexpr int SUMS_BYTES = BLOCK_Q * fragment_bias::STRIDE * 4;
constexpr int TILE_BYTES = matmul::larger((BLOCK_Q + BLOCK_KV) * (Q_BYTES + DO_BYTES), SUMS_BYTES);

struct alignas(1024) Swizzled {
  char x[1024];
};

static_assert(STORAGE < 2, "16-bit types");
static_assert(BLOCK_Q == THREADS / warpgroup::WARPGROUP_SIZE * warpgroup::WARPGROUP_ROWS,
              "BLOCK_Q, THREADS");
static_assert(SHARED_BYTES == TILE_BYTES + sizeof(Known), "SHARED_BYTES");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Swizzled shared_smem[];
  char* const q_smem = shared_smem[0].x;
  char* const k_smem = q_smem + BLOCK_Q * Q_BYTES;
  char* const do_smem = k_smem + BLOCK_KV * Q_BYTES;
  char* const v_smem = do_smem + BLOCK_Q * DO_BYTES;
  Known* const known_smem = reinterpret_cast<Known*>(q_smem + TILE_BYTES);

  if (threadIdx.x == 0) known_smem->own = bias_tile::BiasTile(p);
  __syncthreads();  // which tile of the bias it is
  const fragment_bias::Tiles tiles(p, *known_smem);
  const int warp_query = threadIdx.x / ptx::WARP_SIZE * 16;
  const int own_query = warpgroup::index() * warpgroup::WARPGROUP_ROWS;
  const fragment_gradient::Corner corner(warp_query, 0);
  const warpgroup::SmemDesc q =
      warpgroup::make_smem_desc(ptx::shared_address(q_smem) + own_query * Q_BYTES, 0);
  const warpgroup::SmemDesc k = warpgroup::make_smem_desc(ptx::shared_address(k_smem), 0);
  const warpgroup::SmemDesc d_out =
      warpgroup::make_smem_desc(ptx::shared_address(do_smem) + own_query * DO_BYTES, 0);
  const warpgroup::SmemDesc v = warpgroup::make_smem_desc(ptx::shared_address(v_smem), 0);
  fragment_gradient::RowStatistics numbers;
  const auto begin_scores = [&](const Passing& next) {
    warpgroup_rows::begin_queries<D>(q_smem, next.rows[0], next.at.i0, next.at.ni);
    warpgroup_rows::begin_rows<BLOCK_KV, D>(k_smem, next.rows[1], next.at.j0, next.at.nj);
    numbers.load(next.lse, next.delta, next.at.i0, next.at.ni);
  };
  const auto begin_gradients = [&](const Passing& next) {
    warpgroup_rows::begin_queries<D_V>(do_smem, next.rows[2], next.at.i0, next.at.ni);
    warpgroup_rows::begin_rows<BLOCK_KV, D_V>(v_smem, next.rows[3], next.at.j0, next.at.nj);
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
    ptx::cp_async_wait<1>();
    ptx::fence_proxy_async();
    __syncthreads();  // queries, keys, lse and delta, which other threads brought
    // 2 scores
    float s[ROWS][COLUMNS], dp[ROWS][COLUMNS];
    ptx::wgmma_fence();
    warpgroup::multiply<D, BLOCK_KV>(s, q, k);
    ptx::wgmma_commit();
    const fragment_tile::Tile next = tiles.next_from(now.first + 1);
    tiles.tell(next, 1 - slot);
    const TileBox box = passing.at.box();
    const bool masked = passing.masked();
    const HeadConstants given = tile::head_constants_of(p, box);
    unsigned int kept[ROWS], allowed[ROWS];
    if constexpr (HAS_DROPOUT)
      fragment_gradient::draw_dropout<false, COLUMNS>(p, box, corner, kept);
    if (masked) {
      fragment_gradient::evaluate_mask<false, COLUMNS>(p, box, passing.tile_class, corner, allowed);
    }
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(s);
    __syncthreads();  // queries and keys, which were read; what is known of the next tile
    if (next.rows > 0) begin_scores(coming);
    ptx::cp_async_commit();
    const auto begin_dp = [&] {
      ptx::cp_async_wait<1>();
      ptx::fence_proxy_async();
      __syncthreads();  // do and values, which other threads brought
      ptx::wgmma_fence();
      warpgroup::multiply<D_V, BLOCK_KV>(dp, d_out, v);
      ptx::wgmma_commit();
    };
    const bool hides = fragment_bias::weigh(p, given, scale, box, masked, allowed, s, corner,
                                            known_smem->lse[slot] + corner.row, begin_dp);
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(dp);
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

  float* const sums_smem = reinterpret_cast<float*>(q_smem);
  fragment_bias::put_sums(total, corner, sums_smem);
  __syncthreads();  // the sums, which other threads wrote
  bias_tile::store<fragment_bias::STRIDE>(p, known_smem->own, sums_smem);
}
