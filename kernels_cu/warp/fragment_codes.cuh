// Codes of 8 and 4 bits as operands of tensor cores: they become 16-bit numbers exactly in
// registers. Scales are factors of scores and of weights, in float32.
//
// A row of codes lies in shared memory as a row of 16-bit elements does, so that ldmatrix gives
// each lane four bytes of a row. Which columns these are is no matter to a product over columns if
// the queries have the same order: `query_column`. Of values they are columns of the result:
// `ResultColumns`.
#pragma once
#include "../common/cache_row.cuh"
#include "../ptx/bytes.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/pair.cuh"
#include "fragment.cuh"

namespace fragment_codes {

// Keys and values may have different formats, and one of them may be numbers.
template <int CODES>
constexpr int BITS = CODES == cache::NUMBERS ? 16
                     : CODES == code::INT4   ? 4
                                             : 8;
template <int CODES>
constexpr int PIECE = 128 / BITS<CODES>;  // codes in 16 bytes
template <int CODES>
constexpr int PAIR = 2 * PIECE<CODES>;  // and in the two pieces that ldmatrix reads of a row
template <int CODES>
constexpr int STEPS_OF_PIECE = PIECE<CODES> / 16;  // products of 16 codes

// Elements of 16 bits that hold the codes of a row, and the columns that these stand for: of
// queries if they are keys, or of the result.
template <int CODES>
__device__ constexpr int units(int width) {
  return (width * BITS<CODES> + 15) / 16;
}
template <int CODES>
__device__ constexpr int pairs(int width) {
  return (width + PAIR<CODES> - 1) / PAIR<CODES>;
}
template <int CODES>
__device__ constexpr int columns(int width) {
  return CODES == cache::NUMBERS ? fragment::whole_columns(width)
                                 : pairs<CODES>(width) * PAIR<CODES>;
}
// The scales of a row of `width` codes.
template <int CODES>
__device__ constexpr int groups(int width) {
  return BITS<CODES> == 4 ? (width + cache::INT4_GROUP - 1) / cache::INT4_GROUP : 1;
}

// Where a column of queries belongs, so that products over codes find it. Four bytes of lane c of
// four are codes 4 c to 4 c + 3, or 8 c to 8 c + 7.
__device__ __forceinline__ int query_column(int column) {
  if constexpr (KEY_CODES == cache::NUMBERS) return column;
  constexpr int EACH = PIECE<KEY_CODES>;
  const int first = column / EACH * EACH, n = column % EACH;
  if constexpr (BITS<KEY_CODES> == 8) return first + n / 4 * 2 + n % 4 / 2 + n % 2 * 8;
  return first + n % 4 / 2 * 16 + n % 2 * 8 + n / 8 * 2 + n % 8 / 4;
}

// -- numbers --------------------------------------------------------------------------------------

// 16-bit types to which codes are converted: two numbers in a word, constants for both of them.
struct Halves {
  static constexpr bool IS_HALVES = true;
  static constexpr unsigned int ONE = 0x3c003c00u;
  static constexpr unsigned int MINUS_1152 = 0xe480e480u, MINUS_1032 = 0xe408e408u;
  static constexpr unsigned int UNITS = 0x64006400u;  // 1024, whose last bit is 1
  static __device__ __forceinline__ unsigned int fma(unsigned int x, unsigned int y,
                                                     unsigned int z) {
    return ptx::fma_halves(x, y, z);
  }
};
struct Bfloats {
  static constexpr bool IS_HALVES = false;
  static constexpr unsigned int ONE = 0x3f803f80u, TWO_TO_127 = 0x7f007f00u, MINUS_2 = 0xc000c000u;
  static constexpr unsigned int MINUS_136 = 0xc308c308u;
  static constexpr unsigned int UNITS = 0x43004300u;  // 128, whose last bit is 1
  static __device__ __forceinline__ unsigned int fma(unsigned int x, unsigned int y,
                                                     unsigned int z) {
    return ptx::fma_bfloats(x, y, z);
  }
};
// A constant of integers, in both halves. One operand of an instruction can be a constant, and the
// compiler would load this one again for each instruction if it knew what it is.
template <int CODES, class To>
__device__ __forceinline__ unsigned int kept_constant() {
  if constexpr (CODES == code::INT8 && !To::IS_HALVES) {
    return ptx::shuffle(blockIdx.x < gridDim.x ? To::MINUS_2 : 0u, 0);
  } else if constexpr (CODES == code::INT8 || CODES == code::INT4) {
    constexpr unsigned int BIAS = CODES == code::INT4 ? 0x00080008u : 0x00800080u;
    return ptx::shuffle(blockIdx.x < gridDim.x ? To::UNITS | BIAS : 0u, 0);
  } else {
    return 0;
  }
}

// What numbers must be multiplied by to be codes: a factor of scores, or of sums of values.
template <int CODES, class To>
constexpr float UNIT = CODES == code::INT8 && !To::IS_HALVES ? 64.0f : 1.0f;

// Codes N and N + 2 of the four bytes of a word, N 0 or 1, as two numbers.
template <int CODES, class To, int N>
__device__ __forceinline__ unsigned int bytes(unsigned int word, unsigned int kept) {
  if constexpr (CODES == code::INT8) {
    if constexpr (To::IS_HALVES) {  // 1024 + 128 + code
      const unsigned int low = N == 0 ? word : word >> 8;
      return To::fma((low & 0x00ff00ffu) ^ kept, To::ONE, To::MINUS_1152);
    } else {  // the bits of 128 + code, which are so many times 2**-133 even if not subnormal
      const unsigned int both =
          ptx::select_bytes(word ^ 0x80808080u, 0, N == 0 ? 0x4240u : 0x4341u);
      return To::fma(both, To::TWO_TO_127, kept);
    }
  } else if constexpr (To::IS_HALVES && CODES == code::E5M2) {
    return (N == 0 ? word << 8 : word) & 0xff00ff00u;
  } else {
    // Exponent and fraction move to where the type has them, and a factor makes up for its bias.
    constexpr bool E4M3 = CODES == code::E4M3;
    constexpr int SHIFT = To::IS_HALVES ? 7 : E4M3 ? 4 : 5;
    constexpr unsigned int FACTOR = To::IS_HALVES ? 0x5c005c00u : E4M3 ? 0x7b807b80u : 0x77807780u;
    constexpr unsigned int KEPT = 0x80008000u | 0x007f007fu << SHIFT;
    // Two bytes, and above each of them its sign in all bits.
    const unsigned int both = ptx::select_bytes(word, 0, N == 0 ? 0xa280u : 0xb391u);
    return To::fma(both << SHIFT & KEPT, FACTOR, 0);
  }
}

// Codes that are not finite are so only as float16 of e5m2; as other types they become finite.
template <int CODES, class To>
constexpr bool LOSES_SPECIALS =
    (CODES == code::E4M3 || CODES == code::E5M2) && !(To::IS_HALVES && CODES == code::E5M2);

// Words of codes together: whether one of them is not finite. Adding LAST to such a code changes
// its sign, and may carry to the next one's.
template <int CODES>
struct Specials {
  static constexpr unsigned int LAST = CODES == code::E4M3 ? 0x01010101u : 0x04040404u;
  unsigned int changed = 0;

