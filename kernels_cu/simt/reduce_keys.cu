// Statistics of each query's weights or logits over its keys, on any GPU: the twin of `reduce_keys`
// in reference/cpu/reduce.py.
//
// A block of queries is resident, the keys are streamed. A thread adds the values of its own keys
// in their order, and threads that share rows add theirs at the end, so that a sum has one order.
// With TOP, a thread has a row, and inserts its keys into a sorted list in global memory.
//
// Grid: prod(own_size) * heads * blocks, with own_size = lead_size.
// Shared memory: the queries, a tile of logits (and one of an expression's values), the stage.
// BLOCK_Q is a multiple of ROW_THREADS, BLOCK_KV of COLUMN_THREADS and of 4.
#include "../common/params.cuh"
#include "pair_values.cuh"

namespace {

constexpr int ROWS = BLOCK_Q / ROW_THREADS;
constexpr int COLUMNS = BLOCK_KV / COLUMN_THREADS;
constexpr int Q_STRIDE = matmul::odd_stride(matmul::whole_columns(D));
constexpr int STRIDE = matmul::odd_stride(BLOCK_KV);
constexpr int TILE = BLOCK_Q * STRIDE;
constexpr int TILES = HAS_DSCORE ? 2 : 1;
constexpr int BUFFER = BLOCK_KV * matmul::odd_stride(matmul::chunk_columns(D));
constexpr int SHARED_ELEMENTS = BLOCK_Q * Q_STRIDE + TILES * TILE + 2 * BUFFER;
constexpr int UNROLL = 1;  // limited by registers

static_assert(THREADS % 32 == 0 && ROWS * ROW_THREADS == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(BLOCK_Q <= THREADS, "a thread has a row at most");
static_assert(COLUMNS * COLUMN_THREADS == BLOCK_KV && BLOCK_KV % 4 == 0, "BLOCK_KV");
static_assert(SHARED_BYTES == SHARED_ELEMENTS * sizeof(accum_t), "SHARED_BYTES");

// Whether a value comes before another one in falling order: NaN is the largest.
__device__ __forceinline__ bool is_before(accum_t value, accum_t other) {
  return value > other || (value != value && other == other);
}

// Inserts a tile's keys, from j0 on, into the list of a query: its values in falling order, and
// their keys, -1 where a place is free. `least` is the last value of the list.
__device__ void insert_keys(const accum_t* logits_smem, const accum_t* values_smem, long long j0,
                            int nj, long long count, accum_t* values, long long* keys,
                            accum_t& least) {
#pragma unroll 1
  for (int n = 0; n < nj; ++n) {
    const accum_t value = values_smem[n];
    if (value < least || logits_smem[n] == -number::infinity()) continue;
    long long at = count - 1;
    // A value may be -inf, and comes after no place that is taken.
    if (keys[at] >= 0 && !is_before(value, values[at])) continue;
#pragma unroll 1
    for (; at > 0 && (keys[at - 1] < 0 || is_before(value, values[at - 1])); --at) {
      values[at] = values[at - 1];
      keys[at] = keys[at - 1];
    }
    values[at] = value;
    keys[at] = j0 + n;
    least = values[count - 1];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ ReduceParams t) {
  const Params& p = t.call;
  extern __shared__ Vector shared_smem[];
  accum_t* const q_smem = reinterpret_cast<accum_t*>(shared_smem);
  accum_t* const tile_smem = q_smem + BLOCK_Q * Q_STRIDE;
  accum_t* const value_smem = tile_smem + (TILES - 1) * TILE;
  accum_t* const stage_smem = tile_smem + TILES * TILE;

  matmul::Stage<BUFFER> stage{stage_smem};
  const layout::WorkTile work = layout::work_tile_of(p, blockIdx.x, p.heads, false, BLOCK_Q, true);
  if (work.idle) return;
  const layout::Entry& entry = work.entry;
  const long long h = work.head;
  const long long i0 = work.block * BLOCK_Q;
  const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
  const memory::Rows k = memory::rows(p.k, entry, h / p.group, true);
  const long long offset = layout::offset(t.found, entry, h, false) + i0 * t.found.row;
  accum_t* const found = reinterpret_cast<accum_t*>(t.found.data) + offset;
  long long* const keys = reinterpret_cast<long long*>(t.keys) + offset;

  // 1 load q and lse
  memory::load_rows<BLOCK_Q, matmul::whole_columns(D), Q_STRIDE, D>(
      q_smem, memory::rows(p.q, entry, h, false), i0, ni);
  accum_t lse[ROWS], taken[ROWS];
  const memory::RowStatistic of_rows = memory::row_statistic(p.lse, entry, h);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = matmul::row_thread() + ROW_THREADS * r;
    lse[r] = pair_values::usable_lse(p, of_rows, i0 + row, row < ni);
    taken[r] = pair_values::of_none(t.by);
  }
  accum_t least = -number::infinity();
  if (t.by == pair_values::TOP && threadIdx.x < ni) {
    for (long long n = threadIdx.x * t.found.row; n < (threadIdx.x + 1) * t.found.row; ++n) {
      found[n] = least;
      keys[n] = -1;
    }
  }

#pragma unroll 1
  for (long long j0 = 0; j0 < entry.len_k; j0 += BLOCK_KV) {
    const int nj = tile::rows_from(j0, entry.len_k, BLOCK_KV);
    const TileBox box = tile::describe_tile(entry, h, i0, ni, j0, nj);
    const int tile_class = tile::classify_tile(p, box);
    if (tile_class == EMPTY) continue;

    // 2 scores
    accum_t s[ROWS][COLUMNS];
    matmul::multiply_rows<BLOCK_KV, D, Q_STRIDE, UNROLL>(s, q_smem, k, j0, nj, stage);
    // 3 score mod
    // 4 mask
    // 5 values
    pair_values::evaluate<false, STRIDE, true>(t, box, tile_class, s, tile_smem, value_smem,
                                               [&](int r, int) { return lse[r]; });
    // 6 take values
    if (t.by == pair_values::TOP) {
      __syncthreads();  // logits and values, written by other threads; the barriers of the next
                        // product keep others from overwriting what this thread reads
      if (threadIdx.x < ni) {
        const int row = threadIdx.x;
        insert_keys(tile_smem + row * STRIDE, value_smem + row * STRIDE, j0, nj, t.found.row,
                    found + row * t.found.row, keys + row * t.found.row, least);
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) taken[r] = pair_values::take(t.by, taken[r], s[r][n]);
      }
    }
  }
  if (t.by == pair_values::TOP) return;

  // 7 store
  const accum_t sink =
      p.sink == nullptr ? -number::infinity() : number::load<accum_t>(p.sink, p.kind_sink, h);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = matmul::row_thread() + ROW_THREADS * r;
    accum_t value = pair_values::take_over_columns(t.by, taken[r]);
    if (t.of == pair_values::OF_ENTROPY && sink != -number::infinity()) {
      const accum_t below = gradient_tile::at_most_zero(sink - lse[r]);
      value += pair_values::part_of_entropy(softmax::exponential(below), below);
    }
    if (matmul::column_thread() == 0 && row < ni) found[row * t.found.row] = value;
  }
}
