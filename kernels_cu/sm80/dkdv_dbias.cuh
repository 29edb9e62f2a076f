// What backward_sm80_dkdv_dbias.cu does with an entry: its shared memory, the bias in registers,
// products of rows of 64 bytes, and results.
#pragma once
#include "../common/bias_tile.cuh"
#include "../common/row_products.cuh"
#include "../warp/fragment_gradient_ds.cuh"
#include "../warp/fragment_product.cuh"
#include "../warp/fragment_tile.cuh"

namespace dkdv_dbias {

using fragment::WARPS;

// -- shared memory --------------------------------------------------------------------------------

constexpr int ROWS = 64;  // of a tile, some of which may be missing
constexpr int ROW = 64;   // bytes of q, k, v, do and out: two rows share a line
constexpr int DS_ROW = 128;
constexpr int Q_AT = 0, K_AT = ROWS * ROW, V_AT = 2 * K_AT, DO_AT = 3 * K_AT, OUT_AT = 4 * K_AT;
constexpr int STAGE_BYTES = 5 * K_AT, DS_BYTES = ROWS * DS_ROW;
// A thread's scores in each of its two rows, and words of two; elements of dk and dq, and of dv.
constexpr int COLUMNS = BLOCK_Q / 4, WORDS = COLUMNS / 2;
constexpr int K_COLUMNS = fragment::whole_columns(D) / 4;
constexpr int V_COLUMNS = fragment::whole_columns(D_V) / 4;

// What has a place in memory of its own for each entry.
enum { OF_Q, OF_K, OF_V, OF_DO, OF_OUT, OF_DQ, OF_DK, OF_DV, OF_LSE, OF_DLSE, PLACES };
constexpr int ARRAYS = OF_LSE;  // of rows of several elements
constexpr int AHEAD = 4;        // entries whose places are kept: three are in use

// Where rows of an entry begin.
struct Place {
  unsigned long long address;

