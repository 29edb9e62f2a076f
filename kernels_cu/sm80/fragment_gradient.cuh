// One tile of the backward where it lies in fragments: scores recomputed, probabilities, and the
// gradient of the scores. The twin of reference/cpu/gradient_tile.py for tensor cores.
//
// A tile's rows are keys or queries, whichever are the rows of the block's results. What a warp has
// of it is as fragment.cuh says, from the thread's element (0, 0) on, its corner.
#pragma once
#include "fragment.cuh"
#include "fragment_tile.cuh"
#include "../common/gradient_tile.cuh"

namespace fragment_gradient {

// Where a thread's element (0, 0) lies in the tile.
struct Corner {
  int row, column;

  __device__ __forceinline__ Corner(int warp_row, int warp_column)
      : row(warp_row + fragment::lane_row()), column(warp_column + fragment::lane_column()) {}
};

// How far from the corner's query that of element (r, n) lies.
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ int query_of(int r, int n) {
  return KEYS_ARE_ROWS ? 8 * (n / 2) + n % 2 : 8 * r;
}

// -- lse and delta --------------------------------------------------------------------------------

// Those of a tile's queries on their way to shared memory, one or a few in each thread. An empty
// row gets lse = inf, so that its p is 0; so do the rows beyond the last.
struct RowStatistics {
  static constexpr int EACH = (BLOCK_Q + THREADS - 1) / THREADS;
  accum_t lse[EACH], delta[EACH];

  __device__ __forceinline__ void load(const memory::RowStatistic& from_lse,
                                       const memory::RowStatistic& from_delta, long long i0, int ni) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS;
      lse[n] = number::infinity();
      delta[n] = 0;
      if (i < ni) {
        lse[n] = from_lse.data[(i0 + i) * from_lse.row];
        delta[n] = from_delta.data[(i0 + i) * from_delta.row];
      }
    }
  }
  __device__ __forceinline__ void store(accum_t* lse_smem, accum_t* delta_smem) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS;
      if (i < BLOCK_Q) {
        lse_smem[i] = lse[n] == -number::infinity() ? number::infinity() : lse[n];
        delta_smem[i] = delta[n];
      }
    }
  }
};

// -- dropout --------------------------------------------------------------------------------------

// Of a 4 x 4 matrix whose rows four lanes hold, gives each its column: they are `step`, 2 `step`
// and 3 `step` lanes from each other, and `own` of four.
__device__ __forceinline__ void transpose(unsigned int (&x)[4], int own, int step) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (own & bit) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & bit) continue;
      const unsigned int got = ptx::shuffle_xor(upper ? x[n] : x[n + bit], step * bit);
      x[n] = upper ? got : x[n];
      x[n + bit] = upper ? x[n + bit] : got;
    }
  }
}

// Which of a thread's pairs dropout keeps: bit n of word r tells of element (r, n). One draw_dropout serves
// four keys of a query, which four lanes hold where keys are rows, and else two.
template <bool KEYS_ARE_ROWS, int COLUMNS, int ROWS>
__device__ __forceinline__ void draw_dropout(const Params& p, const TileBox& box, const Corner& corner,
                                     unsigned int (&kept)[ROWS]) {
  static_assert(COLUMNS <= 32, "a bit for each column");
  const unsigned long long seed = p.seed_gmem != nullptr ? *p.seed_gmem : p.seed;
  const philox::Key key = philox::split_seed(seed);
  const unsigned long long b_h = static_cast<unsigned long long>(box.b * p.heads + box.h);
  constexpr int STEP = KEYS_ARE_ROWS ? 4 : 2;
  const int own = KEYS_ARE_ROWS ? ptx::lane_index() / 4 % 4 : ptx::lane_index() % 2;
  const long long i =
      box.i_low + (KEYS_ARE_ROWS ? corner.column + 8 * (own / 2) + own % 2 : corner.row + 8 * own);
  const long long j = box.j_low + (KEYS_ARE_ROWS ? corner.row : corner.column);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) kept[r] = 0;
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += STEP) {
#pragma unroll
    for (int r = 0; r < ROWS; r += KEYS_ARE_ROWS ? 1 : 2) {
      philox::Words drawn = philox::words(
          key, static_cast<unsigned int>((j + (KEYS_ARE_ROWS ? 8 * r : 4 * column)) / 4),
          static_cast<unsigned int>(i + (KEYS_ARE_ROWS ? 4 * column : 8 * r)), b_h);
      if constexpr (KEYS_ARE_ROWS) {
        transpose(drawn.word, own, 4);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          kept[r] |= (drawn.word[n] >= p.drop_below ? 1u : 0u) << (column + n);
        }
      } else {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          // The first lane holds keys 0 and 1 of four, the second 2 and 3.
          const unsigned int given = own != 0 ? drawn.word[n] : drawn.word[2 + n];
          const unsigned int held = own != 0 ? drawn.word[2 + n] : drawn.word[n];
          const unsigned int got = ptx::shuffle_xor(given, 1);
          kept[r] |= ((own != 0 ? got : held) >= p.drop_below ? 1u : 0u) << (column + n);
          kept[r + 1] |= ((own != 0 ? held : got) >= p.drop_below ? 1u : 0u) << (column + n);
        }
      }
    }
  }
}

