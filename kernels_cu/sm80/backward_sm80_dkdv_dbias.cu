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
// There is no mask, but a bias of -inf hides a pair. Where the bias has some, and q, k or do of an
// entry are not finite, those values are left out of the products, and added one by one to dv and
// dk.
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
    const int lane = ptx::lane_index();
    if (lane >= PLACES || bias.begin_row + number >= bias.end_row) return;
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
    storage.place[number % AHEAD][lane] = Place(operand, offset * bytes_of(p, lane));
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

  const int ni = static_cast<int>(p.len_q), nj = static_cast<int>(p.len_k);
  const int warp = threadIdx.x / ptx::WARP_SIZE, warp_row = 16 * warp;
  const fragment_gradient::Corner corner(warp_row, 0);
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

  BiasWords bias;
  const bool hides = ptx::barrier_or(load_bias(p, storage.bias, corner, ni, nj, bias));  // places
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // read once, and kept
  float lse = 0;
  // Begins to copy an entry's rows, and asks for the lse of a query of this thread.
  const auto load = [&](int number) {
    const Place* const at = storage.place[number % AHEAD];
    char* const stage_smem = stages_smem + number % 2 * STAGE_BYTES;
    fragment::begin_rows<ROWS, D, ROW>(stage_smem + Q_AT, at[OF_Q].rows(p.q), 0, ni);
    fragment::begin_rows<ROWS, D, ROW>(stage_smem + K_AT, at[OF_K].rows(p.k), 0, nj);
    fragment::begin_rows<ROWS, D_V, ROW>(stage_smem + V_AT, at[OF_V].rows(p.v), 0, nj);
    fragment::begin_rows<ROWS, D_V, ROW>(stage_smem + DO_AT, at[OF_DO].rows(p.d_out), 0, ni);
    fragment::begin_rows<ROWS, D_V, ROW>(stage_smem + OUT_AT, at[OF_OUT].rows(p.out), 0, ni);
    lse = number::infinity();
    const int i = threadIdx.x;
    if (i < ni) lse = at[OF_LSE].statistic()[i * p.lse.row];
  };

  float total[2][COLUMNS];  // of dS
  matmul::clear(total);
  if (count > 0) load(0);
#pragma unroll 1
  for (int number = 0; number < count; ++number) {
    const Place* const at = storage.place[number % AHEAD];
    char* const stage_smem = stages_smem + number % 2 * STAGE_BYTES;
    char *const q_smem = stage_smem + Q_AT, *const k_smem = stage_smem + K_AT;
    char *const v_smem = stage_smem + V_AT, *const do_smem = stage_smem + DO_AT;
    char* const out_smem = stage_smem + OUT_AT;
    // Empty and missing rows have lse = inf, which makes p = 0.
    if (threadIdx.x < ROWS) {
      lse = lse == -number::infinity() ? number::infinity() : lse;
      storage.lse[threadIdx.x] = lse * number::LOG2_E<float>;
    }
    ptx::cp_async_wait_all();
    if constexpr (!OWN_PIECES) __syncthreads();  // out and do, copied by other threads
    write_delta(p, at, ni, do_smem, out_smem, storage.delta);
    bool has_nonfinite = false;
    if (hides) {
      has_nonfinite = !fragment::finite_rows<ROWS, D, ROW>(k_smem) ||
                      !fragment::finite_rows<ROWS, D, ROW>(q_smem) ||
                      !fragment::finite_rows<ROWS, D_V, ROW>(do_smem);
      has_nonfinite = ptx::barrier_or(has_nonfinite);  // as below
    } else {
      // The entry, copied by all threads; lse and delta; the stage and dS before, read by all.
      __syncthreads();
    }
    if (number + 1 < count) load(number + 1);
    if (warp == number % WARPS) entries.publish(number + 2);

    // 2 scores
    float s[2][COLUMNS];
    multiply<D>(s, k_smem + warp_row * ROW, q_smem);
    // 3 score mod
    // 4 mask
    // 5 probabilities and the gradient of the output's weights
    const bool misses_keys = warp_row + 16 > nj;
    unsigned int words[2][WORDS];
    exponentiate(s, scale, bias, storage.lse + corner.column);
    if (misses_keys || hides) mask_pairs(s, hides, bias, nj - corner.row);
    fragment::narrow(s, words);
    // 6 accumulate dv and dk
    char* const dv_rows = out_smem + warp_row * ROW;  // the warp's rows of results
    char* const dk_rows = v_smem + warp_row * ROW;
    char* const dq_rows = q_smem + warp_row * ROW;
    {
      float dv[2][V_COLUMNS];
      multiply_words<D_V>(dv, words, do_smem, has_nonfinite);
      put_result<D_V>(p.dv, at[OF_DV], p.kind_dv, dv, warp_row, nj, dv_rows);
    }
    float dp[2][COLUMNS];
    multiply<D_V>(dp, v_smem + warp_row * ROW, do_smem);
    subtract_delta(dp, storage.delta + corner.column);
    multiply_weights(dp, s);
    if (misses_keys || hides) keep_masked(dp, s);
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
      multiply_words<D>(dk, words, q_smem, has_nonfinite);
      matmul::scale(dk, unscaled);
      __syncwarp();  // the warp's values, read by all its lanes
      put_result<D>(p.dk, at[OF_DK], p.kind_dk, dk, warp_row, nj, dk_rows);
    }
    __syncthreads();  // dS, written by all warps; q, read by all
    {
      float dq[2][K_COLUMNS];
      multiply_ds(dq, ds_smem, warp, k_smem, has_nonfinite);
      matmul::scale(dq, unscaled);
      put_result<D>(p.dq, at[OF_DQ], p.kind_dq, dq, warp_row, ni, dq_rows);
    }
    // 7 scale and store
    __syncwarp();  // results, written by all lanes of the warp
    copy_result<D_V>(p.dv, at[OF_DV], p.kind_dv, warp_row, nj, dv_rows);
    copy_result<D>(p.dk, at[OF_DK], p.kind_dk, warp_row, nj, dk_rows);
    copy_result<D>(p.dq, at[OF_DQ], p.kind_dq, warp_row, ni, dq_rows);
  }
  store_total(p, storage.bias, corner, ni, nj, total);
  tile::count_tiles(p, static_cast<unsigned long long>(count));
}
