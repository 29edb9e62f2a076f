// What a reduction takes of the pairs of a tile: weights, logits, parts of an entropy, or values of
// an expression. The twin of `fill_values` in reference/cpu/reduce.py.
//
// Which of them, and what is taken, are numbers at run time, so that one kernel serves all.
#pragma once
#include "../common/gradient_tile.cuh"

namespace pair_values {

// Numbered as in reference/cpu/reduce.py.
constexpr int OF_LOGIT = 0, OF_WEIGHT = 1, OF_ENTROPY = 2, OF_EXPRESSION = 3;
constexpr int SUM = 0, MAX = 1, TOP = 2;

// What is taken of no pair.
__device__ __forceinline__ accum_t of_none(int by) {
  return by == SUM ? accum_t(0) : -number::infinity();
}

// A sum, or the larger value; NaN stays.
__device__ __forceinline__ accum_t take(int by, accum_t found, accum_t value) {
  if (by == SUM) return found + value;
  return value > found || value != value ? value : found;
}

// The same over all threads that share rows, which all get the result.
__device__ __forceinline__ accum_t take_over_columns(int by, accum_t found) {
#pragma unroll
  for (int lanes = ptx::WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    if ((lanes & COLUMN_LANES) == 0) continue;
    found = take(by, found, ptx::shuffle_xor(found, lanes));
  }
  return found;
}

// The log-sum-exp as exponents have it: of a row that sees nothing, it makes every weight 0.
__device__ __forceinline__ accum_t usable(accum_t lse) {
  return lse == -number::infinity() ? number::infinity() : lse;
}

// The same of row i, if it exists and log-sum-exps are given; else a weight is 0, too.
__device__ __forceinline__ accum_t usable_lse(const Params& p, const memory::RowStatistic& of_rows,
                                              long long i, bool exists) {
  const bool is_given = p.lse.data != nullptr && exists;
  return is_given ? usable(of_rows.data[i * of_rows.row]) : number::infinity();
}

// A weight times minus its logarithm, `below`. A weight of 0 has no part, also where its logarithm
// is infinite.
__device__ __forceinline__ accum_t part_of_entropy(accum_t weight, accum_t below) {
  return weight == accum_t(0) ? accum_t(0) : weight * -below;
}

// Which numbers of the result a thread block owns: `place`, in an entry's head.
struct Owner {
  layout::Entry entry;
  long long h, place;
};

__device__ __forceinline__ Owner owner_of(const Params& p, unsigned int block) {
  const layout::Quotient by_place = layout::divide(block, p.blocks);
  const layout::Quotient by_head = layout::divide(by_place.quotient, p.heads);
  return {layout::first_entry(p, by_head.quotient), by_head.remainder, by_place.remainder};
}

// The queries of an owner's block of queries that take part, and the keys of its blocks of keys.
struct OwnerRange {
  long long i_begin, i_end, j_begin, j_end;
};

// `place` is the number of the block of queries and of the blocks of keys.
__device__ __forceinline__ OwnerRange range_of(const ReduceParams& t, const layout::Entry& entry,
                                               const layout::Quotient& place) {
  const long long i_first = place.quotient * t.block_q, i_last = i_first + t.block_q;
  const long long j_begin = place.remainder * t.keys_of_owner;
  const long long j_last = j_begin + t.keys_of_owner;
  return {i_first > t.first_query ? i_first : t.first_query,
          i_last < t.end_query ? i_last : t.end_query, j_begin,
          j_last < entry.len_k ? j_last : entry.len_k};
}

// Stores what is taken of `nj` keys from j0 on, key by key in `taken_smem`, by blocks of keys.
// Those from an owner's first key on are `first`; others may continue a block. By all threads.
__device__ __forceinline__ void store_blocks(const ReduceParams& t, int by, accum_t* found,
                                             long long j0, bool first, int nj,
                                             const accum_t* taken_smem) {
  const long long size = t.block_k < BLOCK_KV ? t.block_k : BLOCK_KV;
  for (long long n = threadIdx.x * size; n < nj; n += THREADS * size) {
    const long long end = n + size < nj ? n + size : nj;
    accum_t* const to = found + (j0 + n) / t.block_k * t.found.col;
    accum_t value = first ? of_none(by) : *to;
    for (long long j = n; j < end; ++j) value = take(by, value, taken_smem[j]);
    *to = value;
  }
}

// Turns a thread's products q k into the values of pairs, and those of pairs that do not attend
// into what is taken of none. tile_smem is scratch memory for the thread's cells, which has logits
// afterwards if it STORES them; so is value_smem, for those of an expression. `lse_of(r, n)` is the
// log-sum-exp of the query of element (r, n).
template <bool KEYS_ARE_ROWS, int STRIDE, bool STORES, int ROWS, int COLUMNS, typename LseOf>
__device__ __forceinline__ void evaluate(const ReduceParams& t, const TileBox& box, int tile_class,
                                         accum_t (&s)[ROWS][COLUMNS], accum_t* tile_smem,
                                         accum_t* value_smem, LseOf lse_of) {
  matmul::scale(s, static_cast<accum_t>(t.call.scale));
  // 3 score mod
  // 4 mask
  tile::apply_score_and_mask<KEYS_ARE_ROWS, STRIDE>(t.call, box, tile_class, s, tile_smem,
                                                    HAS_DSCORE ? value_smem : nullptr);
  if (STORES && t.by == TOP) tile::store_cells<STRIDE>(s, tile_smem);
  // 5 values
  const accum_t none = of_none(t.by);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const bool attends = s[r][n] != -number::infinity();
      accum_t value = s[r][n];
      if (t.of == OF_EXPRESSION) {
        value = accum_t(1);
        if (HAS_DSCORE && attends) value = value_smem[tile::cell<STRIDE>(r, n)];
      } else if (t.of != OF_LOGIT) {
        const accum_t below = gradient_tile::at_most_zero(s[r][n] - lse_of(r, n));
        const accum_t weight = softmax::exponential(below);
        value = t.of == OF_ENTROPY ? part_of_entropy(weight, below) : weight;
      }
      s[r][n] = attends ? value : none;
    }
  }
}

}  // namespace pair_values