  Place() = default;
  __device__ __forceinline__ Place(const Operand& operand, long long bytes)
      : address(reinterpret_cast<unsigned long long>(operand.data) +
                static_cast<unsigned long long>(bytes)) {}
  // Whether copies of 16 bytes are possible.
  __device__ __forceinline__ bool has_vectors(const Operand& operand) const {
    const bool aligned = address % sizeof(StoredVector) == 0;
    return aligned && operand.col == 1 && operand.row % STORED_VECTOR == 0;
  }
  __device__ __forceinline__ storage_t* data() const {
    return reinterpret_cast<storage_t*>(address);
  }
  __device__ __forceinline__ memory::Rows rows(const Operand& operand, bool vectors) const {
    return {data(), operand.row, operand.col, vectors};
  }
  __device__ __forceinline__ const float* statistic() const {
    return reinterpret_cast<const float*>(address);
  }
};

struct Storage {
  bias_tile::BiasTile bias;  // the block's tile of it
  Place place[AHEAD][PLACES];
  int vectors[AHEAD];  // whether all arrays of rows allow copies of 16 bytes
  float lse[ROWS];     // times log2(e)
  float delta[ROWS];
  float largest[WARPS];
};

__device__ __forceinline__ const Operand& operand_of(const Params& p, int what) {
  switch (what) {
    case OF_Q:
      return p.q;
    case OF_K:
      return p.k;
    case OF_V:
      return p.v;
    case OF_DO:
      return p.d_out;
    case OF_OUT:
      return p.out;
    case OF_DQ:
      return p.dq;
    case OF_DK:
      return p.dk;
    case OF_DV:
      return p.dv;
    case OF_LSE:
      return p.lse;
    default:
      return p.dlse;
  }
}

// Begins to copy an entry's rows.
template <bool VECTORS>
__device__ __forceinline__ void begin_entry(const Params& p, const Place* at, int ni, int nj,
                                            char* stage_smem) {
  using fragment::begin_rows;
  begin_rows<ROWS, D, ROW>(stage_smem + Q_AT, at[OF_Q].rows(p.q, VECTORS), 0, ni);
  begin_rows<ROWS, D, ROW>(stage_smem + K_AT, at[OF_K].rows(p.k, VECTORS), 0, nj);
  begin_rows<ROWS, D_V, ROW>(stage_smem + V_AT, at[OF_V].rows(p.v, VECTORS), 0, nj);
  begin_rows<ROWS, D_V, ROW>(stage_smem + DO_AT, at[OF_DO].rows(p.d_out, VECTORS), 0, ni);
  begin_rows<ROWS, D_V, ROW>(stage_smem + OUT_AT, at[OF_OUT].rows(p.out, VECTORS), 0, ni);
}

static_assert(IS_16_BIT && !PACKED && !HAS_LISTS && !HAS_PARTS && WHOLE_DQ, "dense rows");
static_assert(HAS_BIAS_TILES && !HAS_SCORE && !HAS_MASK && !HAS_DROPOUT, "weights with a bias");
static_assert(D <= 32 && D_V <= 32, "rows of 64 bytes");
static_assert(BLOCK_KV == ROWS && BLOCK_Q <= ROWS && BLOCK_Q % 8 == 0, "BLOCK_Q, BLOCK_KV");
static_assert(THREADS == 128, "a warp for 16 rows");
static_assert(SHARED_BYTES == 2 * STAGE_BYTES + DS_BYTES + sizeof(Storage), "SHARED_BYTES");

// -- values that are not finite -------------------------------------------------------------------

// A bias of -inf hides a pair: its weight is exp(-inf) = 0, and so is its dS, as long as the
// scores, dP and delta are finite, as they are of elements below 2^60, and of all of float16 that
// are finite. Entries with other elements take the EXACT way, on which hidden pairs are told from
// those whose weight is 0.
constexpr unsigned int LARGE = number::STORAGE_KIND == KIND_FLOAT16
                                   ? fragment::LAST
                                   : (256u - 187u) * 0x00800080u;  // carries from 2^60 on

// Whether elements that this thread copied are large.
template <int WIDTH>
__device__ __forceinline__ bool has_large(const char* tile_smem) {
  using Share = fragment::Pieces<ROWS, WIDTH>;
  const Share share;
  unsigned int carried = 0;
#pragma unroll
  for (int step = 0; step < Share::STEPS; ++step) {
    if (!share.has(step)) continue;
    const int row = share.row + step * Share::AT_ONCE;
    const auto piece = *reinterpret_cast<const ptx::Bytes16*>(
        tile_smem + fragment::swizzled_offset<ROW>(row, share.piece));
#pragma unroll
    for (int x = 0; x < 4; ++x) carried |= (piece.x[x] & fragment::EXPONENTS) + LARGE;
  }
  return (carried & fragment::SIGNS) != 0;
}

// -- the bias -------------------------------------------------------------------------------------

// The bias of a thread's scores, two queries to a word.
using BiasWords = unsigned int[2][WORDS];

// The bits of -inf.
constexpr unsigned int HIDDEN = BIAS_KIND == KIND_FLOAT16 ? 0xfc00u : 0xff80u;

__device__ __forceinline__ bool is_hidden(unsigned int word, int half) {
  return (half == 0 ? word & 0xffffu : word >> 16) == HIDDEN;
}

// Loads it, and what hides the pairs of missing queries and keys. Returns whether it hides others.
__device__ __forceinline__ bool load_bias(const Params& p, const bias_tile::BiasTile& tile,
                                          const fragment_gradient::Corner& corner, int ni, int nj,
                                          BiasWords& words) {
  const auto* const data = reinterpret_cast<const unsigned short*>(p.bias.data) +
                           layout::lead_offset(p.bias, tile.first) + tile.head * p.bias.head;
  bool hides = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = corner.row + 8 * r;
#pragma unroll
    for (int n = 0; n < WORDS; ++n) {
      unsigned int half[2] = {HIDDEN, HIDDEN};
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int i = corner.column + 8 * n + x;
        if (i < ni && j < nj) {
          half[x] = data[i * p.bias.row + j * p.bias.col];
          hides = hides || half[x] == HIDDEN;
        }
      }
      words[r][n] = half[0] | half[1] << 16;
    }
  }
  return hides;
}

// -- delta ----------------------------------------------------------------------------------------

