// The gradient of a bias in 16-bit types by the tensor cores of compute capability 9.0, summed over
// the axes along which it was broadcast: the twin of reference/cpu/bias_gradient.py.
//
// As backward_sm80_bias.cu, but for the products: a warpgroup has 64 of a tile's queries and all of
// its keys. While the tensor cores multiply q and k, it looks for the next tile; while they
// multiply do and v, it makes scores into probabilities. All threads load rows by copies of 16
// bytes, for which any strides will do; there is no producer.
//
// Grid: as there.
// Shared memory: q, k, do and v of one tile of scores, or at the end the sums, and
// fragment_bias::SharedStorage. BLOCK_Q is 64 times the warpgroups, BLOCK_KV one of the widths in
// ptx/wgmma.cuh.
#include "../common/params.cuh"
#include "../warp/fragment_bias.cuh"
#include "warpgroup_rows.cuh"

namespace {

using fragment_bias::ScoreTile;
using fragment_bias::SharedStorage;

constexpr int ROWS = 2;
constexpr int COLUMNS = BLOCK_KV / 4;

constexpr int Q_BYTES = fragment::row_bytes(D), DO_BYTES = fragment::row_bytes(D_V);
constexpr int SUMS_BYTES = BLOCK_Q * fragment_bias::STRIDE * 4;
constexpr int TILE_BYTES = matmul::larger((BLOCK_Q + BLOCK_KV) * (Q_BYTES + DO_BYTES), SUMS_BYTES);

struct alignas(1024) Swizzled {
  char x[1024];
};

static_assert(IS_FLOAT16 || IS_BFLOAT16, "16-bit types");
static_assert(BLOCK_Q == THREADS / warpgroup::WARPGROUP_SIZE * warpgroup::WARPGROUP_ROWS,
              "BLOCK_Q, THREADS");
static_assert(SHARED_BYTES == TILE_BYTES + sizeof(SharedStorage), "SHARED_BYTES");

// The products of a warpgroup.
struct Products {
  static constexpr bool ASYNC = true;
  char *q_smem, *k_smem, *do_smem, *v_smem;
  warpgroup::SmemDesc q, k, d_out, v;  // of the warpgroup's queries, and of all keys

  __device__ __forceinline__ void load_q_k(const ScoreTile& tile) const {
    warpgroup_rows::begin_queries<D>(q_smem, tile.rows[0], tile.at.i0, tile.at.ni);
    warpgroup_rows::begin_rows<BLOCK_KV, D>(k_smem, tile.rows[1], tile.at.j0, tile.at.nj);
  }
  __device__ __forceinline__ void load_do_v(const ScoreTile& tile) const {
    warpgroup_rows::begin_queries<D_V>(do_smem, tile.rows[2], tile.at.i0, tile.at.ni);
    warpgroup_rows::begin_rows<BLOCK_KV, D_V>(v_smem, tile.rows[3], tile.at.j0, tile.at.nj);
  }
  __device__ __forceinline__ void publish() const { ptx::fence_proxy_async(); }
  __device__ __forceinline__ void issue_s(float (&s)[ROWS][COLUMNS]) const {
    ptx::wgmma_fence();
    warpgroup::multiply<D, BLOCK_KV>(s, q, k);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void issue_dp(float (&dp)[ROWS][COLUMNS]) const {
    ptx::wgmma_fence();
    warpgroup::multiply<D_V, BLOCK_KV>(dp, d_out, v);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void wait(float (&product)[ROWS][COLUMNS]) const {
    ptx::wgmma_wait<0>();
    ptx::fence_accumulator(product);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Swizzled shared_smem[];
  char* const q_smem = shared_smem[0].x;
  char* const k_smem = q_smem + BLOCK_Q * Q_BYTES;
  char* const do_smem = k_smem + BLOCK_KV * Q_BYTES;
  char* const v_smem = do_smem + BLOCK_Q * DO_BYTES;
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(q_smem + TILE_BYTES);

  if (threadIdx.x == 0) storage.bias = bias_tile::BiasTile(p);
  __syncthreads();  // which tile of the bias it is
  const fragment_bias::TileScheduler scheduler(p, storage);
  const int first_query = warpgroup::index() * warpgroup::WARPGROUP_ROWS;
  const auto desc_of = [](const char* tile_smem) {
    return warpgroup::make_smem_desc(ptx::shared_address(tile_smem), 0);
  };
  const Products products{q_smem,
                          k_smem,
                          do_smem,
                          v_smem,
                          desc_of(q_smem + first_query * Q_BYTES),
                          desc_of(k_smem),
                          desc_of(do_smem + first_query * DO_BYTES),
                          desc_of(v_smem)};
  const fragment_gradient::Corner corner(threadIdx.x / ptx::WARP_SIZE * 16, 0);
  fragment_bias::run<ROWS, COLUMNS>(scheduler, products, corner, q_smem);
}