  __device__ __forceinline__ void look_at(unsigned int word) { changed |= word ^ (word + LAST); }
  __device__ __forceinline__ bool exist() const { return (changed & 0x80808080u) != 0; }
};
template <int CODES>
__device__ __forceinline__ bool is_special(unsigned char byte) {
  Specials<CODES> specials;
  specials.look_at(byte);
  return specials.exist();
}

// Codes N and N + 4 of the eight of a word, N from 0 to 3, as two numbers.
template <class To, int N>
__device__ __forceinline__ unsigned int nibbles(unsigned int word, unsigned int kept) {
  const unsigned int moved = ((word >> 4 * N) & 0x000f000fu) ^ kept;
  if constexpr (To::IS_HALVES) {
    return To::fma(moved, To::ONE, To::MINUS_1032);
  } else {
    return To::fma(moved, To::ONE, To::MINUS_136);
  }
}

// Numbers of a word: pair N of `STEPS_OF_PIECE` times two.
template <int CODES, class To, int N>
__device__ __forceinline__ unsigned int numbers(unsigned int word, unsigned int kept) {
  if constexpr (BITS<CODES> == 8) return bytes<CODES, To, N>(word, kept);
  return nibbles<To, N>(word, kept);
}

template <bool>
struct Choose {
  using type = Bfloats;
};
template <>
struct Choose<true> {
  using type = Halves;
};
using Queries = Choose<IS_FLOAT16>::type;

// -- scales ---------------------------------------------------------------------------------------

// The scales of a leaf's rows: lane n has those of keys n and 32 + n.
template <int GROUPS>
struct RowScales {
  float of[2][GROUPS];

