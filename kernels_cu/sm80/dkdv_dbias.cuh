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
enum { OF_Q, OF_K, OF_V, OF_DO, OF_OUT, OF_LSE, OF_DLSE, OF_DELTA, OF_DQ, OF_DK, OF_DV, PLACES };
constexpr int AHEAD = 4;  // entries whose places are kept: three are in use

// Where rows of an entry begin. Elements have 2 bytes or more, so that the last bit is free for
// whether 16-byte copies are possible.
struct Place {
  unsigned long long address;

  Place() = default;
  __device__ __forceinline__ Place(const Operand& operand, long long bytes)
      : address(reinterpret_cast<unsigned long long>(operand.data) +
                static_cast<unsigned long long>(bytes)) {
    if (operand.data == nullptr) address = 0;
    const bool aligned = address % sizeof(StoredVector) == 0;
    if (aligned && operand.col == 1 && operand.row % STORED_VECTOR == 0) address |= 1;
  }
  __device__ __forceinline__ bool vectors() const { return (address & 1) != 0; }
  __device__ __forceinline__ char* data() const { return reinterpret_cast<char*>(address & ~1ull); }
  __device__ __forceinline__ memory::Rows rows(const Operand& operand) const {
    return {reinterpret_cast<const storage_t*>(data()), operand.row, operand.col, vectors()};
  }
  __device__ __forceinline__ float* statistic() const { return reinterpret_cast<float*>(data()); }
};

struct Storage {
  bias_tile::BiasTile bias;  // the block's tile of it
  Place place[AHEAD][PLACES];
  float lse[ROWS];  // times log2(e)
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
    case OF_LSE:
      return p.lse;
    case OF_DLSE:
      return p.dlse;
    case OF_DELTA:
      return p.delta;
    case OF_DQ:
      return p.dq;
    case OF_DK:
      return p.dk;
    default:
      return p.dv;
  }
}

// Bytes of an element.
__device__ __forceinline__ int bytes_of(const Params& p, int what) {
  const bool of_statistic = what == OF_LSE || what == OF_DLSE || what == OF_DELTA;
  const bool wide = (what == OF_DQ && p.kind_dq != number::STORAGE_KIND) ||
                    (what == OF_DK && p.kind_dk != number::STORAGE_KIND) ||
                    (what == OF_DV && p.kind_dv != number::STORAGE_KIND);
  return of_statistic || wide ? sizeof(accum_t) : sizeof(storage_t);
}

static_assert(IS_16_BIT && !PACKED && !HAS_LISTS && !HAS_PARTS && WHOLE_DQ, "dense rows");
static_assert(HAS_BIAS_TILES && !HAS_SCORE && !HAS_MASK && !HAS_DROPOUT, "weights with a bias");
static_assert(D <= 32 && D_V <= 32, "rows of 64 bytes");
static_assert(BLOCK_KV == ROWS && BLOCK_Q <= ROWS && BLOCK_Q % 8 == 0, "BLOCK_Q, BLOCK_KV");
static_assert(THREADS == 128, "a warp for 16 rows");
static_assert(SHARED_BYTES == 2 * STAGE_BYTES + DS_BYTES + sizeof(Storage), "SHARED_BYTES");

// -- the bias -------------------------------------------------------------------------------------

// The bias of a thread's scores, two queries to a word.
using BiasWords = unsigned int[2][WORDS];

// The bits of -inf.
constexpr unsigned int HIDDEN = BIAS_KIND == KIND_FLOAT16 ? 0xfc00u : 0xff80u;

__device__ __forceinline__ bool is_hidden(unsigned int word, int half) {
  return (half == 0 ? word & 0xffffu : word >> 16) == HIDDEN;
}

