// Tiled attention, backward, of small heads whose queries and keys are one tile and that have a
// bias which batch entries share, in 16-bit types by the tensor cores of compute capability 8.0 and
// later: the twin of `backward_delta`, `backward_dkdv`, `backward_dq` and `add_to_bias` in
// reference/cpu, in one launch.
//
// FlashAttention-2 (Dao 2023), Algorithm 2, of which both loops have one step. A block has a head
// and a part of the batch entries, one after the other: it computes delta, dq, dk and dv of each,
// and keeps the sum of their dS, which is its part of the gradient of the bias, in registers, as it
// does the bias itself. Other kernels would compute dS once more for that sum. backward_sums.cu
// adds up the parts in order.
//
// A warp has 16 keys: P and dS are left operands of the products for dv and dk as they lie in
// registers, and only dS goes through shared memory, for dq, of which a warp has 16 queries. So an
// entry takes two barriers, and while it is computed, the operands of the next one are copied.
// Results leave by way of rows that no other warp reads any more.
//
// There is no mask, but a bias of -inf hides a pair. Where the bias has some, and elements of an
// entry are not finite, or very large, it takes a way of its own: values that are not finite are
// left out of the products, and added one by one to dv and dk.
//
// Grid: as many blocks as tiles of the bias, for each part. Shared memory: two stages of q, k, v,
// do and out, dS, lse and delta, and little.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "dkdv_dbias.cuh"

namespace {

using namespace dkdv_dbias;

// Which of a block's entries is computed: the places of its rows are known two entries ahead.
struct Entries {
  const Params& p;
  Storage& storage;

  // Writes the places of entry `number` of the block's part, by the lanes of a warp; a barrier has
  // to follow.
  __device__ __forceinline__ void publish(int number) const {
    const bias_tile::BiasTile& bias = storage.bias;
    if (bias.begin_row + number >= bias.end_row) return;
    const int lane = ptx::lane_index();
    const layout::Quotient by_head = layout::divide(bias.begin_row + number, bias.heads(p));
    const long long h = bias.one_head ? by_head.remainder : bias.head;
    const Operand& operand = operand_of(p, lane);
    long long offset = h * operand.head, rest = by_head.quotient;
#pragma unroll
    for (int axis = MAX_LEAD - 1; axis >= 0; --axis) {
      long long at = bias.first.lead[axis];
      if (p.own_size[axis] != p.lead_size[axis]) {
        const layout::Quotient by_axis = layout::divide(rest, p.lead_size[axis]);
        at = by_axis.remainder;
        rest = by_axis.quotient;
      }
      offset += at * operand.lead[axis];
    }
    const int bytes = lane < ARRAYS ? sizeof(storage_t) : sizeof(accum_t);
    const Place place(operand, offset * bytes);
    const bool prevents = lane < ARRAYS && !place.has_vectors(operand);
    const bool vectors = !ptx::any_lane(prevents);
    if (lane < PLACES) storage.place[number % AHEAD][lane] = place;
    if (lane == 0) storage.vectors[number % AHEAD] = vectors;
  }
};

// What a block keeps while it computes one entry after the other.
struct Kept {
  const fragment_gradient::Corner corner;  // of the warp's keys
  const int warp, ni, nj;
  const float scale;
  BiasWords bias;
  float total[2][COLUMNS];  // of dS

  __device__ __forceinline__ Kept(const Params& p, int warp)
      : corner(16 * warp, 0),
        warp(warp),
        ni(static_cast<int>(p.len_q)),
        nj(static_cast<int>(p.len_k)),
        scale(ptx::shuffle(static_cast<float>(p.scale), 0)) {  // read once
    matmul::clear(total);
  }

