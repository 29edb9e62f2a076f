// Tiled attention, backward, gradients of keys and values in 16-bit types by the tensor cores of
// compute capability 9.0: the twin of `backward_dkdv` in reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2: a block of keys and values stays, and tiles of queries
// are streamed through shared memory. The sum runs over the batch entries that share the keys, the
// group's heads and the tiles of queries, in that order. No two blocks write the same result, so it
// does not depend on their order. With ATOMIC_DQ the kernel also multiplies dS and the keys, and
// adds the product to float32 sums of dq in global memory, which are 0 at first, in any order of
// the blocks; backward_dq_rows.cu makes rows of them.
//
// The last warpgroup is the producer: one thread issues the TMA loads of q and do, and the
// statistics warp brings lse and delta. The first two are the consumers, each with 64 of the
// block's keys. S and dP are keys by queries, so that P and dS lie in registers as left operands of
// the products with do and q (FlashAttention-3: Shah et al. 2024); only for dq does dS go through
// shared memory. The consumers of wide heads share 64 keys: P goes there, too, and each has half of
// the columns of dk, dv and dq. Where nothing but the product for dq makes consumers wait for each
// other, it is deferred: they take turns to multiply a tile's dS during the next tile, while the
// other one goes ahead.
//
// Grid: prod(own_size) * heads_kv * blocks; packed: heads_kv * blocks. Shared memory:
// SharedStorage. BLOCK_KV is 128, or 64 for wide heads, BLOCK_Q 64. Behind the parameters come the
// tensor maps of q, k, v, do and, with TMA_STORE, dk and dv.
#include "../common/params.cuh"
#include "backward_consumer.cuh"

