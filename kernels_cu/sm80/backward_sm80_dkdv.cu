// Tiled attention, backward, gradients of keys and values in 16-bit types by the tensor cores of
// compute capability 8.0 and later: the twin of `backward_dkdv` in reference/cpu/backward.py.
//
// FlashAttention-2 (Dao 2023), Algorithm 2: a block of keys and values is resident, the queries are
// streamed. The sum runs over the batch entries that share the keys, the heads of the group and the
// blocks of queries, in that order. No two blocks write the same element, so the result does not
// depend on the order in which blocks run. With ATOMIC_DQ the kernel also multiplies dS and the
// keys, and adds the product to float32 sums of dq, which are 0 at first, by atomic additions in
// the order in which blocks run; backward_dq_rows.cu converts the sums. Where WHOLE_DQ, a block has
// all keys of a head, and stores dq, which is whole after one product.
//
// Products are accumulated in float32; P and dS are rounded to the storage type before theirs.
//
// A warp computes the scores of its keys with its share of a tile's queries, and writes P and dS to
// shared memory. For dk and dv it has the same keys, all of the tile's queries and a share of the
// columns. A warp that has its keys alone (P_IN_REGISTERS) keeps P and dS in registers instead;
// they go through shared memory only in tiles where masked pairs meet NaN or infinity. With two
// STAGES, the next tile is copied while one is multiplied. With one of wide heads, the next q
// arrives behind the product for dv (LOADS_APART), the next do behind the next scores. Of wide
// heads the dq of a tile is multiplied and added while the next tile is computed (LATE_DQ):
// additions are slow to return, and so they are spread over all of its products.
//
// Where HAS_PARTS, several blocks share the queries of a block of keys: each has some heads of the
// group, and writes a part of dk and dv in float32; backward_sums.cu adds these up in order.
//
// Grid: prod(own_size) * heads_kv * blocks, for each part; packed: heads_kv * blocks.
// Shared memory: the keys, the values, P, dS, the stages of queries and do, lse and delta, the
// head, a number of each warp. What BLOCK_KV and BLOCK_Q may be is asserted in dkdv_storage.cuh.
#include "../common/params.cuh"
#include "../ptx/grid.cuh"
#include "../warp/fragment_gradient_ds.cuh"
#include "../warp/fragment_tile.cuh"
#include "dkdv_dq.cuh"
#include "dkdv_tile.cuh"

