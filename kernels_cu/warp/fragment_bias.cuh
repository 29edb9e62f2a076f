// What backward_sm80_bias.cu and backward_sm90_bias.cu share, which is all but the products: the
// tiles of scores to which a block's tile of the bias was added, one after the other, and the loop
// that adds up their dS.
#pragma once
#include "../common/bias_tile.cuh"
#include "fragment_gradient.cuh"
#include "fragment_tile.cuh"

namespace fragment_bias {

constexpr int STRIDE = BLOCK_KV + 8;  // numbers between rows of sums in shared memory

// -- tiles of scores ------------------------------------------------------------------------------

// Where a tile of scores lies, and its rows that exist.
struct Position {
  layout::Entry entry;
  long long h, i0, j0;
  int ni, nj;

  __device__ __forceinline__ TileBox box() const {
    return tile::describe_tile(entry, h, i0, ni, j0, nj);
  }
};

// A tile of scores and its operands.
struct ScoreTile {
  Position at;
  int tile_class;
  memory::Rows rows[4];  // of q, k, do and v
  memory::RowStatistic lse, delta;

  __device__ __forceinline__ bool masked() const {
    return tile_class == PARTIAL || at.nj < BLOCK_KV || at.ni < BLOCK_Q;
  }
};

// The block's tile of the bias, where that has 16 bits: the same for all of its tiles of scores.
// Rows are padded, so that what lanes read together lies in different banks.
constexpr int BIAS_STRIDE = BLOCK_KV + 8;
template <bool>
struct BiasValues {
  static constexpr unsigned short* bias_value = nullptr;
};
template <>
struct BiasValues<true> {
  alignas(4) unsigned short bias_value[BLOCK_Q * BIAS_STRIDE];
};

// What a block knows, in shared memory, because the sums fill the registers.
struct SharedStorage : BiasValues<HAS_BIAS_TILES> {
  bias_tile::BiasTile bias;  // the block's tile of it
  ScoreTile tile[2];         // the current one, and the next
  fragment_tile::Classes classes;
  float lse[2][BLOCK_Q], delta[2][BLOCK_Q];
};

// The tiles of scores as numbers: of batch entries, heads, and blocks of queries and of keys, as
// far as the bias is broadcast along them; of the block's part of them, the first has number 0. Of
// packed arrays some do not exist.
struct TileScheduler {
  const Params& p;
  SharedStorage& storage;
  long long heads, planes, blocks_k, begin, count;

  __device__ __forceinline__ TileScheduler(const Params& p, SharedStorage& storage)
      : p(p),
        storage(storage),
        heads(storage.bias.heads(p)),
        planes(storage.bias.planes(p)),
        blocks_k(storage.bias.one_key ? (p.len_k + BLOCK_KV - 1) / BLOCK_KV : 1),
        begin(storage.bias.begin_row * blocks_k),
        count(storage.bias.end_row * blocks_k - begin) {}

  __device__ __forceinline__ Position position_of(long long number) const {
    const bias_tile::BiasTile& bias = storage.bias;
    const layout::Quotient of_keys = layout::divide(begin + number, blocks_k);
    const layout::Quotient of_planes = layout::divide(of_keys.quotient, planes);
    const layout::Quotient of_heads = layout::divide(of_planes.remainder, heads);
    const layout::Entry entry = layout::shared_entry(p, bias.first, of_heads.quotient);
    const long long h = bias.one_head ? of_heads.remainder : bias.head;
    const long long i0 = (bias.one_query ? of_planes.quotient : bias.q_block) * BLOCK_Q;
    const long long j0 = (bias.one_key ? of_keys.remainder : bias.kv_block) * BLOCK_KV;
    return Position{entry,
                    h,
                    i0,
                    j0,
                    tile::rows_from(i0, entry.len_q, BLOCK_Q),
                    tile::rows_from(j0, entry.len_k, BLOCK_KV)};
  }

  // The first tile from `number` on that exists and is not EMPTY, or one without rows.
  __device__ __forceinline__ fragment_tile::Tile next_tile(long long number) const {
    const auto describe = [&](long long of, int) { return position_of(of).box(); };
    fragment_tile::Tile next{};
#pragma unroll 1
    do {
      next = fragment_tile::next_tile<1>(p, storage.classes, number, count, describe);
      if (!PACKED || next.rows == 0) break;
      const Position at = position_of(next.first);
      if (at.ni > 0 && at.nj > 0) break;
      number = next.first + 1;
    } while (true);
    return next;
  }

