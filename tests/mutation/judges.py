"""Tests that judge the mutants of files without a problem in `suite.py`: caches, codes, pieces.

A mutant of such a file is killed if one of its tests fails. Tests run in a process of their own, in
which `changed_file.py` gives the file its changed text.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from .changed_file import GIVEN

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1  # what pytest returns
DOES_NOT_COMPILE = "RuntimeError: g++", "RuntimeError: clang"  # as the emulator's builds say it

# A file; below it, files of tests with functions, without "test_", and with words of their cases.
_TABLE = """
common/cache.cuh
    cuda/test_append.py: a_page_that_is_not_there_is_not_written, a_step_is_what_loops_write
        float32 true, nothing_is_written_where_the_cache_has_no_room
    cuda/test_decode.py: lengths_and_tables_of_a_device_are_held_in_range simt,
        pages_change_no_bit simt 3
common/cache_row.cuh
    cuda/test_cached_codes.py: attention_is_that_over_what_codes_mean int4,
        attention_is_that_over_what_codes_mean int8, every_code_means_its_number int4,
        every_code_means_its_number int8, pages_and_drafts_and_packed_queries_change_no_bit
        int8
common/code.cuh
    cuda/test_cached_codes.py: every_code_means_its_number float8, every_code_means_its_number
        int
    cuda/test_quantize.py: codes_are_those_of_the_cpu float32, codes_are_those_of_the_cpu
        float64, every_number_of_16_bits float16, every_number_of_16_bits float8 float16,
        where_numbers_of_float32_are_subnormal
common/code_row.cuh
    cuda/test_cached_codes.py: new_rows_have_the_codes_of_quantize int4,
        new_rows_have_the_codes_of_quantize int8
common/join.cuh
    cuda/test_pieces.py: keys_join_the_result_before_them 0-simt 40,
        keys_join_the_result_before_them 0-sm90 72
common/merge.cuh
    cuda/test_decode.py: leaves_whose_scores_lie_far_apart simt
common/philox.cuh
    cuda/test_pieces.py: pieces_are_within_the_bound sm80-dtype1-causal
common/rotary.cuh
    cuda/test_append.py: positions_without_angles_are_clamped,
        rows_are_rotated_within_the_bound float32, rows_of_whole_vectors float32
common/tile.cuh
    cuda/test_pieces.py: pieces_are_within_the_bound sm80-dtype1-causal
common/tile_lists.cuh
    cuda/test_tile_lists.py: lists_change_no_bit_and_no_tile sm90-chosen,
        lists_have_the_classes_of_all_tiles_and_rows_in_order
decode/cursor.cuh
    cuda/test_decode.py: every_entry_is_attention_over_what_it_holds simt-f32,
        no_bit_depends_on_the_grid_or_the_schedule simt 3,
        what_the_grid_ahead_writes_at_its_end_is_read simt lengths,
        what_the_grid_ahead_writes_at_its_end_is_read sm80 16 length
decode/results.cuh
    cuda/test_decode.py: every_entry_is_attention_over_what_it_holds simt-f32,
        masks_and_scores simt sink, rows_are_joined_by_warps_or_blocks simt
    cuda/test_decode_whole.py: warps_take_several_leaves_in_turn hopper sink 1500
decode/shared.cuh
    cuda/test_decode_shared.py: no_bit_depends_on_what_is_shared all,
        no_bit_depends_on_what_is_shared entry by
decode/tasks.cuh
    cuda/test_decode.py: every_entry_is_attention_over_what_it_holds simt-f32,
        masks_and_scores simt causal, more_entries_than_lanes simt causal,
        more_entries_than_lanes simt plain, what_the_grid_ahead_writes_at_its_end_is_read simt
        length
    cuda/test_decode_shared.py: no_bit_depends_on_what_is_shared all,
        own_units_are_larger_than_shared_nodes
rowwise/append.cu
    cuda/test_append.py: a_packed_row_finds_its_entry, a_step_is_what_loops_write float32,
        offsets_of_the_device_stay_within_the_rows
    cuda/test_cached_codes.py: new_rows_have_the_codes_of_quantize int8-int4
rowwise/decode_combine.cu
    cuda/test_decode.py: every_entry_is_attention_over_what_it_holds simt-f32,
        masks_and_scores simt sink, more_nodes_than_have_room_in_shared_memory simt,
        no_bit_depends_on_the_grid_or_the_schedule simt 40, rows_are_joined_by_warps_or_blocks
        simt, rows_with_more_nodes_than_a_block_folds_at_once
    cuda/test_decode_shared.py: no_bit_depends_on_what_is_shared short,
        own_units_are_larger_than_shared_nodes, units_of_every_level 512
rowwise/dequantize.cu
    cuda/test_forward_sm90_fp8.py: other_gpus_widen_codes_first float32 e4m3