namespace {

using namespace dkdv_dq;
using namespace dkdv_tile;

constexpr bool LATE_KEYS = WHOLE_DQ && !WIDE_HEAD;  // they come with the first tile of queries
static_assert(!LATE_DQ || COLUMNS >= 4, "a warp's queries: additions alternate with steps");

using gradient_tile::TileRef;
__device__ __forceinline__ int index_of(TileRef tile) { return static_cast<int>(tile) / 4; }
__device__ __forceinline__ int class_of(TileRef tile) { return static_cast<int>(tile) % 4; }
__device__ __forceinline__ long long first_query(TileRef tile) {
  return static_cast<long long>(static_cast<int>(tile) / 4) * BLOCK_Q;
}

// A copy in registers, so that shared memory is read once.
__device__ __forceinline__ memory::Rows copy_of(const memory::Rows& rows_smem) {
  return {rows_smem.data, rows_smem.row, rows_smem.col, rows_smem.vectors};
}

// -- roles ----------------------------------------------------------------------------------------

template <int WIDTH, class Sum, class Words>
__device__ __forceinline__ void multiply_registers(Sum& sum, Words& left, const char* tile_smem) {
  if constexpr (P_IN_REGISTERS) fragment::multiply_add<WIDTH>(sum, left, tile_smem);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_smem[];
  char* const k_smem = reinterpret_cast<char*>(shared_smem);
  char* const v_smem = k_smem + BLOCK_KV * K_BYTES;
  char* const p_smem = v_smem + BLOCK_KV * V_BYTES;
  char* const first_ds_smem = p_smem + TILE_BYTES;
  char* const stages_smem = p_smem + TILES * TILE_BYTES;
  float* const lse_smem = reinterpret_cast<float*>(stages_smem + STAGES * STAGE_BYTES);
  Head* const head_smem = reinterpret_cast<Head*>(lse_smem + 2 * BLOCK_Q);
  float* const largest_smem = reinterpret_cast<float*>(head_smem + 1);

  // The grid before wrote delta and zeros of dq, or what places blocks. Idle blocks wait, too: the
  // next grid waits for this one alone.
  constexpr bool EARLY = WHOLE_DQ && !HAS_LISTS && !PACKED;
  if constexpr (!EARLY) ptx::wait_for_grids();
  const unsigned int number = layout::interleave_heads(p, blockIdx.x);
  const layout::WorkTile work = layout::work_tile_of(p, number, p.heads_kv, true, BLOCK_KV, false);
  if (work.idle) {
    if constexpr (EARLY) ptx::wait_for_grids();
    return;
  }
  const int h_kv = static_cast<int>(work.head);
  const long long j0 = work.block * BLOCK_KV;
  const int nj = tile::rows_from(j0, work.entry.len_k, BLOCK_KV);
  const int warp = threadIdx.x / ptx::WARP_SIZE;
  const int warp_key = warp / SHARERS * WARP_KEYS;
  const int warp_query = warp % SHARERS * WARP_QUERIES;
  const int sum_key = warp / SUM_SHARERS * SUM_KEYS;
  const ShareK share_k(warp % SUM_SHARERS);
  const ShareV share_v(warp % SUM_SHARERS);
  unsigned long long visited = 0;
  fragment_backward::load_keys_and_values<K_BYTES, V_BYTES>(p, work, h_kv, j0, nj, k_smem, v_smem,
                                                            head_smem);
  if constexpr (EARLY) ptx::wait_for_grids();
  ptx::launch_dependents();
  Dk dk;
  Dv dv;
  matmul::clear(dk);
  matmul::clear(dv);
  fragment_gradient::DsScale ds_scale;

  const bool finite_keys = LATE_KEYS || fragment_backward::are_keys_finite<K_BYTES>(k_smem);

  const long long members = layout::entries_sharing(p);
#pragma unroll 1
  for (int member = 0; member < members; ++member) {
#pragma unroll 1
    for (int n = 0; n < p.group; ++n) {
      if constexpr (HAS_PARTS) {
        const layout::PartOfSum part(p, layout::part_of_keys(p, number), members * p.group);
        const long long head = static_cast<long long>(member) * p.group + n;
        if (head < part.begin || head >= part.end) continue;
      }
      __syncthreads();  // the previous head and its last tile, which other threads may still read
      if (threadIdx.x == 0) {
        const long long h = h_kv * p.group + n;
        const layout::Entry entry = layout::shared_entry(p, head_smem->entry, member);
        *head_smem = fragment_backward::head_of(p, entry, h, head_smem->j0);
      }
      __syncthreads();  // the new head, written by thread 0
      fragment_gradient::RowStatistics statistics;
      const int tiles = static_cast<int>((head_smem->entry.len_q + BLOCK_Q - 1) / BLOCK_Q);
      const auto rows_of = [&](TileRef tile) {
        return index_of(tile) + 1 < tiles
                   ? BLOCK_Q
                   : static_cast<int>(head_smem->entry.len_q - first_query(tile));
      };
      const auto load_q = [&](TileRef tile, int stage) {
        const memory::Rows q = copy_of(head_smem->q);
        fragment::begin_rows<BLOCK_Q, D, K_BYTES>(stages_smem + stage * STAGE_BYTES, q,
                                                  first_query(tile), rows_of(tile));
        if constexpr (LOADS_APART) ptx::cp_async_commit();
      };
      const auto load_do = [&](TileRef tile, int stage) {
        const memory::Rows d_out = copy_of(head_smem->d_out);
        fragment::begin_rows<BLOCK_Q, D_V, V_BYTES>(
            stages_smem + stage * STAGE_BYTES + BLOCK_Q * K_BYTES, d_out, first_query(tile),
            rows_of(tile));
        if constexpr (LOADS_APART) ptx::cp_async_commit();
      };
      const auto load_statistics = [&](TileRef tile) {
        statistics.load(head_smem->lse, head_smem->delta, first_query(tile), rows_of(tile));
      };
      const auto load_tile = [&](TileRef tile, int stage) {
        load_q(tile, stage);
        load_do(tile, stage);
        load_statistics(tile);
      };
      const auto describe = [&](long long i0, int ni) {
        return tile::describe_tile(head_smem->entry, head_smem->h, i0, ni, head_smem->j0, nj);
      };
      const auto next_from = [&](int number) {
        if constexpr (!HAS_MASK) {
          return number < tiles ? TileRef{4 * number + FULL} : TileRef::NONE;
        }
        const fragment_tile::Tile tile = fragment_tile::next_tile<BLOCK_Q>(
            p, head_smem->classes, first_query(TileRef{4 * number}), head_smem->entry.len_q,
            describe);
        const int index = static_cast<int>(tile.first / BLOCK_Q);
        return tile.rows > 0 ? TileRef{4 * index + tile.tile_class} : TileRef::NONE;
      };
      TileRef now = next_from(0);
      // Where WHOLE_DQ: sets to 0 the dq of queries of tiles that are EMPTY, before a tile.
      const auto clear_dq_between = [&](int first, TileRef next) {
        if constexpr (!WHOLE_DQ || !HAS_MASK) return;
        const long long end = next == TileRef::NONE ? head_smem->entry.len_q : first_query(next);
        fragment_product::clear_dq<THREADS>(p, reinterpret_cast<char*>(head_smem->dq),
                                            static_cast<long long>(first) * BLOCK_Q, end);
      };
      clear_dq_between(0, now);
      if (now == TileRef::NONE) continue;
      load_tile(now, 0);
      statistics.store(lse_smem, lse_smem + BLOCK_Q);
      int stage = 0, ds_stage = 0;
      LateDq late{first_ds_smem, nullptr, 0, 1};
#pragma unroll 1
      while (now != TileRef::NONE) {
        // The weight of a missing query is 0 (lse = inf), unless the score mod made its logit
        // infinite.
        const bool ends = HAS_SCORE && rows_of(now) < BLOCK_Q;
        const bool masked = class_of(now) == PARTIAL || nj < BLOCK_KV || ends;
        const bool may_mask = HAS_SCORE || (HAS_MASK && masked);
        char* const q_smem = stages_smem + stage * STAGE_BYTES;
        char* const do_smem = q_smem + BLOCK_Q * K_BYTES;
        char* const ds_smem = first_ds_smem + ds_stage * TILE_BYTES;
        ++visited;

        if constexpr (LOADS_APART) {
          ptx::cp_async_wait<1>();  // q, which was copied before do
        } else {
          ptx::cp_async_wait_all();
        }
        const auto finite_tile = [&] {
          return (LATE_KEYS ? fragment::finite_rows<BLOCK_KV, D, K_BYTES>(k_smem) : finite_keys) &&
                 fragment::finite_rows<BLOCK_Q, D, K_BYTES>(q_smem) &&
                 fragment::finite_rows<BLOCK_Q, D_V, V_BYTES>(do_smem);
        };
        bool has_nonfinite = false;  // of a tile that may have masked pairs
        // Protects the tile, copied by all threads, and the previous stage, P and dS, read by all.
        if (P_IN_REGISTERS && may_mask) {
          has_nonfinite = ptx::barrier_or(!finite_tile());
        } else {
          __syncthreads();  // as above
        }
        const TileRef next = next_from(index_of(now) + 1);
        clear_dq_between(index_of(now) + 1, next);
        if (STAGES == 2 && next != TileRef::NONE) load_tile(next, 1 - stage);

#pragma unroll 1
        for (int part = 0; part < PARTS; ++part) {
          const int query = warp_query + part * PART_QUERIES;
          const fragment_gradient::Corner corner(warp_key, query);
          const float* const lane_lse_smem = lse_smem + corner.column;
          float s[ROWS][COLUMNS];
          unsigned int weights[ROWS][COLUMNS / 2], ds[ROWS][COLUMNS / 2];
          // 2 scores
          const char* const key_rows = k_smem + warp_key * K_BYTES;
          if constexpr (LATE_DQ) {
            LateQuarter<0> quarter;
            quarter.template multiply<false>(late, k_smem);
            constexpr int STEPS = fragment::whole_columns(D) / 16;
            fragment_product::multiply<D, STEPS>(s, key_rows, q_smem + query * K_BYTES,
                                                 [&](int n) { quarter.add(late, n, STEPS); });
          } else {
            fragment_product::multiply<D, UNROLL>(s, key_rows, q_smem + query * K_BYTES);
          }
          const TileBox box = describe(first_query(now), rows_of(now));
          unsigned int kept[ROWS];
          if constexpr (HAS_DROPOUT)
            fragment_gradient::draw_dropout<true, COLUMNS>(p, box, corner, kept);
          // 3 score mod
          // 4 mask
          // 5 probabilities and the gradient of the output's weights
          const bool has_masked =
              fragment_gradient::recompute_probabilities<true, P_IN_REGISTERS ? 0 : P_BYTES>(
                  p, box, class_of(now), masked, s, corner, lane_lse_smem, kept, weights, p_smem);
          if (P_IN_REGISTERS && has_nonfinite) {
            fragment_gradient::store_words<P_BYTES>(weights, corner, p_smem);
          }
          if constexpr (LOADS_APART) {
            ptx::cp_async_wait_all();
            __syncthreads();  // do, copied by all threads
          }
          float dp[ROWS][COLUMNS];
          const char* const value_rows = v_smem + warp_key * V_BYTES;
          if constexpr (LATE_DQ) {
            LateQuarter<1> quarter;
            quarter.template multiply<false>(late, k_smem);
            constexpr int STEPS = fragment::whole_columns(D_V) / 16;
            fragment_product::multiply<D_V, STEPS>(dp, value_rows, do_smem + query * V_BYTES,
                                                   [&](int n) { quarter.add(late, n, STEPS); });
          } else {
            fragment_product::multiply<D_V, UNROLL>(dp, value_rows, do_smem + query * V_BYTES);
          }
          const fragment_gradient::PerQuery<true, ROWS, COLUMNS> delta(lane_lse_smem + BLOCK_Q);
          fragment_gradient::score_gradients<true>(p, has_masked, s, dp, delta, kept, s);
          if constexpr (!P_IN_REGISTERS) has_nonfinite = may_mask && !finite_tile();
          const auto store = [&] {
            fragment_gradient::narrow(s, ds_scale.factor, ds);
            fragment_gradient::store_words<P_BYTES>(ds, corner, ds_smem);
          };
          if constexpr (fragment::Mma::SCALES_DS) {
            if constexpr (!P_IN_REGISTERS) store();
            const bool exceeds = fragment_gradient::largest_of(s) > ds_scale.largest;
            // Protects largest_smem, read by all; and P and dS, written by all warps.
            if (ptx::barrier_or(exceeds || (!P_IN_REGISTERS && has_nonfinite))) {
              if constexpr (!P_IN_REGISTERS)
                has_nonfinite = may_mask;  // the vote does not say which
              rescale_ds(s, dk, part, warp_key, warp_query, largest_smem, ds_smem, ds_scale);
              if constexpr (!P_IN_REGISTERS) {
                store();
                __syncthreads();  // dS, written again by all warps
              }
            } else {
              has_nonfinite = P_IN_REGISTERS && has_nonfinite;
            }
            if constexpr (P_IN_REGISTERS) store();
          } else {
            store();
          }
          // 6 accumulate dv and dk
          if (P_IN_REGISTERS && !has_nonfinite) {
            multiply_registers<D_V>(dv, weights, do_smem + query * V_BYTES);
            multiply_registers<D>(dk, ds, q_smem + query * K_BYTES);
          }
        }
        if constexpr (P_IN_REGISTERS) {
          __syncthreads();  // dS, written by all warps
        } else if constexpr (!fragment::Mma::SCALES_DS) {
          if (may_mask) {
            has_nonfinite = ptx::barrier_or(has_nonfinite);  // P and dS, written by all warps
          } else {
            __syncthreads();  // as above
          }
        }
        // dv and dk from P and dS in shared memory, and dq.
        const char* const p_rows = p_smem + sum_key * P_BYTES;
        const char* const ds_rows = ds_smem + sum_key * P_BYTES;
        const auto dq_gmem = [&] {
          return head_smem->dq + first_query(now) * fragment::whole_columns(D);
        };
        const auto dq_rows = [&] {
          return fragment_product::dq_row(p, reinterpret_cast<char*>(head_smem->dq),
                                          first_query(now));
        };
        if (has_nonfinite) {
          if constexpr (ATOMIC_DQ && !WHOLE_DQ) {
            fragment_product::add_fragments_nonfinite<D, BLOCK_KV, P_BYTES>(
                p, ds_smem, p_smem, k_smem, dq_gmem(), rows_of(now), ds_scale.inverse());
          }
          repair_nonfinite(dk, dv, share_k, share_v, p_rows, ds_rows, q_smem, do_smem);
        }
        // Additions to dq are slow to return, so they alternate with steps of other products.
        Dq dq;
        const auto add_dq = [&](int part, int step, int steps) {
          const ShareQ share = ShareQ(warp % DQ_SHARERS).part(part, DQ_PARTS);
          const int first = warp / DQ_SHARERS * DQ_QUERIES;
          if constexpr (WHOLE_DQ) {
            fragment_product::store_fragments(p, dq, share,
                                              fragment_product::dq_row(p, dq_rows(), first),
                                              rows_of(now) - first, step, steps);
            return;
          }
          fragment_product::add_fragments(dq, share,
                                          dq_gmem() + first / 8 * fragment_product::GROUP_SIZE<D>,
                                          rows_of(now) - first, step, steps);
        };
        constexpr int STEPS = BLOCK_Q / 16;
        if constexpr (LATE && !WHOLE_DQ) {
          LateQuarter<2> third;
          if constexpr (LATE_DQ) third.template multiply<false>(late, k_smem);
          fragment_product::multiply_add<D, BLOCK_Q, P_BYTES, STEPS>(
              dk, ds_rows, q_smem, share_k, [&](int step) {
                if constexpr (LATE_DQ) third.add(late, step, STEPS);
              });
          if constexpr (LOADS_APART) {
            if (next != TileRef::NONE) {
              __syncthreads();  // q, read by all warps
              load_q(next, 0);
              load_statistics(next);
            }
          }
          LateQuarter<3> fourth;
          if constexpr (LATE_DQ) fourth.template multiply<false>(late, k_smem);
          fragment_product::multiply_add<D_V, BLOCK_Q, P_BYTES, STEPS>(
              dv, p_rows, do_smem, share_v, [&](int step) {
                if constexpr (LATE_DQ) fourth.add(late, step, STEPS);
              });
          if constexpr (LATE_DQ) {
            const int first = warp / DQ_SHARERS * DQ_QUERIES;
            late = {ds_smem, dq_gmem() + first / 8 * fragment_product::GROUP_SIZE<D>,
                    rows_of(now) - first, ds_scale.inverse()};
            if (has_nonfinite) {
              add_late<true>(late, k_smem);
              late.valid = 0;
            }
            ds_stage = 1 - ds_stage;
          }
        } else if constexpr (P_IN_REGISTERS || !ATOMIC_DQ) {
          constexpr int AT_ONCE = P_IN_REGISTERS ? 1 : UNROLL;
          const auto nothing = [](int) {};
          if (!P_IN_REGISTERS || has_nonfinite) {
            fragment_product::multiply_add<D_V, BLOCK_Q, P_BYTES, AT_ONCE>(dv, p_rows, do_smem,
                                                                           share_v, nothing);
            fragment_product::multiply_add<D, BLOCK_Q, P_BYTES, AT_ONCE>(dk, ds_rows, q_smem,
                                                                         share_k, nothing);
          }
          if constexpr (ATOMIC_DQ) {
#pragma unroll
            for (int part = 0; part < DQ_PARTS; ++part) {
              multiply_dq(dq, part, ds_smem, k_smem, has_nonfinite, ds_scale);
              add_dq(part, 0, 1);
            }
          }
        } else {
          multiply_dq(dq, 0, ds_smem, k_smem, has_nonfinite, ds_scale);
          fragment_product::multiply_add<D_V, BLOCK_Q, P_BYTES, STEPS>(
              dv, p_rows, do_smem, share_v,
              [&](int step) { add_dq(0, step, 2 * STEPS / DQ_PARTS); });
          if constexpr (DQ_PARTS == 2) multiply_dq(dq, 1, ds_smem, k_smem, has_nonfinite, ds_scale);
          fragment_product::multiply_add<D, BLOCK_Q, P_BYTES, STEPS>(
              dk, ds_rows, q_smem, share_k, [&](int step) {
                add_dq(DQ_PARTS - 1, DQ_PARTS == 2 ? step : STEPS + step, 2 * STEPS / DQ_PARTS);
              });
        }
        if (WHOLE_DQ && has_nonfinite) {
          __syncthreads();  // the tile's dq, written by all threads
          fragment_product::add_fragments_nonfinite<D, BLOCK_KV, P_BYTES>(
              p, ds_smem, p_smem, k_smem, reinterpret_cast<float*>(dq_rows()), rows_of(now),
              ds_scale.inverse());
        }
        if (next != TileRef::NONE) {
          if constexpr (STAGES == 1) {
            __syncthreads();  // the tile, read by all warps
            LOADS_APART ? load_do(next, 0) : load_tile(next, 0);
          } else {
            stage = 1 - stage;
          }
          // Other threads read the previous lse and delta before the barrier above.
          statistics.store(lse_smem, lse_smem + BLOCK_Q);
        }
        now = next;
      }
      if constexpr (LATE_DQ) add_late<false>(late, k_smem);
    }
  }

  // 7 scale and store
  ptx::cp_async_wait_all();
  __syncthreads();  // the keys and values, read by all warps: the results take their memory
  matmul::scale(dk, ds_scale.inverse());
  store_results(p, dk, dv, share_k, share_v, sum_key,
                HAS_PARTS ? layout::part_of_keys(p, number) : 0, head_smem->entry, h_kv,
                head_smem->j0, nj, k_smem, v_smem);
  tile::count_tiles(p, visited);
}