// Whether a thread has copied what it reads for delta itself.
constexpr bool OWN_PIECES =
    fragment::Pieces<ROWS, D_V>::LANES == row_products::LANES && row_products::LANES == 4;
static_assert(row_products::LANES == 4, "a row of 4 pieces");

// Writes delta = rowsum(do * out) - dlse, in the order of backward_delta.cu. Returns whether the
// rows of this thread are finite.
__device__ __forceinline__ bool write_delta(const Params& p, const Place* at, int ni,
                                            const char* do_smem, const char* out_smem,
                                            float* delta_smem) {
  constexpr int LANES = row_products::LANES, AT_ONCE = THREADS / LANES;
  bool finite = true;
  float value[ROWS / AT_ONCE] = {};
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int n = 0; n < ROWS / AT_ONCE; ++n) {
    if (lane >= row_products::PIECES) break;
    const int offset =
        fragment::swizzled_offset<ROW>(threadIdx.x / LANES + n * AT_ONCE, threadIdx.x % LANES);
    const auto a = *reinterpret_cast<const StoredVector*>(out_smem + offset);
    const auto b = *reinterpret_cast<const StoredVector*>(do_smem + offset);
#pragma unroll
    for (int x = 0; x < STORED_VECTOR; ++x) {
      value[n] += number::widen(a.x[x]) * number::widen(b.x[x]);
    }
  }
#pragma unroll
  for (int n = 0; n < ROWS / AT_ONCE; ++n) {
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
      value[n] += ptx::shuffle_xor(value[n], lanes);
    }
    const int row = threadIdx.x / LANES + n * AT_ONCE;
    if (lane != 0) continue;
    float delta = row < ni ? value[n] : 0.0f;
    if (row < ni && p.dlse.data != nullptr) {
      delta -= at[OF_DLSE].statistic()[row * p.dlse.row];
    }
    finite = finite && number::is_finite(delta);
    delta_smem[row] = delta;
  }
  return finite;
}

// -- products -------------------------------------------------------------------------------------

// c = a b^T for a warp's 16 rows of a, and BLOCK_Q rows of b.
template <int WIDTH>
__device__ __forceinline__ void multiply(float (&c)[2][COLUMNS], const char* a_smem,
                                         const char* b_smem) {
  const auto a = fragment::left_rows<ROW>(a_smem);
  const auto b = fragment::right_rows<ROW>(b_smem);
  matmul::clear(c);
#pragma unroll
  for (int step = 0; step < fragment::whole_columns(WIDTH) / 16; ++step) {
    unsigned int left[4];
    ptx::ldmatrix_x4(left, a.at(0, step));
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      unsigned int right[4];
      ptx::ldmatrix_x4(right, b.at(4 * n, step));
#pragma unroll
      for (int x = 0; x < 4 && n + x < COLUMNS; x += 2) {
        fragment::mma(c[0][n + x], c[0][n + x + 1], c[1][n + x], c[1][n + x + 1], left, right[x],
                      right[x + 1]);
      }
    }
  }
}

// c += a b for 16 rows of b, which the lanes' rows address; if ONLY_FINITE, without values that are
// not finite.
template <bool ONLY_FINITE, int N>
__device__ __forceinline__ void multiply_step(float (&c)[2][N], const unsigned int (&left)[4],
                                              const fragment::LaneRow<ROW>& b, int first) {
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    unsigned int right[4];
    ptx::ldmatrix_x4_trans(right, b.at(first, n / 4));
    if constexpr (ONLY_FINITE) {
#pragma unroll
      for (int x = 0; x < 4; ++x) fragment_product::clear_pair(right[x]);
    }
    fragment::multiply_step(c, 0, n, left, right);
  }
}

