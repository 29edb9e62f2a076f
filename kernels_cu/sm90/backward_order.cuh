// In which order the consumers of backward_sm90_dkdv.cu take the steps of a tile: what overlaps
// with which product depends on heads, masks and types, because the sums leave few registers.
#pragma once
#include "backward_producer.cuh"
#include "backward_storage.cuh"

namespace backward_order {

using namespace backward_storage;

// Whether each warp scales its dS in float16 by a factor of its own, after a common first one: then
// no warp waits for another one's vote.
constexpr bool SCALE_BY_WARP = IS_FLOAT16 && HAS_WHOLE_TILES;
// Whether probabilities are computed between the steps of the product for dP. Wider heads are
// slower that way.
constexpr bool OVERLAP_DP_SOFTMAX = !SHARE_KEYS && !MAY_MASK && D <= 64 && D_V <= 64;
// Whether a consumer without another one has so many sums that masks must spare registers.
constexpr bool ALONE_WITH_SLABS = ONE_CONSUMER && !ONE_SLAB;
// Whether the mask is evaluated before the product for the scores is issued, or while it is
// multiplied, and then whether before the product for dP is issued, too. All were measured.
constexpr bool MASK_FIRST = SHARE_KEYS || HAS_WHOLE_TILES || ALONE_WITH_SLABS;
constexpr bool MASK_BEFORE_DP = D <= 32 || CHANGES_SCORES;
// Whether dropout is drawn before the product for the scores is issued, while few registers are in
// use, or while it is multiplied.
constexpr bool DRAW_FIRST = CHANGES_SCORES || ALONE_WITH_SLABS;
// Whether FULL tiles have code of their own, without masked pairs.
constexpr bool SPLIT_FULL_TILES =
    HAS_EDGES && !CHANGES_SCORES && !HAS_WHOLE_TILES && !ALONE_WITH_SLABS;
// Whether the product for dv is issued before dS is stored. Both choices were measured.
constexpr bool DV_FIRST = CHANGES_SCORES && !SHARE_KEYS;
// Whether dS goes through shared memory: for dq, or where the consumers share keys.
constexpr bool STORE_DS = ATOMIC_DQ || SHARE_KEYS;
// Whether dq follows dk instead of going before it, and whether the product for dk is issued with
// that for dv, before the consumers wait for each other's dS: where one of them computes all of a
// tile's dq. MASKS: whether pairs may be masked.
constexpr bool DQ_AFTER_DK = ALTERNATE_DQ || DEFER_DQ || ONE_CONSUMER;
template <bool MASKS>
constexpr bool DK_WITH_DV = DEFER_DQ || (ALTERNATE_DQ && !MASKS && IS_BFLOAT16) ||
                            (ONE_CONSUMER && !DV_FIRST && (IS_BFLOAT16 || SCALE_BY_WARP));

// Parts of a tile that have code of their own: then the products for dv and dk of one overlap with
// the scores of the next. Masks in float16 leave too few registers for it.
constexpr int PARTS_AT_ONCE = IS_FLOAT16 && HAS_MASK ? 1 : QUERY_PARTS;

}  // namespace backward_order