// -- the tile -------------------------------------------------------------------------------------

// lse or delta of the queries of a thread's elements, in registers.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
struct PerQuery {
  float x[KEYS_ARE_ROWS ? COLUMNS : ROWS];

  PerQuery() = default;
  // `from_smem` is that of the corner's query.
  __device__ __forceinline__ explicit PerQuery(const float* from_smem) {
#pragma unroll
    for (int n = 0; n < (KEYS_ARE_ROWS ? COLUMNS : ROWS); ++n) {
      x[n] = from_smem[KEYS_ARE_ROWS ? query_of<true>(0, n) : query_of<false>(n, 0)];
    }
  }
  __device__ __forceinline__ float of(int r, int n) const { return x[KEYS_ARE_ROWS ? n : r]; }
};

// Writes a thread's word n of row r, two neighbouring columns in the storage type, to a tile whose
// rows are BYTES apart.
template <int BYTES>
__device__ __forceinline__ void store_word(unsigned int word, const Corner& corner, int r, int n,
                                           char* tile_smem) {
  const int at = fragment::place<BYTES>(corner.row + 8 * r, corner.column / 8 + n);
  *reinterpret_cast<unsigned int*>(tile_smem + at + 2 * fragment::lane_column()) = word;
}

// The same of all words.
template <int BYTES, int ROWS, int WORDS>
__device__ __forceinline__ void store_words(const unsigned int (&words)[ROWS][WORDS],
                                            const Corner& corner, char* tile_smem) {
#pragma unroll
  for (int n = 0; n < WORDS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) store_word<BYTES>(words[r][n], corner, r, n, tile_smem);
  }
}

// Which of a thread's pairs exist and take part: bit n of word r tells of element (r, n). Generated
// code stands here for AT_ONCE columns.
template <bool KEYS_ARE_ROWS, int COLUMNS, int AT_ONCE = 1, int ROWS>
__device__ __forceinline__ void evaluate_mask(const Params& p, const TileBox& box, int tile_class,
                                         const Corner& corner, unsigned int (&allowed)[ROWS]) {
  static_assert(COLUMNS <= 32, "a bit for each column");
  const int i_last = static_cast<int>(box.i_high - box.i_low);
  const int j_last = static_cast<int>(box.j_high - box.j_low);
  const int rows = KEYS_ARE_ROWS ? j_last : i_last, columns = KEYS_ARE_ROWS ? i_last : j_last;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const bool exists = corner.row + 8 * r <= rows;
    allowed[r] = exists ? fragment_tile::columns_to(columns - corner.column) : 0;
  }
  if constexpr (HAS_MASK) {
    if (tile_class != PARTIAL) return;
#pragma unroll AT_ONCE
    for (int n = 0; n < COLUMNS; ++n) {
      const int place = tile::smaller(corner.column + 8 * (n / 2) + n % 2, columns);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = tile::smaller(corner.row + 8 * r, rows);
        const Site at{box.b,
                      box.h,
                      box.i_low + (KEYS_ARE_ROWS ? place : row),
                      box.j_low + (KEYS_ARE_ROWS ? row : place),
                      box.len_q,
                      box.len_k,
                      box.start_q,
                      box.start_k};
        if (!mask_allows(p, at)) allowed[r] &= ~(1u << n);
      }
    }
  }
}