// c += a b for the values of b that are not finite alone, skipping masked pairs: as
// fragment::add_nonfinite. Every thread fetches the weights of its rows from the lane that holds
// them.
template <int N>
__device__ __forceinline__ void add_nonfinite(float (&c)[2][N], unsigned int (&words)[2][WORDS],
                                              const char* b_smem) {
#pragma unroll 1
  for (int k = 0; k < WORDS; ++k) {
#pragma unroll 1
    for (int x = 0; x < 8; ++x) {
      storage_t weight[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned int pair = ptx::shuffle(words[r][0], ptx::lane_index() / 4 * 4 + x / 2);
        weight[r] = static_cast<storage_t>(x % 2 == 0 ? pair : pair >> 16);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int at = fragment::swizzled_offset<ROW>(8 * k + x, n / 2) +
                       2 * (fragment::lane_column() + n % 2);
        const float value = number::widen(*reinterpret_cast<const storage_t*>(b_smem + at));
        if (number::is_finite(value)) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (weight[r] != fragment::MASKED) c[r][n] += number::widen(weight[r]) * value;
        }
      }
    }
    fragment::rotate<1>(words);
  }
}

template <bool ONLY_FINITE, int N>
__device__ __forceinline__ void multiply_all(float (&c)[2][N],
                                             const unsigned int (&words)[2][WORDS],
                                             const fragment::LaneRow<ROW>& b) {
#pragma unroll
  for (int k = 0; k < WORDS; k += 2) {
    const bool ends = k + 1 == WORDS;  // the other queries do not exist
    const unsigned int left[4] = {words[0][k], words[1][k], ends ? 0 : words[0][k + 1 - ends],
                                  ends ? 0 : words[1][k + 1 - ends]};
    multiply_step<ONLY_FINITE>(c, left, b, 8 * k);
  }
}

// c = a b for a warp's weights of all queries, and the queries' rows b of WIDTH columns.
template <int WIDTH, bool EXACT, int N>
__device__ __forceinline__ void multiply_words(float (&c)[2][N], unsigned int (&words)[2][WORDS],
                                               const char* b_smem) {
  static_assert(N == fragment::whole_columns(WIDTH) / 4, "WIDTH");
  matmul::clear(c);
  multiply_all<EXACT>(c, words, fragment::left_rows<ROW>(b_smem));
  if constexpr (EXACT) add_nonfinite(c, words, b_smem);
}

// dq = dS k, of the 16 queries of a warp. Where keys are not finite, weights of those that are seen
// are not either, so that nothing is to be added.
template <bool EXACT>
__device__ __forceinline__ void multiply_ds(float (&dq)[2][K_COLUMNS], const char* ds_smem,
                                            int warp, const char* k_smem) {
  auto a = fragment::right_rows<DS_ROW>(ds_smem);
  a.begin ^= warp * 32;
  const auto b = fragment::left_rows<ROW>(k_smem);
  matmul::clear(dq);
#pragma unroll
  for (int k = 0; k < ROWS / 16; ++k) {
    unsigned int left[4];
    ptx::ldmatrix_x4_trans(left, a.at(16 * k, 0));
    multiply_step<EXACT>(dq, left, b, 16 * k);
  }
}

// -- weights --------------------------------------------------------------------------------------

// Products q k become probabilities, at most 1. `lse_smem` is that of the thread's first query.
__device__ __forceinline__ void exponentiate(float (&s)[2][COLUMNS], float scale,
                                             const BiasWords& bias, const float* lse_smem) {
#pragma unroll
  for (int n = 0; n < WORDS; ++n) {
    const float offset[2] = {lse_smem[8 * n], lse_smem[8 * n + 1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_word[2] = {fragment_tile::low_half(bias[r][n]),
                                fragment_tile::high_half(bias[r][n])};
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float& score = s[r][2 * n + x];
        const float logit = fma(score, scale, of_word[x]);
        score =
            ptx::exp2(gradient_tile::at_most_zero(fma(logit, number::LOG2_E<float>, -offset[x])));
      }
    }
  }
}

// Gives pairs that the bias hides the weight that says so.
__device__ __forceinline__ void mask_pairs(float (&s)[2][COLUMNS], const BiasWords& bias) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (is_hidden(bias[r][n / 2], n % 2)) s[r][n] = matmul::masked_weight();
    }
  }
}

__device__ __forceinline__ void subtract_delta(float (&dp)[2][COLUMNS], const float* delta_smem) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
    const float delta = delta_smem[8 * (n / 2) + n % 2];
