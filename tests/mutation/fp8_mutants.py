"""Faults of calls on codes of float8, each with the test that is there to find it.

They are as those in `cache_mutants`.
"""

from __future__ import annotations

from .cache_mutants import Fault

KERNEL = "kernels_cu/sm90/forward_sm90_fp8.cu"
PRODUCTS, SOFTMAX, PRODUCER, STORAGE = (
    f"kernels_cu/sm90/{x}.cuh"
    for x in ("warpgroup_fp8", "fp8_softmax", "fp8_producer", "fp8_storage")
)
DEQUANTIZE = "kernels_cu/rowwise/dequantize.cu"
TESTS = "cuda/test_forward_sm90_fp8.py::test_"
SCALES = TESTS + "scales_belong_to_rows_heads_or_all"
BY_ROW = "float32 and e4m3 and row-row-row"
BY_HEAD = "float32 and e4m3 and head-row-all"
UNSEEN, WIDENED = TESTS + "unseen_keys_change_no_bit", TESTS + "other_gpus_widen_codes_first"
SPOILT, EDGES = (
    TESTS + "what_is_not_finite_is_where_the_cpu_has_it",
    TESTS + "sizes_at_the_edges_of_tiles",
)

FAULTS = {
    "fp8: columns of a word are swapped": Fault(
        PRODUCTS, "own[0], own[1], even", "own[0], own[1], odd", EDGES, "1-64 and e4m3"
    ),
    "fp8: keys of a word are not in the order of weights": Fault(
        PRODUCTS, "own[2], own[3], even", "own[2], own[3], even ^ 0x0660", EDGES, "1-64 and e4m3"
    ),
    "fp8: even and odd columns are not exchanged in the second half": Fault(
        PRODUCTS, "matrix % 2 ^ lane % 8 / 4", "matrix % 2", EDGES, "1-64 and e4m3"
    ),
    "fp8: transposed rows without the swizzle": Fault(
        PRODUCTS,
        "(2 * block + matrix / 2) ^ first_row % 8",
        "2 * block + matrix / 2",
        EDGES,
        "1-64 and e4m3",
    ),
    "fp8: the second slab of v is the first one": Fault(
        PRODUCTS, "group / 8 * (KEYS", "0 * (KEYS", EDGES, "1-256 and e4m3"
    ),
    "fp8: parts of wide heads are the first one": Fault(
        KERNEL, "x * (PART_ROWS * LINE", "0 * (PART_ROWS * LINE", EDGES, "1-256 and e4m3"
    ),
    "fp8: the output is not rescaled": Fault(
        KERNEL, "fma(sum, alpha[r],", "fma(sum, 1.0f,", EDGES, "1-64 and e4m3"
    ),
    "fp8: the transposed values are not waited for": Fault(
        KERNEL, "shared.transposed_pipeline.wait_full(n);", "", EDGES, "1-128 and e4m3"
    ),
    "fp8: a consumer does not wait for its turn": Fault(
        KERNEL,
        "ptx::named_barrier_sync(PING_PONG + index, TWO_CONSUMERS);",
        "",
        EDGES,
        "1-128 and e4m3",
    ),
    "fp8: the last turn of a work tile is not passed on": Fault(
        KERNEL, "if (has_tiles) pass_turn();", "", EDGES, "1-128 and e4m3"
    ),
    "fp8: a turn is passed on before the first": Fault(
        KERNEL,
        "!decltype(first)::value || n != first_kv_use",
        "!decltype(first)::value || n >= first_kv_use",
        EDGES,
        "1-128 and e4m3",
    ),
    "fp8: masked tiles are not checked for values that are not finite": Fault(
        PRODUCER, "HAS_SCORE || work.is_masked(tile)", "HAS_SCORE", UNSEEN, "e4m3 and row"
    ),
    "fp8: weights are as large as the row's sum": Fault(
        KERNEL, "l[r] *= fp8_softmax::UNSHIFTED;", "", EDGES, "1-64 and e4m3"
    ),
    "fp8: weights larger than e4m3": Fault(
        SOFTMAX,
        "SHIFT = 8, UNSHIFTED = 1.0f / 256",
        "SHIFT = 10, UNSHIFTED = 1.0f / 1024",
        EDGES,
        "1-64 and e4m3",
    ),
    "fp8: warps that see no key of a tile forget the tiles before": Fault(
        KERNEL,
        "alpha[0] = alpha[1] = 1;",
        "alpha[0] = alpha[1] = 0;",
        TESTS + "warps_that_see_no_key_of_a_tile",
        "64 and e4m3",
    ),
    "fp8: factors of the work tile before": Fault(
        PRODUCER,
        "shared.work_scales[WorkPipeline::stage_of(w)]",
        "shared.work_scales[WorkPipeline::stage_of(w + 1)]",
        SCALES,
        BY_ROW,
    ),
    "fp8: factors are not published": Fault(
        PRODUCER, "    __syncwarp();  // the factors\n", "", SCALES, BY_ROW
    ),
    "fp8: the scale of the first row": Fault(
        PRODUCER, "begin + (work.first + row) * p.q_scale.row", "begin", SCALES, BY_ROW
    ),
    "fp8: the scale of another key": Fault(
        PRODUCER, "scales_gmem[row * stride]", "scales_gmem[(rows - 1) * stride]", SCALES, BY_ROW
    ),
    "fp8: scales of keys are not used": Fault(KERNEL, "s[1][x] *= own;", "", SCALES, BY_ROW),
    "fp8: the power of two of a tile's values is lost": Fault(
        KERNEL, "V_SCALE_ROWS ? own * unit_v[r] : own", "own", SCALES, BY_ROW
    ),
    "fp8: the scale of the query's head for values": Fault(
        PRODUCER,
        "*scales_of(p.v_scale, work.entry, head)",
        "scales_of(p.v_scale, work.entry, 0)[1]",
        SCALES,
        BY_HEAD,
    ),
    "fp8: scales of unseen values are multiplied": Fault(
        KERNEL,
        "s[r][x] == 0 ? s[r][x] : s[r][x] * own",
        "s[r][x] * own",
        UNSEEN,
        "e4m3 and row",
    ),
    "fp8: weights are in a unit of values that are not seen": Fault(
        KERNEL, "s[r][x] == 0 ? 0.0f : fabs(own)", "fabs(own)", UNSEEN, "e4m3 and row"
    ),
    "fp8: lanes of a row have units of their own": Fault(
        KERNEL, "lanes <= 2; lanes *= 2", "lanes < 1; lanes *= 2", SCALES, BY_ROW
    ),
    "fp8: masked tiles have the unit of the tile": Fault(
        KERNEL,
        "if (HAS_SCORE || masked) {\n          scale_seen",
        "if (HAS_SCORE) {\n          scale_seen",
        UNSEEN,
        "e4m3 and row",
    ),
    "fp8: values that are not finite stay": Fault(
        PRODUCTS,
        "piece.x[x] &= ~((nonfinite_bytes(piece.x[x]) >> 7) * 0xffu)",
        "piece.x[x] &= ~0u",
        UNSEEN,
        "e4m3 and head",
    ),
    "fp8: values that are not finite are not added": Fault(
        PRODUCTS,
        "c[r][n] += weight[r] * value",
        "c[r][n] += 0",
        SPOILT,
        "e4m3 and mask and -v-",
    ),
    "fp8: transposed values are not published": Fault(
        PRODUCER,
        "      ptx::fence_proxy_async();\n      warpgroup::arrive_warp(shared.transposed",
        "      warpgroup::arrive_warp(shared.transposed",
        EDGES,
        "1-64 and e4m3",
    ),
    "fp8: v is released before it is transposed": Fault(
        PRODUCER, "      shared.v_pipeline.wait_full(n);\n", "", EDGES, "1-64 and e4m3"
    ),
    "fp8: transposed values are overwritten early": Fault(
        PRODUCER,
        "wait_full(n);\n      shared.transposed_pipeline.wait_empty(n);",
        "wait_full(n);",
        EDGES,
        "1-64 and e4m3",
    ),
    "fp8: scales are overwritten early": Fault(
        PRODUCER,
        "        shared.transposed_pipeline.wait_empty(n);\n        if constexpr",
        "        if constexpr",
        SCALES,
        BY_ROW,
    ),
    "fp8: scores do not wait for the scales of their keys": Fault(
        STORAGE, "1 + (SCALE_ROWS ? warpgroup::ARRIVALS_OF_WARP : 0)", "1", SCALES, BY_ROW
    ),
    "fp8: the scale is not applied before rounding": Fault(
        DEQUANTIZE, "code::product(value, factor)", "value", WIDENED, "float32 and e4m3"
    ),
    "fp8: the other format": Fault(
        DEQUANTIZE, "p.format == code::E4M3", "p.format != code::E4M3", WIDENED, "float32 and e4m3"
    ),
}