  // Those of a thread's elements of a row of scores, from element FIRST on. All lanes call it
  // together.
  template <int FIRST, int COUNT>
  __device__ __forceinline__ void of_elements(float (&scales)[COUNT], int group) const {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) scales[n] = key(FIRST + n, group);
  }

  // The scale of the key of a thread's element n of a row of scores. All lanes call it together.
  __device__ __forceinline__ float key(int n, int group) const {
    const int key = 8 * (n / 2) + fragment::lane_column() + n % 2;
    return ptx::shuffle(of[n / 2 / 4][group], key % ptx::WARP_SIZE);
  }
};

// -- products -------------------------------------------------------------------------------------

// c += a b for the codes of b that are not finite, which the products have taken for others: rows a
// of queries and 4 COLUMNS rows b. The loops keep what is rare short.
template <int WIDTH, int FIRST, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_special_keys(float (&c)[ROWS][COLUMNS], const char* a_smem,
                                                 const char* b_smem, const RowScales<1>& scales) {
  constexpr int BYTES = fragment::row_bytes(units<KEY_CODES>(WIDTH));
#pragma unroll 1
  for (int n = 0; n < COLUMNS; n += 2) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int key = 4 * n + fragment::lane_column() + x, leaf_key = FIRST + key;
      const float low = ptx::shuffle(scales.of[0][0], leaf_key % ptx::WARP_SIZE);
      const float high = ptx::shuffle(scales.of[1][0], leaf_key % ptx::WARP_SIZE);
      const float scale = leaf_key < ptx::WARP_SIZE ? low : high;
#pragma unroll 1
      for (int d = 0; d < WIDTH; ++d) {
        const int at = fragment::swizzled_offset<BYTES>(key, d / 16) + d % 16;
        const unsigned char byte = static_cast<unsigned char>(b_smem[at]);
        if (!is_special<KEY_CODES>(byte)) continue;
        const float value = code::product(scale, code::value<KEY_CODES>(byte));
        const int column = query_column(d);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int place = fragment::swizzled_offset<fragment::row_bytes(WIDTH)>(
              fragment::lane_row() + 8 * r, column / STORED_VECTOR);
          c[r][x] += number::widen(reinterpret_cast<const storage_t*>(
                         a_smem + place)[column % STORED_VECTOR]) *
                     value;
        }
      }
    }
    fragment::rotate<2>(c);
  }
}