namespace {

using backward_consumer::Consumer;
using namespace backward_pipeline;

constexpr int PRODUCER_REGS = 24, CONSUMER_REGS = 240;

struct alignas(1024) Swizzled {
  char x[1024];
};

static_assert(CONSUMERS == 2 && BLOCK_Q == 64, "THREADS, BLOCK_Q");
static_assert(!TMA_STORE || !PACKED, "TMA_STORE");
static_assert(SHARED_BYTES == sizeof(SharedStorage), "SHARED_BYTES");

// Issues the TMA loads of the block's keys and values, by one thread, which initialises their
// barrier itself, so that they come as soon as may be.
__device__ __forceinline__ void load_keys(const Params& p, const layout::WorkTile& work,
                                          const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                          SharedStorage& storage) {
  const unsigned int kv_full = ptx::shared_address(&storage.kv_full);
  ptx::mbarrier_init(kv_full, 1);
  ptx::fence_mbarrier_init();
  ptx::mbarrier_arrive_expect_tx(kv_full, KEY_TILES * (K_BYTES + V_BYTES));
  const warpgroup::TmaHead k(p.k, work.entry, work.head), v(p.v, work.entry, work.head);
  const long long first = work.entry.start_k + work.block * BLOCK_KV;
  warpgroup_gradient::tma_load_keys<D>(ptx::shared_address(storage.k[0]), k_map, k, first, kv_full);
  warpgroup_gradient::tma_load_keys<D_V>(ptx::shared_address(storage.v), v_map, v, first, kv_full);
}

// The producer: issues the TMA loads of q and do of every tile, by one thread.
__device__ __forceinline__ void producer(const ptx::TensorMap& q_map, const ptx::TensorMap& do_map,
                                         SharedStorage& storage) {
  for_each_tile(storage, [&](const Span& span, int tile, const PipelineState& state) {
    const long long first = span.entry.start_q + first_query(tile);
    const unsigned int q_full = storage.q_pipeline.full_barrier(state);
    const unsigned int do_full = storage.do_full_barrier(state);
    storage.q_pipeline.wait_empty(state);
    ptx::mbarrier_arrive_expect_tx(q_full, Q_BYTES);
    warpgroup::tma_load_tile<BLOCK_Q, D>(ptx::shared_address(storage.q[state.index]), q_map, span.q,
                                         first, q_full);
    ptx::mbarrier_arrive_expect_tx(do_full, DO_BYTES);
    warpgroup::tma_load_tile<BLOCK_Q, D_V>(ptx::shared_address(storage.d_out[state.index]), do_map,
                                           span.d_out, first, do_full);
  });
}

// Takes the steps of all tiles of span n, after it has published the next span.
__device__ __forceinline__ void run_span(Consumer& consumer, unsigned int n) {
  SharedStorage& storage = consumer.storage;
  publish_span(consumer.p, storage, n + 1);
  const PipelineState state(n);
  storage.span_pipeline.wait_full(state);
  const Span& span = storage.span[state.index];
  const HeadConstants given =
      tile::head_constants_of(consumer.p, span.box_of(0, storage.j0, storage.nj));
  // From this tile on queries are missing, or keys of all tiles.
  const int whole = storage.nj < BLOCK_KV ? 0 : span.whole;
  // The last one of a run of FULL tiles: up to it the next tile is known without a look at bits.
  int last = HAS_MASK ? -1 : span.end - 1;
  const auto next_tile = [&](int index) {
    if ((HAS_EDGES || !HAS_MASK) && index <= last) return 4 * index + FULL;
    const int tile = span.next_tile(index);
    if (HAS_EDGES && tile != NO_TILE && class_of(tile) == FULL) {
      last = span.last_of_full(index_of(tile));
    }
    return tile;
  };
#pragma unroll 1
  for (int tile = next_tile(span.first); tile != NO_TILE;
       tile = next_tile(index_of(tile) + 1), ++consumer.tile_number) {
    if (backward_consumer::SPLIT_FULL_TILES && class_of(tile) == FULL && index_of(tile) < whole) {
      backward_consumer::run_step<false>(consumer, span, given, tile, whole);
    } else {
      backward_consumer::run_step<true>(consumer, span, given, tile, whole);
    }
  }
  ptx::mbarrier_arrive(storage.span_pipeline.empty_barrier(state));
}

// The epilogue where TMA stores the results. A warp stages its rows of dv in place of its own
// values, which no other warp reads, and then those of dk in place of its keys; or of both after
// all have read them, where consumers share keys.
__device__ __forceinline__ void tma_store_dkdv(const Consumer& consumer,
                                               const ptx::TensorMap& dk_map,
                                               const ptx::TensorMap& dv_map, float keep_scale) {
  const Params& p = consumer.p;
  SharedStorage& storage = consumer.storage;
  const layout::Entry& entry = storage.entry;
  const int h_kv = storage.h_kv, key_tile = consumer.key_tile;
  const long long first = storage.j0 + key_tile * warpgroup::WARPGROUP_ROWS;
  if constexpr (SHARE_KEYS) consumers_sync();  // the keys and values, which all have read
  warpgroup_gradient::tma_store_rows<D_V>(consumer.dv, consumer.v_share, keep_scale,
                                          ptx::shared_address(storage.v + key_tile * V_BYTES),
                                          dv_map, warpgroup::TmaHead(p.dv, entry, h_kv), first);
  if constexpr (!SHARE_KEYS) consumers_sync();  // the keys, which all have read for dq
  warpgroup_gradient::tma_store_rows<D>(consumer.dk, consumer.k_share, static_cast<float>(p.scale),
                                        ptx::shared_address(storage.k[0] + key_tile * K_BYTES),
                                        dk_map, warpgroup::TmaHead(p.dk, entry, h_kv), first);
  if (ptx::lane_index() == 0) ptx::tma_store_wait_read();
}

// The epilogue of packed sequences, of types that are to be summed on, and of rows that no TMA can
// store.
__device__ __forceinline__ void copy_dkdv(const Consumer& consumer, float keep_scale) {
  const Params& p = consumer.p;
  SharedStorage& storage = consumer.storage;
  const layout::Entry& entry = storage.entry;
  const int h_kv = storage.h_kv, nj = storage.nj;
  const long long j0 = storage.j0;
  const warpgroup_gradient::ResultRows<D> dk_rows(p.dk, p.kind_dk, entry, h_kv, j0, nj,
                                                  storage.k[0]);
  const warpgroup_gradient::ResultRows<D_V> dv_rows(p.dv, p.kind_dv, entry, h_kv, j0, nj,
                                                    storage.v);
  consumers_sync();  // the keys and values, in whose place the results go
  dk_rows.put(consumer.dk, consumer.corner.row, consumer.k_share, static_cast<float>(p.scale));
  dv_rows.put(consumer.dv, consumer.corner.row, consumer.v_share, keep_scale);
  consumers_sync();  // the results, which other threads wrote
  dk_rows.copy_out();
  dv_rows.copy_out();
}

// A consumer: all tiles of queries, and the epilogue.
__device__ __forceinline__ void consumer(const Params& p, const ptx::TensorMap& dk_map,
                                         const ptx::TensorMap& dv_map, SharedStorage& storage) {
  float dk[2][warpgroup_gradient::ColumnShare<D>::COLUMNS];
  float dv[2][warpgroup_gradient::ColumnShare<D_V>::COLUMNS];
  Consumer state(p, storage, dk, dv);
  publish_span(p, storage, 0);
  state.prepare_keys();
#pragma unroll 1
  for (unsigned int n = 0; n < storage.spans; ++n) run_span(state, n);
  if (DEFER_DQ && state.deferred_gmem != nullptr) {
    state.accumulate_deferred_dq(state.index, state.index + 1, true);
  }
  // 7 scale and store
  if constexpr (IS_FLOAT16) matmul::scale(dk, state.warp_scale.inverse());
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  if constexpr (TMA_STORE) {
    tma_store_dkdv(state, dk_map, dv_map, keep_scale);
  } else {
    copy_dkdv(state, keep_scale);
  }
  tile::count_tiles(p, state.visited);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ ptx::TensorMap v_map,
                const __grid_constant__ ptx::TensorMap do_map,
                const __grid_constant__ ptx::TensorMap dk_map,
                const __grid_constant__ ptx::TensorMap dv_map) {
  extern __shared__ Swizzled shared_smem[];
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared_smem[0].x);
  const layout::WorkTile work = layout::work_tile_of(p, layout::interleave_heads(p, blockIdx.x),
                                                     p.heads_kv, true, BLOCK_KV, false);
  if (work.idle) return;
  if (threadIdx.x == 0) publish_block(p, work, storage);
  if (threadIdx.x == ptx::WARP_SIZE) storage.init_barriers();
  if (threadIdx.x == CONSUMER_THREADS) load_keys(p, work, k_map, v_map, storage);
  __syncthreads();  // what is known of the block, and the barriers

  if (warpgroup::index() == CONSUMERS) {
    ptx::setmaxnreg_dec<PRODUCER_REGS>();
    const int warp = threadIdx.x / ptx::WARP_SIZE % 4;
    if (warp == 0 && ptx::lane_index() == 0) producer(q_map, do_map, storage);
    if (warp == 1) statistics_warp(storage);
    return;
  }

  ptx::setmaxnreg_inc<CONSUMER_REGS>();
  consumer(p, dk_map, dv_map, storage);
}