  // Writes a tile, if there is one, to a stage of the storage, by a lane for each operand; a
  // barrier has to follow.
  __device__ __forceinline__ void publish(const fragment_tile::Tile& next, int stage) const {
    const int lane = threadIdx.x;
    if (lane > 4 || next.rows == 0) return;
    ScoreTile& tile = storage.tile[stage];
    const Position at = position_of(next.first);
    if (lane == 4) {
      tile.at = at;
      tile.tile_class = next.tile_class;
      tile.lse = memory::row_statistic(p.lse, at.entry, at.h);
      tile.delta = memory::row_statistic(p.delta, at.entry, at.h);
      return;
    }
    const bool of_keys = lane % 2 != 0;
    const Operand& operand = of_keys ? (lane == 1 ? p.k : p.v) : (lane == 0 ? p.q : p.d_out);
    const long long h = of_keys ? layout::divide(at.h, p.group).quotient : at.h;
    tile.rows[lane] = memory::rows(operand, at.entry, h, of_keys);
  }
};

// -- the bias -------------------------------------------------------------------------------------

// Copies the block's tile of the bias, in place of queries and keys beyond the last one any; by all
// threads. A barrier has to follow.
__device__ __forceinline__ void load_bias(const Params& p, SharedStorage& storage) {
  const bias_tile::BiasTile& bias = storage.bias;
  const long long i0 = bias.q_block * BLOCK_Q, j0 = bias.kv_block * BLOCK_KV;
  const int last_row = tile::rows_from(i0, p.bias_len_q, BLOCK_Q) - 1;
  const int last_column = tile::rows_from(j0, p.bias_len_k, BLOCK_KV) - 1;
  const auto* const data = reinterpret_cast<const unsigned short*>(p.bias.data) +
                           layout::lead_offset(p.bias, bias.first) + bias.head * p.bias.head +
                           i0 * p.bias.row + j0 * p.bias.col;
#pragma unroll 8
  for (int n = threadIdx.x; n < BLOCK_Q * BLOCK_KV; n += THREADS) {
    const int row = n / BLOCK_KV, column = n % BLOCK_KV;
    storage.bias_value[row * BIAS_STRIDE + column] =
        data[tile::smaller(row, last_row) * p.bias.row +
             tile::smaller(column, last_column) * p.bias.col];
  }
}

// Reads the bias of a thread's scores.
struct BiasReader {
  const unsigned short* corner;

  __device__ __forceinline__ BiasReader(const SharedStorage& storage,
                                        const fragment_gradient::Corner& of)
      : corner(storage.bias_value + of.row * BIAS_STRIDE + of.column) {}

  template <int ROWS>
  __device__ __forceinline__ void read(int group, float (&x)[ROWS][4]) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        const int at = 8 * r * BIAS_STRIDE + 16 * group + 4 * n;
        const auto word = *reinterpret_cast<const unsigned int*>(corner + at);
        x[r][n] = fragment_tile::low_half(word);
        x[r][n + 1] = fragment_tile::high_half(word);
      }
    }
  }
};

// -- the loop over tiles --------------------------------------------------------------------------

// Makes a thread's products q k into probabilities; a pair that takes no part has the one that says
// so. Generated code stands here for all pairs of a thread, unless it is long. `issue_dp` is called
// where fewest registers are in use. Returns whether any pair takes no part.
template <int ROWS, int COLUMNS, class IssueDp>
__device__ __forceinline__ bool recompute_p(
    const Params& p, const HeadConstants& given, float scale, const SharedStorage& storage,
    const TileBox& box, bool masked, unsigned int (&allowed)[ROWS], float (&s)[ROWS][COLUMNS],
    const fragment_gradient::Corner& corner, const float* lse_smem, const IssueDp& issue_dp) {
  // 3 score mod
  if constexpr (fragment_tile::IS_LONG_SCORE_MOD) {
    issue_dp();
    unsigned int kept[ROWS] = {}, p_words[ROWS][COLUMNS / 2];
    return fragment_gradient::recompute_modified<false, 0, 4>(p, given, scale, box, masked, allowed,
                                                              s, corner, lse_smem, kept, p_words,
                                                              nullptr) ||
           masked;
  } else {
    bool hides = masked;
    if constexpr (HAS_BIAS_TILES) {
      hides = fragment_tile::add_bias(s, scale, BiasReader(storage, corner)) || masked;
    } else if constexpr (HAS_SCORE) {
      hides = fragment_gradient::apply_score_mod<false>(p, given, scale, box, s, corner) || masked;
    }
    // 4 mask
    if (hides) fragment_gradient::mask_infinite(s, masked, allowed);
    issue_dp();
    // 5 probabilities and the gradient of the output's weights
    const fragment_gradient::PerQuery<false, ROWS, COLUMNS> lse(lse_smem);
    if (hides) {
      fragment_gradient::exponentiate<true>(s, lse, number::LOG2_E<float>, allowed);
    } else {
      fragment_gradient::exponentiate<false>(s, lse, number::LOG2_E<float>, allowed);
    }
    return hides;
  }
}

