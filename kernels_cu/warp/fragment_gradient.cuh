// One tile of the backward in fragments: recomputed scores, probabilities, and the gradient of the
// scores. The twin of reference/cpu/gradient_tile.py for tensor cores.
//
// A tile's rows are keys or queries, as are the rows of the block's results. A thread holds the
// elements that fragment_rows.cuh describes, counted from its element (0, 0), its corner.
#pragma once
#include "fragment.cuh"
#include "fragment_tile.cuh"
#include "../common/gradient_tile.cuh"

namespace fragment_gradient {

// The row and column of a thread's element (0, 0) in the tile.
struct Corner {
  int row, column;

  __device__ __forceinline__ Corner(int warp_row, int warp_column)
      : row(warp_row + fragment::lane_row()), column(warp_column + fragment::lane_column()) {}
};

// The distance of the query of element (r, n) from that of the corner.
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ int query_of(int r, int n) {
  return KEYS_ARE_ROWS ? 8 * (n / 2) + n % 2 : 8 * r;
}

// -- lse and delta --------------------------------------------------------------------------------

// lse and delta of a tile's queries on the way to shared memory, EACH of them in a thread. Empty
// and missing rows get lse = inf, which makes p = 0.
struct RowStatistics {
  static constexpr int EACH = (BLOCK_Q + THREADS - 1) / THREADS;
  accum_t lse[EACH], delta[EACH];

  __device__ __forceinline__ void load(const memory::RowStatistic& from_lse,
                                       const memory::RowStatistic& from_delta, long long i0,
                                       int ni) {
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

// Transposes a 4 x 4 matrix whose rows are held by four lanes, `step` lanes apart from each other.
// The lane holds row `index`, and gets that column.
__device__ __forceinline__ void transpose(unsigned int (&x)[4], int index, int step) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (index & bit) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & bit) continue;
      const unsigned int received = ptx::shuffle_xor(upper ? x[n] : x[n + bit], step * bit);
      x[n] = upper ? received : x[n];
      x[n + bit] = upper ? x[n + bit] : received;
    }
  }
}

// Which pairs dropout keeps: bit n of kept[r] is that of element (r, n). One draw serves four keys
// of a query, which four lanes hold if keys are rows, and else two.
template <bool KEYS_ARE_ROWS, int COLUMNS, int ROWS>
__device__ __forceinline__ void draw_dropout(const Params& p, const TileBox& box,
                                             const Corner& corner, unsigned int (&kept)[ROWS]) {
  static_assert(COLUMNS <= 32, "a bit for each column");
  const unsigned long long seed = p.seed_gmem != nullptr ? *p.seed_gmem : p.seed;
  const philox::Key key = philox::split_seed(seed);
  const unsigned long long b_h = tile::number_of_head(p, box);
  constexpr int STEP = KEYS_ARE_ROWS ? 4 : 2;
  const int index = KEYS_ARE_ROWS ? ptx::lane_index() / 4 % 4 : ptx::lane_index() % 2;
  const int at = KEYS_ARE_ROWS ? corner.column + index / 2 * 8 + index % 2 : corner.row + 8 * index;
  const long long i = tile::origin_q(p) + box.i_low + at;
  const long long j = box.j_low + (KEYS_ARE_ROWS ? corner.row : corner.column);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) kept[r] = 0;
  if constexpr (KEYS_ARE_ROWS && COLUMNS == 2) {
    // Of 8 queries a lane has two; the four lanes draw for these and for two groups of keys.
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
      const long long query = tile::origin_q(p) + box.i_low + corner.column + index % 2;
      philox::Words drawn =
          tile::draw(p, key, (j + 8 * (r + index / 2)) / 4, static_cast<unsigned int>(query), b_h);
      transpose(drawn.word, index, 4);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        kept[r + n / 2] |= (drawn.word[n] >= p.drop_below ? 1u : 0u) << n % 2;
      }
    }
    return;
  }