rowwise/hadamard.cu
    cuda/test_quantize.py: rows_are_spread_within_the_bound 96,
        rows_are_spread_within_the_bound dtype 64
rowwise/quantize.cu
    cuda/test_quantize.py: codes_are_those_of_the_cpu float32, every_number_of_16_bits int4
simt/decode_simt.cu
    cuda/test_decode.py: large_nodes simt, masks_and_scores simt causal
simt/list_tiles.cu
    cuda/test_tile_lists.py: lists_have_the_classes_of_all_tiles_and_rows_in_order
simt/order_tiles.cu
    cuda/test_tile_lists.py: lists_have_the_classes_of_all_tiles_and_rows_in_order
simt/single_tiles.cu
    cuda/test_tile_lists.py: dq_of_tiles_that_one_block_of_keys_alone_sees_is_stored 72-by
simt/epilogue.cuh
    cuda/test_pieces.py: keys_join_the_result_before_them 0-simt 40
sm80/decode_sm80.cu
    cuda/test_cached_codes.py: head_sizes_and_strides int8 256,
        steps_of_few_rows_have_the_bits_of_drafts_of_many int8
    cuda/test_decode.py: no_bit_depends_on_the_grid_or_the_schedule sm80 1,
        no_bit_depends_on_the_grid_or_the_schedule sm80 3, packed_queries sm80,
        what_the_grid_ahead_writes_at_its_end_is_read sm80 16 table
    cuda/test_decode_whole.py: warps_take_several_leaves_in_turn hopper sink 1500,
        a_block_with_a_whole_task_has_the_bits_of_two_kernels sm80 sink
sm80/decode_sm80_shared.cu
    cuda/test_decode_shared.py: no_bit_depends_on_what_is_shared all,
        no_bit_depends_on_what_is_shared entry by, teams_of_any_size 5-4-1-2,
        values_that_are_not_finite_stay_where_they_are_seen true
sm90/forward_sm90.cu
    cuda/test_forward_sm90_masks.py: tiles_end_with_the_last_query_under_a_causal_mask 193
sm90/forward_sm90_fp8.cu
    cuda/test_forward_sm90_fp8.py: scales_belong_to_rows_heads_or_all float32 e4m3
        row-row-row, sizes_at_the_edges_of_tiles 1-128 e4m3, sizes_at_the_edges_of_tiles 1-256
        e4m3, sizes_at_the_edges_of_tiles 1-64 e4m3, unseen_keys_change_no_bit e4m3 row,
        warps_that_see_no_key_of_a_tile 64 e4m3
sm90/fp8_producer.cuh
    cuda/test_forward_sm90_fp8.py: scales_belong_to_rows_heads_or_all float32 e4m3
        head-row-all, scales_belong_to_rows_heads_or_all float32 e4m3 row-row-row,
        sizes_at_the_edges_of_tiles 1-64 e4m3, unseen_keys_change_no_bit e4m3 row
sm90/fp8_softmax.cuh
    cuda/test_forward_sm90_fp8.py: sizes_at_the_edges_of_tiles 1-64 e4m3
sm90/fp8_storage.cuh
    cuda/test_forward_sm90_fp8.py: scales_belong_to_rows_heads_or_all float32 e4m3 row-row-row
sm90/tile_scheduler.cuh
    cuda/test_forward_sm90_masks.py: tiles_end_with_the_last_query_under_a_causal_mask 193
sm90/warpgroup_fp8.cuh
    cuda/test_forward_sm90_fp8.py: sizes_at_the_edges_of_tiles 1-256 e4m3,
        sizes_at_the_edges_of_tiles 1-64 e4m3, unseen_keys_change_no_bit e4m3 head,
        what_is_not_finite_is_where_the_cpu_has_it e4m3 mask -v-
warp/decode_rows.cuh
    cuda/test_decode.py: every_entry_is_attention_over_what_it_holds sm80-f16,
        heads_of_any_size sm80 7, no_bit_depends_on_the_grid_or_the_schedule sm80 1,
        what_the_grid_ahead_writes_at_its_end_is_read sm80 16 page
    cuda/test_decode_shared.py: teams_of_any_size 5-4-1-2
warp/decode_slots.cuh
    cuda/test_cached_codes.py: attention_is_that_over_what_codes_mean int8
warp/fragment_codes.cuh
    cuda/test_cached_codes.py: attention_is_that_over_what_codes_mean int8,
        attention_is_that_over_what_codes_mean int8-int4, every_code_means_its_number float8
warp/fragment_rows.cuh
    cuda/test_pieces.py: keys_join_the_result_before_them 0-sm90 72,
        keys_join_the_result_before_them 3-sm80 33
