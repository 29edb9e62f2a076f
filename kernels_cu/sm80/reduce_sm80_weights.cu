// Sums of weights over queries, or over blocks of queries and keys, in 16-bit types by the tensor
// cores of compute capability 8.0 and later: the twin of `reduce_queries` in
// reference/cpu/reduce.py.
//
// As simt/reduce_blocks.cu, but for the products: a thread block owns the numbers of some keys, or
// of some blocks of keys, and of one block of queries. Keys are resident, in registers where these
// suffice, and the queries are streamed in their order through two stages: while one is multiplied,
// the next is copied. Sums are in float32; no weight is rounded before.
//
// A warp has 16 or 32 keys and all of a tile's queries. A thread adds up what it has of a key's
// weights, and four threads add up a key's at the end, so that every sum has one order.
//
// Grid: prod(own_size) * heads * blocks, with own_size = lead_size; blocks is the number of owners
// of a head. Shared memory: the keys, the stages, two sets of the queries' log-sum-exps, the sum of
// each key, SharedStorage. BLOCK_KV is 16 or 32 times the warps, BLOCK_Q a multiple of 16.
#include "../common/params.cuh"
#include "../simt/pair_values.cuh"
#include "../warp/fragment_gradient.cuh"
#include "../warp/fragment_product.cuh"

namespace {

constexpr int WARP_KEYS = BLOCK_KV / fragment::WARPS;
constexpr int M_TILES = WARP_KEYS / 16;
constexpr int ROWS = 2 * M_TILES;
// Queries of a tile are multiplied a part at a time, to save registers.
constexpr int PART_QUERIES = BLOCK_Q % 32 == 0 ? 32 : 16;
constexpr int COLUMNS = PART_QUERIES / 4;
constexpr int STEPS = fragment::whole_columns(D) / 16;
constexpr int ROW_BYTES = fragment::row_bytes(D);
constexpr int STAGE_BYTES = BLOCK_Q * ROW_BYTES;
constexpr bool K_IN_REGISTERS = 4 * M_TILES * STEPS <= 64;
constexpr int UNROLL = 4;

// What a block owns, in shared memory because the products fill the registers.
struct SharedStorage {
  layout::Entry entry;
  long long h;
  pair_values::OwnerRange range;
  memory::Rows q;
  memory::RowStatistic of_rows;
  float* found;
  fragment_tile::Classes classes;
};

static_assert(IS_FLOAT16 || IS_BFLOAT16, "16-bit types");
static_assert(WARP_KEYS * fragment::WARPS == BLOCK_KV && (M_TILES == 1 || M_TILES == 2),
              "BLOCK_KV, THREADS");
static_assert(BLOCK_Q % 16 == 0 && BLOCK_Q <= THREADS, "BLOCK_Q");
static_assert(SHARED_BYTES == BLOCK_KV * ROW_BYTES + 2 * STAGE_BYTES + 8 * BLOCK_Q + 4 * BLOCK_KV +
                                  static_cast<int>(sizeof(SharedStorage)),
              "SHARED_BYTES");

// The warp's keys as left operands, if they are in registers; else their place.
struct Keys {
  const char* warp_smem;
  unsigned int registers[K_IN_REGISTERS ? STEPS : 1][M_TILES][4];

  __device__ __forceinline__ void load() {
    if constexpr (!K_IN_REGISTERS) return;
    const auto rows = fragment::left_rows<ROW_BYTES>(warp_smem);
#pragma unroll
    for (int step = 0; step < (K_IN_REGISTERS ? STEPS : 1); ++step) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ptx::ldmatrix_x4(registers[step][m], rows.at(16 * m, step));
    }
  }

