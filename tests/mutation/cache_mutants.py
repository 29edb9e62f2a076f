"""Faults of the kernels of a cache, each with the test that is there to find it.

The files are those of the decode kernels, of append and of rope, on the CPU and on a GPU, which the
emulator stands for. A fault is a place of a file and what replaces it.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A mutant that somebody thought of.

    Attributes
    ----------
    file : str
        In the checkout: of `kernels_cu/`, `reference/cpu/` or `cupyflash/`.
    before, after : str
        What stands there once, and what takes its place.
    test : str
        A test, behind "tests/".
    only : str
        Which of its parameters, as pytest's -k takes them; all of them where it is empty.
    """

    file: str
    before: str
    after: str
    test: str
    only: str = ""


MERGE, CACHE, ROTARY = (f"kernels_cu/common/{x}.cuh" for x in ("merge", "cache", "rotary"))
TASKS, CURSOR = (f"kernels_cu/decode/{x}.cuh" for x in ("tasks", "cursor"))
JOIN = "kernels_cu/rowwise/decode_combine.cu"
SIMT, ROWS = "kernels_cu/simt/decode_simt.cu", "kernels_cu/warp/decode_rows.cuh"
APPEND = "kernels_cu/rowwise/append.cu"
DECODED, APPENDED = "cuda/test_decode.py::test_", "cuda/test_append.py::test_"
IN_RANGE = DECODED + "lengths_and_tables_of_a_device_are_held_in_range"
WITHIN = DECODED + "every_entry_is_attention_over_what_it_holds"
GRID = DECODED + "no_bit_depends_on_the_grid_or_the_schedule"
OPTIONS = DECODED + "masks_and_scores"
LOOPS, NO_ROOM = APPENDED + "a_step_is_what_loops_write", APPENDED + "nothing_is_written_where"

