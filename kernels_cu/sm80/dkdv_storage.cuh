// The tiles of backward_sm80_dkdv.cu: what a warp has of them and of the sums, and the bytes that
// they take of shared memory.
#pragma once
#include "../warp/fragment_backward.cuh"

namespace dkdv_storage {

using fragment::WARPS;
using fragment_backward::Head;

// Keys of a warp: 32, if every warp then still has at least 16 queries of a tile.
constexpr bool TALL =
    BLOCK_KV % 32 == 0 && BLOCK_KV <= 32 * WARPS && 512 * WARPS <= BLOCK_Q * BLOCK_KV;
constexpr int WARP_KEYS = TALL ? 32 : 16;
constexpr int SHARERS = WARPS * WARP_KEYS / BLOCK_KV;  // warps that have the same keys
constexpr int WARP_QUERIES = BLOCK_Q / SHARERS;
// A warp that has all of a tile's queries keeps P and dS in registers, as left operands, and works
// on a part of the queries at a time.
constexpr bool P_IN_REGISTERS = SHARERS == 1;
constexpr int PART_QUERIES = !P_IN_REGISTERS                        ? WARP_QUERIES
                             : WARP_QUERIES % 32 == 0 && !HAS_SCORE ? 32
                                                                    : 16;
constexpr int PARTS = WARP_QUERIES / PART_QUERIES;
constexpr int ROWS = WARP_KEYS / 8;
constexpr int COLUMNS = PART_QUERIES / 4;
// Of wide heads, shares are even, and rows of P and dS have no more bytes than they need.
constexpr bool WIDE_HEAD = matmul::larger(D, D_V) > 256;
template <int WIDTH, int OF>
using Share = fragment_product::Share<WIDTH, OF, WIDE_HEAD ? OF : 1>;
// Of dk and dv a warp of wide heads has 32 keys, which read q and do half as often as 16.
constexpr int SUM_KEYS = WIDE_HEAD && BLOCK_KV % 32 == 0 && !P_IN_REGISTERS ? 32 : WARP_KEYS;
constexpr int SUM_ROWS = SUM_KEYS / 8, SUM_SHARERS = WARPS * SUM_KEYS / BLOCK_KV;
using ShareK = Share<D, SUM_SHARERS>;
using ShareV = Share<D_V, SUM_SHARERS>;
// For dq a warp has 32 or 16 of the tile's queries and a share of the columns.
constexpr int DQ_QUERIES = BLOCK_Q % 32 == 0 && BLOCK_Q <= 32 * WARPS ? 32 : 16;
constexpr int DQ_SHARERS = WARPS * DQ_QUERIES / BLOCK_Q;
using ShareQ = Share<D, DQ_SHARERS>;
constexpr int DQ_PARTS = ShareQ::EACH % 4 == 0 ? 2 : 1;  // of the columns, to save registers

// Whether there is room for the dS of the tile before, whose dq is multiplied and added while a
// tile is computed: a quarter of the units of a share with the scores, with dP, with dk and with
// dv.
constexpr bool LATE = WIDE_HEAD && BLOCK_Q >= 64 && !P_IN_REGISTERS;
constexpr int LATE_UNITS = (ShareQ::EACH + 3) / 4;

constexpr int K_BYTES = fragment::row_bytes(D), V_BYTES = fragment::row_bytes(D_V);
constexpr int P_BYTES = WIDE_HEAD && BLOCK_Q <= 32 ? 64 : fragment::row_bytes(BLOCK_Q);
constexpr int TILE_BYTES = BLOCK_KV * P_BYTES;
constexpr int TILES = LATE ? 3 : 2;  // of P, dS, and the dS of the tile before
constexpr int RESIDENT_BYTES = BLOCK_KV * (K_BYTES + V_BYTES) + TILES * TILE_BYTES + 8 * BLOCK_Q +
                               4 * WARPS + static_cast<int>(sizeof(Head));
constexpr int STAGE_BYTES = BLOCK_Q * (K_BYTES + V_BYTES);
constexpr int STAGES = (SHARED_BYTES - RESIDENT_BYTES) / STAGE_BYTES;

static_assert(IS_16_BIT, "16-bit types");
static_assert(SHARERS * BLOCK_KV == WARPS * WARP_KEYS, "BLOCK_KV, THREADS");
static_assert(SHARERS * WARP_QUERIES == BLOCK_Q, "BLOCK_Q, THREADS");
static_assert(WARP_QUERIES % 16 == 0 || (WIDE_HEAD && WARP_QUERIES == 8), "BLOCK_Q, THREADS");
static_assert(DQ_SHARERS * BLOCK_Q == WARPS * DQ_QUERIES, "BLOCK_Q, THREADS");
static_assert(SHARED_BYTES == RESIDENT_BYTES + STAGES * STAGE_BYTES && (STAGES == 1 || STAGES == 2),
              "SHARED_BYTES");

// Whether the next q and do are copied apart, each after the last product that reads this one.
constexpr bool LOADS_APART = LATE && STAGES == 1 && !WHOLE_DQ;
constexpr bool LATE_DQ = LATE && ATOMIC_DQ && !WHOLE_DQ;

}  // namespace dkdv_storage
