// Products of codes of 8 bits by wgmma, the transposition of values before them, and what is done
// with values that are not finite. The twin of reference/cpu/codes.py and
// reference/cpu/microkernel.py for the tensor cores of compute capability 9.0.
//
// wgmma takes codes only with rows along the depth, so values are transposed: a row of a transposed
// tile is a column of v. Of 16 keys, key 8 a + 2 b + c has byte 4 b + 2 a + c there: in this order
// a thread of the scores' product holds four keys of a word, which is the layout of a left operand.
#pragma once
#include "../common/code.cuh"
#include "../ptx/bytes.cuh"
#include "../ptx/wgmma_fp8.cuh"
#include "fp8_storage.cuh"
#include "warpgroup.cuh"

namespace warpgroup_fp8 {

constexpr int DEPTH = 32;         // of a product
constexpr int CODES = KEY_CODES;  // of queries, keys and values
constexpr bool IS_E4M3 = CODES == code::E4M3;
static_assert(KEY_CODES == VALUE_CODES, "codes of one format");
static_assert(IS_E4M3 || CODES == code::E5M2, "CODES is no format that wgmma multiplies");

// Issues c = a b^T for 64 rows of a and KEYS rows of b, WIDTH columns each. The caller fences,
// commits and waits.
template <int WIDTH, int KEYS, int COLUMNS>
__device__ __forceinline__ void multiply(float (&c)[2][COLUMNS], warpgroup::SmemDesc a,
                                         warpgroup::SmemDesc b) {
#pragma unroll
  for (int step = 0; step < (WIDTH + DEPTH - 1) / DEPTH; ++step) {
    const int line = step / 4 * warpgroup::SLAB_ROW_BYTES / 16, inside = step % 4 * 2;
    const ptx::SmemDesc left =
        warpgroup::wgmma_desc(a + (line * warpgroup::WARPGROUP_ROWS + inside));
    const ptx::SmemDesc right = warpgroup::wgmma_desc(b + (line * KEYS + inside));
    if constexpr (IS_E4M3) {
      ptx::wgmma_ss_e4m3(c, left, right, step > 0);
    } else {
      ptx::wgmma_ss_e5m2(c, left, right, step > 0);
    }
  }
}

// Issues c = a b for weights a in registers, 16 keys to a word, and the rows of a transposed tile
// that begin at b. The caller fences, commits and waits.
template <int WORDS, int COLUMNS>
__device__ __forceinline__ void multiply_weights(float (&c)[2][COLUMNS],
                                                 const unsigned int (&a)[2][WORDS],
                                                 warpgroup::SmemDesc b) {
#pragma unroll
  for (int k = 0; k < WORDS; k += 2) {
    const unsigned int left[4] = {a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]};
    const ptx::SmemDesc right = warpgroup::wgmma_desc(b + k);
    if constexpr (IS_E4M3) {
      ptx::wgmma_rs_e4m3(c, left, right, k > 0);
    } else {
      ptx::wgmma_rs_e5m2(c, left, right, k > 0);
    }
  }
}

// Rounds weights to e4m3, the keys of a word's bytes side by side.
template <int COLUMNS>
__device__ __forceinline__ void narrow(const float (&p)[2][COLUMNS],
                                       unsigned int (&to)[2][COLUMNS / 4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 4) {
      const unsigned int low = ptx::floats_to_e4m3(p[r][n], p[r][n + 1]);
      const unsigned int high = ptx::floats_to_e4m3(p[r][n + 2], p[r][n + 3]);
      to[r][n / 4] = low | high << 16;
    }
  }
}

// Which of four codes are not finite, as the highest bit of their bytes.
__device__ __forceinline__ unsigned int nonfinite_bytes(unsigned int codes) {
  constexpr unsigned int SPECIAL = code::Format<CODES>::SPECIAL * 0x01010101u;
  constexpr unsigned int REST = (0x80 - code::Format<CODES>::SPECIAL) * 0x01010101u;
  return ((codes & SPECIAL) + REST) & 0x80808080u;
}

