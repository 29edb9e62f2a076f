// The gradient of a bias in 16-bit types by the tensor cores of compute capability 8.0 and later,
// summed over the axes along which it was broadcast: the twin of reference/cpu/bias_gradient.py.
//
// One block per tile of the bias, as the bias is stored: it loops over the tiles of scores that
// were given this tile, and recomputes their dS, which it adds up in float32 as it lies in
// registers. If many share few tiles, several blocks have a part each, which backward_sums adds up
// in order. The loop is that of fragment_bias.cuh; here are its products.
//
// Grid: parts * prod(own_size) * bias_heads * ceil(bias_len_q / BLOCK_Q) *
// ceil(bias_len_k / BLOCK_KV); packed: own_size[0] is the bias's first axis, 1 or the number of
// sequences.
// Shared memory: q, k, do and v of one tile of scores, in whose place the sums go at the end, and
// fragment_bias::SharedStorage. A warp has 16 or 32 queries and a multiple of 16 keys of a tile.
#include "../common/params.cuh"
#include "../warp/fragment_bias.cuh"
#include "../warp/fragment_product.cuh"

namespace {

using fragment::WARPS;
using fragment_bias::ScoreTile;
using fragment_bias::SharedStorage;

constexpr int WARP_QUERIES = BLOCK_Q % 32 == 0 && BLOCK_Q <= 32 * WARPS ? 32 : 16;
constexpr int SHARERS = WARPS * WARP_QUERIES / BLOCK_Q;  // warps with the same queries
constexpr int WARP_KEYS = BLOCK_KV / SHARERS;
constexpr int ROWS = WARP_QUERIES / 8;
constexpr int COLUMNS = WARP_KEYS / 4;

constexpr int UNROLL = D <= 64 && D_V <= 64 ? 2 : 4;  // as far as registers go

constexpr int Q_BYTES = fragment::row_bytes(D), DO_BYTES = fragment::row_bytes(D_V);
constexpr int TILE_BYTES = (BLOCK_Q + BLOCK_KV) * (Q_BYTES + DO_BYTES);

static_assert(IS_FLOAT16 || IS_BFLOAT16, "16-bit types");
static_assert(SHARERS * BLOCK_Q == WARPS * WARP_QUERIES, "BLOCK_Q, THREADS");
static_assert(WARP_KEYS % 16 == 0 && SHARERS * WARP_KEYS == BLOCK_KV, "BLOCK_KV, THREADS");
static_assert(BLOCK_Q * fragment_bias::STRIDE * 4 <= TILE_BYTES, "BLOCK_Q, BLOCK_KV");
static_assert(SHARED_BYTES == TILE_BYTES + sizeof(SharedStorage), "SHARED_BYTES");

// The products of a warp.
struct Products {
  static constexpr bool ASYNC = false;
  char *q_smem, *k_smem, *do_smem, *v_smem;
  int warp_query, warp_key;

  __device__ __forceinline__ void load_q_k(const ScoreTile& tile) const {
    fragment::begin_rows<BLOCK_Q, D, Q_BYTES>(q_smem, tile.rows[0], tile.at.i0, tile.at.ni);
    fragment::begin_rows<BLOCK_KV, D, Q_BYTES>(k_smem, tile.rows[1], tile.at.j0, tile.at.nj);
  }
  __device__ __forceinline__ void load_do_v(const ScoreTile& tile) const {
    fragment::begin_rows<BLOCK_Q, D_V, DO_BYTES>(do_smem, tile.rows[2], tile.at.i0, tile.at.ni);
    fragment::begin_rows<BLOCK_KV, D_V, DO_BYTES>(v_smem, tile.rows[3], tile.at.j0, tile.at.nj);
  }
  __device__ __forceinline__ void publish() const {}
  __device__ __forceinline__ void issue_s(float (&s)[ROWS][COLUMNS]) const {
    fragment_product::multiply<D, UNROLL>(s, q_smem + warp_query * Q_BYTES,
                                          k_smem + warp_key * Q_BYTES);
  }
  __device__ __forceinline__ void issue_dp(float (&dp)[ROWS][COLUMNS]) const {
    fragment_product::multiply<D_V, UNROLL>(dp, do_smem + warp_query * DO_BYTES,
                                            v_smem + warp_key * DO_BYTES);
  }
  __device__ __forceinline__ void wait(float (&)[ROWS][COLUMNS]) const {}
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  char* const q_smem = reinterpret_cast<char*>(shared_smem);
  char* const k_smem = q_smem + BLOCK_Q * Q_BYTES;
  char* const do_smem = k_smem + BLOCK_KV * Q_BYTES;
  char* const v_smem = do_smem + BLOCK_Q * DO_BYTES;
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(v_smem + BLOCK_KV * DO_BYTES);

  if (threadIdx.x == 0) storage.bias = bias_tile::BiasTile(p);
  __syncthreads();  // which tile of the bias it is
  const fragment_bias::TileScheduler scheduler(p, storage);
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const int warp_query = warp / SHARERS * WARP_QUERIES, warp_key = warp % SHARERS * WARP_KEYS;
  const Products products{q_smem, k_smem, do_smem, v_smem, warp_query, warp_key};
  fragment_bias::run<ROWS, COLUMNS>(scheduler, products,
                                    fragment_gradient::Corner(warp_query, warp_key), q_smem);
}