cupyflash/pieces/compute.py
    cpu/test_streamed.py: queries_that_are_left_out_change_no_bit turned,
        queries_that_are_left_out_change_no_bit window
cupyflash/pieces/heads.py
    frontend/test_streamed_device.py: heads_are_divided_where_each_group_fills_the_device,
        heads_with_all_of_their_keys_have_the_bits_of_one_call plain dhhd
cupyflash/pieces/parts.py
    frontend/test_streamed_device.py: heads_with_all_of_their_keys_have_the_bits_of_one_call
        dropout dhhd
cupyflash/pieces/schedule.py
    cpu/test_streamed.py: queries_at_the_ends_that_see_no_keys_are_left_out
cupyflash/rowwise.py
    cpu/test_cached_codes.py: attention_is_that_over_what_codes_mean int8-int4
reference/cpu/append.py
    cpu/test_cached_codes.py: new_rows_have_the_codes_of_quantize int4,
        new_rows_have_the_codes_of_quantize int8
    frontend/test_append.py: a_step_is_what_loops_write float32
reference/cpu/cache.py
    cpu/test_cached.py: out_and_lse_are_within_the_bound float32, pages_change_no_bit
    cpu/test_cached_codes.py: attention_is_that_over_what_codes_mean int8
    cpu/test_cached_shared.py: sharing_changes_no_bit
reference/cpu/codes.py
    cpu/test_cached_codes.py: attention_is_that_over_what_codes_mean int4,
        every_code_means_its_number float8, every_code_means_its_number int4,
        every_code_means_its_number int8
reference/cpu/decode.py
    cpu/test_cached.py: many_levels_of_nodes, nodes_that_a_mask_shows_or_hides_change_no_bit,
        out_and_lse_are_within_the_bound float32, the_schedule_changes_no_bit
    cpu/test_cached_shared.py: sharing_changes_no_bit
    cpu/test_tile_lists.py: a_score_of_minus_infinity_hides_no_key_of_another_head
reference/cpu/decode_nodes.py
    cpu/test_cached.py: the_schedule_changes_no_bit
    cpu/test_cached_shared.py: sharing_changes_no_bit
reference/cpu/decode_tasks.py
    cpu/test_cached.py: out_and_lse_are_within_the_bound float32
    cpu/test_cached_shared.py: sharing_changes_no_bit, the_schedule_changes_no_bit
reference/cpu/hadamard.py
    frontend/test_hadamard.py: rows_are_multiplied_by_an_orthogonal_matrix 96
reference/cpu/merge.py
    cpu/test_cached.py: leaves_whose_scores_lie_far_apart, out_and_lse_are_within_the_bound
        float32
reference/cpu/quantize.py
    frontend/test_quantize.py: codes_are_those_of_the_specification, every_number_of_16_bits,
        the_smallest_scale
reference/cpu/rope.py
    frontend/test_append.py: rows_are_rotated_within_the_bound float32
reference/cpu/rows_product.py
    cpu/test_cached.py: out_and_lse_are_within_the_bound float32
    cpu/test_cached_codes.py: attention_is_that_over_what_codes_mean int8,
        groups_of_columns_have_their_scales
"""


def _judges() -> dict[str, list[tuple[str, str, list[str]]]]:
    """Return for each file the files of tests, the functions, and the words of cases."""
    found: dict[str, list[tuple[str, str, list[str]]]] = {}
    for line in re.sub(r"\n {8}", " ", _TABLE).strip().splitlines():
        if not line.startswith(" "):
            file = line
            continue
        tests, _, functions = line.strip().partition(": ")
        for function, *words in map(str.split, functions.split(", ")):
            found.setdefault(file, []).append((tests, f"test_{function}", words))
    return found


JUDGES = _judges()


def judge(file: str, text: str, folder: Path) -> tuple[str, str]:
    """Run a file's tests with a changed text: "killed", "survived" or "invalid", and why."""
    changed = folder / "changed"
    changed.write_text(text, encoding="utf-8")
    environment = os.environ | {
        GIVEN: json.dumps([file, str(changed), JUDGES[file]]),
        "CUPYFLASH_CACHE_DIR": str(folder),  # compiled kernels are known by the files on disk
        "HYPOTHESIS_PROFILE": "ci",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "", "--tb=line"]
    command += ["-p", "mutation.changed_file", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, *sorted({str(ROOT / "tests" / tests) for tests, _, _ in JUDGES[file]})],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return "survived", ""
    # A signal is an access to what is not there.
    why = next((x for x in done.stdout.splitlines() if x.startswith("FAILED")), "")
    if done.returncode > 0 and (done.returncode != FAILED or not why):
        raise RuntimeError(done.stdout + done.stderr)
    if any(each in done.stdout for each in DOES_NOT_COMPILE):
        return "invalid", why
    return "killed", why or f"signal {-done.returncode}"