// Makes products q k into probabilities, 2^(c s - lse log2 e), at most 1. Where `MASKED`, a pair
// that is not allowed has the weight that says so.
template <bool MASKED, bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void exponentiate(float (&s)[ROWS][COLUMNS],
                                             const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS>& lse,
                                             float c, const unsigned int (&allowed)[ROWS]) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float offset = lse.of(r, n) * tile::LOG2_E;
      const float x = ptx::exp2(gradient_tile::at_most_zero(fma(s[r][n], c, -offset)));
      s[r][n] = !MASKED || (allowed[r] >> n & 1) != 0 ? x : matmul::masked_weight();
    }
  }
}

// The site of a thread's element of row r, `step` columns and as many queries or keys from column
// `column` on; or where changed scores read arrays, of the last query and key of the tile before
// it.
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ Site site_of(const TileBox& box, const Corner& corner, int r, int column,
                                        int step) {
  const int i_last = static_cast<int>(box.i_high - box.i_low);
  const int j_last = static_cast<int>(box.j_high - box.j_low);
  int row = corner.row + 8 * r, place = corner.column + 4 * column + step;
  if constexpr (SCORE_READS) {
    row = tile::smaller(row, KEYS_ARE_ROWS ? j_last : i_last);
    place = tile::smaller(place, KEYS_ARE_ROWS ? i_last : j_last);
  }
  return Site{box.b,
              box.h,
              box.i_low + (KEYS_ARE_ROWS ? place : row),
              box.j_low + (KEYS_ARE_ROWS ? row : place),
              box.len_q,
              box.len_k,
              box.start_q,
              box.start_k,
              KEYS_ARE_ROWS ? step : 8 * r,
              KEYS_ARE_ROWS ? 8 * r : step};
}

// Makes products q k into changed logits; generated code stands here for all of a thread's pairs.
// Returns whether any may be -inf.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ bool apply_score_mod(const Params& p, const HeadConstants& given, float scale,
                                              const TileBox& box, float (&s)[ROWS][COLUMNS],
                                              const Corner& corner) {
  float sum[ROWS] = {};  // of logits: not finite if one of them is not
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Site at = site_of<KEYS_ARE_ROWS>(box, corner, r, 0, 8 * (n / 2) + n % 2);
      s[r][n] = score_mod(p, given, s[r][n] * scale, at);
      sum[r] += s[r][n];
    }
  }
  bool finite = true;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) finite = finite && number::is_finite(sum[r]);
  return !finite;
}

// Of pairs that are `allowed`, or else of all, finds those whose logit is not -inf.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void mask_infinite(const float (&s)[ROWS][COLUMNS], bool masked,
                                            unsigned int (&allowed)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (!masked) allowed[r] = 0xffffffffu;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (s[r][n] == -number::infinity()) allowed[r] &= ~(1u << n);
    }
  }
}

