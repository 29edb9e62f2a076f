// What the backward kernels of tensor cores share, in 16-bit types and in float64: the operands of
// a block, resident and streamed, and where it keeps them.
#pragma once
#include "fragment_gradient.cuh"
#include "fragment_product.cuh"
#include "fragment_tile.cuh"

namespace fragment_backward {

// -- a block of keys and values -------------------------------------------------------------------

// The head whose queries are streamed. It is in shared memory because the sums fill the registers.
struct Head {
  layout::Entry entry;
  memory::Rows q, d_out;
  memory::RowStatistic lse, delta;
  fragment_tile::Classes classes;
  accum_t* dq;  // row 0 of the sums of dq
  long long h;
  long long j0;  // the block's first key
};

// Row 0 of what blocks add a head's dq to: the float32 sums of a 16-bit dq, or dq itself. Where
// WHOLE_DQ, row 0 of dq, whatever its type.
__device__ __forceinline__ accum_t* dq_sums(const Params& p, const layout::Entry& entry,
                                            long long h) {
  if constexpr (WHOLE_DQ) {
    return reinterpret_cast<accum_t*>(p.dq.data + layout::offset(p.dq, entry, h, false) *
                                                      fragment_product::dq_bytes(p));
  } else if constexpr (IS_16_BIT) {
    return reinterpret_cast<accum_t*>(p.dq_accum.data) +
           layout::grouped_offset(p.dq_accum, entry, h);
  } else if constexpr (IS_FLOAT64) {
    return reinterpret_cast<accum_t*>(p.dq.data) + layout::offset(p.dq, entry, h, false);
  } else {
    unknown_element();
  }
}

// Starts the copies of the block's keys and values, and writes to `head_smem` what does not change
// with the head.
template <int K_BYTES, int V_BYTES>
__device__ __forceinline__ void load_keys_and_values(const Params& p, const layout::WorkTile& work,
                                                     int h_kv, long long j0, int nj, char* k_smem,
                                                     char* v_smem, Head* head_smem) {
  if (threadIdx.x == 0) {
    head_smem->entry = work.entry;
    head_smem->j0 = j0;
  }
  fragment::begin_rows<BLOCK_KV, D, K_BYTES>(k_smem, memory::rows(p.k, work.entry, h_kv, true), j0,
                                             nj);
  fragment::begin_rows<BLOCK_KV, D_V, V_BYTES>(v_smem, memory::rows(p.v, work.entry, h_kv, true),
                                               j0, nj);
}

// Whether the keys that this thread copied are finite, as far as the product for dq needs to know.
template <int K_BYTES>
__device__ __forceinline__ bool are_keys_finite(const char* k_smem) {
  if constexpr (ATOMIC_DQ && MAY_MASK) {
    ptx::cp_async_wait_all();
    return fragment::finite_rows<BLOCK_KV, D, K_BYTES>(k_smem);
  }
  return true;
}

// Head `h` of a batch entry, for a block of keys that begins at key j0.
__device__ __forceinline__ Head head_of(const Params& p, const layout::Entry& entry, long long h,
                                        long long j0) {
  return Head{entry,
              memory::rows(p.q, entry, h, false),
              memory::rows(p.d_out, entry, h, false),
              memory::row_statistic(p.lse, entry, h),
              memory::row_statistic(p.delta, entry, h),
              {},
              dq_sums(p, entry, h),
              h,
              j0};
}

// -- a block of queries ---------------------------------------------------------------------------

// The batch entry whose keys and values are streamed. It is in shared memory because the sums fill
// the registers.
struct StreamedEntry {
  layout::Entry entry;
  memory::Rows k, v;
  fragment_tile::Classes classes;
};

}  // namespace fragment_backward
