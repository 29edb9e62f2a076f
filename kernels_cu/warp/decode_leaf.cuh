// One leaf on tensor cores, of decode_sm80.cu and decode_sm80_shared.cu: the steps in which its
// keys and values come, and its product with the values. Part of the twin of
// reference/cpu/decode.py.
#pragma once
#include "decode_scores.cuh"
#include "decode_slots.cuh"
#include "decode_rows.cuh"
#include "fragment_softmax.cuh"

namespace decode_leaf {

using decode::LEAF;
using decode_scores::COLUMNS;
using decode_slots::COLUMNS_V;
using decode_slots::ROWS;
using decode_slots::State;
constexpr bool K_CODES = KEY_CODES != cache::NUMBERS, V_CODES = VALUE_CODES != cache::NUMBERS;
constexpr int K_BYTES = fragment::row_bytes(fragment_codes::units<KEY_CODES>(D));
constexpr int V_BYTES = fragment::row_bytes(fragment_codes::units<VALUE_CODES>(D_V));
constexpr int ROW_BYTES = matmul::larger(K_BYTES, V_BYTES);
constexpr int STAGE_BYTES = 8192;
// A half or a quarter of a leaf where all of it has no room.
constexpr int ROOM = STAGE_BYTES / ROW_BYTES;
constexpr int STEP_KEYS = ROOM >= LEAF ? LEAF : ROOM >= LEAF / 2 ? LEAF / 2 : LEAF / 4;
constexpr int STEPS = LEAF / STEP_KEYS;    // of keys, and as many of values
constexpr bool IN_REGISTERS = D_V <= 128;  // the node of level 1
constexpr int QUERY_BYTES = 16 * fragment::row_bytes(D);
static_assert(STEP_KEYS * ROW_BYTES <= STAGE_BYTES && STEP_KEYS % 16 == 0, "D, D_V");

// Calls function(Step<0>()), function(Step<1>()) and so on.
template <int N>
struct Step {
  static constexpr int value = N;
};
template <int N, int END, class Function>
__device__ __forceinline__ void for_steps(const Function& function) {
  if constexpr (N < END) {
    function(Step<N>());
    for_steps<N + 1, END>(function);
  }
}

// The scales of a leaf's keys and values, of those that are codes.
constexpr int K_GROUPS = fragment_codes::groups<KEY_CODES>(D);
constexpr int V_GROUPS = fragment_codes::groups<VALUE_CODES>(D_V);
struct Scales {
  fragment_codes::RowScales<K_GROUPS> k;
  fragment_codes::RowScales<V_GROUPS> v;
};

// The scores of a step become those of its keys, from element FIRST of the leaf on.
template <int FIRST>
__device__ __forceinline__ void place_scores(accum_t (&s)[ROWS][COLUMNS],
                                             const accum_t (&part)[ROWS][STEP_KEYS / 4]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < STEP_KEYS / 4; ++n) s[r][FIRST + n] = part[r][n];
  }
}

__device__ __forceinline__ void negate(accum_t (&s)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) s[r][n] = -s[r][n];
  }
}

// The first rows' scores become weights of a softmax over this leaf alone, with these statistics.
template <int FIRST_ROWS>
__device__ __forceinline__ void weigh_first(accum_t (&s)[FIRST_ROWS][COLUMNS],
                                            merge::Statistics (&rows)[ROWS], accum_t c,
                                            bool has_masked) {
  accum_t m[FIRST_ROWS], l[FIRST_ROWS], m_new[FIRST_ROWS];
#pragma unroll
  for (int r = 0; r < FIRST_ROWS; ++r) {
    m[r] = -number::infinity();
    l[r] = 0;
  }
  fragment_softmax::row_max(s, m, m_new, c);
  fragment_softmax::exponentiate(s, m_new, l, c, has_masked);
  fragment_softmax::row_sum(l);
#pragma unroll
  for (int r = 0; r < FIRST_ROWS; ++r) rows[r] = merge::Statistics{m_new[r], l[r]};
}

// weigh_first of both rows of a thread, or of one if the task has none of the second ones, which
// then mean nothing.
__device__ __forceinline__ void weigh(accum_t (&s)[ROWS][COLUMNS], merge::Statistics (&rows)[ROWS],
                                      accum_t c, bool has_masked, bool has_second) {
  if (has_second) {
    weigh_first(s, rows, c, has_masked);
  } else {
    weigh_first(reinterpret_cast<accum_t(&)[1][COLUMNS]>(s), rows, c, has_masked);
    rows[1] = merge::no_keys();
  }
}

// `keys` is whose they are: a task, or a unit of shared keys.
template <class Keys>
__device__ __forceinline__ Scales load_scales(const Params& p, const decode::Leaf& leaf,
                                              const Keys& keys,
                                              const decode_rows::LeafPlaces& places) {
  Scales scales{};
  if (cache::HAS_CODES && leaf.exists) {
    if constexpr (K_CODES) {
      scales.k =
          decode_rows::load_scales<K_GROUPS>(keys.k_scale, p.k_scale, p.k_scale_page, leaf, places);
    }
    if constexpr (V_CODES) {
      scales.v =
          decode_rows::load_scales<V_GROUPS>(keys.v_scale, p.v_scale, p.v_scale_page, leaf, places);
    }
  }
  return scales;
}

// The weights of a leaf as its values need them: rounded, or still to be multiplied by scales.
template <bool = V_CODES>
struct Weights {
  accum_t of[ROWS][COLUMNS];

  __device__ __forceinline__ explicit Weights(const accum_t (&p)[ROWS][COLUMNS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) of[r][n] = p[r][n];
    }
  }
};
template <>
struct Weights<false> {
  fragment::word_t of[ROWS][COLUMNS / 2];

  __device__ __forceinline__ explicit Weights(const accum_t (&p)[ROWS][COLUMNS]) {
    fragment::narrow(p, of);
  }
};

// o += p v for the values of a step, from key FIRST of the leaf on. `meet` is a barrier of the
// warps that read the step; one of them clears values that are not finite.
template <int FIRST, class Meet>
__device__ __forceinline__ void accumulate(accum_t (&o)[ROWS][COLUMNS_V], const Weights<>& p,
                                           char* v_smem, const decltype(Scales::v)& scales,
                                           bool has_masked, bool clears, bool has_second,
                                           const Meet& meet) {
  if constexpr (V_CODES) {
    fragment_codes::multiply_add<D_V, FIRST, STEP_KEYS / 4>(o, p.of, v_smem, scales, has_masked,
                                                            has_second);
  } else {
    fragment::word_t weights[ROWS][STEP_KEYS / 8];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < STEP_KEYS / 8; ++n) weights[r][n] = p.of[r][FIRST / 8 + n];
    }
    if (has_masked && !decode_rows::is_finite<STEP_KEYS, D_V>(v_smem)) {
      fragment::add_nonfinite<D_V>(o, weights, v_smem);
      meet();  // the values, read by all lanes as they were copied
      if (clears) decode_rows::clear_nonfinite<STEP_KEYS, D_V>(v_smem);
      meet();  // the values, made finite by all lanes
    }
    fragment::multiply_add<D_V>(o, weights, v_smem);
  }
}

}  // namespace decode_leaf