  // Computes the gradients of the entry of a stage.
  template <bool EXACT>
  __device__ __forceinline__ void compute(const Params& p, Storage& storage, int number,
                                          char* stage_smem, char* ds_smem) {
    const int warp_row = 16 * warp;
    char *const q_smem = stage_smem + Q_AT, *const k_smem = stage_smem + K_AT;
    char *const v_smem = stage_smem + V_AT, *const do_smem = stage_smem + DO_AT;
    // The warp's rows of results.
    char* const dv_smem = stage_smem + OUT_AT + warp_row * ROW;
    char *const dk_smem = v_smem + warp_row * ROW, *const dq_smem = q_smem + warp_row * ROW;
    // 2 scores
    float s[2][COLUMNS];
    multiply<D>(s, k_smem + warp_row * ROW, q_smem);
    // 3 score mod
    // 4 mask
    // 5 probabilities and the gradient of the output's weights
    unsigned int words[2][WORDS];
    exponentiate(s, scale, bias, storage.lse + corner.column);
    if constexpr (EXACT) mask_pairs(s, bias);
    fragment::narrow(s, words);
    // 6 accumulate dv and dk
    {
      float dv[2][V_COLUMNS];
      multiply_words<D_V, EXACT>(dv, words, do_smem);
      put_result(dv, dv_smem);
    }
    float dp[2][COLUMNS];
    multiply<D_V>(dp, v_smem + warp_row * ROW, do_smem);
    subtract_delta(dp, storage.delta + corner.column);
    multiply_weights(dp, s);
    if constexpr (EXACT) keep_masked(dp, s);
    matmul::add(total, dp);
    fragment_gradient::DsScale ds_scale;
    if constexpr (fragment::Mma::SCALES_DS) {
      const float of_warp = fragment_gradient::largest_finite(dp);
      if (ptx::lane_index() == 0) storage.largest[warp] = of_warp;
      __syncthreads();  // the warps' largest |dS|
      ds_scale = scale_for(storage.largest);
    }
    fragment_gradient::narrow(dp, ds_scale.factor, words);
    fragment_gradient::store_words<DS_ROW>(words, corner, ds_smem);
    const float unscaled = ds_scale.inverse() * scale;
    {
      float dk[2][K_COLUMNS];
      multiply_words<D, EXACT>(dk, words, q_smem);
      matmul::scale(dk, unscaled);
      __syncwarp();  // the warp's values, read by all its lanes
      put_result(dk, dk_smem);
    }
    __syncthreads();  // dS, written by all warps; q, read by all
    {
      float dq[2][K_COLUMNS];
      multiply_ds<EXACT>(dq, ds_smem, warp, k_smem);
      matmul::scale(dq, unscaled);
      put_result(dq, dq_smem);
    }
    // 7 scale and store
    __syncwarp();  // results, written by all lanes of the warp
    const Place* const at = storage.place[number % AHEAD];
    if (storage.vectors[number % AHEAD]) {
      copy_results<true>(p, at, warp_row, ni, nj, dq_smem, dk_smem, dv_smem);
    } else {
      copy_results<false>(p, at, warp_row, ni, nj, dq_smem, dk_smem, dv_smem);
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  char* const stages_smem = reinterpret_cast<char*>(shared_smem);
  char* const ds_smem = stages_smem + 2 * STAGE_BYTES;
  Storage& storage = *reinterpret_cast<Storage*>(ds_smem + DS_BYTES);
  const Entries entries{p, storage};

  const int warp = threadIdx.x / ptx::WARP_SIZE;
  if (threadIdx.x == 0) storage.bias = bias_tile::BiasTile(p);
  // Columns of dS that no warp writes are read for rows of dq that do not exist.
  for (int n = threadIdx.x; n < DS_BYTES / 4; n += THREADS) {
    reinterpret_cast<unsigned int*>(ds_smem)[n] = 0;
  }
  __syncthreads();  // the block's tile, written by thread 0
  if (warp < 2) entries.publish(warp);
  const int count = static_cast<int>(storage.bias.end_row - storage.bias.begin_row);
  ptx::wait_for_grids();
  ptx::launch_dependents();

  Kept kept(p, warp);
  const int ni = kept.ni, nj = kept.nj;
  const bool loaded = load_bias(p, storage.bias, kept.corner, ni, nj, kept.bias);
  const bool hides = ptx::barrier_or(loaded);  // and the places, written by two warps
  float lse = 0;
  // Begins to copy an entry's rows, and asks for the lse of a query of this thread.
  const auto load = [&](int number) {
    const Place* const at = storage.place[number % AHEAD];
    char* const stage_smem = stages_smem + number % 2 * STAGE_BYTES;
    if (storage.vectors[number % AHEAD]) {
      begin_entry<true>(p, at, ni, nj, stage_smem);
    } else {
      begin_entry<false>(p, at, ni, nj, stage_smem);
    }
    lse = number::infinity();
    const int i = threadIdx.x;
    if (i < ni) lse = at[OF_LSE].statistic()[i * p.lse.row];
  };

  if (count > 0) load(0);
#pragma unroll 1
  for (int number = 0; number < count; ++number) {
    char* const stage_smem = stages_smem + number % 2 * STAGE_BYTES;
    char *const do_smem = stage_smem + DO_AT, *const out_smem = stage_smem + OUT_AT;
    // Empty and missing rows have lse = inf, which makes p = 0.
    if (threadIdx.x < ROWS) {
      lse = lse == -number::infinity() ? number::infinity() : lse;
      storage.lse[threadIdx.x] = lse * number::LOG2_E<float>;
    }
    bool is_exact = lse != lse;
    ptx::cp_async_wait_all();
    if constexpr (!OWN_PIECES) __syncthreads();  // out and do, copied by other threads
    is_exact |=
        !write_delta(p, storage.place[number % AHEAD], ni, do_smem, out_smem, storage.delta);
    // The entry, copied by all threads; lse and delta; the stage and dS before, read by all.
    if (hides) {
      is_exact = is_exact || has_large<D>(stage_smem + Q_AT) || has_large<D>(stage_smem + K_AT) ||
                 has_large<D_V>(stage_smem + V_AT) || has_large<D_V>(do_smem);
      is_exact = ptx::barrier_or(is_exact);
    } else {
      is_exact = false;
      __syncthreads();
    }
    if (number + 1 < count) load(number + 1);
    if (warp == number % WARPS) entries.publish(number + 2);
    if (is_exact) {
      kept.compute<true>(p, storage, number, stage_smem, ds_smem);
      // Again, so that it has no registers in the meantime: with it, the usual way would spill.
      load_bias(p, storage.bias, kept.corner, ni, nj, kept.bias);
    } else {
      kept.compute<false>(p, storage, number, stage_smem, ds_smem);
    }
  }
  store_total(p, storage.bias, kept.corner, ni, nj, kept.total);
  tile::count_tiles(p, static_cast<unsigned long long>(count));
}