// Loads it, for queries and keys beyond the last one any. Returns whether it hides a pair.
__device__ __forceinline__ bool load_bias(const Params& p, const bias_tile::BiasTile& tile,
                                          const fragment_gradient::Corner& corner, int ni, int nj,
                                          BiasWords& words) {
  const auto* const data = reinterpret_cast<const unsigned short*>(p.bias.data) +
                           layout::lead_offset(p.bias, tile.first) + tile.head * p.bias.head;
  bool hides = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const long long key = tile::smaller(corner.row + 8 * r, nj - 1) * p.bias.col;
#pragma unroll
    for (int n = 0; n < WORDS; ++n) {
      unsigned int half[2] = {};
#pragma unroll
      for (int x = 0; x < 2 && ni > 0; ++x) {
        half[x] = data[tile::smaller(corner.column + 8 * n + x, ni - 1) * p.bias.row + key];
        hides = hides || half[x] == HIDDEN;
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

// Writes delta = rowsum(do * out) - dlse, in the order of backward_delta.cu, to shared memory, and
// to global memory if others read it.
__device__ __forceinline__ void write_delta(const Params& p, const Place* at, int ni,
                                            const char* do_smem, const char* out_smem,
                                            float* delta_smem) {
  constexpr int LANES = row_products::LANES, AT_ONCE = THREADS / LANES;
  const bool skip_zero_outputs = p.sink != nullptr;
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
      const float element = number::widen(a.x[x]), gradient = number::widen(b.x[x]);
      if (!skip_zero_outputs || element != 0.0f) value[n] += element * gradient;
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
    if (row < ni) {
      if (p.dlse.data != nullptr) delta -= at[OF_DLSE].statistic()[row * p.dlse.row];
      if (p.delta.data != nullptr) at[OF_DELTA].statistic()[row * p.delta.row] = delta;
    }
    delta_smem[row] = delta;
  }
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
template <int WIDTH, int N>
__device__ __forceinline__ void multiply_words(float (&c)[2][N], unsigned int (&words)[2][WORDS],
                                               const char* b_smem, bool has_nonfinite) {
  static_assert(N == fragment::whole_columns(WIDTH) / 4, "WIDTH");
  const auto b = fragment::left_rows<ROW>(b_smem);
  matmul::clear(c);
  if (has_nonfinite) {
    multiply_all<true>(c, words, b);
    add_nonfinite(c, words, b_smem);
  } else {
    multiply_all<false>(c, words, b);
  }
}

// dq = dS k, of the 16 queries of a warp. Where keys are not finite, weights of those that are seen
// are not either, so that nothing is to be added.
__device__ __forceinline__ void multiply_ds(float (&dq)[2][K_COLUMNS], const char* ds_smem,
                                            int warp, const char* k_smem, bool has_nonfinite) {
  auto a = fragment::right_rows<DS_ROW>(ds_smem);
  a.begin ^= warp * 32;
  const auto b = fragment::left_rows<ROW>(k_smem);
  matmul::clear(dq);
#pragma unroll
  for (int k = 0; k < ROWS / 16; ++k) {
    unsigned int left[4];
    ptx::ldmatrix_x4_trans(left, a.at(16 * k, 0));
    if (has_nonfinite) {
      multiply_step<true>(dq, left, b, 16 * k);
    } else {
      multiply_step<false>(dq, left, b, 16 * k);
    }
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

// Gives pairs that the bias hides, and those of keys from `keys` on, counted from the thread's
// first, the weight that says so.
__device__ __forceinline__ void mask_pairs(float (&s)[2][COLUMNS], bool hides,
                                           const BiasWords& bias, int keys) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const bool masked = 8 * r >= keys || (hides && is_hidden(bias[r][n / 2], n % 2));
      if (masked) s[r][n] = matmul::masked_weight();
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

// Puts a warp's rows of a result into shared memory that no other warp uses, or where a result has
// the accumulator's type, into global memory, of which `valid` rows exist.
template <int WIDTH, int N>
__device__ __forceinline__ void put_result(const Operand& to, const Place& place, int kind,
                                           const float (&result)[2][N], int warp_row, int valid,
                                           char* rows_smem) {
  const int lane_row = fragment::lane_row();
  if (kind != number::STORAGE_KIND) {
    float* const data = place.statistic();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + 8 * r + lane_row;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int column = fragment::result_column(fragment::Narrow{}, n / 2 * 2) + n % 2;
        if (row < valid && column < WIDTH) data[row * to.row + column * to.col] = result[r][n];
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const int at = fragment::swizzled_offset<ROW>(8 * r + lane_row, n / 2);
      *reinterpret_cast<unsigned int*>(rows_smem + at + 2 * fragment::lane_column()) =
          number::narrow_pair(result[r][n], result[r][n + 1]);
    }
  }
}

// Copies those rows to global memory, by the warp's lanes.
template <int WIDTH>
__device__ __forceinline__ void copy_result(const Operand& to, const Place& place, int kind,
                                            int warp_row, int valid, const char* rows_smem) {
  if (kind != number::STORAGE_KIND) return;
  constexpr int PIECES = (WIDTH + STORED_VECTOR - 1) / STORED_VECTOR;
  storage_t* const data = reinterpret_cast<storage_t*>(place.data());
  const bool vectors = place.vectors();
#pragma unroll
  for (int first = 0; first < 16 * PIECES; first += ptx::WARP_SIZE) {
    const int n = first + ptx::lane_index();
    const int row = n / PIECES, piece = n % PIECES;
    if (row >= 16 || warp_row + row >= valid) continue;
    const auto stored = *reinterpret_cast<const StoredVector*>(
        rows_smem + fragment::swizzled_offset<ROW>(row, piece));
    storage_t* const target = data + (warp_row + row) * to.row + STORED_VECTOR * piece * to.col;
    if (vectors && STORED_VECTOR * (piece + 1) <= WIDTH) {
      *reinterpret_cast<StoredVector*>(target) = stored;
    } else {
#pragma unroll
      for (int x = 0; x < STORED_VECTOR; ++x) {
        if (STORED_VECTOR * piece + x < WIDTH) target[x * to.col] = stored.x[x];
      }
    }
  }
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