#pragma unroll 1
  for (int column = 0; column < COLUMNS; column += STEP) {
#pragma unroll
    for (int r = 0; r < ROWS; r += KEYS_ARE_ROWS ? 1 : 2) {
      philox::Words drawn =
          tile::draw(p, key, (j + (KEYS_ARE_ROWS ? 8 * r : 4 * column)) / 4,
                     static_cast<unsigned int>(i + (KEYS_ARE_ROWS ? 4 * column : 8 * r)), b_h);
      if constexpr (KEYS_ARE_ROWS) {
        transpose(drawn.word, index, 4);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          kept[r] |= (drawn.word[n] >= p.drop_below ? 1u : 0u) << (column + n);
        }
      } else {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          // The first lane holds keys 0 and 1 of four, the second 2 and 3.
          const unsigned int sent = index != 0 ? drawn.word[n] : drawn.word[2 + n];
          const unsigned int held = index != 0 ? drawn.word[2 + n] : drawn.word[n];
          const unsigned int received = ptx::shuffle_xor(sent, 1);
          kept[r] |= ((index != 0 ? received : held) >= p.drop_below ? 1u : 0u) << (column + n);
          kept[r + 1] |= ((index != 0 ? held : received) >= p.drop_below ? 1u : 0u) << (column + n);
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

// Writes word n of a thread's row r, two adjacent columns in the storage type, to a tile whose rows
// are BYTES apart.
template <int BYTES>
__device__ __forceinline__ void store_word(unsigned int word, const Corner& corner, int r, int n,
                                           char* tile_smem) {
  const int at = fragment::swizzled_offset<BYTES>(corner.row + 8 * r, corner.column / 8 + n);
  *reinterpret_cast<unsigned int*>(tile_smem + at + 2 * fragment::lane_column()) = word;
}

// store_word of all of a thread's words.
template <int BYTES, int ROWS, int WORDS>
__device__ __forceinline__ void store_words(const unsigned int (&words)[ROWS][WORDS],
                                            const Corner& corner, char* tile_smem) {
#pragma unroll
  for (int n = 0; n < WORDS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) store_word<BYTES>(words[r][n], corner, r, n, tile_smem);
  }
}

// Evaluates the mask: bit n of mask[r] is set if the pair of element (r, n) exists and is not
// masked. mask_allows is instantiated for AT_ONCE columns.
template <bool KEYS_ARE_ROWS, int COLUMNS, int AT_ONCE = 1, int ROWS>
__device__ __forceinline__ void evaluate_mask(const Params& p, const TileBox& box, int tile_class,
                                              const Corner& corner, unsigned int (&mask)[ROWS]) {
  static_assert(COLUMNS <= 32, "a bit for each column");
  const int i_last = static_cast<int>(box.i_high - box.i_low);
  const int j_last = static_cast<int>(box.j_high - box.j_low);
  const int rows = KEYS_ARE_ROWS ? j_last : i_last, columns = KEYS_ARE_ROWS ? i_last : j_last;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const bool exists = corner.row + 8 * r <= rows;
    mask[r] = exists ? fragment_tile::columns_to(columns - corner.column) : 0;
  }
  if constexpr (HAS_MASK) {
    if (tile_class != PARTIAL) return;
#pragma unroll AT_ONCE
    for (int n = 0; n < COLUMNS; ++n) {
      const int tile_column = tile::smaller(corner.column + 8 * (n / 2) + n % 2, columns);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = tile::smaller(corner.row + 8 * r, rows);
        const Site at{box.b,
                      box.h,
                      box.i_low + (KEYS_ARE_ROWS ? tile_column : row),
                      box.j_low + (KEYS_ARE_ROWS ? row : tile_column),
                      box.len_q,
                      box.len_k,
                      box.start_q,
                      box.start_k};
        if (!mask_allows(p, at)) mask[r] &= ~(1u << n);
      }
    }
  }
}