ON_A_GPU = {
    "lengths are not clamped": Fault(
        CACHE,
        "layout::clamp(integer<NOW>(p.lengths, p.kind_lengths, b * p.length_step), 0, p.len_k)",
        "integer<NOW>(p.lengths, p.kind_lengths, b * p.length_step)",
        IN_RANGE,
        "simt",
    ),
    "lengths may be one too long": Fault(
        CACHE,
        "b * p.length_step), 0, p.len_k)",
        "b * p.length_step), 0, p.len_k + 1)",
        IN_RANGE,
        "simt",
    ),
    "pages are not clamped": Fault(
        CACHE,
        "static_cast<int>(layout::clamp(page, 0, p.pages - 1))",
        "static_cast<int>(page)",
        IN_RANGE,
        "simt",
    ),
    "pages may be one too many": Fault(
        CACHE,
        "layout::clamp(page, 0, p.pages - 1)",
        "layout::clamp(page, 0, p.pages)",
        IN_RANGE,
        "simt",
    ),
    "the pages of a neighbour": Fault(
        CACHE,
        "b * p.table_batch + number",
        "b / 2 * p.table_batch + number",
        DECODED + "pages_change_no_bit",
        "simt and 3",
    ),
    "the page before": Fault(
        CACHE,
        "number * p.table_step;",
        "(number > 0 ? number - 1 : 0) * p.table_step;",
        DECODED + "pages_change_no_bit",
        "simt and 3",
    ),
    "sizes of pages are taken for powers of two": Fault(
        CACHE,
        "const bool shifts = (size & (size - 1)) == 0;",
        "const bool shifts = true;",
        DECODED + "pages_change_no_bit",
        "simt and 3",
    ),
    "a row further in a page": Fault(
        CACHE,
        "static_cast<int>(j - number * size)",
        "static_cast<int>((j + 1 - number * size) % size)",
        DECODED + "pages_change_no_bit",
        "simt and 3",
    ),
    "the last leaf is left out": Fault(
        TASKS,
        "(end + LEAF - 1) >> LOG_LEAF",
        "end >> LOG_LEAF",
        WITHIN,
        "simt-f32",
    ),
    "the first leaf is left out": Fault(
        TASKS,
        "static_cast<int>(begin >> LOG_LEAF)",
        "static_cast<int>(begin >> LOG_LEAF) + 1",
        WITHIN,
        "simt-f32",
    ),
    "a leaf of 63 keys": Fault(
        CURSOR,
        """const int keys = tile::rows_from(first, task.len_k, LEAF);
        return""",
        """const int keys = tile::rows_from(first, task.len_k, LEAF - 1);
        return""",
        WITHIN,
        "simt-f32",
    ),
    "a leaf with a key that is not held": Fault(
        CURSOR,
        """const int keys = tile::rows_from(first, task.len_k, LEAF);
        return""",
        """const int keys = tile::rows_from(first, task.len_k + 1, LEAF);
        return""",
        WITHIN,
        "simt-f32",
    ),
    "a window that begins one leaf late": Fault(
        CURSOR,
        "matmul::larger(node << shift, task.first)",
        "matmul::larger(node << shift, task.first + 1)",
        WITHIN,
        "simt-f32",
    ),
    "masks of the next key": Fault(
        SIMT,
        "decode::site_of(task, r, now.first_key() + key),",
        "decode::site_of(task, r, now.first_key() + key + 1),",
        OPTIONS,
        "simt and causal",
    ),
    "masks of the query before": Fault(
        TASKS,
        "return i0 + static_cast<unsigned int>(row) / heads;",
        "return i0 + (static_cast<unsigned int>(row) + 1) / heads;",
        OPTIONS,
        "simt and causal",
    ),
    "missing rows of a stage are read": Fault(
        ROWS,
        "ROW < left ? bytes : 0",
        "bytes",
        WITHIN,
        "sm80-f16",
    ),
    "missing rows of strided keys are read": Fault(
        ROWS,
        "key < valid && column < WIDTH ?",
        "column < WIDTH ?",
        DECODED + "heads_of_any_size",
        "sm80 and 7",
    ),
    "the fold begins at the second child": Fault(
        JOIN,
        "for (int n = 0; n < CHILDREN; ++n) {\n      const accum_t other_l",
        "for (int n = 1; n < CHILDREN; ++n) {\n      const accum_t other_l",
        WITHIN,
        "simt-f32",
    ),
    "the fold runs backwards": Fault(
        JOIN,
        "for (int n = 0; n < CHILDREN; ++n) {\n      const accum_t other_l",
        "for (int n = CHILDREN - 1; n >= 0; --n) {\n      const accum_t other_l",
        WITHIN,
        "simt-f32",
    ),
    "sums of one merge are rounded in the other order": Fault(
        SIMT,
        "sums[column] = factors.apply(fresh ? accum_t(0) : sums[column], state.o[r][n]);",
        """sums[column] = factors.keeps || factors.replaces
            ? factors.apply(fresh ? accum_t(0) : sums[column], state.o[r][n])
            : fma(sums[column], factors.own, merge::product(state.o[r][n], factors.other));""",
        DECODED + "large_nodes",
        "simt",
    ),
    "the maximum of the first set": Fault(
        MERGE,
        "other.m > own.m ? other.m : own.m",
        "own.m",
        DECODED + "leaves_whose_scores_lie_far_apart",
        "simt",
    ),
    "a sink for every unit": Fault(
        JOIN,
        "(sink == top ? accum_t(1) : softmax::exponential(sink - top));",
        "(p.len_k / 64) * (sink == top ? accum_t(1) : softmax::exponential(sink - top));",
        OPTIONS,
        "simt and sink",
    ),
    "a level of nodes is left out": Fault(
        JOIN,
        "level < tree.joins || tree.first(level) < tree.last(level); ++level) {",
        "level < tree.joins || (level < 1 && tree.first(level) < tree.last(level)); ++level) {",
        GRID,
        "simt and 40",
    ),
    "nodes lie where their second child does": Fault(
        JOIN,
        "units.slot + matmul::larger(child - units.first_node, 0)",
        "units.slot + matmul::larger(child - units.first_node, 0) + (level > own)",
        DECODED + "more_nodes_than_have_room_in_shared_memory",
        "simt",
    ),
    "shared memory for one node less": Fault(
        JOIN,
        "has_room = end - base <= NODES;",
        "has_room = end - base <= NODES + 1;",
        DECODED + "more_nodes_than_have_room_in_shared_memory",
        "simt",
    ),
    "the record of a task is that of its second unit": Fault(
        CURSOR,
        "if (keeps_records_ && index_ == 0 && ptx::lane_index() == 0) {",
        "if (keeps_records_ && index_ == 1 && ptx::lane_index() == 0) {",
        GRID,
        "simt and 3",
    ),
    "a missing child is folded": Fault(
        JOIN,
        "if (!exists) mine = merge::no_keys();",
        "",
        WITHIN,
        "simt-f32",
    ),
    "rotation by the other sign": Fault(
        ROTARY,
        "inverse ? -sin : sin",
        "inverse ? sin : -sin",
        APPENDED + "rows_are_rotated_within_the_bound",
        "float32",
    ),
    "rotation by the position before": Fault(
        ROTARY,
        "layout::clamp(position, 0, p.rotary_rows - 1)",
        "layout::clamp(position - 1, 0, p.rotary_rows - 1)",
        APPENDED + "rows_are_rotated_within_the_bound",
        "float32",
    ),
    "positions are not clamped": Fault(
        ROTARY,
        "layout::clamp(position, 0, p.rotary_rows - 1)",
        "position",
        APPENDED + "positions_without_angles_are_clamped",
    ),
    "the rest of a row is not copied": Fault(
        ROTARY,
        "for (int c = rotated + lane_column; c < columns;",
        "for (int c = rotated + lane_column; c < rotated;",
        APPENDED + "rows_of_whole_vectors",
        "float32",
    ),
    "rows go to the position before": Fault(
        APPEND,
        "cache::written_length(p, b) - behind;",
        "cache::written_length(p, b) - behind - 1;",
        LOOPS,
        "float32",
    ),
    "rows go to the position behind": Fault(
        APPEND,
        "cache::written_length(p, b) - behind;",
        "cache::written_length(p, b) - behind + 1;",
        LOOPS,
        "float32",
    ),
    "rows go to a neighbour's pages": Fault(
        CACHE,
        "b * p.table.row + at.quotient",
        "b / 2 * p.table.row + at.quotient",
        LOOPS,
        "float32 and True",
    ),
    "rows behind the capacity are written": Fault(
        CACHE,
        "if (position < 0 || position >= p.capacity)",
        "if (position < 0)",
        NO_ROOM + "_the_cache_has_no_room",
    ),
    "rows before the first are written": Fault(
        CACHE,
        "if (position < 0 || position >= p.capacity)",
        "if (position >= p.capacity)",
        NO_ROOM + "_the_cache_has_no_room",
    ),
    "a row is written one behind the capacity": Fault(
        CACHE,
        "position >= p.capacity)",
        "position > p.capacity)",
        NO_ROOM + "_the_cache_has_no_room",
    ),
    "a row of no page is written": Fault(
        CACHE,
        "if (page < 0 || page >= p.pages)",
        "if (page < 0)",
        APPENDED + "a_page_that_is_not_there_is_not_written",
    ),
    "a packed row goes to the entry before": Fault(
        APPEND,
        "behind = layout::clamp(p.offsets[b + 1], 0, p.rows) - row;",
        "behind = layout::clamp(p.offsets[b + 1], 0, p.rows) - row - 1;",
        APPENDED + "a_packed_row_finds_its_entry",
    ),
    "offsets beyond the rows are believed": Fault(
        APPEND,
        "layout::clamp(p.offsets[b + 1], 0, p.rows) - row",
        "p.offsets[b + 1] - row",
        APPENDED + "offsets_of_the_device_stay_within_the_rows",
    ),
}

FAULTS = {f"gpu: {name}": x for name, x in ON_A_GPU.items()}