// c = a b^T for queries a, which begin at a_smem, and 4 COLUMNS rows b of codes with their scales,
// from row FIRST of their leaf on. A thread's second row means nothing unless it `has_second`.
template <int WIDTH, int FIRST, bool IN_REGISTERS, int ROWS, int COLUMNS, int GROUPS>
__device__ __forceinline__ void multiply(float (&c)[ROWS][COLUMNS],
                                         const fragment::Left<WIDTH, IN_REGISTERS, false>& a,
                                         const char* a_smem, const char* b_smem,
                                         const RowScales<GROUPS>& scales, bool has_second) {
  constexpr int CODES = KEY_CODES, EACH = PIECE<CODES>, STEPS = STEPS_OF_PIECE<CODES>;
  constexpr int BYTES = fragment::row_bytes(units<CODES>(WIDTH));
  const auto rows = fragment::right_rows<BYTES>(b_smem);
  Specials<CODES> specials;
  const unsigned int kept = kept_constant<CODES, Queries>();
  matmul::clear(c);
#pragma unroll 1  // Code of all warps has room in the instruction cache.
  for (int pair = 0; pair < pairs<CODES>(WIDTH); ++pair) {
    unsigned int words[COLUMNS / 4][4];  // of 8 rows and a piece, 8 rows and the next one, ...
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      ptx::ldmatrix_x4(words[n / 4], rows.at(4 * n, pair));
      if constexpr (LOSES_SPECIALS<CODES, Queries>) {
#pragma unroll
        for (int x = 0; x < 4; ++x) specials.look_at(words[n / 4][x]);
      }
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      if ((2 * pair + piece) * EACH >= WIDTH) break;
      constexpr bool BY_PIECES = GROUPS > 1;
      float part[ROWS][BY_PIECES ? COLUMNS : 1];
      if constexpr (BY_PIECES) matmul::clear(part);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unsigned int left[fragment::M_TILES][4];
        a.load(left, (2 * pair + piece) * STEPS + step);
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 2) {
          const unsigned int word = words[n / 4][n / 2 % 2 * 2 + piece];
          constexpr int NEXT = BITS<CODES> == 4 ? 2 : 0;
          const unsigned int low = step == 0 ? numbers<CODES, Queries, 0>(word, kept)
                                             : numbers<CODES, Queries, NEXT>(word, kept);
          const unsigned int high = step == 0 ? numbers<CODES, Queries, 1>(word, kept)
                                              : numbers<CODES, Queries, NEXT + 1>(word, kept);
          if constexpr (BY_PIECES) {
            fragment::mma(part[0][n], part[0][n + 1], part[1][n], part[1][n + 1], left[0], low,
                          high);
          } else {
            fragment::mma(c[0][n], c[0][n + 1], c[1][n], c[1][n + 1], left[0], low, high);
          }
        }
      }
      if constexpr (BY_PIECES) {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
          const float scale = scales.key(FIRST / 4 + n, 2 * pair + piece);
#pragma unroll
          for (int r = 0; r < ROWS; ++r) c[r][n] = fma(part[r][n], scale, c[r][n]);
        }
      }
    }
  }
  if constexpr (GROUPS == 1) {
    float own[COLUMNS];
    scales.template of_elements<FIRST / 4>(own, 0);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r == 1 && !has_second) break;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) c[r][n] = c[r][n] * UNIT<CODES, Queries> * own[n];
    }
  }
  if constexpr (LOSES_SPECIALS<CODES, Queries>) {
    if (ptx::any_lane(specials.exist())) add_special_keys<WIDTH, FIRST>(c, a_smem, b_smem, scales);
  }
}

// The elements of a thread's row of a result over values: of each 16-byte piece PIECE / 4 adjacent
// columns, or without codes two of each 8.
struct ResultColumns {
  static constexpr int EACH = VALUE_CODES == cache::NUMBERS ? 2 : PIECE<VALUE_CODES> / 4;
  static __device__ constexpr int elements(int width) { return columns<VALUE_CODES>(width) / 4; }
  // The column of element n.
  static __device__ __forceinline__ int column(int n) {
    return n / EACH * 4 * EACH + ptx::lane_index() % 4 * EACH + n % EACH;
  }
};

