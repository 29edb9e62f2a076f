// The gradient of a bias is computed tile by tile: which tile of the bias a block computes, which
// tiles of scores it sums for it, and how it stores it.
#pragma once
#include "gradient_tile.cuh"

namespace bias_tile {

// The tile of a block, and its part of the rows of scores that share it: blocks of queries of
// planes, which are heads of batch entries. All planes' first blocks come first, and a tile that
// belongs to one block of queries has a row in each plane. The bias has length 1 along the axes
// along which it is broadcast.
struct BiasTile {
  layout::Entry first;  // of the batch entries that share the tile
  long long head, q_block, kv_block;
  long long part, begin_row, end_row;
  bool one_head, one_query, one_key;

  __device__ __forceinline__ explicit BiasTile(const Params& p)
      : one_head(p.bias_heads == 1), one_query(p.bias_len_q == 1), one_key(p.bias_len_k == 1) {
    const layout::Quotient by_kv_block =
        layout::divide(blockIdx.x, (p.bias_len_k + BLOCK_KV - 1) / BLOCK_KV);
    const layout::Quotient by_q_block =
        layout::divide(by_kv_block.quotient, (p.bias_len_q + BLOCK_Q - 1) / BLOCK_Q);
    const layout::Quotient by_head = layout::divide(by_q_block.quotient, p.bias_heads);
    const layout::Quotient by_slice = layout::divide(by_head.quotient, layout::slices(p));
    kv_block = by_kv_block.remainder;
    q_block = by_q_block.remainder;
    head = by_head.remainder;
    first = layout::first_entry(p, by_slice.remainder);
    // The last part begins first: under a causal mask the last queries see most keys.
    const long long blocks_q = one_query ? (p.len_q + BLOCK_Q - 1) / BLOCK_Q : 1;
    const layout::PartOfSum rows(p, p.tasks - 1 - by_slice.quotient, planes(p) * blocks_q);
    part = rows.number;
    begin_row = rows.begin;
    end_row = rows.end;
  }
  // Heads that share the tile.
  __device__ __forceinline__ long long heads(const Params& p) const {
    return one_head ? p.heads : 1;
  }
  // Planes that share it.
  __device__ __forceinline__ long long planes(const Params& p) const {
    return layout::entries_sharing(p) * heads(p);
  }
  // Elements between the start of dbias and row 0 of the tile's head.
  __device__ __forceinline__ long long base(const Params& p) const {
    const long long size = layout::slices(p) * p.bias_heads * p.bias_len_q * p.bias_len_k;
    return part * size + layout::lead_offset(p.dbias, first) + head * p.dbias.head;
  }
};

// Calls `begin(entry, head, i0, ni)` for each row of scores of the block's part, in order, and then
// `add(box, tile_class, i0, ni, j0, nj)` for each of its tiles that is not EMPTY. All threads do.
template <class Begin, class Add>
__device__ __forceinline__ void for_each_tile(const Params& p, const BiasTile& tile_of_bias,
                                              Begin begin, Add add) {
  const long long planes = tile_of_bias.planes(p), heads = tile_of_bias.heads(p);
#pragma unroll 1
  for (long long row = tile_of_bias.begin_row; row < tile_of_bias.end_row; ++row) {
    const layout::Quotient by_plane = layout::divide(row, planes);
    const layout::Quotient at = layout::divide(by_plane.remainder, heads);
    const layout::Entry entry = layout::shared_entry(p, tile_of_bias.first, at.quotient);
    const long long h = tile_of_bias.one_head ? at.remainder : tile_of_bias.head;
    const long long i0 =
        (tile_of_bias.one_query ? by_plane.quotient : tile_of_bias.q_block) * BLOCK_Q;
    const long long j_limit =
        tile_of_bias.one_key ? entry.len_k : (tile_of_bias.kv_block + 1) * BLOCK_KV;
    const long long j_end = j_limit < entry.len_k ? j_limit : entry.len_k;
    const int ni = tile::rows_from(i0, entry.len_q, BLOCK_Q);
    if (ni <= 0) continue;  // of a shorter sequence
    begin(entry, h, i0, ni);
#pragma unroll 1
    for (long long j0 = tile_of_bias.one_key ? 0 : tile_of_bias.kv_block * BLOCK_KV; j0 < j_end;
         j0 += BLOCK_KV) {
      const int nj = tile::rows_from(j0, entry.len_k, BLOCK_KV);
      const TileBox box = tile::describe_tile(entry, h, i0, ni, j0, nj);
      const int tile_class = tile::classify_tile(p, box);
      if (tile_class != EMPTY) add(box, tile_class, i0, ni, j0, nj);
    }
  }
}

// Stores the tile 16 bytes at a time, if the array's layout allows that and all of the tile's keys
// exist. Returns whether it did.
template <int STRIDE>
__device__ __forceinline__ bool store_vectors(const Params& p, const BiasTile& tile_of_bias,
                                              long long base, const accum_t* sums_smem) {
  constexpr int PIECES = BLOCK_KV / STORED_VECTOR;
  const long long i0 = tile_of_bias.q_block * BLOCK_Q, j0 = tile_of_bias.kv_block * BLOCK_KV;
  storage_t* const data = reinterpret_cast<storage_t*>(p.dbias.data) + base + i0 * p.dbias.row + j0;
  const bool aligned = reinterpret_cast<unsigned long long>(data) % sizeof(StoredVector) == 0;
  if (tile_of_bias.one_query || tile_of_bias.one_key || j0 + BLOCK_KV > p.bias_len_k ||
      p.kind_dbias != number::STORAGE_KIND || p.dbias.col != 1 ||
      p.dbias.row % STORED_VECTOR != 0 || !aligned) {
    return false;
  }
  const int rows = tile::rows_from(i0, p.bias_len_q, BLOCK_Q);
#pragma unroll 2
  for (int n = threadIdx.x; n < rows * PIECES; n += THREADS) {
    const int row = n / PIECES, column = n % PIECES * STORED_VECTOR;
    StoredVector rounded;
#pragma unroll
    for (int x = 0; x < STORED_VECTOR; x += VECTOR) {
      const auto sums = *reinterpret_cast<const Vector*>(sums_smem + row * STRIDE + column + x);
#pragma unroll
      for (int y = 0; y < VECTOR; ++y) number::narrow(sums.x[y], &rounded.x[x + y]);
    }
    *reinterpret_cast<StoredVector*>(data + row * p.dbias.row + column) = rounded;
  }
  return true;
}

// Stores the tile's gradient, whose rows in shared memory are STRIDE elements apart. Rows are
// summed if the bias has one query, columns if it has one key.
template <int STRIDE>
__device__ __forceinline__ void store(const Params& p, const BiasTile& tile_of_bias,
                                      const accum_t* sums_smem) {
  const long long base = tile_of_bias.base(p);
  if constexpr (STRIDE % VECTOR == 0) {
    if (store_vectors<STRIDE>(p, tile_of_bias, base, sums_smem)) return;
  }
  const int rows = tile_of_bias.one_query ? 1 : BLOCK_Q,
            columns = tile_of_bias.one_key ? 1 : BLOCK_KV;
#pragma unroll 1
  for (int n = threadIdx.x; n < rows * columns; n += THREADS) {
    const int row = n / columns, column = n % columns;
    const long long i = tile_of_bias.one_query ? 0 : tile_of_bias.q_block * BLOCK_Q + row;
    const long long j = tile_of_bias.one_key ? 0 : tile_of_bias.kv_block * BLOCK_KV + column;
    if (i >= p.bias_len_q || j >= p.bias_len_k) continue;
    accum_t sum = 0;
    for (int r = row; r < (tile_of_bias.one_query ? BLOCK_Q : row + 1); ++r) {
      for (int c = column; c < (tile_of_bias.one_key ? BLOCK_KV : column + 1); ++c) {
        sum += sums_smem[r * STRIDE + c];
      }
    }
    number::store(p.dbias.data, p.kind_dbias, base + i * p.dbias.row + j * p.dbias.col, sum);
  }
}

}  // namespace bias_tile
