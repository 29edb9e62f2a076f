"""Faults of how units are counted, begun and joined on a GPU, each with the test that is for it.

See `cache_mutants` for what a fault is.
"""

from __future__ import annotations

from .cache_mutants import DECODED, GRID, JOIN, TASKS, Fault

TENSOR = "kernels_cu/sm80/decode_sm80.cu"
CURSOR, ROWS = "kernels_cu/decode/cursor.cuh", "kernels_cu/warp/decode_rows.cuh"
FORWARD, SCHEDULER = "kernels_cu/sm90/forward_sm90.cu", "kernels_cu/sm90/tile_scheduler.cuh"
SHORTER = "cuda/test_forward_sm90_masks.py::test_tiles_end_with_the_last_query_under_a_causal_mask"
LATE = DECODED + "what_the_grid_ahead_writes_at_its_end_is_read"
MANY, JOINED = DECODED + "more_entries_than_lanes", DECODED + "rows_are_joined_by_warps_or_blocks"
MANY_NODES = DECODED + "rows_with_more_nodes_than_a_block_folds_at_once"

_FAULTS = {
    "keys are copied to where units are still counted": Fault(
        TENSOR,
        "    __syncthreads();  // what is counted, read by all warps\n",
        "",
        DECODED + "packed_queries",
        "sm80",
    ),
    "children of nodes that do not exist are folded": Fault(
        JOIN, "&& node <= last;", "&& true;", MANY_NODES
    ),
    "units of lengths that are no more": Fault(
        CURSOR, "while (schedule.is_outdated());", "while (false);", LATE, "simt and lengths"
    ),
    "one entry is not looked at again": Fault(
        TASKS,
        "return ptx::any_lane(!same);",
        "return ptx::any_lane(!same && ptx::lane_index() == 0);",
        LATE,
        "simt and length",
    ),
    "a length that changes within its leaf is not seen": Fault(
        TASKS,
        "now[n] == keys_[n];",
        "leaves_of(now[n]) == leaves_of(keys_[n]);",
        LATE,
        "simt and length",
    ),
    "keys of pages that are no more": Fault(
        TENSOR,
        "if (guessed && early.entries.differ(found)) {",
        "if (false) {",
        LATE,
        "sm80 and 16 and table",
    ),
    "a guess of pages outlives the lengths": Fault(
        CURSOR, "        same = false;\n", "", LATE, "sm80 and 16 and length"
    ),
    "pages of half of the leaf are not looked at again": Fault(
        ROWS,
        "for (int half = 0; PAGED && half < 2; ++half) {\n      same",
        "for (int half = 0; PAGED && half < 1; ++half) {\n      same",
        LATE,
        "sm80 and 16 and page",
    ),
    "the grids ahead are not waited for": Fault(
        CURSOR,
        "      ptx::wait_for_grids();\n      early = false;",
        "      early = false;",
        LATE,
        "simt and lengths",
    ),
    "entries of lanes before are not passed over": Fault(
        TASKS,
        "rest = unit - (lane > 0 ? before : 0);",
        "rest = unit;",
        MANY,
        "simt and plain",
    ),
    "a lane counts one entry less": Fault(
        TASKS,
        "for (int b = begin; b < begin + each_ && b < p.batch; ++b) {",
        "for (int b = begin; b + 1 < begin + each_ && b < p.batch; ++b) {",
        MANY,
        "simt and plain",
    ),
    "sums of lanes reach half of the warp": Fault(
        TASKS,
        "for (int lanes = 1; lanes < ptx::WARP_SIZE; lanes *= 2) {",
        "for (int lanes = 1; lanes < ptx::WARP_SIZE / 2; lanes *= 2) {",
        MANY,
        "simt and plain",
    ),
    "warps before are not counted": Fault(
        TASKS,
        "sums[n] += other < warp ? of_warp : 0;",
        "sums[n] += 0;",
        MANY,
        "simt and causal",
    ),
    "rows of a block have one place": Fault(
        JOIN,
        "reinterpret_cast<accum_t*>(shared_smem) + place * NODES * ROW",
        "reinterpret_cast<accum_t*>(shared_smem)",
        JOINED,
        "simt",
    ),
    "both warps of a block join one row": Fault(
        JOIN,
        "blockIdx.x * BLOCK_ROWS + place, rows",
        "blockIdx.x * BLOCK_ROWS, rows",
        JOINED,
        "simt",
    ),
    "a node begins with what the one before was": Fault(
        TENSOR,
        "      decode_slots::clear(node);\n",
        "",
        GRID,
        "sm80 and 3",
    ),
    "all rows of queries are the first one": Fault(
        ROWS, "ptx::shuffle(own, row)", "ptx::shuffle(own, 0)", GRID, "sm80 and 1"
    ),
    "queries of a later task are those of the first": Fault(
        TENSOR,
        "      decode_rows::begin_queries(p, task, q_smem);\n      ptx::cp_async_wait_all();",
        "      ptx::cp_async_wait_all();",
        GRID,
        "sm80 and 1",
    ),
    "the first tile of queries is stored as a whole": Fault(
        FORWARD,
        "ptx::shuffle(fragment::warp_row(), 0) < work.rows",
        "work.rows > 0",
        SHORTER,
        "193",
    ),
    "rows of a warp are in two tiles of queries": Fault(
        SCHEDULER, "matmul::round_up(over, fragment::WARP_ROWS)", "over", SHORTER, "193"
    ),
}

FAULTS = {f"gpu: {name}": x for name, x in _FAULTS.items()}
