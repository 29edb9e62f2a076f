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

// Whether dropout keeps the pair of element (r, n), by the bits of rows.
template <int ROWS>
__device__ __forceinline__ bool keeps(const unsigned int (&kept)[ROWS], int r, int n) {
  return (kept[r] >> n & 1) != 0;
}

// Which pairs dropout keeps: bit n of kept[r] is that of element (r, n). One draw serves eight
// pairs, in two rows and four columns. If keys are rows, two lanes hold halves of two draws: each
// makes one and sends half of it.
template <bool KEYS_ARE_ROWS, int COLUMNS, int ROWS>
__device__ __forceinline__ void draw_dropout(const Params& p, const TileBox& box,
                                             const Corner& corner, unsigned int (&kept)[ROWS]) {
  static_assert(COLUMNS <= 32, "a bit for each column");
  static_assert(ROWS % 2 == 0, "groups of pairs");
  const philox::Key key = tile::seed_key(p);
  const unsigned long long b_h = tile::number_of_head(p, box);
  const int row = KEYS_ARE_ROWS ? corner.column : corner.row;
  const auto i = static_cast<unsigned int>(tile::origin_q(p) + box.i_low + row);
  const auto j = static_cast<unsigned long long>(tile::origin_k(p) + box.j_low +
                                                 (KEYS_ARE_ROWS ? corner.row : corner.column));
#pragma unroll
  for (int r = 0; r < ROWS; ++r) kept[r] = 0;
  // Where warps share queries by eight, groups are not whole either.
  if (COLUMNS % 4 != 0 || !tile::groups_are_whole(p)) {
#pragma unroll 1
    for (int n = 0; n < COLUMNS; ++n) {
      const int along = 8 * (n / 2) + n % 2;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int query = KEYS_ARE_ROWS ? along : 8 * r, of_key = KEYS_ARE_ROWS ? 8 * r : along;
        const bool keeps = philox::keep(key, p.drop_below, b_h, i + query, j + of_key);
        kept[r] |= (keeps ? 1u : 0u) << n;
      }
    }
    return;
  }
  // Of the two queries of neighbouring columns, a lane draws for that whose number is its key's
  // place in the pair.
  const int place = KEYS_ARE_ROWS ? ptx::lane_index() / 4 % 2 : 0;
  const unsigned int keys = philox::group_of_key(j), queries = philox::group_of_query(i + place);
  const unsigned int addend = philox::addend(p.drop_below);
#pragma unroll 2
  for (int column = 0; column < COLUMNS; column += 4) {
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
      const philox::Words drawn = philox::draw(key, keys + (KEYS_ARE_ROWS ? 2 * r : column),
                                               queries + (KEYS_ARE_ROWS ? 2 * column : 4 * r), b_h);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        if constexpr (KEYS_ARE_ROWS) {
          // The halves of query x's words that are the lane's key's, and those of the other lane's.
          const unsigned int low = drawn.word[2 * x], high = drawn.word[2 * x + 1];
          const unsigned int first = ptx::select_bytes(low, high, 0x5410);
          const unsigned int second = ptx::select_bytes(low, high, 0x7632);
          const unsigned int held = place != 0 ? second : first;
          const unsigned int received = ptx::shuffle_xor(place != 0 ? first : second, 4);
          const unsigned int own = philox::keep_bits(held, addend);
          const unsigned int other = philox::keep_bits(received, addend);
          const int n = column + 2 * x;
#pragma unroll
          for (int y = 0; y < 2; ++y) {
            kept[r + y] |= (own >> (15 + 16 * y) & 1u) << (n + place) |
                           (other >> (15 + 16 * y) & 1u) << (n + 1 - place);
          }
        } else {
#pragma unroll
          for (int y = 0; y < 2; ++y) {
            const unsigned int bits = philox::keep_bits(drawn.word[2 * x + y], addend);
            kept[r + x] |= ((bits >> 15 & 1u) | bits >> 31 << 1) << (column + 2 * y);
          }
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
// its derivative, which s contains. What is 0 stays 0. `kept` says which pairs dropout keeps.
template <bool KEYS_ARE_ROWS, int ROWS, int COLUMNS, class Kept>
__device__ __forceinline__ void score_gradients(const Params& p, bool masked,
                                                const float (&s)[ROWS][COLUMNS],
                                                const float (&dp)[ROWS][COLUMNS],
                                                const PerQuery<KEYS_ARE_ROWS, ROWS, COLUMNS>& delta,
                                                const Kept& kept, float (&ds)[ROWS][COLUMNS]) {
  const float keep_scale = HAS_DROPOUT ? static_cast<float>(p.keep_scale) : 1.0f;
  const auto centred = [&](int r, int n) {
    float x = dp[r][n];
    if constexpr (HAS_DROPOUT) x *= keeps(kept, r, n) ? keep_scale : 0.0f;
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