// Adds up dS of all tiles of scores. The operands of one tile are in shared memory; when a product
// has read its own, those of the next tile begin to come.
//
// `Products` says how the hardware copies and multiplies: load_q_k and load_do_v begin copies of a
// tile's operands, publish makes those that have come known to the products, issue_s and issue_dp
// begin a product, and wait ends it. Where they are ASYNC, the product for S overlaps with the
// search for the next tile and the mask, and that for dP with the softmax; else the former comes
// before it, while few registers are in use.
template <class Products, int ROWS, int COLUMNS>
__device__ __forceinline__ void accumulate_ds(const TileScheduler& scheduler,
                                              const Products& products,
                                              const fragment_gradient::Corner& corner,
                                              float (&total)[ROWS][COLUMNS]) {
  const Params& p = scheduler.p;
  SharedStorage& storage = scheduler.storage;
  fragment_gradient::RowStatistics statistics;  // lse and delta on their way to shared memory
  const auto load_q_k = [&](const ScoreTile& tile) {
    products.load_q_k(tile);
    statistics.load(tile.lse, tile.delta, tile.at.i0, tile.at.ni);
  };
  const float scale = ptx::shuffle(static_cast<float>(p.scale), 0);  // read once, and kept
  matmul::clear(total);
  int stage = 0;
  fragment_tile::Tile now = scheduler.next_tile(0);
  scheduler.publish(now, stage);
  __syncthreads();  // the first tile, which other threads wrote
  if (now.rows > 0) {
    load_q_k(storage.tile[stage]);
    statistics.store(storage.lse[stage], storage.delta[stage]);
    ptx::cp_async_commit();
    products.load_do_v(storage.tile[stage]);
  }
  ptx::cp_async_commit();
  if constexpr (HAS_BIAS_TILES) load_bias(p, storage);  // a barrier follows in the loop
#pragma unroll 1
  while (now.rows > 0) {
    const ScoreTile &current = storage.tile[stage], &coming = storage.tile[1 - stage];
    fragment_tile::Tile next;
    TileBox box;
    HeadConstants given;
    bool masked;
    unsigned int kept[ROWS], allowed[ROWS];
    const auto look_ahead = [&] {
      next = scheduler.next_tile(now.first + 1);
      scheduler.publish(next, 1 - stage);
      box = current.at.box();
      masked = current.masked();
      given = tile::head_constants_of(p, box);
      if constexpr (HAS_DROPOUT)
        fragment_gradient::draw_dropout<false, COLUMNS>(p, box, corner, kept);
      if (masked) {
        fragment_gradient::evaluate_mask<false, COLUMNS>(p, box, current.tile_class, corner,
                                                         allowed);
      }
    };
    if constexpr (!Products::ASYNC) look_ahead();
    ptx::cp_async_wait<1>();
    products.publish();
    __syncthreads();  // q, k, lse and delta, which other threads brought
    // 2 scores
    float s[ROWS][COLUMNS], dp[ROWS][COLUMNS];
    products.issue_s(s);
    if constexpr (Products::ASYNC) look_ahead();
    products.wait(s);
    __syncthreads();  // q and k, which all have read; the next tile, which other threads wrote
    if (next.rows > 0) load_q_k(coming);
    ptx::cp_async_commit();
    const auto issue_dp = [&] {
      ptx::cp_async_wait<1>();
      products.publish();
      __syncthreads();  // do and v, which other threads brought
      products.issue_dp(dp);
    };
    const bool hides = recompute_p(p, given, scale, storage, box, masked, allowed, s, corner,
                                   storage.lse[stage] + corner.row, [&] {
                                     if constexpr (Products::ASYNC) issue_dp();
                                   });
    if constexpr (!Products::ASYNC) issue_dp();
    products.wait(dp);
    if (next.rows > 0) statistics.store(storage.lse[1 - stage], storage.delta[1 - stage]);
    __syncthreads();  // do and v, which all have read
    if (next.rows > 0) products.load_do_v(coming);
    ptx::cp_async_commit();
    const fragment_gradient::PerQuery<false, ROWS, COLUMNS> delta(storage.delta[stage] +
                                                                  corner.row);
    fragment_gradient::score_gradients<false>(p, hides, s, dp, delta, kept, s);
    // 6 accumulate dbias
    matmul::add(total, s);
    stage = 1 - stage;
    now = next;
  }
}

// -- the block ------------------------------------------------------------------------------------

// Writes a thread's sums to shared memory, from its corner on.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void put_sums(const float (&total)[ROWS][COLUMNS],
                                         const fragment_gradient::Corner& corner,
                                         float* sums_smem) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      sums_smem[(corner.row + 8 * r) * STRIDE + corner.column + 8 * (n / 2) + n % 2] = total[r][n];
    }
  }
}

// Computes and stores the gradient of the block's tile of the bias. The sums go in place of the
// operands, to `sums_smem`.
template <int ROWS, int COLUMNS, class Products>
__device__ __forceinline__ void run(const TileScheduler& scheduler, const Products& products,
                                    const fragment_gradient::Corner& corner, char* sums_smem) {
  float total[ROWS][COLUMNS];
  accumulate_ds(scheduler, products, corner, total);
  float* const sums = reinterpret_cast<float*>(sums_smem);
  put_sums(total, corner, sums);
  __syncthreads();  // the sums, which other threads wrote
  bias_tile::store<STRIDE>(scheduler.p, scheduler.storage.bias, sums);
}

}  // namespace fragment_bias