// Products q k become probabilities, 2^(c s - lse log2 e), at most 1. If MASKED, a masked pair gets
// the weight of one.
template <bool MASKED, bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void exponentiate(float (&s)[ROWS][COLUMNS],
                                             const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS>& lse,
                                             float c, const unsigned int (&mask)[ROWS]) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float offset = lse.of(r, n) * number::LOG2_E<float>;
      const float x = ptx::exp2(gradient_tile::at_most_zero(fma(s[r][n], c, -offset)));
      s[r][n] = !MASKED || (mask[r] >> n & 1) != 0 ? x : matmul::masked_weight();
    }
  }
}

// The site of a thread's element in row r, `step` columns after column `column`. If the score mod
// reads tables, it is clamped to the tile's last query and key. Site::step_i and step_j know
// `step`.
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ Site site_of(const TileBox& box, const Corner& corner, int r, int column,
                                        int step) {
  const int i_last = static_cast<int>(box.i_high - box.i_low);
  const int j_last = static_cast<int>(box.j_high - box.j_low);
  int row = corner.row + 8 * r, tile_column = corner.column + 4 * column + step;
  if constexpr (SCORE_READS) {
    row = tile::smaller(row, KEYS_ARE_ROWS ? j_last : i_last);
    tile_column = tile::smaller(tile_column, KEYS_ARE_ROWS ? i_last : j_last);
  }
  return Site{box.b,
              box.h,
              box.i_low + (KEYS_ARE_ROWS ? tile_column : row),
              box.j_low + (KEYS_ARE_ROWS ? row : tile_column),
              box.len_q,
              box.len_k,
              box.start_q,
              box.start_k,
              KEYS_ARE_ROWS ? step : 8 * r,
              KEYS_ARE_ROWS ? 8 * r : step};
}

// Products q k become logits: scale, then score mod, instantiated for all of a thread's pairs.
// Returns whether any may be -inf.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ bool apply_score_mod(const Params& p, const HeadConstants& constants,
                                                float scale, const TileBox& box,
                                                float (&s)[ROWS][COLUMNS], const Corner& corner) {
  float sum[ROWS] = {};  // of logits, not finite if one of them is not
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Site at = site_of<KEYS_ARE_ROWS>(box, corner, r, 0, 8 * (n / 2) + n % 2);
      s[r][n] = score_mod(p, constants, s[r][n] * scale, at);
      sum[r] += s[r][n];
    }
  }
  bool finite = true;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) finite = finite && number::is_finite(sum[r]);
  return !finite;
}

// Clears the mask bits of logits of -inf. Unless `masked`, the mask is all ones at first.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void mask_infinite(const float (&s)[ROWS][COLUMNS], bool masked,
                                              unsigned int (&mask)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (!masked) mask[r] = 0xffffffffu;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (s[r][n] == -number::infinity()) mask[r] &= ~(1u << n);
    }
  }
}

// recompute_probabilities with a score mod: products q k become probabilities times the derivative
// of the score mod. Table look-ups for pairs that do not exist are clamped. The score mod is
// instantiated for STEP columns, through which all rotate. Returns whether any pair is masked.
template <bool KEYS_ARE_ROWS, int BYTES, int STEP = 2, int ROWS, int COLUMNS>
__device__ __forceinline__ bool recompute_modified(
    const Params& p, const HeadConstants& constants, float scale, const TileBox& box, bool masked,
    const unsigned int (&mask)[ROWS], float (&s)[ROWS][COLUMNS], const Corner& corner,
    const float* lse_smem, const unsigned int (&kept)[ROWS],
    unsigned int (&weights)[ROWS][COLUMNS / 2], char* tile_smem) {
  bool has_masked = false;
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
          float logit = score_mod(p, constants, score, at);
          if (masked && (mask[r] >> (column + n + x) & 1) == 0) logit = -number::infinity();
          const float offset =
              lse_smem[query_of<KEYS_ARE_ROWS>(r, column + n + x)] * number::LOG2_E<float>;
          const bool unmasked = logit != -number::infinity();
          has_masked = has_masked || !unmasked;
          float p_ij =
              ptx::exp2(gradient_tile::at_most_zero(fma(logit, number::LOG2_E<float>, -offset)));
          p_ij = weight[x] = unmasked ? p_ij : matmul::masked_weight();
          if (HAS_DROPOUT && (kept[r] >> (column + n + x) & 1) == 0) weight[x] *= 0.0f;
          if constexpr (HAS_DSCORE) {
            const float product = p_ij * score_mod_derivative(p, constants, score, at);
            // It stays 0 for any derivative, and never becomes -0.0, which means masked.
            if (p_ij != 0.0f) p_ij = product == 0.0f ? 0.0f : product;
          }
          s[r][n + x] = p_ij;
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
  return has_masked;
}