// Weights times the scale of a piece, rounded to bfloat16, whose range is that of float32;
// with queries in float16, which have three more bits, as sums of two numbers. Masked pairs keep
// their weight whatever the scale is.
template <int ROWS, int DEPTH>
struct ScaledWeights {
  static constexpr int TERMS = IS_FLOAT16 ? 2 : 1;
  unsigned int words[TERMS][ROWS][DEPTH / 2] = {};

  template <int FIRST, int GROUPS, int ALL>
  __device__ __forceinline__ void set(const float (&p)[ROWS][ALL], const RowScales<GROUPS>& scales,
                                      int group, bool masked, bool has_second) {
    // Two terms of two groups leave no registers in which their scales could wait.
    const bool skips = !(TERMS == 2 && GROUPS > 1) && !has_second;
    float scale[DEPTH];
    scales.template of_elements<FIRST / 4>(scale, group);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r == 1 && skips) break;
#pragma unroll
      for (int k = 0; k < DEPTH; k += 2) {
        float weight[2];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float own = p[r][FIRST / 4 + k + x];
          weight[x] = masked && !matmul::is_unmasked(own) ? own : own * scale[k + x];
        }
        words[0][r][k / 2] = ptx::floats_to_bfloats(weight[0], weight[1]);
        if constexpr (TERMS == 2) {
          const unsigned int large = words[0][r][k / 2];
          const float rest[2] = {weight[0] - __uint_as_float(large << 16),
                                 weight[1] - __uint_as_float(large & 0xffff0000u)};
          words[TERMS - 1][r][k / 2] = ptx::floats_to_bfloats(rest[0], rest[1]);
        }
      }
    }
  }

  // The next 16 keys become the first ones.
  __device__ __forceinline__ void rotate() {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) fragment::rotate<2>(words[term]);
  }
};

// Products of 16 keys with a 16-byte piece of their rows: elements N, N + 1 and on.
template <int N, int ROWS, int COLUMNS, class Terms>
__device__ __forceinline__ void multiply_piece(float (&c)[ROWS][COLUMNS], const Terms& weights,
                                               int k, unsigned int low, unsigned int high,
                                               unsigned int kept, int first) {
  constexpr int HALF = ResultColumns::EACH / 2;
  if constexpr (N < HALF) {
    const unsigned int b0 = numbers<VALUE_CODES, Bfloats, N>(low, kept);
    const unsigned int b1 = numbers<VALUE_CODES, Bfloats, N>(high, kept);
    const int n = first + N;
#pragma unroll
    for (int term = 0; term < Terms::TERMS; ++term) {
      const auto& own = weights.words[term];
      const unsigned int left[4] = {own[0][k / 2], own[1][k / 2], own[0][k / 2 + 1],
                                    own[1][k / 2 + 1]};
      ptx::mma_m16n8k16_bf16(c[0][n], c[0][n + HALF], c[1][n], c[1][n + HALF], left, b0, b1);
    }
    multiply_piece<N + 1>(c, weights, k, low, high, kept, first);
  }
}

// c += a b for the codes of b that are not finite, which the products have taken for others. Masked
// pairs are skipped. Every thread fetches the weights of its rows from the lane that holds them.
template <int WIDTH, int FIRST, int DEPTH, int ROWS, int ALL, int COLUMNS>
__device__ __forceinline__ void add_special_values(float (&c)[ROWS][COLUMNS],
                                                   const float (&p)[ROWS][ALL], const char* b_smem,
                                                   const RowScales<1>& scales) {
  constexpr int BYTES = fragment::row_bytes(units<VALUE_CODES>(WIDTH));
  float weights[ROWS][DEPTH];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) weights[r][k] = p[r][FIRST / 4 + k];
  }
