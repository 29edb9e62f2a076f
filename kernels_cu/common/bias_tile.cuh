// The tile of a bias that a block owns which computes its gradient: which one it is, and where the
// gradient goes.
#pragma once
#include "gradient_tile.cuh"

namespace bias_tile {

// A bias is broadcast along axes of length 1. Of its tiles a block has one, as the bias is stored.
struct BiasTile {
  layout::Entry first;  // of the entries that were given the tile
  long long head, q_block, kv_block;
  bool one_head, one_query, one_key;

  __device__ __forceinline__ explicit BiasTile(const Params& p)
      : one_head(p.bias_heads == 1), one_query(p.bias_len_q == 1), one_key(p.bias_len_k == 1) {
    const layout::Quotient of_keys =
        layout::divide(blockIdx.x, (p.bias_len_k + BLOCK_KV - 1) / BLOCK_KV);
    const layout::Quotient of_queries =
        layout::divide(of_keys.quotient, (p.bias_len_q + BLOCK_Q - 1) / BLOCK_Q);
    const layout::Quotient of_heads = layout::divide(of_queries.quotient, p.bias_heads);
    kv_block = of_keys.remainder;
    q_block = of_queries.remainder;
    head = of_heads.remainder;
    first = layout::first_entry(p, of_heads.quotient);
  }
};

// Writes rows of a tile whose every key exists, 16 bytes at a time. Returns whether that is
// possible.
template <int STRIDE>
__device__ __forceinline__ bool store_vectors(const Params& p, const BiasTile& own, long long base,
                                              const accum_t* sums_smem) {
  constexpr int PIECES = BLOCK_KV / STORED_VECTOR;
  const long long i0 = own.q_block * BLOCK_Q, j0 = own.kv_block * BLOCK_KV;
  storage_t* const data = reinterpret_cast<storage_t*>(p.dbias.data) + base + i0 * p.dbias.row + j0;
  const bool aligned = reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  if (own.one_query || own.one_key || j0 + BLOCK_KV > p.bias_len_k ||
      p.kind_dbias != number::STORAGE_KIND || p.dbias.col != 1 ||
      p.dbias.row % STORED_VECTOR != 0 || !aligned) {
    return false;
  }
  const int rows = tile::rows_from(i0, p.bias_len_q, BLOCK_Q);
#pragma unroll 2
  for (int n = threadIdx.x; n < rows * PIECES; n += THREADS) {
    const int row = n / PIECES, column = n % PIECES * STORED_VECTOR;
    StoredVector made;
#pragma unroll
    for (int x = 0; x < STORED_VECTOR; x += VECTOR) {
      const auto sums = *reinterpret_cast<const Vector*>(sums_smem + row * STRIDE + column + x);
#pragma unroll
      for (int y = 0; y < VECTOR; ++y) number::narrow(sums.x[y], &made.x[x + y]);
    }
    *reinterpret_cast<StoredVector*>(data + row * p.dbias.row + column) = made;
  }
  return true;
}

// Writes the tile's gradient, whose rows in shared memory are STRIDE numbers apart: sums of its
// rows where it has one query, and of its columns where it has one key.
template <int STRIDE>
__device__ __forceinline__ void store(const Params& p, const BiasTile& own, const accum_t* sums_smem) {
  const long long base = layout::lead_offset(p.dbias, own.first) + own.head * p.dbias.head;
  if constexpr (STRIDE % VECTOR == 0) {
    if (store_vectors<STRIDE>(p, own, base, sums_smem)) return;
  }
  const int rows = own.one_query ? 1 : BLOCK_Q, columns = own.one_key ? 1 : BLOCK_KV;
#pragma unroll 1
  for (int n = threadIdx.x; n < rows * columns; n += THREADS) {
    const int row = n / columns, column = n % columns;
    const long long i = own.one_query ? 0 : own.q_block * BLOCK_Q + row;
    const long long j = own.one_key ? 0 : own.kv_block * BLOCK_KV + column;
    if (i >= p.bias_len_q || j >= p.bias_len_k) continue;
    accum_t sum = 0;
    for (int r = row; r < (own.one_query ? BLOCK_Q : row + 1); ++r) {
      for (int c = column; c < (own.one_key ? BLOCK_KV : column + 1); ++c) {
        sum += sums_smem[r * STRIDE + c];
      }
    }
    number::store(p.dbias.data, p.kind_dbias, base + i * p.dbias.row + j * p.dbias.col, sum);
  }
}

}  // namespace bias_tile