#pragma unroll
    for (int r = 0; r < 2; ++r) dp[r][n] -= delta;
  }
}

__device__ __forceinline__ void multiply_weights(float (&ds)[2][COLUMNS],
                                                 const float (&weights)[2][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) ds[r][n] *= weights[r][n];
  }
}

// dS of masked pairs says so, too; that of others does not, even where it is 0.
__device__ __forceinline__ void keep_masked(float (&ds)[2][COLUMNS],
                                            const float (&weights)[2][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const float gradient = ds[r][n] == 0.0f ? 0.0f : ds[r][n];
      ds[r][n] = matmul::is_unmasked(weights[r][n]) ? gradient : matmul::masked_weight();
    }
  }
}

// The scale of an entry's dS in float16, from the warps' largest |dS|.
__device__ __forceinline__ fragment_gradient::DsScale scale_for(const float* largest_smem) {
  float largest = 0, none[1][1] = {};
#pragma unroll
  for (int n = 0; n < WARPS; ++n) largest = fmax(largest, largest_smem[n]);
  fragment_gradient::DsScale scale;
  scale.rescale(largest, none);
  return scale;
}

// -- results --------------------------------------------------------------------------------------

// Puts a warp's rows of a result into shared memory that no other warp uses.
template <int N>
__device__ __forceinline__ void put_result(const float (&result)[2][N], char* rows_smem) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const int at = fragment::swizzled_offset<ROW>(8 * r + fragment::lane_row(), n / 2);
      *reinterpret_cast<unsigned int*>(rows_smem + at + 2 * fragment::lane_column()) =
          number::narrow_pair(result[r][n], result[r][n + 1]);
    }
  }
}

// Copies those rows to global memory, by the warp's lanes; `valid` rows of the tile exist.
template <int WIDTH, bool VECTORS>
__device__ __forceinline__ void copy_result(const Operand& to, const Place& place, int warp_row,
                                            int valid, const char* rows_smem) {
  constexpr int PIECES = (WIDTH + STORED_VECTOR - 1) / STORED_VECTOR;
#pragma unroll
  for (int first = 0; first < 16 * PIECES; first += ptx::WARP_SIZE) {
    const int n = first + ptx::lane_index();
    const int row = n / PIECES, piece = n % PIECES;
    if (row >= 16 || warp_row + row >= valid) continue;
    const auto stored = *reinterpret_cast<const StoredVector*>(
        rows_smem + fragment::swizzled_offset<ROW>(row, piece));
    storage_t* const target =
        place.data() + (warp_row + row) * to.row + STORED_VECTOR * piece * to.col;
    if (VECTORS && STORED_VECTOR * (piece + 1) <= WIDTH) {
      *reinterpret_cast<StoredVector*>(target) = stored;
    } else {
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        if (STORED_VECTOR * piece + x < WIDTH) target[x * to.col] = stored.x[x];
      }
    }
  }
}

// Copies all results of a warp.
template <bool VECTORS>
__device__ __forceinline__ void copy_results(const Params& p, const Place* at, int warp_row, int ni,
                                             int nj, const char* dq_smem, const char* dk_smem,
                                             const char* dv_smem) {
  copy_result<D_V, VECTORS>(p.dv, at[OF_DV], warp_row, nj, dv_smem);
  copy_result<D, VECTORS>(p.dk, at[OF_DK], warp_row, nj, dk_smem);
  copy_result<D, VECTORS>(p.dq, at[OF_DQ], warp_row, ni, dq_smem);
}

// Stores a thread's sums of dS: a part of dbias.
__device__ __forceinline__ void store_total(const Params& p, const bias_tile::BiasTile& tile,
                                            const fragment_gradient::Corner& corner, int ni, int nj,
                                            const float (&total)[2][COLUMNS]) {
  const long long base = tile.base(p);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = corner.row + 8 * r;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int i = corner.column + 8 * (n / 2) + n % 2;
      if (i < ni && j < nj) {
        number::store(p.dbias.data, p.kind_dbias, base + i * p.dbias.row + j * p.dbias.col,
                      total[r][n]);
      }
    }
  }
}

}  // namespace dkdv_dbias
