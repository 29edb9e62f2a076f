// Which warps have the rows of a block's results, and what they exchange.
//
// A warp has its rows alone, except those of wide heads, for whose results a warp has too few
// registers: these ROW_SHARERS warps share. Each of them computes the scores of WARP_KEYS of a
// tile's keys, and has every ROW_SHARERS-th unit of 16 columns of the result. Maxima, sums and
// weights of rows go from warp to warp through shared memory.
#pragma once
#include "../ptx/barrier.cuh"
#include "fragment_product.cuh"
#include "fragment_softmax.cuh"
#include "fragment_wide.cuh"

namespace fragment_sharers {

// Bytes between the rows of a tile of 16-bit weights in shared memory.
constexpr int P_BYTES = BLOCK_KV <= 32 ? 64 : fragment::row_bytes(BLOCK_KV);

// Which of the warps that share rows this one is.
__device__ __forceinline__ int sharer() { return threadIdx.x / ptx::WARP_SIZE % ROW_SHARERS; }

// The warps that share rows wait for each other.
__device__ __forceinline__ void wait() {
  constexpr int TOGETHER = ROW_SHARERS * ptx::WARP_SIZE;
  ptx::named_barrier_sync(1 + threadIdx.x / TOGETHER, TOGETHER);
}

// The block's row of a thread's elements (r, n).
__device__ __forceinline__ int row_of(int r) {
  return fragment::warp_row() + 8 * r + fragment::lane_row();
}

// Writes the warp's weights, two to a word, to the block's tile of them.
template <int ROWS, int WORDS>
__device__ __forceinline__ void put_weights(const unsigned int (&weights)[ROWS][WORDS],
                                            char* p_smem) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < WORDS; ++n) {
      const int at = fragment::swizzled_offset<P_BYTES>(row_of(r), fragment::warp_key() / 8 + n);
      *reinterpret_cast<unsigned int*>(p_smem + at + 2 * fragment::lane_column()) = weights[r][n];
    }
  }
}

// What the softmax exchanges: a number of each row from each warp that has it.
struct RowNumbers {
  float x[ROW_SHARERS][BLOCK_Q];

  // Writes the warp's own, which the four lanes of a row have, and waits for those of the others.
  template <int ROWS>
  __device__ __forceinline__ void exchange(const float (&of_row)[ROWS]) {
    if (ptx::lane_index() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) x[sharer()][row_of(r)] = of_row[r];
    }
    wait();  // the numbers, written by the warps that share the rows
  }
  // Those of all sharers, added in their order, or the largest of them.
  template <int ROWS>
  __device__ __forceinline__ void add(float (&of_row)[ROWS]) {
    exchange(of_row);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      of_row[r] = 0;
#pragma unroll
      for (int n = 0; n < ROW_SHARERS; ++n) of_row[r] += x[n][row_of(r)];
    }
  }
  template <int ROWS>
  __device__ __forceinline__ void take_largest(float (&of_row)[ROWS]) {
    exchange(of_row);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < ROW_SHARERS; ++n) of_row[r] = fmax(of_row[r], x[n][row_of(r)]);
    }
  }
};

// The rows of a block that owns queries: SHARERS warps share each. `WIDTH` columns of values.
template <int WIDTH, int SHARERS>
struct ResultRows {
  using Share = fragment_product::Share<WIDTH, SHARERS, SHARERS>;
  static constexpr int COLUMNS = Share::COLUMNS;  // of the output, in a thread
  static constexpr int BYTES = BLOCK_Q * P_BYTES + static_cast<int>(sizeof(RowNumbers));
  // Steps of 16 keys that a product with values has in flight.
  static constexpr int UNROLL = 2;

  char* p_smem;
  Share share;
  __device__ __forceinline__ explicit ResultRows(char* smem) : p_smem(smem), share(sharer()) {}
  __device__ __forceinline__ RowNumbers& numbers() const {
    return *reinterpret_cast<RowNumbers*>(p_smem + BLOCK_Q * P_BYTES);
  }
  __device__ __forceinline__ const char* weights_smem() const {
    return p_smem + fragment::warp_row() * P_BYTES;
  }