// Products q k become probabilities; with a score mod, probabilities times its derivative. A masked
// pair gets the weight of one. Returns whether there may be one. If keys are rows, `weights`
// receives the probabilities after dropout in the storage type, or if BYTES > 0 the tile in shared
// memory does, its rows BYTES apart; the division by the probability of keeping is left to the
// epilogue. `lse_smem` is that of the corner's query.
template <bool KEYS_ARE_ROWS, int BYTES, int ROWS, int COLUMNS>
__device__ __forceinline__ bool recompute_probabilities(
    const Params& p, const TileBox& box, int tile_class, bool masked, float (&s)[ROWS][COLUMNS],
    const Corner& corner, const float* lse_smem, const unsigned int (&kept)[ROWS],
    unsigned int (&weights)[ROWS][COLUMNS / 2], char* tile_smem) {
  unsigned int mask[ROWS];
  if (masked) evaluate_mask<KEYS_ARE_ROWS, COLUMNS>(p, box, tile_class, corner, mask);
  if constexpr (HAS_SCORE) {
    const bool has_masked = recompute_modified<KEYS_ARE_ROWS, BYTES>(
        p, tile::head_constants_of(p, box), static_cast<float>(p.scale), box, masked, mask, s,
        corner, lse_smem, kept, weights, tile_smem);
    return masked || has_masked;
  }
  const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS> lse(lse_smem);
  const float c = static_cast<float>(p.scale) * number::LOG2_E<float>;
  if (masked) {
    exponentiate<true>(s, lse, c, mask);
  } else {
    exponentiate<false>(s, lse, c, mask);
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

// dS = p (dP - delta), for products dP = do v, in tile_column of either; with a score mod, times
// its derivative, which s contains. What is 0 stays 0.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_gradients(const Params& p, bool masked,
                                                const float (&s)[ROWS][COLUMNS],
                                                const float (&dp)[ROWS][COLUMNS],
                                                const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS>& delta,
                                                const unsigned int (&kept)[ROWS],
                                                float (&ds)[ROWS][COLUMNS]) {
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  const auto centred = [&](int r, int n) {
    float x = dp[r][n];
    if constexpr (HAS_DROPOUT) x *= (kept[r] >> n & 1) != 0 ? keep_scale : 0.0f;
    return x - delta.of(r, n);
  };
  if (!masked) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const float dp_minus_delta = centred(r, n);
        ds[r][n] = HAS_DSCORE && dp_minus_delta == 0.0f ? 0.0f : s[r][n] * dp_minus_delta;
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const float dp_minus_delta = centred(r, n);
      float gradient = s[r][n] * dp_minus_delta;
      if (HAS_DSCORE && dp_minus_delta == 0.0f) gradient = 0.0f;
      gradient = gradient == 0.0f ? 0.0f : gradient;  // +0.0: -0.0 means masked
      ds[r][n] = matmul::is_unmasked(s[r][n]) ? gradient : matmul::masked_weight();
    }
  }
}

}  // namespace fragment_gradient