#pragma unroll 1
  for (int key = 0; key < 4 * DEPTH; ++key) {
    const int owner = ptx::lane_index() / 4 * 4 + key % 8 / 2, leaf_key = FIRST + key;
    const float scale = ptx::shuffle(leaf_key < ptx::WARP_SIZE ? scales.of[0][0] : scales.of[1][0],
                                     leaf_key % ptx::WARP_SIZE);
    float weight[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      weight[r] = ptx::shuffle(key % 2 == 0 ? weights[r][0] : weights[r][1], owner);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = ResultColumns::column(n);
      if (column >= WIDTH) continue;
      const int at = fragment::swizzled_offset<BYTES>(key, column / 16) + column % 16;
      const unsigned char byte = static_cast<unsigned char>(b_smem[at]);
      if (!is_special<VALUE_CODES>(byte)) continue;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (matmul::is_unmasked(weight[r])) {
          c[r][n] += weight[r] * code::product(scale, code::value<VALUE_CODES>(byte));
        }
      }
    }
    if (key % 8 == 7) fragment::rotate<2>(weights);
  }
}

// c += a b for weights p of DEPTH keys of a thread, from key FIRST of their leaf on, and rows b of
// codes with their scales, in units of UNIT<VALUE_CODES, Bfloats>; some pairs may be `masked`, and
// a thread's second row of weights counts if it `has_second`.
template <int WIDTH, int FIRST, int DEPTH, int ROWS, int ALL, int COLUMNS, int GROUPS>
__device__ __forceinline__ void multiply_add(float (&c)[ROWS][COLUMNS], const float (&p)[ROWS][ALL],
                                             const char* b_smem, const RowScales<GROUPS>& scales,
                                             bool masked, bool has_second) {
  constexpr int CODES = VALUE_CODES;
  constexpr int BYTES = fragment::row_bytes(units<CODES>(WIDTH));
  const auto rows = fragment::left_rows<BYTES>(b_smem);
  Specials<CODES> specials;
  const unsigned int kept = kept_constant<CODES, Bfloats>();
  // Keys k, k + 1 and 14 other ones, of which `weights` has those from `held` on.
  const auto multiply_pair = [&](int k, int pair, const auto& weights, int held) {
    unsigned int words[4];  // 8 keys and a piece, 8 keys and the piece, ...
    ptx::ldmatrix_x4_trans(words, rows.at(4 * k, pair));
    if constexpr (LOSES_SPECIALS<CODES, Bfloats>) {
#pragma unroll
      for (int x = 0; x < 4; ++x) specials.look_at(words[x]);
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      if ((2 * pair + piece) * PIECE<CODES> >= WIDTH) break;
      const int first = (2 * pair + piece) * ResultColumns::EACH;
      multiply_piece<0>(c, weights[GROUPS > 1 ? piece : 0], held, words[2 * piece],
                        words[2 * piece + 1], kept, first);
    }
  };
  ScaledWeights<ROWS, DEPTH> weights[GROUPS > 1 ? 2 : 1];
  if constexpr (GROUPS == 1) {
    weights[0].template set<FIRST>(p, scales, 0, masked, has_second);
#pragma unroll 1  // as in `multiply`
    for (int k = 0; k < DEPTH; k += 4) {
#pragma unroll
      for (int pair = 0; pair < pairs<CODES>(WIDTH); ++pair) multiply_pair(k, pair, weights, 0);
      weights[0].rotate();
    }
  } else {
#pragma unroll
    for (int pair = 0; pair < pairs<CODES>(WIDTH); ++pair) {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const int group = 2 * pair + piece;
        weights[piece].template set<FIRST>(p, scales, group < GROUPS ? group : 0, masked,
                                           has_second);
      }
#pragma unroll
      for (int k = 0; k < DEPTH; k += 4) multiply_pair(k, pair, weights, k);
    }
  }
  if constexpr (LOSES_SPECIALS<CODES, Bfloats>) {
    if (ptx::any_lane(specials.exist())) {
      add_special_values<WIDTH, FIRST, DEPTH>(c, p, b_smem, scales);
    }
  }
}

}  // namespace fragment_codes