// Where scores are changed: makes products q k into probabilities times the derivative of the
// change. What is read for pairs that do not exist is of the last query or key that does. Generated
// code stands here for STEP columns, which all columns pass, so many at a time. Returns whether any
// pair takes no part; the rest is as told below.
template <bool KEYS_ARE_ROWS, int BYTES, int STEP = 2, int ROWS, int COLUMNS>
__device__ __forceinline__ bool recompute_modified(
    const Params& p, const HeadConstants& given, float scale, const TileBox& box, bool masked,
    const unsigned int (&allowed)[ROWS], float (&s)[ROWS][COLUMNS], const Corner& corner,
    const float* lse_smem, const unsigned int (&kept)[ROWS],
    unsigned int (&weights)[ROWS][COLUMNS / 2], char* tile_smem) {
  bool hides = false;
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += STEP) {
#pragma unroll
    for (int n = 0; n < STEP; n += 2) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float weight[2];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const Site at = site_of<KEYS_ARE_ROWS>(box, corner, r, column, 4 * n + x);
          const float score = s[r][n + x] * scale;
          float changed = score_mod(p, given, score, at);
          if (masked && (allowed[r] >> (column + n + x) & 1) == 0) changed = -number::infinity();
          const float offset = lse_smem[query_of<KEYS_ARE_ROWS>(r, column + n + x)] * tile::LOG2_E;
          const bool seen = changed != -number::infinity();
          hides = hides || !seen;
          float own = ptx::exp2(gradient_tile::at_most_zero(fma(changed, tile::LOG2_E, -offset)));
          own = weight[x] = seen ? own : matmul::masked_weight();
          if (HAS_DROPOUT && (kept[r] >> (column + n + x) & 1) == 0) weight[x] *= 0.0f;
          if constexpr (HAS_DSCORE) {
            const float sloping = own * score_mod_derivative(p, given, score, at);
            // What is 0 is so whatever the derivative; and never -0.0 by chance.
            if (own != 0.0f) own = sloping == 0.0f ? 0.0f : sloping;
          }
          s[r][n + x] = own;
        }
        const unsigned int word = number::narrow_pair(weight[0], weight[1]);
        if constexpr (KEYS_ARE_ROWS && BYTES > 0) {
          store_word<BYTES>(word, corner, r, (column + n) / 2, tile_smem);
        } else if constexpr (KEYS_ARE_ROWS) {
          weights[r][n / 2] = word;
        }
      }
    }
    if constexpr (STEP < COLUMNS) {
      fragment::rotate<STEP>(s);
      if constexpr (KEYS_ARE_ROWS && BYTES == 0) fragment::rotate<STEP / 2>(weights);
    }
  }
  return hides;
}

// Makes products q k into probabilities; where scores are changed, into probabilities times the
// derivative of the change. A pair that takes no part has the weight that says so. Returns whether
// there may be one.
// Where keys are rows, the weights are the probabilities after dropout in the storage type, and go
// to a tile in shared memory instead if its rows are BYTES apart; what survives is divided by the
// probability of that at the end. `lse_smem` is that of the corner's query.
template <bool KEYS_ARE_ROWS, int BYTES, int ROWS, int COLUMNS>
__device__ __forceinline__ bool recompute_probabilities(
    const Params& p, const TileBox& box, int tile_class, bool masked, float (&s)[ROWS][COLUMNS],
    const Corner& corner, const float* lse_smem, const unsigned int (&kept)[ROWS],
    unsigned int (&weights)[ROWS][COLUMNS / 2], char* tile_smem) {
  unsigned int allowed[ROWS];
  if (masked) evaluate_mask<KEYS_ARE_ROWS, COLUMNS>(p, box, tile_class, corner, allowed);
  if constexpr (HAS_SCORE) {
    const bool hides = recompute_modified<KEYS_ARE_ROWS, BYTES>(
        p, tile::head_constants_of(p, box), static_cast<float>(p.scale), box, masked, allowed, s, corner,
        lse_smem, kept, weights, tile_smem);
    return masked || hides;
  }
  const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS> lse(lse_smem);
  const float c = static_cast<float>(p.scale) * tile::LOG2_E;
  if (masked) {
    exponentiate<true>(s, lse, c, allowed);
  } else {
    exponentiate<false>(s, lse, c, allowed);
  }
  if constexpr (KEYS_ARE_ROWS) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float weight[2];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          weight[x] = s[r][n + x];
          if (HAS_DROPOUT && (kept[r] >> (n + x) & 1) == 0) weight[x] *= 0.0f;
        }
        weights[r][n / 2] = number::narrow_pair(weight[0], weight[1]);
      }
    }
    if constexpr (BYTES > 0) store_words<BYTES>(weights, corner, tile_smem);
  }
  return masked;
}