// Transposes a tile of KEYS rows to ROWS rows, of which a warp has every WARPS-th 16. Returns
// whether the thread met codes that are not finite, if it CHECKS them. Several loads are under way
// before the first of them is stored: one by one, their latencies would add up to more than the
// time of a tile.
template <bool CHECKS, int KEYS, int ROWS, int WARPS>
__device__ __forceinline__ bool transpose(unsigned int tile_address, unsigned int to, int warp) {
  constexpr int BLOCKS = KEYS / 32;
  const int lane = ptx::lane_index(), matrix = lane / 8;
  const unsigned int key_address = tile_address + lane * warpgroup::SLAB_ROW_BYTES;
  // A matrix that is stored has even columns of one half and odd ones of the other, because rows of
  // a slab that are eight apart share banks.
  const unsigned int even = lane < 16 ? 0x6420 : 0x7531, odd = lane < 16 ? 0x7531 : 0x6420;
  const int first_row = 2 * (lane % 8) + (matrix % 2 ^ lane % 8 / 4);
  unsigned int found = 0;
#pragma unroll 1
  for (int group = warp; group < ROWS / 16; group += WARPS) {
    const unsigned int from = key_address + group / 8 * (KEYS * warpgroup::SLAB_ROW_BYTES) +
                              ((group % 8 ^ lane % 8) << 4);
    const unsigned int row_address = to + (16 * group + first_row) * warpgroup::SLAB_ROW_BYTES;
    // Each of 32 keys and 16 columns: a word has two keys and two columns.
    unsigned int words[BLOCKS][4];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      ptx::ldmatrix_x4_trans(words[block], from + block * 32 * warpgroup::SLAB_ROW_BYTES);
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const unsigned int (&own)[4] = words[block];
      if constexpr (CHECKS) {
#pragma unroll
        for (int x = 0; x < 4; ++x) found |= nonfinite_bytes(own[x]);
      }
      const unsigned int transposed[4] = {
          ptx::select_bytes(own[0], own[1], even),
          ptx::select_bytes(own[0], own[1], odd),
          ptx::select_bytes(own[2], own[3], even),
          ptx::select_bytes(own[2], own[3], odd),
      };
      const int piece = (2 * block + matrix / 2) ^ first_row % 8;
      ptx::stmatrix_x4(row_address + 16 * piece, transposed);
    }
  }
  return found != 0;
}

// The place of the code of a column of v and of a key, by its byte among those of 16 keys.
__device__ __forceinline__ int transposed_offset(int column, int group, int byte) {
  return column * warpgroup::SLAB_ROW_BYTES + ((group ^ column % 8) << 4) + byte;
}

// Sets to 0 what is not finite in a transposed tile of ROWS rows, by THREAD_COUNT threads.
template <int KEYS, int ROWS, int THREAD_COUNT>
__device__ __forceinline__ void clear_nonfinite(char* tile_smem, int thread) {
  constexpr int PIECES = KEYS / 16;
#pragma unroll 1
  for (int n = thread; n < ROWS * PIECES; n += THREAD_COUNT) {
    const int at = transposed_offset(n / PIECES, n % PIECES, 0);
    ptx::Bytes16& piece = *reinterpret_cast<ptx::Bytes16*>(tile_smem + at);
#pragma unroll
    for (int x = 0; x < 4; ++x) piece.x[x] &= ~((nonfinite_bytes(piece.x[x]) >> 7) * 0xffu);
  }
}

// c += a b for those codes of b only that are not finite, without pairs that take no part, as
// warpgroup_rows::add_nonfinite does.
template <int WORDS, int COLUMNS, class TakesPart>
__device__ __forceinline__ void add_nonfinite(float (&c)[2][COLUMNS], unsigned int (&a)[2][WORDS],
                                              const char* tile_smem, const TakesPart& takes_part) {
#pragma unroll 1
  for (int group = 0; group < WORDS; ++group) {
#pragma unroll 1
    for (int byte = 0; byte < 16; ++byte) {
      const int from = ptx::lane_index() / 4 * 4 + byte / 4;
      float weight[2];
      bool seen[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned int own = a[r][0] >> byte % 4 * 8 & 0xff;
        const bool mine = takes_part(r, 4 * group + byte % 4, own);
        const unsigned int pair = ptx::shuffle(own | (mine ? 0x100u : 0), from);
        weight[r] = code::value<code::E4M3>(pair & 0xff);
        seen[r] = pair >= 0x100u;
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const char* const column_smem =
            tile_smem + transposed_offset(fragment::lane_column() + x, group, byte);
#pragma unroll
        for (int n = x; n < COLUMNS; n += 2) {
          const char* const at = column_smem + n / 2 * 8 * warpgroup::SLAB_ROW_BYTES;
          const float value = code::value<CODES>(*reinterpret_cast<const unsigned char*>(at));
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (seen[r] && !number::is_finite(value)) c[r][n] += weight[r] * value;
          }
        }
      }
    }
    fragment::rotate<1>(a);
  }
}

}  // namespace warpgroup_fp8