  // As fragment_softmax::row_max, of the scores of all sharers.
  template <int ROWS, int TILE_COLUMNS>
  __device__ __forceinline__ bool row_max(const float (&s)[ROWS][TILE_COLUMNS],
                                          const float (&m)[ROWS], float (&m_new)[ROWS],
                                          float c) const {
    float largest[ROWS], of_lane[ROWS][1];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      largest[r] = -number::infinity();
#pragma unroll
      for (int n = 0; n < TILE_COLUMNS; ++n) largest[r] = fmax(largest[r], s[r][n]);
#pragma unroll
      for (int lanes = 1; lanes <= 2; lanes *= 2) {
        largest[r] = fmax(largest[r], ptx::shuffle_xor(largest[r], lanes));
      }
    }
    numbers().exchange(largest);
    // The four lanes of a row read those of all sharers.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      of_lane[r][0] = numbers().x[ptx::lane_index() % SHARERS][row_of(r)];
    }
    return fragment_softmax::row_max(of_lane, m, m_new, c);
  }
  template <int ROWS>
  __device__ __forceinline__ void row_sum(float (&l)[ROWS]) const {
    fragment_softmax::row_sum(l);
    numbers().add(l);
  }
  template <int ROWS, int WORDS>
  __device__ __forceinline__ void put(const unsigned int (&weights)[ROWS][WORDS]) const {
    put_weights(weights, p_smem);
  }
  template <int ROWS, int WORDS>
  __device__ __forceinline__ void add_nonfinite(float (&acc)[ROWS][COLUMNS],
                                                unsigned int (&)[ROWS][WORDS],
                                                const char* v_smem) const {
    fragment_product::add_nonfinite<WIDTH, BLOCK_KV, P_BYTES>(acc, weights_smem(), weights_smem(),
                                                              v_smem, share);
  }
  template <int ROWS, int WORDS>
  __device__ __forceinline__ void multiply_add(float (&acc)[ROWS][COLUMNS],
                                               unsigned int (&)[ROWS][WORDS],
                                               const char* v_smem) const {
    fragment_product::multiply_add<WIDTH, BLOCK_KV, P_BYTES, UNROLL>(acc, weights_smem(), v_smem,
                                                                     share, [](int) {});
  }
  __device__ __forceinline__ int column(int n) const { return share.column(n); }
  // Stores a result, each row times a factor, by way of memory for a block's rows, which no warp
  // uses. Row 0 of the block goes to row `first` of the head that begins at `offset()`; `valid`
  // rows exist.
  template <int ROWS, class Offset>
  __device__ __forceinline__ void store(float (&acc)[ROWS][COLUMNS], const float (&factor)[ROWS],
                                        const Operand& to, const Offset& offset, long long first,
                                        int valid, char* out_smem) const {
    fragment_softmax::scale_rows(acc, factor);
    fragment_product::store_rows<BLOCK_Q>(acc, share, fragment::warp_row(), to, WIDE_RESULT,
                                          offset(), first, valid, 1.0f, out_smem);
  }
};

// Those that a warp has alone.
template <int WIDTH>
struct ResultRows<WIDTH, 1> {
  static constexpr int COLUMNS = fragment::whole_columns(WIDTH) / 4;
  static constexpr int BYTES = 0;

  __device__ __forceinline__ explicit ResultRows(char*) {}
  template <int ROWS, int TILE_COLUMNS>
  __device__ __forceinline__ bool row_max(const accum_t (&s)[ROWS][TILE_COLUMNS],
                                          const accum_t (&m)[ROWS], accum_t (&m_new)[ROWS],
                                          accum_t c) const {
    return fragment_softmax::row_max(s, m, m_new, c);
  }
  template <int ROWS>
  __device__ __forceinline__ void row_sum(accum_t (&l)[ROWS]) const {
    fragment_softmax::row_sum(l);
  }
  template <int ROWS, int WORDS>
  __device__ __forceinline__ void put(const fragment::word_t (&)[ROWS][WORDS]) const {}
  template <int ROWS, int WORDS>
  __device__ __forceinline__ void add_nonfinite(accum_t (&acc)[ROWS][COLUMNS],
                                                fragment::word_t (&weights)[ROWS][WORDS],
                                                const char* v_smem) const {
    fragment::add_nonfinite<WIDTH>(acc, weights, v_smem);
  }
  template <int ROWS, int WORDS>
  __device__ __forceinline__ void multiply_add(accum_t (&acc)[ROWS][COLUMNS],
                                               fragment::word_t (&weights)[ROWS][WORDS],
                                               const char* v_smem) const {
    fragment::multiply_add<WIDTH>(acc, weights, v_smem);
  }
  __device__ __forceinline__ int column(int n) const {
    return fragment::result_column(fragment::Kind(), n);
  }
  template <int ROWS, class Offset>
  __device__ __forceinline__ void store(const accum_t (&acc)[ROWS][COLUMNS],
                                        const accum_t (&factor)[ROWS], const Operand& to,
                                        const Offset& offset, long long first, int valid,
                                        char* out_smem) const {
    const int row = fragment::warp_row();
    if constexpr (WIDE_RESULT) {
      fragment::store_wide<WIDTH>(acc, factor, to, offset() + (first + row) * to.row, valid - row);
    } else {
      char* const rows_smem = out_smem + row * fragment::row_bytes(WIDTH);
      fragment::put_rows<WIDTH>(fragment::Kind(), acc, factor, rows_smem);
      __syncwarp();  // the warp's rows of the output, written by its lanes
      fragment::copy_out<WIDTH>(to, offset() + (first + row) * to.row, fragment::WARP_ROWS,
                                valid - row, ptx::lane_index(), ptx::WARP_SIZE, rows_smem);
    }
  }
};

}  // namespace fragment_sharers