  // s = k q^T.
  __device__ __forceinline__ void multiply(float (&s)[ROWS][COLUMNS], const char* q_smem) const {
    if constexpr (!K_IN_REGISTERS) {
      fragment_product::multiply<D, UNROLL>(s, warp_smem, q_smem);
      return;
    }
    const auto rows = fragment::right_rows<ROW_BYTES>(q_smem);
    matmul::clear(s);
#pragma unroll
    for (int step = 0; step < (K_IN_REGISTERS ? STEPS : 1); ++step) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n += 4) {
        unsigned int right[4];
        ptx::ldmatrix_x4(right, rows.at(4 * n, step));
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          fragment::multiply_step(s, m, n, registers[step][m], right);
        }
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ ReduceParams t) {
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  char* const k_smem = reinterpret_cast<char*>(shared_smem);
  char* const stages_smem = k_smem + BLOCK_KV * ROW_BYTES;
  float* const lse_smem = reinterpret_cast<float*>(stages_smem + 2 * STAGE_BYTES);
  float* const taken_smem = lse_smem + 2 * BLOCK_Q;
  SharedStorage* const storage_smem = reinterpret_cast<SharedStorage*>(taken_smem + BLOCK_KV);

  const pair_values::Owner own = pair_values::owner_of(p, blockIdx.x);
  const layout::Quotient place = layout::divide(own.place, t.owners_k);
  const memory::Rows k =
      memory::rows(p.k, own.entry, layout::divide(own.h, p.group).quotient, true);
  if (threadIdx.x == 0) {
    storage_smem->entry = own.entry;
    storage_smem->h = own.h;
    storage_smem->range = pair_values::range_of(t, own.entry, place);
    storage_smem->q = memory::rows(p.q, own.entry, own.h, false);
    storage_smem->of_rows = memory::row_statistic(p.lse, own.entry, own.h);
    storage_smem->found = reinterpret_cast<float*>(t.found.data) +
                          layout::offset(t.found, own.entry, own.h, false) +
                          place.quotient * t.found.row;
  }
  __syncthreads();  // what the block owns, written by thread 0
  const pair_values::OwnerRange& range = storage_smem->range;

  const int warp_key = threadIdx.x / ptx::WARP_SIZE * WARP_KEYS;
  Keys keys{k_smem + warp_key * ROW_BYTES};
#pragma unroll 1
  for (long long j0 = range.j_begin; j0 < range.j_end; j0 += BLOCK_KV) {
    const int nj = tile::rows_from(j0, range.j_end, BLOCK_KV);
    // All threads have read the keys and queries before: they have met at the sums of keys.
    fragment::begin_rows<BLOCK_KV, D, ROW_BYTES>(k_smem, k, j0, nj);
    ptx::cp_async_commit();
    const auto describe = [&](long long first, int rows) {
      return tile::describe_tile(storage_smem->entry, storage_smem->h, range.i_begin + first, rows,
                                 j0, nj);
    };
    const auto next_from = [&](long long first) {
      return fragment_tile::next_tile<BLOCK_Q>(p, storage_smem->classes, first,
                                               range.i_end - range.i_begin, describe);
    };
    fragment_tile::Tile now = next_from(0);
    float lse = 0;  // of the thread's query of the tile that is being copied
    const auto copy = [&](const fragment_tile::Tile& tile, int stage) {
      const long long first = range.i_begin + tile.first;
      const memory::Rows& rows = storage_smem->q;
      const memory::Rows q{rows.data, rows.row, rows.col, rows.vectors};
      fragment::begin_rows<BLOCK_Q, D, ROW_BYTES>(stages_smem + stage * STAGE_BYTES, q, first,
                                                  tile.rows);
      const int i = threadIdx.x;
      lse = pair_values::usable_lse(p, storage_smem->of_rows, first + i, i < tile.rows);
    };
    const auto store_lse = [&](int stage) {
      if (threadIdx.x < BLOCK_Q) lse_smem[stage * BLOCK_Q + threadIdx.x] = lse;
    };
    if (now.rows > 0) {
      copy(now, 0);
      store_lse(0);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();  // the keys, copied by all threads
    keys.load();
    float taken[ROWS] = {};
    int stage = 0;
#pragma unroll 1
    while (now.rows > 0) {
      ptx::cp_async_wait_all();
      __syncthreads();  // the tile, copied by all threads, and the stage before, read by all
      const fragment_tile::Tile next = next_from(now.first + BLOCK_Q);
      // 1 load q and lse
      if (next.rows > 0) copy(next, 1 - stage);
      ptx::cp_async_commit();

      // The weight of a missing query is 0 (lse = inf), unless the score mod made its logit
      // infinite.
      const bool masked = now.tile_class == PARTIAL || (HAS_SCORE && now.rows < BLOCK_Q);
      const TileBox box = describe(now.first, now.rows);
      const float* const tile_lse_smem = lse_smem + stage * BLOCK_Q;
#pragma unroll 1
      for (int query = 0; query < BLOCK_Q; query += PART_QUERIES) {
        // 2 scores
        float s[ROWS][COLUMNS];
        keys.multiply(s, stages_smem + stage * STAGE_BYTES + query * ROW_BYTES);
        // 3 score mod
        // 4 mask
        // 5 values
        const fragment_gradient::Corner corner(warp_key, query);
        const unsigned int kept[ROWS] = {};
        unsigned int weights[ROWS][COLUMNS / 2];  // which nobody reads
        fragment_gradient::recompute_probabilities<true, 0>(p, box, now.tile_class, masked, s,
                                                            corner, tile_lse_smem + corner.column,
                                                            kept, weights, nullptr);
        // 6 take values
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r) taken[r] += s[r][n];
        }
      }
      if (next.rows > 0) store_lse(1 - stage);
      stage = 1 - stage;
      now = next;
    }

    // 7 store
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float sum = taken[r];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if (ptx::lane_index() % 4 == 0) taken_smem[warp_key + fragment::lane_row() + 8 * r] = sum;
    }
    __syncthreads();  // the sum of each key, written by other threads
    pair_values::store_blocks(t, pair_values::SUM, storage_smem->found, j0, j0 == range.j_begin, nj,
                              taken_smem);
  }
  ptx::cp_async_wait_all();
}