// dS = p (dP - delta), for products dP = do v, in place of either; where scores are changed, the
// gradient of the scores before. What is 0 stays 0.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_gradients(
    const Params& p, bool masked, const float (&s)[ROWS][COLUMNS], const float (&dp)[ROWS][COLUMNS],
    const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS>& delta, const unsigned int (&kept)[ROWS],
    float (&ds)[ROWS][COLUMNS]) {
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  const auto change = [&](int r, int n) {
    float x = dp[r][n];
    if constexpr (HAS_DROPOUT) x *= (kept[r] >> n & 1) != 0 ? keep_scale : 0.0f;
    return x - delta.of(r, n);
  };
  if (!masked) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const float own = change(r, n);
        ds[r][n] = HAS_DSCORE && own == 0.0f ? 0.0f : s[r][n] * own;
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const float own = change(r, n);
      float gradient = s[r][n] * own;
      if (HAS_DSCORE && own == 0.0f) gradient = 0.0f;
      gradient = gradient == 0.0f ? 0.0f : gradient;  // never -0.0 by chance
      ds[r][n] = matmul::is_unmasked(s[r][n]) ? gradient : matmul::masked_weight();
    }
  }
}

// -- dS in 16 bits --------------------------------------------------------------------------------

// dS is multiplied by a power of two before it is rounded to float16, so that it neither overflows
// nor vanishes. The largest one comes to 2^7 at least, and nothing to 2^16; sums are in the same
// unit, and follow when it changes.
constexpr bool SCALES_DS = fragment::Mma::SCALES_DS;
struct DsScale {
  float factor = 1.0f;
  float largest = SCALES_DS ? 0.0f : number::infinity();  // that may come before it changes

  // The factor for numbers up to `x`. Its inverse is a normal number, too.
  __device__ __forceinline__ static float factor_for(float x) {
    const int exponent = static_cast<int>(__float_as_uint(x) >> 23);
    const int field = 261 - exponent;
    return number::bits_to_float(static_cast<unsigned int>(field < 253 ? field : 253) << 23);
  }
  __device__ __forceinline__ float inverse() const {
    return number::bits_to_float((254u << 23) - __float_as_uint(factor));
  }

  // Takes numbers up to `x` in, and brings sums to the new unit.
  template <int ROWS, int COLUMNS>
  __device__ __forceinline__ void rescale(float x, float (&sums)[ROWS][COLUMNS]) {
    const float made = factor_for(x);
    if (x == 0.0f || (largest > 0.0f && made >= factor)) return;
    if (largest > 0.0f) matmul::scale(sums, made * inverse());
    factor = made;
    largest = 32768.0f * inverse();
  }
};

// The largest of a thread's magnitudes; NaN is passed over.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ float largest_of(const float (&x)[ROWS][COLUMNS]) {
  float largest = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) largest = fmax(largest, fabs(x[r][n]));
  }
  return largest;
}

// The largest finite magnitude of a warp.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ float largest_finite(const float (&x)[ROWS][COLUMNS]) {
  float largest = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const float size = fabs(x[r][n]);
      largest = fmax(largest, size <= number::largest_float() ? size : 0.0f);
    }
  }
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    largest = fmax(largest, ptx::shuffle_xor(largest, lanes));
  }
  return largest;
}

// Rounds dS, times a factor, to the storage type.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void narrow(const float (&ds)[ROWS][COLUMNS], float factor,
                                       unsigned int (&to)[ROWS][COLUMNS / 2]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      to[r][n / 2] = number::narrow_pair(ds[r][n] * factor, ds[r][n + 1] * factor);
    }
  }
}

// Brings float16 that a thread wrote by `store_words` to another unit, a power of two smaller.
template <int BYTES, int ROWS, int WORDS>
__device__ __forceinline__ void scale_words(const Corner& corner, float factor, char* tile_smem) {
#pragma unroll 1
  for (int n = 0; n < WORDS; ++n) {
#pragma unroll 1
    for (int r = 0; r < ROWS; ++r) {
      const int at = fragment::place<BYTES>(corner.row + 8 * r, corner.column / 8 + n);
      auto* const word =
          reinterpret_cast<unsigned int*>(tile_smem + at + 2 * fragment::lane_column());
      const auto low = static_cast<storage_t>(*word), high = static_cast<storage_t>(*word >> 16);
      *word = number::narrow_pair(number::widen(low) * factor, number::widen(high) * factor);
    }
  }
}

}  // namespace fragment_gradient
